//! Duplicates of descriptors, a list of those of this process, files in an open folder, and locks
//! on files.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use rustix::fs::{FlockOperation, Mode, OFlags, RawDir, flock};

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

/// Locks a file exclusively for this open file description, without waiting. The lock ends with
/// [`unlock`], or when all descriptors of the description are closed, even by a crash. A child
/// that another thread is starting has one until its exec.
///
/// # Errors
/// `EWOULDBLOCK` if the file is locked already.
pub fn try_lock(file: &File) -> io::Result<()> {
    Ok(flock(file, FlockOperation::NonBlockingLockExclusive)?)
}

/// Releases the lock of [`try_lock`], even if other descriptors are open.
///
/// # Errors
/// None for a locked file.
pub fn unlock(file: &File) -> io::Result<()> {
    Ok(flock(file, FlockOperation::Unlock)?)
}

fn dup_number(number: RawFd, command: libc::c_int, min: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: takes no pointer, and changes no descriptor that exists.
    let new = check(unsafe { libc::fcntl(number, command, min) })?;
    // SAFETY: the descriptor is new, and this value is its only owner.
    Ok(unsafe { OwnedFd::from_raw_fd(new) })
}

#[cfg(test)]
mod tests {
    use manylane_test_support::wait_for;

    use super::*;

    #[test]
    fn only_one_holder_has_the_flock() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let open = || File::options().write(true).open(path.path()).unwrap();
        let (one, two) = (open(), open());
        try_lock(&one).unwrap();
        assert_eq!(try_lock(&two).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(one);
        // A program that another test starts has a copy until it executes.
        wait_for("the end of copies", || try_lock(&two), Result::is_ok).unwrap();
    }

    #[test]
    fn unlock_releases_the_lock_despite_a_dup() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let open = || File::options().write(true).open(path.path()).unwrap();
        let (one, two) = (open(), open());
        try_lock(&one).unwrap();
        let _copy = one.try_clone().unwrap();
        unlock(&one).unwrap();
        drop(one);
        try_lock(&two).unwrap();
    }
}
