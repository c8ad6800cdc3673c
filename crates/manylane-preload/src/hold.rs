//! Datagrams taken ahead (`--batch`): with one system call a thread takes what its lane's socket has, and its calls get it one
//! by one.
//!
//! A *hold* is the front of a lane's queue, in memory that is shared with all that is forked later: whoever may take from the
//! lane's kernel socket looks here first (`order.rs`), and whoever asks whether the lane has something asks here, too
//! (`look.rs`, `wait.rs`, `epoll/`, `options.rs`). So what is held is in reach of exactly those who could have had it from the
//! kernel: at once for its owner and who asks, within a slice for who sleeps while the owner is away (`reach.rs`).
//!
//! # Who fills, who takes
//!
//! Only the owner of a lane fills its hold, in a receive of its own, when the hold is empty, without waiting: so nothing is
//! taken that nobody came for, and the order in the lane stays. Anybody takes. One word says all:
//!
//! ```text
//!  EMPTY ──owner: FILLING, recvmmsg(2)──► next..end ──each taker: next + 1, a claim; copies; gives the claim back──► EMPTY
//! ```
//!
//! - A taker that has a claim is copying: the hold is not filled again before all claims are back. One that dies over it takes
//!   one datagram along, as it would have out of the kernel, and the hold stays empty: the lane goes on one by one.
//! - Who dies filling loses nothing: the kernel says of each message that it is there (`msg_len`), in the shared memory, and
//!   the next one who looks finishes the change (`settle`). The same does a signal handler that interrupted the
//!   filling thread, which is where signals arrive: at the end of the system call.
//! - Somebody else's FILLING lasts for a system call that does not wait. Who meets it lets the other one go on for some turns,
//!   then goes by the kernel. (One that is stopped right there keeps what it took until it goes on or dies.)
//! - Falling back: the mode changes first, then holds are emptied before anything else. A filler looks at the mode after it
//!   has said FILLING, so that either it sees the fall, or the fall sees that the hold is not idle (`is_idle`).
//!
//! # What stays one by one
//!
//! What could be seen: sockets with options that bring control messages, lanes that several threads share, entries of epoll that
//! tell of edges (the kernel drops one when its queue is empty), a socket with queues (engine `xdp`); receives of
//! the error queue, and `recvmmsg`, which is a batch of its own. And what would not pay: see [`Hold::is_worth_it`].
//!
//! Bounds: [`MOST`] datagrams for each lane, beside its receive buffer. Memory is touched as datagrams need it: 2 KiB for each,
//! up to 64 KiB for long ones. No memory, or more than [`MAPPINGS`] sockets in the life of a process: one by one.

use std::cell::UnsafeCell;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use libc::{EAGAIN, MSG_DONTWAIT, MSG_PEEK, c_int, iovec, mmsghdr};
use manylane_sys::shim::Reason;

use crate::calls::call;
use crate::deliver::{Into, Parcel};
use crate::memory::{self, Atomics};
use crate::settings::Settings;
use crate::sock::{LANED, MAX_LANES, Member, PLAIN, Shared, Sock};
use crate::{lanes, life, me, queues, real, report, start};

/// Datagrams that a hold has at most.
pub(crate) const MOST: usize = 32;
/// Sockets of a process that get holds: what is mapped stays so.
const MAPPINGS: u32 = 64;
static MAPPED: AtomicU32 = AtomicU32::new(0);

/// Bytes of a datagram that are close to those of the others, and the rest of the longest one.
const NEAR: usize = 2048;
const FAR: usize = 65536 - NEAR;
/// An address of either family.
const NAME: usize = 32;

const FILLING: u64 = 1 << 63;
const GENERATION: u64 = 1 << 32;
const CLAIM: u64 = 1 << 16;
const END: u32 = 8;
/// What the kernel has not written over.
const NOT_THERE: u32 = u32::MAX;
/// Turns that are left to somebody who is filling.
const TURNS: u32 = 64;
/// Fills that may bring less than two datagrams before they are tried now and then only, and how often that is.
const LUCK: u32 = 8;
const NOW_AND_THEN: u32 = 8;

/// What was taken ahead of one lane.
#[repr(C, align(64))]
pub(crate) struct Hold {
    /// FILLING; generation (31 bits), claims (16), end and next (8 each).
    word: AtomicU64,
    /// The life of who fills.
    filler: AtomicU64,
    /// Written by the owner of the lane alone.
    luck: AtomicU32,
    passed: AtomicU32,
    headers: UnsafeCell<[mmsghdr; MOST]>,
    pieces: UnsafeCell<[[iovec; 2]; MOST]>,
    names: UnsafeCell<[[u8; NAME]; MOST]>,
    near: UnsafeCell<[[u8; NEAR]; MOST]>,
    far: UnsafeCell<[[u8; FAR]; MOST]>,
}

