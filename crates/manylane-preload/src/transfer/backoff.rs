//! Waits of a receive that end too early.

use std::time::{Duration, Instant};

use libc::EAGAIN;

use crate::base::pollfds::EMPTY_POLLFD;
use crate::base::real;
use crate::base::settings::{WAIT_SLICE, WAIT_SLICE_MS};

/// Counts waits of one call that brought no datagram. Each should last for a slice. It may not
/// (poll reports data that cannot be received, another process made the socket non-blocking, a
/// thread without a lane always wakes with the owner of one, and too late). Then the thread sleeps
/// for a slice.
#[derive(Default)]
pub(crate) struct Backoff {
    count: u32,
    since: Option<Instant>,
}

impl Backoff {
    /// Waits that are timed together.
    const ROUNDS_MAX: u32 = 16;

    #[inline]
    pub(crate) fn backoff(&mut self) {
        // A wait that a signal interrupted may be short.
        if real::errno() != EAGAIN {
            return;
        }
        self.count += 1;
        let since = *self.since.get_or_insert_with(Instant::now);
        if self.count < Self::ROUNDS_MAX {
            return;
        }
        let slice = Duration::from_millis(WAIT_SLICE_MS as u64);
        if since.elapsed() < slice * Self::ROUNDS_MAX / 4 {
            // One empty entry: in `/proc/PID/task/TID/syscall` this differs from a delay, which
            // has none.
            real::ppoll(&mut [EMPTY_POLLFD], WAIT_SLICE, None);
        }
        *self = Self::default();
    }
}
