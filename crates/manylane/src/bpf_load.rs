//! Loading eBPF programs: retries after signals, and errors.

use std::error::Error as StdError;
use std::io;

use manylane_sys::errno::{EACCES, EAGAIN, EMFILE, ENOMEM, EPERM};

use crate::error::{Error, ErrorKind, errno_of};

/// As many as in libbpf.
const LOAD_ATTEMPTS_MAX: u32 = 5;

/// Loads a program, and retries if a signal interrupted it. The kernel stops verifying for a
/// thread with a pending signal (`EAGAIN`). An io_uring ring that is being closed interrupts the
/// thread that made it in the same way.
pub(crate) fn load_with_retry<E: StdError + 'static>(
    mut load: impl FnMut() -> Result<(), E>,
) -> Result<(), E> {
    for _ in 1..LOAD_ATTEMPTS_MAX {
        match load() {
            Err(err) if errno_of(&err) == Some(EAGAIN) => {}
            done => return done,
        }
    }
    load()
}

/// The error of an eBPF step, with the kind for its number.
pub(crate) fn bpf_error<E: StdError + Send + Sync + 'static>(name: &str, what: &str, err: E) -> Error {
    let kind = match errno_of(&err) {
        Some(EPERM | EACCES) => ErrorKind::Permission,
        Some(number @ (ENOMEM | EMFILE)) => {
            return Error::system(format!("{name}: {what}"), io::Error::from_raw_os_error(number));
        }
        _ => ErrorKind::Unsupported,
    };
    Error::with(kind, format!("{name}: {what}"), err)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Loads a program that fails `failures` times with `errno`; the number of attempts, and the
    /// result.
    fn attempts(errno: i32, failures: u32) -> (u32, bool) {
        let mut tries = 0;
        let done = load_with_retry(|| {
            tries += 1;
            if tries > failures { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) }
        });
        (tries, done.is_ok())
    }

    #[test]
    fn an_interrupted_program_load_is_retried() {
        assert_eq!(attempts(EAGAIN, 0), (1, true));
        assert_eq!(attempts(EAGAIN, 4), (5, true));
        assert_eq!(attempts(EAGAIN, 5), (5, false));
        assert_eq!(attempts(EACCES, 1), (1, false));
    }
}
