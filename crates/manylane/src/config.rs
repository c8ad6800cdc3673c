//! Options: what a user may say, checked once, and then a [`Config`] that cannot be wrong.

mod check;

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::str::FromStr;
use std::time::Duration;

use manylane_sys::rx_coalesce;

use crate::drop_policy::DropPolicy;
use crate::error::{Error, ErrorKind, Result};
use crate::filter::{Filter, Limit, Prefix, Rule};
use crate::placement::Placement;
use crate::steer::{Steering, SteeringBackend};
use crate::vlan::Vlan;
use crate::wait::WaitPolicy;

/// How a lane talks to the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Engine {
    /// [`Engine::Xdp`] on the devices that [`Builder::xdp_devices`] names, if it names any, because
    /// a program on a network card is the user's decision. Without devices, and where XDP does not
    /// work ([`Socket::fallback`](crate::Socket::fallback) says why), [`Engine::Mmsg`].
    #[default]
    Auto,
    /// Kernel sockets with `recvmmsg` and `sendmmsg`. Needs nothing.
    Mmsg,
    /// Kernel sockets with a receive by io_uring that is armed once, into buffers that are
    /// registered once; replies as with [`Engine::Mmsg`]. Needs Linux 6.1 and a system that does
    /// not forbid io_uring; where it is not to be had, [`Engine::Mmsg`] is in use, and
    /// [`Socket::fallback`](crate::Socket::fallback) says why. It was measured to cost less where a
    /// call takes one message, and no less otherwise.
    Uring,
    /// Frames past the kernel's stack (AF_XDP), with a kernel socket beside it for all that XDP
    /// does not take. Needs `CAP_NET_ADMIN`, `CAP_NET_RAW`, `CAP_BPF`, a device with XDP, and Linux
    /// 5.9.
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

/// Largest payload that UDP can carry in one datagram, with room to spare.
pub(crate) const DATAGRAM_SIZE_MAX: usize = 65_535;
/// Most messages that one call takes (`UIO_MAXIOV`).
pub(crate) const BATCH_MAX: usize = 1024;

/// Options of a socket. Setters can be called in any order; [`open`](Self::open) checks them
/// together.
///
/// ```no_run
/// # fn main() -> Result<(), manylane::Error> {
/// use manylane::{Builder, Steering};
/// let socket = Builder::new("[::]:5300")?.lanes(4).steering(Steering::RoundRobin).open()?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Builder {
    /// What [`check`](Self::check) has yet to look at.
    pub(crate) config: Config,
    lanes: Option<usize>,
    gro: Option<bool>,
    limits: Vec<Limit>,
    rules: Vec<(Prefix, Rule)>,
}

impl Builder {
    /// Starts with the address to bind: IPv4, IPv6, or a wildcard; port 0 lets the kernel pick one.
    /// `[::]` takes IPv4 as well unless [`only_v6`](Self::only_v6) is set. Of a name that resolves
    /// to several addresses the first is taken.
    ///
    /// # Errors
    /// [`ErrorKind::Address`] if the address does not parse or resolve.
    pub fn new(addr: impl ToSocketAddrs) -> Result<Self> {
        let addr = addr
            .to_socket_addrs()
            .map_err(|err| Error::with(ErrorKind::Address, "the address does not parse or resolve", err))?
            .next()
            .ok_or_else(|| Error::new(ErrorKind::Address, "the name resolves to no address"))?;
        Ok(Self { config: Config::new(addr), lanes: None, gro: None, limits: Vec::new(), rules: Vec::new() })
    }

    /// Number of lanes, 1 to 256. Default: one for each core that the process may use (its CPU
    /// affinity and its cgroup's CPU quota, as [`std::thread::available_parallelism`] counts).
    pub fn lanes(&mut self, lanes: usize) -> &mut Self {
        self.lanes = Some(lanes);
        self
    }

    /// The engine. Default: [`Engine::Auto`].
    pub fn engine(&mut self, engine: Engine) -> &mut Self {
        self.config.engine = engine;
        self
    }

