//! The system calls of a queue, as a trait, so that tests can replace the kernel.

use std::io;

/// The result of a request to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KickOutcome {
    /// The kernel has sent all, or the completion ring is full.
    Accepted,
    /// The kernel has left packets, and may have sent some without the ring showing it
    /// (`EAGAIN`): its budget was used up, or memory or the device was full.
    Partial,
    /// One packet was dropped (`EBUSY`), which the ring may show only later.
    Dropped,
    /// The device is down (`ENETDOWN`).
    Down,
}

/// The system calls of a queue.
pub trait RingWakeup {
    /// True if the device sends by itself, once woken: zero copy.
    fn is_zero_copy(&self) -> bool;
    /// True if the device works only in these calls.
    fn is_busy_polling(&self) -> bool;
    /// Number of packets that one call sends at most, in copy mode.
    fn tx_budget(&self) -> u32;
    /// Requests the kernel to send.
    fn send(&self) -> io::Result<KickOutcome>;
    /// Requests the kernel to read the fill ring and to receive.
    fn receive(&self);
}
