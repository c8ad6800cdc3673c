//! How a socket becomes plain, for good, when it meets something that a lane cannot mirror. The
//! reason is counted (`Reason`; docs/run.md has the table).
//!
//! 1. Steer to lane 0, and wait for a grace period: after it no packet is on its way to another
//!    lane.
//! 2. Take the other lanes out of the kernel's table of ports (`lane_socket::retire`), and
//!    SO_REUSEPORT off the program's socket.
//! 3. Change the mode. The next receives take the datagrams that the lanes still hold before any
//!    other.
//!
//! With queues (engine `xdp`) the launcher first takes the port out of the XDP programs
//! (`lease.rs`).

use std::sync::atomic::Ordering;

use libc::c_int;
use manylane_sys::barrier;
use manylane_sys::shim::Reason;

use super::{clear_wait_bound, dup_any, dup_preferring, lanes_mask, local_addr, set_wait_bound, steer_to};
use crate::lock::Guard;
use crate::sock::{BLOCKS, MULTI_LANE, OBSERVING, PLAIN, Shared, Sock, UNBOUND};
use crate::{
    epoll, failpoint, identity, lane_socket, lease, prefetch, queues, quiesce, real, recovery, report,
    send_batch, single_receiver, sockopt,
};

/// The socket becomes plain, for good. Its lanes leave steering, then the table of ports, and the
/// next receives drain them. When this returns, only the program's own socket receives new
/// datagrams.
#[cold]
pub(crate) fn fall_back(sock: &'static Sock, fd: c_int, reason: Reason) {
    if quiesce::enter() {
        fall_back_now(sock, fd, reason);
        quiesce::leave();
    }
}

fn fall_back_now(sock: &'static Sock, fd: c_int, reason: Reason) {
    let errno = real::errno();
    sock.mark_plain(reason);
    let may_fall = |shared: &&Shared| !matches!(shared.mode(), UNBOUND | PLAIN);
    if let Some(shared) = sock.shared().filter(may_fall) {
        let generation = sock.generation.load(Ordering::Acquire);
        // The descriptor may belong to another thread, which may close it meanwhile.
        match dup_preferring(sock, fd) {
            Some(kept) => fall_back_locked(sock, shared, kept.fd(), generation, reason),
            // No descriptor is free for a duplicate.
            None if identity::is_same_socket(sock, fd) => {
                fall_back_locked(sock, shared, fd, generation, reason)
            }
            None => _ = identity::revalidate_all(sock),
        }
    }
    real::set_errno(errno);
}

fn fall_back_locked(sock: &'static Sock, shared: &Shared, fd: c_int, generation: u32, reason: Reason) {
    if let Some(guard) = recovery::lock(sock, shared, true)
        && !matches!(shared.mode(), UNBOUND | PLAIN)
        && sock.generation.load(Ordering::Acquire) == generation
    {
        let change = recovery::start_change(shared, recovery::fallback_change(reason), &guard);
        failpoint::hit("falling");
        report::count_reason(reason, local_addr(fd));
        recovery::mark_counted(shared, &guard);
        make_plain(sock, shared, fd, &guard);
        drop(change);
        drop(guard);
        epoll::handle_fallback(sock);
    }
}

/// All steps of a fallback. Each may be done twice, because recovery after a dead thread repeats
/// them all.
pub(crate) fn make_plain(sock: &Sock, shared: &Shared, fd: c_int, _guard: &Guard<'_>) {
    single_receiver::disarm(sock);
    lease::close(sock, shared);
    let others = lanes_mask(shared) & !1;
    if others == 0 {
        shared.mode.store(PLAIN, Ordering::SeqCst);
        if shared.bounded.load(Ordering::Acquire) != 0 && shared.retired.load(Ordering::Acquire) == 0 {
            clear_wait_bound(shared, fd);
        }
        detach_steering(sock, fd);
        return;
    }
    steer_to(shared, fd, 1);
    failpoint::hit("steered to one");
    // Packets already steered reach their queues before this returns.
    barrier::synchronize();
    for (_, lane) in sock.lane_fds() {
        lane_socket::retire(lane);
        failpoint::hit("cut off");
    }
    sockopt::set_int_option(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 0);
    if shared.bounded.load(Ordering::Acquire) == 0 {
        set_wait_bound(shared, fd);
    }
    let holds = if sock.prefetches().is_some() { prefetch::PREFETCH_BIT } else { 0 };
    shared.retired.store(others | holds, Ordering::Release);
    failpoint::hit("retired");
    // Without a lane, a member receives from all lanes until the mode has changed.
    for member in &shared.members {
        member.lane.store(-1, Ordering::Relaxed);
        report::record_lane(member, -1, shared.inode_of(-1));
    }
    failpoint::hit("nobody's");
    detach_steering(sock, fd);
    shared.mode.store(PLAIN, Ordering::SeqCst);
    failpoint::hit("plain");
    send_batch::flush_all(sock, shared, fd);
}

/// A retired lane is empty, for good. After the last one the socket is the kernel's alone.
#[cold]
pub(crate) fn mark_lane_empty(sock: &Sock, shared: &Shared, fd: c_int, lane: usize) {
    let errno = real::errno();
    let bit = 1 << lane;
    let mut retired = shared.retired.load(Ordering::Acquire);
    while retired & bit != 0 {
        if retired == bit && identity::is_same_socket(sock, fd) {
            // Before any thread treats the socket as unmanaged: it would see our timeout.
            clear_wait_bound(shared, fd);
        }
        match shared.retired.compare_exchange(retired, retired & !bit, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => break,
            Err(now) => retired = now,
        }
    }
    real::set_errno(errno);
}

/// Detaches the library's steering: a later group of the socket is the program's.
pub(crate) fn detach_steering(sock: &Sock, fd: c_int) {
    if sock.pre_steered.swap(0, Ordering::AcqRel) != 0 {
        let errno = real::errno();
        lane_socket::detach_steering(fd);
        real::set_errno(errno);
    }
}

/// It is unknown whether a blocking receive restarts after a signal: `signals.rs`.
#[cold]
pub(crate) fn on_mixed_signals() {
    for sock in Sock::in_use() {
        let Some(shared) = sock.shared() else { continue };
        let joined = shared.joined.load(Ordering::Acquire) as usize;
        let blocks = shared
            .members
            .iter()
            .take(joined)
            .any(|member| member.kind.load(Ordering::Relaxed) & BLOCKS != 0);
        if (matches!(shared.mode(), OBSERVING | MULTI_LANE) || queues::is_open(shared))
            && blocks
            && let Some(fd) = dup_any(sock)
        {
            fall_back(sock, fd.fd(), Reason::Signals);
        }
    }
}
