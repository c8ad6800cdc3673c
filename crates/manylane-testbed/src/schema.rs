//! The documents that `--json` prints. A reader may rely on every field here for as long as the
//! number at the end of the schema's name stays the same.

mod flood;

use serde::{Deserialize, Serialize};

pub use flood::{
    BENCH_FLOOD, FloodClients, FloodGap, FloodMemory, FloodPauses, FloodRow, FloodSample, PAUSE_BINS,
};

use crate::machine::Machine;
use crate::stats::median;

/// Name of the document that `bench rx` writes.
pub const BENCH_RX: &str = "manylane.bench.rx.v1";
/// Name of the document that `bench echo` writes.
pub const BENCH_ECHO: &str = "manylane.bench.echo.v1";
/// Name of the document that `bench batch` writes.
pub const BENCH_BATCH: &str = "manylane.bench.batch.v1";
/// Name of the document that `bench replies` writes.
pub const BENCH_REPLIES: &str = "manylane.bench.replies.v1";
/// Name of the document that `bench gso` writes.
pub const BENCH_GSO: &str = "manylane.bench.gso.v1";
/// Name of the document that `bench churn` writes.
pub const BENCH_CHURN: &str = "manylane.bench.churn.v1";
/// Name of the document that `bench flap` writes.
pub const BENCH_FLAP: &str = "manylane.bench.flap.v1";
/// Name of the document that `bench rtt` writes.
pub const BENCH_RTT: &str = "manylane.bench.rtt.v1";
/// Name of the document that `lab` writes.
pub const LAB: &str = "manylane.lab.v1";
/// Name of the document that `echo` writes when it ends.
pub const ECHO: &str = "manylane.echo.v1";
/// Name of the document that `run` writes.
pub const RUN: &str = "manylane.run.v1";
/// Name of the document that `top` writes.
pub const TOP: &str = "manylane.top.v1";
/// Name of the document that `limit` writes.
pub const LIMIT: &str = "manylane.limit.v1";
/// Name of the document that `send` writes.
pub const SEND: &str = "manylane.send.v1";

/// One result: what was measured, on what, how, and every figure.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Document<S, R> {
    /// `manylane.NAME.vN`.
    pub schema: String,
    /// The machine that ran it.
    pub machine: Machine,
    /// The options in force, also those nobody named, and the command line.
    pub settings: S,
    /// The results.
    pub rows: Vec<R>,
}

impl<S, R> Document<S, R> {
    /// A document about this machine.
    pub fn new(schema: &str, settings: S, rows: Vec<R>) -> Self {
        Self { schema: schema.into(), machine: Machine::read(), settings, rows }
    }
}

/// How a benchmark was run: enough to run it again.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BenchSettings {
    /// The command line.
    pub command: String,
    /// When it started, in seconds since 1970.
    pub started_unix: u64,
    /// `loopback` or `testbed`.
    pub setup: String,
    /// The device that the traffic went through, with its queues.
    pub device: String,
    /// Which sender made the traffic.
    pub sender: String,
    /// Processor of the sender.
    pub sender_cpus: Vec<usize>,
    /// Processors that the receiving threads are pinned to, in turn.
    pub receiver_cpus: Vec<usize>,
    /// Numbers of receiving threads that were compared.
    pub threads: Vec<usize>,
    /// Payload sizes in bytes that were compared.
    pub sizes: Vec<usize>,
    /// Receivers that were compared.
    pub receivers: Vec<String>,
    /// Rounds; every receiver is measured once in each.
    pub rounds: usize,
    /// Length of a sample in seconds.
    pub sample_seconds: f64,
    /// Sources that the traffic comes from, each a flow of its own.
    pub flows: usize,
    /// Datagrams that one call may take.
    pub batch: usize,
    /// Receive buffer that was asked for each socket, in bytes.
    pub recv_buffer: usize,
    /// What lanes and `reuseport/*` pause for after a batch that was not full, in microseconds, for each of `threads`.
    #[serde(default)]
    pub linger_micros: Vec<u64>,
    /// The same of `xsk/*` and `lane/xdp`; empty without them.
    #[serde(default)]
    pub xdp_linger_micros: Vec<u64>,
    /// How the datagrams of `lane/*` find their lane, with what does it.
    pub steering: String,
    /// Nanoseconds of an application's own work that every receiver did for each datagram, by a count of steps that was
    /// measured before.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub work_nanos: u64,
    /// Largest share of datagrams that a no-loss rate may lose.
    pub loss_limit: f64,
    /// True for a shortened run.
    pub quick: bool,
    /// What a reader must know before comparing with another run, in plain words.
    pub notes: Vec<String>,
}

