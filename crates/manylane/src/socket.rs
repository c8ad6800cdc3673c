//! The socket: opening its lanes, and everything that concerns more than one of them.
//!
//! Control is behind one lock that no lane's hot path takes. A lane that comes is bound, has its buffers, and
//! only then is steered to. A lane that leaves is taken out of steering, a grace period passes, its queue is
//! drained by its own thread, and its socket is parked for the next lane: no socket of the group closes before all
//! do (see `Steer::needs_parking` for why).

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError, mpsc};
use std::time::{Duration, Instant};

use manylane_bpf::abi;
use manylane_sys::sock::{self, Flag};
use manylane_sys::{barrier, cpu, linger};

use crate::config::{Builder, Config, Engine};
use crate::counters::{Cells, Counters, LaneCounters, LaneId};
use crate::error::{Error, ErrorKind, Result};
use crate::holder;
use crate::io::Capabilities;
use crate::io::mmsg::{self, Join, MmsgIo};
use crate::io::uring::UringIo;
use crate::io::xdp::{Gate, Plane, XdpQueue};
use crate::lane::{LEAVING, Lane, LaneShared, OPEN, RETIRING, SHUT};
use crate::placement;
use crate::race::EngineChoice;
use crate::serve::Event;
use crate::sizes::{Sizes, Wanted};
use crate::steer::{Slot, Steer, SteeringInForce};
use crate::wait::{self, WaitInForce, WaitPolicy};

/// How long the removal of a lane waits for its thread to finish the batch that it works on.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

/// What the lanes of a socket have in common.
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) addr: SocketAddr,
    /// CPUs to give to lanes, in turn; empty without pinning.
    cpus: Vec<usize>,
    /// The XDP side, with engine `xdp`.
    xdp: OnceLock<Arc<Plane>>,
    control: Mutex<Control>,
    /// Signalled when a lane has closed.
    lane_closed: Condvar,
    stopping: AtomicBool,
    /// Other sizes than those of `config`, once somebody has asked for them.
    pub(crate) wanted: Wanted,
    /// The loop of `serve`, while it runs.
    pub(crate) server: Mutex<Option<mpsc::Sender<Event>>>,
}

/// What only control looks at.
struct Control {
    steer: Steer,
    lanes: Vec<Arc<LaneShared>>,
    /// Sockets of the group that serve no lane.
    parked: Vec<(Slot, Arc<OwnedFd>)>,
    /// Inodes of sockets that rings of other threads than the one that dropped their lane have used.
    left: Vec<u64>,
    closed: LaneCounters,
    next_id: u64,
    /// Whether the first socket lets others join it.
    grouped: bool,
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
    fn control(&self) -> MutexGuard<'_, Control> {
        // Nothing that holds the lock leaves it in a state that a later holder could not use.
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How long a lane that serves pauses when that pays: see [`Builder::linger`].
    pub(crate) fn linger(&self) -> Duration {
        let cores = if self.cpus.is_empty() { usize::MAX } else { self.cpus.len() };
        self.config.linger.unwrap_or_else(|| {
            let pause = linger::default_pause(self.config.lanes, cores);
            // Who wants answers early wants no pause.
            let of_frames = self.config.engine == Engine::Xdp && self.config.wait == WaitPolicy::Sleep;
            if of_frames { pause.max(linger::pause_for_frames()) } else { pause }
        })
    }

    /// Messages that `lane` has room for while it pauses: in its receive buffer, and in the rings of its queues.
    pub(crate) fn room(&self, lane: &Lane) -> usize {
        self.xdp.get().map_or(usize::MAX, |plane| plane.room()).min(lane.room())
    }

