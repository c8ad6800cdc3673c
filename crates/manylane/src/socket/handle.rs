//! Control over a socket from any thread.

use std::net::SocketAddr;
use std::sync::Arc;

#[cfg(doc)]
use super::Socket;
use super::open::open_lane;
use super::{Event, Server};
use crate::config::Engine;
use crate::counters::{Counters, LaneId};
use crate::error::{Error, ErrorKind, Result};
use crate::group::Shared;
use crate::io::xdp::{FilterHandle, XdpQueue};
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
    /// Ends [`Socket::serve`]: lanes handle what is queued, then it returns. May be called more
    /// than once.
    pub fn stop(&self) {
        self.shared.stop();
    }

    /// The counters now. Lanes are not disturbed: their cells are read without a lock; only the
    /// list of lanes is guarded by one, which no lane takes while it receives or sends.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.shared.counters()
    }

    /// Where it is bound, and its engine.
    pub(crate) fn identity(&self) -> (SocketAddr, Engine) {
        (self.shared.addr, self.shared.config.engine)
    }

    /// How its lanes wait.
    pub(crate) fn wait_policy(&self) -> WaitPolicy {
        self.shared.config.wait
    }

    pub(crate) fn lanes(&self) -> Vec<Arc<LaneShared>> {
        self.shared.lanes()
    }

    /// The queues of devices that feed lanes now, with engine `xdp`; none with any other. They
    /// change as lanes and devices come and go.
    #[must_use]
    pub fn xdp_queues(&self) -> Vec<XdpQueue> {
        self.shared.xdp.as_ref().map_or_else(Vec::new, |plane| plane.queues())
    }

    /// By what limits and prefixes can be changed while the socket is open, with engine `xdp`.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] with any other engine.
    pub fn filter(&self) -> Result<FilterHandle> {
        let message = "limit, allow and deny need the engine xdp";
        let none = || Error::new(ErrorKind::Unsupported, message);
        self.shared.xdp.as_ref().map(|plane| plane.filter.clone()).ok_or_else(none)
    }

    /// What the XDP programs on the socket's devices did with frames: device, what (`redirected`,
    /// or why a frame was left to the kernel or dropped), how many. Other sockets of this process
    /// on the same devices count too. Empty with any other engine than `xdp`.
    #[must_use]
    pub fn xdp_counts(&self) -> Vec<(String, &'static str, u64)> {
        self.shared.xdp.as_ref().map_or_else(Vec::new, |plane| plane.counts())
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

    /// Adds a lane to a socket that serves; it gets a thread of its own. The calling thread has to
    /// be in the network namespace that the socket was opened in.
    ///
    /// # Errors
    /// [`ErrorKind::State`] if [`Socket::serve`] does not run; whatever is in the way of opening a
    /// lane.
    pub fn add_lane(&self) -> Result<LaneId> {
        let idle = || {
            Error::new(
                ErrorKind::State,
                "the socket does not serve: open_lane() gives a lane to drive by hand",
            )
        };
        let server = self.server.events().ok_or_else(idle)?;
        let lane = open_lane(&self.shared)?;
        let id = lane.id();
        server.send(Event::Run(Box::new(lane))).map_err(|_| idle())?;
        Ok(id)
    }

    /// Adds a lane to be driven by hand. The calling thread has to be in the network namespace that
    /// the socket was opened in.
    ///
    /// # Errors
    /// Whatever is in the way of opening a lane.
    pub fn open_lane(&self) -> Result<Lane> {
        open_lane(&self.shared)
    }

    /// Removes a lane without losing a datagram: out of steering, drained by its thread, closed.
    /// Returns when it is gone.
    ///
    /// With steering by the kernel's own choice lanes cannot be taken out of steering, and what
    /// arrives while this one closes is lost.
    ///
    /// # Errors
    /// [`ErrorKind::LastLane`] for the only one; [`ErrorKind::State`] if there is no such lane, or
    /// if its closure does not return within 30 s.
    pub fn remove_lane(&self, id: LaneId) -> Result<()> {
        self.shared.remove_lane(id)
    }
}
