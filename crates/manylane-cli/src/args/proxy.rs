//! Options of `proxy`.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use manylane::Engine;
use manylane::tcp::congestion::Algorithm;
use manylane_proxy::udp::PayloadKey;
use manylane_proxy::{Balance, ProxyHeader};

use super::FilterArgs;
use super::values::{interval_or_zero, rx_usecs, within};
use crate::{metrics, parse};

/// The stack of a proxy's lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProxyStack {
    /// xdp if --interface names devices, and the kernel's if that does not work; else the kernel's.
    Auto,
    /// TCP in user space, on the queues of the devices.
    Xdp,
    /// The kernel's.
    Kernel,
}

/// Options of `manylane proxy`.
#[derive(Debug, Args)]
pub(crate) struct ProxyArgs {
    /// Forward datagrams in place of connections
    ///
    /// The datagrams of a client and the answers to them are a session, which ends after
    /// --idle-timeout. What is said of connections below then holds for sessions.
    #[arg(long)]
    pub(crate) udp: bool,
    /// Address to accept connections at, such as 192.0.2.1:443; can be repeated
    #[arg(long, value_name = "ADDR", required_unless_present = "config")]
    pub(crate) listen: Vec<SocketAddr>,
    /// Servers, such as 10.0.0.1:80,10.0.0.2:80
    #[arg(long, value_name = "LIST", required_unless_present = "config", value_delimiter = ',')]
    pub(crate) to: Vec<SocketAddr>,
    /// Read these options from a TOML file instead, and again at SIGHUP
    ///
    /// Its keys are the names of the options, such as idle-timeout = "5m". At SIGHUP, servers,
    /// --balance, --proxy-protocol, limits on connections and time-outs change, and no connection
    /// is closed.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["udp", "key", "answers", "engine", "listen", "to", "balance", "proxy_protocol", "check_interval", "stack", "lanes", "interface", "source_ports", "xdp_generic", "rx_usecs", "limit", "allow", "deny", "max_connections", "max_per_source", "max_memory", "client_congestion", "server_congestion", "connect_timeout", "idle_timeout", "half_closed_timeout", "drain_timeout"])]
    pub(crate) config: Option<PathBuf>,
    /// Which server gets a connection: round-robin, least-connections or hash
    ///
    /// hash: by the client's address and port, or by the bytes of --key, with Maglev's table, so
    /// that proxies with the same servers choose alike.
    #[arg(long, value_name = "HOW", default_value_t)]
    pub(crate) balance: Balance,
    /// Tell servers the client's address by the PROXY protocol: v1 or v2
    #[arg(long, value_name = "VERSION", conflicts_with = "udp")]
    pub(crate) proxy_protocol: Option<ProxyHeader>,
    /// Time between checks of the servers; 0: none
    ///
    /// A check connects and closes, by the kernel's stack. A server is down after two failures.
    /// With --udp nothing is sent: a server that refuses two datagrams in a row is down until the
    /// next check.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = interval_or_zero)]
    pub(crate) check_interval: Duration,
    /// Stack of the lanes
    #[arg(long, help_heading = "Lanes", value_enum, default_value_t = ProxyStack::Auto, conflicts_with = "udp")]
    pub(crate) stack: ProxyStack,
    /// Engine of the lanes with --udp: auto, mmsg, uring or xdp [default: auto]
    ///
    /// As for `manylane echo`. auto: xdp on the devices of --interface if that works, else mmsg.
    #[arg(long, help_heading = "Lanes", requires = "udp")]
    pub(crate) engine: Option<Engine>,
    /// Number of lanes [default: one for each CPU; with stack xdp at most one for each queue]
    #[arg(long, help_heading = "Lanes", value_name = "N", value_parser = within(1..=256))]
    pub(crate) lanes: Option<usize>,
    /// Network devices of stack xdp, such as eth0,eth1: those of clients and of servers
    ///
    /// With --udp: devices of engine xdp. Only those of clients are needed.
    #[arg(long, help_heading = "Stack xdp", value_name = "LIST", value_delimiter = ',')]
    pub(crate) interface: Vec<String>,
    /// Ports that connections to servers come from, in blocks of 256
    ///
    /// The kernel hands none of them out to programs meanwhile.
    #[arg(long, help_heading = "Stack xdp", value_name = "FIRST-LAST", default_value = "49152-65535", value_parser = port_range, conflicts_with = "udp")]
    pub(crate) source_ports: RangeInclusive<u16>,
    /// Attach the XDP program in generic mode: any device, but slower
    #[arg(long, help_heading = "Stack xdp")]
    pub(crate) xdp_generic: bool,
    /// Delay before a lane sleeps, for larger batches; 0: none [default: by the load]
    ///
    /// By the load: none while the lanes' CPUs are less than half busy, and up to 100. A lane that
    /// finds packets does not delay.
    #[arg(long, help_heading = "Stack xdp", value_name = "USECS", value_parser = rx_usecs(), conflicts_with = "udp")]
    pub(crate) rx_usecs: Option<u64>,
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    /// Connections of clients at most
    #[arg(long, help_heading = "Limits", value_name = "N", default_value_t = 100_000)]
    pub(crate) max_connections: u64,
    /// Connections of one source address at most [default: not limited]
    #[arg(long, help_heading = "Limits", value_name = "N")]
    pub(crate) max_per_source: Option<u32>,
    /// Memory of buffered payload, all lanes together [default: a quarter of the machine's]
    ///
    /// Such as 512M. Each lane has an equal share. With stack xdp: the buffers of connections with
    /// bytes on the way, 128 KiB each. With the kernel's: what its sockets do not take; their own
    /// buffers are not among it. The default is a quarter of the limit of the process's cgroup if
    /// that is lower.
    #[arg(long, help_heading = "Limits", value_name = "BYTES", value_parser = parse::bytes, conflicts_with = "udp")]
    pub(crate) max_memory: Option<usize>,
    /// Congestion control of the connections to clients: new-reno, cubic or bbr
    ///
    /// Default: cubic with stack xdp; with the kernel's, what net.ipv4.tcp_congestion_control says.
    #[arg(long, help_heading = "Congestion control", value_name = "NAME", conflicts_with = "udp")]
    pub(crate) client_congestion: Option<Algorithm>,
    /// The same for the connections to servers
    #[arg(long, help_heading = "Congestion control", value_name = "NAME", conflicts_with = "udp")]
    pub(crate) server_congestion: Option<Algorithm>,
    /// Longest time to connect to a server
    #[arg(long, help_heading = "Limits", value_name = "TIME", default_value = "5s", value_parser = parse::duration, conflicts_with = "udp")]
    pub(crate) connect_timeout: Duration,
    /// Longest time without bytes [default: 5m; with --udp 60s]
    #[arg(long, help_heading = "Limits", value_name = "TIME", value_parser = parse::duration)]
    pub(crate) idle_timeout: Option<Duration>,
    /// Longest time without bytes once one side has ended
    #[arg(long, help_heading = "Limits", value_name = "TIME", default_value = "30s", value_parser = parse::duration, conflicts_with = "udp")]
    pub(crate) half_closed_timeout: Duration,
    /// Longest time that connections have to end at Ctrl-C or SIGTERM
    #[arg(long, help_heading = "Limits", value_name = "TIME", default_value = "30s", value_parser = parse::duration)]
    pub(crate) drain_timeout: Duration,
    /// Sessions by a key in the payload, such as 1:8
    ///
    /// LENGTH bytes (at most 64) from OFFSET on. Datagrams with the same key are one session, and
    /// go to one server, whatever address they come from. Answers go to the address that the last
    /// one came from. Without it, addresses and ports tell sessions apart.
    #[arg(long, help_heading = "UDP", value_name = "OFFSET:LENGTH", requires = "udp")]
    pub(crate) key: Option<PayloadKey>,
    /// Number of answers to each datagram, such as 1 for DNS [default: unknown]
    ///
    /// A session ends once its datagrams are answered, and not only after --idle-timeout.
    #[arg(long, help_heading = "UDP", value_name = "N", requires = "udp")]
    pub(crate) answers: Option<NonZeroU32>,
    /// Serve counters in the text format of Prometheus at this port or address
    #[arg(long, value_name = "ADDR", value_parser = metrics::parse_addr)]
    pub(crate) metrics: Option<SocketAddr>,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `49152-65535`.
pub(crate) fn port_range(text: &str) -> Result<RangeInclusive<u16>, String> {
    let range = text.split_once('-').and_then(|(first, last)| Some(first.parse().ok()?..=last.parse().ok()?));
    range.filter(|range| !range.is_empty()).ok_or_else(|| "expected FIRST-LAST, such as 49152-65535".into())
}
