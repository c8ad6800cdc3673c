//! Locks on files that others respect (`flock(2)`).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use crate::check;

/// Locks a file for this open description alone, without waiting. It ends when the file is closed, also by a crash.
///
/// # Errors
/// `EWOULDBLOCK` if somebody else has it.
pub fn try_lock(file: &File) -> io::Result<()> {
    // SAFETY: takes a descriptor, which is borrowed across the call, and a number.
    check(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }).map(drop)
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
}
