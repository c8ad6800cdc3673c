//! The rows of `bench rx`, `bench echo` and `bench gso`.

use manylane_measure::format_number;
use serde::Serialize;

use super::sample::{Metrics, Sample};
use crate::report::{Figure, Figures, Grid};
use crate::stats::{format_quartiles, format_ratio};

/// One row: figures are medians over the samples.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct BenchRow {
    /// Common fields.
    #[serde(flatten)]
    pub figures: Metrics,
    /// Highest sustained rate: see [`search`](crate::search); null when it was not searched for. An
    /// estimate in quick runs.
    pub sustained_pps: Option<f64>,
    /// True if the sender limited that rate: the receiver can handle at least this.
    pub sender_limited: Option<bool>,
    /// Datagrams per second delivered when twice its own sustained rate arrives; null when not
    /// measured.
    pub goodput_at_double_pps: Option<f64>,
    /// Datagrams per second that were really sent in that measurement, because the sender may not
    /// reach twice the rate.
    pub offered_at_double_pps: Option<f64>,
    /// The raw samples of the medians.
    pub samples: Vec<Sample>,
}

impl BenchRow {
    /// A row of the medians of `samples`.
    pub fn from_samples(
        receiver: &str,
        threads: usize,
        lanes: usize,
        size: usize,
        samples: Vec<Sample>,
    ) -> Self {
        let figures = Metrics::from_samples(receiver, threads, lanes, size, samples.iter());
        Self { figures, samples, ..Self::default() }
    }

    fn costs(&self) -> Vec<f64> {
        self.samples.iter().map(|sample| sample.rx_cpu_ns).collect()
    }

    fn is_lane(&self) -> bool {
        self.figures.receiver.starts_with("lane/")
    }

    /// The cheapest baseline of a lane with as many threads: a socket for each thread, as lanes
    /// have, or the rings of a queue.
    fn baseline<'a>(&self, all: &'a [Self]) -> Option<&'a Self> {
        let names: &[&str] = match &*self.figures.receiver {
            "lane/xdp" => &["xsk/raw"],
            _ => &["reuseport/recvmmsg", "reuseport/gro"],
        };
        let key = |row: &Self| (row.figures.threads, row.figures.size);
        let is_baseline = |row: &&Self| names.contains(&&*row.figures.receiver) && key(row) == key(self);
        let cheaper = |a: &&Self, b: &&Self| a.figures.rx_cpu_ns.total_cmp(&b.figures.rx_cpu_ns);
        all.iter().filter(is_baseline).min_by(cheaper).filter(|_| self.is_lane())
    }
}

impl Figures for BenchRow {
    const COLUMNS: &'static [&'static str] = &[
        "receiver",
        "threads",
        "bytes",
        "offered/s",
        "loss %",
        "receiver ns",
        "quartiles",
        "ratio (p)",
        "of",
        "machine ns",
        "sustained/s",
        "at twice/s",
    ];

    fn cells(&self, all: &[Self]) -> Vec<String> {
        let optional = |value: Option<f64>| value.map_or_else(|| "–".into(), format_number);
        let limited = if self.sender_limited == Some(true) { "≥ " } else { "" };
        let base = self.baseline(all);
        vec![
            self.figures.receiver.clone(),
            self.figures.threads.to_string(),
            self.figures.size.to_string(),
            format_number(self.figures.offered_pps),
            format!("{:.3}", self.figures.loss * 100.0),
            format!("{:.0}", self.figures.rx_cpu_ns),
            format_quartiles(self.costs(), 0),
            base.map_or_else(String::new, |base| format_ratio(&self.costs(), &base.costs())),
            base.map_or_else(String::new, |base| base.figures.receiver.clone()),
            format!("{:.0}", self.figures.total_cpu_ns),
            format!("{limited}{}", optional(self.sustained_pps)),
            optional(self.goodput_at_double_pps),
        ]
    }

    fn section(&self) -> String {
        format!("Datagrams of {} bytes", self.figures.size)
    }

    fn figures(rows: &[&Self]) -> Vec<Figure> {
        let is_echo = rows.iter().flat_map(|row| &row.samples).any(|sample| sample.received.is_some());
        let unit = if is_echo { "answered request" } else { "datagram" };
        let key = |row: &Self| (row.figures.receiver.clone(), row.figures.threads.to_string());
        let mut rows = rows.to_vec();
        rows.sort_by_key(|row| row.figures.threads);
        let by_threads = Grid::new(&rows, "threads", key);
        let of = |row: &Self, value: fn(&Sample) -> f64| row.samples.iter().map(value).collect();
        let ns = format!("ns per {unit}");
        vec![
            by_threads.lines(&format!("Receiver CPU per {unit}"), "Lower is better.", &ns, |row| {
                of(row, |sample| sample.rx_cpu_ns)
            }),
            by_threads.lines(
                &format!("CPU of the whole machine per {unit}"),
                "Sender, softirqs and receivers together. Lower is better.",
                &ns,
                |row| of(row, |sample| sample.total_cpu_ns),
            ),
            by_threads.bars(
                "Sustained rate, and goodput at twice that rate",
                "Bars: nothing lost, and a queue of at most 5 ms, for two seconds (in quick runs less). Dark line: at twice that rate. Higher is better.",
                &format!("{unit}s per second"),
                |row| (row.sustained_pps, row.goodput_at_double_pps),
            ),
        ]
    }
}
