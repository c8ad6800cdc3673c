//! The options of what serves, sends, captures and runs.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use manylane::{DropPolicy, Engine, Placement, Steering, SteeringBackend, Vlan, WaitPolicy};
use manylane_testbed::client::{Expect, Payload};

use super::FilterArgs;
use super::values::{
    CaptureTarget, Switch, capture_target, interval, payload_size, positive, seconds, snaplen,
};
use crate::metrics;
use crate::parse::{self, Rate};

/// `manylane echo`.
///
/// Serves until Ctrl-C or SIGTERM; then no lane gets anything new, what is queued is answered, and
/// the final statistics go to standard output. The first line on standard error is
/// `listening on ADDR`.
#[derive(Debug, Args)]
pub(crate) struct EchoArgs {
    /// Address and port to serve, such as 0.0.0.0:7, [::]:7 or 127.0.0.1:0
    #[arg(value_name = "ADDR")]
    pub(crate) addr: String,
    /// Lanes [default: one for each processor]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) lanes: Option<usize>,
    /// How lanes talk to the kernel: auto, mmsg, uring or xdp
    ///
    /// mmsg: recvmmsg and sendmmsg. uring: io_uring, or mmsg where it is not available. xdp: frames
    /// of the network device, past the kernel's stack (root). auto: xdp on the devices of
    /// --interface where that works, else mmsg.
    #[arg(long, default_value_t = Engine::Auto)]
    pub(crate) engine: Engine,
    /// Network devices of engine xdp, such as eth0,eth1 [default: those with ADDR]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) interface: Vec<String>,
    /// Attach the program of engine xdp behind the driver (generic XDP): any device, but slower
    #[arg(long)]
    pub(crate) xdp_generic: bool,
    /// VLAN whose frames engine xdp takes, too: ID, or OUTER.INNER; may be given several times
    #[arg(long, value_name = "ID[.ID]")]
    pub(crate) xdp_vlan: Vec<Vlan>,
    /// How an idle lane waits: sleep, busy-poll[:USECS], spin:USECS or adaptive
    ///
    /// busy-poll: the kernel polls the device before it puts the lane to sleep (SO_BUSY_POLL).
    /// spin: the lane polls for that long, then sleeps. adaptive: spins as long as that pays.
    #[arg(long, default_value_t = WaitPolicy::Sleep, value_name = "HOW")]
    pub(crate) wait: WaitPolicy,
    /// Which lane gets a datagram: flow, round-robin, cpu, random, least-loaded or "key
    /// OFFSET:LENGTH"
    #[arg(long, default_value_t = Steering::Flow, value_name = "POLICY")]
    pub(crate) steering: Steering,
    /// What does the steering: auto, ebpf, classic-bpf or kernel
    #[arg(long, default_value_t = SteeringBackend::Auto, value_name = "BACKEND")]
    pub(crate) steering_backend: SteeringBackend,
    /// Processors of the lanes: spread, pack, none, or a list such as 0,2,4-7
    #[arg(long, default_value_t = Placement::Spread, value_name = "WHERE")]
    pub(crate) placement: Placement,
    /// Messages received or sent by one call, at most
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = positive)]
    pub(crate) batch: usize,
    /// Receive several datagrams as one message (UDP GRO) [default: on, but for round-robin and
    /// key]
    #[arg(long, value_enum)]
    pub(crate) gro: Option<Switch>,
    /// Send several replies to one peer as one message (UDP GSO)
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub(crate) gso: Switch,
    /// Delay before a receive where that saves wake-ups; 0 for none [default: 0 to 1000]
    ///
    /// As rx-usecs of ethtool. By default 100 microseconds for each lane that shares a processor,
    /// where any do.
    #[arg(long, value_name = "USECS")]
    pub(crate) rx_usecs: Option<u64>,
    /// Receive buffer of each lane, such as 4M [default: the system's]
    #[arg(long, value_name = "BYTES", value_parser = parse::bytes)]
    pub(crate) recv_buffer: Option<usize>,
    /// Largest datagram that is not truncated
    #[arg(long, value_name = "BYTES", value_parser = positive)]
    pub(crate) datagram_size: Option<usize>,
    /// What to drop under overload: tail (new arrivals) or head (queued datagrams)
    ///
    /// Head: all but the newest, once the queue of a lane is half full.
    #[arg(long, default_value_t = DropPolicy::Tail, value_name = "tail|head")]
    pub(crate) drop: DropPolicy,
    /// Read the ECN bits of datagrams
    #[arg(long)]
    pub(crate) ecn: bool,
    /// No IPv4 on an IPv6 wildcard address (IPV6_V6ONLY)
    #[arg(long)]
    pub(crate) only_v6: bool,
    /// Share the port with other processes of this user (SO_REUSEPORT)
    #[arg(long)]
    pub(crate) reuse_port: bool,
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    /// Seconds between two lines of statistics; 0 for none
    #[arg(long, default_value_t = 5.0, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) stats: f64,
    /// Serve counters by lane in the text form of Prometheus, at http://ADDR/metrics; of a port
    /// alone, on this machine only
    #[arg(long, value_name = "ADDR", value_parser = metrics::parse_addr)]
    pub(crate) metrics: Option<SocketAddr>,
    /// Final statistics as JSON (manylane.echo.v1)
    #[arg(long)]
    pub(crate) json: bool,
}

