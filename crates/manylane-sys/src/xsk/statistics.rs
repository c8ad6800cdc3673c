//! The kernel's counters of a socket.

use std::io;
use std::os::fd::BorrowedFd;

use crate::sock;

/// The kernel's counters of a socket since it was opened (`XDP_STATISTICS`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statistics {
    /// Packets dropped: too long for a frame, or no frame in the fill ring. Before Linux 5.9 also
    /// those dropped because the RX ring was full.
    pub rx_dropped: u64,
    /// Invalid entries of the fill ring.
    pub rx_invalid_descs: u64,
    /// Descriptors of the TX ring that the kernel refused.
    pub tx_invalid_descs: u64,
    /// Packets dropped because the RX ring was full (Linux 5.9, as all below; 0 before).
    pub rx_ring_full: u64,
    /// Times that the kernel found the fill ring empty. In copy mode each is a packet, which
    /// `rx_dropped` includes. With zero copy, the device waits or drops, and counts that itself.
    pub rx_fill_ring_empty_descs: u64,
    /// Times that the kernel found the TX ring empty.
    pub tx_ring_empty_descs: u64,
}

impl Statistics {
    /// Packets redirected to the socket that did not reach its RX ring.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.rx_dropped + self.rx_ring_full
    }
}

/// The kernel's counters of the AF_XDP socket behind a descriptor, for code that does not have the
/// [`Queue`](super::Queue).
///
/// # Errors
/// Those of `getsockopt(2)`.
pub fn statistics(fd: BorrowedFd<'_>) -> io::Result<Statistics> {
    // Before Linux 5.9 only the first three exist.
    let [
        rx_dropped,
        rx_invalid_descs,
        tx_invalid_descs,
        rx_ring_full,
        rx_fill_ring_empty_descs,
        tx_ring_empty_descs,
    ] = sock::get(fd, libc::SOL_XDP, libc::XDP_STATISTICS)?;
    Ok(Statistics {
        rx_dropped,
        rx_invalid_descs,
        tx_invalid_descs,
        rx_ring_full,
        rx_fill_ring_empty_descs,
        tx_ring_empty_descs,
    })
}
