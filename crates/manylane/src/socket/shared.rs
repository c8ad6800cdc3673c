//! What the lanes of a socket have in common: how one more of them comes, and what all of them have
//! counted.

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use manylane_bpf::abi;
use manylane_sys::rx_coalesce;
use manylane_sys::sock::{self, Flag};

use crate::config::{Config, Engine};
use crate::counters::{Cells, Counters, LaneCounters, LaneId};
use crate::error::{Error, ErrorKind, Result};
use crate::io::Capabilities;
use crate::io::mmsg::{self, MmsgIo, PortSharing};
use crate::io::uring::UringIo;
use crate::io::xdp::XdpControl;
use crate::lane::{Lane, LaneShared, OPEN};
use crate::port_owner;
use crate::serve::Event;
use crate::steer::{Slot, Steer};
use crate::wait::WaitPolicy;

/// What the lanes of a socket have in common.
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) addr: SocketAddr,
    /// CPUs to give to lanes, in turn; empty without pinning.
    pub(super) cpus: Vec<usize>,
    /// The XDP side, with engine `xdp`.
    pub(super) xdp: OnceLock<Arc<XdpControl>>,
    pub(super) control: Mutex<Control>,
    /// Signalled when a lane has closed.
    pub(super) lane_closed: Condvar,
    pub(super) stopping: AtomicBool,
    /// The loop of `serve`, while it runs.
    pub(crate) events: Mutex<Option<mpsc::Sender<Event>>>,
}

/// What only control looks at.
pub(super) struct Control {
    pub(super) steer: Steer,
    pub(super) lanes: Vec<Arc<LaneShared>>,
    /// Sockets of the group that serve no lane.
    pub(super) parked: Vec<(Slot, Arc<OwnedFd>)>,
    /// Inodes of sockets that rings of other threads than the one that dropped their lane have
    /// used.
    pub(super) orphaned: Vec<u64>,
    pub(super) closed: LaneCounters,
    pub(super) next_id: u64,
    /// Whether the first socket lets others join it.
    pub(super) is_reuse_port: bool,
}

impl Control {
    /// A slot for a lane whose socket is new.
    fn free_slot(&self) -> Result<Slot> {
        let parked = self.parked.len();
        if self.lanes.len() + parked >= abi::MAX_LANES {
            return Err(Error::new(
                ErrorKind::Limit,
                format!("a socket has at most {} lanes", abi::MAX_LANES),
            ));
        }
        let taken = |slot: &Slot| {
            self.lanes.iter().any(|lane| lane.slot == *slot)
                || self.parked.iter().any(|(other, _)| other == slot)
        };
        let free = (0..abi::MAX_LANES as Slot).find(|slot| !taken(slot));
        free.ok_or_else(|| Error::new(ErrorKind::Limit, "no slot is free"))
    }
}

impl Shared {
    pub(super) fn control(&self) -> MutexGuard<'_, Control> {
        // Nothing that holds the lock leaves it in a state that a later holder could not use.
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How long a lane that serves pauses when that pays: see
    /// [`Builder::rx_coalesce`](crate::Builder::rx_coalesce).
    pub(crate) fn rx_coalesce(&self) -> Duration {
        let cores = if self.cpus.is_empty() { usize::MAX } else { self.cpus.len() };
        self.config.rx_coalesce.unwrap_or_else(|| {
            let pause = rx_coalesce::default_delay(self.config.lanes, cores);
            // Who wants answers early wants no pause.
            let of_frames = self.config.engine == Engine::Xdp && self.config.wait == WaitPolicy::Sleep;
            if of_frames { pause.max(rx_coalesce::xdp_delay()) } else { pause }
        })
    }

    /// Messages that `lane` has room for while it pauses: in its receive buffer, and in the rings
    /// of its queues.
    pub(crate) fn recv_capacity(&self, lane: &Lane) -> usize {
        self.xdp.get().map_or(usize::MAX, |plane| plane.ring_capacity()).min(lane.recv_capacity())
    }

