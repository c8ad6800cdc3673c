//! The rows of `bench flood`.

use manylane_measure::format_number;
use serde::Serialize;

use super::sample::{Metrics, Sample};
use crate::report::{Figure, Figures, Labels};
use crate::stats::{format_ratio, median_of};

/// One sample of `bench flood`: one server, one time span. The datagrams sent are the flood and
/// the requests of regular clients.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FloodSample {
    /// Common fields.
    #[serde(flatten)]
    pub sample: Sample,
    /// Datagrams that the limit dropped.
    pub limited: u64,
    /// Datagrams that found the ring of a device's queue full.
    pub xsk_dropped: u64,
    /// Results of regular clients, in part `clients`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clients: Option<FloodClients>,
    /// Memory in each second, in part `sources`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<FloodMemory>,
    /// Pauses of threads, in parts `sources` and `program`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pauses: Vec<FloodPauses>,
}

impl FloodSample {
    /// The pauses of `thread`.
    #[must_use]
    pub fn pauses_of(&self, thread: &str) -> Option<&FloodPauses> {
        self.pauses.iter().find(|pauses| pauses.thread == thread)
    }
}

/// Regular clients beside a flood.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
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
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
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
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct FloodPauses {
    /// `program` (a thread that only reads the clock, on the lane's CPU),
    /// `program beside the sender` (on that one's), `lane` (between two calls of its closure),
    /// `observer` (a thread that sleeps 100 µs again and again; how late it wakes), `sender`
    /// (between two reads of its schedule).
    pub thread: String,
    /// Its CPU.
    pub cpu: usize,
    /// Length of the observation in seconds.
    pub seconds: f64,
    /// The longest pause in milliseconds.
    pub longest_ms: f64,
    /// The longest pause without stolen time; of `program` only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longest_unstolen_ms: Option<f64>,
    /// The longest pause without stolen time and without the time of the flood generator (`program
    /// beside the sender`) or of the lane (`program`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longest_apart_ms: Option<f64>,
    /// Pauses of more than a millisecond.
    pub over_1ms: u64,
    /// Pauses of more than ten milliseconds.
    pub over_10ms: u64,
    /// Share of the time that the thread ran; of `program` only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share: Option<f64>,
    /// Stolen time of this CPU in milliseconds (`steal` in `/proc/stat`, in steps of 10 ms).
    pub steal_ms: f64,
    /// Histogram of the pauses: below 1 µs, then up to 2, 4, 8 µs and so on; the last bin has all
    /// longer ones.
    pub histogram: Vec<u64>,
    /// All pauses of more than a millisecond with their parts; of `program` only.
    #[serde(skip_serializing_if = "Vec::is_empty")]
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
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct FloodGap {
    /// Total length.
    pub ms: f64,
    /// Other threads ran on the CPU (`run_delay`), including stolen time meanwhile.
    pub waited_ms: f64,
    /// The hypervisor had taken the CPU.
    pub stolen_ms: f64,
    /// Part of `waited_ms`: the flood generator ran, including the receive work for its frames in
    /// its context.
    pub sender_ms: f64,
    /// Part of `waited_ms`, on the lane's CPU: the lane's own thread ran.
    pub lane_ms: f64,
}

/// One row of `bench flood`: figures are medians over the samples.
#[derive(Debug, Clone, PartialEq, Serialize)]
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
    /// The longest pause in milliseconds: of `program` on the lane's CPU, in part `sources`
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
            median_of(&samples.iter().filter_map(value).collect::<Vec<f64>>())
        };
        let thread = watched(part);
        let rss: Vec<u64> = samples
            .iter()
            .filter_map(|seen| seen.memory.as_ref())
            .flat_map(|seen| seen.rss_kib.clone())
            .collect();
        let grown = rss.iter().max().zip(rss.first()).map(|(max, first)| *max as i64 - *first as i64);
        Self {
            part: part.into(),
            variant: variant.into(),
            figures: Metrics::from_samples(receiver, 1, 1, size, samples.iter().map(|seen| &seen.sample)),
            answered: some(&|seen| seen.clients.map(|clients| clients.share())),
            longest_ms: some(&|seen| seen.pauses_of(thread).map(|pauses| pauses.longest_ms)),
            longest_unstolen_ms: some(&|seen| {
                seen.pauses_of(thread).and_then(|pauses| pauses.longest_unstolen_ms)
            }),
            grown_kib: grown,
            samples,
        }
    }

    /// The pauses of `thread`, of each round.
    pub fn pauses<'a>(&'a self, thread: &'a str) -> impl Iterator<Item = &'a FloodPauses> {
        self.samples.iter().filter_map(move |seen| seen.pauses_of(thread))
    }

    fn values_of(&self, thread: &str, value: impl Fn(&FloodPauses) -> Option<f64>) -> Vec<f64> {
        self.pauses(thread).filter_map(value).collect()
    }

    fn values_of_clients(&self, value: fn(&FloodClients) -> f64) -> Vec<f64> {
        self.samples.iter().filter_map(|seen| seen.clients.as_ref()).map(value).collect()
    }

    /// The figure that decides a part: answered requests, pauses of the lane, the longest pause of
    /// the program.
    fn decisive(&self) -> Vec<f64> {
        match &*self.part {
            "clients" => self.values_of_clients(FloodClients::share),
            "sources" => self.values_of("lane", |seen| Some(seen.over_1ms_per_second())),
            _ => self.values_of("program", |seen| Some(seen.longest_ms)),
        }
    }
}

/// The thread whose pauses are the figures of a part.
fn watched(part: &str) -> &'static str {
    if part == "sources" { "lane" } else { "program" }
}

