//! Control over a socket from any thread.

use std::net::SocketAddr;
use std::sync::Arc;

#[cfg(doc)]
use super::Socket;
use super::lanes::open_lane;
use super::server::{Event, Server};
use crate::config::{Engine, FILTER_REFUSED};
use crate::counters::{Counters, LaneId};
use crate::error::{Error, ErrorKind, Result};
use crate::group::Shared;
use crate::io::{DeviceQueue, FilterHandle};
use crate::lane::Lane;
use crate::lane_shared::LaneShared;
use crate::steer::EffectiveSteering;
use crate::wait::WaitPolicy;

/// Control over a socket from any thread.
#[derive(Clone)]
pub struct Handle {
    pub(super) shared: Arc<Shared>,
    pub(super) server: Arc<Server>,
}

impl Handle {
    /// Ends [`Socket::serve`], which returns after the lanes have handled what is queued. May be
    /// called more than once.
    pub fn stop(&self) {
        self.shared.stop();
    }

    /// A snapshot of the counters. Does not disturb the lanes: their cells are read without a
    /// lock. A lock guards only the list of lanes, and no lane takes it while it receives or
    /// sends.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.shared.counters()
    }

    /// The bound address and the engine.
    pub(crate) fn identity(&self) -> (SocketAddr, Engine) {
        (self.shared.addr, self.shared.config.engine)
    }

    /// The wait policy of the lanes.
    pub(crate) fn wait_policy(&self) -> WaitPolicy {
        self.shared.config.wait
    }

    pub(crate) fn lanes(&self) -> Vec<Arc<LaneShared>> {
        self.shared.lanes()
    }

    /// The queues of devices that currently feed lanes. Empty with any engine but `xdp`. They
    /// change when lanes and devices are added or removed.
    #[must_use]
    pub fn device_queues(&self) -> Vec<DeviceQueue> {
        self.shared.engine.device_queues()
    }

    /// A handle that changes limits and prefixes while the socket is open. Engine `xdp` only.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] with any other engine.
    pub fn filter(&self) -> Result<FilterHandle> {
        let none = || Error::new(ErrorKind::Unsupported, FILTER_REFUSED);
        self.shared.engine.filter().cloned().ok_or_else(none)
    }

    /// Frame counts of the XDP programs on the socket's devices: device, outcome (`redirected`, or
    /// why a frame was left to the kernel or dropped), count. Includes frames of other sockets of
    /// this process on the same devices. Empty with any engine but `xdp`.
    #[must_use]
    pub fn frame_counts(&self) -> Vec<(String, &'static str, u64)> {
        self.shared.engine.frame_counts()
    }

    /// The steering in force.
    #[must_use]
    pub fn steering(&self) -> EffectiveSteering {
        self.shared.steering()
    }

    /// Ids of the open lanes.
    #[must_use]
    pub fn lane_ids(&self) -> Vec<LaneId> {
        self.shared.lanes().iter().filter(|lane| lane.is_open()).map(|lane| lane.id).collect()
    }

    /// Adds a lane with its own thread to a socket in [`Socket::serve`]. Must be called in the
    /// network namespace in which the socket was opened.
    ///
    /// # Errors
    /// [`ErrorKind::State`] if [`Socket::serve`] does not run; any error of opening a lane.
    pub fn add_lane(&self) -> Result<LaneId> {
        let idle = || {
            Error::new(
                ErrorKind::State,
                "the socket is not serving: use open_lane() for a lane to drive by hand",
            )
        };
        let server = self.server.events().ok_or_else(idle)?;
        let lane = open_lane(&self.shared)?;
        let id = lane.id();
        server.send(Event::Run(Box::new(lane))).map_err(|_| idle())?;
        Ok(id)
    }

    /// Opens a lane that the program drives itself. Must be called in the network namespace in
    /// which the socket was opened.
    ///
    /// # Errors
    /// Any error of opening a lane.
    pub fn open_lane(&self) -> Result<Lane> {
        open_lane(&self.shared)
    }

    /// Removes a lane without losing a datagram: takes it out of steering, lets its thread drain
    /// it, and closes it. Returns when it is closed.
    ///
    /// With steering by the kernel's own choice lanes cannot be taken out of steering: datagrams
    /// that arrive while this one closes are lost.
    ///
    /// # Errors
    /// [`ErrorKind::LastLane`] for the only lane. [`ErrorKind::State`] if there is no such lane,
    /// or if its closure does not return within 30 s.
    pub fn remove_lane(&self, id: LaneId) -> Result<()> {
        self.shared.remove_lane(id)
    }
}
