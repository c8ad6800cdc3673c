//! Datagrams that were in a socket's lanes when the library detached (`seccomp.rs`), in memory:
//! handing them out takes no system call.
//!
//! All processes forked later have a copy of the datagrams, and share the position of the next one:
//! each is taken once, by one process. The memory is never given back. Each record is a
//! [`RecordHeader`], the sender's address, the payload, and control messages.

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use libc::{MSG_PEEK, c_int, iovec, msghdr};

use crate::base::recv_bufs::{DatagramRef, RecvBufs};
use crate::shared::memory::{self, ProcessOwned, Zeroed};

/// Bytes of one mapping, and max bytes of a datagram and its parts.
const CHUNK_SIZE: usize = 1 << 20;
const PAYLOAD_BYTES_MAX: usize = 65536;
const CONTROL_BYTES_MAX: usize = 512;
const NAME_BYTES_MAX: usize = 32;
const RECORD_LEN_MIN: usize = size_of::<RecordHeader>() + NAME_BYTES_MAX;
const RECORD_LEN_MAX: usize = RECORD_LEN_MIN + PAYLOAD_BYTES_MAX + CONTROL_BYTES_MAX + 8;

#[repr(C)]
#[derive(Clone, Copy)]
struct RecordHeader {
    /// Offset of the next record from this one.
    size: u32,
    name: u32,
    payload: u32,
    control: u32,
}

/// A chunk of a queue of datagrams; the first one stands for the queue.
#[repr(C)]
pub(crate) struct LeftoverQueue {
    own: ProcessOwned<Records>,
    /// Bytes of the records taken. Other processes can write anything here.
    read_pos: AtomicU32,
}

#[repr(C, align(64))]
struct Records {
    /// Bytes of all records.
    write_pos: AtomicU32,
    /// The next chunk, with later datagrams.
    next_chunk: AtomicPtr<LeftoverQueue>,
    bytes: UnsafeCell<[u8; CHUNK_SIZE]>,
}

// SAFETY: `records` gives shared references only. Bytes before `write_pos` are never written again;
// those after it are written only by the one thread that fills (`fill`).
unsafe impl Sync for LeftoverQueue {}
// SAFETY: zeroes are an empty one, with no next chunk.
unsafe impl Zeroed for LeftoverQueue {}

