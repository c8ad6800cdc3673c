//! `bench gso`: cost of receiving when the sender uses UDP GSO over loopback.
//!
//! The kernel then carries a GSO message as one packet. A receiver with GRO gets it as one
//! message; for one without, the kernel segments it first.

use anyhow::Result;

use crate::receivers::Kind;
use crate::sample::{check_stop, measure};
use crate::schema::{BENCH_GSO, BenchRow, BenchSettings, Document};
use crate::stats::interleaved;
use crate::{Controller, Limits, Load, Options, Setup, oversubscribed_note};

/// The receivers that it compares by default.
pub const RECEIVERS: [Kind; 4] =
    [Kind::SocketRecvmmsg, Kind::ReuseportRecvmmsg, Kind::ReuseportGro, Kind::LaneMmsg];

/// Runs the benchmark. The setup must be loopback.
///
/// # Errors
/// When a receiver or the sender fails, or when it is stopped.
pub fn run(
    setup: &mut Setup,
    options: &Options,
    director: &mut dyn Controller,
) -> Result<Document<BenchSettings, BenchRow>> {
    let mut settings = options.settings(setup, &Limits::default());
    settings.notes.extend(oversubscribed_note(setup));
    settings.sender += " in trains (UDP GSO)";
    let mut rows = Vec::new();
    let mut configs = Vec::new();
    for &size in &options.sizes {
        for &threads in &options.threads {
            configs.extend(options.receivers.iter().map(|&kind| (kind, threads, size)));
        }
    }
    let mut samples = vec![Vec::new(); configs.len()];
    let planned = configs.len() * options.rounds;
    let mut taken = 0;
    for (round, order) in interleaved(options.rounds, configs.len()).enumerate() {
        for index in order {
            let (kind, threads, size) = configs[index];
            check_stop(director.stop())?;
            let what = format!("{kind} with {threads} threads, round {} of {}", round + 1, options.rounds);
            director.progress(f64::from(taken) / planned as f64, &what);
            let Options { pps, duration, flows, .. } = *options;
            let load = Load { pps, duration, size, flows, gso: true };
            let receiver = options.receiver_options(setup, kind, threads, size);
            samples[index].push(measure(setup, kind, &receiver, &load, round)?);
            taken += 1;
        }
    }
    for ((kind, threads, size), samples) in configs.into_iter().zip(samples) {
        rows.push(BenchRow::from_samples(kind.name(), threads, kind.lanes(threads), size, samples));
    }
    director.progress(1.0, "done");
    Ok(Document::new(BENCH_GSO, settings, rows))
}
