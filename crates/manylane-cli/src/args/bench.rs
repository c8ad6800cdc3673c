//! The options of the benchmarks.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use manylane::{Limit, Steering};
use manylane_testbed::bench::batch::RecvMethod;
use manylane_testbed::bench::flap::Event;
use manylane_testbed::bench::flood::Part;
use manylane_testbed::bench::replies::SendMethod;
use manylane_testbed::bench::rtt::{self, Contender, generator::Arrivals};
use manylane_testbed::receiver::Kind;
use manylane_testbed::traffic::replies::CountHook;

use super::values::{interfaces, messages, payload_size, positive};
use crate::parse::{self, Rate};

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// What receiving costs, up to which rate nothing is lost, and what is left at twice that rate
    Rx(RxArgs),
    /// The same of receivers that answer: what a request costs that is received and answered
    Echo(RxArgs),
    /// What taking a datagram costs that is there already, by its size and by how many a call may
    /// take
    Batch(BatchArgs),
    /// What sending a datagram costs, by its size and by how many a call sends: sendmmsg, and
    /// io_uring with and without a copy
    Replies(RepliesArgs),
    /// What receiving costs when the sender sends trains (UDP GSO) over loopback
    Gso(GsoArgs),
    /// Whether lanes that come and go under traffic lose datagrams
    Churn(ChurnArgs),
    /// How long answers take with each way to wait, at fixed rates and in a ping-pong, and what
    /// that costs
    Rtt(RttArgs),
    /// What is lost when an XDP program, a second socket or a link comes and goes under traffic
    /// (root)
    Flap(FlapArgs),
    /// What a flood does to regular clients, to memory and to other programs, with limits and
    /// without (root)
    Flood(FloodArgs),
}

/// `manylane bench rx` and `manylane bench echo`.
#[derive(Debug, Args)]
pub(crate) struct RxArgs {
    /// Threads that receive; several are compared
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8", value_name = "N,…", value_parser = positive)]
    pub(crate) threads: Vec<usize>,
    /// Receivers to compare [default: all; those that take frames from a device not over loopback,
    /// nor with --quick]
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub(crate) receivers: Vec<Kind>,
    /// Length of a sample [default: 1s; 100ms with --quick]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub(crate) duration: Option<Duration>,
    /// Common rate of the cost rounds [default: 0.9 of the lowest no-loss rate]
    #[arg(long, value_name = "RATE", value_parser = parse::pps)]
    pub(crate) rate: Option<f64>,
    /// An application's own work: so long every receiver computes for each datagram, after it took
    /// it
    #[arg(long, default_value_t = 0, value_name = "NANOSECONDS", value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    pub(crate) work: u64,
    /// End within 40 seconds: shorter samples, no-loss rates for the most threads only
    #[arg(long)]
    pub(crate) quick: bool,
    /// Links of the testbed that carry the traffic, each with an address of its own
    ///
    /// Receivers bind the wildcard address if there are several.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = interfaces, conflicts_with = "loopback")]
    pub(crate) links: usize,
    /// Receive queues of each of these devices [default: one for each thread, of the most that are
    /// compared]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64), conflicts_with = "loopback")]
    pub(crate) queues: Option<u32>,
    /// Where the host that answers come back to counts and drops them, in a testbed: where its
    /// stack begins, or in its driver, which copies each answer first. The thread that answers pays
    /// for it (echo only)
    #[arg(long, default_value_t, value_name = "stack|driver", conflicts_with = "loopback")]
    pub(crate) answers: CountHook,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    #[command(flatten)]
    pub(crate) common: BenchArgs,
}

/// `manylane bench batch`.
#[derive(Debug, Args)]
pub(crate) struct BatchArgs {
    /// Receivers to compare [default: all; lane/xdp and xsk/* only in a testbed, with datagrams of
    /// up to 1024 bytes]
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub(crate) receivers: Vec<RecvMethod>,
    /// Messages that a call may take; several are compared
    #[arg(long, value_delimiter = ',', default_value = "1,16,64,256,1024", value_name = "N,…", value_parser = messages)]
    pub(crate) messages: Vec<usize>,
    /// Queues of 2048 datagrams that a sample empties
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = positive)]
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
    pub(crate) senders: Vec<SendMethod>,
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
    #[arg(long, value_delimiter = ',', default_value = "1", value_name = "N,…", value_parser = positive)]
    pub(crate) threads: Vec<usize>,
    /// Receivers to compare [default: all but socket/recvfrom]
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub(crate) receivers: Vec<Kind>,
    /// Length of a sample
    #[arg(long, default_value = "1s", value_name = "TIME", value_parser = parse::duration)]
    pub(crate) duration: Duration,
    /// Datagrams per second, or max for as many as the sender can. The kernel cuts trains for a
    /// receiver without GRO on the sender's time: at max, each receiver has a sender as fast as it
    /// lets it be
    #[arg(long, default_value = "max", value_name = "RATE", value_parser = parse::rate)]
    pub(crate) rate: Rate,
    #[command(flatten)]
    pub(crate) common: BenchArgs,
}

