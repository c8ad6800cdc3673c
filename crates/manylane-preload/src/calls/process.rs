//! Forks, exec, dropped privileges, sleeps, and the end of a process.
//!
//! A socket that one process opens is not in the other processes, and datagrams queued on it are
//! lost with its process. So lanes are opened before a fork, and none after it
//! (`lanes/create.rs`). Lanes are also opened before a process drops root (`setuid` and the like):
//! without privileges it could not bind a port below 1024, and the kernel wants one user for a
//! group. Between `vfork` and `exec` the library's memory is the parent's, so calls that would
//! change it bypass the library.

use std::sync::atomic::Ordering;

use libc::{c_char, c_int};
use manylane_ipc::report::Reason;

use crate::base::functions::types::Args;
use crate::base::quiesce;
use crate::base::real::{self, call};
use crate::batching::send_batch;
use crate::fds::table::{self, Entry};
use crate::fds::{hidden_fds, lane_socket};
use crate::group::recovery;
use crate::lanes::create;
use crate::lanes::entries;
use crate::lanes::epoll_set::Epoll;
use crate::lanes::fallback;
use crate::shared::sock::{MULTI_LANE, Sock};
use crate::shared::{processes, report, thread};

/// Runs before a fork: opens the lanes in advance, because a socket that one process opens later
/// is not in the others, and its datagrams would be lost with that process.
pub(crate) extern "C" fn before_fork() {
    quiesce::run_inside(|| {
        if thread::is_own_process() {
            prepare_fork();
        }
    });
}

fn prepare_fork() {
    send_batch::flush();
    // Stale lanes that are copied to the child would keep the port for as long as it runs.
    entries::sweep(None);
    create::preopen_lanes();
    Sock::before_fork();
    Epoll::before_fork();
    for sock in Sock::in_use() {
        if sock.shared().is_none() {
            // Not bound yet: the other process will not see how this one sets it up.
            sock.mark_plain(Reason::Forked);
        }
        // Load it again: another thread may be binding the socket.
        if let Some(shared) = sock.shared() {
            // Under the lock: a thread that is opening lanes must not continue after the fork.
            let _guard = recovery::lock(sock, shared, true);
            shared.forked.store(1, Ordering::SeqCst);
        }
    }
}

/// Runs in the child of a fork: state of the parent's threads is not valid here.
pub(crate) extern "C" fn in_child() {
    if quiesce::is_detaching() {
        return;
    }
    let interrupted = quiesce::is_inside();
    quiesce::in_child();
    processes::in_child();
    thread::start();
    Epoll::in_child();
    Sock::in_child();
    hidden_fds::in_child(interrupted);
    report::count_process();
}

pub(crate) fn unshare(what: c_int) -> c_int {
    if what & libc::CLONE_NEWNET != 0 {
        lane_socket::mark_netns_changed();
    }
    call::unshare(what)
}

pub(crate) fn setns(fd: c_int, kind: c_int) -> c_int {
    lane_socket::mark_netns_changed();
    call::setns(hidden_fds::kernel_fd(fd), kind)
}

pub(crate) fn before_privilege_drop() {
    // SAFETY: geteuid(2) takes nothing and touches no memory.
    if thread::is_own_process() && unsafe { libc::geteuid() } == 0 {
        create::preopen_lanes();
    }
}

/// The new program inherits descriptors that are not closed on exec. It may receive on them, and
/// would see only lane 0.
pub(crate) fn before_exec() {
    // If the exec fails, threads go on batching replies.
    send_batch::flush_at_exit(false);
    quiesce::run_inside(drop_inherited_lanes);
}

fn drop_inherited_lanes() {
    for (fd, entry) in table::tracked(0, u32::MAX) {
        let Entry::Sock(index) = entry else { continue };
        let sock = Sock::at(index);
        let laned = sock.shared().is_some_and(|shared| shared.mode() == MULTI_LANE);
        if laned && entries::revalidate(sock, fd) && real::is_inherited_on_exec(fd) {
            fallback::fall_back(sock, fd, Reason::Exec);
        }
    }
}

pub(crate) unsafe fn fexecve(fd: c_int, args: Args, env: Args) -> c_int {
    before_exec();
    // SAFETY: program arguments.
    unsafe { call::fexecve(hidden_fds::kernel_fd(fd), args, env) }
}

pub(crate) unsafe fn execveat(
    folder: c_int,
    path: *const c_char,
    args: Args,
    env: Args,
    flags: c_int,
) -> c_int {
    before_exec();
    // SAFETY: program arguments.
    unsafe { call::execveat(hidden_fds::kernel_fd(folder), path, args, env, flags) }
}

/// A program that the process will start gets a duplicate of `fd`, which may itself be closed on
/// exec. `done`: the result of the call that says so.
pub(crate) fn after_adddup2(done: c_int, fd: c_int) -> c_int {
    if done == 0 {
        fallback::before_exec_with_copy(fd, -1);
    }
    done
}

/// The process ends without the handlers of `exit`. Datagrams that a handler of `at_quick_exit`
/// sends go out at once.
pub(crate) fn before_exit() {
    send_batch::flush_at_exit(true);
}
