//! The part of an engine that the lanes of a socket share.

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use manylane_sys::map::SharedWords;

use super::Capabilities;
use super::filter::FilterHandle;
use crate::config::Config;
use crate::counters::LaneId;
use crate::error::Result;
use crate::lane_shared::LaneShared;

/// The part of an engine that the lanes of a socket share. Lanes call it when they open and close,
/// and other threads at any time. The defaults are for an engine that shares nothing.
pub(crate) trait EngineShared: Send + Sync {
    /// Sets the engine's own options of a kernel socket. Called once for each socket, and not for a
    /// parked one that serves another lane: the process may have dropped its privileges by then.
    fn set_options(&self, _config: &Config, _socket: BorrowedFd<'_>) -> Result<()> {
        Ok(())
    }

    /// Called when all first lanes are steered to. From here on, datagrams may arrive by other
    /// ways than the kernel sockets.
    fn start(&self) -> Result<()> {
        Ok(())
    }

    /// A lane was added after the start.
    fn lane_added(&self) {}

    /// A lane is taken out of steering: queues of devices go to other lanes.
    fn retire(&self, _lane: LaneId) {}

    /// A lane whose socket ends refuses new datagrams. After a grace period, none arrive.
    fn shut_down(&self, _lane: LaneId) {}

    /// A lane has discarded what was queued, and is about to close.
    fn lane_drained(&self, _lane: LaneId) {}

    /// The socket ends: lanes and queues are not added any more.
    fn stop(&self) {}

    /// The last lane is closed: nothing of the socket may be left on a device, even if a handle
    /// for its counters is still in use.
    fn close(&self) {}

    /// True if receives cost so little that wake-ups are most of the work: then lanes that sleep
    /// delay for larger batches also on CPUs of their own.
    fn wakeups_dominate(&self) -> bool {
        false
    }

    /// Datagrams dropped at the queues of a lane, other than its kernel socket.
    fn dropped(&self, _lane: LaneId) -> u64 {
        0
    }

    /// Limits and prefixes, if the engine enforces them.
    fn filter(&self) -> Option<&FilterHandle> {
        None
    }

    /// Frames by device and outcome, including those of other sockets on the devices.
    fn frame_counts(&self) -> Vec<(String, &'static str, u64)> {
        Vec::new()
    }

    /// Queues of devices, and the lanes that they feed.
    fn device_queues(&self) -> Vec<DeviceQueue> {
        Vec::new()
    }
}

/// A queue of a device and the lane that it feeds: see
/// [`Socket::device_queues`](crate::Socket::device_queues).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceQueue {
    /// Name of the device.
    pub device: String,
    /// Number of the queue.
    pub queue: u32,
    /// The lane.
    pub lane: LaneId,
    /// Zero copy: the device writes into the memory of the lane.
    pub zero_copy: bool,
    /// Frames for the socket dropped because the RX ring was full, since the queue was opened,
    /// including those of earlier lanes.
    pub ring_full: u64,
    /// Frames for the socket dropped for another reason: no free frame to receive into, or too
    /// long. With `ring_full`, the frames that lanes count as `xsk_dropped`.
    pub dropped: u64,
    /// Times that the kernel found the fill ring empty.
    pub fill_ring_empty: u64,
    /// Invalid descriptors in the fill and the TX ring. Zero unless there is a bug in the rings.
    pub invalid_descriptors: u64,
}

/// Arguments for the engine of a new lane.
pub(crate) struct NewLane<'a> {
    pub(crate) config: &'a Config,
    /// The bound address.
    pub(crate) addr: &'a SocketAddr,
    /// Those of its kernel socket.
    pub(crate) caps: Capabilities,
    pub(crate) lane: &'a Arc<LaneShared>,
    /// Words for its load, if steering reads them.
    pub(crate) load: Option<Arc<SharedWords>>,
}
