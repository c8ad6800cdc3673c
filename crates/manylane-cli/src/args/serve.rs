//! Options of `echo`, `send`, `capture` and `run`.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use manylane::capture::SNAPLEN_MAX;
use manylane::{DropPolicy, Engine, Placement, Steering, SteeringBackend, Vlan, WaitPolicy};
use manylane_ipc::ports::PortRanges;
use manylane_measure::client::{Expect, PAYLOAD_LEN_MAX, Payload};

use super::FilterArgs;
use super::values::{
    CaptureTarget, Switch, capture_buffer, capture_target, interval_or_zero, rx_usecs, within,
};
use crate::metrics;
use crate::parse::{self, Rate};

/// The options that `echo` and `run` both have. Without a value, each has a default of its own.
#[derive(Debug, Args)]
pub(crate) struct LaneArgs {
    /// Engine of the lanes: auto, mmsg, uring (not for run) or xdp [default: auto]
    ///
    /// mmsg: recvmmsg and sendmmsg. uring: io_uring, or mmsg if it is not available. xdp: frames
    /// of the network devices, past the kernel's stack (root; a program under `manylane run` needs
    /// no root). auto: xdp on the devices of --interface if that works, else mmsg; for run always
    /// mmsg.
    #[arg(long, help_heading = "Lanes")]
    pub(crate) engine: Option<Engine>,
    /// Number of lanes of a socket; for run, the maximum
    ///
    /// Default of echo: one for each CPU. Default of run: four for each CPU, 2 to 64.
    #[arg(long, help_heading = "Lanes", value_name = "N", value_parser = within(1..))]
    pub(crate) lanes: Option<usize>,
    /// Network devices of engine xdp, such as eth0,eth1
    ///
    /// Default of echo: those with ADDR. Default of run: all Ethernet devices that are up and have
    /// an address that is not link-local, except veth devices, devices with rp_filter 1 if others
    /// are up, and devices that the default route or an ssh session needs, unless their driver
    /// keeps the link up.
    #[arg(long, help_heading = "Engine xdp", value_name = "LIST", value_delimiter = ',')]
    pub(crate) interface: Vec<String>,
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    /// Steering policy: which lane gets a datagram [default: flow]
    ///
    /// flow, round-robin, cpu, random, least-loaded or "key OFFSET:LENGTH".
    #[arg(long, help_heading = "Steering", value_name = "POLICY")]
    pub(crate) steering: Option<Steering>,
    /// Delay before a receive if larger batches pay, at most 20000; 0: none
    ///
    /// As rx-usecs of ethtool. By default the delay follows the load: none while lanes keep their
    /// CPUs busy for less than half of the time, and up to 500 near saturation. Lanes with CPUs of
    /// their own delay only with engine xdp and --wait sleep.
    #[arg(long, help_heading = "Waiting", value_name = "USECS", value_parser = rx_usecs())]
    pub(crate) rx_usecs: Option<u64>,
    /// Print a line of statistics at this interval, such as 500ms or 10s; 0: none
    ///
    /// On standard error. Default of echo: 5s. Default of run: 0.
    #[arg(long, short, help_heading = "Output", value_name = "TIME", value_parser = interval_or_zero)]
    pub(crate) interval: Option<Duration>,
    /// Serve the counters to Prometheus at http://ADDR/metrics (a port: on loopback)
    #[arg(long, help_heading = "Output", value_name = "ADDR", value_parser = metrics::parse_addr)]
    pub(crate) metrics: Option<SocketAddr>,
}

