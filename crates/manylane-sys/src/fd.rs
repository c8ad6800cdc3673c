//! Duplicates of descriptors, and a list of those of this process.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use rustix::fs::{Mode, OFlags, RawDir};

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

/// Opens the list of the descriptors of this process, for [`for_each_open`].
///
/// # Errors
/// `EMFILE`, or `ENOENT` without `/proc`.
pub fn open_list() -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(c"/proc/self/fd", flags, Mode::empty())?)
}

/// Calls `each` with the numbers of the open descriptors, in ascending order, without memory from
/// the heap. `each` may close descriptors: the kernel goes on with the next number.
///
/// # Errors
/// `ENOTDIR` if `list` is not from [`open_list`].
pub fn for_each_open(list: BorrowedFd<'_>, mut each: impl FnMut(RawFd)) -> io::Result<()> {
    let mut buffer = [MaybeUninit::uninit(); 1024];
    let mut entries = RawDir::new(list, &mut buffer);
    while let Some(entry) = entries.next() {
        let number = entry?.file_name().to_str().ok().and_then(|name| name.parse().ok());
        number.into_iter().for_each(&mut each);
    }
    Ok(())
}

fn dup_number(number: RawFd, command: libc::c_int, min: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: takes no pointer, and changes no descriptor that exists.
    let new = check(unsafe { libc::fcntl(number, command, min) })?;
    // SAFETY: the descriptor is new, and this value is its only owner.
    Ok(unsafe { OwnedFd::from_raw_fd(new) })
}
