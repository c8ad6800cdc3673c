//! The row of `bench churn`.

use manylane_measure::format_number;
use serde::Serialize;

use super::sample::{Metrics, Sample};
use crate::report::{Figure, Figures, Grid};

/// The one row of `bench churn`; threads and lanes are those at the start.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChurnRow {
    /// Common fields.
    #[serde(flatten)]
    pub figures: Metrics,
    /// Datagrams sent.
    pub sent: u64,
    /// Datagrams delivered.
    pub delivered: u64,
    /// Sent but not delivered, counted after all traffic has ended.
    pub lost: u64,
    /// Lanes added while traffic ran.
    pub added: u64,
    /// Lanes removed while traffic ran.
    pub removed: u64,
    /// Milliseconds between two changes.
    pub change_interval_ms: u64,
    /// The same figures as raw samples.
    pub samples: Vec<Sample>,
}

impl ChurnRow {
    fn kernel_dropped(&self) -> u64 {
        self.samples.iter().map(|sample| sample.kernel_dropped).sum()
    }
}

impl Figures for ChurnRow {
    const COLUMNS: &'static [&'static str] = &[
        "receiver",
        "lanes",
        "bytes",
        "offered/s",
        "sent",
        "delivered",
        "lost",
        "kernel dropped",
        "added",
        "removed",
        "every ms",
    ];

    fn cells(&self, _all: &[Self]) -> Vec<String> {
        let Metrics { receiver, lanes, size, offered_pps, .. } = &self.figures;
        let dropped = self.kernel_dropped();
        let counts = [
            self.sent,
            self.delivered,
            self.lost,
            dropped,
            self.added,
            self.removed,
            self.change_interval_ms,
        ];
        let first = [receiver.clone(), lanes.to_string(), size.to_string(), format_number(*offered_pps)];
        first.into_iter().chain(counts.map(|count| count.to_string())).collect()
    }

    fn section(&self) -> String {
        format!("Datagrams of {} bytes", self.figures.size)
    }

    fn figures(rows: &[&Self]) -> Vec<Figure> {
        let by_lanes = Grid::new(rows, "lanes at the start", |row: &Self| {
            (row.figures.receiver.clone(), row.figures.lanes.to_string())
        });
        vec![by_lanes.bars(
            "Datagrams sent and not delivered",
            "Dark line: those that the kernel dropped at a full queue.",
            "datagrams",
            |row| (Some(row.lost as f64), Some(row.kernel_dropped() as f64)),
        )]
    }
}
