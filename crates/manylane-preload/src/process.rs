//! Forks, programs that are started, and privileges that are given up.

use std::sync::atomic::Ordering;

use libc::{c_char, c_int, c_void, pid_t, uid_t};
use manylane_sys::shim::Reason;

use crate::calls::call;
use crate::sock::{LANED, Sock};
use crate::table::{self, Entry};
use crate::{lanes, me, report};

type Args = *const *const c_char;

/// Before a fork. What lanes there will be has to exist now: a socket that one process opens later is out of reach of
/// the others, and what it held would be lost with its process.
pub(crate) extern "C" fn before_fork() {
    if !me::is_ours() {
        return;
    }
    lanes::open_in_advance();
    for sock in Sock::in_use() {
        if let Some(shared) = sock.shared() {
            shared.forked.store(1, Ordering::Release);
        }
    }
}

/// In the child of a fork: what threads of the parent remembered is not the child's.
pub(crate) extern "C" fn in_child() {
    me::start();
    report::count_process();
}

fn before_privileges_go() {
    // SAFETY: geteuid(2) takes nothing and touches no memory.
    if me::is_ours() && unsafe { libc::geteuid() } == 0 {
        lanes::open_in_advance();
    }
}

pub(crate) fn setuid(uid: uid_t) -> c_int {
    before_privileges_go();
    call::setuid(uid)
}

pub(crate) fn seteuid(uid: uid_t) -> c_int {
    before_privileges_go();
    call::seteuid(uid)
}

pub(crate) fn setreuid(real: uid_t, effective: uid_t) -> c_int {
    before_privileges_go();
    call::setreuid(real, effective)
}

pub(crate) fn setresuid(real: uid_t, effective: uid_t, saved: uid_t) -> c_int {
    before_privileges_go();
    call::setresuid(real, effective, saved)
}

/// A program is started that inherits what is not closed on exec. It may receive, and would only see the first lane.
fn before_exec() {
    for (fd, entry) in table::known(0, u32::MAX) {
        let Entry::Sock(index) = entry else { continue };
        let sock = Sock::at(index);
        let laned = sock.shared().is_some_and(|shared| shared.mode() == LANED);
        if laned && call::fcntl(fd, libc::F_GETFD, 0) & libc::FD_CLOEXEC == 0 {
            lanes::fall_back(sock, fd, Reason::Exec);
        }
    }
}

pub(crate) fn execve(path: *const c_char, args: Args, env: Args) -> c_int {
    before_exec();
    call::execve(path, args, env)
}

pub(crate) fn execv(path: *const c_char, args: Args) -> c_int {
    before_exec();
    call::execv(path, args)
}

pub(crate) fn execvp(path: *const c_char, args: Args) -> c_int {
    before_exec();
    call::execvp(path, args)
}

pub(crate) fn execvpe(path: *const c_char, args: Args, env: Args) -> c_int {
    before_exec();
    call::execvpe(path, args, env)
}

pub(crate) fn fexecve(fd: c_int, args: Args, env: Args) -> c_int {
    before_exec();
    call::fexecve(fd, args, env)
}

pub(crate) fn posix_spawn(
    pid: *mut pid_t,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    args: Args,
    env: Args,
) -> c_int {
    before_exec();
    call::posix_spawn(pid, path, actions, attributes, args, env)
}

pub(crate) fn posix_spawnp(
    pid: *mut pid_t,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    args: Args,
    env: Args,
) -> c_int {
    before_exec();
    call::posix_spawnp(pid, path, actions, attributes, args, env)
}
