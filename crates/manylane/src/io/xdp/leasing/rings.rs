//! Fill levels of leased rings.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// Fill level and drops of the receive ring of a leased queue.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeasedRing {
    /// The program's socket.
    pub socket: SocketAddr,
    /// The device.
    pub device: String,
    /// Number of the queue.
    pub queue: u32,
    /// Frames that wait for the program.
    pub waiting: u32,
    /// Entries of the ring.
    pub entries: u32,
    /// Frames dropped because the ring was full.
    pub dropped: u64,
}

/// The leased receive rings, as of the last update (about 50 ms ago at most).
#[derive(Clone, Debug, Default)]
pub struct LeasedRings(Arc<Mutex<Vec<LeasedRing>>>);

impl LeasedRings {
    /// All leased rings.
    #[must_use]
    pub fn snapshot(&self) -> Vec<LeasedRing> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn replace(&self, rings: impl Iterator<Item = LeasedRing>) {
        let mut there = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        there.clear();
        there.extend(rings);
    }
}