// SAFETY: what is not atomic is written by who says FILLING, and read by who has a claim: `word` keeps them apart.
unsafe impl Sync for Hold {}
// SAFETY: zeroes are a hold that is empty, with headers that point nowhere; `map` sets them before anybody knows of it.
unsafe impl Atomics for Hold {}

/// What a fill came to.
pub(crate) enum Filled {
    /// There is something in the hold.
    Some,
    /// The kernel has nothing.
    Nothing,
    /// The call failed, and says so.
    Failed,
    /// Not now, or not here: the kernel is to be asked for one.
    No,
}

/// Maps the holds of a socket that gets lanes, if batches are asked for. Under the socket's lock, before any fork.
pub(crate) fn map(sock: &Sock) {
    let Some(settings) = start::settings().filter(|settings| settings.batch > 1) else { return };
    if sock.holds().is_some() || MAPPED.fetch_add(1, Ordering::Relaxed) >= MAPPINGS {
        return;
    }
    let Some(holds) = memory::map::<Hold>(settings.lanes.min(MAX_LANES), true) else { return };
    holds.iter().for_each(Hold::init);
    sock.set_holds(holds);
}

/// From now on nothing is taken ahead of the socket's lanes.
pub(crate) fn one_by_one(shared: &Shared, fd: c_int, why: Reason) {
    shared.one_by_one.fetch_or(bit(why), Ordering::SeqCst);
    tell(shared, fd);
}

/// Counts why lanes go one by one though batches were asked for: each reason once for a socket.
pub(crate) fn tell(shared: &Shared, fd: c_int) {
    let with_queues = queues::are_open(shared);
    let has_any = shared.mode() == LANED || with_queues;
    let unasked = |settings: &Settings| settings.batch <= 1 || settings.batch_at_rest;
    if !has_any || start::settings().is_none_or(unasked) {
        return;
    }
    let mut all = shared.one_by_one.load(Ordering::SeqCst);
    if shared.crowded.load(Ordering::Relaxed) != 0 {
        all |= bit(Reason::OneShared);
    }
    if with_queues {
        all |= bit(Reason::OneQueues);
    }
    let fresh = all & !shared.told.fetch_or(all, Ordering::AcqRel);
    for why in Reason::ALL.into_iter().filter(|why| fresh & bit(*why) != 0) {
        report::count_reason(why, lanes::local_addr(fd));
    }
}

fn bit(why: Reason) -> u32 {
    1 << why as u32
}

/// The hold of a lane; none where everything is one by one.
#[inline]
pub(crate) fn of(sock: &Sock, lane: usize) -> Option<&'static Hold> {
    sock.holds()?.get(lane)
}

/// A bit for each lane of `mask` of which something is held.
#[inline]
pub(crate) fn ready(sock: &Sock, mask: u64) -> u64 {
    let Some(holds) = sock.holds() else { return 0 };
    let held = holds.iter().enumerate().filter(|(lane, hold)| mask & 1 << lane != 0 && hold.has_some());
    held.fold(0, |all, (lane, _)| all | 1 << lane)
}

/// Whether a socket that is plain still holds something, which goes before all else. Once it does not, it is so for good.
pub(crate) fn has_leftovers(sock: &Sock, shared: &Shared, fd: c_int) -> bool {
    if shared.mode() != PLAIN || shared.retired.load(Ordering::Acquire) & HOLDS == 0 {
        return false;
    }
    let holds = sock.holds().unwrap_or_default();
    if holds.iter().any(Hold::has_some) {
        return true;
    }
    if holds.iter().all(Hold::is_idle) {
        lanes::emptied(sock, shared, fd, 0);
    }
    false
}

/// Among the lanes that are retired, the bit of the first, which never is: there are holds that may have something.
pub(crate) const HOLDS: u64 = 1;

/// What a socket that became plain still holds.
#[cold]
pub(crate) fn drain(sock: &Sock, shared: &Shared, fd: c_int, flags: c_int, into: &Into) -> Option<isize> {
    if !has_leftovers(sock, shared, fd) {
        return None;
    }
    let (lane, answer) = sock
        .holds()?
        .iter()
        .enumerate()
        .find_map(|(lane, hold)| hold.take(flags, into).map(|answer| (lane, answer)))?;
    if flags & MSG_PEEK != 0 {
        me::peek(sock, lane);
    }
    Some(answer)
}

