//! The rows of `bench flood`.

use serde::{Deserialize, Serialize};

use super::{Metrics, Sample};
use crate::stats::Summary;

/// Name of the document that `bench flood` writes.
pub const BENCH_FLOOD: &str = "manylane.bench.flood.v1";

/// One sample of `bench flood`: one server, one stretch of time. What was sent is the flood and
/// what regular clients asked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FloodSample {
    /// What every sample has.
    #[serde(flatten)]
    pub sample: Sample,
    /// Datagrams that the limit held back.
    pub limited: u64,
    /// Datagrams that found the ring of a device's queue full.
    pub xsk_dropped: u64,
    /// How regular clients fared, in part `clients`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clients: Option<FloodClients>,
    /// Memory in each second, in part `sources`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<FloodMemory>,
    /// Who was kept from running, and for how long, in parts `sources` and `program`.
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
    /// Answers that came in time.
    pub answered: u64,
    /// Milliseconds from when a request was due that half of the answers took at most.
    pub p50_ms: f64,
    /// The same of 99 % of them.
    pub p99_ms: f64,
}

impl FloodClients {
    /// Share of the requests that were answered.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.answered as f64 / self.asked.max(1) as f64
    }
}

/// Memory while sources come and go.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FloodMemory {
    /// Sources that nobody had seen before.
    pub new_sources: u64,
    /// KiB of the process that serves, sender and observers included, at the end of each second.
    pub rss_kib: Vec<u64>,
    /// KiB of the kernel's own objects (`Slab`) of the whole machine, at the same moments.
    pub slab_kib: Vec<u64>,
}

/// Bins of [`FloodPauses::histogram`].
pub const PAUSE_BINS: usize = 24;

/// How long somebody was kept from running.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FloodPauses {
    /// `program` (a thread that only looks at the clock, on the lane's processor),
    /// `program beside the sender` (on that one's), `lane` (between two calls of its closure),
    /// `observer` (a thread that sleeps 100 µs again and again; how late it wakes), `sender`
    /// (between two looks at its schedule).
    pub who: String,
    /// Its processor.
    pub cpu: usize,
    /// How long it was watched, in seconds.
    pub seconds: f64,
    /// The longest pause in milliseconds.
    pub longest_ms: f64,
    /// The longest after what the hypervisor took is taken off; of `program` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest_unstolen_ms: Option<f64>,
    /// The longest after that, and what the thread had that makes the flood, is taken off
    /// (`program beside the sender`), or the lane's own one (`program`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest_apart_ms: Option<f64>,
    /// Pauses of more than a millisecond.
    pub over_1ms: u64,
    /// Pauses of more than ten milliseconds.
    pub over_10ms: u64,
    /// Share of the time that the thread ran; of `program` only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// Milliseconds in which the hypervisor ran somebody else in place of this processor (`steal`
    /// in `/proc/stat`, in steps of 10 ms).
    pub steal_ms: f64,
    /// Pauses by length: below 1 µs, then up to 2, 4, 8 µs and so on; the last bin has all longer
    /// ones.
    pub histogram: Vec<u64>,
    /// All pauses of more than a millisecond, taken apart; of `program` only.
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

/// One pause of a program that wants to run all the time, taken apart. What is in none of the
/// parts, interrupts had.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct FloodGap {
    /// All of it.
    pub ms: f64,
    /// Other threads ran here (`run_delay`); what the hypervisor took meanwhile is in it.
    pub waited_ms: f64,
    /// Nobody ran here: the hypervisor had the processor.
    pub stolen_ms: f64,
    /// The thread that makes the flood ran, the taking of its frames from the link in its context
    /// included: of `waited_ms`.
    #[serde(default)]
    pub sender_ms: f64,
    /// The lane's own thread ran: of `waited_ms`, on the lane's processor.
    #[serde(default)]
    pub lane_ms: f64,
}

/// One row of `bench flood`: figures are medians over the samples.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FloodRow {
    /// `clients`, `sources` or `program`.
    pub part: String,
    /// `no-flood`, `no-limit`, `limit`, `kernel-sockets`, `busy-thread` (no flood, but a thread
    /// that spins in place of its maker); of `sources`, `one-source`, `new-sources`.
    pub variant: String,
    /// What every row has.
    #[serde(flatten)]
    pub figures: Metrics,
    /// Share of the requests of regular clients that were answered.
    pub answered: Option<f64>,
    /// The longest pause in milliseconds: of `program` on the lane's processor, in part `sources`
    /// of the lane.
    pub longest_ms: Option<f64>,
    /// See [`FloodPauses`].
    pub longest_unstolen_ms: Option<f64>,
    /// KiB that the process had more in any second than in the first one, over all rounds.
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
