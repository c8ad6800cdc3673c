//! State that the lanes of a socket share; lanes that are added and removed.
//!
//! One lock guards control. No lane takes it on its receive path.
//!
//! | change | steps |
//! |---|---|
//! | a lane is added | bind a socket, or take a parked one; allocate the buffers; enter it in the socket array (steering by eBPF), then in the steering table |
//! | a lane is removed | take it out of the table; wait for a grace period ([`manylane_sys::barrier`]), after which no packet is between the table and the queue; its thread drains the queue; park the socket |
//! | the socket ends | each lane refuses new datagrams by a socket filter, waits for a grace period, drains its queue and closes |
//!
//! The thread of a lane notices a removal when its wait ends: an idle lane waits 20 ms at most.
//!
//! A parked socket stays bound, is not steered to, and serves the next lane that is added.
//! `Steer::needs_parking` says why no socket of a group closes before all do. So a socket holds as
//! many descriptors as it ever had lanes at one time. Where the kernel selects the lane by itself,
//! a lane that is removed closes its socket: the kernel would go on to select a parked one.
//!
//! | file | what it holds |
//! |---|---|
//! | here | lanes that are added; counters of all lanes |
//! | [`shutdown`] | lanes that are removed, and the end of the socket |

mod shutdown;

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use manylane_bpf::abi;
use manylane_sys::sock::{self, Flag};

use crate::config::Config;
use crate::counters::{Cells, Counters, LaneCounters, LaneId};
use crate::error::{Error, ErrorKind, Result};
use crate::io::kernel_socket::{self, PortSharing};
use crate::io::{Capabilities, Io, NewLane, SocketEngine};
use crate::lane_shared::{LaneShared, OPEN, Offloads};
use crate::port_owner;
use crate::steer::{EffectiveSteering, Slot, Steer};
use crate::wait::WaitPolicy;

/// State that the lanes of a socket share.
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) addr: SocketAddr,
    /// CPUs for lanes, assigned round-robin; empty without pinning.
    cpus: Vec<usize>,
    /// Number of CPUs that lanes run on.
    cpu_count: usize,
    pub(crate) engine: Arc<dyn SocketEngine>,
    control: Mutex<Control>,
    /// Signalled when a lane has closed.
    lane_closed: Condvar,
    stopping: AtomicBool,
}

/// The parts of a new lane.
pub(crate) struct LaneParts {
    pub(crate) lane_shared: Arc<LaneShared>,
    pub(crate) io: Io,
}

/// State of the control path.
struct Control {
    steer: Steer,
    lanes: Vec<Arc<LaneShared>>,
    /// Sockets of the group without a lane.
    parked: Vec<(Slot, Arc<OwnedFd>, Offloads)>,
    closed: LaneCounters,
    next_id: u64,
    /// True if the first socket allows others on the port.
    is_reuse_port: bool,
}

impl Control {
    /// Closes the parked sockets if steering has fallen back to the kernel's choice, which includes
    /// them: nobody would read what they get.
    fn close_parked_if_selected(&mut self) {
        if !self.steer.needs_parking() {
            self.parked.clear();
        }
    }

    /// A slot for a lane with a new socket.
    fn free_slot(&self) -> Result<Slot> {
        let taken = |slot: &Slot| {
            self.lanes.iter().any(|lane| lane.slot == *slot)
                || self.parked.iter().any(|(other, ..)| other == slot)
        };
        let free = (0..abi::LANES_MAX as Slot).find(|slot| !taken(slot));
        free.ok_or_else(|| {
            Error::new(
                ErrorKind::Limit,
                format!("a socket has at most {} lanes: remove one first", abi::LANES_MAX),
            )
        })
    }
}

impl Shared {
    /// A socket without lanes.
    pub(crate) fn new(
        config: Config,
        addr: SocketAddr,
        cpus: Vec<usize>,
        cpu_count: usize,
        steer: Steer,
        engine: Arc<dyn SocketEngine>,
    ) -> Self {
        let control = Control {
            steer,
            lanes: Vec::new(),
            parked: Vec::new(),
            closed: LaneCounters::default(),
            next_id: 0,
            is_reuse_port: config.reuse_port,
        };
        Self {
            config,
            addr,
            cpus,
            cpu_count,
            engine,
            control: Mutex::new(control),
            lane_closed: Condvar::new(),
            stopping: AtomicBool::new(false),
        }
    }

    /// The steering in force.
    pub(crate) fn steering(&self) -> EffectiveSteering {
        self.control().steer.effective()
    }

