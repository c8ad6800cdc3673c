//! The rows of `bench flap`.

use manylane_measure::format_number;
use serde::Serialize;

use super::sample::{Metrics, Sample};
use crate::report::{Figure, Figures, Grid};
use crate::stats::median;

/// One sample of `bench flap`: one event, once.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct FlapSample {
    /// Common fields. Datagrams that entered the link count as sent.
    #[serde(flatten)]
    pub sample: Sample,
    /// Generated, and not accepted by the link, which was down.
    pub refused: u64,
    /// Sent and not delivered, counted after all traffic has ended.
    pub lost: u64,
    /// Microseconds that the event took.
    pub event_micros: u64,
}

/// One row of `bench flap`: one event beside one receiver. Figures are medians over the samples.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FlapRow {
    /// The event: `nothing`, `xdp-opens`, `receiver-link`, …
    pub event: String,
    /// Common fields.
    #[serde(flatten)]
    pub figures: Metrics,
    /// Datagrams that entered the link.
    pub sent: f64,
    /// Generated, and not accepted by the link, which was down.
    pub refused: f64,
    /// Datagrams delivered.
    pub delivered: f64,
    /// Sent and not delivered.
    pub lost: f64,
    /// The same in the worst sample, because medians hide rare losses.
    pub lost_max: u64,
    /// Those of the lost datagrams that the kernel counted as dropped at the receiver's sockets.
    pub kernel_dropped: f64,
    /// Microseconds that the event took.
    pub event_micros: f64,
    /// The raw samples.
    pub samples: Vec<FlapSample>,
}

impl FlapRow {
    /// A row of the medians of `samples`.
    pub fn from_samples(
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
            figures: Metrics::from_samples(
                receiver,
                threads,
                lanes,
                size,
                samples.iter().map(|seen| &seen.sample),
            ),
            sent: middle(|seen| seen.sample.sent as f64),
            refused: middle(|seen| seen.refused as f64),
            delivered: middle(|seen| seen.sample.delivered as f64),
            lost: middle(|seen| seen.lost as f64),
            lost_max: samples.iter().map(|seen| seen.lost).max().unwrap_or(0),
            kernel_dropped: middle(|seen| seen.sample.kernel_dropped as f64),
            event_micros: middle(|seen| seen.event_micros as f64),
            samples,
        }
    }
}

impl Figures for FlapRow {
    const COLUMNS: &'static [&'static str] = &[
        "event",
        "receiver",
        "threads",
        "bytes",
        "offered/s",
        "sent",
        "refused",
        "delivered",
        "lost",
        "worst loss",
        "kernel dropped",
        "event ms",
    ];

    fn cells(&self, _all: &[Self]) -> Vec<String> {
        let Metrics { receiver, threads, size, offered_pps, .. } = &self.figures;
        let lost_max = self.lost_max as f64;
        let counts = [self.sent, self.refused, self.delivered, self.lost, lost_max, self.kernel_dropped];
        let mut cells = vec![self.event.clone(), receiver.clone(), threads.to_string(), size.to_string()];
        cells.push(format_number(*offered_pps));
        cells.extend(counts.map(|count| format!("{count:.0}")));
        cells.push(format!("{:.1}", self.event_micros / 1e3));
        cells
    }

    fn section(&self) -> String {
        format!("{} threads, datagrams of {} bytes", self.figures.threads, self.figures.size)
    }

    fn figures(rows: &[&Self]) -> Vec<Figure> {
        let by_event =
            Grid::new(rows, "event", |row: &Self| (row.figures.receiver.clone(), row.event.clone()));
        vec![
            by_event.bars(
                "Datagrams that entered the link and were not delivered",
                "Dark line: the worst sample. Lower is better.",
                "datagrams",
                |row| (Some(row.lost), Some(row.lost_max as f64)),
            ),
            by_event.lines("Length of the event", "A link stays down for 20 ms of it.", "ms", |row| {
                row.samples.iter().map(|seen| seen.event_micros as f64 / 1e3).collect()
            }),
        ]
    }
}
