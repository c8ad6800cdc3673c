//! Calls of a test on its process and its children.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use crate::errno::check;

/// Makes `command` be killed when the calling thread ends in any way; does not apply to processes
/// that it starts.
pub fn kill_on_parent_exit(command: &mut Command) {
    // SAFETY: the closure runs in the child between fork and exec, where only async-signal-safe
    // calls are allowed: it makes one system call without pointers.
    unsafe {
        command.pre_exec(|| {
            check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong)).map(drop)
        });
    }
}

/// Gives this process, with all its threads, the user and the group `id`, and no supplementary
/// groups. The kernel removes all capabilities from a process that gives up root.
///
/// # Errors
/// `EPERM` without CAP_SETUID and CAP_SETGID. A process that continues after an error may have
/// changed only in part.
pub fn become_user(id: u32) -> io::Result<()> {
    // SAFETY: setgroups(2) reads no address when the number of groups is zero.
    check(unsafe { libc::setgroups(0, std::ptr::null()) })?;
    // SAFETY: setresgid(2) takes numbers only. The C library applies it to all threads.
    check(unsafe { libc::setresgid(id, id, id) })?;
    // SAFETY: as above.
    check(unsafe { libc::setresuid(id, id, id) })?;
    Ok(())
}
