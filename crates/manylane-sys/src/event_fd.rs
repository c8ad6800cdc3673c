//! A descriptor by which one thread wakes another: eventfd(2), Linux 2.6.27.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

/// Readable from a signal until it is cleared.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// One without a signal.
    ///
    /// # Errors
    /// `EMFILE` if the process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Makes it readable.
    pub fn signal(&self) {
        // It fails only if it has been signalled 2^64 times.
        _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Makes it unreadable again.
    pub fn clear(&self) {
        // It fails only without a signal.
        _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