fn is_nothing(number: &u64) -> bool {
    *number == 0
}

/// One sample: one receiver, one time span of traffic. In `bench echo` the datagrams sent are requests, and those
/// delivered are the answers that came back to the host that sent.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The round that it was taken in, from 0.
    pub round: usize,
    /// Datagrams per second that the sender really sent.
    pub offered_pps: f64,
    /// Datagrams per second that reached the application.
    pub delivered_pps: f64,
    /// Share of the sent datagrams that did not.
    pub loss: f64,
    /// Nanoseconds of CPU of the receiving threads per delivered datagram.
    pub rx_cpu_ns: f64,
    /// Nanoseconds of CPU of the whole machine, sender and softirqs included, per delivered datagram.
    pub total_cpu_ns: f64,
    /// Datagrams sent.
    pub sent: u64,
    /// Datagrams delivered.
    pub delivered: u64,
    /// Datagrams that the kernel counted as dropped at the receiver's sockets.
    pub kernel_dropped: u64,
    /// Requests that reached the application, answered or not; in `bench echo` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken: Option<u64>,
}

/// One row of `bench rx`, `bench echo` and `bench gso`: figures are medians over the samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BenchRow {
    /// Name of the receiver: `lane/mmsg`, `socket/recvfrom`, …
    pub receiver: String,
    /// Threads that receive.
    pub threads: usize,
    /// Receive queues: sockets for the baselines, lanes for ours.
    pub lanes: usize,
    /// Payload in bytes.
    pub size: usize,
    /// Datagrams per second that the sender really sent.
    pub offered_pps: f64,
    /// Datagrams per second that reached the application.
    pub delivered_pps: f64,
    /// Share of the sent datagrams that did not.
    pub loss: f64,
    /// Nanoseconds of CPU of the receiving threads per delivered datagram.
    pub rx_cpu_ns: f64,
    /// Nanoseconds of CPU of the whole machine per delivered datagram.
    pub total_cpu_ns: f64,
    /// Highest rate with a loss within the limit; null when it was not searched for.
    pub no_loss_pps: Option<f64>,
    /// True when the sender and not the receiver set that rate: the receiver can do at least this.
    pub sender_limited: Option<bool>,
    /// Datagrams per second delivered when twice its own no-loss rate arrives; null when not measured.
    pub goodput_at_double_pps: Option<f64>,
    /// Datagrams per second that were really sent in that measurement: a sender may not reach twice the rate.
    pub offered_at_double_pps: Option<f64>,
    /// The raw samples that the medians were taken of.
    pub samples: Vec<Sample>,
}

impl BenchRow {
    /// A row of the medians of `samples`.
    pub fn of(receiver: &str, threads: usize, lanes: usize, size: usize, samples: Vec<Sample>) -> Self {
        let middle = |value: fn(&Sample) -> f64| median(samples.iter().map(value));
        Self {
            receiver: receiver.into(),
            threads,
            lanes,
            size,
            offered_pps: middle(|sample| sample.offered_pps),
            delivered_pps: middle(|sample| sample.delivered_pps),
            loss: middle(|sample| sample.loss),
            rx_cpu_ns: middle(|sample| sample.rx_cpu_ns),
            total_cpu_ns: middle(|sample| sample.total_cpu_ns),
            no_loss_pps: None,
            sender_limited: None,
            goodput_at_double_pps: None,
            offered_at_double_pps: None,
            samples,
        }
    }
}

/// One sample of `bench batch`: some queues, filled and emptied; or of `bench replies`, where what was delivered is what the kernel
/// took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct BatchSample {
    /// The round that it was taken in, from 0.
    pub round: usize,
    /// Nanoseconds of CPU of the receiving thread per datagram, user and kernel, while it emptied the queues.
    pub rx_cpu_ns: f64,
    /// Datagrams sent.
    pub sent: u64,
    /// Datagrams taken.
    pub delivered: u64,
    /// Receives that it took.
    pub calls: u64,
}

