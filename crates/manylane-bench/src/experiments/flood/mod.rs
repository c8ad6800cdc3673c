//! `bench flood`: effects of a flood on clients and programs, with limits and without.
//!
//! | part | measures |
//! |---|---|
//! | `clients` | how many requests of regular clients are answered beside a flood of ten times the no-loss rate |
//! | `sources` | growth of memory, and pauses, with 100,000 new sources per second compared with one source |
//! | `program` | how long a program that is always runnable is kept from running |
//!
//! The flood is generated on the sender's processor, where the other end of the link also receives
//! it. The lane is on another one.

mod clients;
mod pauses;
mod program;
mod server;
mod sources;

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use manylane::{Engine, Limit};
use manylane_measure::named_enum;

use crate::schema::{BENCH_FLOOD, BenchSettings, Document, FloodRow, FloodSample};
use crate::stats::interleaved;
use crate::{Controller, Limits, Options, Setup, check_stop};
use manylane_testbed::Host;

/// Payload of every datagram.
const PAYLOAD_SIZE: usize = 32;
/// Simulated work of a request, in parts `clients` and `program`.
const REQUEST_COST: Duration = Duration::from_micros(10);
/// Rate of the flood in part `clients`, as a multiple of the no-loss rate.
const FLOOD_RATE_FACTOR: f64 = 10.0;
/// The flood of `program`, in datagrams per second.
const PROGRAM_PPS: f64 = 1e6;
/// Links of the testbed: `sources` needs a server on each of two.
pub const LINKS: usize = 2;

named_enum! {
    /// A part of the benchmark.
    pub enum Part {
        /// Regular clients beside a flood.
        Clients = "clients",
        /// A new source for each datagram.
        Sources = "sources",
        /// A program beside a flood.
        Program = "program",
    }
}

/// Options in addition to those of all benchmarks.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The parts, in their order.
    pub parts: Vec<Part>,
    /// The limit of the server in variants with a limit, in `clients` and `program`.
    pub limit: Limit,
    /// Total time with new sources, over all rounds. The load of one source takes as long.
    pub sources: Duration,
}

/// A variant: how a server is flooded.
struct Variant {
    name: &'static str,
    engine: Engine,
    limit: bool,
    sender_load: SenderLoad,
}

/// The load on the sender's processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SenderLoad {
    /// Nothing.
    Idle,
    /// The flood generator.
    Flood,
    /// A thread that only spins, as the generator does between two frames. Its effect on other
    /// threads there is not an effect of the flood.
    BusyThread,
}

impl Variant {
    fn receiver_name(&self) -> &'static str {
        if self.engine == Engine::Xdp { "lane/xdp" } else { "lane/mmsg" }
    }
}

/// The place of a server.
struct FloodTestbed {
    from: Host,
    to: Host,
    lane_cpu: usize,
    sender_cpu: usize,
    /// Maximum number of datagrams of one call of a server.
    batch: usize,
}

/// Runs the benchmark. The setup must be a testbed with [`LINKS`] links.
///
/// # Errors
/// Without a second processor; when a server or a sender fails, or when it is stopped.
pub fn run(
    setup: &mut Setup,
    options: &Options,
    plan: &Plan,
    director: &mut dyn Controller,
) -> Result<Document<BenchSettings, FloodRow>> {
    let (from, to) = setup.hosts().context("bench flood needs a testbed (root)")?;
    let cpus = setup.sender_cpu().zip(setup.receiver_cpus().first().copied());
    let (sender_cpu, lane_cpu) =
        cpus.context("the flood and the lane need a processor each: there is one")?;
    ensure!(setup.device_names().len() == LINKS, "bench flood needs a testbed of {LINKS} links");
    let bed = FloodTestbed { from: from.clone(), to: to.clone(), lane_cpu, sender_cpu, batch: options.batch };
    let mut settings = options.settings(setup, &Limits::default());
    settings.receivers = vec!["lane/xdp".into(), "lane/mmsg".into()];
    // Lanes and rings are as they are by default.
    settings.receiver_cpus = vec![lane_cpu];
    (settings.rx_usecs, settings.xdp_rx_usecs) = (Vec::new(), Vec::new());
    let mut measured = FloodRun { testbed: bed, options, plan, done: 0, planned: 0, notes: Vec::new() };
    measured.planned = plan.parts.iter().map(|part| options.rounds * variant_count(*part)).sum();
    let mut rows = Vec::new();
    for part in &plan.parts {
        rows.extend(measured.run_part(*part, director).with_context(|| format!("part {part}"))?);
    }
    settings.notes.extend(measured.notes);
    director.progress(1.0, "done");
    Ok(Document::new(BENCH_FLOOD, settings, rows))
}

