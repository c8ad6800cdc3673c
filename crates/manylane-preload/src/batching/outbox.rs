//! The queued replies of a lane, and their lock: see `send_batch.rs`.
//!
//! Other processes can write a shared outbox, so what the kernel follows is in pages of each
//! process's own ([`Headers`]), as in `prefetch/`.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::{mem, ptr};

use libc::{EAGAIN, EINTR, c_int, iovec, mmsghdr, pollfd};
use manylane_ipc::report::Reason;

use crate::base::real;
use crate::base::settings::WAIT_SLICE;
use crate::batching::prefetch::PREFETCH_MAX;
use crate::fds::lane_socket;
use crate::shared::memory::{ProcessOwned, Zeroed};
use crate::shared::sock::Shared;
use crate::shared::{liveness, report};
use crate::xdp::frames::TxDatagram;

/// Max length of a batched reply, in bytes: the payload of an Ethernet frame, and some more.
const REPLY_LEN_MAX: usize = 2048;
/// Bytes of an address of either family.
const SOCKADDR_LEN_MAX: usize = 32;
/// Bits of a shared length that are the payload's; those above are the address's.
const NAME_SHIFT: u32 = 24;
const LEN_MASK: u32 = (1 << NAME_SHIFT) - 1;
/// Bit of `range`: a thread is sending.
const SENDING: u32 = 1 << 16;
/// Attempts while another thread writes or sends. A send that waits for buffer space takes longer:
/// then each thread sends by itself.
const SPIN_LIMIT: u32 = 64;

/// Queued replies of a lane.
#[repr(C)]
pub(crate) struct Outbox {
    headers: ProcessOwned<Headers>,
    /// Liveness token of the thread that writes or sends; 0 if none does.
    holder: AtomicU64,
    /// Next and end (8 bits each) of the queued replies; SENDING.
    range: AtomicU32,
    /// Changes with each queued reply; and its value at the last check by another thread.
    seq: AtomicU32,
    seen_seq: AtomicU32,
    /// Send flags of all queued replies.
    flags: AtomicI32,
    /// The longest datagram that the lane has sent without an error.
    sent_len_max: AtomicU32,
    /// Lengths of payload and address.
    lens: [AtomicU32; PREFETCH_MAX],
    names: UnsafeCell<[[u8; SOCKADDR_LEN_MAX]; PREFETCH_MAX]>,
    bytes: UnsafeCell<[[u8; REPLY_LEN_MAX]; PREFETCH_MAX]>,
}

/// Arguments of a send.
struct Headers {
    messages: [mmsghdr; PREFETCH_MAX],
    iovecs: [iovec; PREFETCH_MAX],
}

// SAFETY: only the thread in `holder` writes and reads the fields that are not atomic; `map` in
// `send_batch.rs` sets them up before it publishes the mapping.
unsafe impl Sync for Outbox {}
// SAFETY: zeroes are an empty outbox.
unsafe impl Zeroed for Outbox {}

impl Outbox {
    pub(crate) fn init(&self) -> bool {
        if !self.headers.detach() {
            return false;
        }
        let own = self.headers.get();
        for slot in 0..PREFETCH_MAX {
            let bytes = self.bytes.get().cast::<[u8; REPLY_LEN_MAX]>().wrapping_add(slot);
            let name = self.names.get().cast::<[u8; SOCKADDR_LEN_MAX]>().wrapping_add(slot);
            // SAFETY: `slot` is within all of the arrays, and the mapping is not published yet.
            // Its address is the same in all processes that have it, because they are forked.
            unsafe {
                (*own).iovecs[slot].iov_base = bytes.cast();
                let header = &mut (*own).messages[slot].msg_hdr;
                header.msg_name = name.cast();
                header.msg_iov = &raw mut (*own).iovecs[slot];
                header.msg_iovlen = 1;
            }
        }
        true
    }

    /// Empties it for another socket's lane, and keeps it locked until [`reopen`](Self::reopen).
    /// False if a thread is still writing or sending: then it must not be given to another socket.
    pub(crate) fn reset(&self, mine: liveness::Token) -> bool {
        let Some(guard) = self.lock(mine) else { return false };
        self.range.store(0, Ordering::Relaxed);
        self.sent_len_max.store(0, Ordering::Relaxed);
        mem::forget(guard);
        true
    }

    /// Called after [`reset`](Self::reset), once the socket's mode is that of a closed one.
    pub(crate) fn reopen(&self) {
        self.holder.store(0, Ordering::Release);
    }

