//! Detaching: after a program has installed a seccomp filter, it makes no other system calls than
//! it would without the library.
//!
//! A filter allows the program's own calls, and may end the process at any other. So before the
//! first filter is installed by prctl(2) or seccomp(2), once for each process:
//! 1. Every socket becomes plain (`lanes/fallback.rs`), and replies that were kept are sent.
//! 2. All threads leave the library (`quiesce.rs`); the filter may apply to them, too.
//! 3. Datagrams left in lanes are copied into memory (`leftovers.rs`), because each would take a
//!    call on a descriptor of the library's own.
//! 4. From then on each call is the C library's own, except that leftovers come first
//!    (`detached.rs`).
//!
//! If the program's call fails, its sockets stay plain.

use std::sync::atomic::Ordering;

use libc::{MSG_DONTWAIT, c_int, c_long, c_ulong};
use manylane_ipc::report::Reason;

use crate::base::real::{self, call};
use crate::base::recv_bufs::RecvBufs;
use crate::base::{quiesce, state};
use crate::batching::send_batch;
use crate::fds::sock_fds;
use crate::group::plain;
use crate::lanes::epoll_set;
use crate::lanes::fallback;
use crate::shared::leftovers::LeftoverQueue;
use crate::shared::sock::{PLAIN, Shared, Sock, UNBOUND};
use crate::shared::{processes, report, thread};
use crate::transfer::{detached, recv_dispatch};
use crate::xdp::queues;

pub(crate) unsafe fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int {
    if option == libc::PR_SET_SECCOMP {
        let is_strict = a == c_ulong::from(libc::SECCOMP_MODE_STRICT);
        before_seccomp(is_strict, a == c_ulong::from(libc::SECCOMP_MODE_FILTER) && b != 0);
    }
    // SAFETY: program arguments.
    unsafe { call::prctl(option, a, b, c, d) }
}

/// seccomp(2), which has no function in the C library.
pub(crate) fn seccomp(operation: c_long, flags: c_long, args: c_long) {
    let is_strict = operation == c_long::from(libc::SECCOMP_SET_MODE_STRICT) && flags == 0 && args == 0;
    before_seccomp(is_strict, operation == c_long::from(libc::SECCOMP_SET_MODE_FILTER) && args != 0);
}

/// A filter with a null address only asks whether the kernel supports it.
fn before_seccomp(is_strict: bool, is_filter: bool) {
    // In the child of a vfork, which is about to exec, the memory is the parent's.
    if (is_strict || is_filter) && thread::is_own_process() {
        detach();
    }
}

#[cold]
fn detach() {
    let errno = real::errno();
    quiesce::run_inside(|| {
        if quiesce::start_detach() {
            mark_all_plain();
            state::detach();
            quiesce::finish_detach();
        }
    });
    real::set_errno(errno);
}

fn mark_all_plain() {
    let mut is_known = false;
    for sock in Sock::in_use() {
        is_known |= sock.shared().is_some_and(|shared| shared.mode() != UNBOUND);
        if let Some(fd) = sock_fds::any_fd(sock) {
            fallback::fall_back(sock, fd, Reason::Seccomp);
            plain::detach_steering(sock, fd);
        }
    }
    // Sockets that are bound later are not seen; the report only shows that there may be some.
    if !is_known {
        report::count_reason(Reason::Seccomp, None);
    }
    quiesce::wait_for_others();
    send_batch::flush_at_exit(true);
    for sock in Sock::in_use() {
        if let (Some(shared), Some(fd)) = (sock.shared(), sock_fds::any_fd(sock)) {
            collect_leftovers(sock, shared, fd);
        }
    }
    epoll_set::detach();
    detached::refresh();
}

/// Copies the datagrams left in a socket's lanes into memory. A process that has not received on
/// it leaves them to the processes that have.
fn collect_leftovers(sock: &'static Sock, shared: &Shared, fd: c_int) {
    let is_left = || shared.retired.load(Ordering::Acquire) != 0 || queues::is_draining(shared);
    let process = u64::from(processes::number());
    let members =
        || shared.members.iter().map(|at| at.thread_id.load(Ordering::Relaxed)).filter(|id| *id != 0);
    let is_others = shared.forked.load(Ordering::Acquire) != 0
        && members().next().is_some()
        && !members().any(|id| id >> 32 == process);
    if shared.mode() != PLAIN || !is_left() || is_others {
        return;
    }
    let Some(left) = LeftoverQueue::new() else { return };
    left.fill(|message| {
        // SAFETY: `fill` made the message, and keeps what it names through the call.
        let op = |at, more| unsafe { call::recvmsg(at, message, more | MSG_DONTWAIT) };
        // SAFETY: as above.
        let into = unsafe { RecvBufs::message(message) };
        recv_dispatch::recv_leftover(sock, shared, fd, into, op)
    });
    if left.has_datagrams() {
        sock.set_leftovers(left);
    }
}
