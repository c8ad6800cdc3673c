//! Loads eBPF programs, and retries after signals.

use std::error::Error as StdError;

use manylane_sys::errno::EAGAIN;

use crate::error::errno_of;

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

#[cfg(test)]
mod tests {
    use std::io;

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
        assert_eq!(attempts(manylane_sys::errno::EACCES, 1), (1, false));
    }
}
