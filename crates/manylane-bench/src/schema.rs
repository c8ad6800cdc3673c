//! The documents that `--json` prints. From the first release on, a reader may rely on every field
//! here for as long as the number at the end of the schema's name stays the same.

mod batch;
mod churn;
mod flap;
mod flood;
mod proxy;
mod rtt;
mod rx;
mod sample;

pub use batch::{BatchRow, BatchSample};
pub use churn::ChurnRow;
pub use flap::{FlapRow, FlapSample};
pub use flood::{
    FloodClients, FloodGap, FloodMemory, FloodPauses, FloodRow, FloodSample, PAUSE_BINS, SENDER_CPU_PROGRAM,
};
pub use manylane_measure::Document;
pub use proxy::{ProxyRow, ProxySample};
pub use rtt::{RttMetrics, RttRow, RttSample};
pub use rx::BenchRow;
pub use sample::{Metrics, Sample};

pub use crate::settings::BenchSettings;

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
/// Name of the document that `bench proxy` writes.
pub const BENCH_PROXY: &str = "manylane.bench.proxy.v1";
/// Name of the document that `bench rtt` writes.
pub const BENCH_RTT: &str = "manylane.bench.rtt.v1";

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(round: usize, rx_cpu_ns: f64) -> Sample {
        Sample {
            queued_at_end: 0,
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
        assert!(row.as_object().unwrap().contains_key("sustained_pps"));
        assert!(row["sustained_pps"].is_null() && row["goodput_at_double_pps"].is_null());
    }
}
