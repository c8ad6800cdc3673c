//! The rows of `bench flap`.

use serde::{Deserialize, Serialize};

use super::{Metrics, Sample};
use crate::stats::median;

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
    /// What every row has.
    #[serde(flatten)]
    pub figures: Metrics,
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
            lost_most: samples.iter().map(|seen| seen.lost).max().unwrap_or(0),
            kernel_dropped: middle(|seen| seen.sample.kernel_dropped as f64),
            event_micros: middle(|seen| seen.event_micros as f64),
            samples,
        }
    }
}