    /// The rule that picks the lane of a datagram. Default: [`Steering::Flow`].
    pub fn steering(&mut self, steering: Steering) -> &mut Self {
        self.config.steering = steering;
        self
    }

    /// What enforces the steering. Default: the best that the process may use. Anything else is for
    /// tests, and for those who want an error where the best is not to be had.
    pub fn steering_backend(&mut self, by: SteeringBackend) -> &mut Self {
        self.config.steering_backend = by;
        self
    }

    /// Which core each lane's thread runs on in [`Socket::serve`](crate::Socket::serve). Default:
    /// [`Placement::Spread`].
    pub fn placement(&mut self, placement: Placement) -> &mut Self {
        self.config.placement = placement;
        self
    }

    /// Messages that one system call takes or sends, 1 to 1024. Default: 64.
    pub fn batch(&mut self, batch: usize) -> &mut Self {
        self.config.batch = batch;
        self
    }

    /// Largest datagram that is received whole, 1 to 65535 bytes; a larger one is cut off and
    /// flagged. Default:
    /// 65535. With GRO on, buffers are 64 KiB regardless, since a train of datagrams comes as one.
    pub fn datagram_size(&mut self, bytes: usize) -> &mut Self {
        self.config.datagram_size = bytes;
        self
    }

    /// Receive buffer of each lane in the kernel, in bytes of `SO_RCVBUF`. Default: the system's.
    pub fn recv_buffer(&mut self, bytes: usize) -> &mut Self {
        self.config.recv_buffer = Some(bytes);
        self
    }

    /// Send buffer of each lane in the kernel, in bytes of `SO_SNDBUF`. Default: the system's.
    pub fn send_buffer(&mut self, bytes: usize) -> &mut Self {
        self.config.send_buffer = Some(bytes);
        self
    }

    /// Whether the kernel may hand over trains of datagrams at once (UDP GRO, Linux 5.0). Default:
    /// yes where the kernel has it, except with steering by `round-robin` and `key`, which want to
    /// see every datagram.
    pub fn gro(&mut self, on: bool) -> &mut Self {
        self.gro = Some(on);
        self
    }

    /// Whether consecutive replies of one size to one peer may leave as a train (UDP GSO, Linux
    /// 4.18). Default: yes where the kernel has it.
    pub fn gso(&mut self, on: bool) -> &mut Self {
        self.config.gso = on;
        self
    }

    /// Whether [`Datagram::ecn`](crate::Datagram::ecn) is filled in. Default: no, since the kernel
    /// then writes a control message for each datagram, which costs about a tenth of receiving it.
    pub fn ecn(&mut self, on: bool) -> &mut Self {
        self.config.ecn = on;
        self
    }

    /// Whether the kernel stamps each datagram with its time of arrival. Default: no.
    pub fn timestamps(&mut self, on: bool) -> &mut Self {
        self.config.timestamps = on;
        self
    }

    /// Keeps IPv4 off an IPv6 wildcard. Default: no.
    pub fn only_v6(&mut self, on: bool) -> &mut Self {
        self.config.only_v6 = on;
        self
    }

    /// Allows other sockets of the same user on the port (`SO_REUSEPORT`), as for handing a port
    /// over from one process to the next. Steering is then the kernel's, over everybody's sockets.
    /// Default: no.
    pub fn reuse_port(&mut self, on: bool) -> &mut Self {
        self.config.reuse_port = on;
        self
    }

    /// Which datagrams are dropped when a lane falls behind. Default: [`DropPolicy::Tail`].
    pub fn drop_policy(&mut self, policy: DropPolicy) -> &mut Self {
        self.config.drop_policy = policy;
        self
    }

    /// How long a lane of [`Socket::serve`](crate::Socket::serve) pauses after a small batch, while
    /// batches after a pause show that it saves wake-ups. It delays what arrives right behind
    /// another datagram, by the pause at most. Zero for never. Default: where lanes outnumber the
    /// cores that they are placed on, 100 µs for each lane that shares a core, a millisecond at
    /// most; else zero. With engine `xdp`, unless it is to do anything else than
    /// [sleep](Self::wait), at least twenty times what a wake-up is found to cost on this machine,
    /// 50 to 500 µs.
    pub fn rx_coalesce(&mut self, pause: Duration) -> &mut Self {
        self.config.rx_coalesce = Some(pause);
        self
    }

