//! Options: what a user can set, checked once into a [`Config`] that is always valid.

mod check;

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use crate::drop_policy::DropPolicy;
use crate::error::{Error, ErrorKind, Result};
use crate::filter::{Filter, Limit, Prefix, Rule};
use crate::placement::Placement;
use crate::steer::{Steering, SteeringBackend};
use crate::text_form::text_form;
use crate::vlan::Vlan;
use crate::wait::WaitPolicy;

/// The interface between a lane and the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Engine {
    /// [`Engine::Xdp`] if [`Builder::xdp_devices`] names devices: the user decides whether a
    /// program is attached to a network card. [`Engine::Mmsg`] without named devices, and where
    /// XDP does not work ([`Socket::fallback`](crate::Socket::fallback) says why).
    #[default]
    Auto,
    /// Kernel sockets with `recvmmsg` and `sendmmsg`. Has no requirements.
    Mmsg,
    /// Kernel sockets with a multishot receive by io_uring, armed once, into registered buffers.
    /// Replies leave as with [`Engine::Mmsg`]. Needs Linux 6.1 and permission to use io_uring.
    /// Without them the socket uses [`Engine::Mmsg`], and
    /// [`Socket::fallback`](crate::Socket::fallback) says why. Saves CPU time only where a call
    /// takes one message.
    Uring,
    /// AF_XDP: frames bypass the kernel's stack. A companion kernel socket receives what XDP does
    /// not take. Needs `CAP_NET_ADMIN`, `CAP_NET_RAW`, `CAP_BPF`, a device with XDP, and Linux
    /// 5.9.
    Xdp,
}

text_form!("engine", Engine: Auto = "auto", Mmsg = "mmsg", Uring = "uring", Xdp = "xdp");

/// Largest payload of one UDP datagram in bytes, rounded up.
pub(crate) const DATAGRAM_SIZE_MAX: usize = 65_535;
/// Maximum number of messages per call (`UIO_MAXIOV`).
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
    /// Not checked yet: see [`check`](Self::check).
    pub(crate) config: Config,
    lanes: Option<usize>,
    gro: Option<bool>,
    limits: Vec<Limit>,
    rules: Vec<(Prefix, Rule)>,
}

impl Builder {
    /// Starts with the address to bind: IPv4, IPv6, or a wildcard; port 0 lets the kernel pick
    /// one. `[::]` accepts IPv4 as well unless [`only_v6`](Self::only_v6) is set. If a name
    /// resolves to several addresses, the first is used.
    ///
    /// # Errors
    /// [`ErrorKind::Address`] if the address does not parse or resolve.
    pub fn new(addr: impl ToSocketAddrs) -> Result<Self> {
        Self::resolve(addr).map(Self::at)
    }

    /// Starts with an address.
    pub(crate) fn at(addr: SocketAddr) -> Self {
        Self { config: Config::new(addr), lanes: None, gro: None, limits: Vec::new(), rules: Vec::new() }
    }

    /// The first address that a text stands for.
    pub(crate) fn resolve(addr: impl ToSocketAddrs) -> Result<SocketAddr> {
        addr.to_socket_addrs()
            .map_err(|err| {
                Error::with(
                    ErrorKind::Address,
                    "cannot parse or resolve the address: expected IP:PORT or NAME:PORT",
                    err,
                )
            })?
            .next()
            .ok_or_else(|| Error::new(ErrorKind::Address, "the name resolves to no address"))
    }

    /// Number of lanes, 1 to 256. Default: one for each CPU that the process may use (its CPU
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

    /// The mechanism that enforces the steering. Default: the best one that the process may use.
    /// Any other value is for tests, and for programs that prefer an error to a fallback.
    pub fn steering_backend(&mut self, by: SteeringBackend) -> &mut Self {
        self.config.steering_backend = by;
        self
    }

    /// CPU of each lane's thread in [`Socket::serve`](crate::Socket::serve). Default:
    /// [`Placement::Spread`].
    pub fn placement(&mut self, placement: Placement) -> &mut Self {
        self.config.placement = placement;
        self
    }

    /// Messages that one system call receives or sends, 1 to 1024; at most 128 with
    /// [`Engine::Uring`]. Default: 64.
    pub fn batch(&mut self, batch: usize) -> &mut Self {
        self.config.batch = batch;
        self
    }

    /// Size of the largest datagram that is received whole, 1 to 65535 bytes. A larger one is
    /// truncated and flagged. Default: 65535. With GRO, buffers are 64 KiB regardless, because one
    /// GRO message holds several datagrams.
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

