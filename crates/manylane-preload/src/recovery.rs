//! Recovery after a thread died: its lanes are drained and given away, and its unfinished change
//! is finished.
//!
//! A thread that changes modes or owners holds the lock, and records the change before its first
//! step ([`start_change`]). The lock of a dead thread counts as free. The next thread that wants
//! it or polls takes it over ([`recover`]). If it finds a recorded change that is not its own, it
//! finishes the change from whatever step it was left at ([`lock`](fn@lock)); if it dies, too, the
//! next one does:
//!
//! | change | left at | finished by |
//! |---|---|---|
//! | lanes are opened | any step | nothing: after a fork none are opened, and before it they end with the process |
//! | lanes are given, or left | a lane whose owner does not have it | a member that has it inherits it; else it has no owner |
//! | | steering not as the owners are | steering to the lanes with owners; the others are drained first |
//! | the first lanes are given | mode OBSERVING, and owners | mode MULTI_LANE: steering may be in force already |
//! | | mode OBSERVING, no owner | nothing: no lane was steered to |
//! | falling back | any step but the last, which is the mode | all steps once more: each may be done twice |
//!
//! The mode is always the last step. Undoing a change would need as many steps, and would leave
//! datagrams in lanes that no thread polls in mode OBSERVING.

use std::sync::atomic::{AtomicU32, Ordering};

use libc::pid_t;
use manylane_sys::shim::Reason;

use crate::lock::{self, Guard};
use crate::sock::{MAX_LANES, MULTI_LANE, Member, OBSERVING, PLAIN, Shared, Sock};
use crate::{active_set, lanes, liveness, process, real, report};

/// Owners of lanes change.
pub(crate) const OWNERS: u32 = 1;
/// The socket falls back, for the reason whose number is added.
const FALLBACK: u32 = 0x100;
/// The reason is in the report.
const REASON_COUNTED: u32 = 0x200;

/// What is written down when a socket falls back.
pub(crate) fn fallback_change(reason: Reason) -> u32 {
    FALLBACK + reason as u32
}

/// The reason that the socket falls back for is in the report.
pub(crate) fn mark_counted(shared: &Shared, _guard: &Guard<'_>) {
    if shared.change.load(Ordering::Relaxed) & FALLBACK != 0 {
        shared.change.fetch_or(REASON_COUNTED, Ordering::AcqRel);
    }
}

/// A change that is being made. It counts as made when this is dropped.
pub(crate) struct Change<'a>(Option<&'a AtomicU32>);

impl Drop for Change<'_> {
    fn drop(&mut self) {
        if let Some(word) = self.0 {
            word.store(0, Ordering::Release);
        }
    }
}

/// Writes down what is about to be changed. A change within another one is a part of that.
pub(crate) fn start_change<'a>(shared: &'a Shared, what: u32, _guard: &Guard<'_>) -> Change<'a> {
    let fresh = shared.change.compare_exchange(0, what, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    Change(fresh.then_some(&shared.change))
}

/// The lock of changes, with nothing left half made; none if somebody else who is alive has it and
/// `wait` says not to wait.
pub(crate) fn lock<'a>(sock: &Sock, shared: &'a Shared, wait: bool) -> Option<Guard<'a>> {
    let guard = lock::lock(&shared.lock, wait)?;
    if shared.change.load(Ordering::Acquire) != 0 {
        finish(sock, shared, &guard);
    }
    Some(guard)
}

/// Finishes what somebody died over, if there is such a thing.
#[inline]
pub(crate) fn recover(sock: &Sock, shared: &Shared) {
    let left = || shared.change.load(Ordering::Relaxed) != 0 && shared.lock.load(Ordering::Relaxed) == 0;
    if lock::is_holder_dead(&shared.lock) || left() {
        recover_now(sock, shared);
    }
}

#[cold]
fn recover_now(sock: &Sock, shared: &Shared) {
    let errno = real::errno();
    drop(lock(sock, shared, false));
    real::set_errno(errno);
}

#[cold]
fn finish(sock: &Sock, shared: &Shared, guard: &Guard<'_>) {
    match shared.change.load(Ordering::Acquire) {
        OWNERS => finish_owners(sock, shared, guard),
        // The mode is the last step.
        _ if shared.mode() == PLAIN => {}
        change => {
            // Without a descriptor (it is just being closed here) somebody else does it.
            let Some(kept) = lanes::dup_any(sock) else { return };
            let fd = kept.fd();
            if let Some(reason) = Reason::ALL.into_iter().find(|reason| fallback_change(*reason) == change) {
                report::count_reason(reason, lanes::local_addr(fd));
                mark_counted(shared, guard);
            }
            lanes::make_plain(sock, shared, fd, guard);
        }
    }
    shared.change.store(0, Ordering::Release);
}

/// Owners, steering and mode fit each other again.
fn finish_owners(sock: &Sock, shared: &Shared, guard: &Guard<'_>) {
    let count = (shared.lanes.load(Ordering::Acquire) as usize).min(MAX_LANES);
    let mut owned = 0_u64;
    for lane in 0..count {
        let has = |owner: &Member| {
            owner.thread_id.load(Ordering::Relaxed) != 0 && owner.lane.load(Ordering::Relaxed) == lane as i32
        };
        if shared.owner_of(lane).is_some_and(has) || lanes::inherit(shared, lane) {
            owned |= 1 << lane;
        }
    }
    if owned == 0 && shared.mode() == OBSERVING {
        return;
    }
    if matches!(shared.mode(), OBSERVING | MULTI_LANE) {
        let fd = lanes::group_fd(sock);
        lanes::drain_first(shared, lanes::lanes_mask(shared));
        lanes::steer_to(shared, fd, active_set::active_lanes(shared, owned));
        shared.mode.store(MULTI_LANE, Ordering::Release);
        reap_all(sock, shared, guard);
        lanes::drain_first(shared, lanes::lanes_mask(shared));
    }
}

/// The owner of `lane` is dead: its lane goes out of steering, and before all others; who shares
/// one gets one of its own.
#[cold]
pub(crate) fn reap_owner(sock: &Sock, shared: &Shared, lane: usize) {
    let errno = real::errno();
    // With or without the lock: who has it may be stopped.
    lanes::drain_first(shared, 1 << lane);
    if let Some(guard) = lock(sock, shared, false)
        && shared.mode() == MULTI_LANE
    {
        reap_all(sock, shared, &guard);
    }
    real::set_errno(errno);
}

/// Frees the places of all members that are dead.
#[cold]
pub(crate) fn reap_all(sock: &Sock, shared: &Shared, guard: &Guard<'_>) {
    let fd = lanes::group_fd(sock);
    let _change = start_change(shared, OWNERS, guard);
    for at in 0..shared.joined.load(Ordering::Acquire) as usize {
        if shared.members.get(at).is_some_and(has_exited) {
            lanes::remove_member_locked(shared, fd, at, guard);
        }
    }
    lanes::split_shared_lanes(shared);
    lanes::assign(shared, fd, false);
}

/// Whether a member's thread is dead; where it has no life, whether its process can be seen to
/// exist no more.
#[cold]
pub(crate) fn has_exited(member: &Member) -> bool {
    let who = member.thread_id.load(Ordering::Acquire);
    let token = member.liveness.load(Ordering::Acquire);
    who != 0
        && if token == 0 { process::has_exited((who >> 32) as pid_t) } else { liveness::has_exited(token) }
}
