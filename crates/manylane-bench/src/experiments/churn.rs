//! `bench churn`: checks that adding and removing lanes loses no datagrams.
//!
//! While traffic runs at half the sustained rate, a lane is added or removed at a fixed interval.
//! At the end, all sent datagrams must have been delivered.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use manylane::Handle;

use crate::receivers::Kind;
use crate::sample::{check_stop, measure_during};
use crate::schema::{BENCH_CHURN, BenchSettings, ChurnRow, Document, Metrics};
use crate::{Controller, Limits, Load, Options, Setup, oversubscribed_note, safe_rate};

/// Interval at which a request to stop is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Runs the benchmark with a change every `interval`.
pub fn run(
    setup: &mut Setup,
    options: &Options,
    interval: Duration,
    controller: &mut dyn Controller,
) -> Result<Document<BenchSettings, ChurnRow>> {
    let limits = Limits { precision: 0.1, ..options.limits() };
    let mut settings = options.settings(setup, &limits);
    settings.receivers = vec![Kind::LaneMmsg.to_string()];
    settings.notes.extend(oversubscribed_note(setup));
    let mut rows = Vec::new();
    for &size in &options.sizes {
        for &threads in &options.threads {
            let pps = safe_rate(setup, options, &[Kind::LaneMmsg], (threads, size), &limits, controller)?;
            rows.push(churn(setup, options, threads, size, pps, interval, controller)?);
        }
    }
    controller.progress(1.0, "done");
    Ok(Document::new(BENCH_CHURN, settings, rows))
}

fn churn(
    setup: &mut Setup,
    options: &Options,
    threads: usize,
    size: usize,
    pps: f64,
    interval: Duration,
    controller: &mut dyn Controller,
) -> Result<ChurnRow> {
    let receiver = options.receiver_options(setup, Kind::LaneMmsg, threads, size);
    let running = setup.start(Kind::LaneMmsg, &receiver)?;
    let lanes = running.lanes().context("lanes have a handle")?;
    let stop = Arc::new(AtomicBool::new(false));
    let changer = {
        let stop = stop.clone();
        // Lanes are opened in the network namespace of the calling thread.
        setup.run_at_receiver(|| thread::spawn(move || change_lanes(&lanes, threads, interval, &stop)))
    };
    let load = Load { pps: Some(pps), duration: options.duration, size, flows: options.flows, gso: false };
    let what = format!("{threads} lanes, one added or removed every {} ms", interval.as_millis());
    let (sent, sample, (added, removed)) = measure_during(setup, running, &load, 0, |_, sender_ended| {
        let start = Instant::now();
        let mut outcome = Ok(());
        // Ends when the time is over, on request, and when either side has failed.
        while start.elapsed() < options.duration
            && !sender_ended()
            && !changer.is_finished()
            && outcome.is_ok()
        {
            controller.progress(start.elapsed().as_secs_f64() / options.duration.as_secs_f64(), &what);
            thread::sleep(POLL_INTERVAL.min(options.duration.saturating_sub(start.elapsed())));
            outcome = check_stop(controller.stop());
        }
        stop.store(true, Ordering::Relaxed);
        let changed = changer.join().map_err(|_| anyhow!("the thread that changes lanes panicked"))?;
        outcome?;
        changed.context("cannot add or remove a lane")
    })?;
    Ok(ChurnRow {
        figures: Metrics::from_samples(Kind::LaneMmsg.name(), threads, threads, size, [&sample].into_iter()),
        sent: sample.sent,
        delivered: sample.delivered,
        lost: sent.datagrams.saturating_sub(sample.delivered),
        added,
        removed,
        change_interval_ms: u64::try_from(interval.as_millis()).unwrap_or(u64::MAX),
        samples: vec![sample],
    })
}

/// Adds a lane, removes the oldest, adds one, …, one change a tick. So after a while, none of the
/// first lanes is left.
fn change_lanes(
    lanes: &Handle,
    at_least: usize,
    interval: Duration,
    stop: &AtomicBool,
) -> Result<(u64, u64)> {
    let (mut added, mut removed) = (0, 0);
    let mut next = Instant::now() + interval;
    while !stop.load(Ordering::Relaxed) {
        thread::sleep(next.saturating_duration_since(Instant::now()));
        next += interval;
        let ids = lanes.lane_ids();
        match ids.first() {
            Some(oldest) if ids.len() > at_least => {
                lanes.remove_lane(*oldest)?;
                removed += 1;
            }
            _ => {
                lanes.add_lane()?;
                added += 1;
            }
        }
    }
    Ok((added, removed))
}
