//! Lanes that threads other than their owners must poll, so that each datagram is received.
//!
//! A datagram is in the queue of exactly one lane. A lane is *covered* while its owner waits on
//! it: the kernel wakes the owner for its datagrams. While the owner does not wait, or while there
//! is none, the lane is *uncovered*, and then:
//! - A receive that would return EAGAIN, a poll that would return 0, and FIONREAD poll every
//!   uncovered lane first.
//! - Every wait of another member ends after a slice (20 ms) at most, and polls every uncovered
//!   lane. If it finds a datagram, the thread polls again before its next wait.
//! - A wait that ends earlier, and reports nothing to receive on the socket, polls them if its
//!   thread has not done so for a slice. If it reports datagrams of other sockets, it reads the
//!   clock in one wait of eight only, so that datagrams do not pay for that.
//!
//! An owner that was preempted, perhaps by the thread that polls, does not wait either. It needs
//! its CPU, not help: what it does for a datagram costs less, and its batches grow meanwhile. So a
//! thread that has found datagrams lets others run before it takes some. Of an owner that went on
//! then, it takes none ([`without_running`]).
//!
//! So a datagram reaches the threads that the kernel's one socket would have given it to: at once
//! if they poll, within a slice if they sleep.
//!
//! # Owners that are gone
//!
//! - **Dead**: its liveness token says so (`liveness.rs`). The first thread that polls its lane
//!   takes the lane out of steering, and its datagrams are received before any newer ones
//!   (`recovery.rs`).
//! - **Stopped**: it is marked as waiting, and its heartbeat does not change. After
//!   [`STALLED_POLLS_MAX`] polls, at least a slice apart, it loses the lane: the lane is drained
//!   first and steered past. The owner gets a lane again when it has received twice. Polls count,
//!   not time: if all threads were stopped, none loses its lane.
//! - **Ended**: its `pthread` destructor gives up the lane, in the same order (`thread.rs`).
//!
//! A thread that always finds datagrams in its own lane checks the other owners in one receive of
//! eight, so that load hides none of this for long. No lane closes before it is empty, and none
//! while the program has the socket.

use std::sync::atomic::Ordering;

use libc::c_int;
use manylane_sys::tick;

use crate::base::settings::{LANES_MAX, WAIT_SLICE_MS};
use crate::batching::readiness::ready_lanes;
use crate::batching::{prefetch, send_batch};
use crate::fds::sock_fds;
use crate::group::change;
use crate::group::owners;
use crate::group::recovery;
use crate::group::sampling;
use crate::shared::sock::{MULTI_LANE, Member, PLAIN, Shared, Sock, WAITS_ON};
use crate::shared::{liveness, report, thread};
use crate::xdp::queues;

/// Polls, at least a slice apart, without a new heartbeat before the owner loses its lane.
const STALLED_POLLS_MAX: u32 = 8;

/// A bit for each uncovered lane, except the caller's `own`.
pub(crate) fn uncovered(sock: &Sock, shared: &Shared, own: Option<usize>) -> u64 {
    recovery::recover(sock, shared);
    let now = tick::coarse_ms();
    (0..shared.lane_count())
        .filter(|lane| Some(*lane) != own && !is_covered(sock, shared, *lane, now))
        .fold(0, |mask, lane| mask | 1 << lane)
}

/// True if the owner of `lane` waits on it, so that the kernel wakes it for a datagram. `now` is
/// from `tick::coarse_ms`.
#[inline]
fn is_covered(sock: &Sock, shared: &Shared, lane: usize, now: u32) -> bool {
    let Some(owner) = shared.owner_of(lane) else { return false };
    if liveness::has_exited(owner.liveness.load(Ordering::Acquire)) {
        recovery::reap_owner(sock, shared, lane);
        return false;
    }
    let waits = owner.state.load(Ordering::Acquire) == WAITS_ON + lane as u32;
    let last = shared.polled_at_ms[lane].load(Ordering::Relaxed);
    // At most one poll counts in each slice, however many threads poll. It counts once, however
    // long all threads were stopped before it.
    if now.wrapping_sub(last) >= WAIT_SLICE_MS as u32
        && shared.polled_at_ms[lane].compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    {
        let beat = owner.heartbeat.load(Ordering::Relaxed);
        if shared.seen_heartbeat[lane].swap(beat, Ordering::Relaxed) != beat {
            shared.stalled_polls[lane].store(0, Ordering::Relaxed);
        } else if shared.stalled_polls[lane].fetch_add(1, Ordering::Relaxed) >= STALLED_POLLS_MAX {
            orphan_lane(sock, shared, lane);
        }
    }
    // If the lane could not be taken away (another thread holds the lock), it is polled all the
    // same.
    waits && shared.stalled_polls[lane].load(Ordering::Relaxed) <= STALLED_POLLS_MAX
}

/// The owner of `lane` has made no progress for too long: it loses the lane. To get one again, it
/// has to receive twice.
#[cold]
fn orphan_lane(sock: &Sock, shared: &Shared, lane: usize) {
    // Set the bit before trying the lock: its holder may be stopped, too.
    owners::drain_first(shared, 1 << lane);
    let Some(guard) = recovery::lock(sock, shared, false) else { return };
    if shared.mode() != MULTI_LANE {
        return;
    }
    shared.stalled_polls[lane].store(0, Ordering::Relaxed);
    let owner = shared.owner[lane].load(Ordering::Relaxed) as usize;
    let Some(member) = shared.members.get(owner.wrapping_sub(1)) else { return };
    if recovery::has_exited(member) {
        recovery::reap_all(sock, shared, &guard);
        return;
    }
    let _change = change::start_change(shared, change::OWNERS, &guard);
    member.receives.store(0, Ordering::Relaxed);
    member.lane.store(-1, Ordering::Release);
    report::record_lane(member, -1, shared.inode_of(-1));
    if owners::inherit(shared, lane) {
        return;
    }
    owners::steer_away(sock, shared, lane);
    queues::distribute(shared);
}

