//! Datagrams received ahead: with one system call the owner of a lane takes the datagrams that its
//! socket holds, and its calls return them one by one. Used while the active set is limited
//! (`active_set.rs`).
//!
//! A *prefetch* is the front of a lane's queue, in memory that is shared with all processes forked
//! later. A receive on the lane's kernel socket reads it first (`recv_call.rs`), and a readiness
//! check includes it (`readiness.rs`, `poll.rs`, `epoll/`, `options.rs`). So prefetched datagrams
//! can be received by exactly those threads that could have received them from the kernel: at once
//! by the owner and by a thread that polls, within a slice by a thread that sleeps while the owner
//! is away (`coverage.rs`).
//!
//! # Filling and taking
//!
//! Only the owner of a lane fills its prefetch, in a receive of its own, when the prefetch is
//! empty, without waiting. So no datagram leaves the kernel's queue before a thread wants one, and
//! the order in the lane stays. Any thread may take. One word keeps the state:
//!
//! ```text
//!  EMPTY ──owner: FILLING, recvmmsg(2)──► next..end ──each taker: next + 1, a claim; copies; gives the claim back──► EMPTY
//! ```
//!
//! | stage | by | when it is full or missing |
//! |---|---|---|
//! | filled | the lane's owner | a claim is still out, or another thread is filling: one datagram, from the kernel |
//! | published | the filler; if its thread died, the next thread of its process that checks; a signal handler that interrupted it | only messages that the kernel has marked are there (`msg_len`) |
//! | taken | any thread that may take from the lane | - |
//! | drained after a fallback | the next receive, before all lanes and the kernel's socket | a prefetch that is being filled keeps the socket managed |
//!
//! - A thread with a claim is copying. The prefetch is filled again only when all claims are back.
//!   If a thread dies with a claim, one datagram is lost with it, as it would have been from the
//!   kernel, and the lane goes on one by one.
//! - If a thread dies while it fills, nothing is lost: the kernel has marked each message, and the
//!   next thread of the process finishes the change (`recover`). So does a signal handler that
//!   interrupted the filling thread, because signals arrive at the end of the system call. If its
//!   whole process dies in that call, the datagrams that the call took are lost.
//! - FILLING lasts for one system call that does not wait. Another thread that meets it yields a
//!   few times, then asks the kernel. A thread that is stopped while it fills keeps the datagrams
//!   until it continues or dies.
//! - Falling back: the mode changes first, then prefetches are drained. A filler checks the mode
//!   after it has set FILLING. So either it sees the fallback, or the fallback sees that the
//!   prefetch is not idle (`is_idle`).
//!
//! # What other processes can write
//!
//! A process forked from this one may have other privileges, and may be taken over. So what the
//! kernel follows (message headers, iovecs) is in pages of each process's own ([`Headers`]), and
//! names memory of the prefetch only. Numbers in shared memory are bounded where they are used.
//!
//! # What stays one by one
//!
//! - What would show it: sockets with options that bring control messages, lanes that several
//!   threads share, and edge-triggered epoll entries (the kernel drops one when its queue is
//!   empty).
//! - Sockets with queues (engine `xdp`), whose datagrams are in memory anyway; receives of the
//!   error queue; `recvmmsg`, which is a batch of its own.
//! - What would not pay: see [`Prefetch::should_fill`].
//!
//! Bounds: [`PREFETCH_MAX`] datagrams for each lane, beside its receive buffer. Each takes 2 KiB,
//! up to 64 KiB for long ones, once it is used. Without memory, or after [`MAPPINGS_MAX`] sockets
//! in the life of a process, receives stay one by one.

#[cfg(test)]
mod tests;

use std::cell::UnsafeCell;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use libc::{EAGAIN, MSG_DONTWAIT, MSG_PEEK, c_int, iovec, mmsghdr};

use crate::base::real::{self, call};
use crate::base::recv_bufs::{DatagramRef, RecvBufs};
use crate::fds::sock_fds;
use crate::shared::memory::{ProcessOwned, Zeroed};
use crate::shared::sock::{MULTI_LANE, Member, PLAIN, Shared, Sock};
use crate::shared::{liveness, thread};

