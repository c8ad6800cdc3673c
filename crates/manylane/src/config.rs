//! Options: what a user may say, checked once, and then a [`Config`] that cannot be wrong.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::str::FromStr;
use std::time::Duration;

use manylane_bpf::abi;
use manylane_sys::linger;

use crate::error::{Error, ErrorKind, Result};
use crate::guard::{Guard, Limit, Prefix, Rule};
use crate::io::uring;
use crate::overload::Overload;
use crate::placement::Placement;
use crate::race::{EngineChoice, choose_engine};
use crate::socket::Socket;
use crate::steer::{Steering, SteeringBy};
use crate::vlan::Vlan;
use crate::wait::WaitPolicy;

/// How a lane talks to the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Engine {
    /// [`Engine::Xdp`] on the devices that [`Builder::xdp_devices`] names, if it names any: a program on a network card is
    /// somebody's decision. [`Socket::fallback`] says why where that is not to be had. Then, and without devices,
    /// [`Engine::Uring`] if a datagram was measured to cost a tenth less by it on this machine, for batches of this size, and
    /// else [`Engine::Mmsg`]: [`Socket::choice`] says what was measured. The first socket of a process takes some 20 ms
    /// longer to open for that.
    #[default]
    Auto,
    /// Kernel sockets with `recvmmsg` and `sendmmsg`. Needs nothing.
    Mmsg,
    /// Kernel sockets with a receive by io_uring that is armed once, into buffers that are registered once; replies as with
    /// [`Engine::Mmsg`]. Needs Linux 6.1 and a system that does not forbid io_uring; where it is not to be had,
    /// [`Engine::Mmsg`] is in use, and [`Socket::fallback`] says why. It was measured to cost less where a call
    /// takes one message, and no less otherwise.
    Uring,
    /// Frames past the kernel's stack (AF_XDP), with a kernel socket beside it for all that XDP does not take. Needs
    /// `CAP_NET_ADMIN`, `CAP_NET_RAW`, `CAP_BPF`, a device with XDP, and Linux 5.9.
    Xdp,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Mmsg => "mmsg",
            Self::Uring => "uring",
            Self::Xdp => "xdp",
        })
    }
}

impl FromStr for Engine {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "mmsg" => Ok(Self::Mmsg),
            "uring" => Ok(Self::Uring),
            "xdp" => Ok(Self::Xdp),
            _ => Err(Error::new(
                ErrorKind::Config,
                format!("engine {text:?} is none of auto, mmsg, uring, xdp"),
            )),
        }
    }
}

/// Longest pause between batches: every wait of a lane has a bound.
const MAX_LINGER: Duration = Duration::from_millis(20);
/// Largest payload that UDP can carry in one datagram, with room to spare.
pub(crate) const LARGEST_DATAGRAM: usize = 65_535;
/// Most messages that one call takes (`UIO_MAXIOV`).
pub(crate) const MOST_MESSAGES: usize = 1024;

/// Options of a socket. Setters can be called in any order; [`open`](Self::open) checks them together.
///
/// ```no_run
/// # fn main() -> Result<(), manylane::Error> {
/// use manylane::{Builder, Steering};
/// let socket = Builder::new("[::]:5300")?.lanes(4).steering(Steering::RoundRobin).open()?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Builder {
    addr: SocketAddr,
    lanes: Option<usize>,
    engine: Engine,
    steering: Steering,
    steering_by: SteeringBy,
    placement: Placement,
    batch: usize,
    datagram_size: usize,
    recv_buffer: Option<usize>,
    send_buffer: Option<usize>,
    gro: Option<bool>,
    gso: bool,
    ecn: bool,
    timestamps: bool,
    only_v6: bool,
    join_group: bool,
    stealing: bool,
    overload: Overload,
    linger: Option<Duration>,
    wait: WaitPolicy,
    polls_queues: bool,
    uring_buffers: Option<usize>,
    limits: Vec<Limit>,
    rules: Vec<(Prefix, Rule)>,
    xdp: XdpOptions,
    /// Who says what [`Engine::Auto`] takes.
    chooser: fn(usize) -> EngineChoice,
}

