//! How full the rings are that were lent.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use super::Lender;
use super::loan::{Loan, Member};

/// How full the receive ring of a queue is that was lent, and what that cost so far.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LentRing {
    /// The program's socket.
    pub socket: SocketAddr,
    /// The device.
    pub device: String,
    /// The queue of it.
    pub queue: u32,
    /// Frames that wait for the program, and for how many there is room.
    pub waiting: u32,
    /// Entries of the ring.
    pub entries: u32,
    /// Frames that found no room.
    pub dropped: u64,
}

/// The receive rings that are lent, as they were a moment ago (50 ms at most).
#[derive(Clone, Debug, Default)]
pub struct LentRings(Arc<Mutex<Vec<LentRing>>>);

impl LentRings {
    /// All of them.
    #[must_use]
    pub fn look(&self) -> Vec<LentRing> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn replace(&self, rings: impl Iterator<Item = LentRing>) {
        let mut there = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        there.clear();
        there.extend(rings);
    }
}

impl Lender {
    /// Notes how full the rings are, for whoever asks.
    pub(super) fn look_at_rings(&self) {
        let ring = |loan: &Loan, member: &Member| {
            let lent = self.devices.iter().find(|lent| lent.device.index == member.terms.ifindex)?;
            Some(LentRing {
                socket: loan.addr,
                device: lent.device.name.clone(),
                queue: member.terms.queue,
                waiting: member.view.waiting(),
                entries: member.terms.ring,
                dropped: member.view.statistics().map_or(0, |seen| seen.rx_ring_full + seen.rx_dropped),
            })
        };
        let of = |loan| move |member| ring(loan, member);
        self.rings.replace(self.loans.iter().flat_map(|loan| loan.members.iter().filter_map(of(loan))));
    }
}