/// Max datagrams in a prefetch.
pub(crate) const PREFETCH_MAX: usize = 32;
/// Max sockets of a process that get prefetches: the mappings are never unmapped.
const MAPPINGS_MAX: u32 = 64;
static MAPPED: AtomicU32 = AtomicU32::new(0);

/// First bytes of each datagram, which lie close together, and the rest of the longest datagram.
const HEAD_LEN: usize = 2048;
const TAIL_LEN: usize = 65536 - HEAD_LEN;
/// Bytes of an address of either family.
const SOCKADDR_LEN_MAX: usize = 32;

const FILLING: u64 = 1 << 63;
const GENERATION: u64 = 1 << 32;
const CLAIM: u64 = 1 << 16;
const END_SHIFT: u32 = 8;
/// Bits of a shared length that are the payload's; those above are the address's.
const NAME_SHIFT: u32 = 24;
const LEN_MASK: u32 = (1 << NAME_SHIFT) - 1;
/// Length of a message that the kernel has not written.
const NOT_RECEIVED: u32 = u32::MAX;
/// Yields while another thread fills.
const SPIN_LIMIT: u32 = 64;
/// Fills in a row with less than two datagrams after which only one receive in
/// [`PROBE_INTERVAL`] fills.
const CREDITS_MAX: u32 = 8;
const PROBE_INTERVAL: u32 = 8;

/// Datagrams prefetched from one lane.
#[repr(C)]
pub(crate) struct Prefetch {
    headers: ProcessOwned<Headers>,
    /// FILLING; generation (31 bits), claims (16), end and next (8 each).
    state: AtomicU64,
    /// Liveness token of the filler; 0 if there is none.
    filler: AtomicU64,
    /// Written only by the owner of the lane.
    credits: AtomicU32,
    skipped: AtomicU32,
    /// Lengths of payload and address. Written only by the thread in `filler`.
    lens: [AtomicU32; PREFETCH_MAX],
    names: UnsafeCell<[[u8; SOCKADDR_LEN_MAX]; PREFETCH_MAX]>,
    heads: UnsafeCell<[[u8; HEAD_LEN]; PREFETCH_MAX]>,
    tails: UnsafeCell<[[u8; TAIL_LEN]; PREFETCH_MAX]>,
}

/// Arguments of a fill.
struct Headers {
    /// The state during this process's latest fill: the headers belong to that fill.
    filling: AtomicU64,
    messages: [mmsghdr; PREFETCH_MAX],
    iovecs: [[iovec; 2]; PREFETCH_MAX],
}

// SAFETY: fields that are not atomic are written only by the thread that set FILLING, and read
// only by threads with a claim, or headers by the thread in `filler`: `state` and `filler` keep
// them apart.
unsafe impl Sync for Prefetch {}
// SAFETY: zeroes are an empty prefetch with null headers; `map` sets the headers before it
// publishes the mapping.
unsafe impl Zeroed for Prefetch {}

/// Result of a fill.
pub(crate) enum FillResult {
    /// The prefetch has datagrams.
    Ready,
    /// The kernel's queue is empty.
    Empty,
    /// The call failed; errno has the error.
    Failed,
    /// No fill is possible now, or in this lane: the caller must receive from the kernel.
    Skipped,
}

/// Maps the prefetches of a socket that gets lanes. Requires the socket's lock; runs before any
/// fork.
pub(crate) fn map(sock: &Sock) {
    if sock.prefetches().is_none() && MAPPED.fetch_add(1, Ordering::Relaxed) < MAPPINGS_MAX {
        sock.prefetches.map(Prefetch::init);
    }
}

/// Stops prefetching for the socket, because the program would notice it.
pub(crate) fn disable(shared: &Shared) {
    // SeqCst, as where a fill checks it.
    shared.prefetch_off.store(1, Ordering::SeqCst);
}

impl Sock {
    /// The prefetches of its lanes, by lane.
    #[inline]
    pub(crate) fn prefetches(&self) -> Option<&'static [Prefetch]> {
        // SAFETY: `map` makes them.
        unsafe { self.prefetches.load::<Prefetch>() }
    }
}

/// The prefetch of a lane; none if nothing is prefetched.
#[inline]
pub(crate) fn for_lane(sock: &Sock, lane: usize) -> Option<&'static Prefetch> {
    sock.prefetches()?.get(lane)
}

