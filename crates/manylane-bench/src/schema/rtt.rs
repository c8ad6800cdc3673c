//! The rows of `bench rtt`.

use serde::{Deserialize, Serialize};

use super::{Metrics, Sample};
use crate::stats::median;

/// Result of one series of requests, or of several: round-trip times, and the cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct RttMetrics {
    /// Median in nanoseconds.
    pub p50_ns: f64,
    /// 90th percentile in nanoseconds.
    pub p90_ns: f64,
    /// 99th percentile in nanoseconds.
    pub p99_ns: f64,
    /// 99.9th percentile in nanoseconds.
    pub p999_ns: f64,
    /// Maximum in nanoseconds; of several series the maximum of all, because medians hide rare
    /// events.
    pub max_ns: f64,
    /// 99th percentile of the generator's delay behind its own schedule, in nanoseconds.
    pub behind_p99_ns: f64,
    /// Processors that the answering thread kept busy, at most 1.
    pub server_cores: f64,
    /// Busy processors of the machine, including the generator, which sleeps only in `idle`.
    pub machine_cores: f64,
}

impl RttMetrics {
    /// Of several series: medians, except the maximum.
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
    /// Common fields: sent are the requests that were due, delivered are the replies.
    #[serde(flatten)]
    pub sample: Sample,
    /// The result.
    #[serde(flatten)]
    pub rtt: RttMetrics,
}

/// One row of `bench rtt`: one contender in one mode and placement. Figures are medians over the
/// samples.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RttRow {
    /// Common fields.
    #[serde(flatten)]
    pub figures: Metrics,
    /// Wait policy: `sleep`, `busy-poll`, `spin:1000`, `adaptive`.
    pub wait: String,
    /// Placement of server, generator and device work: `apart`, `together`, …
    pub placement: String,
    /// `ping-pong`, `open` (a loop at a fixed rate) or `idle`.
    pub mode: String,
    /// Requests per second of an open loop.
    pub rate: Option<f64>,
    /// Intervals of an open loop: `even` or `chance`.
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
