//! The command line: every flag is defined here once; help, man pages and completions come from it.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use manylane::{Engine, Placement, Steering, SteeringBy, Vlan, WaitPolicy};
use manylane_testbed::bench::batch::By;
use manylane_testbed::bench::flap::Event;
use manylane_testbed::bench::replies::Sender;
use manylane_testbed::bench::rtt::{self, Contender, asker::Arrivals};
use manylane_testbed::client::{Expect, Payload};
use manylane_testbed::receiver::Kind;

use crate::metrics;
use crate::parse::{self, Rate};

/// One UDP socket, a lane per core: serve, send and measure.
#[derive(Debug, Parser)]
#[command(name = "manylane", version, arg_required_else_help = true, infer_subcommands = false)]
#[command(after_help = "Exit codes: 0 done, 1 failed, 2 bad usage.")]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Tell on standard error what the library does and decides
    #[arg(long, short, global = true)]
    pub(crate) verbose: bool,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve echo on lanes, with statistics while it runs
    Echo(EchoArgs),
    /// Send datagrams at a rate, check the replies, measure latency
    Send(SendArgs),
    /// Capture what lanes of the engine xdp receive and send, which tcpdump does not see (pcapng)
    Capture(CaptureArgs),
    /// Run an unmodified server on lanes
    Run(RunArgs),
    /// Find out what this machine can do for UDP, and what holds it back
    Doctor(DoctorArgs),
    /// Apply the doctor's advice, and take it back
    Tune(TuneArgs),
    /// Compare receivers: lanes against what is written by hand
    Bench {
        /// Which benchmark.
        #[command(subcommand)]
        bench: BenchCommand,
    },
    /// Write the man pages
    Man(ManArgs),
    /// Print the completions of a shell
    Completions(CompletionsArgs),
}

/// `manylane echo`.
///
/// Serves until Ctrl-C or SIGTERM; then no lane gets anything new, what is queued is answered, and the final
/// statistics go to standard output. The first line on standard error is `listening on ADDR`.
#[derive(Debug, Args)]
pub(crate) struct EchoArgs {
    /// Address and port to serve, such as 0.0.0.0:7, [::]:7 or 127.0.0.1:0
    #[arg(value_name = "ADDR")]
    pub(crate) addr: String,
    /// Lanes [default: one for each processor]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) lanes: Option<usize>,
    /// How lanes talk to the kernel: mmsg, uring (io_uring; else mmsg), xdp (frames past the kernel's stack; needs root), or auto: xdp on the devices of
    /// --xdp-device where that works, else mmsg
    #[arg(long, default_value_t = Engine::Auto)]
    pub(crate) engine: Engine,
    /// Devices that engine xdp uses [default: those that have the address]
    #[arg(long, value_name = "DEVICE,…", value_delimiter = ',')]
    pub(crate) xdp_device: Vec<String>,
    /// Attach the program of engine xdp behind the driver (generic XDP): any device, but slower
    #[arg(long)]
    pub(crate) xdp_generic: bool,
    /// VLAN whose frames engine xdp takes, too: ID, or OUTER.INNER; may be given several times
    #[arg(long, value_name = "ID[.ID]")]
    pub(crate) xdp_vlan: Vec<Vlan>,
    /// What a lane does while there is nothing: sleep, busy-poll[:MICROSECONDS] (the kernel looks at the device first),
    /// spin:MICROSECONDS (looks without pause, then sleeps), or adaptive (spins while that pays)
    #[arg(long, default_value_t = WaitPolicy::Sleep, value_name = "HOW")]
    pub(crate) wait: WaitPolicy,
    /// The same as --wait spin:MICROSECONDS, and with engine xdp the device works in the lane's calls; 1000000 at most
    #[arg(long, value_name = "MICROSECONDS", conflicts_with = "wait")]
    pub(crate) busy_poll: Option<u64>,
    /// Which lane gets a datagram: flow, round-robin, cpu, random, least-loaded or "key OFFSET:LENGTH"
    #[arg(long, default_value_t = Steering::Flow, value_name = "POLICY")]
    pub(crate) steering: Steering,
    /// What does the steering: auto, ebpf, classic-bpf or kernel
    #[arg(long, default_value_t = SteeringBy::Auto, value_name = "HOW")]
    pub(crate) steering_by: SteeringBy,
    /// Processors of the lanes: spread, pack, none, or a list such as 0,2,4-7
    #[arg(long, default_value_t = Placement::Spread, value_name = "WHERE")]
    pub(crate) placement: Placement,
    /// Messages that one call takes at most
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = at_least_one)]
    pub(crate) batch: usize,
    /// Take trains of datagrams as one message (UDP GRO) [default: on, but for round-robin and key]
    #[arg(long, value_enum)]
    pub(crate) gro: Option<Switch>,
    /// Send trains of replies as one message (UDP GSO)
    #[arg(long, value_enum, default_value_t = Switch::On)]
    pub(crate) gso: Switch,
    /// Microseconds that a lane pauses when that saves wake-ups; 0 for never [default: 100 for each lane that shares a core, where any do]
    #[arg(long, value_name = "MICROSECONDS")]
    pub(crate) linger: Option<u64>,
    /// Receive buffer of each lane, such as 4M [default: the system's]
    #[arg(long, value_name = "BYTES", value_parser = parse::bytes)]
    pub(crate) recv_buffer: Option<usize>,
    /// Largest datagram that is taken whole; larger ones are cut off and flagged
    #[arg(long, value_name = "BYTES", value_parser = at_least_one)]
    pub(crate) datagram_size: Option<usize>,
    /// Let idle lanes take work from loaded ones; order within a flow is then not kept
    #[arg(long)]
    pub(crate) stealing: bool,
    /// Read the ECN bits of datagrams
    #[arg(long)]
    pub(crate) ecn: bool,
    /// On an IPv6 wildcard address, take no IPv4
    #[arg(long)]
    pub(crate) only_v6: bool,
    /// Join other processes of this user on the same port: they and we then share the datagrams
    #[arg(long)]
    pub(crate) join_group: bool,
    /// Seconds between two lines of statistics; 0 for none
    #[arg(long, default_value_t = 5.0, value_name = "SECONDS", value_parser = seconds)]
    pub(crate) stats: f64,
    /// Serve counters by lane in the text form of Prometheus, at http://ADDR/metrics; of a port alone, on this machine only
    #[arg(long, value_name = "ADDR", value_parser = metrics::address)]
    pub(crate) metrics: Option<SocketAddr>,
    /// Final statistics as JSON (manylane.echo.v1)
    #[arg(long)]
    pub(crate) json: bool,
}