/// A bit for each lane of `mask` with prefetched datagrams.
#[inline]
pub(crate) fn ready_lanes(sock: &Sock, mask: u64) -> u64 {
    let Some(prefetches) = sock.prefetches() else { return 0 };
    let (mut left, mut ready) = (mask, 0);
    while left != 0 {
        let lane = left & left.wrapping_neg();
        left ^= lane;
        if prefetches.get(lane.trailing_zeros() as usize).is_some_and(Prefetch::has_datagrams) {
            ready |= lane;
        }
    }
    ready
}

/// True if a plain socket still has prefetched datagrams, which are received before all others.
/// Once false, it stays so.
pub(crate) fn has_leftovers(sock: &Sock, shared: &Shared, fd: c_int) -> bool {
    if shared.mode() != PLAIN || shared.retired.load(Ordering::Acquire) & PREFETCH_BIT == 0 {
        return false;
    }
    let prefetches = sock.prefetches().unwrap_or_default();
    if prefetches.iter().any(Prefetch::has_datagrams) {
        return true;
    }
    if prefetches.iter().all(Prefetch::is_idle) {
        sock_fds::mark_lane_empty(sock, shared, fd, 0);
    }
    false
}

/// Bit in `retired`: prefetches may have datagrams. It is the bit of lane 0, which is never
/// retired.
pub(crate) const PREFETCH_BIT: u64 = 1;

/// Receives a datagram that a plain socket still has in its prefetches.
#[cold]
pub(crate) fn drain(
    sock: &Sock,
    shared: &Shared,
    fd: c_int,
    flags: c_int,
    into: &RecvBufs<'_>,
) -> Option<isize> {
    if !has_leftovers(sock, shared, fd) {
        return None;
    }
    let (lane, answer) = sock
        .prefetches()?
        .iter()
        .enumerate()
        .find_map(|(lane, prefetch)| prefetch.recv(flags, into).map(|answer| (lane, answer)))?;
    if flags & MSG_PEEK != 0 {
        thread::set_peeked(sock, lane);
    }
    Some(answer)
}

/// Length of the next datagram in the prefetches of `mask`, and its lane.
pub(crate) fn next_len(sock: &Sock, mask: u64) -> Option<(usize, usize)> {
    let lane = ready_lanes(sock, mask).trailing_zeros() as usize;
    Some((for_lane(sock, lane)?.next_len()?, lane))
}

impl Prefetch {
    fn init(&self) -> bool {
        if !self.headers.detach() {
            return false;
        }
        let own = self.headers.get();
        for slot in 0..PREFETCH_MAX {
            let near = self.heads.get().cast::<[u8; HEAD_LEN]>().wrapping_add(slot);
            let far = self.tails.get().cast::<[u8; TAIL_LEN]>().wrapping_add(slot);
            let name = self.names.get().cast::<[u8; SOCKADDR_LEN_MAX]>().wrapping_add(slot);
            // SAFETY: `slot` is within all of the arrays, and the mapping is not published yet.
            // Its address is the same in all processes that have it, because they are forked.
            unsafe {
                (*own).iovecs[slot] = [
                    iovec { iov_base: near.cast(), iov_len: HEAD_LEN },
                    iovec { iov_base: far.cast(), iov_len: TAIL_LEN },
                ];
                let message = &mut (*own).messages[slot];
                message.msg_hdr.msg_name = name.cast();
                message.msg_hdr.msg_iov = (&raw mut (*own).iovecs[slot]).cast();
                message.msg_hdr.msg_iovlen = 2;
                message.msg_len = NOT_RECEIVED;
            }
        }
        true
    }