impl Builder {
    /// Starts with the address to bind: IPv4, IPv6, or a wildcard; port 0 lets the kernel pick one. `[::]` takes
    /// IPv4 as well unless [`only_v6`](Self::only_v6) is set. Of a name that resolves to several addresses the
    /// first is taken.
    ///
    /// # Errors
    /// [`ErrorKind::Address`] if the address does not parse or resolve.
    pub fn new(addr: impl ToSocketAddrs) -> Result<Self> {
        let addr = addr
            .to_socket_addrs()
            .map_err(|err| Error::with(ErrorKind::Address, "the address does not parse or resolve", err))?
            .next()
            .ok_or_else(|| Error::new(ErrorKind::Address, "the name resolves to no address"))?;
        Ok(Self {
            addr,
            lanes: None,
            engine: Engine::Auto,
            steering: Steering::Flow,
            steering_by: SteeringBy::Auto,
            placement: Placement::Spread,
            batch: 64,
            datagram_size: LARGEST_DATAGRAM,
            recv_buffer: None,
            send_buffer: None,
            gro: None,
            gso: true,
            ecn: false,
            timestamps: false,
            only_v6: false,
            join_group: false,
            stealing: false,
            overload: Overload::Oldest,
            linger: None,
            wait: WaitPolicy::Sleep,
            polls_queues: false,
            uring_buffers: None,
            limits: Vec::new(),
            rules: Vec::new(),
            xdp: XdpOptions::default(),
            chooser: choose_engine,
        })
    }

    /// Number of lanes, 1 to 256. Default: one for each core that the process may use (its CPU affinity and its
    /// cgroup's CPU quota, as [`std::thread::available_parallelism`] counts).
    pub fn lanes(&mut self, lanes: usize) -> &mut Self {
        self.lanes = Some(lanes);
        self
    }

    /// The engine. Default: [`Engine::Auto`].
    pub fn engine(&mut self, engine: Engine) -> &mut Self {
        self.engine = engine;
        self
    }

    /// The rule that picks the lane of a datagram. Default: [`Steering::Flow`].
    pub fn steering(&mut self, steering: Steering) -> &mut Self {
        self.steering = steering;
        self
    }

    /// What enforces the steering. Default: the best that the process may use. Anything else is for tests, and
    /// for those who want an error where the best is not to be had.
    pub fn steering_by(&mut self, by: SteeringBy) -> &mut Self {
        self.steering_by = by;
        self
    }

    /// Which core each lane's thread runs on in [`Socket::serve`]. Default: [`Placement::Spread`].
    pub fn placement(&mut self, placement: Placement) -> &mut Self {
        self.placement = placement;
        self
    }

    /// Messages that one system call takes or sends, 1 to 1024. Default: 64.
    pub fn batch(&mut self, batch: usize) -> &mut Self {
        self.batch = batch;
        self
    }

    /// Largest datagram that is received whole, 1 to 65535 bytes; a larger one is cut off and flagged. Default:
    /// 65535. With GRO on, buffers are 64 KiB regardless, since a train of datagrams comes as one.
    pub fn datagram_size(&mut self, bytes: usize) -> &mut Self {
        self.datagram_size = bytes;
        self
    }

    /// Receive buffer of each lane in the kernel, in bytes of `SO_RCVBUF`. Default: the system's.
    pub fn recv_buffer(&mut self, bytes: usize) -> &mut Self {
        self.recv_buffer = Some(bytes);
        self
    }

    /// Send buffer of each lane in the kernel, in bytes of `SO_SNDBUF`. Default: the system's.
    pub fn send_buffer(&mut self, bytes: usize) -> &mut Self {
        self.send_buffer = Some(bytes);
        self
    }

    /// Whether the kernel may hand over trains of datagrams at once (UDP GRO, Linux 5.0). Default: yes where the
    /// kernel has it, except with steering by `round-robin` and `key`, which want to see every datagram.
    pub fn gro(&mut self, on: bool) -> &mut Self {
        self.gro = Some(on);
        self
    }

    /// Whether consecutive replies of one size to one peer may leave as a train (UDP GSO, Linux 4.18).
    /// Default: yes where the kernel has it.
    pub fn gso(&mut self, on: bool) -> &mut Self {
        self.gso = on;
        self
    }

    /// Whether [`Datagram::ecn`](crate::Datagram::ecn) is filled in. Default: no, since the kernel then writes a
    /// control message for each datagram, which costs about a tenth of receiving it.
    pub fn ecn(&mut self, on: bool) -> &mut Self {
        self.ecn = on;
        self
    }

    /// Whether the kernel stamps each datagram with its time of arrival. Default: no.
    pub fn timestamps(&mut self, on: bool) -> &mut Self {
        self.timestamps = on;
        self
    }