/// `manylane echo`.
#[derive(Debug, Args)]
pub(crate) struct EchoArgs {
    /// Address and port to serve, such as 0.0.0.0:7, [::]:7 or 127.0.0.1:0
    #[arg(value_name = "ADDR")]
    pub(crate) addr: String,
    #[command(flatten)]
    pub(crate) common: LaneArgs,
    /// Attach the XDP program behind the driver (generic XDP): any device, but slower
    #[arg(long, help_heading = "Engine xdp")]
    pub(crate) xdp_generic: bool,
    /// VLAN that engine xdp also receives: ID, or OUTER.INNER; may be repeated
    #[arg(long, help_heading = "Engine xdp", value_name = "ID[.ID]")]
    pub(crate) xdp_vlan: Vec<Vlan>,
    /// Wait policy of idle lanes: sleep, busy-poll[:USECS], spin:USECS or adaptive
    ///
    /// busy-poll: the kernel polls the device before it puts the lane to sleep (SO_BUSY_POLL).
    /// spin: the lane polls for USECS, then sleeps. adaptive: the lane polls while that pays.
    #[arg(long, help_heading = "Waiting", default_value_t = WaitPolicy::Sleep, value_name = "HOW")]
    pub(crate) wait: WaitPolicy,
    /// Backend that does the steering: auto, ebpf, classic-bpf or kernel
    #[arg(long, help_heading = "Steering", default_value_t = SteeringBackend::Auto, value_name = "BACKEND")]
    pub(crate) steering_backend: SteeringBackend,
    /// CPUs of the lanes: spread, pack, none, or a list such as 0,2,4-7
    #[arg(long, help_heading = "Lanes", default_value_t = Placement::Spread, value_name = "WHERE")]
    pub(crate) placement: Placement,
    /// Maximum number of messages that one call receives or sends
    #[arg(long, help_heading = "Lanes", default_value_t = 64, value_name = "N", value_parser = within(1..))]
    pub(crate) batch: usize,
    /// Receive several datagrams as one message (UDP GRO)
    ///
    /// Default: on once senders send trains of datagrams; off with steering round-robin and key.
    #[arg(long, help_heading = "Datagrams", value_enum)]
    pub(crate) gro: Option<Switch>,
    /// Send several replies to one peer as one message (UDP GSO)
    #[arg(long, help_heading = "Datagrams", value_enum, default_value_t = Switch::On)]
    pub(crate) gso: Switch,
    /// Receive buffer of each lane, such as 4M [default: the system's]
    #[arg(long, help_heading = "Datagrams", value_name = "BYTES", value_parser = parse::bytes)]
    pub(crate) recv_buffer: Option<usize>,
    /// Length above which datagrams are truncated
    #[arg(long, help_heading = "Datagrams", value_name = "BYTES", value_parser = within(1..))]
    pub(crate) datagram_size: Option<usize>,
    /// Datagrams to drop under overload: tail (new arrivals) or head (queued ones)
    ///
    /// head: keeps only the newest batch while a lane's queue is more than half full.
    #[arg(long, help_heading = "Datagrams", default_value_t = DropPolicy::Tail, value_name = "tail|head")]
    pub(crate) drop: DropPolicy,
    /// Read the ECN bits of datagrams
    #[arg(long, help_heading = "Datagrams")]
    pub(crate) ecn: bool,
    /// Do not accept IPv4 on an IPv6 wildcard address (IPV6_V6ONLY)
    #[arg(long, help_heading = "Socket")]
    pub(crate) only_v6: bool,
    /// Share the port with other processes of this user (SO_REUSEPORT)
    #[arg(long, help_heading = "Socket")]
    pub(crate) reuse_port: bool,
    /// Print the final statistics as JSON (manylane.echo.v1)
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

/// `manylane send`.
#[derive(Debug, Args)]
pub(crate) struct SendArgs {
    /// Address and port to send to
    #[arg(value_name = "ADDR")]
    #[cfg_attr(feature = "bench", arg(required_unless_present = "testbed", conflicts_with = "testbed"))]
    #[cfg_attr(not(feature = "bench"), arg(required = true))]
    pub(crate) addr: Option<String>,
    /// Datagrams per second, such as 1000, 250k or 1.5M; max for no limit
    #[arg(long, default_value = "1000", value_name = "RATE", value_parser = parse::rate)]
    pub(crate) rate: Rate,
    /// Total number of datagrams, such as 10000 or 1M
    #[arg(long, value_name = "N", value_parser = parse::count, conflicts_with = "duration")]
    pub(crate) count: Option<u64>,
    /// Time to send, such as 10s or 500ms [default: 10s, unless --count is given]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub(crate) duration: Option<Duration>,
    /// Payload of each datagram in bytes
    #[arg(long, default_value_t = 64, value_name = "BYTES", value_parser = within(..=PAYLOAD_LEN_MAX as u64))]
    pub(crate) size: usize,
    /// Number of source ports
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) flows: u16,
    /// Payload of each datagram: text:HELLO, hex:00ff or file:PATH
    #[arg(long, value_name = "BYTES", conflicts_with = "size")]
    pub(crate) payload: Option<Payload>,
    /// Replies to wait for: none, echo, or text:..., hex:... or file:PATH
    ///
    /// With the last three, each reply must have these bytes. In hex:..., ?? matches any byte.
    #[arg(long, default_value = "none", value_name = "WHAT")]
    pub(crate) expect: Expect,
    /// Timeout of a reply
    #[arg(long, default_value = "1s", value_name = "TIME", value_parser = parse::duration)]
    pub(crate) timeout: Duration,
    /// Poll the device for replies and never sleep, with --expect (root)
    ///
    /// Latencies then have no wake-up of the client. docs/measuring.md has the settings of the
    /// device.
    #[arg(long, requires = "expect")]
    pub(crate) busy_poll: bool,
    /// Engine of a lane for each source port, in place of kernel sockets; with --expect
    ///
    /// mmsg, uring or xdp. A client on engine xdp (root) needs a fraction of the CPU time, and so
    /// measures faster servers.
    #[arg(long, requires = "expect")]
    pub(crate) engine: Option<Engine>,
    /// Network devices of engine xdp, such as eth0,eth1 [default: those with the source address]
    #[arg(long, value_name = "LIST", value_delimiter = ',', requires = "engine")]
    pub(crate) interface: Vec<String>,
    /// Send many datagrams as one message (UDP GSO); not with --expect
    #[arg(long)]
    #[cfg_attr(feature = "bench", arg(conflicts_with = "testbed"))]
    pub(crate) gso: bool,
    /// Send frames by an XDP program in a testbed, several times faster (root)
    ///
    /// The frames do not leave this machine. The testbed is two network namespaces created for
    /// this run, with lanes that count the frames.
    #[cfg(feature = "bench")]
    #[arg(long, conflicts_with = "payload")]
    pub(crate) testbed: bool,
    /// Number of receiving lanes, with --testbed
    #[cfg(feature = "bench")]
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = within(1..), requires = "testbed")]
    pub(crate) lanes: usize,
    /// Print the result as JSON (manylane.send.v1)
    #[arg(long)]
    pub(crate) json: bool,
}