/// One row of `bench batch` or `bench replies`: figures are medians over the samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BatchRow {
    /// Name of the receiver: `lane/mmsg`, `socket/recvmmsg`, …
    pub receiver: String,
    /// Threads that receive: one.
    pub threads: usize,
    /// Receive queues: one.
    pub lanes: usize,
    /// Payload in bytes.
    pub size: usize,
    /// Messages that a call may take.
    pub messages: usize,
    /// Messages that one took on the average.
    pub messages_taken: f64,
    /// Share of the sent datagrams that were not taken.
    pub loss: f64,
    /// Nanoseconds of CPU of the receiving thread per datagram.
    pub rx_cpu_ns: f64,
    /// The raw samples.
    pub samples: Vec<BatchSample>,
}

impl BatchRow {
    /// A row of the medians of `samples`.
    pub fn of(receiver: &str, size: usize, messages: usize, samples: Vec<BatchSample>) -> Self {
        let middle = |value: fn(&BatchSample) -> f64| median(samples.iter().map(value));
        Self {
            receiver: receiver.into(),
            threads: 1,
            lanes: 1,
            size,
            messages,
            messages_taken: middle(|seen| seen.delivered as f64 / seen.calls.max(1) as f64),
            loss: middle(|seen| 1.0 - seen.delivered.min(seen.sent) as f64 / seen.sent.max(1) as f64),
            rx_cpu_ns: middle(|seen| seen.rx_cpu_ns),
            samples,
        }
    }
}

/// The one row of `bench churn`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChurnRow {
    /// Name of the receiver.
    pub receiver: String,
    /// Threads, and lanes, at the start.
    pub threads: usize,
    /// Lanes at the start.
    pub lanes: usize,
    /// Payload in bytes.
    pub size: usize,
    /// Datagrams per second that the sender really sent.
    pub offered_pps: f64,
    /// Datagrams per second that reached the application.
    pub delivered_pps: f64,
    /// Share of the sent datagrams that did not.
    pub loss: f64,
    /// Nanoseconds of CPU of the receiving threads per delivered datagram; null: threads come and go.
    pub rx_cpu_ns: Option<f64>,
    /// Nanoseconds of CPU of the whole machine per delivered datagram.
    pub total_cpu_ns: f64,
    /// Datagrams sent.
    pub sent: u64,
    /// Datagrams delivered.
    pub delivered: u64,
    /// Sent but not delivered, counted after everything came to rest.
    pub lost: u64,
    /// Lanes added while traffic ran.
    pub added: u64,
    /// Lanes removed while traffic ran.
    pub removed: u64,
    /// Milliseconds between two changes.
    pub every_ms: u64,
    /// The same figures as raw samples.
    pub samples: Vec<Sample>,
}

/// One sample of `bench flap`: one event, once.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct FlapSample {
    /// What every sample has. The sender counts as sent what entered the link.
    #[serde(flatten)]
    pub sample: Sample,
    /// Made by the sender, and not taken by the link: it was down.
    pub refused: u64,
    /// Sent and not delivered, counted after everything came to rest.
    pub lost: u64,
    /// Microseconds that the event took.
    pub event_micros: u64,
}

/// One row of `bench flap`: one event beside one receiver. Figures are medians over the samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FlapRow {
    /// What happened: `nothing`, `xdp-opens`, `receiver-link`, …
    pub event: String,
    /// Name of the receiver.
    pub receiver: String,
    /// Threads that receive.
    pub threads: usize,
    /// Receive queues.
    pub lanes: usize,
    /// Payload in bytes.
    pub size: usize,
    /// Datagrams per second that the sender made, also while the link took none.
    pub offered_pps: f64,
    /// Datagrams per second that reached the application.
    pub delivered_pps: f64,
    /// Share of the sent datagrams that did not.
    pub loss: f64,
    /// Nanoseconds of CPU of the receiving threads per delivered datagram.
    pub rx_cpu_ns: f64,
    /// Nanoseconds of CPU of the whole machine per delivered datagram.
    pub total_cpu_ns: f64,
    /// Datagrams that entered the link.
    pub sent: f64,
    /// Made, and not taken by the link: it was down.
    pub refused: f64,
    /// Datagrams delivered.
    pub delivered: f64,
    /// Sent and not delivered.
    pub lost: f64,
    /// The same in the worst sample: medians hide what happens rarely.
    pub lost_most: u64,
    /// Of those lost, what the kernel counted as dropped at the receiver's sockets.
    pub kernel_dropped: f64,
    /// Microseconds that the event took.
    pub event_micros: f64,
    /// The raw samples.
    pub samples: Vec<FlapSample>,
}