    /// Keeps IPv4 off an IPv6 wildcard. Default: no.
    pub fn only_v6(&mut self, on: bool) -> &mut Self {
        self.only_v6 = on;
        self
    }

    /// Allows other sockets of the same user on the port (`SO_REUSEPORT`), as for handing a port over from one
    /// process to the next. Steering is then the kernel's, over everybody's sockets. Default: no.
    pub fn join_group(&mut self, on: bool) -> &mut Self {
        self.join_group = on;
        self
    }

    /// Whether an idle lane takes datagrams from a loaded one in [`Socket::serve`]. It ends the order of a flow.
    /// Default: no.
    pub fn stealing(&mut self, on: bool) -> &mut Self {
        self.stealing = on;
        self
    }

    /// Whether the oldest data wins or the newest when more comes than a lane gets done. Default: [`Overload::Oldest`].
    pub fn overload(&mut self, overload: Overload) -> &mut Self {
        self.overload = overload;
        self
    }

    /// How long a lane of [`Socket::serve`] pauses after a small batch, while batches after a pause show that it
    /// saves wake-ups. It delays what arrives right behind another datagram, by the pause at most. Zero for never.
    /// Default: where lanes outnumber the cores that they are placed on, 100 µs for each lane that shares a core, a
    /// millisecond at most; else zero. With engine `xdp`, unless it is to do anything else than [sleep](Self::wait), at least twenty times what a
    /// wake-up is found to cost on this machine, 50 to 500 µs.
    pub fn linger(&mut self, pause: Duration) -> &mut Self {
        self.linger = Some(pause);
        self
    }

    /// What a lane does while there is nothing to receive: how soon it has what comes, and what that costs. Default:
    /// [`WaitPolicy::Sleep`]. What is in force, [`Socket::waiting`] says.
    pub fn wait(&mut self, policy: WaitPolicy) -> &mut Self {
        (self.wait, self.polls_queues) = (policy, false);
        self
    }

    /// [`wait`](Self::wait) with [`WaitPolicy::Spin`]: how long a lane that waits looks for datagrams without pause before it
    /// sleeps, 1 s at most; zero for [`WaitPolicy::Sleep`]. It saves the time of a wake-up and costs that of a core. With
    /// engine `xdp` the queues of the device work in the lane's calls meanwhile instead of in interrupts
    /// (`SO_PREFER_BUSY_POLL`, Linux 5.11), where the driver can and
    /// `/sys/class/net/DEVICE/{napi_defer_hard_irqs,gro_flush_timeout}` are set.
    pub fn busy_poll(&mut self, time: Duration) -> &mut Self {
        (self.wait, self.polls_queues) = (WaitPolicy::Spin(time), true);
        self
    }

    /// Engine `uring`: buffers that each lane has to begin with, each for a [datagram](Self::datagram_size), or for a train
    /// with GRO. Whenever they turn out to be too few ([`LaneCounters::uring_short`](crate::LaneCounters::uring_short)) there
    /// will be twice as many, up to the default. Default: 64 more than a [batch](Self::batch) has. Memory is used as far as
    /// it is written to: with GRO, 64 KiB each at most.
    pub fn uring_buffers(&mut self, buffers: usize) -> &mut Self {
        self.uring_buffers = Some(buffers);
        self
    }

    /// Engine `xdp`: takes frames with this VLAN tag, too, or with two of them, the outer one first (`802.1ad`). May be
    /// called for each VLAN. Without it, frames with tags go to the kernel. Where the driver takes tags off received
    /// frames, XDP sees none (`ethtool -K DEVICE rxvlan off` leaves them on). A reply has the tags of its request.
    pub fn xdp_vlan(&mut self, vlan: Vlan) -> &mut Self {
        self.xdp.vlans.push(vlan);
        self
    }