/// `manylane send`.
///
/// With --expect, latency counts from the moment a request was due and not from when it was sent (an open
/// loop): a server that stalls shows. Requests of 16 bytes and more carry a number, so that each reply is
/// known; smaller or given ones are matched by their order in the flow.
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
    /// Replies to wait for: echo, none, or always the same bytes (text:..., hex:..., file:PATH)
    #[arg(long, default_value = "none", value_name = "WHAT")]
    pub(crate) expect: Expect,
    /// How long to wait for a reply
    #[arg(long, default_value = "1s", value_name = "TIME", value_parser = parse::duration)]
    pub(crate) timeout: Duration,
    /// Send trains that the kernel cuts into datagrams (UDP GSO); not with --expect
    #[arg(long, conflicts_with = "fast")]
    pub(crate) gso: bool,
    /// Make frames by an XDP program, several times faster (root). Frames do not leave this machine: they go
    /// through a testbed, two network namespaces made for this run, to lanes that count them
    #[arg(long, conflicts_with_all = ["payload"])]
    pub(crate) fast: bool,
    /// Lanes that receive in the testbed of --fast
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = at_least_one)]
    pub(crate) lanes: usize,
    /// The result as JSON (manylane.send.v1)
    #[arg(long)]
    pub(crate) json: bool,
}