    #[inline]
    fn range(&self) -> (usize, usize) {
        let ends = self.range.load(Ordering::Acquire) as usize;
        (ends & 0xff, (ends >> 8 & 0xff).min(PREFETCH_MAX))
    }

    fn set_range(&self, next: usize, end: usize) {
        let ends = if next < end { next | end << 8 } else { 0 };
        self.range.store(ends as u32, Ordering::Release);
    }

    #[inline]
    pub(crate) fn has_replies(&self) -> bool {
        let (next, end) = self.range();
        next < end
    }

    /// True if there are replies, or a thread is just writing one.
    #[inline]
    pub(crate) fn may_have_replies(&self) -> bool {
        self.has_replies() || self.holder.load(Ordering::Acquire) != 0
    }

    /// True if there are replies to be sent with other flags than these.
    pub(crate) fn has_other_flags(&self, flags: c_int) -> bool {
        self.has_replies() && self.flags.load(Ordering::Relaxed) != flags
    }

    /// True if a reply of this length may be queued: the lane has sent one as long.
    #[inline]
    pub(crate) fn accepts_len(&self, len: usize) -> bool {
        len <= REPLY_LEN_MAX.min(self.sent_len_max.load(Ordering::Relaxed) as usize)
    }

    /// The kernel sent a datagram of this length without an error.
    #[inline]
    pub(crate) fn record_sent_len(&self, len: usize) {
        let len = len.min(REPLY_LEN_MAX) as u32;
        if self.sent_len_max.load(Ordering::Relaxed) < len {
            self.sent_len_max.store(len, Ordering::Relaxed);
        }
    }

    /// True if no reply was queued since the last check.
    pub(crate) fn is_overdue(&self) -> bool {
        let seq = self.seq.load(Ordering::Relaxed);
        self.seen_seq.swap(seq, Ordering::Relaxed) == seq
    }

    /// Locks the outbox for writing and sending. None if another thread holds it for too long, or
    /// the calling thread itself, which a signal handler interrupted.
    pub(crate) fn lock(&self, mine: liveness::Token) -> Option<OutboxGuard<'_>> {
        if mine == 0 {
            return None;
        }
        for attempt in 0..SPIN_LIMIT {
            let holder = self.holder.load(Ordering::Relaxed);
            if holder == mine {
                return None;
            }
            let is_free = holder == 0 || liveness::has_exited(holder);
            if is_free
                && self.holder.compare_exchange(holder, mine, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                if holder != 0 {
                    self.recover();
                }
                return Some(OutboxGuard(self));
            }
            if attempt > 0 {
                std::thread::yield_now();
            }
        }
        None
    }

    /// The holder died. If it was sending, it is unknown which replies have left. None is sent
    /// twice.
    #[cold]
    fn recover(&self) {
        if self.range.load(Ordering::Acquire) & SENDING != 0 {
            self.set_range(0, 0);
        }
    }
}

/// The lock of an outbox, held: allows writing and sending.
pub(crate) struct OutboxGuard<'a>(&'a Outbox);

impl Drop for OutboxGuard<'_> {
    fn drop(&mut self) {
        self.0.holder.store(0, Ordering::Release);
    }
}

