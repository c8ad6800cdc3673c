//! Datagrams received ahead: with one system call the owner of a lane takes the datagrams that its
//! socket holds, and its calls return them one by one. Used with `--batch`, and by default while
//! lanes are limited (`active_set.rs`).
//!
//! A *prefetch* is the front of a lane's queue, in memory that is shared with all processes forked
//! later. A receive on the lane's kernel socket reads it first (`recv_call.rs`), and a readiness
//! check includes it (`readiness.rs`, `wait.rs`, `epoll/`, `options.rs`). So prefetched datagrams
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
//! | published | the filler; if it died, the next thread that looks; a signal handler that interrupted it | only messages that the kernel has marked are there (`msg_len`) |
//! | taken | any thread that may take from the lane | - |
//! | drained after a fallback | the next receive, before all lanes and the kernel's socket | a prefetch that is being filled keeps the socket managed |
//!
//! - A thread with a claim is copying. The prefetch is filled again only when all claims are back.
//!   If a thread dies with a claim, one datagram is lost with it, as it would have been from the
//!   kernel, and the lane goes on one by one.
//! - If a thread dies while it fills, nothing is lost: the kernel has marked each message in the
//!   shared memory, and the next thread finishes the change (`recover`). So does a signal handler
//!   that interrupted the filling thread, because signals arrive at the end of the system call.
//! - FILLING lasts for one system call that does not wait. Another thread that meets it yields a
//!   few times, then asks the kernel. A thread that is stopped while it fills keeps the datagrams
//!   until it continues or dies.
//! - Falling back: the mode changes first, then prefetches are drained. A filler checks the mode
//!   after it has set FILLING. So either it sees the fallback, or the fallback sees that the
//!   prefetch is not idle (`is_idle`).
//!
//! # What stays one by one
//!
//! Where prefetching would show: sockets with options that bring control messages, lanes that
//! several threads share, edge-triggered epoll entries (the kernel drops one when its queue is
//! empty), sockets with queues (engine `xdp`), receives of the error queue, and `recvmmsg`, which
//! is a batch of its own. And where it would not pay: see [`Prefetch::should_fill`].
//!
//! Bounds: [`PREFETCH_MAX`] datagrams for each lane, beside its receive buffer. Each takes 2 KiB,
//! up to 64 KiB for long ones, once it is used. Without memory, or after [`MAPPINGS_MAX`] sockets
//! in the life of a process, receives stay one by one.

use std::cell::UnsafeCell;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use libc::{EAGAIN, MSG_DONTWAIT, MSG_PEEK, c_int, iovec, mmsghdr};
use manylane_sys::shim::Reason;

use crate::calls::call;
use crate::memory::{self, Atomics};
use crate::recv_bufs::{DatagramRef, RecvBufs};
use crate::settings::Settings;
use crate::sock::{MAX_LANES, MULTI_LANE, Member, PLAIN, Shared, Sock};
use crate::{lanes, liveness, queues, real, report, start, thread};

/// Datagrams that a prefetch has at most.
pub(crate) const PREFETCH_MAX: usize = 32;
/// Sockets of a process that get prefetches: what is mapped stays so.
const MAPPINGS_MAX: u32 = 64;
static MAPPED: AtomicU32 = AtomicU32::new(0);

/// Bytes of a datagram that are close to those of the others, and the rest of the longest one.
const HEAD_LEN: usize = 2048;
const TAIL_LEN: usize = 65536 - HEAD_LEN;
/// An address of either family.
const SOCKADDR_LEN_MAX: usize = 32;

const FILLING: u64 = 1 << 63;
const GENERATION: u64 = 1 << 32;
const CLAIM: u64 = 1 << 16;
const END_SHIFT: u32 = 8;
/// What the kernel has not written over.
const NOT_RECEIVED: u32 = u32::MAX;
/// Turns that are left to somebody who is filling.
const SPIN_LIMIT: u32 = 64;
/// Fills that may bring less than two datagrams before they are tried now and then only, and how
/// often that is.
const CREDITS_MAX: u32 = 8;
const PROBE_INTERVAL: u32 = 8;