    fn control(&self) -> MutexGuard<'_, Control> {
        // Every critical section leaves valid state, so a poisoned lock can be used.
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Longest delay of a lane in `serve`: see
    /// [`Builder::rx_coalesce`](crate::Builder::rx_coalesce). None: it follows the load.
    pub(crate) fn rx_coalesce(&self) -> Option<Duration> {
        let shares_cpus = self.config.lanes > self.cpu_count;
        // A policy that polls asks for low latency, so no delay is added for it.
        let by_engine = self.config.wait == WaitPolicy::Sleep && self.engine.wakeups_dominate();
        let follows_load = shares_cpus || by_engine;
        self.config.rx_coalesce.or_else(|| (!follows_load).then_some(Duration::ZERO))
    }

    /// The open lanes.
    pub(crate) fn lanes(&self) -> Vec<Arc<LaneShared>> {
        self.control().lanes.clone()
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Opens one more lane and steers to it. A lane that could not be steered to is returned too,
    /// with the error, and closes as any other.
    pub(crate) fn open_lane(&self) -> Result<(LaneParts, Result<()>)> {
        let mut control = self.control();
        // Checked under the lock: a stop then tells every lane that was opened to end.
        if self.is_stopping() {
            return Err(Error::new(ErrorKind::State, "the socket is stopping"));
        }
        let Some(first) = control.lanes.first() else {
            return Err(Error::new(
                ErrorKind::State,
                "all lanes of the socket are closed, and its port with them",
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
        if let Some((slot, fd, offloads)) = control.parked.last().cloned() {
            let added = self.add(&mut control, slot, fd, offloads)?;
            // Only now: without a lane it stays parked, because no socket of the group closes
            // before all do.
            control.parked.pop();
            return Ok(added);
        }
        let slot = control.free_slot()?;
        let (fd, offloads) = kernel_socket::open(&self.config, &self.addr, PortSharing::ReusePort)?;
        self.engine.set_options(&self.config, fd.as_fd())?;
        self.add(&mut control, slot, Arc::new(fd), offloads)
    }

    /// Adds a lane with a socket that is already open, as the first lane's is: bound exclusively,
    /// or into the group of other sockets.
    pub(crate) fn add_open(&self, fd: OwnedFd, offloads: Offloads) -> Result<(LaneParts, Result<()>)> {
        self.engine.set_options(&self.config, fd.as_fd())?;
        let mut control = self.control();
        let slot = control.free_slot()?;
        self.add(&mut control, slot, Arc::new(fd), offloads)
    }

    /// Checks that all sockets of the group are ours, for steering by the kernel's socket index:
    /// with two lanes or more, the kernel also admits other processes of the same user.
    fn check_group(&self, control: &Control) -> Result<()> {
        let fds = control.lanes.iter().map(|lane| &lane.fd).chain(control.parked.iter().map(|(_, fd, _)| fd));
        let ours: Vec<u64> = fds.filter_map(|fd| sock::inode(fd.as_fd()).ok()).collect();
        let Some(who) = port_owner::find_foreign(&self.addr, &ours) else { return Ok(()) };
        let message = format!("{} is also bound by {who}: adding a lane needs eBPF", self.addr);
        Err(Error::new(ErrorKind::InUse, message))
    }

    /// Makes a lane of a bound socket, and steers to it.
    fn add(
        &self,
        control: &mut Control,
        slot: Slot,
        fd: Arc<OwnedFd>,
        offloads: Offloads,
    ) -> Result<(LaneParts, Result<()>)> {
        let id = LaneId(control.next_id);
        let lane_shared = Arc::new(LaneShared {
            id,
            slot,
            offloads,
            cpu: self.cpus.get(id.0 as usize % self.cpus.len().max(1)).copied(),
            cells: Cells::new(),
            state: AtomicU8::new(OPEN),
            tid: AtomicI32::new(0),
            drops_before: sock::queue_state(fd.as_fd()).unwrap_or_default().drops,
            steered_before: control.steer.steered(slot).unwrap_or(0),
            fd,
        });
        let load = control.steer.load_words();
        let (config, addr, caps) = (&self.config, &self.addr, Capabilities::of(&self.config, offloads));
        let new = NewLane { config, addr, caps, lane: &lane_shared, load };
        let io = Arc::clone(&self.engine).new_lane(new)?;
        control.next_id += 1;
        control.lanes.push(Arc::clone(&lane_shared));
        let admitted = control.steer.admit(slot, lane_shared.fd.as_fd(), lane_shared.cpu);
        control.close_parked_if_selected();
        Ok((LaneParts { lane_shared, io }, admitted))
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
            filter_drops: self.engine.filter().map(|filter| filter.drops()).unwrap_or_default(),
        }
    }

    fn counters_of(&self, control: &Control, lane: &LaneShared) -> LaneCounters {
        let mut counters = lane.counters();
        counters.steered = control.steer.steered(lane.slot).map(|all| all - lane.steered_before);
        counters.xsk_dropped = self.engine.dropped(lane.id);
        counters
    }
}
