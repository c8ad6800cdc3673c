//! Duplicates of descriptors, a list of those of this process, and files in an open folder.

use std::ffi::OsStr;
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

/// Opens a file of a folder, with flags of `open(2)`; one that `O_CREAT` creates has the mode 0666.
/// It is closed on exec.
///
/// # Errors
/// Those of `openat(2)` except `EINTR`.
pub fn open_at(folder: BorrowedFd<'_>, name: &OsStr, flags: libc::c_int) -> io::Result<OwnedFd> {
    let flags = OFlags::from_bits_retain(flags as _) | OFlags::CLOEXEC;
    let mode = Mode::from_raw_mode(0o666);
    Ok(rustix::io::retry_on_intr(|| rustix::fs::openat(folder, name, flags, mode))?)
}

fn dup_number(number: RawFd, command: libc::c_int, min: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: takes no pointer, and changes no descriptor that exists.
    let new = check(unsafe { libc::fcntl(number, command, min) })?;
    // SAFETY: the descriptor is new, and this value is its only owner.
    Ok(unsafe { OwnedFd::from_raw_fd(new) })
}