/// `manylane capture`.
///
/// Root may, and the user that the process runs as. Ends at Ctrl-C, with a complete file. What was too much for it is
/// counted, in the file and at the end; the lanes never wait. To look at frames while they pass:
/// `manylane capture | tcpdump -n -r -`, or `wireshark -k -i -`. What goes through the kernel's stack is not in it:
/// tcpdump sees that.
#[derive(Debug, Args)]
pub(crate) struct CaptureArgs {
    /// Number of the process, or the address of its socket [default: the only process here that can be captured]
    #[arg(value_name = "PID|ADDR:PORT", value_parser = capture_target)]
    pub(crate) target: Option<CaptureTarget>,
    /// File to write; - for standard output, which is the default if that is no terminal
    #[arg(long, short, value_name = "FILE")]
    pub(crate) write: Option<String>,
    /// Bytes of each frame that are kept
    #[arg(long, short, default_value_t = manylane::capture::LONGEST, value_name = "BYTES", value_parser = snaplen)]
    pub(crate) snaplen: usize,
    /// End after so many frames, such as 1000 or 10k
    #[arg(long, short, value_name = "N", value_parser = parse::count)]
    pub(crate) count: Option<u64>,
    /// End after so long, such as 10, 10s or 2m
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub(crate) duration: Option<Duration>,
    /// Memory for frames that wait to be written, of each lane, in the process that is captured: 64K to 64M
    #[arg(long, default_value = "4M", value_name = "BYTES", value_parser = parse::bytes)]
    pub(crate) buffer: usize,
}

/// `manylane run`.
///
/// Starts PROGRAM with the preload library, which gives each thread, epoll instance or child process that receives on a
/// shared UDP socket a lane of its own. The program needs no change and notices nothing; what cannot have lanes goes on
/// as without them, and the end says what did and why. Signals go to the program, and what it ends with is what this
/// ends with. 125: it could not be started for a reason of ours; 126: it cannot be executed; 127: there is no such
/// program.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The program and its arguments
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
    /// How lanes talk to the kernel: auto (mmsg), mmsg, or xdp: frames of the devices, past the kernel's stack. For xdp this
    /// needs root, the program does not [default: auto]
    #[arg(long)]
    pub(crate) engine: Option<Engine>,
    /// Devices whose frames the program gets with engine xdp, such as eth0,eth1 [default: all that are up]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) interfaces: Option<Vec<String>>,
    /// Which lane gets a datagram, as for `manylane echo` [default: flow]
    #[arg(long, value_name = "POLICY")]
    pub(crate) steering: Option<Steering>,
    /// Lanes of each socket, at most [default: one for each thread, epoll instance or child process that receives]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) lanes: Option<usize>,
    /// Ports whose sockets get lanes, such as 53 or 53,8000-8010 [default: all]
    #[arg(long, value_name = "LIST", value_parser = parse::ports)]
    pub(crate) ports: Option<String>,
    /// Datagrams that one system call may take behind the program's back, 1 to 32 [default: 1]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) batch: Option<usize>,
    /// Microseconds that a thread with a lane pauses before it sleeps, where larger batches pay for it; 0 for never
    /// [default: 50 to 500, by what a pause costs here]
    #[arg(long, value_name = "MICROSECONDS", value_parser = clap::value_parser!(u32).range(..=20_000))]
    pub(crate) linger: Option<u32>,
    /// Say on standard error how lanes do while the program runs, every so many seconds (5 if no number is given)
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "5", value_parser = interval)]
    pub(crate) stats: Option<f64>,
    /// Serve what lanes do in the text form of Prometheus while the program runs, at http://ADDR/metrics; of a port alone, on
    /// this machine only
    #[arg(long, value_name = "ADDR", value_parser = metrics::address)]
    pub(crate) metrics: Option<SocketAddr>,
    /// Write the report as JSON (manylane.run.v1) to FILE when the program has ended; - for standard output, /dev/fd/N for
    /// a descriptor
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Say nothing at the end
    #[arg(long, short)]
    pub(crate) quiet: bool,
    /// Do not start a program that the library cannot be loaded into
    #[arg(long)]
    pub(crate) strict: bool,
    /// Stay until processes that the program leaves behind (a daemon in the background) have ended, and pass signals to
    /// them
    #[arg(long, conflicts_with = "exec")]
    pub(crate) follow: bool,
    /// Become the program instead of waiting for it: nobody stands between it and who started it, and there is no report
    #[arg(long, conflicts_with_all = ["stats", "metrics", "json", "interfaces"])]
    pub(crate) exec: bool,
}

