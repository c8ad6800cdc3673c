//! Recovery after a thread died: its lanes are drained and given away, and its unfinished change
//! is finished.
//!
//! A thread that changes modes or owners holds the lock, and records the change before its first
//! step ([`start_change`]). The lock of a dead thread counts as free. The next thread that wants
//! it or polls takes it over ([`recover`]). If it finds a recorded change that is not its own, it
//! finishes the change from the step at which it was left ([`lock`](fn@lock)); if it dies, too, the
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

use std::sync::atomic::Ordering;

use manylane_ipc::report::Reason;

use crate::base::real;
use crate::fds::hidden_fds::HiddenFd;
use crate::fds::{lane_socket, sock_fds};
use crate::group::active_set;
use crate::group::change::{OWNERS, fallback_change, mark_counted, start_change};
use crate::group::owners;
use crate::group::plain::make_plain;
use crate::shared::lock::{self, Guard};
use crate::shared::sock::{MULTI_LANE, Member, OBSERVING, PLAIN, Shared, Sock};
use crate::shared::{liveness, processes, report};

/// The lock of changes, after any unfinished change was finished. None if another live thread
/// holds it and `wait` is false.
pub(crate) fn lock<'a>(sock: &Sock, shared: &'a Shared, wait: bool) -> Option<Guard<'a>> {
    let guard = lock::lock(&shared.lock, wait)?;
    if shared.change.load(Ordering::Acquire) != 0 {
        finish(sock, shared, &guard);
    }
    Some(guard)
}

/// Finishes the change that a dead thread left unfinished, if there is one.
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
            // A duplicate, unless no descriptor is free for it.
            let kept = sock_fds::dup_any(sock);
            let own = || sock_fds::any_fd(sock);
            // No descriptor: it is just being closed here. A later holder of the lock does it.
            let Some(fd) = kept.as_ref().map(HiddenFd::fd).or_else(own) else { return };
            if let Some(reason) = Reason::ALL.into_iter().find(|reason| fallback_change(*reason) == change) {
                report::count_reason(reason, lane_socket::local_addr(fd));
                mark_counted(shared, guard);
            }
            make_plain(sock, shared, fd, guard);
        }
    }
    shared.change.store(0, Ordering::Release);
}

/// Makes owners, steering and mode consistent again.
fn finish_owners(sock: &Sock, shared: &Shared, guard: &Guard<'_>) {
    let mut owned = 0_u64;
    for lane in 0..shared.lane_count() {
        let has = |owner: &Member| {
            owner.thread_id.load(Ordering::Relaxed) != 0 && owner.lane.load(Ordering::Relaxed) == lane as i32
        };
        if shared.owner_of(lane).is_some_and(has) || owners::inherit(shared, lane) {
            owned |= 1 << lane;
        }
    }
    if owned == 0 && shared.mode() == OBSERVING {
        return;
    }
    if matches!(shared.mode(), OBSERVING | MULTI_LANE) {
        let fd = sock_fds::group_fd(sock);
        owners::drain_first(shared, sock_fds::lanes_mask(shared));
        owners::steer_to(shared, fd, active_set::active_lanes(shared, owned));
        shared.mode.store(MULTI_LANE, Ordering::Release);
        reap_all(sock, shared, guard);
        owners::drain_first(shared, sock_fds::lanes_mask(shared));
    }
}

/// The owner of `lane` is dead: its lane leaves steering and is drained before all others. A
/// member that shares a lane gets one of its own.
#[cold]
pub(crate) fn reap_owner(sock: &Sock, shared: &Shared, lane: usize) {
    let errno = real::errno();
    // Set the bit before trying the lock: its holder may be stopped.
    owners::drain_first(shared, 1 << lane);
    if let Some(guard) = lock(sock, shared, false)
        && shared.mode() == MULTI_LANE
    {
        reap_all(sock, shared, &guard);
    }
    real::set_errno(errno);
}

/// Frees the slots of all dead members.
#[cold]
pub(crate) fn reap_all(sock: &Sock, shared: &Shared, guard: &Guard<'_>) {
    let fd = sock_fds::group_fd(sock);
    let _change = start_change(shared, OWNERS, guard);
    for (at, member) in shared.joined_members().iter().enumerate() {
        if has_exited(member) {
            owners::remove_member_locked(shared, fd, at, guard);
        }
    }
    owners::split_shared_lanes(shared);
    owners::assign(shared, fd, false);
}

/// True if a member's thread is dead. Without a liveness token: true if its process is known to
/// have exited.
#[cold]
pub(crate) fn has_exited(member: &Member) -> bool {
    let thread_id = member.thread_id.load(Ordering::Acquire);
    let token = member.liveness.load(Ordering::Acquire);
    thread_id != 0
        && if token == 0 {
            let pid = member.pid.load(Ordering::Relaxed).cast_signed();
            pid != 0 && !processes::has_pid_namespaces() && liveness::has_process_exited(pid)
        } else {
            liveness::has_exited(token)
        }
}

/// A member's thread ends.
pub(crate) fn remove_member(sock: &Sock, shared: &Shared, at: usize) {
    if let Some(guard) = lock(sock, shared, true) {
        owners::remove_member_locked(shared, sock_fds::group_fd(sock), at, &guard);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::shared::memory;

    #[test]
    fn a_reused_slot_is_not_a_dead_process() {
        let shared = &memory::map::<Shared>(1, true).unwrap()[0];
        let member = &shared.members[0];
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        member.lane.store(-1, Ordering::Relaxed);
        member.pid.store(child.id(), Ordering::Relaxed);
        member.thread_id.store(1, Ordering::Relaxed);
        assert!(has_exited(member));
        let guard = lock::lock(&shared.lock, true).unwrap();
        owners::remove_member_locked(shared, -1, 0, &guard);
        drop(guard);
        // A thread that joins takes the slot first, and then writes its process.
        member.thread_id.store(2, Ordering::Relaxed);
        assert!(!has_exited(member));
    }
}
