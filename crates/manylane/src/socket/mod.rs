//! The socket: opening its lanes, and everything that concerns more than one of them.
//!
//! Control is behind one lock that no lane's hot path takes. A lane that comes is bound, has its
//! buffers, and only then is steered to. A lane that leaves is taken out of steering, a grace
//! period passes, its queue is drained by its own thread, and its socket is parked for the next
//! lane: no socket of the group closes before all do (see `Steer::needs_parking` for why).
//!
//! | file | what it holds |
//! |---|---|
//! | `shared.rs` | what lanes have in common; lanes that come; counters of all of them |
//! | `shutdown.rs` | lanes that leave, and the end of the socket |
//! | `handle.rs` | control from any thread |
//!
//! Here is how a socket is opened, and what can be asked of it.

mod handle;
mod shared;
mod shutdown;

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, OnceLock};

use manylane_sys::{cpu, sock};

use crate::config::{Builder, Config, Engine};
use crate::counters::LaneCounters;
use crate::error::{Error, Result};
use crate::io::Capabilities;
use crate::io::mmsg::{self, PortSharing};
use crate::io::xdp::{XdpControl, XdpQueue};
use crate::lane::Lane;
use crate::placement;
use crate::steer::{EffectiveSteering, Steer};
use crate::wait::{self, EffectiveWait};

pub use handle::Handle;
pub(crate) use shared::Shared;
use shared::{Control, capabilities};

/// One bound address with many lanes.
///
/// Either [`serve`](Self::serve) runs a thread per lane, or [`into_lanes`](Self::into_lanes) hands
/// them out.
pub struct Socket {
    pub(crate) shared: Arc<Shared>,
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

    pub(crate) fn open(mut config: Config) -> Result<Self> {
        let allowed = cpu::affinity().map_err(|err| Error::system("reading the CPU affinity", err))?;
        let cpus =
            config.placement.order(&placement::topology(Path::new("/sys/devices/system/cpu"), &allowed))?;
        let cores = if cpus.is_empty() { allowed.len() } else { cpus.len() };
        let waiting = wait::resolve_policy(config.wait, config.engine, config.lanes, cores);
        (config.wait, config.wait_fallback) = (waiting.policy, waiting.reason);
        let steer = Steer::new(config.steering, config.steering_backend, config.reuse_port)?;
        let join = if config.reuse_port { PortSharing::ReusePort } else { PortSharing::Exclusive };
        let (first, can) = mmsg::open(&config, &config.addr, join)?;
        let addr =
            sock::local_addr(first.as_fd()).map_err(|err| Error::system("reading the bound address", err))?;
        (config.gro, config.gso) = (can.gro, can.gso);
        let lanes = config.lanes;
        let control = Control {
            steer,
            lanes: Vec::new(),
            parked: Vec::new(),
            orphaned: Vec::new(),
            closed: LaneCounters::default(),
            next_id: 0,
            is_reuse_port: config.reuse_port,
        };
        let shared = Arc::new(Shared {
            config,
            addr,
            cpus,
            xdp: OnceLock::new(),
            control: Mutex::new(control),
            lane_closed: Condvar::new(),
            stopping: AtomicBool::new(false),
            events: Mutex::new(None),
        });
        let mut socket = Self { lanes: Vec::with_capacity(lanes), shared };
        let mut control = socket.shared.control();
        let first = socket.shared.add(&mut control, 0, Arc::new(first), can)?;
        let admitted = control.steer.admit(0, first.lane_shared().fd.as_fd(), first.cpu());
        drop(control);
        admitted?;
        socket.lanes.push(first);
        for at in 1..lanes {
            let named =
                |err: Error| Error::with(err.kind(), format!("lane {} of {lanes}: {err}", at + 1), err);
            let lane = socket.shared.open_lane().map_err(named)?;
            socket.lanes.push(lane);
        }
        if socket.shared.config.engine == Engine::Xdp {
            socket.open_queues()?;
        }
        log::info!("{addr}: {lanes} lanes, engine {}, steering {}", socket.engine(), socket.steering());
        Ok(socket)
    }

    /// Opens the XDP side: last, so that every companion is ready for what XDP does not take.
    fn open_queues(&mut self) -> Result<()> {
        let plane = XdpControl::open(&self.shared.config, self.shared.addr)?;
        for lane in &mut self.lanes {
            lane.attach_queues(plane.add_lane(lane.id())?)?;
        }
        // Here, where nobody waits for a datagram: the first time it measures.
        self.shared.rx_coalesce();
        plane.start()?;
        // It was empty: the socket is being opened.
        _ = self.shared.xdp.set(plane);
        Ok(())
    }

    /// The queues of devices that feed lanes, with engine `xdp`; none with any other.
    #[must_use]
    pub fn xdp_queues(&self) -> Vec<XdpQueue> {
        self.shared.xdp.get().map_or_else(Vec::new, |plane| plane.queues())
    }

    /// The address that the socket is bound to, with the port that the kernel picked if it was to.
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

    /// Why engine `xdp` is not in use, where [`Engine::Auto`] had devices named for it and fell
    /// back; or why [`Engine::Uring`] is not.
    #[must_use]
    pub fn fallback(&self) -> Option<&str> {
        self.shared.config.fallback.as_deref()
    }

    /// How lanes wait, and why it is not what was asked for where it is not.
    #[must_use]
    pub fn waiting(&self) -> EffectiveWait {
        let Config { wait, wait_fallback: waits_otherwise, .. } = &self.shared.config;
        EffectiveWait { policy: *wait, reason: waits_otherwise.clone() }
    }

    /// The steering in force, and why it is not what was asked for where it is not.
    #[must_use]
    pub fn steering(&self) -> EffectiveSteering {
        self.handle().steering()
    }

    /// What the engine can do on this socket.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        capabilities(&self.shared.config)
    }

    /// A handle for other threads: counters, lanes that come and go, stopping.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle { shared: Arc::clone(&self.shared) }
    }

    /// Hands the lanes out, to be driven by hand.
    #[must_use]
    pub fn into_lanes(self) -> Vec<Lane> {
        self.lanes
    }
}