    /// What a lane does while there is nothing to receive: how soon it has what comes, and what
    /// that costs. Default: [`WaitPolicy::Sleep`]. What is in force,
    /// [`Socket::waiting`](crate::Socket::waiting) says.
    pub fn wait(&mut self, policy: WaitPolicy) -> &mut Self {
        self.config.wait = policy;
        self
    }

    /// Engine `uring`: buffers that each lane has to begin with, each for a
    /// [datagram](Self::datagram_size), or for a train with GRO. Whenever they turn out to be too
    /// few ([`LaneCounters::uring_no_buffers`](crate::LaneCounters::uring_no_buffers)) there will
    /// be twice as many, up to the default. Default: 64 more than a [batch](Self::batch) has, and
    /// no number above that counts. The ring has the next power of two of it: 128 with the
    /// defaults. Memory is used as far as it is written to: with GRO, 64 KiB each at most.
    pub fn uring_buffers(&mut self, buffers: usize) -> &mut Self {
        self.config.uring_buffers = Some(buffers);
        self
    }

    /// Engine `xdp`: takes frames with this VLAN tag, too, or with two of them, the outer one first
    /// (`802.1ad`). May be called for each VLAN. Without it, frames with tags go to the kernel.
    /// Where the driver takes tags off received frames, XDP sees none
    /// (`ethtool -K DEVICE rxvlan off` leaves them on). A reply has the tags of its request.
    pub fn xdp_vlan(&mut self, vlan: Vlan) -> &mut Self {
        self.config.xdp.vlans.push(vlan);
        self
    }