/// `manylane doctor`.
///
/// Looks at the kernel, devices, settings and counters of the network namespace it runs in, and changes nothing. Each
/// finding says what was seen, why it matters and what to run; those that cost most come first. Exit code 1 if datagrams
/// were lost or something holds the machine back; notes alone are 0. As root it sees more: whose sockets those are.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Look at the sockets of this process: which lose, how many threads share one, what `manylane run` would change
    #[arg(long, value_name = "PID")]
    pub(crate) pid: Option<u32>,
    /// Look at the sockets on this port
    #[arg(long, value_name = "PORT")]
    pub(crate) port: Option<u16>,
    /// Count what is lost in so many seconds from now, and not what was lost since boot
    #[arg(long, value_name = "SECONDS", value_parser = interval)]
    pub(crate) watch: Option<f64>,
    /// Say what there is to be found, what each means and what helps, and look at nothing
    #[arg(long, conflicts_with_all = ["pid", "port", "watch", "json"])]
    pub(crate) list: bool,
    /// Everything as JSON (manylane.doctor.v1)
    #[arg(long)]
    pub(crate) json: bool,
}

/// `manylane tune`.
///
/// Without a finding and without --all, says what could be changed. Each change is shown before it is made, and what was
/// there is kept in the file of --state before that, so that --undo puts it back, also after a crash or a restart.
/// Settings that somebody else has changed meanwhile are left alone, and named. Settings do not outlive a restart of the
/// machine.
#[derive(Debug, Args)]
pub(crate) struct TuneArgs {
    /// Findings of `manylane doctor` to act on, such as rmem-max-small or gro-off:eth0; with --undo, what to take back
    #[arg(value_name = "FINDING")]
    pub(crate) findings: Vec<String>,
    /// Act on all findings
    #[arg(long, conflicts_with = "findings")]
    pub(crate) all: bool,
    /// Show what would be changed, and change nothing
    #[arg(long, short = 'n')]
    pub(crate) dry_run: bool,
    /// Put back what was there before
    #[arg(long, conflicts_with = "all")]
    pub(crate) undo: bool,
    /// File that keeps what was there
    #[arg(long, value_name = "FILE", default_value = "/var/lib/manylane/tune.json")]
    pub(crate) state: PathBuf,
    /// Also make changes that take down, for a moment, a link which the default route or an ssh session needs
    #[arg(long)]
    pub(crate) allow_link_reset: bool,
    /// What was done as JSON (manylane.tune.v1)
    #[arg(long)]
    pub(crate) json: bool,
}

/// What to capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CaptureTarget {
    /// All sockets of a process.
    Pid(u32),
    /// One socket.
    Address(SocketAddr),
}

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// What receiving costs, up to which rate nothing is lost, and what is left at twice that rate
    Rx(RxArgs),
    /// The same of receivers that answer: what a request costs that is received and answered
    Echo(RxArgs),
    /// What taking a datagram costs that is there already, by its size and by how many a call may take
    Batch(BatchArgs),
    /// What sending a datagram costs, by its size and by how many a call sends: sendmmsg, and io_uring with and without a copy
    Replies(RepliesArgs),
    /// What receiving costs when the sender sends trains (UDP GSO) over loopback
    Gso(GsoArgs),
    /// Whether lanes that come and go under traffic lose datagrams
    Churn(ChurnArgs),
    /// How long answers take with each way to wait, at fixed rates and in a ping-pong, and what that costs
    Rtt(RttArgs),
    /// What is lost when an XDP program, a second socket or a link comes and goes under traffic (root)
    Flap(FlapArgs),
}

/// `manylane bench rx` and `manylane bench echo`.
#[derive(Debug, Args)]
pub(crate) struct RxArgs {
    /// Threads that receive; several are compared
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8", value_name = "N,…", value_parser = at_least_one)]
    pub(crate) threads: Vec<usize>,
    /// Receivers to compare [default: all; those that take frames from a device not over loopback, nor with --quick]
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub(crate) receivers: Vec<Kind>,
    /// Length of a sample [default: 1s; 100ms with --quick]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub(crate) duration: Option<Duration>,
    /// Common rate of the cost rounds [default: 0.9 of the lowest no-loss rate]
    #[arg(long, value_name = "RATE", value_parser = parse::pps)]
    pub(crate) rate: Option<f64>,
    /// End within 40 seconds: shorter samples, no-loss rates for the most threads only
    #[arg(long)]
    pub(crate) quick: bool,
    /// Devices that the traffic comes in on, each with an address of its own, in a testbed; receivers bind the
    /// wildcard if there are several
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = interfaces, conflicts_with = "loopback")]
    pub(crate) interfaces: usize,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    #[command(flatten)]
    pub(crate) common: BenchArgs,
}

