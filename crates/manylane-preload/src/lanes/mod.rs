//! Lanes that are made and removed: when a socket gets them, who owns which, and how it falls
//! back.
//!
//! Every change is made under the lock and recorded before its first step (`recovery.rs`), in an
//! order that lets another thread finish it from any step.
//!
//! | file | what it decides |
//! |---|---|
//! | here | what the others need: descriptors of a socket, and its end |
//! | `create.rs` | when a socket gets lanes, and which lanes are opened in advance |
//! | `owners.rs` | who owns which lane, and which lanes are steered to |
//! | `fallback.rs` | how a socket becomes plain again |

mod create;
mod fallback;
mod owners;

use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use libc::c_int;
use manylane_sys::shim::Reason;

use crate::hidden_fds::{self, HiddenFd};
use crate::lane_socket::{self, WAIT_SLICE_MS};
use crate::sock::{Member, Shared, Sock};
use crate::table::{self, Entry};
use crate::{identity, lease, recovery, send_batch, single_receiver, sockopt};

pub(crate) use create::{before_bind, bind, preopen_lanes, should_try_create, try_create};
pub(crate) use fallback::{detach_steering, fall_back, make_plain, mark_lane_empty, on_mixed_signals};
pub(crate) use owners::{
    assign, count_drained, drain_first, inherit, remove_member, remove_member_locked, split_shared_lanes,
    steer_away, steer_to, steer_to_active,
};

/// Receives after which a thread is known to come back.
pub(crate) const PROVEN_RECEIVES_MIN: u32 = 2;

/// The address of `fd`.
pub(crate) fn local_addr(fd: c_int) -> Option<SocketAddr> {
    lane_socket::bound_addr(fd)?.addr()
}

/// Makes a blocking receive on the kernel's socket return after a slice.
pub(crate) fn set_wait_bound(shared: &Shared, fd: c_int) {
    shared.bounded.store(1, Ordering::Release);
    sockopt::set_recv_timeout(fd, WAIT_SLICE_MS as u64 * 1000);
}

/// Sets the program's own receive timeout on the kernel's socket again.
fn clear_wait_bound(shared: &Shared, fd: c_int) {
    sockopt::set_recv_timeout(fd, shared.timeout_us.load(Ordering::Relaxed));
    shared.bounded.store(0, Ordering::Release);
}

/// A bit for each socket of the group.
pub(crate) fn lanes_mask(shared: &Shared) -> u64 {
    match shared.lanes.load(Ordering::Acquire) {
        0 => 0,
        count => u64::MAX >> (64 - count.min(64)),
    }
}

/// Any lane's socket, to set the group's steering on; -1 without lanes. Requires the lock, because
/// lanes may just be being created.
pub(crate) fn group_fd(sock: &Sock) -> c_int {
    sock.lane_fds().next().map_or(-1, |(_, fd)| fd)
}

/// Any of the program's descriptors for a socket.
pub(crate) fn any_fd(sock: &Sock) -> Option<c_int> {
    let index = sock.index();
    let is_one =
        |(fd, entry): &(c_int, Entry)| *entry == Entry::Sock(index) && identity::is_same_socket(sock, *fd);
    table::tracked(0, u32::MAX).find(is_one).map(|(fd, _)| fd)
}

/// A duplicate descriptor of the socket, for a thread that was not called with one: another thread
/// may close any of the program's at any time.
pub(crate) fn dup_any(sock: &Sock) -> Option<HiddenFd> {
    dup_checked(sock, any_fd(sock)?)
}

/// [`dup_any`], of `fd` if it is still one of the socket's.
fn dup_preferring(sock: &Sock, fd: c_int) -> Option<HiddenFd> {
    dup_checked(sock, fd).or_else(|| dup_any(sock))
}

fn dup_checked(sock: &Sock, fd: c_int) -> Option<HiddenFd> {
    let kept = HiddenFd::dup(fd)?;
    // The number may have come to mean another socket before it was duplicated.
    (identity::is_same_socket(sock, kept.fd()) && table::entry(fd) == Entry::Sock(sock.index()))
        .then_some(kept)
}

/// The process closes the socket: frees the member slots of its threads.
pub(crate) fn close(sock: &Sock) {
    single_receiver::disarm(sock);
    if let Some(shared) = sock.shared()
        && let Some(guard) = recovery::lock(sock, shared, true)
    {
        // No other process has it: the next socket bound to the port must get every new datagram.
        // The lessor would see the end of the lease a moment too late.
        if shared.forked.load(Ordering::Relaxed) == 0 {
            lease::close(sock, shared);
        }
        let fd = group_fd(sock);
        send_batch::flush_all(sock, shared, fd);
        let pid = u64::from(std::process::id());
        for at in 0..shared.joined.load(Ordering::Acquire) as usize {
            if shared.members[at].thread_id.load(Ordering::Relaxed) >> 32 == pid {
                remove_member_locked(shared, fd, at, &guard);
            }
        }
    }
    for (lane, fd) in sock.lane_fds() {
        sock.set_lane_fd(lane, None);
        hidden_fds::close(fd);
    }
    lease::release(sock);
    sock.release();
}

/// The program closed a descriptor of the library by a call that the library does not see, and
/// uses its number. The library goes on without it.
#[cold]
pub(crate) fn handle_lost_fd(fd: c_int) {
    for sock in Sock::in_use() {
        let lane = sock.lane_fds().find(|(_, at)| *at == fd);
        if let Some((lane, _)) = lane {
            sock.set_lane_fd(lane, None);
        }
        if lane.is_some() || sock.lease().is_some_and(|lease| lease.has_fd(fd)) {
            let own = any_fd(sock).unwrap_or(-1);
            fall_back(sock, own, Reason::NoSocket);
        }
    }
}

/// Counts one heartbeat of the calling thread.
#[inline]
pub(crate) fn heartbeat(member: &Member) {
    member.heartbeat.store(member.heartbeat.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}