    /// Lets the kernel deliver several datagrams of one flow as one message (UDP GRO, Linux 5.0).
    ///
    /// Default: each lane turns it on when senders send trains of datagrams, because it costs where
    /// they do not. With steering by `round-robin` and `key`, which have to see every datagram, it
    /// is off.
    pub fn gro(&mut self, on: bool) -> &mut Self {
        self.gro = Some(on);
        self
    }

    /// Allows lanes to send consecutive replies of one size to one peer as one message (UDP GSO,
    /// Linux 4.18). Default: on where the kernel supports it.
    pub fn gso(&mut self, on: bool) -> &mut Self {
        self.config.gso = on;
        self
    }

    /// Fills in [`Datagram::ecn`](crate::Datagram::ecn). Default: off, because the
    /// kernel then writes a control message for each datagram, which adds about a tenth to the
    /// cost of a receive.
    pub fn ecn(&mut self, on: bool) -> &mut Self {
        self.config.ecn = on;
        self
    }

    /// Requests the kernel's receive timestamp of each datagram. Default: off.
    pub fn timestamps(&mut self, on: bool) -> &mut Self {
        self.config.timestamps = on;
        self
    }

    /// Excludes IPv4 from an IPv6 wildcard (`IPV6_V6ONLY`). Default: off.
    pub fn only_v6(&mut self, on: bool) -> &mut Self {
        self.config.only_v6 = on;
        self
    }

    /// Allows other sockets of the same user on the port (`SO_REUSEPORT`), for example to hand a
    /// port over to another process. Steering is then the kernel's choice among all sockets of the
    /// port. Default: off.
    pub fn reuse_port(&mut self, on: bool) -> &mut Self {
        self.config.reuse_port = on;
        self
    }

    /// Datagrams to drop when a lane falls behind. Default: [`DropPolicy::Tail`].
    pub fn drop_policy(&mut self, policy: DropPolicy) -> &mut Self {
        self.config.drop_policy = policy;
        self
    }

    /// Delay after a small batch in [`Socket::serve`](crate::Socket::serve). Applies only while
    /// the batches after a delay show that it saves wake-ups. A datagram right behind another one
    /// may be delayed by this time. Zero turns it off.
    ///
    /// Default where lanes share CPUs, and for engine `xdp` with
    /// [`WaitPolicy::Sleep`](Self::wait): it follows the load of the CPUs that the lane may run
    /// on, by `/proc/stat`. Zero while they are less than half busy; above three quarters it
    /// doubles every 100 ms, up to 500 µs. Otherwise zero.
    pub fn rx_coalesce(&mut self, delay: Duration) -> &mut Self {
        self.config.rx_coalesce = Some(delay);
        self
    }

    /// Sets the wait policy of lanes with empty queues, which trades latency against CPU time.
    /// Default: [`WaitPolicy::Sleep`]. [`Socket::waiting`](crate::Socket::waiting) returns the
    /// policy in force.
    pub fn wait(&mut self, policy: WaitPolicy) -> &mut Self {
        self.config.wait = policy;
        self
    }

    /// Engine `xdp`: also takes frames with this VLAN tag, or with these two tags, outer first
    /// (`802.1ad`). Can be called once for each VLAN. Without it, tagged frames go to the kernel.
    /// XDP sees no tags if the driver strips them from received frames
    /// (`ethtool -K DEVICE rxvlan off` prevents that). A reply has the tags of its request.
    pub fn xdp_vlan(&mut self, vlan: Vlan) -> &mut Self {
        self.config.xdp.vlans.push(vlan);
        self
    }