    /// The open lanes.
    pub(crate) fn lanes(&self) -> Vec<Arc<LaneShared>> {
        self.control().lanes.clone()
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Opens one more lane and steers to it.
    pub(super) fn open_lane(self: &Arc<Self>) -> Result<Lane> {
        let mut control = self.control();
        // Under the lock: a lane that is opened is one that a stop tells to end.
        if self.is_stopping() {
            return Err(Error::new(ErrorKind::State, "the socket is being stopped"));
        }
        let Some(first) = control.lanes.first() else {
            return Err(Error::new(
                ErrorKind::State,
                "every lane of the socket has been closed, and so has its port",
            ));
        };
        if !control.is_reuse_port {
            let set = sock::set_flag(first.fd.as_fd(), Flag::ReusePort, true);
            set.map_err(|err| Error::system("forming a group of lanes (SO_REUSEPORT)", err))?;
            control.is_reuse_port = true;
        }
        if control.steer.is_index_based() {
            self.check_group(&control)?;
        }
        let (slot, fd, can) = match control.parked.pop() {
            Some((slot, fd)) => (slot, fd, capabilities(&self.config)),
            None => {
                let slot = control.free_slot()?;
                let (fd, can) = mmsg::open(&self.config, &self.addr, PortSharing::ReusePort)?;
                (slot, Arc::new(fd), can)
            }
        };
        let mut lane = self.add(&mut control, slot, fd, can)?;
        let admitted =
            control.steer.admit(lane.lane_shared().slot, lane.lane_shared().fd.as_fd(), lane.cpu());
        // A lane that could not be admitted closes, for which it needs the lock.
        drop(control);
        admitted?;
        // The first lanes get their queues when all are there.
        if let Some(plane) = self.xdp.get() {
            lane.attach_queues(plane.add_lane(lane.id())?)?;
            plane.rebalance();
        }
        Ok(lane)
    }

    /// Makes sure that the group is ours alone, for a steering that goes by the kernel's numbering
    /// of its sockets: the kernel lets other processes of the same user in once there are two
    /// lanes.
    pub(super) fn check_group(&self, control: &Control) -> Result<()> {
        let fds = control.lanes.iter().map(|lane| &lane.fd).chain(control.parked.iter().map(|(_, fd)| fd));
        let ours: Vec<u64> = fds.filter_map(|fd| sock::inode(fd.as_fd()).ok()).collect();
        let Some(who) = port_owner::find_foreign(&self.addr, &ours) else { return Ok(()) };
        let message = format!("{} is also bound by {who}: no lane can be added without eBPF", self.addr);
        Err(Error::new(ErrorKind::InUse, message))
    }

    /// Makes a lane of a bound socket. It is not steered to yet.
    pub(super) fn add(
        self: &Arc<Self>,
        control: &mut Control,
        slot: Slot,
        fd: Arc<OwnedFd>,
        can: Capabilities,
    ) -> Result<Lane> {
        let io = MmsgIo::new(&self.config, &self.addr, can)?;
        let by_uring = self.config.engine == Engine::Uring;
        let uring = by_uring.then(|| UringIo::new(&self.config, can)).transpose()?;
        let id = LaneId(control.next_id);
        control.next_id += 1;
        let cpu = self.cpus.get(id.0 as usize % self.cpus.len().max(1)).copied();
        let drops_before = sock::queue_state(fd.as_fd()).unwrap_or_default().drops;
        let steered_before = control.steer.steered(slot).unwrap_or(0);
        let state = AtomicU8::new(OPEN);
        let (tid, cells) = (AtomicI32::new(0), Cells::new());
        let me = LaneShared { id, slot, fd, cpu, cells, state, tid, drops_before, steered_before };
        let me = Arc::new(me);
        control.lanes.push(Arc::clone(&me));
        Ok(Lane::new(Arc::clone(self), me, io, uring, can, control.steer.load_words()))
    }

    pub(crate) fn counters(&self) -> Counters {
        let control = self.control();
        let read = |lane: &Arc<LaneShared>| (lane.id, self.counters_of(&control, lane));
        let (steered_short, steered_by_kernel) = control.steer.fallbacks();
        Counters {
            lanes: control.lanes.iter().map(read).collect(),
            closed: control.closed,
            steered_short,
            steered_by_kernel,
            filter_drops: self.xdp.get().map(|plane| plane.filter.drops()).unwrap_or_default(),
        }
    }

    pub(super) fn counters_of(&self, control: &Control, lane: &LaneShared) -> LaneCounters {
        let mut counters = lane.counters();
        counters.steered = control.steer.steered(lane.slot).map(|all| all - lane.steered_before);
        counters.xsk_dropped = self.xdp.get().map_or(0, |plane| plane.dropped(lane.id));
        counters
    }
}

/// What a socket that was opened before with the same options can do.
pub(super) fn capabilities(config: &Config) -> Capabilities {
    Capabilities {
        batch: config.batch,
        datagram_size: if config.gro { crate::config::DATAGRAM_SIZE_MAX } else { config.datagram_size },
        gro: config.gro,
        gso: config.gso,
        timestamps: config.timestamps,
    }
}