/// A program that shares its CPU with the flood generator.
pub const SENDER_CPU_PROGRAM: &str = "program beside the sender";

impl Figures for FloodRow {
    const COLUMNS: &'static [&'static str] = &[
        "part",
        "variant",
        "receiver",
        "sent/s",
        "delivered/s",
        "answered %",
        "p99 ms",
        "longest ms",
        "unstolen ms",
        "over 1 ms/s",
        "ran %",
        "ratio (p)",
        "sender's CPU, ms",
        "apart ms",
        "grown KiB",
    ];

    fn cells(&self, all: &[Self]) -> Vec<String> {
        let format = |value: Option<f64>, digits: usize| {
            value.map_or_else(|| "–".into(), |value| format!("{value:.digits$}"))
        };
        let (thread, beside) = (watched(&self.part), SENDER_CPU_PROGRAM);
        let median = |values: Vec<f64>| median_of(&values);
        // The variant without a flood, or with one source.
        let base = all.iter().find(|row| row.part == self.part);
        let base = base.filter(|base| base.variant != self.variant);
        vec![
            self.part.clone(),
            self.variant.clone(),
            self.figures.receiver.clone(),
            format_number(self.figures.offered_pps),
            format_number(self.figures.delivered_pps),
            format(self.answered.map(|share| 100.0 * share), 1),
            format(median(self.values_of_clients(|clients| clients.p99_ms)), 1),
            format(self.longest_ms, 1),
            format(self.longest_unstolen_ms, 1),
            format(median(self.values_of(thread, |seen| Some(seen.over_1ms_per_second()))), 1),
            format(median(self.values_of(thread, |seen| Some(100.0 * seen.share?))), 0),
            base.map_or_else(String::new, |base| format_ratio(&self.decisive(), &base.decisive())),
            format(median(self.values_of(beside, |seen| Some(seen.longest_ms))), 1),
            format(median(self.values_of(beside, |seen| seen.longest_apart_ms)), 1),
            self.grown_kib.map_or_else(|| "–".into(), |grown| grown.to_string()),
        ]
    }

    fn section(&self) -> String {
        match &*self.part {
            "clients" => "clients: regular clients during a flood".into(),
            "sources" => "sources: a new source for each datagram".into(),
            part => format!("{part}: a program that is always runnable, during a flood"),
        }
    }

    fn figures(rows: &[&Self]) -> Vec<Figure> {
        let variants: Vec<String> = rows.iter().map(|row| row.variant.clone()).collect();
        // One line for each name, over the variants.
        let lines = |title, caption, y, names: &[&str], values: &dyn Fn(&Self, usize) -> Vec<f64>| {
            let names: Vec<String> = names.iter().map(|&name| name.into()).collect();
            let labels = Labels { title, caption, x: "variant", y };
            Figure::lines(labels, &names, &variants, |name, place| values(rows[place], name))
        };
        let better = "Lower is better.";
        let unstolen = ["all", "without stolen time"];
        let apart = ["all", "without stolen time and without the sender"];
        vec![
            lines("Answered requests", "Higher is better.", "%", &["answered"], &|row, _| {
                row.values_of_clients(|clients| 100.0 * clients.share())
            }),
            lines("Time of a reply", better, "ms", &["p50", "p99"], &|row, name| {
                row.values_of_clients(if name == 0 {
                    |clients| clients.p50_ms
                } else {
                    |clients| clients.p99_ms
                })
            }),
            memory(rows, &variants),
            lines(
                "Pauses of more than a millisecond",
                better,
                "per second",
                &WATCHED_SOURCES,
                &|row, name| row.values_of(WATCHED_SOURCES[name], |seen| Some(seen.over_1ms_per_second())),
            ),
            lines("Longest pause of the program on the lane's CPU", better, "ms", &unstolen, &|row, name| {
                row.values_of("program", |seen| [Some(seen.longest_ms), seen.longest_unstolen_ms][name])
            }),
            lines("Longest pause of the program beside the sender", better, "ms", &apart, &|row, name| {
                row.values_of(SENDER_CPU_PROGRAM, |seen| [Some(seen.longest_ms), seen.longest_apart_ms][name])
            }),
            lines("CPU share of the program", "Higher is better.", "%", &WATCHED_PROGRAM, &|row, name| {
                row.values_of(WATCHED_PROGRAM[name], |seen| Some(100.0 * seen.share?))
            }),
        ]
    }
}

const WATCHED_SOURCES: [&str; 3] = ["lane", "observer", "sender"];
const WATCHED_PROGRAM: [&str; 2] = ["program", SENDER_CPU_PROGRAM];

/// Growth of the process's memory over its first second, by the second of a round.
fn memory(rows: &[&FloodRow], variants: &[String]) -> Figure {
    let memory =
        |row: &FloodRow| row.samples.iter().filter_map(|seen| seen.memory.clone()).collect::<Vec<_>>();
    let all: Vec<Vec<FloodMemory>> = rows.iter().map(|row| memory(row)).collect();
    let seconds = all.iter().flatten().map(|seen| seen.rss_kib.len()).max().unwrap_or(0);
    let seconds: Vec<String> = (1..=seconds).map(|second| second.to_string()).collect();
    let labels =
        Labels { title: "Growth of memory", caption: "Lower is better.", x: "second of the round", y: "KiB" };
    Figure::lines(labels, variants, &seconds, |variant, second| {
        let all = &all[variant];
        let first = all.iter().find_map(|seen| seen.rss_kib.first().copied()).unwrap_or(0);
        // A plot begins at zero, which also stands for memory that was freed.
        let growth = |seen: &FloodMemory| Some(seen.rss_kib.get(second)?.saturating_sub(first) as f64);
        all.iter().filter_map(growth).collect()
    })
}