    /// Empties it for another socket's lane, and prevents fills until [`reopen`](Self::reopen).
    /// False if a thread is still filling it or copying from it: then it must not be given to
    /// another socket.
    pub(crate) fn reset(&self, mine: liveness::Token) -> bool {
        let filler = self.filler.load(Ordering::Relaxed);
        let is_filled = filler != 0 && !liveness::has_exited(filler);
        // Acquire: the last filler's writes happen before those made here.
        if is_filled
            || self.filler.compare_exchange(filler, mine, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return false;
        }
        let word = self.state.load(Ordering::Acquire);
        let has_claims = word & FILLING == 0 && word & 0xffff_0000 != 0;
        // A new generation, so that no earlier fill is finished here.
        let empty = (word & !(FILLING | 0xffff_ffff)).wrapping_add(GENERATION) & !FILLING;
        if has_claims
            || self.state.compare_exchange(word, empty, Ordering::AcqRel, Ordering::Relaxed).is_err()
        {
            return false;
        }
        self.credits.store(0, Ordering::Relaxed);
        true
    }

    /// Called after [`reset`](Self::reset), once the socket's mode is that of a closed one.
    pub(crate) fn reopen(&self) {
        self.filler.store(0, Ordering::Release);
    }

    /// True if there is a datagram to take.
    #[inline]
    pub(crate) fn has_datagrams(&self) -> bool {
        let word = self.recovered_state();
        word & FILLING == 0 && next(word) < end(word)
    }

    /// True if it is empty and no thread is filling it.
    fn is_idle(&self) -> bool {
        let word = self.recovered_state();
        word & FILLING == 0 && next(word) >= end(word)
    }

    /// The state, after an abandoned fill was finished.
    #[inline]
    fn recovered_state(&self) -> u64 {
        // SeqCst, as where the mode changes: see `fill_locked`.
        let word = self.state.load(Ordering::SeqCst);
        if word & FILLING == 0 { word } else { self.recover(word) }
    }

    #[cold]
    fn recover(&self, word: u64) -> u64 {
        let filler = self.filler.load(Ordering::Acquire);
        let own = thread::acquired_liveness();
        if filler != 0 && filler == own {
            // A fill that a signal interrupted may not have made its call yet. It must then stay as
            // it is.
            if self.count(word) > 0 {
                self.publish_received(word);
            }
        } else if filler != 0 && liveness::has_exited(filler) {
            let own = thread::holder_token();
            if self.filler.compare_exchange(filler, own, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                // It may have begun another fill meanwhile.
                let word = self.state.load(Ordering::SeqCst);
                if word & FILLING != 0 {
                    self.publish_received(word);
                }
                self.filler.store(0, Ordering::Release);
            }
        }
        self.state.load(Ordering::SeqCst)
    }

    /// Messages of the fill `filling` that the kernel has written; 0 if another process made it.
    fn count(&self, filling: u64) -> usize {
        let own = self.headers.get();
        // SAFETY: memory of this process's own; an atomic.
        if unsafe { (*own).filling.load(Ordering::Relaxed) } != filling {
            return 0;
        }
        (0..PREFETCH_MAX).take_while(|slot| self.received_len(*slot) != NOT_RECEIVED).count()
    }

    fn received_len(&self, slot: usize) -> u32 {
        let own = self.headers.get();
        // SAFETY: within the array; the kernel may be writing the header, and only the number is
        // read.
        unsafe { (&raw const (*own).messages[slot].msg_len).read_volatile() }
    }

    /// Ends the fill `filling`, unless a signal handler has done so. Only for the thread in
    /// `filler`. Returns the number of datagrams.
    fn publish_received(&self, filling: u64) -> usize {
        let count = self.count(filling);
        if self.state.load(Ordering::Relaxed) != filling {
            return count;
        }
        for slot in 0..count {
            let own = self.headers.get();
            // SAFETY: within the array; the kernel has written it.
            let named = unsafe { (*own).messages[slot].msg_hdr.msg_namelen }.min(SOCKADDR_LEN_MAX as u32);
            self.lens[slot].store(self.received_len(slot) | named << NAME_SHIFT, Ordering::Relaxed);
        }
        #[cfg(manylane_tsan)]
        self.report_writes(count);
        self.publish(filling, count);
        count
    }

    fn publish(&self, filling: u64, count: usize) {
        let word = filling & !(FILLING | 0xffff_ffff) | (count as u64) << END_SHIFT;
        _ = self.state.compare_exchange(filling, word, Ordering::SeqCst, Ordering::Relaxed);
    }