/// What was taken ahead of one lane.
#[repr(C, align(64))]
pub(crate) struct Prefetch {
    /// FILLING; generation (31 bits), claims (16), end and next (8 each).
    state: AtomicU64,
    /// The life of who fills.
    filler: AtomicU64,
    /// Written by the owner of the lane alone.
    credits: AtomicU32,
    skipped: AtomicU32,
    headers: UnsafeCell<[mmsghdr; PREFETCH_MAX]>,
    iovecs: UnsafeCell<[[iovec; 2]; PREFETCH_MAX]>,
    names: UnsafeCell<[[u8; SOCKADDR_LEN_MAX]; PREFETCH_MAX]>,
    heads: UnsafeCell<[[u8; HEAD_LEN]; PREFETCH_MAX]>,
    tails: UnsafeCell<[[u8; TAIL_LEN]; PREFETCH_MAX]>,
}

// SAFETY: what is not atomic is written by who says FILLING, and read by who has a claim: `word`
// keeps them apart.
unsafe impl Sync for Prefetch {}
// SAFETY: zeroes are a prefetch that is empty, with headers that point nowhere; `map` sets them
// before anybody knows of it.
unsafe impl Atomics for Prefetch {}

/// What a fill came to.
pub(crate) enum FillResult {
    /// There is something in the prefetch.
    Ready,
    /// The kernel has nothing.
    Empty,
    /// The call failed, and says so.
    Failed,
    /// Not now, or not here: the kernel is to be asked for one.
    Skipped,
}

/// Maps the prefetches of a socket that gets lanes, if batches are asked for. Under the socket's
/// lock, before any fork.
pub(crate) fn map(sock: &Sock) {
    let Some(settings) = start::settings().filter(|settings| settings.batch > 1) else { return };
    if sock.prefetches().is_some() || MAPPED.fetch_add(1, Ordering::Relaxed) >= MAPPINGS_MAX {
        return;
    }
    let Some(prefetches) = memory::map::<Prefetch>(settings.lanes.min(MAX_LANES), true) else { return };
    prefetches.iter().for_each(Prefetch::init);
    sock.set_prefetches(prefetches);
}

/// From now on nothing is taken ahead of the socket's lanes.
pub(crate) fn disable(shared: &Shared, fd: c_int, why: Reason) {
    shared.prefetch_off.fetch_or(reason_bit(why), Ordering::SeqCst);
    count_reasons(shared, fd);
}

/// Counts why lanes go one by one though batches were asked for: each reason once for a socket.
pub(crate) fn count_reasons(shared: &Shared, fd: c_int) {
    let with_queues = queues::is_open(shared);
    let has_any = shared.mode() == MULTI_LANE || with_queues;
    let unasked = |settings: &Settings| settings.batch <= 1 || settings.batch_when_limited;
    if !has_any || start::settings().is_none_or(unasked) {
        return;
    }
    let mut all = shared.prefetch_off.load(Ordering::SeqCst);
    if shared.oversubscribed.load(Ordering::Relaxed) != 0 {
        all |= reason_bit(Reason::NoPrefetchShared);
    }
    if with_queues {
        all |= reason_bit(Reason::NoPrefetchQueues);
    }
    let fresh = all & !shared.counted_reasons.fetch_or(all, Ordering::AcqRel);
    for why in Reason::ALL.into_iter().filter(|why| fresh & reason_bit(*why) != 0) {
        report::count_reason(why, lanes::local_addr(fd));
    }
}

fn reason_bit(why: Reason) -> u32 {
    1 << why as u32
}

/// The prefetch of a lane; none where everything is one by one.
#[inline]
pub(crate) fn for_lane(sock: &Sock, lane: usize) -> Option<&'static Prefetch> {
    sock.prefetches()?.get(lane)
}

/// A bit for each lane of `mask` of which something is held.
#[inline]
pub(crate) fn ready_lanes(sock: &Sock, mask: u64) -> u64 {
    let Some(prefetches) = sock.prefetches() else { return 0 };
    let held = prefetches
        .iter()
        .enumerate()
        .filter(|(lane, prefetch)| mask & 1 << lane != 0 && prefetch.has_datagrams());
    held.fold(0, |all, (lane, _)| all | 1 << lane)
}

/// Whether a socket that is plain still holds something, which goes before all else. Once it does
/// not, it is so for good.
pub(crate) fn has_leftovers(sock: &Sock, shared: &Shared, fd: c_int) -> bool {
    if shared.mode() != PLAIN || shared.retired.load(Ordering::Acquire) & PREFETCH_BIT == 0 {
        return false;
    }
    let prefetches = sock.prefetches().unwrap_or_default();
    if prefetches.iter().any(Prefetch::has_datagrams) {
        return true;
    }
    if prefetches.iter().all(Prefetch::is_idle) {
        lanes::mark_lane_empty(sock, shared, fd, 0);
    }
    false
}

