//! The rows of `bench rtt`.

use serde::{Deserialize, Serialize};

use super::{Metrics, Sample};
use crate::stats::median;

/// What came of one stretch of requests, or of several: how long answers took, and what that cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct RttMetrics {
    /// Nanoseconds that half of the answers took at most.
    pub p50_ns: f64,
    /// Nanoseconds that 90 % of them took at most.
    pub p90_ns: f64,
    /// Nanoseconds that 99 % of them took at most.
    pub p99_ns: f64,
    /// Nanoseconds that 99.9 % of them took at most.
    pub p999_ns: f64,
    /// Nanoseconds that the last one took; of several stretches the longest of all: medians hide
    /// what happens rarely.
    pub max_ns: f64,
    /// Nanoseconds that the generator was behind its own schedule at most, for 99 % of the
    /// requests.
    pub behind_p99_ns: f64,
    /// Processors that the answering thread kept busy, 1 at most.
    pub server_cores: f64,
    /// Processors that were busy on the machine, with the generator, which never sleeps but in
    /// `idle`.
    pub machine_cores: f64,
}

impl RttMetrics {
    /// Of several stretches: medians, but for the longest time.
    fn from_samples(samples: &[RttSample]) -> Self {
        let middle = |value: fn(&Self) -> f64| median(samples.iter().map(|seen| value(&seen.rtt)));
        Self {
            p50_ns: middle(|seen| seen.p50_ns),
            p90_ns: middle(|seen| seen.p90_ns),
            p99_ns: middle(|seen| seen.p99_ns),
            p999_ns: middle(|seen| seen.p999_ns),
            max_ns: samples.iter().map(|seen| seen.rtt.max_ns).fold(0.0, f64::max),
            behind_p99_ns: middle(|seen| seen.behind_p99_ns),
            server_cores: middle(|seen| seen.server_cores),
            machine_cores: middle(|seen| seen.machine_cores),
        }
    }
}

/// One sample of `bench rtt`: one contender, one stretch of requests. Times count from when a
/// request was due.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RttSample {
    /// What every sample has: sent are the requests that were due, delivered the answers.
    #[serde(flatten)]
    pub sample: Sample,
    /// What came of it.
    #[serde(flatten)]
    pub rtt: RttMetrics,
}

/// One row of `bench rtt`: one contender in one mode and placement. Figures are medians over the
/// samples.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RttRow {
    /// What every row has.
    #[serde(flatten)]
    pub figures: Metrics,
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
    /// The medians.
    #[serde(flatten)]
    pub rtt: RttMetrics,
    /// The raw samples.
    pub samples: Vec<RttSample>,
}

impl RttRow {
    /// A row of the medians of `samples`.
    pub fn from_samples(receiver: &str, size: usize, samples: Vec<RttSample>) -> Self {
        Self {
            figures: Metrics::from_samples(receiver, 1, 1, size, samples.iter().map(|seen| &seen.sample)),
            rtt: RttMetrics::from_samples(&samples),
            samples,
            ..Self::default()
        }
    }

    /// Receiver and policy.
    pub fn contender(&self) -> String {
        format!("{}+{}", self.figures.receiver, self.wait)
    }

    /// The mode, with its rate.
    pub fn load(&self) -> String {
        self.rate.map_or_else(|| self.mode.clone(), |rate| format!("{}k/s", rate / 1e3))
    }
}