/// `manylane send`.
///
/// With --expect, latency counts from the moment a request was due and not from when it was sent
/// (an open loop): a server that stalls shows. Requests of 16 bytes and more carry a number, so
/// that each reply is known; smaller or given ones are matched by their order in the flow.
#[derive(Debug, Args)]
pub(crate) struct SendArgs {
    /// Address and port to send to
    #[arg(value_name = "ADDR", required_unless_present = "fast", conflicts_with = "fast")]
    pub(crate) addr: Option<String>,
    /// Datagrams per second, such as 1000, 250k or 1.5M; max for as many as possible
    #[arg(long, default_value = "1000", value_name = "RATE", value_parser = parse::rate)]
    pub(crate) rate: Rate,
    /// Datagrams in all, such as 10000 or 1M
    #[arg(long, value_name = "N", value_parser = parse::count, conflicts_with = "duration")]
    pub(crate) count: Option<u64>,
    /// How long to send, such as 10s or 500ms [default: 10s, unless --count is given]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub(crate) duration: Option<Duration>,
    /// Payload of each datagram in bytes
    #[arg(long, default_value_t = 64, value_name = "BYTES", value_parser = payload_size)]
    pub(crate) size: usize,
    /// Sources, each with a port of its own
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) flows: u16,
    /// Bytes of each datagram: text:HELLO, hex:00ff or file:PATH
    #[arg(long, value_name = "BYTES", conflicts_with = "size")]
    pub(crate) payload: Option<Payload>,
    /// Replies to wait for: echo, none, or always the same bytes (text:..., hex:... with ?? for any
    /// byte, file:PATH)
    #[arg(long, default_value = "none", value_name = "WHAT")]
    pub(crate) expect: Expect,
    /// How long to wait for a reply
    #[arg(long, default_value = "1s", value_name = "TIME", value_parser = parse::duration)]
    pub(crate) timeout: Duration,
    /// Send trains that the kernel cuts into datagrams (UDP GSO); not with --expect
    #[arg(long, conflicts_with = "fast")]
    pub(crate) gso: bool,
    /// Make frames by an XDP program, several times faster (root). Frames do not leave this
    /// machine: they go through a testbed, two network namespaces made for this run, to lanes that
    /// count them
    #[arg(long, conflicts_with_all = ["payload"])]
    pub(crate) fast: bool,
    /// Lanes that receive in the testbed of --fast
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = positive)]
    pub(crate) lanes: usize,
    /// The result as JSON (manylane.send.v1)
    #[arg(long)]
    pub(crate) json: bool,
}

/// `manylane capture`.
///
/// Root may, and the user that the process runs as. Ends at Ctrl-C, with a complete file. What was
/// too much for it is counted, in the file and at the end; the lanes never wait. To look at frames
/// while they pass: `manylane capture | tcpdump -n -r -`, or `wireshark -k -i -`. What goes through
/// the kernel's stack is not in it: tcpdump sees that.
#[derive(Debug, Args)]
pub(crate) struct CaptureArgs {
    /// Number of the process, or the address of its socket [default: the only process here that can
    /// be captured]
    #[arg(value_name = "PID|ADDR:PORT", value_parser = capture_target)]
    pub(crate) target: Option<CaptureTarget>,
    /// File to write; - for standard output, which is the default if that is no terminal
    #[arg(long, short, value_name = "FILE")]
    pub(crate) write: Option<String>,
    /// Bytes of each frame that are kept
    #[arg(long, short, default_value_t = manylane::capture::SNAPLEN_MAX, value_name = "BYTES", value_parser = snaplen)]
    pub(crate) snaplen: usize,
    /// End after so many frames, such as 1000 or 10k
    #[arg(long, short, value_name = "N", value_parser = parse::count)]
    pub(crate) count: Option<u64>,
    /// End after so long, such as 10, 10s or 2m
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub(crate) duration: Option<Duration>,
    /// Memory for frames that wait to be written, of each lane, in the process that is captured:
    /// 64K to 64M
    #[arg(long, default_value = "4M", value_name = "BYTES", value_parser = parse::bytes)]
    pub(crate) buffer: usize,
}

