//! The documents that `--json` prints. A reader may rely on every field here for as long as the
//! number at the end of the schema's name stays the same.

mod batch;
mod churn;
mod flap;
mod flood;
mod rtt;
mod rx;

use std::time::Duration;

pub use batch::{BatchRow, BatchSample};
pub use churn::ChurnRow;
pub use flap::{FlapRow, FlapSample};
pub use flood::{
    FloodClients, FloodGap, FloodMemory, FloodPauses, FloodRow, FloodSample, PAUSE_BINS, SENDER_CPU_PROGRAM,
};
pub use manylane_measure::Document;
pub use rtt::{RttMetrics, RttRow, RttSample};
pub use rx::BenchRow;
use serde::Serialize;

pub use crate::settings::BenchSettings;
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
/// Name of the document that `bench flood` writes.
pub const BENCH_FLOOD: &str = "manylane.bench.flood.v1";
/// Name of the document that `bench rtt` writes.
pub const BENCH_RTT: &str = "manylane.bench.rtt.v1";

/// One sample: one receiver, one time span of traffic. In `bench echo`, the datagrams sent are
/// requests, and those delivered are the replies that reached the sending host.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Sample {
    /// The round that it was taken in, from 0.
    pub round: usize,
    /// Datagrams per second that the sender really sent.
    pub offered_pps: f64,
    /// Datagrams per second that reached the application.
    pub delivered_pps: f64,
    /// Share of the sent datagrams that did not reach it.
    pub loss: f64,
    /// Nanoseconds of CPU of the receiving threads per delivered datagram.
    pub rx_cpu_ns: f64,
    /// Nanoseconds of CPU of the whole machine, sender and softirqs included, per delivered
    /// datagram.
    pub total_cpu_ns: f64,
    /// Datagrams sent.
    pub sent: u64,
    /// Datagrams delivered.
    pub delivered: u64,
    /// Datagrams that the kernel counted as dropped at the receiver's sockets.
    pub kernel_dropped: u64,
    /// Requests that reached the application, answered or not; in `bench echo` only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub received: Option<u64>,
}

impl Sample {
    /// A sample of `elapsed`, with the CPU time of the receiving threads and of the machine.
    #[must_use]
    pub fn from_totals(
        round: usize,
        sent: u64,
        delivered: u64,
        elapsed: Duration,
        [rx_cpu, busy]: [Duration; 2],
        kernel_dropped: u64,
    ) -> Self {
        let per_second = |count: u64| count as f64 / elapsed.as_secs_f64().max(1e-9);
        let per_datagram = |time: Duration| time.as_nanos() as f64 / delivered.max(1) as f64;
        Self {
            round,
            offered_pps: per_second(sent),
            delivered_pps: per_second(delivered),
            loss: sent.saturating_sub(delivered) as f64 / sent.max(1) as f64,
            rx_cpu_ns: per_datagram(rx_cpu),
            total_cpu_ns: per_datagram(busy),
            sent,
            delivered,
            kernel_dropped,
            received: None,
        }
    }
}

/// Common fields of the rows of traffic benchmarks: the receiver, its parameters, and the medians
/// of its samples.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Metrics {
    /// Name of the receiver: `lane/mmsg`, `socket/recvfrom`, …
    pub receiver: String,
    /// Threads that receive.
    pub threads: usize,
    /// Receive queues: sockets for the baselines, lanes for ours.
    pub lanes: usize,
    /// Payload in bytes.
    pub size: usize,
    /// See [`Sample`].
    pub offered_pps: f64,
    /// See [`Sample`].
    pub delivered_pps: f64,
    /// See [`Sample`].
    pub loss: f64,
    /// See [`Sample`].
    pub rx_cpu_ns: f64,
    /// See [`Sample`].
    pub total_cpu_ns: f64,
}

impl Metrics {
    /// The medians of `samples`.
    pub fn from_samples<'a>(
        receiver: &str,
        threads: usize,
        lanes: usize,
        size: usize,
        samples: impl Iterator<Item = &'a Sample>,
    ) -> Self {
        let samples: Vec<_> = samples.collect();
        let middle = |value: fn(&Sample) -> f64| median(samples.iter().map(|sample| value(sample)));
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
        }
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
            received: None,
        }
    }

    #[test]
    fn a_row_is_the_median_of_its_samples() {
        let samples = [30.0, 10.0, 20.0].iter().enumerate().map(|(n, ns)| sample(n, *ns)).collect();
        let row = BenchRow::from_samples("lane/mmsg", 2, 2, 10, samples);
        assert_eq!(row.figures.rx_cpu_ns, 20.0);
        assert_eq!(row.figures.total_cpu_ns, 40.0);
        assert_eq!(row.samples.len(), 3);
    }

    #[test]
    fn the_document_schema_is_stable() {
        let row = BenchRow::from_samples("socket/recvfrom", 1, 1, 10, vec![sample(0, 1.0)]);
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
        // Fields without a value are null, not left out.
        assert!(row.as_object().unwrap().contains_key("no_loss_pps"));
        assert!(row["no_loss_pps"].is_null() && row["goodput_at_double_pps"].is_null());
    }
}