/// Bytes of the datagram that comes next out of the holds of `mask`, and its lane.
pub(crate) fn measure(sock: &Sock, mask: u64) -> Option<(usize, usize)> {
    let lane = ready(sock, mask).trailing_zeros() as usize;
    Some((of(sock, lane)?.measure()?, lane))
}

impl Hold {
    fn init(&self) {
        let headers = self.headers.get().cast::<mmsghdr>();
        let pieces = self.pieces.get().cast::<[iovec; 2]>();
        for slot in 0..MOST {
            let near = self.near.get().cast::<[u8; NEAR]>().wrapping_add(slot);
            let far = self.far.get().cast::<[u8; FAR]>().wrapping_add(slot);
            // SAFETY: `slot` is within all of the arrays, and nobody else knows of the mapping yet. Its address is the same in
            // all processes that have it: they are forked.
            unsafe {
                *pieces.add(slot) = [
                    iovec { iov_base: near.cast(), iov_len: NEAR },
                    iovec { iov_base: far.cast(), iov_len: FAR },
                ];
                let header = &mut *headers.add(slot);
                header.msg_hdr.msg_name = self.names.get().cast::<[u8; NAME]>().add(slot).cast();
                header.msg_hdr.msg_iov = pieces.add(slot).cast();
                header.msg_hdr.msg_iovlen = 2;
                header.msg_len = NOT_THERE;
            }
        }
    }

    /// Empties it for another socket's lane, and keeps it from being filled until
    /// [`reopen`](Self::reopen). False if a thread is still filling it, or copies out of it: then it
    /// is no other socket's.
    pub(crate) fn reset(&self, mine: life::Token) -> bool {
        let filler = self.filler.load(Ordering::Relaxed);
        let is_filled = filler != 0 && !life::is_dead(filler);
        // Acquire: what the last filler wrote is before what is written here.
        if is_filled
            || self.filler.compare_exchange(filler, mine, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            return false;
        }
        let word = self.word.load(Ordering::Acquire);
        let has_claims = word & FILLING == 0 && word & 0xffff_0000 != 0;
        // The generation goes on, so that nothing that was begun before is finished here.
        let empty = (word & !(FILLING | 0xffff_ffff)).wrapping_add(GENERATION) & !FILLING;
        if has_claims || self.word.compare_exchange(word, empty, Ordering::AcqRel, Ordering::Relaxed).is_err()
        {
            return false;
        }
        self.luck.store(0, Ordering::Relaxed);
        self.init();
        true
    }

    /// After [`reset`](Self::reset), once the socket's mode is that of a closed one.
    pub(crate) fn reopen(&self) {
        self.filler.store(0, Ordering::Release);
    }

    /// Whether there is something to take.
    #[inline]
    pub(crate) fn has_some(&self) -> bool {
        let word = self.settled();
        word & FILLING == 0 && next(word) < end(word)
    }

    /// Whether there is nothing, and nobody is about to put something here.
    fn is_idle(&self) -> bool {
        let word = self.settled();
        word & FILLING == 0 && next(word) >= end(word)
    }

    /// The word, after what somebody did not come to finish was finished.
    #[inline]
    fn settled(&self) -> u64 {
        // SeqCst, as where the mode changes: see `fill`.
        let word = self.word.load(Ordering::SeqCst);
        if word & FILLING == 0 { word } else { self.settle(word) }
    }

    #[cold]
    fn settle(&self, word: u64) -> u64 {
        let filler = self.filler.load(Ordering::Acquire);
        // One that is interrupted may not have come to its call yet: then nothing is there, and it must stay as it is.
        let ours = filler == me::life_if_any() && self.count() > 0;
        if filler != 0 && (ours || life::is_dead(filler)) {
            self.publish(word, self.count());
        }
        self.word.load(Ordering::SeqCst)
    }

    /// Messages that the kernel has written.
    fn count(&self) -> usize {
        (0..MOST).take_while(|slot| self.len(*slot) != NOT_THERE).count()
    }

    fn len(&self, slot: usize) -> u32 {
        let header = self.headers.get().cast::<mmsghdr>().wrapping_add(slot);
        // SAFETY: within the array; the kernel may be writing it, and nothing but the number is read.
        unsafe { (&raw const (*header).msg_len).read_volatile() }
    }

    fn publish(&self, filling: u64, count: usize) {
        let word = filling & !(FILLING | 0xffff_ffff) | (count as u64) << END;
        _ = self.word.compare_exchange(filling, word, Ordering::SeqCst, Ordering::Relaxed);
    }

