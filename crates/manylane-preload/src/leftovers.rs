//! Datagrams that were in a socket's lanes when the library stood aside (`aside.rs`), in memory:
//! to hand them out takes no call.
//!
//! The memory is shared with all that is forked later, and never given back: a datagram is taken
//! once, by whichever process. One behind the other, each is a [`Head`], the sender's address, the
//! payload, and control messages.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use libc::{MSG_CTRUNC, MSG_PEEK, c_int, iovec, msghdr};

use crate::deliver::{Into, Parcel};
use crate::memory::{self, Atomics};

/// Bytes of one mapping, and of the longest datagram with all that belongs to it.
const ROOM: usize = 1 << 20;
const PAYLOAD_MAX: usize = 65536;
const CONTROL_MAX: usize = 512;
const NAME_MAX: usize = 32;
const LONGEST: usize = size_of::<Head>() + NAME_MAX + PAYLOAD_MAX + CONTROL_MAX + 8;

#[repr(C)]
#[derive(Clone, Copy)]
struct Head {
    /// From this one to the next.
    size: u32,
    name: u32,
    payload: u32,
    control: u32,
}

#[repr(C, align(64))]
pub(crate) struct Leftovers {
    /// Bytes that were handed out, and bytes that there are.
    next: AtomicU32,
    end: AtomicU32,
    /// What came after these.
    more: AtomicPtr<Leftovers>,
    bytes: UnsafeCell<[u8; ROOM]>,
}

// SAFETY: bytes before `end` are not written any more, and those behind it only by who fills,
// alone (`fill`).
unsafe impl Sync for Leftovers {}
// SAFETY: zeroes are one that holds nothing, with nothing after it.
unsafe impl Atomics for Leftovers {}

/// A datagram that the calling thread alone hands out.
struct Claimed<'a> {
    parcel: Parcel<'a>,
    control: &'a [u8],
}

