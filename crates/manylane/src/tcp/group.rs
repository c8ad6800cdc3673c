//! What the lanes of a group have in common.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use manylane_tcp::congestion::NewController;
use manylane_tcp::time::Time;

use super::source_ports::SourcePorts;
use crate::counters::LaneId;
use crate::io::XdpControl;

/// The id of a lane of a group, by its number.
pub(super) fn lane_id(number: usize) -> LaneId {
    LaneId(number as u64)
}

/// What the lanes of a group have in common. It ends with the last of them.
pub(super) struct Group {
    pub(super) control: Arc<XdpControl>,
    /// Lanes have one time, by which cookies are made and redeemed.
    pub(super) start: Instant,
    pub(super) controller: NewController,
    /// Longest delay for larger batches; none: as the load requires.
    pub(super) rx_coalesce: Option<Duration>,
    /// The addresses that are listened on, with the congestion control of their connections.
    pub(super) listeners: Vec<(SocketAddr, NewController)>,
    /// Kernel sockets that hold the addresses.
    #[expect(dead_code, reason = "they are held open")]
    pub(super) held: Vec<OwnedFd>,
    pub(super) sources: SourcePorts,
}

impl Group {
    /// The time.
    pub(super) fn now(&self) -> Time {
        Time(self.start.elapsed().as_micros() as u64)
    }
}
