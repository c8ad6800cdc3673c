//! An instance of epoll and its entries.

use std::iter::successors;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering};

use libc::{EPOLLIN, EPOLLRDNORM, c_int};

use crate::fds::sock_fds::is_managed;
use crate::fds::table::{self, Entry};
use crate::shared::lock::{Guard, lock};
use crate::shared::memory::{self, Zeroed};
use crate::shared::sock::{PLAIN, Shared, Sock};

/// Max epoll instances of a process that the library tracks, and UDP sockets in each that may have
/// lanes.
const EPOLLS_MAX: usize = 1024;
pub(crate) const ITEMS_MAX: usize = 32;
/// Items of a block. A block is mapped as whole pages.
const BLOCK_ITEMS: usize = 100;

/// The instance is waited for as a descriptor.
pub(crate) const NESTED: u32 = 1;
/// As `NESTED`, and all its sockets are the kernel's alone: there are no leftovers.
pub(crate) const NESTED_DRAINED: u32 = 2;

/// The next wait polls other lanes before the kernel.
pub(crate) const LANES_FIRST: u32 = 1;
/// The last wait did so, and still left some out: the next one polls the kernel first.
pub(crate) const KERNEL_FIRST: u32 = 2;

/// A UDP socket in an epoll instance.
#[repr(C)]
pub(crate) struct Item {
    /// Index of the socket plus 1; 0 if the item is free.
    pub(crate) sock: AtomicU32,
    pub(crate) generation: AtomicU32,
    /// The descriptor that the program added.
    pub(crate) fd: AtomicI32,
    /// The lane that the kernel watches.
    pub(crate) lane: AtomicU32,
    /// A bit for each queue that the kernel watches.
    pub(crate) queues: AtomicU32,
    pub(crate) events: AtomicU32,
    pub(crate) data: AtomicU64,
    /// Leftovers were already reported as an edge.
    pub(crate) edge_reported: AtomicU32,
}

/// An epoll instance.
#[repr(C)]
pub(crate) struct Epoll {
    pub(crate) used: AtomicU32,
    pub(crate) refs: AtomicU32,
    pub(crate) lock: AtomicU64,
    /// Items in use.
    pub(crate) count: AtomicU32,
    /// Items from here on were never used.
    pub(crate) top: AtomicU32,
    /// Waited for as a descriptor: 0, [`NESTED`], [`NESTED_DRAINED`].
    pub(crate) nested: AtomicU32,
    /// It contains the placeholder for leftovers (`nested.rs`).
    pub(crate) placeholder: AtomicU32,
    /// It contains other instances.
    pub(crate) has_nested: AtomicU32,
    /// A fork has given it to another process, whose record does not see what changes here.
    pub(crate) forked: AtomicU32,
    /// Counts waits with queues, to poll the kernel regularly.
    pub(crate) polls: AtomicU32,
    /// A result had no room for events of other lanes: 0, [`LANES_FIRST`], [`KERNEL_FIRST`].
    pub(crate) truncated: AtomicU32,
    /// Counts polls of other lanes, so that each starts with another entry.
    pub(crate) round_robin: AtomicU32,
    /// The thread that waits on it.
    pub(crate) waiter: AtomicU64,
    pub(crate) items: [Item; ITEMS_MAX],
    /// Items for sockets that became plain because all others were taken, and have datagrams left
    /// in lanes.
    overflow: AtomicPtr<ItemBlock>,
}

fn load_block(at: &AtomicPtr<ItemBlock>) -> Option<&'static ItemBlock> {
    // SAFETY: null, or a mapping that is never unmapped.
    unsafe { at.load(Ordering::Acquire).as_ref() }
}

/// A block of items, which stays with the slot of its instance.
#[repr(C)]
struct ItemBlock {
    items: [Item; BLOCK_ITEMS],
    next: AtomicPtr<ItemBlock>,
}

// SAFETY: atomics; zeroes are free items, and no further block.
unsafe impl Zeroed for ItemBlock {}

// SAFETY: atomics; zeroes are a slot that is not in use.
unsafe impl Zeroed for Epoll {}

static EPOLLS: AtomicPtr<Epoll> = AtomicPtr::new(ptr::null_mut());

impl Epoll {
    /// Maps the slots; once, at start.
    pub(crate) fn start() -> bool {
        let Some(epolls) = memory::map::<Epoll>(EPOLLS_MAX, false) else { return false };
        EPOLLS.store(epolls.as_ptr().cast_mut(), Ordering::Release);
        true
    }

