//! The rows of `bench flood`.

use serde::{Deserialize, Serialize};

use super::{Metrics, Sample};
use crate::stats::Summary;

/// Name of the document that `bench flood` writes.
pub const BENCH_FLOOD: &str = "manylane.bench.flood.v1";

/// One sample of `bench flood`: one server, one time span. The datagrams sent are the flood and
/// the requests of regular clients.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FloodSample {
    /// Common fields.
    #[serde(flatten)]
    pub sample: Sample,
    /// Datagrams that the limit dropped.
    pub limited: u64,
    /// Datagrams that found the ring of a device's queue full.
    pub xsk_dropped: u64,
    /// Results of regular clients, in part `clients`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clients: Option<FloodClients>,
    /// Memory in each second, in part `sources`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<FloodMemory>,
    /// Pauses of threads, in parts `sources` and `program`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pauses: Vec<FloodPauses>,
}

impl FloodSample {
    /// The pauses of `who`.
    #[must_use]
    pub fn pauses_of(&self, who: &str) -> Option<&FloodPauses> {
        self.pauses.iter().find(|pauses| pauses.who == who)
    }
}

/// Regular clients beside a flood.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct FloodClients {
    /// Requests that were due.
    pub asked: u64,
    /// Replies in time.
    pub answered: u64,
    /// Median time from when a request was due to its reply, in milliseconds.
    pub p50_ms: f64,
    /// The 99th percentile of that.
    pub p99_ms: f64,
}

impl FloodClients {
    /// Share of the requests that were answered.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.answered as f64 / self.asked.max(1) as f64
    }
}

/// Memory while there are new sources.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FloodMemory {
    /// Number of new sources.
    pub new_sources: u64,
    /// Memory in KiB of the serving process, with sender and observers, at the end of each second.
    pub rss_kib: Vec<u64>,
    /// KiB of the kernel's own objects (`Slab`) of the whole machine, at the same moments.
    pub slab_kib: Vec<u64>,
}

/// Bins of [`FloodPauses::histogram`].
pub const PAUSE_BINS: usize = 24;

/// Pauses of a thread.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FloodPauses {
    /// `program` (a thread that only looks at the clock, on the lane's processor),
    /// `program beside the sender` (on that one's), `lane` (between two calls of its closure),
    /// `observer` (a thread that sleeps 100 µs again and again; how late it wakes), `sender`
    /// (between two looks at its schedule).
    pub who: String,
    /// Its processor.
    pub cpu: usize,
    /// Length of the observation in seconds.
    pub seconds: f64,
    /// The longest pause in milliseconds.
    pub longest_ms: f64,
    /// The longest pause without stolen time; of `program` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest_unstolen_ms: Option<f64>,
    /// The longest pause without stolen time and without the time of the flood generator (`program
    /// beside the sender`) or of the lane (`program`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest_apart_ms: Option<f64>,
    /// Pauses of more than a millisecond.
    pub over_1ms: u64,
    /// Pauses of more than ten milliseconds.
    pub over_10ms: u64,
    /// Share of the time that the thread ran; of `program` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// Stolen time of this processor in milliseconds (`steal` in `/proc/stat`, in steps of 10 ms).
    pub steal_ms: f64,
    /// Histogram of the pauses: below 1 µs, then up to 2, 4, 8 µs and so on; the last bin has all
    /// longer ones.
    pub histogram: Vec<u64>,
    /// All pauses of more than a millisecond with their parts; of `program` only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub apart: Vec<FloodGap>,
}

impl FloodPauses {
    /// Pauses of more than a millisecond in a second.
    #[must_use]
    pub fn over_1ms_per_second(&self) -> f64 {
        self.over_1ms as f64 / self.seconds.max(1e-9)
    }
}

/// One pause of a program that is always runnable, with its parts. The remainder is time of
/// interrupts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct FloodGap {
    /// Total length.
    pub ms: f64,
    /// Other threads ran on the processor (`run_delay`), including stolen time meanwhile.
    pub waited_ms: f64,
    /// The hypervisor had taken the processor.
    pub stolen_ms: f64,
    /// Part of `waited_ms`: the flood generator ran, including the receive work for its frames in
    /// its context.
    #[serde(default)]
    pub sender_ms: f64,
    /// Part of `waited_ms`, on the lane's processor: the lane's own thread ran.
    #[serde(default)]
    pub lane_ms: f64,
}

/// One row of `bench flood`: figures are medians over the samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FloodRow {
    /// `clients`, `sources` or `program`.
    pub part: String,
    /// `no-flood`, `no-limit`, `limit`, `kernel-sockets`, `busy-thread` (no flood, but a thread
    /// that spins in place of the generator); of `sources`, `one-source`, `new-sources`.
    pub variant: String,
    /// Common fields.
    #[serde(flatten)]
    pub figures: Metrics,
    /// Share of the requests of regular clients that were answered.
    pub answered: Option<f64>,
    /// The longest pause in milliseconds: of `program` on the lane's processor, in part `sources`
    /// of the lane.
    pub longest_ms: Option<f64>,
    /// See [`FloodPauses`].
    pub longest_unstolen_ms: Option<f64>,
    /// Largest growth of the process's memory in KiB over its first second, of all rounds.
    pub grown_kib: Option<i64>,
    /// The raw samples.
    pub samples: Vec<FloodSample>,
}

impl FloodRow {
    /// A row of the medians of `samples`.
    pub fn from_samples(
        part: &str,
        variant: &str,
        receiver: &str,
        size: usize,
        samples: Vec<FloodSample>,
    ) -> Self {
        let some = |value: &dyn Fn(&FloodSample) -> Option<f64>| {
            Summary::from_samples(samples.iter().filter_map(value)).map(|summary| summary.median)
        };
        let who = if part == "sources" { "lane" } else { "program" };
        let rss: Vec<u64> = samples
            .iter()
            .filter_map(|seen| seen.memory.as_ref())
            .flat_map(|seen| seen.rss_kib.clone())
            .collect();
        let grown = rss.iter().max().zip(rss.first()).map(|(most, first)| *most as i64 - *first as i64);
        Self {
            part: part.into(),
            variant: variant.into(),
            figures: Metrics::from_samples(receiver, 1, 1, size, samples.iter().map(|seen| &seen.sample)),
            answered: some(&|seen| seen.clients.map(|clients| clients.share())),
            longest_ms: some(&|seen| seen.pauses_of(who).map(|pauses| pauses.longest_ms)),
            longest_unstolen_ms: some(&|seen| {
                seen.pauses_of(who).and_then(|pauses| pauses.longest_unstolen_ms)
            }),
            grown_kib: grown,
            samples,
        }
    }

    /// The pauses of `who`, of each round.
    pub fn pauses<'a>(&'a self, who: &'a str) -> impl Iterator<Item = &'a FloodPauses> {
        self.samples.iter().filter_map(move |seen| seen.pauses_of(who))
    }
}