impl FlapRow {
    /// A row of the medians of `samples`.
    pub fn of(
        event: &str,
        receiver: &str,
        threads: usize,
        lanes: usize,
        size: usize,
        samples: Vec<FlapSample>,
    ) -> Self {
        let middle = |value: fn(&FlapSample) -> f64| median(samples.iter().map(value));
        Self {
            event: event.into(),
            receiver: receiver.into(),
            threads,
            lanes,
            size,
            offered_pps: middle(|seen| seen.sample.offered_pps),
            delivered_pps: middle(|seen| seen.sample.delivered_pps),
            loss: middle(|seen| seen.sample.loss),
            rx_cpu_ns: middle(|seen| seen.sample.rx_cpu_ns),
            total_cpu_ns: middle(|seen| seen.sample.total_cpu_ns),
            sent: middle(|seen| seen.sample.sent as f64),
            refused: middle(|seen| seen.refused as f64),
            delivered: middle(|seen| seen.sample.delivered as f64),
            lost: middle(|seen| seen.lost as f64),
            lost_most: samples.iter().map(|seen| seen.lost).max().unwrap_or(0),
            kernel_dropped: middle(|seen| seen.sample.kernel_dropped as f64),
            event_micros: middle(|seen| seen.event_micros as f64),
            samples,
        }
    }
}

/// One sample of `bench rtt`: one contender, one stretch of requests. Times count from when a request was due.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RttSample {
    /// What every sample has: sent are the requests that were due, delivered the answers.
    #[serde(flatten)]
    pub sample: Sample,
    /// Nanoseconds that half of the answers took at most.
    pub p50_ns: f64,
    /// Nanoseconds that 90 % of them took at most.
    pub p90_ns: f64,
    /// Nanoseconds that 99 % of them took at most.
    pub p99_ns: f64,
    /// Nanoseconds that 99.9 % of them took at most.
    pub p999_ns: f64,
    /// Nanoseconds that the last one took.
    pub max_ns: f64,
    /// Nanoseconds that the generator was behind its own schedule at most, for 99 % of the requests.
    pub behind_p99_ns: f64,
    /// Processors that the answering thread kept busy, 1 at most.
    pub server_cores: f64,
    /// Processors that were busy on the machine, with the generator, which never sleeps but in `idle`.
    pub machine_cores: f64,
}

/// One row of `bench rtt`: one contender in one mode and placement. Figures are medians over the samples.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RttRow {
    /// Name of the receiver.
    pub receiver: String,
    /// How it waits: `sleep`, `busy-poll`, `spin:1000`, `adaptive`.
    pub wait: String,
    /// Where server, generator and device work: `apart`, `together`, …
    pub placement: String,
    /// `ping-pong`, `open` (a loop at a fixed rate) or `idle`.
    pub mode: String,
    /// Requests per second of an open loop.
    pub rate: Option<f64>,
    /// How requests of an open loop follow each other: `even` or `chance`.
    pub arrivals: String,
    /// Threads that answer.
    pub threads: usize,
    /// Receive queues.
    pub lanes: usize,
    /// Payload in bytes.
    pub size: usize,
    /// Requests per second that were due.
    pub offered_pps: f64,
    /// Answers per second.
    pub delivered_pps: f64,
    /// Share of the requests without an answer.
    pub loss: f64,
    /// Nanoseconds of CPU of the answering thread per answer.
    pub rx_cpu_ns: f64,
    /// Nanoseconds of CPU of the whole machine per answer.
    pub total_cpu_ns: f64,
    /// See [`RttSample`].
    pub p50_ns: f64,
    /// See [`RttSample`].
    pub p90_ns: f64,
    /// See [`RttSample`].
    pub p99_ns: f64,
    /// See [`RttSample`].
    pub p999_ns: f64,
    /// The longest of all samples: medians hide what happens rarely.
    pub max_ns: f64,
    /// See [`RttSample`].
    pub behind_p99_ns: f64,
    /// See [`RttSample`].
    pub server_cores: f64,
    /// See [`RttSample`].
    pub machine_cores: f64,
    /// The raw samples.
    pub samples: Vec<RttSample>,
}