    /// Engine `xdp`: the devices to use, by name. Default: the one that has the bound address; for a wildcard, and
    /// for an address that is on no Ethernet device, all Ethernet devices that are up.
    pub fn xdp_devices<I: Into<String>>(&mut self, names: impl IntoIterator<Item = I>) -> &mut Self {
        self.xdp.devices = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Engine `xdp`: attach the program behind the driver (generic XDP), which works on any device and is slower.
    /// Default: no, the driver has to support XDP.
    pub fn xdp_generic(&mut self, on: bool) -> &mut Self {
        self.xdp.generic = on;
        self
    }

    /// Engine `xdp`: let the kernel copy frames into the memory of the lanes, also where the device could write them
    /// there by itself. Default: no.
    pub fn xdp_copy(&mut self, on: bool) -> &mut Self {
        self.xdp.copy = on;
        self
    }

    /// Engine `xdp`: entries of the rings of each queue, a power of two from 64 to 16,384. A queue holds twice as
    /// many frames of 2 KiB. Default: 2048.
    pub fn xdp_ring(&mut self, entries: u32) -> &mut Self {
        self.xdp.ring = entries;
        self
    }

    /// Engine `xdp`: how many sockets of this process are to share the queues of a device, 1 to 16. The first one makes
    /// room for all: a queue has so many times two rings of frames, so that none can take from the others what they
    /// need to receive. With fewer they still work, but one that does not read may keep frames that others lack.
    /// Default: 1.
    pub fn xdp_sockets(&mut self, sockets: u32) -> &mut Self {
        self.xdp.sockets = sockets;
        self
    }

    /// Engine `xdp`: whether there may be more lanes than queues; those without a queue are fed by the kernel.
    /// Default: yes.
    pub fn xdp_surplus_lanes(&mut self, on: bool) -> &mut Self {
        self.xdp.surplus_lanes = on;
        self
    }

    /// Engine `xdp`: whether root and the user of this process may capture what lanes receive and send
    /// (`manylane capture`, [`capture`](crate::capture)). Costs a thread that sleeps. Default: yes.
    pub fn capture(&mut self, on: bool) -> &mut Self {
        self.xdp.capture = on;
        self
    }

    /// Engine `xdp`: one more limit on what each source may send, up to two, such as one for addresses and one for
    /// prefixes. What is above it is dropped by the XDP program, and counted. [`Handle::gate`](crate::Handle::gate) changes
    /// limits and prefixes while the socket is open.
    pub fn limit(&mut self, limit: Limit) -> &mut Self {
        self.limits.push(limit);
        self
    }

    /// Engine `xdp`: lets datagrams from a prefix in, past all limits, but for longer prefixes that are denied.
    pub fn allow(&mut self, prefix: Prefix) -> &mut Self {
        self.rules.push((prefix, Rule::Allow));
        self
    }

    /// Engine `xdp`: drops datagrams from a prefix, but for longer prefixes that are allowed.
    pub fn deny(&mut self, prefix: Prefix) -> &mut Self {
        self.rules.push((prefix, Rule::Deny));
        self
    }

    /// Engine `xdp`: sources that each of the limits remembers, 1024 to 16,777,216, about 100 bytes each. When there are
    /// more, the one that was quiet for longest is forgotten, and has its whole burst when it is back. The first socket of
    /// the process on a device decides for all. Default: 16,384.
    pub fn limit_sources(&mut self, sources: u32) -> &mut Self {
        self.xdp.sources = sources;
        self
    }

    /// The pause of [`linger`](Self::linger) that so many lanes on so many cores have by default.
    #[must_use]
    pub fn default_linger(lanes: usize, cores: usize) -> Duration {
        linger::default_pause(lanes, cores)
    }

    /// The same with engine `xdp`. The first call measures what a wake-up costs, in about a millisecond.
    #[must_use]
    pub fn default_xdp_linger(lanes: usize, cores: usize) -> Duration {
        linger::default_pause(lanes, cores).max(linger::pause_for_frames())
    }

    /// Checks the options and opens the socket: every lane is bound and ready when this returns.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for options that cannot be, and whatever is in the way of a lane; the message names
    /// the option, the capability, the limit or the sysctl.
    pub fn open(&self) -> Result<Socket> {
        match self.engine {
            Engine::Auto => self.open_by_choice(),
            Engine::Uring => self.open_uring(),
            Engine::Mmsg | Engine::Xdp => Socket::open(self.check()?),
        }
    }

    fn open_uring(&self) -> Result<Socket> {
        let config = self.check()?;
        let Err(err) = uring::check(&config) else { return Socket::open(config) };
        let why = err.chain();
        let socket = Socket::open(Config { engine: Engine::Mmsg, fallback: Some(why.clone()), ..config })?;
        log::info!("{}: engine mmsg, not uring: {why}", socket.local_addr());
        Ok(socket)
    }

    /// Engine `auto`.
    fn open_by_choice(&self) -> Result<Socket> {
        let mut fallback = None;
        if self.xdp.devices.is_some() {
            let by_xdp = Self { engine: Engine::Xdp, ..self.clone() };
            match by_xdp.check().and_then(Socket::open) {
                Ok(socket) => return Ok(socket),
                // No other one can hold anything back.
                Err(err) if self.is_guarded() => return Err(err),
                Err(err) => fallback = Some(err.chain()),
            }
        }
        // What cannot be is told before anything is measured. What is wrong with the port is so with every engine, and is
        // then the error.
        let config = Config { fallback, ..self.check()? };
        let choice = (self.chooser)(config.batch);
        let config = Config { choice: Some(choice.clone()), ..config };
        let by_uring = (choice.engine == Engine::Uring && uring::check(&config).is_ok())
            .then(|| Socket::open(Config { engine: Engine::Uring, ..config.clone() }));
        let socket = match by_uring {
            Some(Ok(socket)) => socket,
            _ => Socket::open(config)?,
        };
        // No warning: `fallback` and `choice` tell it to whoever opened the socket.
        let (addr, engine) = (socket.local_addr(), socket.engine());
        if let Some(why) = socket.fallback() {
            log::info!("{addr}: engine {engine}, not xdp: {why}");
        }
        log::info!("{addr}: engine {engine}: {}", choice.why);
        Ok(socket)
    }

    /// Who decides instead of a race, for tests.
    #[cfg(test)]
    pub(crate) fn choose_by(&mut self, chooser: fn(usize) -> EngineChoice) -> &mut Self {
        self.chooser = chooser;
        self
    }

    fn is_guarded(&self) -> bool {
        !self.limits.is_empty() || !self.rules.is_empty()
    }

    /// What the engine `xdp` cannot do.
    fn check_xdp(&self) -> Result<()> {
        let refuse = |message: String| Err(Error::new(ErrorKind::Config, message));
        if !matches!(self.steering, Steering::Flow | Steering::Cpu) {
            return refuse(format!(
                "steering {} does not go with engine xdp: the device picks the queue, and with it the lane (flow, cpu)",
                self.steering
            ));
        }
        if self.timestamps {
            return refuse("timestamps do not go with engine xdp: its frames carry none".into());
        }
        if self.join_group {
            return refuse("join_group does not go with engine xdp: frames go to this process alone".into());
        }
        if !self.xdp.ring.is_power_of_two() || !(64..=16_384).contains(&self.xdp.ring) {
            return refuse(format!("xdp_ring {} is no power of two from 64 to 16384", self.xdp.ring));
        }
        if !(1..=abi::MAX_SOCKETS).contains(&self.xdp.sockets) {
            let (most, sockets) = (abi::MAX_SOCKETS, self.xdp.sockets);
            return refuse(format!("xdp_sockets {sockets} is not within 1 to {most}"));
        }
        if !(1024..=1 << 24).contains(&self.xdp.sources) {
            let sources = self.xdp.sources;
            return refuse(format!("limit_sources {sources} is not within 1024 to {}", 1 << 24));
        }
        Ok(())
    }

    /// The checked form of the options.
    pub(crate) fn check(&self) -> Result<Config> {
        let range = in_range;
        let lanes = match self.lanes {
            Some(lanes) => lanes,
            None => std::thread::available_parallelism().map_or(1, usize::from).min(abi::MAX_LANES),
        };
        self.steering.check()?;
        if self.linger.is_some_and(|pause| pause > MAX_LINGER) {
            return Err(Error::new(ErrorKind::Config, format!("linger is more than {MAX_LINGER:?}")));
        }
        if self.only_v6 && self.addr.is_ipv4() {
            return Err(Error::new(
                ErrorKind::Config,
                format!("only_v6 does not go with the IPv4 address {}", self.addr),
            ));
        }
        if self.join_group && !matches!(self.steering_by, SteeringBy::Auto | SteeringBy::Kernel) {
            let message = format!(
                "steering_by {} does not go with join_group: the group is not ours alone",
                self.steering_by
            );
            return Err(Error::new(ErrorKind::Config, message));
        }
        if self.join_group && self.addr.port() == 0 {
            return Err(Error::new(ErrorKind::Config, "join_group needs a port to join, not 0"));
        }
        if self.engine == Engine::Xdp {
            self.check_xdp()?;
        }
        if self.is_guarded() && self.engine != Engine::Xdp {
            let message = "limit, allow and deny need the engine xdp, which drops frames before anything is spent on them";
            return Err(Error::new(ErrorKind::Config, message));
        }
        let mut xdp = self.xdp.clone();
        xdp.guard.set_limits(&self.limits)?;
        for (prefix, rule) in &self.rules {
            xdp.guard.set_rule(*prefix, Some(*rule))?;
        }
        for (name, bytes) in [("recv_buffer", self.recv_buffer), ("send_buffer", self.send_buffer)] {
            bytes.map_or(Ok(0), |bytes| range(name, bytes, i32::MAX as usize / 2))?;
        }
        Ok(Config {
            addr: self.addr,
            lanes: range("lanes", lanes, abi::MAX_LANES)?,
            engine: if self.engine == Engine::Auto { Engine::Mmsg } else { self.engine },
            steering: self.steering,
            steering_by: if self.join_group { SteeringBy::Kernel } else { self.steering_by },
            placement: self.placement.clone(),
            batch: range("batch", self.batch, MOST_MESSAGES)?,
            datagram_size: range("datagram_size", self.datagram_size, LARGEST_DATAGRAM)?,
            recv_buffer: self.recv_buffer,
            send_buffer: self.send_buffer,
            gro: self.gro.unwrap_or(!matches!(self.steering, Steering::RoundRobin | Steering::Key { .. })),
            gso: self.gso,
            ecn: self.ecn,
            timestamps: self.timestamps,
            only_v6: self.only_v6,
            join_group: self.join_group,
            stealing: self.stealing,
            overload: self.overload,
            linger: self.linger,
            wait: self.wait.check()?,
            polls_queues: self.polls_queues,
            waits_otherwise: None,
            uring_buffers: self
                .uring_buffers
                .map(|count| range("uring_buffers", count, 1 << 15))
                .transpose()?,
            fallback: None,
            choice: None,
            xdp,
        })
    }
}

/// `value`, if it is one that can be.
pub(crate) fn in_range(name: &str, value: usize, most: usize) -> Result<usize> {
    if (1..=most).contains(&value) {
        Ok(value)
    } else {
        Err(Error::new(ErrorKind::Config, format!("{name} {value} is not within 1 to {most}")))
    }
}

/// Options of the engine `xdp`.
#[derive(Clone, Debug)]
pub(crate) struct XdpOptions {
    pub(crate) devices: Option<Vec<String>>,
    pub(crate) generic: bool,
    pub(crate) copy: bool,
    pub(crate) ring: u32,
    pub(crate) surplus_lanes: bool,
    pub(crate) capture: bool,
    pub(crate) vlans: Vec<Vlan>,
    pub(crate) sockets: u32,
    /// What is let in at first.
    pub(crate) guard: Guard,
    /// Sources that limits remember.
    pub(crate) sources: u32,
}

/// Sources that limits remember, unless somebody says otherwise.
pub(crate) const SOURCES: u32 = 16_384;

impl Default for XdpOptions {
    fn default() -> Self {
        Self {
            devices: None,
            generic: false,
            copy: false,
            ring: 2048,
            surplus_lanes: true,
            capture: true,
            vlans: Vec::new(),
            sockets: 1,
            guard: Guard::default(),
            sources: SOURCES,
        }
    }
}

/// Options that have been checked.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) addr: SocketAddr,
    pub(crate) lanes: usize,
    pub(crate) engine: Engine,
    pub(crate) steering: Steering,
    pub(crate) steering_by: SteeringBy,
    pub(crate) placement: Placement,
    pub(crate) batch: usize,
    pub(crate) datagram_size: usize,
    pub(crate) recv_buffer: Option<usize>,
    pub(crate) send_buffer: Option<usize>,
    pub(crate) gro: bool,
    pub(crate) gso: bool,
    pub(crate) ecn: bool,
    pub(crate) timestamps: bool,
    pub(crate) only_v6: bool,
    pub(crate) join_group: bool,
    pub(crate) stealing: bool,
    pub(crate) overload: Overload,
    pub(crate) linger: Option<Duration>,
    pub(crate) wait: WaitPolicy,
    /// The queues of devices work in the calls of a lane that spins.
    pub(crate) polls_queues: bool,
    /// Why `wait` is not what was asked for.
    pub(crate) waits_otherwise: Option<String>,
    pub(crate) uring_buffers: Option<usize>,
    /// Why it is not the engine that was hoped for.
    pub(crate) fallback: Option<String>,
    /// What `auto` went by.
    pub(crate) choice: Option<EngineChoice>,
    pub(crate) xdp: XdpOptions,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::race::{Lap, decide};

