//! Helpers for tests of this crate and of others. Most of them need `unsafe`. They are in no
//! program. Other crates enable the feature `test-support` in their dev-dependencies.

pub mod bpf_link;
mod interpret;
pub mod seccomp;
mod spawn;
mod wait;

use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use crate::device::Channels;
use crate::{check, sock};
pub use interpret::interpret;
pub use spawn::{IsolatedChild, StdinGuard, spawn_isolated};
pub use wait::wait_for;

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

/// Makes the last close of a TCP socket wait for `seconds` for its data to be acknowledged.
///
/// # Errors
/// Those of `setsockopt(2)`.
pub fn set_linger(socket: &impl AsFd, seconds: i32) -> io::Result<()> {
    let linger = libc::linger { l_onoff: 1, l_linger: seconds };
    sock::set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_LINGER, linger)
}

/// Sets the number of queues in each direction (`ETHTOOL_SCHANNELS`). For drivers that count them
/// separately, such as veth (Linux 5.15).
///
/// # Errors
/// `EINVAL` above the maximum of the device, or if an XDP program or an XSK prevents it; `EPERM`
/// without CAP_NET_ADMIN; `EOPNOTSUPP`; `ENODEV`.
pub fn set_queues(name: &str, receive: u32, send: u32) -> io::Result<()> {
    const ETHTOOL_SCHANNELS: u32 = 0x3d;
    let mut channels = Channels::default();
    channels.ethtool_ioctl(name, Channels::GET)?;
    (channels.rx, channels.tx) = (receive, send);
    channels.ethtool_ioctl(name, ETHTOOL_SCHANNELS)
}