impl RttRow {
    /// A row of the medians of `samples`.
    pub fn of(receiver: &str, size: usize, samples: Vec<RttSample>) -> Self {
        let middle = |value: fn(&RttSample) -> f64| median(samples.iter().map(value));
        Self {
            receiver: receiver.into(),
            threads: 1,
            lanes: 1,
            size,
            offered_pps: middle(|seen| seen.sample.offered_pps),
            delivered_pps: middle(|seen| seen.sample.delivered_pps),
            loss: middle(|seen| seen.sample.loss),
            rx_cpu_ns: middle(|seen| seen.sample.rx_cpu_ns),
            total_cpu_ns: middle(|seen| seen.sample.total_cpu_ns),
            p50_ns: middle(|seen| seen.p50_ns),
            p90_ns: middle(|seen| seen.p90_ns),
            p99_ns: middle(|seen| seen.p99_ns),
            p999_ns: middle(|seen| seen.p999_ns),
            max_ns: samples.iter().map(|seen| seen.max_ns).fold(0.0, f64::max),
            behind_p99_ns: middle(|seen| seen.behind_p99_ns),
            server_cores: middle(|seen| seen.server_cores),
            machine_cores: middle(|seen| seen.machine_cores),
            samples,
            ..Self::default()
        }
    }

    /// Receiver and policy.
    pub fn contender(&self) -> String {
        format!("{}+{}", self.receiver, self.wait)
    }

    /// The mode, with its rate.
    pub fn load(&self) -> String {
        self.rate.map_or_else(|| self.mode.clone(), |rate| format!("{}k/s", rate / 1e3))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(round: usize, rx_cpu_ns: f64) -> Sample {
        Sample {
            round,
            offered_pps: 1000.0,
            delivered_pps: 999.0,
            loss: 0.001,
            rx_cpu_ns,
            total_cpu_ns: 2.0 * rx_cpu_ns,
            sent: 1000,
            delivered: 999,
            kernel_dropped: 1,
            taken: None,
        }
    }

    #[test]
    fn a_row_is_the_median_of_its_samples() {
        let samples = [30.0, 10.0, 20.0].iter().enumerate().map(|(n, ns)| sample(n, *ns)).collect();
        let row = BenchRow::of("lane/mmsg", 2, 2, 10, samples);
        assert_eq!(row.rx_cpu_ns, 20.0);
        assert_eq!(row.total_cpu_ns, 40.0);
        assert_eq!(row.samples.len(), 3);
    }

    #[test]
    fn documents_survive_the_round_trip() {
        let mut row = BenchRow::of("lane/mmsg", 8, 8, 10, vec![sample(0, 512.5)]);
        row.no_loss_pps = Some(123_456.0);
        let settings = BenchSettings { command: "manylane bench rx".into(), ..Default::default() };
        let document = Document::new(BENCH_RX, settings, vec![row]);
        let text = serde_json::to_string(&document).unwrap();
        let again: Document<BenchSettings, BenchRow> = serde_json::from_str(&text).unwrap();
        assert_eq!(again, document);
    }

    #[test]
    fn the_form_that_readers_rely_on() {
        let row = BenchRow::of("socket/recvfrom", 1, 1, 10, vec![sample(0, 1.0)]);
        let document = Document::new(BENCH_RX, BenchSettings::default(), vec![row]);
        let value = serde_json::to_value(&document).unwrap();
        assert_eq!(value["schema"], "manylane.bench.rx.v1");
        for name in ["cpus", "model", "kernel"] {
            assert!(!value["machine"][name].is_null(), "machine.{name}");
        }
        let row = &value["rows"][0];
        for name in [
            "receiver",
            "threads",
            "lanes",
            "size",
            "offered_pps",
            "delivered_pps",
            "loss",
            "rx_cpu_ns",
            "total_cpu_ns",
            "samples",
        ] {
            assert!(!row[name].is_null(), "rows[0].{name}");
        }
        // Not measured is said, not left out.
        assert!(row.as_object().unwrap().contains_key("no_loss_pps"));
        assert!(row["no_loss_pps"].is_null() && row["goodput_at_double_pps"].is_null());
    }
}