impl LeftoverQueue {
    /// An empty one; none if the system is out of memory.
    pub(crate) fn new() -> Option<&'static Self> {
        memory::map::<Self>(1, true)?.first().filter(|fresh| fresh.own.detach())
    }

    fn records(&self) -> &Records {
        // SAFETY: `new` made it this process's own; atomics and a cell, of which zeroes are values.
        unsafe { &*self.own.get() }
    }

    /// Adds all datagrams that `receive` writes into a message, until it returns none. Must be
    /// called before other threads have access. False if there was no memory for all.
    pub(crate) fn fill(&self, mut receive: impl FnMut(*mut msghdr) -> Option<isize>) -> bool {
        let mut at = self;
        loop {
            if at.records().write_pos.load(Ordering::Relaxed) as usize + RECORD_LEN_MAX > CHUNK_SIZE {
                let Some(more) = Self::new() else { return false };
                at.records().next_chunk.store(ptr::from_ref(more).cast_mut(), Ordering::Release);
                at = more;
            }
            if !at.push(&mut receive) {
                return true;
            }
        }
    }

    /// Adds one of them, for which there is room.
    fn push(&self, receive: &mut impl FnMut(*mut msghdr) -> Option<isize>) -> bool {
        let records = self.records();
        let start = records.write_pos.load(Ordering::Relaxed) as usize;
        let base = records.bytes.get().cast::<u8>();
        let name = base.wrapping_add(start + size_of::<RecordHeader>());
        let payload = name.wrapping_add(NAME_BYTES_MAX);
        let mut control = MaybeUninit::<[u64; CONTROL_BYTES_MAX / 8]>::uninit();
        let mut piece = iovec { iov_base: payload.cast(), iov_len: PAYLOAD_BYTES_MAX };
        // SAFETY: zeroes are a value of a msghdr.
        let mut message: msghdr = unsafe { std::mem::zeroed() };
        message.msg_name = name.cast();
        message.msg_namelen = NAME_BYTES_MAX as u32;
        message.msg_iov = &raw mut piece;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = CONTROL_BYTES_MAX;
        let Some(len) = receive(&raw mut message).and_then(|len| usize::try_from(len).ok()) else {
            return false;
        };
        let len = len.min(PAYLOAD_BYTES_MAX);
        let controls = message.msg_controllen.min(CONTROL_BYTES_MAX);
        let size = (size_of::<RecordHeader>() + NAME_BYTES_MAX + len + controls).next_multiple_of(8);
        let named = message.msg_namelen.min(NAME_BYTES_MAX as u32);
        let head =
            RecordHeader { size: size as u32, name: named, payload: len as u32, control: controls as u32 };
        // SAFETY: all of it is within the mapping (`fill` made sure of room for the longest),
        // after `write_pos`, where only the caller writes; the start is a multiple of eight.
        unsafe {
            base.wrapping_add(start).cast::<RecordHeader>().write(head);
            ptr::copy_nonoverlapping(control.as_ptr().cast::<u8>(), payload.wrapping_add(len), controls);
        }
        records.write_pos.store((start + size) as u32, Ordering::Release);
        true
    }

    /// True if a datagram is left.
    pub(crate) fn has_datagrams(&self) -> bool {
        self.first_chunk().is_some()
    }

    /// The chunk with the next datagram.
    fn first_chunk(&self) -> Option<&Self> {
        let mut at = self;
        loop {
            if at.next_record().is_some() {
                return Some(at);
            }
            // SAFETY: null, or one from `new`, which is never unmapped.
            at = unsafe { at.records().next_chunk.load(Ordering::Acquire).as_ref() }?;
        }
    }

    /// The next record of the chunk: its offset and header. Its parts are within the records.
    fn next_record(&self) -> Option<(u32, RecordHeader)> {
        let start = self.read_pos.load(Ordering::Acquire);
        let left = self.records().write_pos.load(Ordering::Acquire).checked_sub(start)?;
        if (left as usize) < RECORD_LEN_MIN || !start.is_multiple_of(8) {
            return None;
        }
        let at = self.records().bytes.get().cast::<u8>().cast_const().wrapping_add(start as usize);
        // SAFETY: a header is not longer than what is left, and aligned to less than 8 bytes.
        let head = unsafe { at.cast::<RecordHeader>().read() };
        let parts = u64::from(head.payload) + u64::from(head.control) + RECORD_LEN_MIN as u64;
        let fits = head.name as usize <= NAME_BYTES_MAX && head.size <= left && parts <= head.size.into();
        fits.then_some((start, head))
    }

    /// Length of the payload of the next one.
    pub(crate) fn next_len(&self) -> Option<usize> {
        self.claim(false).map(|next| next.payload[0].len())
    }

    /// The next datagram; if it `takes` it, only the calling thread returns it.
    fn claim(&self, takes: bool) -> Option<DatagramRef<'_>> {
        loop {
            let part = self.first_chunk()?;
            let Some((start, head)) = part.next_record() else { continue };
            let base = part.records().bytes.get().cast::<u8>().cast_const().wrapping_add(start as usize);
            let next = start + head.size;
            if takes
                && part.read_pos.compare_exchange(start, next, Ordering::AcqRel, Ordering::Relaxed).is_err()
            {
                continue;
            }
            let bytes = |from: usize, len: u32| {
                // SAFETY: within the records, which are not written again.
                unsafe {
                    std::slice::from_raw_parts(
                        base.wrapping_add(size_of::<RecordHeader>() + from),
                        len as usize,
                    )
                }
            };
            let payload = bytes(NAME_BYTES_MAX, head.payload);
            return Some(DatagramRef {
                name: bytes(0, head.name),
                payload: [payload, &[]],
                control: bytes(NAME_BYTES_MAX + payload.len(), head.control),
            });
        }
    }

    /// Writes the next datagram, or several, for a call of the program. Returns the call's result;
    /// none if nothing is left.
    pub(crate) fn recv(&self, flags: c_int, into: &RecvBufs<'_>) -> Option<isize> {
        let mut answer = None;
        // As in the kernel: a peek at several messages returns the same one several times.
        for nth in 0..into.capacity() {
            if nth > 0 && into.is_invalid(nth, flags) {
                break;
            }
            let Some(next) = self.claim(flags & MSG_PEEK == 0) else { break };
            let got = into.write(nth, &next, flags);
            if got < 0 {
                return answer.or(Some(got));
            }
            answer = Some(if into.is_mmsg() { nth as isize + 1 } else { got });
        }
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Another process has written the position.
    #[test]
    fn a_position_that_is_no_record_is_the_end() {
        let left = LeftoverQueue::new().unwrap();
        let mut lens = [5_usize, 9].into_iter();
        assert!(left.fill(|message| {
            // SAFETY: `fill` made the message.
            let piece = unsafe { *(*message).msg_iov };
            // SAFETY: its piece has room; an invalid header, wherever one is looked for.
            unsafe {
                piece.iov_base.cast::<u8>().write_bytes(0xff, 64);
                ((*message).msg_namelen, (*message).msg_controllen) = (0, 0);
            }
            lens.next().map(|len| len as isize)
        }));
        assert_eq!(left.next_len(), Some(5));
        for at in [1, 8, 40, 4096, CHUNK_SIZE as u32, u32::MAX] {
            left.read_pos.store(at, Ordering::Relaxed);
            assert!(!left.has_datagrams(), "{at}");
        }
        left.read_pos.store(0, Ordering::Relaxed);
        assert_eq!(left.claim(true).map(|next| next.payload[0].len()), Some(5));
        assert_eq!(left.next_len(), Some(9));
    }
}
