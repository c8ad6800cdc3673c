//! How a socket becomes a plain one: lanes leave steering, then the table of ports, and are emptied by whoever receives next.

use std::sync::atomic::Ordering;

use libc::c_int;
use manylane_sys::barrier;
use manylane_sys::shim::Reason;

use super::{bound_waits, keep, keep_as, lanes_mask, local_addr, steer_to, unbound_waits};
use crate::lock::Guard;
use crate::sock::{BLOCKS, LANED, LEARN, PLAIN, Shared, Sock, UNBOUND};
use crate::{
    alone, epoll, gather, hold, identity, inside, loan, mend, mirror, open, points, queues, real, report,
};

/// The socket becomes a plain one, for good: lanes leave steering, then the table of ports, and are emptied by
/// whoever receives next. When this returns, the program's own socket is the only one that gets anything.
#[cold]
pub(crate) fn fall_back(sock: &'static Sock, fd: c_int, reason: Reason) {
    if inside::enter() {
        fall_back_now(sock, fd, reason);
        inside::leave();
    }
}

fn fall_back_now(sock: &'static Sock, fd: c_int, reason: Reason) {
    let errno = real::errno();
    sock.spoil(reason);
    let may_fall = |shared: &&Shared| !matches!(shared.mode(), UNBOUND | PLAIN);
    if let Some(shared) = sock.shared().filter(may_fall) {
        let generation = sock.generation.load(Ordering::Acquire);
        // It may be a descriptor of another thread, which closes it meanwhile.
        match keep_as(sock, fd) {
            Some(kept) => fall(sock, shared, kept.fd(), generation, reason),
            // There is no descriptor left to keep it by.
            None if identity::is(sock, fd) => fall(sock, shared, fd, generation, reason),
            None => _ = identity::look_at_all(sock),
        }
    }
    real::set_errno(errno);
}

fn fall(sock: &'static Sock, shared: &Shared, fd: c_int, generation: u32, reason: Reason) {
    if let Some(guard) = mend::lock(sock, shared, true)
        && !matches!(shared.mode(), UNBOUND | PLAIN)
        && sock.generation.load(Ordering::Acquire) == generation
    {
        let change = mend::begin(shared, mend::falling(reason), &guard);
        points::pass("falling");
        report::count_reason(reason, local_addr(fd));
        mend::counted(shared, &guard);
        plain(sock, shared, fd, &guard);
        drop(change);
        drop(guard);
        epoll::fallen(sock);
    }
}

/// All steps of falling back. Each may be done twice: who finishes what somebody died over does them all.
pub(crate) fn plain(sock: &Sock, shared: &Shared, fd: c_int, _guard: &Guard<'_>) {
    alone::leave(sock);
    loan::close(sock, shared);
    let others = lanes_mask(shared) & !1;
    if others == 0 {
        shared.mode.store(PLAIN, Ordering::SeqCst);
        if shared.bounded.load(Ordering::Acquire) != 0 && shared.retired.load(Ordering::Acquire) == 0 {
            unbound_waits(shared, fd);
        }
        forget_steering(sock, fd);
        return;
    }
    steer_to(shared, fd, 1);
    points::pass("steered to one");
    // What is between steering and a queue arrives there before this returns.
    barrier::settle();
    for (_, lane) in sock.lane_fds() {
        open::cut_off(lane);
        points::pass("cut off");
    }
    mirror::set_number(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 0);
    if shared.bounded.load(Ordering::Acquire) == 0 {
        bound_waits(shared, fd);
    }
    let holds = if sock.holds().is_some() { hold::HOLDS } else { 0 };
    shared.retired.store(others | holds, Ordering::Release);
    points::pass("retired");
    // Without a lane, a member takes from all of them until the mode has changed.
    for member in &shared.members {
        member.lane.store(-1, Ordering::Relaxed);
        report::lane(member, -1, shared.inode_of(-1));
    }
    points::pass("nobody's");
    forget_steering(sock, fd);
    shared.mode.store(PLAIN, Ordering::SeqCst);
    points::pass("plain");
    gather::flush_all(sock, shared, fd);
}

/// A retired lane was found empty: it stays so. With the last one the socket is the kernel's alone.
#[cold]
pub(crate) fn emptied(sock: &Sock, shared: &Shared, fd: c_int, lane: usize) {
    let errno = real::errno();
    let bit = 1 << lane;
    let mut retired = shared.retired.load(Ordering::Acquire);
    while retired & bit != 0 {
        if retired == bit && identity::is(sock, fd) {
            // Before anybody takes the socket for the kernel's: a bound of ours would be seen.
            unbound_waits(shared, fd);
        }
        match shared.retired.compare_exchange(retired, retired & !bit, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => break,
            Err(now) => retired = now,
        }
    }
    real::set_errno(errno);
}

/// The socket's group, if it ever has one, is the program's.
pub(crate) fn forget_steering(sock: &Sock, fd: c_int) {
    if sock.steered_ahead.swap(0, Ordering::AcqRel) != 0 {
        let errno = real::errno();
        open::forget_steering(fd);
        real::set_errno(errno);
    }
}

/// From now on nobody can tell whether a blocking receive goes on after a signal: `signals.rs`.
#[cold]
pub(crate) fn signals_are_mixed() {
    for sock in Sock::in_use() {
        let Some(shared) = sock.shared() else { continue };
        let joined = shared.joined.load(Ordering::Acquire) as usize;
        let blocks = shared
            .members
            .iter()
            .take(joined)
            .any(|member| member.kind.load(Ordering::Relaxed) & BLOCKS != 0);
        if (matches!(shared.mode(), LEARN | LANED) || queues::are_open(shared))
            && blocks
            && let Some(fd) = keep(sock)
        {
            fall_back(sock, fd.fd(), Reason::Signals);
        }
    }
}