    fn builder() -> Builder {
        Builder::new("127.0.0.1:0").unwrap()
    }

    #[test]
    fn the_default_is_a_lane_per_available_core() {
        let cores = std::thread::available_parallelism().unwrap().get();
        assert_eq!(builder().check().unwrap().lanes, cores);
    }

    #[test]
    fn what_cannot_be_is_refused_by_name() {
        let refused = |change: &dyn Fn(&mut Builder)| {
            let mut builder = builder();
            change(&mut builder);
            let err = builder.check().unwrap_err();
            assert_eq!(err.kind(), ErrorKind::Config);
            err.to_string()
        };
        assert_eq!(refused(&|b| _ = b.lanes(0)), "lanes 0 is not within 1 to 256");
        assert_eq!(refused(&|b| _ = b.lanes(257)), "lanes 257 is not within 1 to 256");
        assert_eq!(refused(&|b| _ = b.batch(1025)), "batch 1025 is not within 1 to 1024");
        assert_eq!(refused(&|b| _ = b.datagram_size(0)), "datagram_size 0 is not within 1 to 65535");
        assert_eq!(refused(&|b| _ = b.recv_buffer(0)), "recv_buffer 0 is not within 1 to 1073741823");
        assert_eq!(refused(&|b| _ = b.linger(Duration::from_secs(1))), "linger is more than 20ms");
        assert!(refused(&|b| _ = b.only_v6(true)).contains("only_v6"));
        assert!(refused(&|b| _ = b.join_group(true)).contains("join_group"));
        assert!(refused(&|b| _ = b.limit("5".parse().unwrap())).contains("need the engine xdp"));
        assert!(refused(&|b| _ = b.deny("10.0.0.0/8".parse().unwrap())).contains("need the engine xdp"));
        assert!(refused(&|b| _ = b.engine(Engine::Xdp).limit_sources(5)).contains("limit_sources 5"));
        assert!(refused(&|b| _ = b.steering(Steering::Key { offset: 0, len: 65 })).contains("key"));
    }