    /// Looks at the lanes without a wait; none while somebody else does.
    pub(crate) fn look_at_lanes<T>(&self, look: impl FnOnce(&[Arc<LaneShared>]) -> T) -> Option<T> {
        let control = match self.control.try_lock() {
            Ok(control) => control,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(look(&control.lanes))
    }

    /// The open lanes.
    pub(crate) fn lanes(&self) -> Vec<Arc<LaneShared>> {
        self.control().lanes.clone()
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Opens one more lane and steers to it.
    fn open_lane(self: &Arc<Self>) -> Result<Lane> {
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
        if !control.grouped {
            let set = sock::set_flag(first.fd.as_fd(), Flag::ReusePort, true);
            set.map_err(|err| Error::system("forming a group of lanes (SO_REUSEPORT)", err))?;
            control.grouped = true;
        }
        if control.steer.counts_sockets() {
            self.check_group(&control)?;
        }
        let (slot, fd, can) = match control.parked.pop() {
            Some((slot, fd)) => (slot, fd, capabilities(&self.config)),
            None => {
                let slot = control.free_slot()?;
                let (fd, can) = mmsg::open(&self.config, &self.addr, Join::Group)?;
                (slot, Arc::new(fd), can)
            }
        };
        let mut lane = self.add(&mut control, slot, fd, can)?;
        let admitted = control.steer.admit(lane.me().slot, lane.me().fd.as_fd(), lane.cpu());
        // A lane that could not be admitted closes, for which it needs the lock.
        drop(control);
        admitted?;
        // The first lanes get their queues when all are there.
        if let Some(plane) = self.xdp.get() {
            lane.serve_queues(plane.enlist(lane.id())?)?;
            plane.share_out();
        }
        Ok(lane)
    }

    /// Makes sure that the group is ours alone, for a steering that goes by the kernel's numbering of its sockets:
    /// the kernel lets other processes of the same user in once there are two lanes.
    fn check_group(&self, control: &Control) -> Result<()> {
        let fds = control.lanes.iter().map(|lane| &lane.fd).chain(control.parked.iter().map(|(_, fd)| fd));
        let ours: Vec<u64> = fds.filter_map(|fd| sock::inode(fd.as_fd()).ok()).collect();
        let Some(who) = holder::stranger(&self.addr, &ours) else { return Ok(()) };
        let message = format!("{} is also bound by {who}: no lane can be added without eBPF", self.addr);
        Err(Error::new(ErrorKind::InUse, message))
    }

    /// Makes a lane of a bound socket. It is not steered to yet.
    fn add(
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

    /// Whether lanes can be taken out of steering.
    pub(crate) fn steers(&self) -> bool {
        self.control().steer.needs_parking()
    }

    /// Takes a lane out of steering; when this returns nothing more arrives in its queue.
    pub(crate) fn retire(&self, lane: &LaneShared) -> Result<()> {
        {
            let mut control = self.control();
            if !lane.is_open() {
                let under_way = lane.state.load(Ordering::Relaxed) == RETIRING;
                drop(control);
                // Somebody else has taken it out, and waits as this does: what was steered before is queued then.
                if under_way {
                    barrier::settle();
                }
                return Ok(());
            }
            let Some(other) =
                control.lanes.iter().find(|other| other.id != lane.id && other.is_open()).cloned()
            else {
                let message = "the last lane of a socket cannot leave: stop the socket";
                return Err(Error::new(ErrorKind::LastLane, message));
            };
            control.steer.retire(lane.slot, other.fd.as_fd())?;
            if let Some(plane) = self.xdp.get() {
                plane.retire(lane.id);
            }
            lane.state.store(RETIRING, Ordering::Relaxed);
        }
        barrier::settle();
        // Only now: a thread that sees it drains the queue and ends, which must not be before the last datagram
        // has arrived.
        // It may have noticed a stop meanwhile, and have shut its door.
        _ = lane.state.fetch_max(LEAVING, Ordering::Relaxed);
        Ok(())
    }

    /// A lane is about to close: makes sure that nothing more arrives in its queue. Returns whether its socket can
    /// serve another lane.
    pub(crate) fn leave(&self, lane: &LaneShared) -> bool {
        let retired = !self.is_stopping() && self.retire(lane).is_ok();
        if !retired {
            self.shut(lane);
        }
        retired && lane.state.load(Ordering::Relaxed) != SHUT
    }

    /// Lets nothing more into the queue of a lane of a socket that ends.
    pub(crate) fn shut(&self, lane: &LaneShared) {
        if lane.state.swap(SHUT, Ordering::Relaxed) == SHUT {
            return;
        }
        if let Some(plane) = self.xdp.get() {
            plane.shut(lane.id);
        }
        // Without the filter, what arrives between here and the close is lost uncounted: nothing worse.
        if sock::refuse_all(lane.fd.as_fd()).is_ok() {
            barrier::settle();
        }
    }

    /// A lane has been drained: keeps its counters, and its socket where the group must not be renumbered. With the last one,
    /// the sockets (inodes) that rings of other threads may have although they are closed; `has_left` is whether such a ring
    /// has used this one's.
    pub(crate) fn closed(&self, lane: &Arc<LaneShared>, reusable: bool, has_left: bool) -> Vec<u64> {
        let mut control = self.control();
        if has_left && let Ok(inode) = sock::inode(lane.fd.as_fd()) {
            control.left.push(inode);
        }
        let mut left = Vec::new();
        let counters = self.counters_of(&control, lane);
        control.closed += counters;
        control.lanes.retain(|other| other.id != lane.id);
        if control.lanes.is_empty() {
            // The socket is gone: what was parked must not keep the port.
            control.parked.clear();
            control.steer.close();
            left = std::mem::take(&mut control.left);
        } else if reusable && control.steer.needs_parking() {
            control.parked.push((lane.slot, Arc::clone(&lane.fd)));
        }
        drop(control);
        self.lane_closed.notify_all();
        left
    }

    /// Tells every lane to end: they handle what is queued, and `serve` returns.
    pub(crate) fn stop(&self) {
        let control = self.control();
        self.stopping.store(true, Ordering::Relaxed);
        if let Some(plane) = self.xdp.get() {
            plane.stop_following();
        }
        for lane in &control.lanes {
            // One whose door is shut has noticed already.
            _ = lane.state.fetch_max(LEAVING, Ordering::Release);
            sock::wake(lane.fd.as_fd());
        }
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
            refused: self.xdp.get().map(|plane| plane.gate.refused()).unwrap_or_default(),
        }
    }

    fn counters_of(&self, control: &Control, lane: &LaneShared) -> LaneCounters {
        let mut counters = lane.counters();
        counters.steered = control.steer.steered(lane.slot).map(|all| all - lane.steered_before);
        counters.xsk_dropped = self.xdp.get().map_or(0, |plane| plane.dropped(lane.id));
        counters
    }

    /// The queues of a lane are drained, and it closes.
    pub(crate) fn forget_queues(&self, lane: LaneId) {
        if let Some(plane) = self.xdp.get() {
            plane.forget(lane);
        }
    }

    fn remove_lane(&self, id: LaneId) -> Result<()> {
        let unknown = || Error::new(ErrorKind::State, format!("the socket has no open lane {id}"));
        let lane =
            self.lanes().into_iter().find(|lane| lane.id == id && lane.is_open()).ok_or_else(unknown)?;
        self.retire(&lane)?;
        let fd = Arc::downgrade(&lane.fd);
        drop(lane);
        // The lane's thread notices within the time that an idle lane sleeps. Waking it (as a stop does) would keep
        // the socket awake for good, and the next lane may be given it.
        let mut control = self.control();
        let parks = control.steer.needs_parking();
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        // A socket that is not parked is closed when the last that looks at the lane lets go of it, a moment after
        // the lane has left the list.
        while control.lanes.iter().any(|lane| lane.id == id) || (!parks && fd.strong_count() > 0) {
            if Instant::now() > deadline {
                let message = format!("lane {id} is out of steering, but its closure has not returned yet");
                return Err(Error::new(ErrorKind::State, message));
            }
            let waited = self.lane_closed.wait_timeout(control, Duration::from_millis(10));
            control = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }
}

/// What a socket that was opened before with the same options can do.
fn capabilities(config: &Config) -> Capabilities {
    Capabilities {
        batch: config.batch,
        datagram_size: if config.gro { crate::config::LARGEST_DATAGRAM } else { config.datagram_size },
        gro: config.gro,
        gso: config.gso,
        timestamps: config.timestamps,
    }
}

/// One bound address with many lanes.
///
/// Either [`serve`](Self::serve) runs a thread per lane, or [`into_lanes`](Self::into_lanes) hands them out.
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
        let waiting = wait::settle(config.wait, config.engine, config.lanes, cores);
        (config.wait, config.waits_otherwise) = (waiting.policy, waiting.why);
        let steer = Steer::new(config.steering, config.steering_by, config.join_group)?;
        let join = if config.join_group { Join::Group } else { Join::Alone };
        let (first, can) = mmsg::open(&config, &config.addr, join)?;
        let addr =
            sock::local_addr(first.as_fd()).map_err(|err| Error::system("reading the bound address", err))?;
        (config.gro, config.gso) = (can.gro, can.gso);
        let lanes = config.lanes;
        let control = Control {
            steer,
            lanes: Vec::new(),
            parked: Vec::new(),
            left: Vec::new(),
            closed: LaneCounters::default(),
            next_id: 0,
            grouped: config.join_group,
        };
        let shared = Arc::new(Shared {
            config,
            addr,
            cpus,
            xdp: OnceLock::new(),
            control: Mutex::new(control),
            lane_closed: Condvar::new(),
            stopping: AtomicBool::new(false),
            wanted: Wanted::default(),
            server: Mutex::new(None),
        });
        let mut socket = Self { lanes: Vec::with_capacity(lanes), shared };
        let mut control = socket.shared.control();
        let first = socket.shared.add(&mut control, 0, Arc::new(first), can)?;
        let admitted = control.steer.admit(0, first.me().fd.as_fd(), first.cpu());
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
        let plane = Plane::open(&self.shared.config, self.shared.addr)?;
        for lane in &mut self.lanes {
            lane.serve_queues(plane.enlist(lane.id())?)?;
        }
        // Here, where nobody waits for a datagram: the first time it measures.
        self.shared.linger();
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

    /// Why engine `xdp` is not in use, where [`Engine::Auto`] had devices named for it and fell back; or why
    /// [`Engine::Uring`] is not.
    #[must_use]
    pub fn fallback(&self) -> Option<&str> {
        self.shared.config.fallback.as_deref()
    }

    /// What [`Engine::Auto`] went by when it chose between engines on kernel sockets; none if it did not have to.
    #[must_use]
    pub fn choice(&self) -> Option<&EngineChoice> {
        self.shared.config.choice.as_ref()
    }

    /// How lanes wait, and why it is not what was asked for where it is not.
    #[must_use]
    pub fn waiting(&self) -> WaitInForce {
        let Config { wait, waits_otherwise, .. } = &self.shared.config;
        WaitInForce { policy: *wait, why: waits_otherwise.clone() }
    }

    /// The steering in force, and why it is not what was asked for where it is not.
    #[must_use]
    pub fn steering(&self) -> SteeringInForce {
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

/// Control over a socket from any thread.
#[derive(Clone)]
pub struct Handle {
    shared: Arc<Shared>,
}

impl Handle {
    /// Ends [`Socket::serve`]: lanes handle what is queued, then it returns. May be called more than once.
    pub fn stop(&self) {
        self.shared.stop();
    }

    /// The counters now. Lanes are not disturbed: their cells are read without a lock; only the list of lanes
    /// is guarded by one, which no lane takes while it receives or sends.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.shared.counters()
    }

    /// Where it is bound, and its engine.
    pub(crate) fn about(&self) -> (SocketAddr, Engine) {
        (self.shared.addr, self.shared.config.engine)
    }

    /// How its lanes wait.
    pub(crate) fn wait_policy(&self) -> WaitPolicy {
        self.shared.config.wait
    }

    pub(crate) fn lanes(&self) -> Vec<Arc<LaneShared>> {
        self.shared.lanes()
    }

    /// The queues of devices that feed lanes now, with engine `xdp`; none with any other. They change as lanes and
    /// devices come and go.
    #[must_use]
    pub fn xdp_queues(&self) -> Vec<XdpQueue> {
        self.shared.xdp.get().map_or_else(Vec::new, |plane| plane.queues())
    }

    /// By what limits and prefixes can be changed while the socket is open, with engine `xdp`.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] with any other engine.
    pub fn gate(&self) -> Result<Gate> {
        let message = "limit, allow and deny need the engine xdp";
        let none = || Error::new(ErrorKind::Unsupported, message);
        self.shared.xdp.get().map(|plane| plane.gate.clone()).ok_or_else(none)
    }

    /// What the XDP programs on the socket's devices did with frames: device, what (`redirected`, or why a frame was
    /// left to the kernel or dropped), how many. Other sockets of this process on the same devices count too. Empty with any
    /// other engine than `xdp`.
    #[must_use]
    pub fn xdp_counts(&self) -> Vec<(String, &'static str, u64)> {
        self.shared.xdp.get().map_or_else(Vec::new, |plane| plane.counts())
    }

    /// The steering in force.
    #[must_use]
    pub fn steering(&self) -> SteeringInForce {
        self.shared.control().steer.in_force()
    }

    /// Ids of the open lanes.
    #[must_use]
    pub fn lane_ids(&self) -> Vec<LaneId> {
        self.shared.lanes().iter().filter(|lane| lane.is_open()).map(|lane| lane.id).collect()
    }

    /// Adds a lane to a socket that serves; it gets a thread of its own. The calling thread has to be in the network
    /// namespace that the socket was opened in.
    ///
    /// # Errors
    /// [`ErrorKind::State`] if [`Socket::serve`] does not run; whatever is in the way of opening a lane.
    pub fn add_lane(&self) -> Result<LaneId> {
        let idle = || {
            Error::new(
                ErrorKind::State,
                "the socket does not serve: open_lane() gives a lane to drive by hand",
            )
        };
        let server =
            self.shared.server.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or_else(idle)?;
        let lane = self.shared.open_lane()?;
        let id = lane.id();
        server.send(Event::Run(Box::new(lane))).map_err(|_| idle())?;
        Ok(id)
    }

    /// Lets lanes that serve, and those that come, have other buffers: for batches of `batch` messages, 1 to 1024, of up to
    /// `datagram_size` bytes each ([`Lane::resize`], for all lanes). Returns at once; each lane follows with its next receive,
    /// an idle one within 20 ms. Nothing that has arrived is lost. A lane for which there is no memory keeps what it has, and
    /// logs it.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for sizes that cannot be, and with engine `xdp`.
    pub fn resize(&self, batch: usize, datagram_size: usize) -> Result<()> {
        self.shared.wanted.set(Sizes::checked(self.shared.config.engine, batch, datagram_size)?);
        Ok(())
    }

    /// Adds a lane to be driven by hand. The calling thread has to be in the network namespace that the socket was
    /// opened in.
    ///
    /// # Errors
    /// Whatever is in the way of opening a lane.
    pub fn open_lane(&self) -> Result<Lane> {
        self.shared.open_lane()
    }

    /// Removes a lane without losing a datagram: out of steering, drained by its thread, closed. Returns when it
    /// is gone.
    ///
    /// With steering by the kernel's own choice lanes cannot be taken out of steering, and what arrives while
    /// this one closes is lost.
    ///
    /// # Errors
    /// [`ErrorKind::LastLane`] for the only one; [`ErrorKind::State`] if there is no such lane, or if its closure
    /// does not return within 30 s.
    pub fn remove_lane(&self, id: LaneId) -> Result<()> {
        self.shared.remove_lane(id)
    }
}
