//! Duplicates of descriptors.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use crate::check;

/// Duplicates a descriptor so that started programs inherit it, with a number that few programs
/// use.
///
/// # Errors
/// `EMFILE`.
pub fn dup_inheritable(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const HIGH_FD_MIN: RawFd = 1000;
    let dup = |min| dup_number(fd.as_raw_fd(), libc::F_DUPFD, min);
    dup(HIGH_FD_MIN).or_else(|_| dup(64)).or_else(|_| dup(3))
}

/// Duplicates the descriptor that this process has inherited under `number`. It may be any file:
/// the caller has to check. Unlike `number`, the duplicate is closed on exec.
///
/// # Errors
/// `EBADF` if there is none, `EMFILE`.
pub fn dup_inherited(number: RawFd) -> io::Result<OwnedFd> {
    dup_number(number, libc::F_DUPFD_CLOEXEC, 3)
}

fn dup_number(number: RawFd, command: libc::c_int, min: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: takes no pointer, and changes no descriptor that exists.
    let new = check(unsafe { libc::fcntl(number, command, min) })?;
    // SAFETY: the descriptor is new, and this value is its only owner.
    Ok(unsafe { OwnedFd::from_raw_fd(new) })
}