/// `manylane bench churn`.
#[derive(Debug, Args)]
pub(crate) struct ChurnArgs {
    /// Lanes at the start; one more or less at each change
    #[arg(long, value_delimiter = ',', default_value = "2", value_name = "N,…", value_parser = positive)]
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
    #[arg(long, value_delimiter = ',', default_value = "1", value_name = "N,…", value_parser = positive)]
    pub(crate) threads: Vec<usize>,
    /// Receivers to compare [default: lane/mmsg and lane/xdp]
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub(crate) receivers: Vec<Kind>,
    /// What happens [default: nothing, mmsg-opens, mmsg-closes, program-comes, program-goes,
    /// xdp-opens, xdp-closes, receiver-link, sender-link]
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

/// `manylane bench flood`.
///
/// Part clients: how many requests of regular clients are answered beside a flood. Sources: what
/// grows, and who pauses for longer, with 100,000 new sources per second than with one. Program:
/// how long a program that only wants to run is kept from it. A server with one lane; the flood is
/// made on another processor.
#[derive(Debug, Args)]
pub(crate) struct FloodArgs {
    /// What is measured [default: clients, sources, program]
    #[arg(long, value_delimiter = ',', value_name = "PART,…")]
    pub(crate) parts: Vec<Part>,
    /// The limit of the server where it has one, as for `manylane echo`
    #[arg(long, default_value = "2000/200", value_name = "LIMIT")]
    pub(crate) limit: Limit,
    /// Datagrams per second of the flood [default: ten times the no-loss rate of the server; of
    /// program 1M]
    #[arg(long, value_name = "RATE", value_parser = parse::pps)]
    pub(crate) rate: Option<f64>,
    /// Length of a sample of clients and program [default: 1500ms; 300ms with --quick]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub(crate) duration: Option<Duration>,
    /// How long there are new sources, all rounds together [default: 60s; 5s with --quick]
    #[arg(long, value_name = "TIME", value_parser = parse::duration)]
    pub(crate) sources: Option<Duration>,
    /// End within a minute: shorter samples
    #[arg(long)]
    pub(crate) quick: bool,
    #[command(flatten)]
    pub(crate) common: BenchArgs,
}

/// `manylane bench rtt`.
///
/// Every contender is a receiver with a thread, and how it waits: lane/mmsg+adaptive,
/// socket/recvfrom+spin:1000. In each round each has its turn, in a ping-pong, at each rate, and
/// idle. Times of the open loops count from when a request was due.
#[derive(Debug, Args)]
pub(crate) struct RttArgs {
    /// Who is compared, as RECEIVER+WAIT [default: the baselines, and each engine with each policy]
    #[arg(long, value_delimiter = ',', value_name = "NAME,…")]
    pub(crate) contenders: Vec<Contender>,
    /// Requests per second of the open loops [default: 10, 40 and 80 % of the lowest no-loss rate,
    /// and 20k]
    #[arg(long, value_delimiter = ',', value_name = "RATE,…", value_parser = parse::pps)]
    pub(crate) rates: Vec<f64>,
    /// Distances between requests of the open loops: even, or chance (as from many clients)
    #[arg(long, default_value = "even", value_name = "HOW")]
    pub(crate) arrivals: Arrivals,
    /// Where server, generator and the work of the device are: apart, together, rps-server,
    /// napi-server, napi-generator
    #[arg(long, value_delimiter = ',', default_value = "apart", value_name = "WHERE,…")]
    pub(crate) placements: Vec<rtt::placement::Placement>,
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
    /// Between two network namespaces joined by a veth pair, from an XDP sender (root) [default for
    /// root]
    #[arg(long, conflicts_with = "loopback")]
    pub(crate) testbed: bool,
    /// On loopback, from ordinary sockets; needs no privileges [default without root]
    #[arg(long)]
    pub(crate) loopback: bool,
}

/// What all benchmarks take.
#[derive(Debug, Args)]
pub(crate) struct BenchArgs {
    /// Payload of the datagrams in bytes; several are compared [default: 10; of batch
    /// 64,256,1024,8192, of replies 64,1024,8192,60000]
    #[arg(long, value_delimiter = ',', value_name = "BYTES,…", value_parser = payload_size)]
    pub(crate) size: Vec<usize>,
    /// Rounds; in each, every receiver has its turn
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = positive)]
    pub(crate) rounds: usize,
    /// Sources of the traffic, each a flow [default: 64; of gso 1, for a train is of one flow]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) flows: Option<u16>,
    /// Messages that one call takes at most, of all receivers alike
    #[arg(long, default_value_t = 64, value_name = "N", value_parser = positive)]
    pub(crate) batch: usize,
    /// Receive buffer of each socket, of all receivers alike [default: 64M, or as much as this
    /// process may have]
    #[arg(long, value_name = "BYTES", value_parser = parse::bytes)]
    pub(crate) recv_buffer: Option<usize>,
    /// Delay before a receive, of lanes and reuseport/*; 0 for none [default: 0 to 1000]
    ///
    /// By default 100 microseconds for each thread that shares a processor, where any do.
    #[arg(long, value_name = "USECS")]
    pub(crate) rx_usecs: Option<u64>,
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
