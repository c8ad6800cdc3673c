//! What the living do for the dead: their lanes are emptied and given away, and what they were changing is finished.
//!
//! Who changes modes or owners has the lock, and writes down what it is at before it begins ([`begin`]). A lock of the dead is
//! taken over like an open one, by the first that wants it or looks ([`look`]). Who then finds a change written down that
//! is not its own finishes it, whatever step it was left at ([`lock`]); should it die over that, too, the next one does:
//!
//! | change | left at | finished by |
//! |---|---|---|
//! | lanes are opened | any step | nobody: after a fork none are, and before it they end with the process |
//! | lanes are given, or left | a lane whose owner does not have it | a member that has it inherits; else it is nobody's |
//! | | steering not as the owners are | steering to the lanes with owners; the others are emptied first |
//! | the first lanes are given | mode LEARN, and owners | mode LANED: steering may be in force already |
//! | | mode LEARN, no owner | nothing: nobody was steered to |
//! | falling back | any step but the last, which is the mode | all steps once more: each may be done twice |
//!
//! Undoing would need as much, and would leave datagrams in lanes that nobody looks at in mode LEARN.

use std::sync::atomic::{AtomicU32, Ordering};

use libc::pid_t;
use manylane_sys::shim::Reason;

use crate::lock::{self, Guard};
use crate::sock::{LANED, LEARN, MAX_LANES, Member, PLAIN, Shared, Sock};
use crate::{lanes, life, process, real, report, rest};

/// Owners of lanes change.
pub(crate) const OWNERS: u32 = 1;
/// The socket falls back, for the reason whose number is added.
const FALLING: u32 = 0x100;
/// The reason is in the report.
const COUNTED: u32 = 0x200;

/// What is written down when a socket falls back.
pub(crate) fn falling(reason: Reason) -> u32 {
    FALLING + reason as u32
}

/// The reason that the socket falls back for is in the report.
pub(crate) fn counted(shared: &Shared, _guard: &Guard<'_>) {
    if shared.change.load(Ordering::Relaxed) & FALLING != 0 {
        shared.change.fetch_or(COUNTED, Ordering::AcqRel);
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
pub(crate) fn begin<'a>(shared: &'a Shared, what: u32, _guard: &Guard<'_>) -> Change<'a> {
    let fresh = shared.change.compare_exchange(0, what, Ordering::AcqRel, Ordering::Relaxed).is_ok();
    Change(fresh.then_some(&shared.change))
}

/// The lock of changes, with nothing left half made; none if somebody else who is alive has it and `wait` says not to wait.
pub(crate) fn lock<'a>(sock: &Sock, shared: &'a Shared, wait: bool) -> Option<Guard<'a>> {
    let guard = lock::lock(&shared.lock, wait)?;
    if shared.change.load(Ordering::Acquire) != 0 {
        finish(sock, shared, &guard);
    }
    Some(guard)
}

/// Finishes what somebody died over, if there is such a thing.
#[inline]
pub(crate) fn look(sock: &Sock, shared: &Shared) {
    let left = || shared.change.load(Ordering::Relaxed) != 0 && shared.lock.load(Ordering::Relaxed) == 0;
    if lock::is_of_the_dead(&shared.lock) || left() {
        take_over(sock, shared);
    }
}

#[cold]
fn take_over(sock: &Sock, shared: &Shared) {
    let errno = real::errno();
    drop(lock(sock, shared, false));
    real::set_errno(errno);
}

#[cold]
fn finish(sock: &Sock, shared: &Shared, guard: &Guard<'_>) {
    match shared.change.load(Ordering::Acquire) {
        OWNERS => owners(sock, shared, guard),
        // The mode is the last step.
        _ if shared.mode() == PLAIN => {}
        change => {
            // Without a descriptor (it is just being closed here) somebody else does it.
            let Some(kept) = lanes::keep(sock) else { return };
            let fd = kept.fd();
            if let Some(reason) = Reason::ALL.into_iter().find(|reason| falling(*reason) == change) {
                report::count_reason(reason, lanes::local_addr(fd));
                counted(shared, guard);
            }
            lanes::plain(sock, shared, fd, guard);
        }
    }
    shared.change.store(0, Ordering::Release);
}

/// Owners, steering and mode fit each other again.
fn owners(sock: &Sock, shared: &Shared, guard: &Guard<'_>) {
    let count = (shared.lanes.load(Ordering::Acquire) as usize).min(MAX_LANES);
    let mut owned = 0_u64;
    for lane in 0..count {
        let has = |owner: &Member| {
            owner.who.load(Ordering::Relaxed) != 0 && owner.lane.load(Ordering::Relaxed) == lane as i32
        };
        if shared.owner_of(lane).is_some_and(has) || lanes::inherit(shared, lane) {
            owned |= 1 << lane;
        }
    }
    if owned == 0 && shared.mode() == LEARN {
        return;
    }
    if matches!(shared.mode(), LEARN | LANED) {
        let fd = lanes::group(sock);
        lanes::drain_first(shared, lanes::lanes_mask(shared));
        lanes::steer_to(shared, fd, rest::awake(shared, owned));
        shared.mode.store(LANED, Ordering::Release);
        bury_all(sock, shared, guard);
        lanes::drain_first(shared, lanes::lanes_mask(shared));
    }
}

/// The owner of `lane` is dead: its lane goes out of steering, and before all others; who shares one gets one of its own.
#[cold]
pub(crate) fn bury(sock: &Sock, shared: &Shared, lane: usize) {
    let errno = real::errno();
    // With or without the lock: who has it may be stopped.
    lanes::drain_first(shared, 1 << lane);
    if let Some(guard) = lock(sock, shared, false)
        && shared.mode() == LANED
    {
        bury_all(sock, shared, &guard);
    }
    real::set_errno(errno);
}

/// Frees the places of all members that are dead.
#[cold]
pub(crate) fn bury_all(sock: &Sock, shared: &Shared, guard: &Guard<'_>) {
    let fd = lanes::group(sock);
    let _change = begin(shared, OWNERS, guard);
    for at in 0..shared.joined.load(Ordering::Acquire) as usize {
        if shared.members.get(at).is_some_and(is_gone) {
            lanes::leave(shared, fd, at, guard);
        }
    }
    lanes::part(shared);
    lanes::assign(shared, fd, false);
}

/// Whether a member's thread is dead; where it has no life, whether its process can be seen to exist no more.
#[cold]
pub(crate) fn is_gone(member: &Member) -> bool {
    let who = member.who.load(Ordering::Acquire);
    let token = member.life.load(Ordering::Acquire);
    who != 0 && if token == 0 { process::is_gone((who >> 32) as pid_t) } else { life::is_dead(token) }
}