/// `manylane run`.
///
/// Starts PROGRAM with the preload library, which gives each thread, epoll instance or child
/// process that receives on a shared UDP socket a lane of its own. The program needs no change and
/// notices nothing; what cannot have lanes goes on as without them, and the end says what did and
/// why. Signals go to the program, and what it ends with is what this ends with. 125: it could not
/// be started for a reason of ours; 126: it cannot be executed; 127: there is no such program.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The program and its arguments
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
    /// How lanes talk to the kernel: auto (mmsg), mmsg or xdp [default: auto]
    ///
    /// xdp: frames of the network devices, past the kernel's stack. `manylane run` needs root for
    /// it, the program does not.
    #[arg(long)]
    pub(crate) engine: Option<Engine>,
    /// Network devices of engine xdp, such as eth0,eth1 [default: those safe to take]
    ///
    /// Without this: all Ethernet devices that are up and have an address that is not link-local,
    /// but no veth device, none on which rp_filter is 1 beside others, and none whose link the
    /// default route or an ssh session needs, unless its driver is one without a link.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) interface: Option<Vec<String>>,
    #[command(flatten)]
    pub(crate) filter: FilterArgs,
    /// Which lane gets a datagram, as for `manylane echo` [default: flow]
    #[arg(long, value_name = "POLICY")]
    pub(crate) steering: Option<Steering>,
    /// Lanes of each socket, at most [default: one for each thread, epoll instance or child process
    /// that receives]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) lanes: Option<usize>,
    /// Ports whose sockets get lanes, such as 53 or 53,8000-8010 [default: all]
    #[arg(long, value_name = "LIST", value_parser = parse::ports)]
    pub(crate) ports: Option<String>,
    /// Datagrams prefetched, and replies sent, by one system call: 1 to 32
    ///
    /// With engine xdp, replies sent together. Default: 32 while fewer lanes than threads are in
    /// use, else 1; 16 with engine xdp.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub(crate) batch: Option<usize>,
    /// Delay before a receive where larger batches pay for it; 0 for none [default: 50 to 500]
    ///
    /// As rx-usecs of ethtool; 20000 at most. The default follows from what a wake-up costs on this
    /// machine.
    #[arg(long, value_name = "USECS", value_parser = clap::value_parser!(u32).range(..=20_000))]
    pub(crate) rx_usecs: Option<u32>,
    /// Say on standard error how lanes do while the program runs, every so many seconds (5 if no
    /// number is given)
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "5", value_parser = interval)]
    pub(crate) stats: Option<f64>,
    /// Serve what lanes do in the text form of Prometheus while the program runs, at
    /// http://ADDR/metrics; of a port alone, on this machine only
    #[arg(long, value_name = "ADDR", value_parser = metrics::parse_addr)]
    pub(crate) metrics: Option<SocketAddr>,
    /// Write the report as JSON (manylane.run.v1) to FILE when the program has ended; - for
    /// standard output, /dev/fd/N for a descriptor
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Say nothing at the end
    #[arg(long, short)]
    pub(crate) quiet: bool,
    /// Do not start a program that the library cannot be loaded into
    #[arg(long)]
    pub(crate) strict: bool,
    /// Stay until processes that the program leaves behind (a daemon in the background) have ended,
    /// and pass signals to them
    #[arg(long, conflicts_with = "exec")]
    pub(crate) follow: bool,
    /// Become the program instead of waiting for it: nobody stands between it and who started it,
    /// and there is no report
    #[arg(long, conflicts_with_all = ["stats", "metrics", "json", "interface"])]
    pub(crate) exec: bool,
}