impl Leftovers {
    /// One that holds nothing; none when the system has no memory.
    pub(crate) fn new() -> Option<&'static Self> {
        memory::map(1, true)?.first()
    }

    /// Takes all that `receive` brings into a message, until that is nothing. Only before other
    /// threads know of it. False when there was no memory for the rest.
    pub(crate) fn fill(&self, mut receive: impl FnMut(*mut msghdr) -> Option<isize>) -> bool {
        let mut at = self;
        loop {
            if at.end.load(Ordering::Relaxed) as usize + LONGEST > ROOM {
                let Some(more) = Self::new() else { return false };
                at.more.store(ptr::from_ref(more).cast_mut(), Ordering::Release);
                at = more;
            }
            if !at.put(&mut receive) {
                return true;
            }
        }
    }

    /// One of them, for which there is room.
    fn put(&self, receive: &mut impl FnMut(*mut msghdr) -> Option<isize>) -> bool {
        let start = self.end.load(Ordering::Relaxed) as usize;
        let base = self.bytes.get().cast::<u8>();
        let name = base.wrapping_add(start + size_of::<Head>());
        let payload = name.wrapping_add(NAME_MAX);
        let mut control = MaybeUninit::<[u64; CONTROL_MAX / 8]>::uninit();
        let mut piece = iovec { iov_base: payload.cast(), iov_len: PAYLOAD_MAX };
        // SAFETY: zeroes are a value of a msghdr.
        let mut message: msghdr = unsafe { std::mem::zeroed() };
        message.msg_name = name.cast();
        message.msg_namelen = NAME_MAX as u32;
        message.msg_iov = &raw mut piece;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = CONTROL_MAX;
        let Some(len) = receive(&raw mut message).and_then(|len| usize::try_from(len).ok()) else {
            return false;
        };
        let len = len.min(PAYLOAD_MAX);
        let controls = message.msg_controllen.min(CONTROL_MAX);
        let size = (size_of::<Head>() + NAME_MAX + len + controls).next_multiple_of(8);
        let named = message.msg_namelen.min(NAME_MAX as u32);
        let head = Head { size: size as u32, name: named, payload: len as u32, control: controls as u32 };
        // SAFETY: all of it is within the mapping (`fill` made sure of room for the longest),
        // behind `end`, where the caller alone writes; the start is a multiple of eight.
        unsafe {
            base.wrapping_add(start).cast::<Head>().write(head);
            ptr::copy_nonoverlapping(control.as_ptr().cast::<u8>(), payload.wrapping_add(len), controls);
        }
        self.end.store((start + size) as u32, Ordering::Release);
        true
    }

    /// True if there is something to hand out.
    pub(crate) fn has_some(&self) -> bool {
        self.first().is_some()
    }

    /// The part that the next one is in.
    fn first(&self) -> Option<&Self> {
        let mut at = self;
        loop {
            if at.next.load(Ordering::Acquire) < at.end.load(Ordering::Acquire) {
                return Some(at);
            }
            // SAFETY: null, or one of `new`, which is never unmapped.
            at = unsafe { at.more.load(Ordering::Acquire).as_ref() }?;
        }
    }

    /// Bytes of the payload of the next one.
    pub(crate) fn measure(&self) -> Option<usize> {
        self.claim(false).map(|next| next.parcel.payload[0].len())
    }

    fn claim(&self, takes: bool) -> Option<Claimed<'_>> {
        loop {
            let part = self.first()?;
            let start = part.next.load(Ordering::Acquire);
            if start >= part.end.load(Ordering::Acquire) {
                continue;
            }
            let base = part.bytes.get().cast::<u8>().cast_const().wrapping_add(start as usize);
            // SAFETY: one was written here before `end` was.
            let head = unsafe { base.cast::<Head>().read() };
            let next = start + head.size;
            if takes && part.next.compare_exchange(start, next, Ordering::AcqRel, Ordering::Relaxed).is_err()
            {
                continue;
            }
            let bytes = |from: usize, len: u32| {
                // SAFETY: as above; its lengths are those with which it was written.
                unsafe {
                    std::slice::from_raw_parts(base.wrapping_add(size_of::<Head>() + from), len as usize)
                }
            };
            let payload = bytes(NAME_MAX, head.payload);
            return Some(Claimed {
                parcel: Parcel { name: bytes(0, head.name), payload: [payload, &[]] },
                control: bytes(NAME_MAX + payload.len(), head.control),
            });
        }
    }

    /// Hands out the next one, or several, for a call of the program: what that returns. None if
    /// there is nothing.
    pub(crate) fn take(&self, flags: c_int, into: &Into) -> Option<isize> {
        let mut answer = None;
        // As the kernel does it: who peeks for several gets the same one several times.
        for nth in 0..into.room() {
            if nth > 0 && into.is_refused(nth, flags) {
                break;
            }
            let Some(next) = self.claim(flags & MSG_PEEK == 0) else { break };
            let message = match *into {
                Into::Message(message) => message,
                // SAFETY: the program's array of at least so many messages.
                Into::Messages { to, .. } => unsafe { &raw mut (*to.wrapping_add(nth)).msg_hdr },
                _ => ptr::null_mut(),
            };
            // SAFETY: null, or the program's message, which the kernel would read here, too.
            let room = unsafe { message.as_ref() }.map_or(0, |message| message.msg_controllen);
            let got = into.put(nth, &next.parcel, flags);
            if got < 0 {
                return answer.or(Some(got));
            }
            put_control(message, room, next.control);
            answer = Some(if into.is_many() { nth as isize + 1 } else { got });
        }
        answer
    }
}

/// Control messages as far as there is room for all of them; else none, and the flag that says so.
fn put_control(message: *mut msghdr, room: usize, control: &[u8]) {
    // SAFETY: null, or the program's message, which the kernel would write here, too.
    let Some(message) = (unsafe { message.as_mut() }) else { return };
    if control.is_empty() {
        return;
    }
    if message.msg_control.is_null() || room < control.len() {
        message.msg_flags |= MSG_CTRUNC;
        return;
    }
    // SAFETY: the program's buffer, which has room for them.
    unsafe { ptr::copy_nonoverlapping(control.as_ptr(), message.msg_control.cast::<u8>(), control.len()) };
    message.msg_controllen = control.len();
}
