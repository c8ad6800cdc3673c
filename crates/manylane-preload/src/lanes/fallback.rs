//! Fallback of a socket to a plain one, for good, if it needs what lanes do not support. The reason
//! is counted (`Reason`; docs/run.md has the table).
//!
//! 1. Steer to lane 0, and wait for a grace period: after it no packet is on its way to another
//!    lane.
//! 2. Take the other lanes out of the kernel's table of ports (`lane_socket::retire`), and
//!    SO_REUSEPORT off the program's socket.
//! 3. Change the mode. The next receives take the datagrams that the lanes still hold before any
//!    other.
//!
//! With queues (engine `xdp`) the launcher first takes the port out of the XDP programs
//! (`leasing.rs`).

use std::sync::atomic::{Ordering, fence};

use libc::c_int;
use manylane_ipc::report::Reason;

use crate::base::{quiesce, real};
use crate::fds::identity::is_same_socket;
use crate::fds::sock_fds::{any_fd, any_fd_preferring, dup_preferring};
use crate::fds::{lane_socket, table};
use crate::group::change;
use crate::group::plain;
use crate::group::recovery;
use crate::lanes::entries;
use crate::lanes::epoll_set::{self, Epoll, NESTED, NESTED_DRAINED};
use crate::shared::sock::{BLOCKS, MULTI_LANE, OBSERVING, PLAIN, Shared, Sock, UNBOUND};
use crate::shared::{failpoint, lock, report, thread};
use crate::xdp::queues;

/// The socket becomes plain, for good. Its lanes leave steering, then the table of ports, and the
/// next receives drain them. When this returns, only the program's own socket receives new
/// datagrams.
#[cold]
pub(crate) fn fall_back(sock: &'static Sock, fd: c_int, reason: Reason) {
    quiesce::run_inside(|| fall_back_now(sock, fd, reason));
}

/// [`fall_back`] for the socket behind a descriptor of the program, if it is one.
pub(crate) fn fall_back_fd(fd: c_int, reason: Reason) {
    if table::sock(fd).is_some() {
        quiesce::run_inside(|| {
            if let Some(sock) = entries::sock(fd) {
                fall_back_now(sock, fd, reason);
            }
        });
    }
}

fn fall_back_now(sock: &'static Sock, fd: c_int, reason: Reason) {
    let errno = real::errno();
    sock.mark_plain(reason);
    if let Some(shared) = sock.shared() {
        if !matches!(shared.mode(), UNBOUND | PLAIN) {
            fall_back_shared(sock, shared, fd, reason);
        }
        // Also if another thread has made it plain, or recovery, which leaves each entry to the
        // next wait on its instance.
        let has_lanes = sock.lane_fds().next().is_some() || sock.lease().is_some();
        if shared.mode() == PLAIN && has_lanes && thread::is_own_process() {
            epoll_set::handle_fallback(sock);
        }
    }
    real::set_errno(errno);
}

fn fall_back_shared(sock: &'static Sock, shared: &Shared, fd: c_int, reason: Reason) {
    let generation = sock.generation.load(Ordering::Acquire);
    if !thread::is_own_process() {
        return record_fallback(sock, shared, generation, reason);
    }
    // The descriptor may belong to another thread, which may close it meanwhile.
    match dup_preferring(sock, fd) {
        Some(kept) => fall_back_locked(sock, shared, kept.fd(), generation, reason),
        // No descriptor is free for a duplicate.
        None => match any_fd_preferring(sock, fd) {
            Some(fd) => fall_back_locked(sock, shared, fd, generation, reason),
            None => _ = entries::revalidate_all(sock),
        },
    }
}

/// The child of a vfork has the memory of its parent, and a table of descriptors of its own, in
/// which it may have closed lanes, or have files of its own at their numbers. So the change is only
/// recorded: the next thread of the parent that polls its lanes finishes it (`recovery.rs`).
#[cold]
fn record_fallback(sock: &Sock, shared: &Shared, generation: u32, reason: Reason) {
    if let Some(guard) = lock::lock(&shared.lock, true)
        && !matches!(shared.mode(), UNBOUND | PLAIN)
        && sock.generation.load(Ordering::Acquire) == generation
    {
        change::record_fallback(shared, reason, &guard);
    }
}

/// A program that is about to be started gets `copy`, a duplicate of `fd` (-1: one that the C
/// library will make). It may receive on it, and would see only lane 0.
pub(crate) fn before_exec_with_copy(fd: c_int, copy: c_int) {
    if let Some(sock) = table::sock(fd)
        && is_same_socket(sock, if copy < 0 { fd } else { copy })
    {
        fall_back(sock, fd, Reason::Exec);
    }
}

fn fall_back_locked(sock: &'static Sock, shared: &Shared, fd: c_int, generation: u32, reason: Reason) {
    if let Some(guard) = recovery::lock(sock, shared, true)
        && !matches!(shared.mode(), UNBOUND | PLAIN)
        && sock.generation.load(Ordering::Acquire) == generation
    {
        let _change = change::start_change(shared, change::fallback_change(reason), &guard);
        failpoint::hit("fallback begun");
        report::count_reason(reason, lane_socket::local_addr(fd));
        change::mark_counted(shared, &guard);
        plain::make_plain(sock, shared, fd, &guard);
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
            && let Some(fd) = any_fd(sock)
        {
            fall_back(sock, fd, Reason::Signals);
        }
    }
}

/// The program closed a descriptor of the library by a call that the library does not see, and
/// uses its number. The library goes on without it.
#[cold]
pub(crate) fn handle_lost_fd(fd: c_int) {
    for sock in Sock::in_use() {
        let lane = sock.lane_fds().find(|(_, at)| *at == fd);
        if let Some((lane, _)) = lane {
            sock.replace_lane_fd(lane, fd, None);
        }
        if lane.is_some() || sock.lease().is_some_and(|lease| lease.has_fd(fd)) {
            let own = any_fd(sock).unwrap_or(-1);
            fall_back(sock, own, Reason::NoSocket);
        }
    }
}

/// If `fd` is an instance: it is about to be waited for as a descriptor.
#[inline]
pub(crate) fn mark_nested(fd: c_int) {
    if let Some(epoll) = Epoll::of(fd)
        && epoll.nested.load(Ordering::Acquire) != NESTED_DRAINED
    {
        mark_nested_now(epoll, fd);
    }
}

/// Makes the sockets in an instance plain, and reports their leftovers.
#[cold]
fn mark_nested_now(epoll: &'static Epoll, epfd: c_int) {
    if epoll.nested.compare_exchange(0, NESTED, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
        // Either this thread sees a socket that is being added, or the thread that adds it sees
        // `nested`.
        fence(Ordering::SeqCst);
        for (item, sock) in epoll.items() {
            fall_back(sock, item.fd.load(Ordering::Relaxed), Reason::NestedEpoll);
        }
    }
    epoll_set::refresh(epoll, epfd);
}