    #[test]
    fn gro_gives_way_to_policies_that_want_every_datagram() {
        let gro = |steering| builder().steering(steering).check().unwrap().gro;
        assert!(gro(Steering::Flow));
        assert!(!gro(Steering::RoundRobin));
        assert!(!gro(Steering::Key { offset: 0, len: 8 }));
        assert!(builder().steering(Steering::RoundRobin).gro(true).check().unwrap().gro);
    }

    #[test]
    fn auto_takes_what_was_measured_to_cost_less() {
        fn measured(batch: usize, mmsg: u64, uring: u64) -> EngineChoice {
            decide(batch, &[Lap { mmsg, uring }; 8])
        }
        let opened = |chooser| {
            let socket = builder().lanes(2).batch(7).choose_by(chooser).open().unwrap();
            let choice = socket.choice().expect("auto says why").clone();
            assert_eq!((choice.batch, socket.fallback()), (7, None));
            (socket.engine(), choice)
        };
        let (engine, choice) = opened(|batch| measured(batch, 1000, 950));
        assert_eq!((engine, choice.cost_ns), (Engine::Mmsg, Some((1000, 950))));
        let (engine, choice) = opened(|batch| measured(batch, 1000, 600));
        assert_eq!((choice.engine, choice.cost_ns), (Engine::Uring, Some((1000, 600))));
        // Where this machine has none, the choice changes nothing.
        let has_uring = uring::try_it().is_ok();
        assert_eq!(engine, if has_uring { Engine::Uring } else { Engine::Mmsg });
    }

    #[test]
    fn what_was_asked_for_is_not_measured() {
        fn unasked(_: usize) -> EngineChoice {
            panic!("nobody asked for a race")
        }
        let socket = builder().engine(Engine::Mmsg).choose_by(unasked).open().unwrap();
        assert_eq!((socket.engine(), socket.choice()), (Engine::Mmsg, None));
        // Nor is anything measured for options that cannot be.
        assert!(builder().lanes(0).choose_by(unasked).open().is_err());
    }

    #[test]
    fn an_address_that_does_not_parse_is_an_address_error() {
        assert_eq!(Builder::new("nonsense").unwrap_err().kind(), ErrorKind::Address);
    }
}
