//! Options of the benchmarks.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use manylane::{Limit, Steering};
use manylane_bench::experiments::batch::RecvMethod;
use manylane_bench::experiments::flap::Event;
use manylane_bench::experiments::flood::Part;
use manylane_bench::experiments::proxy;
use manylane_bench::experiments::replies::SendMethod;
use manylane_bench::experiments::rtt::{self, Contender, generator::Arrivals};
use manylane_bench::place::CountHook;
use manylane_bench::receivers::Kind;
use manylane_measure::client::PAYLOAD_LEN_MAX;

use super::values::{rx_usecs, within};
use crate::parse::{self, Rate};

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Cost of receiving, sustained rate, and goodput at twice that rate
    #[command(
        after_long_help = "Examples:\n  sudo manylane bench rx --quick\n  manylane bench rx --loopback --threads 1,4 --receivers socket/recvmmsg,lane/mmsg"
    )]
    Rx(RxArgs),
    /// As rx, for receivers that answer: cost of a request and its reply
    #[command(after_long_help = "Example:\n  sudo manylane bench echo --threads 1 --rate 200k")]
    Echo(RxArgs),
    /// Cost of receiving queued datagrams, by size and messages per call
    #[command(after_long_help = "Example:\n  manylane bench batch --loopback --size 64 --batch 1,64")]
    Batch(BatchArgs),
    /// Cost of sending, by size and messages per call: sendmmsg, io_uring, zero-copy
    #[command(after_long_help = "Example:\n  manylane bench replies --size 64,1024")]
    Replies(RepliesArgs),
    /// Cost of receiving when the sender uses UDP GSO over loopback
    #[command(after_long_help = "Example:\n  manylane bench gso")]
    Gso(GsoArgs),
    /// Check that adding and removing lanes under traffic loses no datagrams
    #[command(after_long_help = "Example:\n  sudo manylane bench churn --duration 30s")]
    Churn(ChurnArgs),
    /// Round-trip times and CPU cost of each wait policy
    ///
    /// Each contender is a receiver with one thread and a wait policy, such as lane/mmsg+adaptive
    /// or socket/recvfrom+spin:1000. Each round runs every contender in a ping-pong, at each rate,
    /// and idle. In the open loops, the time counts from when a request was due.
    #[command(
        after_long_help = "Example:\n  sudo manylane bench rtt --rate 20k --contenders socket/recvfrom+sleep,lane/mmsg+adaptive"
    )]
    Rtt(RttArgs),
    /// Losses when an XDP program, a socket or a link changes under traffic (root)
    #[command(after_long_help = "Example:\n  sudo manylane bench flap --events xdp-opens,receiver-link")]
    Flap(FlapArgs),
    /// Effect of a flood on clients, memory and other programs (root)
    ///
    /// clients: share of requests of regular clients that are answered during a flood. sources:
    /// growth of memory, and pauses of the server, with 100,000 new sources per second and with
    /// one. program: time for which a busy program does not run. The server has one lane, and runs
    /// with limits and without. The flood is generated on another CPU.
    #[command(after_long_help = "Example:\n  sudo manylane bench flood --quick --parts clients")]
    Flood(FloodArgs),
    /// TCP proxies on one CPU: cost of a request, latency, bulk rate (root)
    ///
    /// HAProxy and nginx (module stream) where they are installed, and manylane proxy with both
    /// stacks. Clients, proxy and servers are three hosts; the proxy has a CPU of its own, and its
    /// busy time counts. Clients and servers are on kernel sockets.
    #[command(after_long_help = "Example:\n  sudo manylane bench proxy --loads keep-alive,connect")]
    Proxy(ProxyBenchArgs),
}