/// `manylane bench batch`.
#[derive(Debug, Args)]
pub(crate) struct BatchArgs {
    /// Receivers to compare [default: all; lane/xdp only in a testbed, with datagrams of up to 1024 bytes]
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub(crate) receivers: Vec<By>,
    /// Messages that a call may take; several are compared
    #[arg(long, value_delimiter = ',', default_value = "1,16,64,256,1024", value_name = "N,…", value_parser = messages)]
    pub(crate) messages: Vec<usize>,
    /// Queues of 2048 datagrams that a sample empties
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = at_least_one)]
    pub(crate) queues: usize,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    #[command(flatten)]
    pub(crate) common: BenchArgs,
}

/// `manylane bench replies`.
#[derive(Debug, Args)]
pub(crate) struct RepliesArgs {
    /// Senders to compare [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub(crate) senders: Vec<Sender>,
    /// Messages that a call sends; several are compared
    #[arg(long, value_delimiter = ',', default_value = "1,16,64,256", value_name = "N,…", value_parser = messages)]
    pub(crate) messages: Vec<usize>,
    #[command(flatten)]
    pub(crate) common: BenchArgs,
}

/// `manylane bench gso`.
#[derive(Debug, Args)]
pub(crate) struct GsoArgs {
    /// Threads that receive; several are compared
    #[arg(long, value_delimiter = ',', default_value = "1", value_name = "N,…", value_parser = at_least_one)]
    pub(crate) threads: Vec<usize>,
    /// Receivers to compare [default: all but socket/recvfrom]
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub(crate) receivers: Vec<Kind>,
    /// Length of a sample
    #[arg(long, default_value = "1s", value_name = "TIME", value_parser = parse::duration)]
    pub(crate) duration: Duration,
    /// Datagrams per second, or max for as many as the sender can. The kernel cuts trains for a receiver
    /// without GRO on the sender's time: at max, each receiver has a sender as fast as it lets it be
    #[arg(long, default_value = "max", value_name = "RATE", value_parser = parse::rate)]
    pub(crate) rate: Rate,
    #[command(flatten)]
    pub(crate) common: BenchArgs,
}

/// `manylane bench churn`.
#[derive(Debug, Args)]
pub(crate) struct ChurnArgs {
    /// Lanes at the start; one more or less at each change
    #[arg(long, value_delimiter = ',', default_value = "2", value_name = "N,…", value_parser = at_least_one)]
    pub(crate) threads: Vec<usize>,
    /// How long lanes come and go
    #[arg(long, default_value = "10s", value_name = "TIME", value_parser = parse::duration)]
    pub(crate) duration: Duration,
    /// Time between two changes
    #[arg(long, default_value = "50ms", value_name = "TIME", value_parser = parse::duration)]
    pub(crate) every: Duration,
    /// Datagrams per second [default: half of the no-loss rate]
    #[arg(long, value_name = "RATE", value_parser = parse::pps)]
    pub(crate) rate: Option<f64>,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    #[command(flatten)]
    pub(crate) common: BenchArgs,
}

/// `manylane bench flap`.
#[derive(Debug, Args)]
pub(crate) struct FlapArgs {
    /// Threads that receive; several are compared
    #[arg(long, value_delimiter = ',', default_value = "1", value_name = "N,…", value_parser = at_least_one)]
    pub(crate) threads: Vec<usize>,
    /// Receivers to compare [default: lane/mmsg and lane/xdp]
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub(crate) receivers: Vec<Kind>,
    /// What happens [default: nothing, mmsg-opens, mmsg-closes, program-comes, program-goes, xdp-opens, xdp-closes,
    /// receiver-link, sender-link]
    #[arg(long, value_delimiter = ',', value_name = "EVENT,…")]
    pub(crate) events: Vec<Event>,
    /// How long traffic runs around an event, half before and half after
    #[arg(long, default_value = "500ms", value_name = "TIME", value_parser = parse::duration)]
    pub(crate) duration: Duration,
    /// Datagrams per second [default: half of the lowest no-loss rate]
    #[arg(long, value_name = "RATE", value_parser = parse::pps)]
    pub(crate) rate: Option<f64>,
    #[command(flatten)]
    pub(crate) common: BenchArgs,
}

