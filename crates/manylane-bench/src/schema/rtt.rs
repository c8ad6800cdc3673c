//! The rows of `bench rtt`.

use serde::Serialize;

use super::sample::{Metrics, Sample};
use crate::report::{Figure, Figures, Grid};
use crate::stats::{distinct, format_quartiles, format_ratio, median};

/// Result of one series of requests, or of several: round-trip times and cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
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
    /// CPUs that the answering thread kept busy, at most 1.
    pub server_cores: f64,
    /// Busy CPUs of the machine, including the generator, which sleeps only in `idle`.
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
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct RttSample {
    /// Common fields: sent are the requests that were due, delivered are the replies.
    #[serde(flatten)]
    pub sample: Sample,
    /// The result.
    #[serde(flatten)]
    pub rtt: RttMetrics,
}

/// One row of `bench rtt`: one contender in one mode and CPU layout. Figures are medians over
/// the samples.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RttRow {
    /// Common fields.
    #[serde(flatten)]
    pub figures: Metrics,
    /// Wait policy: `sleep`, `busy-poll`, `spin:1000`, `adaptive`.
    pub wait: String,
    /// CPU layout of server, generator and device work: `apart`, `together`, …
    pub cpu_layout: String,
    /// `ping-pong`, `open` (a loop at a fixed rate) or `idle`.
    pub mode: String,
    /// Requests per second of an open loop.
    pub rate: Option<f64>,
    /// Intervals of an open loop: `even` or `poisson`.
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

    fn samples_of(&self, value: fn(&RttSample) -> f64) -> Vec<f64> {
        self.samples.iter().map(value).collect()
    }
}

/// The contender that all are compared with, as most servers work this way.
const BASELINE: &str = "socket/recvfrom+sleep";

impl Figures for RttRow {
    const COLUMNS: &'static [&'static str] = &[
        "contender",
        "CPU layout",
        "load",
        "bytes",
        "loss %",
        "p50 µs",
        "p90",
        "p99",
        "quartiles",
        "p99 ratio (p)",
        "p99.9",
        "max",
        "behind p99",
        "server CPUs",
        "machine CPUs",
    ];

    fn cells(&self, all: &[Self]) -> Vec<String> {
        let is_idle = self.mode == "idle";
        let micros = |nanos: f64| if is_idle { "–".into() } else { format!("{:.1}", nanos / 1e3) };
        let key = |row: &Self| (row.cpu_layout.clone(), row.load(), row.figures.size);
        let base = all.iter().find(|row| row.contender() == BASELINE && key(row) == key(self));
        let p99 = |row: &Self| row.samples_of(|sample| sample.rtt.p99_ns / 1e3);
        let base = base.filter(|base| !is_idle && base.contender() != self.contender());
        vec![
            self.contender(),
            self.cpu_layout.clone(),
            self.load(),
            self.figures.size.to_string(),
            format!("{:.3}", self.figures.loss * 100.0),
            micros(self.rtt.p50_ns),
            micros(self.rtt.p90_ns),
            micros(self.rtt.p99_ns),
            if is_idle { "–".into() } else { format_quartiles(p99(self), 1) },
            base.map_or_else(String::new, |base| format_ratio(&p99(self), &p99(base))),
            micros(self.rtt.p999_ns),
            micros(self.rtt.max_ns),
            micros(self.rtt.behind_p99_ns),
            format!("{:.3}", self.rtt.server_cores),
            format!("{:.3}", self.rtt.machine_cores),
        ]
    }

    fn section(&self) -> String {
        format!("{}, requests of {} bytes", self.cpu_layout, self.figures.size)
    }

    /// Figures for each receiver, with the baseline beside it.
    fn figures(rows: &[&Self]) -> Vec<Figure> {
        let mut figures = Vec::new();
        for receiver in distinct(rows.iter().map(|row| row.figures.receiver.clone())) {
            let is_shown = |row: &&&Self| row.figures.receiver == receiver || row.contender() == BASELINE;
            let shown: Vec<&Self> = rows.iter().filter(is_shown).copied().collect();
            let busy: Vec<&Self> = shown.iter().copied().filter(|row| row.mode != "idle").collect();
            let key = |row: &Self| (row.contender(), row.load());
            let times = Grid::new(&busy, "requests", key);
            let caption = "Counted from when a request was due. Lower is better.";
            let title = |what: &str| format!("{receiver}: {what}");
            figures.extend([
                times.lines(&title("median of the round-trip time (p50)"), caption, "µs", |row| {
                    row.samples_of(|sample| sample.rtt.p50_ns / 1e3)
                }),
                times.lines(&title("99th percentile of the round-trip time"), caption, "µs", |row| {
                    row.samples_of(|sample| sample.rtt.p99_ns / 1e3)
                }),
                Grid::new(&shown, "requests", key).lines(
                    &title("CPU time of the answering thread, in CPUs"),
                    "Lower is better.",
                    "CPUs",
                    |row| row.samples_of(|sample| sample.rtt.server_cores),
                ),
            ]);
        }
        figures
    }
}
