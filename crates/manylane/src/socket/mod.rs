//! The socket: queries and control, from the thread that opened it and from others.
//!
//! | file | what it holds |
//! |---|---|
//! | [`open`] | opening: selects the engine, opens the lanes, and attaches the queues of devices last |
//! | [`handle`] | control from any thread |
//!
//! `group` has the state that its lanes share.

mod handle;
mod open;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError, mpsc};

use crate::config::{Builder, Config, Engine};
use crate::error::Result;
use crate::group::Shared;
use crate::io::{Capabilities, XdpQueue};
use crate::lane::Lane;
use crate::steer::EffectiveSteering;
use crate::wait::EffectiveWait;

pub use handle::Handle;

/// An event for the loop of `serve`.
pub(crate) enum Event {
    /// A lane was added: give it a thread.
    Run(Box<Lane>),
    /// The thread of a lane has ended.
    Ended(Result<()>),
}

/// The sender to the loop of `serve`, while it runs.
#[derive(Default)]
pub(crate) struct Server(Mutex<Option<mpsc::Sender<Event>>>);

impl Server {
    pub(crate) fn set(&self, events: Option<mpsc::Sender<Event>>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = events;
    }

    fn events(&self) -> Option<mpsc::Sender<Event>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// One bound address with many lanes.
///
/// [`serve`](Self::serve) runs a thread per lane; [`into_lanes`](Self::into_lanes) returns the
/// lanes instead.
pub struct Socket {
    pub(crate) shared: Arc<Shared>,
    pub(crate) server: Arc<Server>,
    pub(crate) lanes: Vec<Lane>,
}

impl Socket {
    /// Opens a socket with the default options: see [`Builder`].
    ///
    /// # Errors
    /// As for [`Builder::open`].
    pub fn bind(addr: impl std::net::ToSocketAddrs) -> Result<Self> {
        Builder::new(addr)?.open()
    }

    /// Starts with the address to bind: [`Builder::new`].
    ///
    /// # Errors
    /// As for [`Builder::new`].
    pub fn builder(addr: impl std::net::ToSocketAddrs) -> Result<Builder> {
        Builder::new(addr)
    }

    /// The queues of devices that feed lanes. Empty with any engine but `xdp`.
    #[must_use]
    pub fn xdp_queues(&self) -> Vec<XdpQueue> {
        self.shared.engine.queues()
    }

    /// The address that the socket is bound to, with the port that the kernel picked for port 0.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.shared.addr
    }

    /// Number of lanes that the socket was opened with.
    #[must_use]
    pub fn lane_count(&self) -> usize {
        self.lanes.len()
    }

    /// The engine in use; never [`Engine::Auto`].
    #[must_use]
    pub fn engine(&self) -> Engine {
        self.shared.config.engine
    }

    /// The reason why the engine is not the one that was named, or that [`Engine::Auto`] prefers.
    #[must_use]
    pub fn fallback(&self) -> Option<&str> {
        self.shared.config.fallback.as_deref()
    }

    /// The wait policy in force, and why it is not the requested one, if it differs.
    #[must_use]
    pub fn waiting(&self) -> EffectiveWait {
        let Config { wait, wait_fallback: waits_otherwise, .. } = &self.shared.config;
        EffectiveWait { policy: *wait, reason: waits_otherwise.clone() }
    }

    /// The steering in force, and why it is not the requested one, if it differs.
    #[must_use]
    pub fn steering(&self) -> EffectiveSteering {
        self.handle().steering()
    }

    /// Capabilities of the engine on this socket.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        Capabilities::of(&self.shared.config)
    }

    /// A handle for other threads: counters, adding and removing lanes, stopping.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle { shared: Arc::clone(&self.shared), server: Arc::clone(&self.server) }
    }

    /// Returns the lanes, for a program that drives them itself.
    #[must_use]
    pub fn into_lanes(self) -> Vec<Lane> {
        self.lanes
    }
}