    /// Lengths of the payload and of the address in a slot, not longer than there is room for.
    fn lens(&self, slot: usize) -> (usize, usize) {
        let lens = self.lens[slot].load(Ordering::Relaxed);
        let (len, named) = (lens & LEN_MASK, lens >> NAME_SHIFT);
        ((len as usize).min(HEAD_LEN + TAIL_LEN), (named as usize).min(SOCKADDR_LEN_MAX))
    }

    /// Takes or peeks at the next datagrams for a call of the program. Returns the call's result.
    pub(crate) fn recv(&self, flags: c_int, into: &RecvBufs<'_>) -> Option<isize> {
        let mut answer = None;
        // As in the kernel: a peek at several messages returns the same one several times.
        for nth in 0..into.capacity() {
            if nth > 0 && into.is_invalid(nth, flags) {
                break;
            }
            let Some(slot) = self.claim(flags & MSG_PEEK == 0) else { break };
            let got = into.write(nth, &self.datagram(slot), flags);
            self.state.fetch_sub(CLAIM, Ordering::Release);
            if got < 0 {
                return answer.or(Some(got));
            }
            answer = Some(if into.is_mmsg() { nth as isize + 1 } else { got });
        }
        answer
    }

    /// Length of the next datagram.
    fn next_len(&self) -> Option<usize> {
        let slot = self.claim(false)?;
        let (len, _) = self.lens(slot);
        self.state.fetch_sub(CLAIM, Ordering::Release);
        Some(len)
    }

    /// Claims the slot of the next datagram. No thread writes to it until the claim is returned.
    #[inline]
    fn claim(&self, takes: bool) -> Option<usize> {
        let mut retries = 0;
        loop {
            let word = self.recovered_state();
            if word & FILLING != 0 {
                retries += 1;
                let mine = thread::acquired_liveness();
                if retries > SPIN_LIMIT || mine != 0 && self.filler.load(Ordering::Relaxed) == mine {
                    return None;
                }
                std::thread::yield_now();
                continue;
            }
            if next(word) >= end(word) {
                return None;
            }
            let claimed = word + CLAIM + u64::from(takes);
            if self.state.compare_exchange_weak(word, claimed, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return Some(next(word));
            }
        }
    }

