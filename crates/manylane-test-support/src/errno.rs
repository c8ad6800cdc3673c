//! Errors of system calls, as `manylane-sys` has them, which this crate cannot use.

use std::io;

/// The result of a system call that returns -1 and sets `errno` on failure.
pub(crate) fn check(ret: libc::c_int) -> io::Result<libc::c_int> {
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(ret) }
}
