//! Frames that a device did not take, because its own ring was full or the socket's send buffer is
//! in use by frames that it has not finished.
//!
//! They stay in the TX ring of their queue, and go with the next batch. If none comes, a timer
//! wakes the lane to send them: the kernel does not tell when there is room again.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use manylane_sys::timer::Timer;

/// Runs while queues of a lane have such frames.
pub(super) struct UnsentTimer {
    timer: Timer,
    is_running: bool,
}

impl UnsentTimer {
    /// A device of 1 Gbit/s sends some hundred frames meanwhile, as many as its ring holds.
    pub(super) const INTERVAL: Duration = Duration::from_micros(100);

    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { timer: Timer::new()?, is_running: false })
    }

    /// True if queues have such frames.
    #[inline]
    pub(super) fn is_running(&self) -> bool {
        self.is_running
    }

    /// A flush of one queue has left this many frames.
    #[inline]
    pub(super) fn add(&mut self, left: usize) {
        if left > 0 && !self.is_running {
            self.restart(left);
        }
    }

    /// Flushes of all queues have left this many frames.
    #[cold]
    pub(super) fn restart(&mut self, left: usize) {
        self.is_running = left > 0;
        if self.is_running { self.timer.start(Self::INTERVAL) } else { self.timer.stop() }
    }
}

impl AsFd for UnsentTimer {
    /// Readable when they are to be sent.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}
