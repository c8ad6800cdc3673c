//! Locks on files that others respect (`flock(2)`).

use std::fs::File;
use std::io;

use rustix::fs::{FlockOperation, flock};

/// Locks a file for this open description alone, without waiting. It ends with [`unlock`], or when
/// all descriptors of it are closed, also by a crash; a child that another thread is starting has
/// one until it executes its program.
///
/// # Errors
/// `EWOULDBLOCK` if somebody else has it.
pub fn try_lock(file: &File) -> io::Result<()> {
    Ok(flock(file, FlockOperation::NonBlockingLockExclusive)?)
}

/// Unlocks what [`try_lock`] has locked, whoever else has a descriptor of it.
///
/// # Errors
/// None that a locked file can cause.
pub fn unlock(file: &File) -> io::Result<()> {
    Ok(flock(file, FlockOperation::Unlock)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_has_it() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let open = || File::options().write(true).open(path.path()).unwrap();
        let (one, two) = (open(), open());
        try_lock(&one).unwrap();
        assert_eq!(try_lock(&two).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(one);
        try_lock(&two).unwrap();
    }

    #[test]
    fn a_copy_of_the_descriptor_keeps_it_no_longer_than_wanted() {
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