    /// Engine `xdp`: the devices to use, by name. Default: the one that has the bound address; for
    /// a wildcard, and for an address that is on no Ethernet device, all Ethernet devices that are
    /// up. Where `rp_filter` is 1 on one of several devices, IPv4 is taken from it only if it is
    /// named here: XDP does not check sources.
    pub fn xdp_devices<I: Into<String>>(&mut self, names: impl IntoIterator<Item = I>) -> &mut Self {
        self.config.xdp.devices = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Engine `xdp`: attach the program behind the driver (generic XDP), which works on any device
    /// and is slower. Default: no, the driver has to support XDP.
    pub fn xdp_generic(&mut self, on: bool) -> &mut Self {
        self.config.xdp.generic = on;
        self
    }

    /// Engine `xdp`: let the kernel copy frames into the memory of the lanes, also where the device
    /// could write them there by itself. Default: no.
    pub fn xdp_copy(&mut self, on: bool) -> &mut Self {
        self.config.xdp.copy = on;
        self
    }

    /// Engine `xdp`: entries of the rings of each queue, a power of two from 64 to 16,384. A queue
    /// holds twice as many frames of 2 KiB. Default: 2048.
    pub fn xdp_ring(&mut self, entries: u32) -> &mut Self {
        self.config.xdp.ring = entries;
        self
    }

    /// Engine `xdp`: how many sockets of this process are to share the queues of a device, 1 to 16.
    /// The first one makes room for all: a queue has so many times two rings of frames, so that
    /// none can take from the others what they need to receive. With fewer they still work, but one
    /// that does not read may keep frames that others lack. Default: 1.
    pub fn xdp_sockets(&mut self, sockets: u32) -> &mut Self {
        self.config.xdp.sockets = sockets;
        self
    }

    /// Engine `xdp`: whether there may be more lanes than queues; those without a queue are fed by
    /// the kernel. Default: yes.
    pub fn xdp_surplus_lanes(&mut self, on: bool) -> &mut Self {
        self.config.xdp.surplus_lanes = on;
        self
    }

    /// Engine `xdp`: whether root and the user of this process may capture what lanes receive and
    /// send (`manylane capture`, [`capture`](crate::capture)). Costs a thread that sleeps. Default:
    /// yes.
    pub fn capture(&mut self, on: bool) -> &mut Self {
        self.config.xdp.capture = on;
        self
    }

    /// Engine `xdp`: one more limit on what each source may send, up to two, such as one for
    /// addresses and one for prefixes. What is above it is dropped by the XDP program, and counted.
    /// [`Handle::filter`](crate::Handle::filter) changes limits and prefixes while the socket is
    /// open.
    pub fn limit(&mut self, limit: Limit) -> &mut Self {
        self.limits.push(limit);
        self
    }

    /// Engine `xdp`: lets datagrams from a prefix in, past all limits, but for longer prefixes that
    /// are denied.
    pub fn allow(&mut self, prefix: Prefix) -> &mut Self {
        self.rules.push((prefix, Rule::Allow));
        self
    }

    /// Engine `xdp`: drops datagrams from a prefix, but for longer prefixes that are allowed.
    pub fn deny(&mut self, prefix: Prefix) -> &mut Self {
        self.rules.push((prefix, Rule::Deny));
        self
    }

    /// Engine `xdp`: sources that each of the limits remembers, 1024 to 16,777,216, about 100 bytes
    /// each. When there are more, the one that was quiet for longest is forgotten, and has its
    /// whole burst when it is back. The first socket of the process on a device decides for all.
    /// Default: 16,384.
    pub fn limit_sources(&mut self, sources: u32) -> &mut Self {
        self.config.xdp.sources = sources;
        self
    }

    /// The pause of [`rx_coalesce`](Self::rx_coalesce) that so many lanes on so many cores have by
    /// default.
    #[must_use]
    pub fn default_rx_coalesce(lanes: usize, cores: usize) -> Duration {
        rx_coalesce::default_delay(lanes, cores)
    }

    /// The same with engine `xdp`. The first call measures what a wake-up costs, in about a
    /// millisecond.
    #[must_use]
    pub fn default_xdp_rx_coalesce(lanes: usize, cores: usize) -> Duration {
        rx_coalesce::default_delay(lanes, cores).max(rx_coalesce::xdp_delay())
    }
}

/// `value`, if it is one that can be.
pub(crate) fn check_range(name: &str, value: usize, most: usize) -> Result<usize> {
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
    pub(crate) filter: Filter,
    /// Sources that limits remember.
    pub(crate) sources: u32,
}

/// Sources that limits remember, unless somebody says otherwise.
pub(crate) const LIMIT_SOURCES_DEFAULT: u32 = 16_384;

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
            filter: Filter::default(),
            sources: LIMIT_SOURCES_DEFAULT,
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
    pub(crate) steering_backend: SteeringBackend,
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
    pub(crate) reuse_port: bool,
    pub(crate) drop_policy: DropPolicy,
    pub(crate) rx_coalesce: Option<Duration>,
    pub(crate) wait: WaitPolicy,
    /// Why `wait` is not what was asked for.
    pub(crate) wait_fallback: Option<String>,
    pub(crate) uring_buffers: Option<usize>,
    /// Why it is not the engine that was hoped for.
    pub(crate) fallback: Option<String>,
    pub(crate) xdp: XdpOptions,
}

impl Config {
    /// The defaults.
    fn new(addr: SocketAddr) -> Self {
        Self {
            addr,
            lanes: 1,
            engine: Engine::Auto,
            steering: Steering::Flow,
            steering_backend: SteeringBackend::Auto,
            placement: Placement::Spread,
            batch: 64,
            datagram_size: DATAGRAM_SIZE_MAX,
            recv_buffer: None,
            send_buffer: None,
            gro: true,
            gso: true,
            ecn: false,
            timestamps: false,
            only_v6: false,
            reuse_port: false,
            drop_policy: DropPolicy::Tail,
            rx_coalesce: None,
            wait: WaitPolicy::Sleep,
            wait_fallback: None,
            uring_buffers: None,
            fallback: None,
            xdp: XdpOptions::default(),
        }
    }
}