impl OutboxGuard<'_> {
    fn write(&self, slot: usize, out: &TxDatagram<'_>, len: usize) {
        let name = out.name().unwrap_or_default();
        let named = name.len().min(SOCKADDR_LEN_MAX);
        // SAFETY: `slot` is within the arrays, which no other thread writes or reads while this is
        // held; the caller has checked that the bytes fit.
        unsafe {
            let room = self.0.bytes.get().cast::<[u8; REPLY_LEN_MAX]>().add(slot).cast::<u8>();
            out.copy(std::slice::from_raw_parts_mut(room, len));
            let to = self.0.names.get().cast::<[u8; SOCKADDR_LEN_MAX]>().add(slot).cast::<u8>();
            ptr::copy_nonoverlapping(name.as_ptr(), to, named);
        }
        self.0.lens[slot].store((len | named << NAME_SHIFT) as u32, Ordering::Relaxed);
    }

    /// Queues a reply, to be sent with these flags. Returns its slot; none if there is no room.
    pub(crate) fn append(&self, out: &TxDatagram<'_>, len: usize, flags: c_int) -> Option<usize> {
        let (next, slot) = self.0.range();
        if slot >= PREFETCH_MAX {
            return None;
        }
        self.write(slot, out, len);
        self.0.flags.store(flags, Ordering::Relaxed);
        self.0.seq.store(self.0.seq.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        self.0.set_range(next, slot + 1);
        Some(slot)
    }

    /// Sends all queued replies through `fd`. Returns the number of calls.
    pub(crate) fn send(&self, shared: &Shared, fd: c_int) -> u64 {
        self.send_up_to(shared, fd, None).0
    }

    /// [`send`](Self::send); the error of the reply at `own` is returned, not counted.
    pub(crate) fn send_up_to(&self, shared: &Shared, fd: c_int, own: Option<usize>) -> (u64, Option<c_int>) {
        let flags = self.0.flags.load(Ordering::Relaxed) & (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        let (mut next, end) = self.0.range();
        let (mut calls, mut failed) = (0, None);
        self.0.range.fetch_or(SENDING, Ordering::Release);
        while next < end {
            calls += 1;
            let mut sent = self.sendmmsg(fd, next, end - next, flags);
            if sent <= 0 {
                calls += 1;
                sent = self.retry(fd, next, flags);
            }
            if sent <= 0 {
                let errno = real::errno();
                if own == Some(next) {
                    failed = Some(errno);
                } else {
                    record_failure(shared, fd, errno);
                }
                sent = 1;
            }
            next += sent as usize;
        }
        self.0.set_range(0, 0);
        (calls, failed)
    }

    /// Sends the reply at `slot` by itself, after waiting for buffer space if there was none: the
    /// program cannot send it again.
    fn retry(&self, fd: c_int, slot: usize, flags: c_int) -> c_int {
        if real::errno() == EAGAIN {
            let mut room = [pollfd { fd, events: libc::POLLOUT, revents: 0 }];
            real::ppoll_raw(&mut room, WAIT_SLICE, None);
        }
        self.sendmmsg(fd, slot, 1, flags)
    }

    /// sendmmsg(2) as a direct system call: it is no cancellation point.
    fn sendmmsg(&self, fd: c_int, slot: usize, count: usize, flags: c_int) -> c_int {
        let own = self.0.headers.get();
        for slot in slot..slot + count {
            let lens = self.0.lens[slot].load(Ordering::Relaxed);
            let (len, named) = (lens & LEN_MASK, lens >> NAME_SHIFT);
            // SAFETY: within the arrays; the guard keeps other threads out.
            unsafe {
                (*own).iovecs[slot].iov_len = (len as usize).min(REPLY_LEN_MAX);
                (*own).messages[slot].msg_hdr.msg_namelen = named.min(SOCKADDR_LEN_MAX as u32);
            }
        }
        // SAFETY: within the array.
        let messages = unsafe { &raw mut (*own).messages[slot] };
        loop {
            // SAFETY: `count` headers from `slot` on are within the array and name memory of this
            // outbox; the guard keeps other threads from writing meanwhile.
            let sent = unsafe { libc::syscall(libc::SYS_sendmmsg, fd, messages, count, flags) } as c_int;
            if sent >= 0 || real::errno() != EINTR {
                return sent;
            }
        }
    }
}

/// Records that a reply was lost that the program believes to be sent.
#[cold]
fn record_failure(shared: &Shared, fd: c_int, errno: c_int) {
    report::count_reason(Reason::ReplyFailed, lane_socket::local_addr(fd));
    _ = shared.reply_error.compare_exchange(0, errno, Ordering::Relaxed, Ordering::Relaxed);
    shared.send_batch_off.store(1, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::memory;

    /// Threads without a liveness token: never seen dead.
    const OWN: liveness::Token = 1 << 32 | u16::MAX as u64;
    const OTHER: liveness::Token = 2 << 32 | u16::MAX as u64;

    #[test]
    fn a_locked_outbox_is_not_flushed_by_others() {
        let outbox = &memory::map::<Outbox>(1, true).unwrap()[0];
        assert!(outbox.init());
        let guard = outbox.lock(OTHER).unwrap();
        guard.0.set_range(1, 3);
        assert!(!outbox.reset(OWN));
        assert_eq!((outbox.holder.load(Ordering::Relaxed), outbox.range()), (OTHER, (1, 3)));
        drop(guard);
        assert!(outbox.reset(OWN));
        assert_eq!(outbox.range(), (0, 0));
        // A thread that still uses it for the old lane sends by itself.
        assert!(outbox.lock(OTHER).is_none());
        outbox.reopen();
        assert!(outbox.lock(OTHER).is_some());
    }
}