/// Among the lanes that are retired, the bit of the first, which never is: there are prefetches
/// that may have something.
pub(crate) const PREFETCH_BIT: u64 = 1;

/// What a socket that became plain still holds.
#[cold]
pub(crate) fn drain(sock: &Sock, shared: &Shared, fd: c_int, flags: c_int, into: &RecvBufs) -> Option<isize> {
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

/// Bytes of the datagram that comes next out of the prefetches of `mask`, and its lane.
pub(crate) fn next_len(sock: &Sock, mask: u64) -> Option<(usize, usize)> {
    let lane = ready_lanes(sock, mask).trailing_zeros() as usize;
    Some((for_lane(sock, lane)?.next_len()?, lane))
}

impl Prefetch {
    fn init(&self) {
        let headers = self.headers.get().cast::<mmsghdr>();
        let pieces = self.iovecs.get().cast::<[iovec; 2]>();
        for slot in 0..PREFETCH_MAX {
            let near = self.heads.get().cast::<[u8; HEAD_LEN]>().wrapping_add(slot);
            let far = self.tails.get().cast::<[u8; TAIL_LEN]>().wrapping_add(slot);
            // SAFETY: `slot` is within all of the arrays, and nobody else knows of the mapping yet.
            // Its address is the same in all processes that have it: they are forked.
            unsafe {
                *pieces.add(slot) = [
                    iovec { iov_base: near.cast(), iov_len: HEAD_LEN },
                    iovec { iov_base: far.cast(), iov_len: TAIL_LEN },
                ];
                let header = &mut *headers.add(slot);
                header.msg_hdr.msg_name = self.names.get().cast::<[u8; SOCKADDR_LEN_MAX]>().add(slot).cast();
                header.msg_hdr.msg_iov = pieces.add(slot).cast();
                header.msg_hdr.msg_iovlen = 2;
                header.msg_len = NOT_RECEIVED;
            }
        }
    }

    /// Empties it for another socket's lane, and keeps it from being filled until
    /// [`reopen`](Self::reopen). False if a thread is still filling it, or copies out of it: then
    /// it is no other socket's.
    pub(crate) fn reset(&self, mine: liveness::Token) -> bool {
        let filler = self.filler.load(Ordering::Relaxed);
        let is_filled = filler != 0 && !liveness::has_exited(filler);
        // Acquire: what the last filler wrote is before what is written here.
        if is_filled
            || self.filler.compare_exchange(filler, mine, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return false;
        }
        let word = self.state.load(Ordering::Acquire);
        let has_claims = word & FILLING == 0 && word & 0xffff_0000 != 0;
        // The generation goes on, so that nothing that was begun before is finished here.
        let empty = (word & !(FILLING | 0xffff_ffff)).wrapping_add(GENERATION) & !FILLING;
        if has_claims
            || self.state.compare_exchange(word, empty, Ordering::AcqRel, Ordering::Relaxed).is_err()
        {
            return false;
        }
        self.credits.store(0, Ordering::Relaxed);
        self.init();
        true
    }

    /// After [`reset`](Self::reset), once the socket's mode is that of a closed one.
    pub(crate) fn reopen(&self) {
        self.filler.store(0, Ordering::Release);
    }

    /// Whether there is something to take.
    #[inline]
    pub(crate) fn has_datagrams(&self) -> bool {
        let word = self.recovered_state();
        word & FILLING == 0 && next(word) < end(word)
    }

    /// Whether there is nothing, and nobody is about to put something here.
    fn is_idle(&self) -> bool {
        let word = self.recovered_state();
        word & FILLING == 0 && next(word) >= end(word)
    }

    /// The word, after what somebody did not come to finish was finished.
    #[inline]
    fn recovered_state(&self) -> u64 {
        // SeqCst, as where the mode changes: see `fill`.
        let word = self.state.load(Ordering::SeqCst);
        if word & FILLING == 0 { word } else { self.recover(word) }
    }

    #[cold]
    fn recover(&self, word: u64) -> u64 {
        let filler = self.filler.load(Ordering::Acquire);
        // One that is interrupted may not have come to its call yet: then nothing is there, and it
        // must stay as it is.
        let ours = filler == thread::acquired_liveness() && self.count() > 0;
        if filler != 0 && (ours || liveness::has_exited(filler)) {
            self.publish(word, self.count());
        }
        self.state.load(Ordering::SeqCst)
    }

    /// Messages that the kernel has written.
    fn count(&self) -> usize {
        (0..PREFETCH_MAX).take_while(|slot| self.len(*slot) != NOT_RECEIVED).count()
    }

    fn len(&self, slot: usize) -> u32 {
        let header = self.headers.get().cast::<mmsghdr>().wrapping_add(slot);
        // SAFETY: within the array; the kernel may be writing it, and nothing but the number is
        // read.
        unsafe { (&raw const (*header).msg_len).read_volatile() }
    }

    fn publish(&self, filling: u64, count: usize) {
        let word = filling & !(FILLING | 0xffff_ffff) | (count as u64) << END_SHIFT;
        _ = self.state.compare_exchange(filling, word, Ordering::SeqCst, Ordering::Relaxed);
    }

    /// Takes what comes next, or copies it, for a call of the program: what that returns.
    pub(crate) fn recv(&self, flags: c_int, into: &RecvBufs) -> Option<isize> {
        let mut answer = None;
        // As the kernel does it: who peeks for several gets the same one several times.
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

    /// Bytes of what comes next.
    fn next_len(&self) -> Option<usize> {
        let slot = self.claim(false)?;
        let len = self.len(slot) as usize;
        self.state.fetch_sub(CLAIM, Ordering::Release);
        Some(len)
    }

    /// The slot of what comes next, which nobody writes to until the claim is back.
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

    /// A datagram, by its claim.
    fn datagram(&self, slot: usize) -> DatagramRef<'_> {
        let len = (self.len(slot) as usize).min(HEAD_LEN + TAIL_LEN);
        // SAFETY: the slot is within the arrays, and was filled by the kernel up to these lengths;
        // the caller has a claim, so that nobody writes to it.
        unsafe {
            let header = self.headers.get().cast::<mmsghdr>().add(slot);
            let named = ((*header).msg_hdr.msg_namelen as usize).min(SOCKADDR_LEN_MAX);
            let name = self.names.get().cast::<[u8; SOCKADDR_LEN_MAX]>().add(slot).cast();
            let near = self.heads.get().cast::<[u8; HEAD_LEN]>().add(slot).cast();
            let far = self.tails.get().cast::<[u8; TAIL_LEN]>().add(slot).cast();
            DatagramRef {
                name: std::slice::from_raw_parts(name, named),
                payload: [
                    std::slice::from_raw_parts(near, len.min(HEAD_LEN)),
                    std::slice::from_raw_parts(far, len.saturating_sub(HEAD_LEN)),
                ],
            }
        }
    }

    /// Whether one of those that were handed out of what is held now came from this address. For
    /// the owner, who alone fills.
    #[inline]
    pub(crate) fn has_delivered_from(&self, name: &[u8]) -> bool {
        let word = self.state.load(Ordering::Acquire);
        let names = self.names.get().cast::<[u8; SOCKADDR_LEN_MAX]>();
        // The last one first: most servers answer one before they take the next.
        word & FILLING == 0
            && (0..next(word).min(PREFETCH_MAX)).rev().any(|slot| {
                // SAFETY: within the array; written when it was filled, and not since.
                let named = unsafe { &*names.add(slot) };
                named.get(..name.len()) == Some(name)
            })
    }

    /// Whether to take ahead now: a call for many costs more than one for one, so that it is made
    /// while it brings more than one, else now and then.
    #[inline]
    pub(crate) fn should_fill(&self) -> bool {
        if self.credits.load(Ordering::Relaxed) > 0 {
            return true;
        }
        let passed = self.skipped.load(Ordering::Relaxed).wrapping_add(1);
        self.skipped.store(passed, Ordering::Relaxed);
        passed.is_multiple_of(PROBE_INTERVAL)
    }

    /// What a fill brought. Where it brings nothing and the caller `sleeps`, that call was one too
    /// many.
    fn update_credits(&self, count: usize, sleeps: bool) {
        let luck = self.credits.load(Ordering::Relaxed);
        let luck = match count {
            0 if !sleeps => luck,
            0 | 1 => luck.saturating_sub(1),
            _ => CREDITS_MAX,
        };
        self.credits.store(luck, Ordering::Relaxed);
    }

    /// Takes from the lane's socket `fd` what it has, for its owner.
    pub(crate) fn fill(&self, shared: &Shared, member: &Member, fd: c_int, sleeps: bool) -> FillResult {
        let most = start::settings().map_or(1, |settings| settings.batch).min(PREFETCH_MAX);
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
        let filled = self.fill_locked(shared, fd, most, sleeps);
        self.filler.store(0, Ordering::Release);
        filled
    }

    fn fill_locked(&self, shared: &Shared, fd: c_int, most: usize, sleeps: bool) -> FillResult {
        let word = self.state.load(Ordering::SeqCst);
        if word & FILLING != 0 {
            // Of one that died in between.
            self.publish(word, self.count());
            return FillResult::Ready;
        }
        if next(word) < end(word) {
            return FillResult::Ready;
        }
        if word & 0xffff_0000 != 0 {
            return FillResult::Skipped;
        }
        let filling = (word & !0xffff_ffff).wrapping_add(GENERATION) & !FILLING | FILLING;
        let headers = self.headers.get().cast::<mmsghdr>();
        for slot in 0..most {
            // SAFETY: within the array; there is no claim, and nobody but the filler writes.
            unsafe {
                (*headers.add(slot)).msg_len = NOT_RECEIVED;
                (*headers.add(slot)).msg_hdr.msg_namelen = SOCKADDR_LEN_MAX as u32;
            }
        }
        if self.state.compare_exchange(word, filling, Ordering::SeqCst, Ordering::Relaxed).is_err() {
            return FillResult::Skipped;
        }
        // Either this sees that the mode has changed, or who changed it sees FILLING.
        if shared.mode.load(Ordering::SeqCst) != MULTI_LANE || shared.prefetch_off.load(Ordering::SeqCst) != 0
        {
            self.publish(filling, 0);
            return FillResult::Skipped;
        }
        let errno = real::errno();
        let got = call::recvmmsg(fd, headers, most as u32, MSG_DONTWAIT, ptr::null_mut());
        let count = usize::try_from(got).unwrap_or(0);
        #[cfg(manylane_tsan)]
        self.report_writes(count);
        self.publish(filling, count);
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

    /// Reports to ThreadSanitizer what the kernel wrote. It sees no writes of system calls, and so
    /// no race between a fill and the threads that take from it.
    #[cfg(manylane_tsan)]
    fn report_writes(&self, count: usize) {
        unsafe extern "C" {
            fn __tsan_write_range(address: *const u8, size: libc::c_ulong);
        }
        for slot in 0..count {
            let datagram = self.datagram(slot);
            for part in [datagram.name, datagram.payload[0], datagram.payload[1]] {
                // SAFETY: the runtime notes the addresses, and does not touch what is there.
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
    (word >> END_SHIFT & 0xff) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefetch() -> &'static Prefetch {
        let prefetch = &memory::map::<Prefetch>(1, true).unwrap()[0];
        prefetch.init();
        prefetch
    }

    #[test]
    fn a_hold_that_is_being_filled_or_read_is_left_to_that() {
        let prefetch = prefetch();
        prefetch.filler.store(thread::holder_token(), Ordering::Relaxed);
        let filling = GENERATION | FILLING;
        prefetch.state.store(filling, Ordering::Relaxed);
        assert!(!prefetch.reset(thread::holder_token()));
        assert_eq!(prefetch.state.load(Ordering::Relaxed), filling);
        prefetch.filler.store(0, Ordering::Relaxed);
        let claimed = GENERATION | CLAIM | 1 << END_SHIFT | 1;
        prefetch.state.store(claimed, Ordering::Relaxed);
        assert!(!prefetch.reset(thread::holder_token()));
        assert_eq!(prefetch.state.load(Ordering::Relaxed), claimed);
    }

    #[test]
    fn what_was_begun_before_a_hold_was_emptied_is_not_finished() {
        let prefetch = prefetch();
        // The filler has died.
        let filling = GENERATION | FILLING;
        prefetch.state.store(filling, Ordering::Relaxed);
        assert!(prefetch.reset(thread::holder_token()));
        prefetch.publish(filling, 3);
        assert!(prefetch.is_idle());
        assert_ne!(prefetch.filler.load(Ordering::Relaxed), 0);
        prefetch.reopen();
        assert_eq!(prefetch.filler.load(Ordering::Relaxed), 0);
        // The next fill is another one.
        assert_ne!((prefetch.state.load(Ordering::Relaxed) + GENERATION) | FILLING, filling);
    }
}
