//! The descriptors of a socket and its lanes, for a thread that was not called with one, and the
//! receive timeout of the program's own socket.

use std::sync::atomic::Ordering;

use libc::c_int;

use crate::base::settings::WAIT_SLICE_MS;
use crate::base::{real, sockopt};
use crate::fds::hidden_fds::HiddenFd;
use crate::fds::identity;
use crate::fds::table::{self, Entry};
use crate::shared::lease::DRAINING;
use crate::shared::sock::{PLAIN, Shared, Sock, UNBOUND};

/// Makes a blocking receive on the kernel's socket return after a slice.
pub(crate) fn set_wait_bound(shared: &Shared, fd: c_int) {
    shared.bounded.store(1, Ordering::Release);
    sockopt::set_recv_timeout(fd, WAIT_SLICE_MS as u64 * 1000);
}

/// Sets the program's own receive timeout on the kernel's socket again.
pub(crate) fn clear_wait_bound(shared: &Shared, fd: c_int) {
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

/// `fd` if it is one of the socket's; else any.
pub(crate) fn any_fd_preferring(sock: &Sock, fd: c_int) -> Option<c_int> {
    if identity::is_same_socket(sock, fd) { Some(fd) } else { any_fd(sock) }
}

/// A duplicate descriptor of the socket, for a thread that was not called with one: another thread
/// may close any of the program's at any time.
pub(crate) fn dup_any(sock: &Sock) -> Option<HiddenFd> {
    dup_checked(sock, any_fd(sock)?)
}

/// [`dup_any`], of `fd` if it is still one of the socket's.
pub(crate) fn dup_preferring(sock: &Sock, fd: c_int) -> Option<HiddenFd> {
    dup_checked(sock, fd).or_else(|| dup_any(sock))
}

fn dup_checked(sock: &Sock, fd: c_int) -> Option<HiddenFd> {
    let kept = HiddenFd::dup(fd)?;
    // The number may have come to mean another socket before it was duplicated.
    (identity::is_same_socket(sock, kept.fd()) && table::entry(fd) == Entry::Sock(sock.index()))
        .then_some(kept)
}

/// A retired lane is empty, for good. After the last one the socket is the kernel's alone.
#[cold]
pub(crate) fn mark_lane_empty(sock: &Sock, shared: &Shared, fd: c_int, lane: usize) {
    let errno = real::errno();
    let bit = 1 << lane;
    let mut retired = shared.retired.load(Ordering::Acquire);
    while retired & bit != 0 {
        let is_bounded = || shared.bounded.load(Ordering::Acquire) != 0;
        if retired == bit && is_bounded() && identity::is_same_socket(sock, fd) {
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

/// True if the library still manages the socket.
#[inline]
pub(crate) fn is_managed(shared: &Shared) -> bool {
    match shared.mode() {
        UNBOUND => false,
        PLAIN => {
            shared.retired.load(Ordering::Acquire) != 0 || shared.lease.load(Ordering::Acquire) == DRAINING
        }
        _ => true,
    }
}

/// The socket behind `fd`, if the library manages it.
#[inline]
pub(crate) fn managed(fd: c_int) -> Option<(&'static Sock, &'static Shared)> {
    let sock = table::sock(fd)?;
    let shared = sock.shared()?;
    is_managed(shared).then_some((sock, shared))
}