/// `manylane capture`.
#[derive(Debug, Args)]
pub(crate) struct CaptureArgs {
    /// PID, or the address of the process's socket
    ///
    /// Default: the only process in this network namespace that can be captured.
    #[arg(value_name = "PID|ADDR:PORT", value_parser = capture_target)]
    pub(crate) target: Option<CaptureTarget>,
    /// File to write, or - for standard output [default: - unless it is a terminal]
    #[arg(long, short, value_name = "FILE")]
    pub(crate) write: Option<String>,
    /// Number of bytes to capture of each frame
    #[arg(long, short, default_value_t = SNAPLEN_MAX, value_name = "BYTES", value_parser = within(1..=SNAPLEN_MAX as u64))]
    pub(crate) snaplen: usize,
    /// Stop after N frames, such as 1000 or 10k
    #[arg(long, short, value_name = "N", value_parser = parse::count)]
    pub(crate) count: Option<u64>,
    /// Stop after TIME, such as 10, 10s or 2m
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub(crate) duration: Option<Duration>,
    /// Buffer of each lane, in the captured process: 64K to 64M
    #[arg(long, default_value = "4M", value_name = "BYTES", value_parser = capture_buffer)]
    pub(crate) buffer: usize,
}

/// `manylane run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The program and its arguments
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
    #[command(flatten)]
    pub(crate) common: LaneArgs,
    /// Ports whose sockets get lanes, such as 53 or 53,8000-8010 [default: all]
    ///
    /// At most 32 ports and ranges.
    #[arg(long, help_heading = "Lanes", value_name = "LIST")]
    pub(crate) ports: Option<PortRanges>,
    /// Write the report as JSON (manylane.run.v1) to FILE at the end
    ///
    /// FILE may be - (standard output) or /dev/fd/N (an open descriptor).
    #[arg(long, help_heading = "Output", value_name = "FILE")]
    pub(crate) json_file: Option<PathBuf>,
    /// Print no report at the end
    #[arg(long, short, help_heading = "Output")]
    pub(crate) quiet: bool,
    /// Do not start a program that cannot load the library
    #[arg(long, help_heading = "Program")]
    pub(crate) strict: bool,
    /// Also wait for processes that the program leaves behind (daemons)
    ///
    /// Signals are forwarded to them.
    #[arg(long, help_heading = "Program", conflicts_with = "exec")]
    pub(crate) follow: bool,
    /// Become the program (execve) instead of waiting for it; without a report
    #[arg(long, help_heading = "Program", conflicts_with_all = ["interval", "metrics", "json_file", "interface"])]
    pub(crate) exec: bool,
}