    /// The datagram in a claimed slot.
    fn datagram(&self, slot: usize) -> DatagramRef<'_> {
        let (len, named) = self.lens(slot);
        // SAFETY: the slot and these lengths are within the arrays; the caller has a claim, so that
        // no thread writes to it.
        unsafe {
            let name = self.names.get().cast::<[u8; SOCKADDR_LEN_MAX]>().add(slot).cast();
            let near = self.heads.get().cast::<[u8; HEAD_LEN]>().add(slot).cast();
            let far = self.tails.get().cast::<[u8; TAIL_LEN]>().add(slot).cast();
            DatagramRef {
                name: std::slice::from_raw_parts(name, named),
                payload: [
                    std::slice::from_raw_parts(near, len.min(HEAD_LEN)),
                    std::slice::from_raw_parts(far, len.saturating_sub(HEAD_LEN)),
                ],
                control: &[],
            }
        }
    }

    /// True if a datagram taken from the current fill came from this address. Only for the owner,
    /// who alone fills.
    #[inline]
    pub(crate) fn has_delivered_from(&self, name: &[u8]) -> bool {
        let word = self.state.load(Ordering::Acquire);
        let names = self.names.get().cast::<[u8; SOCKADDR_LEN_MAX]>();
        // The last one first: most servers answer a datagram before they take the next.
        word & FILLING == 0
            && (0..next(word).min(PREFETCH_MAX)).rev().any(|slot| {
                // SAFETY: within the array; written during the fill, and not since.
                let named = unsafe { &*names.add(slot) };
                named.get(..name.len()) == Some(name)
            })
    }

    /// True if a fill should be tried now. A call for many datagrams costs more than a call for
    /// one, so it must have brought more than one of late, or be a probe.
    #[inline]
    pub(crate) fn should_fill(&self) -> bool {
        if self.credits.load(Ordering::Relaxed) > 0 {
            return true;
        }
        let passed = self.skipped.load(Ordering::Relaxed).wrapping_add(1);
        self.skipped.store(passed, Ordering::Relaxed);
        passed.is_multiple_of(PROBE_INTERVAL)
    }

    /// Records the result of a fill. A fill without a datagram takes a credit only if the caller
    /// `sleeps` next: then the call was one too many.
    fn update_credits(&self, count: usize, sleeps: bool) {
        let credits = self.credits.load(Ordering::Relaxed);
        let credits = match count {
            0 if !sleeps => credits,
            0 | 1 => credits.saturating_sub(1),
            _ => CREDITS_MAX,
        };
        self.credits.store(credits, Ordering::Relaxed);
    }

    /// Fills it from the lane's socket `fd`, for the owner.
    pub(crate) fn fill(&self, shared: &Shared, member: &Member, fd: c_int, sleeps: bool) -> FillResult {
        let mine = member.liveness.load(Ordering::Relaxed);
        let before = self.recovered_state();
        if mine == 0 || before & FILLING != 0 {
            return FillResult::Skipped;
        }
        let filler = self.filler.load(Ordering::Relaxed);
        if filler != 0 && !liveness::has_exited(filler) {
            return FillResult::Skipped;
        }
        if self.filler.compare_exchange(filler, mine, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return FillResult::Skipped;
        }
        let filled = self.fill_locked(shared, fd, sleeps);
        self.filler.store(0, Ordering::Release);
        filled
    }

    fn fill_locked(&self, shared: &Shared, fd: c_int, sleeps: bool) -> FillResult {
        let word = self.state.load(Ordering::SeqCst);
        if word & FILLING != 0 {
            // Left by a filler that died meanwhile.
            self.publish_received(word);
            return FillResult::Ready;
        }
        if next(word) < end(word) {
            return FillResult::Ready;
        }
        if word & 0xffff_0000 != 0 {
            return FillResult::Skipped;
        }
        let filling = (word & !0xffff_ffff).wrapping_add(GENERATION) & !FILLING | FILLING;
        let own = self.headers.get();
        // SAFETY: this process's own memory; there is no claim, and only the filler writes.
        let messages = unsafe {
            (*own).filling.store(filling, Ordering::Relaxed);
            &mut (*own).messages
        };
        for message in &mut *messages {
            message.msg_len = NOT_RECEIVED;
            message.msg_hdr.msg_namelen = SOCKADDR_LEN_MAX as u32;
        }
        let messages = messages.as_mut_ptr();
        if self.state.compare_exchange(word, filling, Ordering::SeqCst, Ordering::Relaxed).is_err() {
            return FillResult::Skipped;
        }
        // Either this load sees the changed mode, or the thread that changed it sees FILLING.
        if shared.mode.load(Ordering::SeqCst) != MULTI_LANE || shared.prefetch_off.load(Ordering::SeqCst) != 0
        {
            self.publish(filling, 0);
            return FillResult::Skipped;
        }
        let errno = real::errno();
        // SAFETY: `init` made the headers, which name memory of this prefetch; only the filler
        // writes to it.
        let got = unsafe { call::recvmmsg(fd, messages, PREFETCH_MAX as u32, MSG_DONTWAIT, ptr::null_mut()) };
        let count = self.publish_received(filling);
        self.update_credits(count, sleeps);
        if got >= 0 {
            return FillResult::Ready;
        }
        if real::errno() != EAGAIN {
            return FillResult::Failed;
        }
        real::set_errno(errno);
        FillResult::Empty
    }

    /// Reports the kernel's writes to ThreadSanitizer, which does not see those of system calls,
    /// and so would miss a race between a fill and the threads that take.
    #[cfg(manylane_tsan)]
    fn report_writes(&self, count: usize) {
        unsafe extern "C" {
            fn __tsan_write_range(address: *const u8, size: libc::c_ulong);
        }
        for slot in 0..count {
            let datagram = self.datagram(slot);
            for part in [datagram.name, datagram.payload[0], datagram.payload[1]] {
                // SAFETY: the runtime records the addresses, and does not access the memory.
                unsafe { __tsan_write_range(part.as_ptr(), part.len() as libc::c_ulong) };
            }
        }
    }
}

#[inline]
fn next(word: u64) -> usize {
    (word & 0xff) as usize
}

#[inline]
fn end(word: u64) -> usize {
    ((word >> END_SHIFT & 0xff) as usize).min(PREFETCH_MAX)
}