    /// Engine `xdp`: the devices to use, by name. Default: the device that has the bound address.
    /// For a wildcard, and for an address that is on no Ethernet device: all Ethernet devices that
    /// are up. If several devices are up, XDP takes IPv4 from one with `rp_filter` 1 only if it is
    /// named here, because XDP does not check source addresses.
    pub fn xdp_devices<I: Into<String>>(&mut self, names: impl IntoIterator<Item = I>) -> &mut Self {
        self.config.xdp.devices = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Engine `xdp`: attaches the program in generic mode, behind the driver. Works on any device,
    /// and is slower. Default: off; the driver has to support XDP.
    pub fn xdp_generic(&mut self, on: bool) -> &mut Self {
        self.config.xdp.generic = on;
        self
    }

    /// Engine `xdp`: entries of each ring of a queue, a power of two from 64 to 16,384. A queue
    /// has twice as many frames of 2 KiB. Default: 2048.
    pub fn xdp_ring(&mut self, entries: u32) -> &mut Self {
        self.config.xdp.ring = entries;
        self
    }

    /// Engine `xdp`: number of sockets of this process that will share the queues of a device, 1
    /// to 16. The first socket allocates for all: a queue gets two rings of frames for each
    /// socket, so that no socket can take the frames that another needs to receive. More sockets
    /// than this number work too, but one that does not read may keep frames that others lack.
    /// Default: 1.
    pub fn xdp_sockets(&mut self, sockets: u32) -> &mut Self {
        self.config.xdp.sockets = sockets;
        self
    }

    /// Engine `xdp`: whether there may be more lanes than queues. The kernel feeds the lanes
    /// without a queue. Default: on.
    pub fn xdp_surplus_lanes(&mut self, on: bool) -> &mut Self {
        self.config.xdp.surplus_lanes = on;
        self
    }

    /// Engine `xdp`: whether root and the user of this process may capture what lanes receive and
    /// send (`manylane capture`, [`capture`](crate::capture)). Costs a thread that sleeps.
    /// Default: on.
    pub fn capture(&mut self, on: bool) -> &mut Self {
        self.config.xdp.capture = on;
        self
    }

    /// Engine `xdp`: adds a limit on what each source may send. At most two, for example one for
    /// addresses and one for prefixes. The XDP program drops and counts datagrams above the limit.
    /// [`Handle::filter`](crate::Handle::filter) changes limits and prefixes while the socket is
    /// open.
    pub fn limit(&mut self, limit: Limit) -> &mut Self {
        self.limits.push(limit);
        self
    }

    /// Engine `xdp`: accepts datagrams from a prefix, exempt from all limits, except from longer
    /// prefixes that are denied.
    pub fn allow(&mut self, prefix: Prefix) -> &mut Self {
        self.rules.push((prefix, Rule::Allow));
        self
    }

    /// Engine `xdp`: drops datagrams from a prefix, except from longer prefixes that are allowed.
    pub fn deny(&mut self, prefix: Prefix) -> &mut Self {
        self.rules.push((prefix, Rule::Deny));
        self
    }

    /// Engine `xdp`: number of sources that each limit keeps state for, 1024 to 16,777,216, about
    /// 100 bytes each; at least 256 for each CPU. If there are more, the source that was idle
    /// longest is evicted, and has its whole burst when it returns. The first socket of the process
    /// on a device sets the number for all. Default: 16,384.
    pub fn limit_sources(&mut self, sources: u32) -> &mut Self {
        self.config.xdp.sources = sources;
        self
    }
}

/// `value`, if it is in range.
pub(crate) fn check_range(name: &str, value: usize, max: usize) -> Result<usize> {
    if (1..=max).contains(&value) {
        Ok(value)
    } else {
        Err(Error::new(ErrorKind::Config, format!("invalid {name} {value}: expected 1 to {max}")))
    }
}

/// The error of `limit`, `allow` and `deny` with an engine that has no filter.
pub(crate) const FILTER_REFUSED: &str = "limit, allow and deny need engine xdp";

/// Options of the engine `xdp`.
#[derive(Clone, Debug)]
pub(crate) struct XdpOptions {
    pub(crate) devices: Option<Vec<String>>,
    pub(crate) generic: bool,
    pub(crate) ring: u32,
    pub(crate) surplus_lanes: bool,
    pub(crate) capture: bool,
    pub(crate) vlans: Vec<Vlan>,
    pub(crate) sockets: u32,
    /// The initial filter.
    pub(crate) filter: Filter,
    /// Sources that each limit keeps state for.
    pub(crate) sources: u32,
}

/// Default of [`XdpOptions::sources`].
pub(crate) const LIMIT_SOURCES_DEFAULT: u32 = 16_384;

impl Default for XdpOptions {
    fn default() -> Self {
        Self {
            devices: None,
            generic: false,
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
    pub(crate) gro: Gro,
    pub(crate) gso: bool,
    pub(crate) ecn: bool,
    pub(crate) timestamps: bool,
    pub(crate) only_v6: bool,
    pub(crate) reuse_port: bool,
    pub(crate) drop_policy: DropPolicy,
    pub(crate) rx_coalesce: Option<Duration>,
    pub(crate) wait: WaitPolicy,
    /// The reason why `wait` is not the requested policy.
    pub(crate) wait_fallback: Option<String>,
    /// The reason why `engine` is not the requested one.
    pub(crate) fallback: Option<String>,
    pub(crate) xdp: XdpOptions,
}

/// When the kernel socket of a lane has UDP GRO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gro {
    Off,
    On,
    /// Once trains of datagrams arrive.
    ByTraffic,
}

impl Config {
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
            gro: Gro::ByTraffic,
            gso: true,
            ecn: false,
            timestamps: false,
            only_v6: false,
            reuse_port: false,
            drop_policy: DropPolicy::Tail,
            rx_coalesce: None,
            wait: WaitPolicy::Sleep,
            wait_fallback: None,
            fallback: None,
            xdp: XdpOptions::default(),
        }
    }
}
