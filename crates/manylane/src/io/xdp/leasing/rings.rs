//! Fill levels of leased rings.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use super::Lessor;
use super::devices::Member;
use super::lease::Lease;

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

/// The leased receive rings, as of the last update (at most 50 ms ago).
#[derive(Clone, Debug, Default)]
pub struct LeasedRings(Arc<Mutex<Vec<LeasedRing>>>);

impl LeasedRings {
    /// All leased rings.
    #[must_use]
    pub fn snapshot(&self) -> Vec<LeasedRing> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn replace(&self, rings: impl Iterator<Item = LeasedRing>) {
        let mut there = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        there.clear();
        there.extend(rings);
    }
}

impl Lessor {
    /// Records the fill levels of the rings for [`LeasedRings`].
    pub(super) fn sample_rings(&self) {
        let ring = |lease: &Lease, member: &Member| {
            let leased = self.devices.iter().find(|leased| leased.device.index == member.params.ifindex)?;
            Some(LeasedRing {
                socket: lease.addr,
                device: leased.device.name.clone(),
                queue: member.params.queue,
                waiting: member.view.rx_pending(),
                entries: member.params.ring_size,
                dropped: member.view.statistics().map_or(0, |seen| seen.rx_ring_full + seen.rx_dropped),
            })
        };
        let of = |lease| move |member| ring(lease, member);
        self.rings.replace(self.leases.iter().flat_map(|lease| lease.members.iter().filter_map(of(lease))));
    }
}
