//! Advisory locks on files (`flock(2)`).

use std::fs::File;
use std::io;

use rustix::fs::{FlockOperation, flock};

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
