//! What a queue asks of the kernel, so that tests can be the kernel.

use std::io;

/// What came of asking the kernel to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KickOutcome {
    /// It has sent what it could now.
    Accepted,
    /// One packet was dropped (`EBUSY`), which the ring may show only later.
    Dropped,
    /// The device is down (`ENETDOWN`).
    Down,
}

/// The system calls of a queue.
pub(super) trait RingWakeup {
    /// Whether the device sends by itself, once woken: without copying.
    fn is_zero_copy(&self) -> bool;
    /// Whether the device works only while it is asked to.
    fn is_busy_polling(&self) -> bool;
    /// Asks the kernel to send.
    fn send(&self) -> io::Result<KickOutcome>;
    /// Asks the kernel to look at the fill ring and to receive.
    fn receive(&self);
}