impl BenchCommand {
    /// The options that all benchmarks have.
    pub(crate) fn common(&self) -> &BenchArgs {
        match self {
            Self::Rx(RxArgs { common, .. })
            | Self::Echo(RxArgs { common, .. })
            | Self::Batch(BatchArgs { common, .. })
            | Self::Replies(RepliesArgs { common, .. })
            | Self::Gso(GsoArgs { common, .. })
            | Self::Churn(ChurnArgs { common, .. })
            | Self::Rtt(RttArgs { common, .. })
            | Self::Flap(FlapArgs { common, .. })
            | Self::Flood(FloodArgs { common, .. })
            | Self::Proxy(ProxyBenchArgs { common, .. }) => common,
        }
    }
}

/// `manylane bench rx` and `manylane bench echo`.
#[derive(Debug, Args)]
pub(crate) struct RxArgs {
    /// Threads that receive; several are compared
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8", value_name = "N,…", value_parser = within(1..))]
    pub(crate) threads: Vec<usize>,
    /// Receivers to compare
    ///
    /// Default: all; over loopback or with --quick, those that use kernel sockets.
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub(crate) receivers: Vec<Kind>,
    /// Length of a sample [default: 1s; 100ms with --quick]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub(crate) duration: Option<Duration>,
    /// Common rate of the cost rounds [default: 0.9 times the lowest sustained rate]
    #[arg(long, value_name = "RATE", value_parser = parse::pps)]
    pub(crate) rate: Option<f64>,
    /// Simulated application work: CPU time to spend on each received datagram
    #[arg(long, default_value_t = 0, value_name = "NANOSECONDS", value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    pub(crate) work: u64,
    /// Finish within 40 seconds: shorter samples, fewer sustained rates
    ///
    /// Sustained rates are estimated by short trials, for the highest number of threads only.
    #[arg(long)]
    pub(crate) quick: bool,
    /// Number of testbed links that carry the traffic, each with its own address
    ///
    /// With several, receivers bind the wildcard address.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = within(1..=16), conflicts_with = "loopback")]
    pub(crate) links: usize,
    /// Receive queues of each testbed device
    ///
    /// Default: the highest number of threads.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64), conflicts_with = "loopback")]
    pub(crate) queues: Option<u32>,
    /// Place where the testbed's client counts and drops replies (echo only)
    ///
    /// stack: where its network stack begins. driver: in its driver, which first copies each
    /// reply, at the cost of the replying thread.
    #[arg(long, default_value_t, value_name = "stack|driver", conflicts_with = "loopback")]
    pub(crate) count_hook: CountHook,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    #[command(flatten)]
    pub(crate) common: BenchArgs,
}

/// `manylane bench batch`.
#[derive(Debug, Args)]
pub(crate) struct BatchArgs {
    /// Receivers to compare [default: all]
    ///
    /// lane/xdp and xsk/* only in a testbed, with datagrams of at most 1024 bytes.
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub(crate) receivers: Vec<RecvMethod>,
    /// Number of times that a sample queues 2048 datagrams and drains them
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = within(1..))]
    pub(crate) iterations: usize,
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
    pub(crate) senders: Vec<SendMethod>,
    #[command(flatten)]
    pub(crate) common: BenchArgs,
}

/// `manylane bench gso`.
#[derive(Debug, Args)]
pub(crate) struct GsoArgs {
    /// Threads that receive; several are compared
    #[arg(long, value_delimiter = ',', default_value = "1", value_name = "N,…", value_parser = within(1..))]
    pub(crate) threads: Vec<usize>,
    /// Receivers to compare [default: all except socket/recvfrom]
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub(crate) receivers: Vec<Kind>,
    /// Length of a sample
    #[arg(long, default_value = "1s", value_name = "TIME", value_parser = parse::duration)]
    pub(crate) duration: Duration,
    /// Datagrams per second, or max for as many as the sender can send
    ///
    /// For a receiver without GRO, the sender's CPU time includes the segmentation of GSO
    /// messages. So with max, the rate depends on the receiver.
    #[arg(long, default_value = "max", value_name = "RATE", value_parser = parse::rate)]
    pub(crate) rate: Rate,
    #[command(flatten)]
    pub(crate) common: BenchArgs,
}