/// Receives from other lanes before their owners get the CPU again.
const HELP_RECEIVES_MAX: u32 = 64;

/// The lanes of `mask`, which have datagrams and are not the caller's, without those whose owners
/// go on while `run_others` gives them the CPU. The answer holds for some receives.
pub(crate) fn without_running(shared: &Shared, member: &Member, mask: u64, run_others: impl FnOnce()) -> u64 {
    if mask == 0 {
        member.found_in_other_lanes.store(0, Ordering::Relaxed);
        return 0;
    }
    let left = member.found_in_other_lanes.load(Ordering::Relaxed);
    if left > 1 {
        member.found_in_other_lanes.store(left - 1, Ordering::Relaxed);
        return mask;
    }
    let heartbeat = |lane: usize| {
        let owner = if mask & 1 << lane == 0 { None } else { shared.owner_of(lane) };
        owner.map(|owner| owner.heartbeat.load(Ordering::Relaxed))
    };
    let before: [_; LANES_MAX] = std::array::from_fn(heartbeat);
    if before.iter().any(Option::is_some) {
        run_others();
    }
    let goes_on = |lane: &usize| before[*lane].is_some() && heartbeat(*lane) != before[*lane];
    let found = (0..LANES_MAX).filter(goes_on).fold(mask, |found, lane| found & !(1 << lane));
    let receives = if found == 0 { 0 } else { HELP_RECEIVES_MAX };
    member.found_in_other_lanes.store(receives, Ordering::Relaxed);
    found
}

/// True if the caller can receive a datagram from another lane than the one it watches.
pub(crate) fn poll_other_lanes(sock: &'static Sock, shared: &Shared, fd: c_int, watched: usize) -> bool {
    recovery::recover(sock, shared);
    send_batch::flush_overdue(sock, shared, fd);
    sampling::after_slice(sock, shared);
    let retired = shared.retired.load(Ordering::Acquire);
    let older = shared.drain_first.load(Ordering::Acquire);
    if has_older(sock, shared, fd) {
        return true;
    }
    let mask = other_lanes(sock, shared, watched);
    let has = ready_lanes(sock, shared, fd, mask);
    // A lane that is empty now is drained: the next wait must not poll it first again.
    let drained = older & mask & !has;
    if drained != 0 {
        shared.drain_first.fetch_and(!drained, Ordering::AcqRel);
    }
    if shared.mode() == PLAIN {
        (1..LANES_MAX)
            .filter(|lane| retired & mask & !has & 1 << lane != 0)
            .for_each(|lane| sock_fds::mark_lane_empty(sock, shared, fd, lane));
    }
    let found = has & !(1 << watched);
    let Some(member) = thread::member(sock, shared) else { return found != 0 };
    member.polled_at_ms.store(tick::coarse_ms(), Ordering::Relaxed);
    without_running(shared, member, found, std::thread::yield_now) != 0
}

/// A bit for each lane that the caller may receive from beside the one it watches, and for that one
/// if it is to be drained.
fn other_lanes(sock: &Sock, shared: &Shared, watched: usize) -> u64 {
    let retired = shared.retired.load(Ordering::Acquire) & !prefetch::PREFETCH_BIT;
    let others = if shared.mode() == MULTI_LANE { uncovered(sock, shared, Some(watched)) } else { 0 };
    retired | shared.drain_first.load(Ordering::Acquire) | others
}

/// True if the library holds datagrams of a plain socket that are older than all in the kernel.
pub(crate) fn has_older(sock: &'static Sock, shared: &Shared, fd: c_int) -> bool {
    queues::has_leftovers(sock, shared) || prefetch::has_leftovers(sock, shared, fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::memory;

    #[test]
    fn an_owner_that_only_needs_the_cpu_keeps_its_datagrams() {
        let shared = &memory::map::<Shared>(1, true).unwrap()[0];
        let [caller, first, second] = [0, 1, 2].map(|at| &shared.members[at]);
        shared.owner[1].store(2, Ordering::Relaxed);
        shared.owner[2].store(3, Ordering::Relaxed);
        let found = |mask, run_others: &dyn Fn()| without_running(shared, caller, mask, run_others);
        assert_eq!(found(0b110, &|| first.beat()), 0b100);
        // The answer holds for some receives.
        for _ in 1..HELP_RECEIVES_MAX {
            assert_eq!(found(0b100, &|| unreachable!()), 0b100);
        }
        assert_eq!(found(0b100, &|| second.beat()), 0);
        assert_eq!(found(0b110, &|| [first, second].iter().for_each(|owner| owner.beat())), 0);
        // Nothing is left, so that the next ones are looked at again.
        assert_eq!(found(0b10, &|| ()), 0b10);
        assert_eq!(found(0, &|| unreachable!()), 0);
        assert_eq!(found(0b10, &|| first.beat()), 0);
        // A lane without an owner is for all.
        shared.owner[1].store(0, Ordering::Relaxed);
        assert_eq!(found(0b10, &|| unreachable!()), 0b10);
    }
}