    pub(crate) fn all() -> &'static [Epoll] {
        let at = EPOLLS.load(Ordering::Acquire);
        // SAFETY: the array that start() mapped, never unmapped; calls are handled only after it
        // (state::is_ready).
        unsafe { std::slice::from_raw_parts(at, EPOLLS_MAX) }
    }

    /// The instance behind `fd`.
    #[inline]
    pub(crate) fn of(fd: c_int) -> Option<&'static Epoll> {
        match table::entry(fd) {
            Entry::Epoll(index) => Some(Epoll::at(index)),
            _ => None,
        }
    }

    /// The slot `index`, which came from the table.
    #[inline]
    pub(crate) fn at(index: u32) -> &'static Epoll {
        &Self::all()[index as usize % EPOLLS_MAX]
    }

    pub(crate) fn alloc() -> Option<u32> {
        let at = Self::all()
            .iter()
            .position(|at| at.used.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok())?;
        let epoll = &Self::all()[at];
        epoll.refs.store(1, Ordering::Relaxed);
        epoll.lock.store(0, Ordering::Relaxed);
        epoll.count.store(0, Ordering::Relaxed);
        epoll.top.store(0, Ordering::Relaxed);
        epoll.nested.store(0, Ordering::Relaxed);
        epoll.placeholder.store(0, Ordering::Relaxed);
        epoll.has_nested.store(0, Ordering::Relaxed);
        epoll.forked.store(0, Ordering::Relaxed);
        epoll.waiter.store(0, Ordering::Relaxed);
        epoll.truncated.store(0, Ordering::Relaxed);
        epoll.slots(usize::MAX).for_each(|item| item.sock.store(0, Ordering::Relaxed));
        Some(at as u32)
    }

    /// A fork begins. Under the locks: a move of an entry is either in both processes' records, or
    /// sees that it must not be made.
    pub(crate) fn before_fork() {
        for epoll in Self::all().iter().filter(|at| at.used.load(Ordering::Acquire) == 1) {
            let _guard = lock(&epoll.lock, true);
            epoll.forked.store(1, Ordering::Relaxed);
        }
    }

    /// In the child of a fork: locks held by the parent's threads are copies that no thread will
    /// release.
    pub(crate) fn in_child() {
        let used = Self::all().iter().filter(|at| at.used.load(Ordering::Relaxed) == 1);
        used.for_each(|at| at.lock.store(0, Ordering::Relaxed));
    }

    pub(crate) fn index(&self) -> u32 {
        ((ptr::from_ref(self) as usize - Self::all().as_ptr() as usize) / size_of::<Self>()) as u32
    }

    /// While this is held, no other thread moves entries of the instance, by any descriptor.
    pub(crate) fn lock_items(&self) -> Option<Guard<'_>> {
        if self.count.load(Ordering::Acquire) == 0 { None } else { lock(&self.lock, true) }
    }

    /// One of its descriptors.
    pub(crate) fn any_fd(&self) -> Option<c_int> {
        let entry = Entry::Epoll(self.index());
        table::tracked(0, u32::MAX).find(|(_, at)| *at == entry).map(|(fd, _)| fd)
    }

    /// Counts one more descriptor.
    pub(crate) fn acquire(&self) {
        self.refs.fetch_add(1, Ordering::AcqRel);
    }

    /// Counts one descriptor less.
    pub(crate) fn release(&self) {
        if self.refs.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.used.store(0, Ordering::Release);
        }
    }

    /// The first `top` items, used or not.
    pub(crate) fn slots(&self, top: usize) -> impl Iterator<Item = &Item> {
        (0..top).map_while(|at| self.items.get(at).or_else(|| self.overflow_slot(at - ITEMS_MAX)))
    }

    #[cold]
    fn overflow_slot(&self, at: usize) -> Option<&Item> {
        let mut blocks = successors(load_block(&self.overflow), |more| load_block(&more.next));
        blocks.nth(at / BLOCK_ITEMS)?.items.get(at % BLOCK_ITEMS)
    }

    pub(crate) fn items(&self) -> impl Iterator<Item = (&Item, &'static Sock)> {
        let top = self.top.load(Ordering::Acquire) as usize;
        self.slots(top).filter_map(|item| {
            let index = item.sock.load(Ordering::Acquire).checked_sub(1)?;
            let sock = Sock::at(index);
            (sock.generation.load(Ordering::Relaxed) == item.generation.load(Ordering::Relaxed))
                .then_some((item, sock))
        })
    }

    /// The same, starting at another one each time, so that all get reported in turn when a result
    /// has no room for all.
    pub(crate) fn items_round_robin(&self, start: u32) -> impl Iterator<Item = (&Item, &'static Sock)> {
        let first = start.checked_rem(self.count.load(Ordering::Relaxed)).unwrap_or(0) as usize;
        self.items().skip(first).chain(self.items().take(first))
    }

    /// True if all its sockets are plain for good (as in a server that uses SO_REUSEPORT itself),
    /// and watched as the program said.
    pub(crate) fn is_plain(&self) -> bool {
        let is_kernels = |shared: &Shared| shared.mode() == PLAIN && !is_managed(shared);
        self.items().all(|(item, sock)| {
            item.lane.load(Ordering::Relaxed) == 0 && sock.shared().is_some_and(is_kernels)
        })
    }

    /// Adds a block of items.
    pub(crate) fn grow(&self, _guard: &Guard<'_>) -> Option<()> {
        let last = successors(Some(&self.overflow), |at| load_block(at).map(|more| &more.next)).last()?;
        last.store(memory::map::<ItemBlock>(1, false)?.as_ptr().cast_mut(), Ordering::Release);
        Some(())
    }

    pub(crate) fn item(&self, sock: &Sock, fd: c_int) -> Option<&Item> {
        let of = ptr::from_ref(sock);
        self.items()
            .find(|(item, at)| ptr::eq(*at, of) && item.fd.load(Ordering::Relaxed) == fd)
            .map(|(item, _)| item)
    }

    /// True if it contains the socket by another descriptor, too.
    pub(crate) fn has_other_fd(&self, sock: &Sock, fd: c_int) -> bool {
        self.items().any(|(item, at)| ptr::eq(at, sock) && item.fd.load(Ordering::Relaxed) != fd)
    }

    pub(crate) fn remove_item(&self, item: &Item, _guard: &Guard<'_>) {
        if item.sock.swap(0, Ordering::AcqRel) != 0 {
            self.count.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Item {
    /// The read events that the entry asks for.
    pub(crate) fn wanted(&self) -> u32 {
        self.events.load(Ordering::Relaxed) & (EPOLLIN | EPOLLRDNORM) as u32
    }
}
