//! The steps by which a socket becomes plain: `lanes/fallback.rs` says why and when.

use std::sync::atomic::Ordering;

use libc::c_int;
use manylane_sys::barrier;

use crate::base::{real, sockopt};
use crate::batching::{prefetch, send_batch};
use crate::fds::lane_socket;
use crate::fds::sock_fds::{clear_wait_bound, lanes_mask, set_wait_bound};
use crate::group::leasing;
use crate::group::owners::steer_to;
use crate::shared::lock::Guard;
use crate::shared::sock::{PLAIN, Shared, Sock};
use crate::shared::{failpoint, report};

/// All steps of a fallback. Each may be done twice, because recovery after a dead thread repeats
/// them all.
pub(crate) fn make_plain(sock: &Sock, shared: &Shared, fd: c_int, _guard: &Guard<'_>) {
    leasing::close(sock, shared);
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
    failpoint::hit("steered to own socket");
    // Packets already steered reach their queues before this returns.
    barrier::synchronize();
    for (_, lane) in sock.lane_fds() {
        lane_socket::retire(lane);
        failpoint::hit("lane retired");
    }
    sockopt::set_int_option(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 0);
    if shared.bounded.load(Ordering::Acquire) == 0 {
        set_wait_bound(shared, fd);
    }
    let prefetched = if sock.prefetches().is_some() { prefetch::PREFETCH_BIT } else { 0 };
    shared.retired.store(others | prefetched, Ordering::Release);
    failpoint::hit("retired lanes stored");
    // Without a lane, a member receives from all lanes until the mode has changed.
    for member in &shared.members {
        member.lane.store(-1, Ordering::Relaxed);
        report::record_lane(member, -1, shared.inode_of(-1));
    }
    failpoint::hit("members detached");
    detach_steering(sock, fd);
    shared.mode.store(PLAIN, Ordering::SeqCst);
    failpoint::hit("plain");
    send_batch::flush_all(sock, shared, fd);
}

/// Detaches the library's steering: a later group of the socket is the program's.
pub(crate) fn detach_steering(sock: &Sock, fd: c_int) {
    if sock.pre_steered.swap(0, Ordering::AcqRel) != 0 {
        let errno = real::errno();
        lane_socket::detach_steering(fd);
        real::set_errno(errno);
    }
}