/// `manylane bench rtt`.
///
/// Every contender is a receiver with a thread, and how it waits: lane/mmsg+adaptive, socket/recvfrom+spin:1000. In each
/// round each has its turn, in a ping-pong, at each rate, and idle. Times of the open loops count from when a request was
/// due.
#[derive(Debug, Args)]
pub(crate) struct RttArgs {
    /// Who is compared, as RECEIVER+WAIT [default: the baselines, and each engine with each policy]
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub(crate) contenders: Vec<Contender>,
    /// Requests per second of the open loops [default: 10, 40 and 80 % of the lowest no-loss rate, and 20k]
    #[arg(long, value_delimiter = ',', value_name = "RATE,…", value_parser = parse::pps)]
    pub(crate) rates: Vec<f64>,
    /// Distances between requests of the open loops: even, or chance (as from many clients)
    #[arg(long, default_value = "even", value_name = "HOW")]
    pub(crate) arrivals: Arrivals,
    /// Where server, generator and the work of the device are: apart, together, rps-server, napi-server, napi-generator
    #[arg(long, value_delimiter = ',', default_value = "apart", value_name = "WHERE,…")]
    pub(crate) placements: Vec<rtt::place::Placement>,
    /// Length of a sample [default: 500ms; 50ms with --quick]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub(crate) duration: Option<Duration>,
    /// Shorter samples, 5k and 20k requests per second unless rates are given, and fewer contenders
    #[arg(long)]
    pub(crate) quick: bool,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    #[command(flatten)]
    pub(crate) common: BenchArgs,
}

/// Where a benchmark runs.
#[derive(Debug, Args)]
pub(crate) struct PlaceArgs {
    /// Between two network namespaces joined by a veth pair, from an XDP sender (root) [default for root]
    #[arg(long, conflicts_with = "loopback")]
    pub(crate) testbed: bool,
    /// On loopback, from ordinary sockets; needs no privileges [default without root]
    #[arg(long)]
    pub(crate) loopback: bool,
}

/// What all benchmarks take.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Payload of the datagrams in bytes; several are compared [default: 10; of batch 64,256,1024,8192, of replies
    /// 64,1024,8192,60000]
    #[arg(long, value_delimiter = ',', value_name = "BYTES,…", value_parser = payload_size)]
    pub(crate) size: Vec<usize>,
    /// Rounds; in each, every receiver has its turn
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = at_least_one)]
    pub(crate) rounds: usize,
    /// Sources of the traffic, each a flow [default: 64; of gso 1, for a train is of one flow]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) flows: Option<u16>,
    /// Messages that one call takes at most, of all receivers alike
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = at_least_one)]
    pub(crate) batch: usize,
    /// Receive buffer of each socket, of all receivers alike [default: 64M, or as much as this process may have]
    #[arg(long, value_name = "BYTES", value_parser = parse::bytes)]
    pub(crate) recv_buffer: Option<usize>,
    /// Microseconds that lanes and reuseport/* pause after a batch that was not full; 0 for never
    /// [default: 100 for each thread that shares a processor, where any do]
    #[arg(long, value_name = "MICROSECONDS")]
    pub(crate) linger: Option<u64>,
    /// Steering of the lanes, as for `manylane echo`
    #[arg(long, default_value_t = Steering::Flow, value_name = "POLICY")]
    pub(crate) steering: Steering,
    /// Processors of the receiving threads, in turn, such as 0-3,6 [default: all but the sender's]
    #[arg(long, value_name = "CPUS", value_parser = parse::cpus)]
    pub(crate) receiver_cpus: Option<CpuList>,
    /// Folder for the JSON with all samples and the HTML report
    #[arg(long, default_value = "report", value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// The result as JSON on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

/// `Option<Vec<_>>` means a repeated flag to clap; under another name it is one value.
pub(crate) type CpuList = Vec<usize>;

/// `manylane man`.
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Folder to write the pages to
    #[arg(long, default_value = "man", value_name = "DIR")]
    pub(crate) out: PathBuf,
}

/// `manylane completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    /// On.
    On,
    /// Off.
    Off,
}

impl Switch {
    pub(crate) fn is_on(self) -> bool {
        self == Self::On
    }
}

fn messages(text: &str) -> Result<usize, String> {
    at_least_one(text).and_then(|count| if count <= 1024 { Ok(count) } else { Err("at most 1024".into()) })
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|number| *number >= 1).ok_or("give a whole number above 0".into())
}

