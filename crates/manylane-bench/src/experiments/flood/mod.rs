//! `bench flood`: effects of a flood on clients and programs, with limits and without.
//!
//! | part | measures |
//! |---|---|
//! | `clients` | how many requests of regular clients are answered beside a flood of ten times the sustained rate |
//! | `sources` | growth of memory, and pauses, with 100,000 new sources per second compared with one source |
//! | `program` | how long a program that is always runnable is kept from running |
//!
//! The flood is generated on the sender's CPU, where the other end of the link also receives
//! it. The lane is on another one.

mod clients;
mod pauses;
mod plan;
mod program;
mod server;
mod sources;

use anyhow::{Context, Result, ensure};

use self::plan::{FloodTestbed, PAYLOAD_SIZE, Variant};
pub use self::plan::{Part, Plan};
use crate::schema::{BENCH_FLOOD, BenchSettings, Document, FloodRow, FloodSample};
use crate::{Controller, Limits, Options, Setup, check_stop, run_rounds};

/// Rate of the flood in part `clients`, as a multiple of the sustained rate.
const FLOOD_RATE_FACTOR: f64 = 10.0;
/// The flood of `program`, in datagrams per second.
const PROGRAM_PPS: f64 = 1e6;
/// Links of the testbed: `sources` needs a server on each of two.
pub const LINKS: usize = 2;

/// Runs the benchmark. The setup must be a testbed with [`LINKS`] links.
///
/// # Errors
/// Without a second CPU; when a server or a sender fails, or when it is stopped.
pub fn run(
    setup: &mut Setup,
    options: &Options,
    plan: &Plan,
    controller: &mut dyn Controller,
) -> Result<Document<BenchSettings, FloodRow>> {
    let (from, to) = setup.hosts().context("bench flood needs a testbed (root)")?;
    let cpus = setup.sender_cpu().zip(setup.receiver_cpus().first().copied());
    let (sender_cpu, lane_cpu) =
        cpus.context("bench flood needs two CPUs: one for the flood, another one for the lane")?;
    ensure!(setup.device_names().len() == LINKS, "bench flood needs a testbed of {LINKS} links");
    let bed = FloodTestbed { from: from.clone(), to: to.clone(), lane_cpu, sender_cpu, batch: options.batch };
    let limits = options.limits();
    let mut settings = options.settings(setup, &limits);
    settings.receivers = vec!["lane/xdp".into(), "lane/mmsg".into()];
    // Lanes and rings are as they are by default.
    settings.receiver_cpus = vec![lane_cpu];
    (settings.rx_usecs, settings.xdp_rx_usecs) = (Vec::new(), Vec::new());
    let mut rows = Vec::new();
    for &part in &plan.parts {
        let notes = &mut settings.notes;
        rows.extend(
            run_part(part, &bed, (options, plan, &limits), notes, controller)
                .with_context(|| format!("part {part}"))?,
        );
    }
    controller.progress(1.0, "done");
    Ok(Document::new(BENCH_FLOOD, settings, rows))
}

fn run_part(
    part: Part,
    bed: &FloodTestbed,
    (options, plan, limits): (&Options, &Plan, &Limits),
    notes: &mut Vec<String>,
    controller: &mut dyn Controller,
) -> Result<Vec<FloodRow>> {
    let (rounds, with) = (options.rounds, (options, plan));
    match part {
        Part::Clients => {
            let from = clients::add_client_address(bed)?;
            let pps = match options.pps {
                Some(pps) => pps,
                None => {
                    controller.progress(0.0, "clients: searching for the sustained rate");
                    let sustained_rate =
                        clients::server_sustained_rate(bed, limits, &|| check_stop(controller.stop()))?;
                    let trial = limits.trial.as_millis();
                    let estimate = if options.quick {
                        format!(" (an estimate: trials of {trial} ms)")
                    } else {
                        String::new()
                    };
                    notes.push(format!(
                        "sustained rate of the server: {sustained_rate:.0} per second{estimate}"
                    ));
                    FLOOD_RATE_FACTOR * sustained_rate
                }
            };
            let samples = run_rounds(rounds, &clients::VARIANTS, controller, |variant, round, stop| {
                clients::sample(bed, with, (variant, from, pps), round, stop)
            })?;
            Ok(rows(part, &clients::VARIANTS, samples))
        }
        Part::Program => {
            let pps = options.pps.unwrap_or(PROGRAM_PPS);
            let samples = run_rounds(rounds, &program::VARIANTS, controller, |variant, round, stop| {
                program::sample(bed, with, (variant, pps), round, stop)
            })?;
            Ok(rows(part, &program::VARIANTS, samples))
        }
        Part::Sources => {
            let pair = sources::ServerPair::start(bed)?;
            let length = plan.sources.div_f64(rounds as f64);
            let samples = run_rounds(rounds, &sources::VARIANTS, controller, |variant, round, stop| {
                pair.sample(bed, usize::from(variant.limit), (round, length), stop)
            });
            pair.stop()?;
            Ok(rows(part, &sources::VARIANTS, samples?))
        }
    }
}

fn rows(part: Part, variants: &[Variant], samples: Vec<Vec<FloodSample>>) -> Vec<FloodRow> {
    let row = |(variant, samples): (&Variant, _)| {
        FloodRow::from_samples(part.name(), variant.name, variant.receiver_name(), PAYLOAD_SIZE, samples)
    };
    variants.iter().zip(samples).map(row).collect()
}
