//! Table of the process's descriptors that the library tracks. A lookup of another descriptor costs
//! two loads.

use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};

use libc::c_int;

use crate::shared::memory;
use crate::shared::sock::Sock;

const PAGE_ENTRIES: usize = 4096;
const PAGES: usize = 256;

type Page = [AtomicU32; PAGE_ENTRIES];

/// The largest number that has been a socket or an epoll instance.
static TOP: AtomicI32 = AtomicI32::new(-1);

static TABLE: [AtomicPtr<Page>; PAGES] = [const { AtomicPtr::new(ptr::null_mut()) }; PAGES];

/// Entry of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Entry {
    /// Not tracked.
    None,
    /// A UDP socket, by its index.
    Sock(u32),
    /// An epoll instance, by its index.
    Epoll(u32),
    /// A descriptor of the library's own, hidden from the program.
    Hidden,
}

const KIND_MASK: u32 = 0xc000_0000;
const SOCK: u32 = 0x4000_0000;
const EPOLL: u32 = 0x8000_0000;
const HIDDEN: u32 = 0xc000_0000;

impl Entry {
    #[inline]
    fn from_word(word: u32) -> Self {
        match word & KIND_MASK {
            SOCK => Self::Sock(word & !KIND_MASK),
            EPOLL => Self::Epoll(word & !KIND_MASK),
            HIDDEN => Self::Hidden,
            _ => Self::None,
        }
    }

    fn to_word(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Sock(index) => SOCK | index,
            Self::Epoll(index) => EPOLL | index,
            Self::Hidden => HIDDEN,
        }
    }
}

fn page(fd: c_int) -> Option<&'static Page> {
    let at = TABLE.get(usize::try_from(fd).ok()? / PAGE_ENTRIES)?.load(Ordering::Acquire);
    // SAFETY: null, or a page from memory::map, which is never unmapped.
    unsafe { at.as_ref() }
}

#[inline]
fn word(fd: c_int) -> u32 {
    page(fd).map_or(0, |page| page[fd as usize % PAGE_ENTRIES].load(Ordering::Acquire))
}

/// The entry of `fd`.
#[inline]
pub(crate) fn entry(fd: c_int) -> Entry {
    Entry::from_word(word(fd))
}

/// The UDP socket behind `fd`, or another entry.
#[inline]
pub(crate) fn sock_or_entry(fd: c_int) -> Result<&'static Sock, Entry> {
    let word = word(fd);
    if word & KIND_MASK == SOCK { Ok(Sock::at(word & !KIND_MASK)) } else { Err(Entry::from_word(word)) }
}

/// The UDP socket behind `fd`.
#[inline]
pub(crate) fn sock(fd: c_int) -> Option<&'static Sock> {
    sock_or_entry(fd).ok()
}

/// Sets the entry of `fd`, and returns the one before. None, and nothing is set, if there is no
/// memory for the table or the number is beyond it.
pub(crate) fn set(fd: c_int, entry: Entry) -> Option<Entry> {
    let number = usize::try_from(fd).ok()?;
    let slot = TABLE.get(number / PAGE_ENTRIES)?;
    if slot.load(Ordering::Acquire).is_null() {
        if entry == Entry::None {
            return Some(Entry::None);
        }
        let fresh = memory::map::<Page>(1, false)?;
        // The thread that loses the race leaks a page: at most one per 4096 descriptors.
        _ = slot.compare_exchange(
            ptr::null_mut(),
            fresh.as_ptr().cast_mut(),
            Ordering::AcqRel,
            Ordering::Acquire,
        );
    }
    if entry != Entry::None && entry != Entry::Hidden {
        TOP.fetch_max(fd, Ordering::Relaxed);
    }
    let before = page(fd)?[number % PAGE_ENTRIES].swap(entry.to_word(), Ordering::AcqRel);
    Some(Entry::from_word(before))
}

/// Upper bound (exclusive) of the descriptors of the program's sockets and epoll instances.
pub(crate) fn fd_end() -> c_int {
    TOP.load(Ordering::Relaxed) + 1
}

/// [`set`], if the entry of `fd` still is `found`. Of several threads that found the same, only
/// one gets true.
pub(crate) fn replace(fd: c_int, found: Entry, entry: Entry) -> bool {
    let Some(page) = page(fd) else { return false };
    let slot = &page[fd as usize % PAGE_ENTRIES];
    slot.compare_exchange(found.to_word(), entry.to_word(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

/// The descriptors within `first..=last` that have an entry.
pub(crate) fn tracked(first: u32, last: u32) -> impl Iterator<Item = (c_int, Entry)> {
    let last = last.min((PAGE_ENTRIES * PAGES - 1) as u32);
    (0..PAGES as u32)
        .filter(|at| !TABLE[*at as usize].load(Ordering::Acquire).is_null())
        .flat_map(|at| at * PAGE_ENTRIES as u32..(at + 1) * PAGE_ENTRIES as u32)
        .filter(move |fd| (first..=last).contains(fd))
        .map(|fd| (fd as c_int, entry(fd as c_int)))
        .filter(|(_, entry)| *entry != Entry::None)
}
