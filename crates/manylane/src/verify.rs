//! Loading eBPF programs beside signals.

use std::error::Error as StdError;

use crate::error::{EAGAIN, errno_of};

/// As many as libbpf makes.
const LOAD_ATTEMPTS_MAX: u32 = 5;

/// Loads a program, again if a signal came: the kernel does not go on verifying for a thread that
/// has one to handle (`EAGAIN`), and a ring of io_uring that is being closed interrupts the thread
/// that made it in the same way.
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

    /// How often it is loaded, and how that ends, if it fails so often.
    fn attempts(errno: i32, failures: u32) -> (u32, bool) {
        let mut tries = 0;
        let done = load_with_retry(|| {
            tries += 1;
            if tries > failures { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) }
        });
        (tries, done.is_ok())
    }

    #[test]
    fn what_a_signal_interrupted_is_loaded_again() {
        assert_eq!(attempts(EAGAIN, 0), (1, true));
        assert_eq!(attempts(EAGAIN, 4), (5, true));
        assert_eq!(attempts(EAGAIN, 5), (5, false));
        assert_eq!(attempts(crate::error::EACCES, 1), (1, false));
    }
}