/// `manylane bench churn`.
#[derive(Debug, Args)]
pub(crate) struct ChurnArgs {
    /// Number of lanes at the start; each change adds or removes one
    #[arg(long, value_delimiter = ',', default_value = "2", value_name = "N,…", value_parser = within(1..))]
    pub(crate) lanes: Vec<usize>,
    /// Time during which lanes are added and removed
    #[arg(long, default_value = "10s", value_name = "TIME", value_parser = parse::duration)]
    pub(crate) duration: Duration,
    /// Time between two changes
    #[arg(long, default_value = "50ms", value_name = "TIME", value_parser = parse::duration)]
    pub(crate) change_interval: Duration,
    /// Datagrams per second [default: half of the sustained rate]
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
    #[arg(long, value_delimiter = ',', default_value = "1", value_name = "N,…", value_parser = within(1..))]
    pub(crate) threads: Vec<usize>,
    /// Receivers to compare [default: lane/mmsg and lane/xdp]
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub(crate) receivers: Vec<Kind>,
    /// Events to compare [default: all]
    ///
    /// nothing, mmsg-opens, mmsg-closes, program-attached, program-detached, xdp-opens, xdp-closes,
    /// receiver-link, sender-link.
    #[arg(long, value_delimiter = ',', value_name = "EVENT,…")]
    pub(crate) events: Vec<Event>,
    /// Length of a sample, half before and half after the event
    #[arg(long, default_value = "500ms", value_name = "TIME", value_parser = parse::duration)]
    pub(crate) duration: Duration,
    /// Datagrams per second [default: half of the lowest sustained rate]
    #[arg(long, value_name = "RATE", value_parser = parse::pps)]
    pub(crate) rate: Option<f64>,
    #[command(flatten)]
    pub(crate) common: BenchArgs,
}

/// `manylane bench flood`.
#[derive(Debug, Args)]
pub(crate) struct FloodArgs {
    /// Parts to run: clients, sources, program [default: all]
    #[arg(long, value_delimiter = ',', value_name = "PART,…")]
    pub(crate) parts: Vec<Part>,
    /// Limit of the server in rounds with a limit, as for `manylane echo`
    #[arg(long, default_value = "2000/200", value_name = "LIMIT")]
    pub(crate) limit: Limit,
    /// Datagrams per second of the flood
    ///
    /// Default: ten times the sustained rate of the server; 1M for program.
    #[arg(long, value_name = "RATE", value_parser = parse::pps)]
    pub(crate) rate: Option<f64>,
    /// Length of a sample of clients and program [default: 1500ms, 300ms with --quick]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub(crate) duration: Option<Duration>,
    /// Time with new sources, in all rounds together [default: 60s; 5s with --quick]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub(crate) sources_duration: Option<Duration>,
    /// Finish within a minute: shorter samples
    #[arg(long)]
    pub(crate) quick: bool,
    #[command(flatten)]
    pub(crate) common: BenchArgs,
}

/// `manylane bench proxy`.
#[derive(Debug, Args)]
pub(crate) struct ProxyBenchArgs {
    /// Proxies to compare: haproxy, nginx, proxy/kernel, proxy/xdp [default: those installed]
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub(crate) contenders: Vec<proxy::Contender>,
    /// What clients do [default: all]
    ///
    /// keep-alive, connect, keep-alive-5000, connect-5000, paced, bulk, bulk-offload.
    #[arg(long, value_delimiter = ',', value_name = "LOAD,…")]
    pub(crate) loads: Vec<proxy::Load>,
    /// Requests per second of paced [default: 0.7 of the most that the first proxy does]
    #[arg(long, value_name = "RATE", value_parser = parse::pps)]
    pub(crate) rate: Option<f64>,
    /// Length of a sample [default: 2s; 200ms with --quick]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub(crate) duration: Option<Duration>,
    /// Shorter samples
    #[arg(long)]
    pub(crate) quick: bool,
    #[command(flatten)]
    pub(crate) common: BenchArgs,
}