    /// Takes what comes next, or copies it, for a call of the program: what that returns.
    pub(crate) fn take(&self, flags: c_int, into: &Into) -> Option<isize> {
        let mut answer = None;
        // As the kernel does it: who peeks for several gets the same one several times.
        for nth in 0..into.room() {
            if nth > 0 && into.is_refused(nth, flags) {
                break;
            }
            let Some(slot) = self.claim(flags & MSG_PEEK == 0) else { break };
            let got = into.put(nth, &self.parcel(slot), flags);
            self.word.fetch_sub(CLAIM, Ordering::Release);
            if got < 0 {
                return answer.or(Some(got));
            }
            answer = Some(if into.is_many() { nth as isize + 1 } else { got });
        }
        answer
    }

    /// Bytes of what comes next.
    fn measure(&self) -> Option<usize> {
        let slot = self.claim(false)?;
        let len = self.len(slot) as usize;
        self.word.fetch_sub(CLAIM, Ordering::Release);
        Some(len)
    }

    /// The slot of what comes next, which nobody writes to until the claim is back.
    #[inline]
    fn claim(&self, takes: bool) -> Option<usize> {
        let mut turns = 0;
        loop {
            let word = self.settled();
            if word & FILLING != 0 {
                turns += 1;
                let mine = me::life_if_any();
                if turns > TURNS || mine != 0 && self.filler.load(Ordering::Relaxed) == mine {
                    return None;
                }
                std::thread::yield_now();
                continue;
            }
            if next(word) >= end(word) {
                return None;
            }
            let claimed = word + CLAIM + u64::from(takes);
            if self.word.compare_exchange_weak(word, claimed, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return Some(next(word));
            }
        }
    }