fn capture_target(text: &str) -> Result<CaptureTarget, String> {
    let pid = text.parse().map(CaptureTarget::Pid);
    pid.or_else(|_| text.parse().map(CaptureTarget::Address)).map_err(|_| {
        "give the number of a process, or the address of a socket such as 192.0.2.1:53 or [::]:53".into()
    })
}

fn snaplen(text: &str) -> Result<usize, String> {
    const MOST: usize = manylane::capture::LONGEST;
    text.parse().ok().filter(|len| (1..=MOST).contains(len)).ok_or(format!("give a number from 1 to {MOST}"))
}

fn interfaces(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|number| (1..=16).contains(number)).ok_or("give a number from 1 to 16".into())
}

fn payload_size(text: &str) -> Result<usize, String> {
    const MOST: usize = manylane_testbed::client::MAX_PAYLOAD;
    text.parse().ok().filter(|size| *size <= MOST).ok_or(format!("give a size from 0 to {MOST}"))
}

fn seconds(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|value: &f64| (0.0..=1e6).contains(value)).ok_or("give seconds, or 0".into())
}

fn interval(text: &str) -> Result<f64, String> {
    let seconds: Option<f64> = text.parse().ok();
    seconds.filter(|value| (0.01..=1e6).contains(value)).ok_or("give seconds, 0.01 at least".into())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_holds() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_and_every_flag_has_help() {
        fn check(command: &clap::Command) {
            assert!(command.get_about().is_some(), "{} has no help", command.get_name());
            for flag in command.get_arguments() {
                assert!(flag.get_help().is_some(), "{} {} has no help", command.get_name(), flag.get_id());
            }
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }

    #[test]
    fn policies_are_parsed() {
        let parse =
            |words: &[&str]| Cli::try_parse_from([&["manylane", "echo", "127.0.0.1:0"], words].concat());
        let Command::Echo(echo) = parse(&["--steering", "key 0:8", "--placement", "0,1"]).unwrap().command
        else {
            panic!("not echo");
        };
        assert_eq!(echo.placement, Placement::List(vec![0, 1]));
        assert!(matches!(echo.steering, Steering::Key { .. }));
        for bad in [["--steering", "sideways"], ["--placement", "x"], ["--gro", "maybe"], ["--lanes", "0"]] {
            assert_eq!(parse(&bad).unwrap_err().exit_code(), 2, "{bad:?}");
        }
    }

    #[test]
    fn what_is_behind_the_program_is_its_own() {
        let parse = |words: &[&str]| {
            let all = [&["manylane", "run"], words].concat();
            match Cli::try_parse_from(all).map(|cli| cli.command) {
                Ok(Command::Run(run)) => Ok(run),
                Ok(_) => panic!("not run"),
                Err(err) => Err(err.exit_code()),
            }
        };
        let run = parse(&["--lanes", "2", "--stats", "--", "server", "--lanes", "-p", "53"]).unwrap();
        assert_eq!((run.lanes, run.stats, run.json), (Some(2), Some(5.0), None));
        assert_eq!(run.command, ["server", "--lanes", "-p", "53"]);
        let run = parse(&["--stats=0.5", "server", "-x", "--", "--exec"]).unwrap();
        assert_eq!((run.stats, run.exec), (Some(0.5), false));
        assert_eq!(run.command, ["server", "-x", "--", "--exec"]);
        for bad in
            [&[][..], &["--"], &["--lanes", "0", "x"], &["--ports", "53-", "x"], &["--exec", "--stats", "x"]]
        {
            assert_eq!(parse(bad).unwrap_err(), 2, "{bad:?}");
        }
    }

    #[test]
    fn lists_and_defaults_of_the_benchmark() {
        let words =
            ["manylane", "bench", "rx", "--threads", "1,4", "--receiver-cpus", "0-1", "--size", "10,1000"];
        let Command::Bench { bench: BenchCommand::Rx(rx) } = Cli::try_parse_from(words).unwrap().command
        else {
            panic!("not bench rx");
        };
        assert_eq!((rx.threads, rx.common.size), (vec![1, 4], vec![10, 1000]));
        assert_eq!(rx.common.receiver_cpus, Some(vec![0, 1]));
        assert_eq!((rx.common.rounds, rx.common.recv_buffer), (5, None));
        assert!(rx.receivers.is_empty());
    }
}