/// `manylane bench rtt`.
#[derive(Debug, Args)]
pub(crate) struct RttArgs {
    /// Contenders to compare, as RECEIVER+WAIT
    ///
    /// Default: the baselines, and each engine with each wait policy.
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub(crate) contenders: Vec<Contender>,
    /// Requests per second of the open loops; several are compared
    ///
    /// Default: 10, 40 and 80 % of the lowest sustained rate, and 20k.
    #[arg(long, value_delimiter = ',', value_name = "RATE,…", value_parser = parse::pps)]
    pub(crate) rate: Vec<f64>,
    /// Intervals of the open loops: even, or poisson (random, as from many clients)
    #[arg(long, default_value = "even", value_name = "HOW")]
    pub(crate) arrivals: Arrivals,
    /// CPUs of the server, the generator and the device's work
    ///
    /// apart, together, rps-server, napi-server or napi-generator.
    #[arg(long, value_delimiter = ',', default_value = "apart", value_name = "LAYOUT,…")]
    pub(crate) cpu_layouts: Vec<rtt::cpu_layout::CpuLayout>,
    /// Length of a sample [default: 500ms; 50ms with --quick]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub(crate) duration: Option<Duration>,
    /// Shorter samples, rates 5k and 20k unless given, and fewer contenders
    #[arg(long)]
    pub(crate) quick: bool,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    #[command(flatten)]
    pub(crate) common: BenchArgs,
}

/// Place of a benchmark.
#[derive(Debug, Args)]
pub(crate) struct PlaceArgs {
    /// Use two network namespaces, a veth pair and an XDP sender [default for root]
    #[arg(long, conflicts_with = "loopback")]
    pub(crate) testbed: bool,
    /// Use loopback and ordinary sockets; needs no privileges [default without root]
    #[arg(long)]
    pub(crate) loopback: bool,
}

/// Options of all benchmarks.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Payload of the datagrams in bytes; several are compared [default: 10]
    ///
    /// Default for batch: 64,256,1024,8192; for replies: 64,1024,8192,60000.
    #[arg(long, value_delimiter = ',', value_name = "BYTES,…", value_parser = within(..=PAYLOAD_LEN_MAX as u64))]
    pub(crate) size: Vec<usize>,
    /// Number of rounds; each runs every receiver once
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = within(1..))]
    pub(crate) rounds: usize,
    /// Number of flows [default: 64; 1 for gso, as a GSO message has one flow]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) flows: Option<u16>,
    /// Maximum number of messages that one call receives or sends [default: 64]
    ///
    /// batch and replies compare several: by default 1,16,64,256,1024 and 1,16,64,256.
    #[arg(long, value_delimiter = ',', value_name = "N,…", value_parser = within(1..=1024))]
    pub(crate) batch: Vec<usize>,
    /// Receive buffer of each socket [default: 64M, or the most allowed]
    #[arg(long, value_name = "BYTES", value_parser = parse::bytes)]
    pub(crate) recv_buffer: Option<usize>,
    /// Delay before a receive (not socket/*); 0: none [default: 0 to 1000]
    ///
    /// The same for all receivers, so that they can be compared. In bench rtt, that of lanes
    /// follows the load by default.
    #[arg(long, value_name = "USECS", value_parser = rx_usecs())]
    pub(crate) rx_usecs: Option<u64>,
    /// Steering of the lanes, as for `manylane echo`
    #[arg(long, default_value_t = Steering::Flow, value_name = "POLICY")]
    pub(crate) steering: Steering,
    /// CPUs of receiving threads, such as 0-3,6 [default: all but the sender's]
    #[arg(long, value_name = "CPUS", value_parser = parse::cpus)]
    pub(crate) receiver_cpus: Option<CpuList>,
    /// Folder for the JSON with all samples and the HTML report
    #[arg(long, default_value = "report", value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Print the result as JSON on standard output
    #[arg(long)]
    pub(crate) json: bool,
}

/// For clap, `Option<Vec<_>>` is a repeated flag. Under this name it is one value.
pub(crate) type CpuList = Vec<usize>;