    /// A datagram, by its claim.
    fn parcel(&self, slot: usize) -> Parcel<'_> {
        let len = (self.len(slot) as usize).min(NEAR + FAR);
        // SAFETY: the slot is within the arrays, and was filled by the kernel up to these lengths; the caller has a claim, so
        // that nobody writes to it.
        unsafe {
            let header = self.headers.get().cast::<mmsghdr>().add(slot);
            let named = ((*header).msg_hdr.msg_namelen as usize).min(NAME);
            let name = self.names.get().cast::<[u8; NAME]>().add(slot).cast();
            let near = self.near.get().cast::<[u8; NEAR]>().add(slot).cast();
            let far = self.far.get().cast::<[u8; FAR]>().add(slot).cast();
            Parcel {
                name: std::slice::from_raw_parts(name, named),
                payload: [
                    std::slice::from_raw_parts(near, len.min(NEAR)),
                    std::slice::from_raw_parts(far, len.saturating_sub(NEAR)),
                ],
            }
        }
    }

    /// Whether one of those that were handed out of what is held now came from this address. For the owner, who alone fills.
    #[inline]
    pub(crate) fn gave_to(&self, name: &[u8]) -> bool {
        let word = self.word.load(Ordering::Acquire);
        let names = self.names.get().cast::<[u8; NAME]>();
        // The last one first: most servers answer one before they take the next.
        word & FILLING == 0
            && (0..next(word).min(MOST)).rev().any(|slot| {
                // SAFETY: within the array; written when it was filled, and not since.
                let named = unsafe { &*names.add(slot) };
                named.get(..name.len()) == Some(name)
            })
    }

    /// Whether to take ahead now: a call for many costs more than one for one, so that it is made while it brings more than one,
    /// else now and then.
    #[inline]
    pub(crate) fn is_worth_it(&self) -> bool {
        if self.luck.load(Ordering::Relaxed) > 0 {
            return true;
        }
        let passed = self.passed.load(Ordering::Relaxed).wrapping_add(1);
        self.passed.store(passed, Ordering::Relaxed);
        passed.is_multiple_of(NOW_AND_THEN)
    }

    /// What a fill brought. Where it brings nothing and the caller `sleeps`, that call was one too many.
    fn remember(&self, count: usize, sleeps: bool) {
        let luck = self.luck.load(Ordering::Relaxed);
        let luck = match count {
            0 if !sleeps => luck,
            0 | 1 => luck.saturating_sub(1),
            _ => LUCK,
        };
        self.luck.store(luck, Ordering::Relaxed);
    }

    /// Takes from the lane's socket `fd` what it has, for its owner.
    pub(crate) fn fill(&self, shared: &Shared, member: &Member, fd: c_int, sleeps: bool) -> Filled {
        let most = start::settings().map_or(1, |settings| settings.batch).min(MOST);
        let mine = member.life.load(Ordering::Relaxed);
        let before = self.settled();
        if mine == 0 || before & FILLING != 0 {
            return Filled::No;
        }
        let filler = self.filler.load(Ordering::Relaxed);
        if filler != 0 && !life::is_dead(filler) {
            return Filled::No;
        }
        if self.filler.compare_exchange(filler, mine, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return Filled::No;
        }
        let filled = self.fill_as_filler(shared, fd, most, sleeps);
        self.filler.store(0, Ordering::Release);
        filled
    }

    fn fill_as_filler(&self, shared: &Shared, fd: c_int, most: usize, sleeps: bool) -> Filled {
        let word = self.word.load(Ordering::SeqCst);
        if word & FILLING != 0 {
            // Of one that died in between.
            self.publish(word, self.count());
            return Filled::Some;
        }
        if next(word) < end(word) {
            return Filled::Some;
        }
        if word & 0xffff_0000 != 0 {
            return Filled::No;
        }
        let filling = (word & !0xffff_ffff).wrapping_add(GENERATION) & !FILLING | FILLING;
        let headers = self.headers.get().cast::<mmsghdr>();
        for slot in 0..most {
            // SAFETY: within the array; there is no claim, and nobody but the filler writes.
            unsafe {
                (*headers.add(slot)).msg_len = NOT_THERE;
                (*headers.add(slot)).msg_hdr.msg_namelen = NAME as u32;
            }
        }
        if self.word.compare_exchange(word, filling, Ordering::SeqCst, Ordering::Relaxed).is_err() {
            return Filled::No;
        }
        // Either this sees that the mode has changed, or who changed it sees FILLING.
        if shared.mode.load(Ordering::SeqCst) != LANED || shared.one_by_one.load(Ordering::SeqCst) != 0 {
            self.publish(filling, 0);
            return Filled::No;
        }
        let errno = real::errno();
        let got = call::recvmmsg(fd, headers, most as u32, MSG_DONTWAIT, ptr::null_mut());
        let count = usize::try_from(got).unwrap_or(0);
        #[cfg(manylane_tsan)]
        self.report_writes(count);
        self.publish(filling, count);
        self.remember(count, sleeps);
        if got >= 0 {
            return Filled::Some;
        }
        if real::errno() != EAGAIN {
            return Filled::Failed;
        }
        real::set_errno(errno);
        Filled::Nothing
    }

    /// Reports to ThreadSanitizer what the kernel wrote. It sees no writes of system calls, and so no
    /// race between a fill and the threads that take from it.
    #[cfg(manylane_tsan)]
    fn report_writes(&self, count: usize) {
        unsafe extern "C" {
            fn __tsan_write_range(address: *const u8, size: libc::c_ulong);
        }
        for slot in 0..count {
            let parcel = self.parcel(slot);
            for part in [parcel.name, parcel.payload[0], parcel.payload[1]] {
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
    (word >> END & 0xff) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold() -> &'static Hold {
        let hold = &memory::map::<Hold>(1, true).unwrap()[0];
        hold.init();
        hold
    }

    #[test]
    fn a_hold_that_is_being_filled_or_read_is_left_to_that() {
        let hold = hold();
        hold.filler.store(me::token(), Ordering::Relaxed);
        let filling = GENERATION | FILLING;
        hold.word.store(filling, Ordering::Relaxed);
        assert!(!hold.reset(me::token()));
        assert_eq!(hold.word.load(Ordering::Relaxed), filling);
        hold.filler.store(0, Ordering::Relaxed);
        let claimed = GENERATION | CLAIM | 1 << END | 1;
        hold.word.store(claimed, Ordering::Relaxed);
        assert!(!hold.reset(me::token()));
        assert_eq!(hold.word.load(Ordering::Relaxed), claimed);
    }

    #[test]
    fn what_was_begun_before_a_hold_was_emptied_is_not_finished() {
        let hold = hold();
        // The filler has died.
        let filling = GENERATION | FILLING;
        hold.word.store(filling, Ordering::Relaxed);
        assert!(hold.reset(me::token()));
        hold.publish(filling, 3);
        assert!(hold.is_idle());
        assert_ne!(hold.filler.load(Ordering::Relaxed), 0);
        hold.reopen();
        assert_eq!(hold.filler.load(Ordering::Relaxed), 0);
        // The next fill is another one.
        assert_ne!((hold.word.load(Ordering::Relaxed) + GENERATION) | FILLING, filling);
    }
}