fn variant_count(part: Part) -> usize {
    match part {
        Part::Clients => clients::VARIANTS.len(),
        Part::Sources => sources::VARIANTS.len(),
        Part::Program => program::VARIANTS.len(),
    }
}

/// A run.
struct FloodRun<'a> {
    testbed: FloodTestbed,
    options: &'a Options,
    plan: &'a Plan,
    done: usize,
    planned: usize,
    notes: Vec<String>,
}

impl FloodRun<'_> {
    fn run_part(&mut self, part: Part, director: &mut dyn Controller) -> Result<Vec<FloodRow>> {
        let with = (self.options, self.plan);
        match part {
            Part::Clients => {
                let at = clients::add_client_address(&self.testbed)?;
                let pps = match self.options.pps {
                    Some(pps) => pps,
                    None => {
                        director.progress(0.0, "clients: looking for the no-loss rate");
                        let most =
                            clients::server_no_loss_rate(&self.testbed, &|| check_stop(director.stop()))?;
                        self.notes.push(format!("no-loss rate of the server: {most:.0} per second"));
                        FLOOD_RATE_FACTOR * most
                    }
                };
                let samples = self.run_interleaved(part, director, |bed, variant, round, director| {
                    clients::sample(bed, with, (&clients::VARIANTS[variant], at, pps), round, director.stop())
                })?;
                Ok(rows(part, &clients::VARIANTS, samples))
            }
            Part::Program => {
                let pps = self.options.pps.unwrap_or(PROGRAM_PPS);
                let samples = self.run_interleaved(part, director, |bed, variant, round, director| {
                    program::sample(bed, with, (&program::VARIANTS[variant], pps), round, director.stop())
                })?;
                Ok(rows(part, &program::VARIANTS, samples))
            }
            Part::Sources => {
                let pair = sources::ServerPair::start(&self.testbed)?;
                let length = self.plan.sources.div_f64(self.options.rounds as f64);
                let samples = self.run_interleaved(part, director, |bed, which, round, director| {
                    pair.sample(bed, which, (round, length), director.stop())
                });
                pair.stop()?;
                let named = sources::VARIANTS.iter().zip(samples?);
                let row = |(name, samples): (&&str, _)| {
                    FloodRow::from_samples(part.name(), name, "lane/xdp", PAYLOAD_SIZE, samples)
                };
                Ok(named.map(row).collect())
            }
        }
    }

    /// The samples of each variant of a part, interleaved.
    fn run_interleaved(
        &mut self,
        part: Part,
        director: &mut dyn Controller,
        mut sample: impl FnMut(&FloodTestbed, usize, usize, &mut dyn Controller) -> Result<FloodSample>,
    ) -> Result<Vec<Vec<FloodSample>>> {
        let mut samples = vec![Vec::new(); variant_count(part)];
        for (round, order) in interleaved(self.options.rounds, samples.len()).enumerate() {
            for variant in order {
                check_stop(director.stop())?;
                let name = match part {
                    Part::Clients => clients::VARIANTS[variant].name,
                    Part::Sources => sources::VARIANTS[variant],
                    Part::Program => program::VARIANTS[variant].name,
                };
                director.progress(self.done as f64 / self.planned as f64, &format!("{part}: {name}"));
                samples[variant].push(sample(&self.testbed, variant, round, director).context(name)?);
                self.done += 1;
            }
        }
        Ok(samples)
    }
}

fn rows(part: Part, variants: &[Variant], samples: Vec<Vec<FloodSample>>) -> Vec<FloodRow> {
    let row = |(variant, samples): (&Variant, _)| {
        FloodRow::from_samples(part.name(), variant.name, variant.receiver_name(), PAYLOAD_SIZE, samples)
    };
    variants.iter().zip(samples).map(row).collect()
}
