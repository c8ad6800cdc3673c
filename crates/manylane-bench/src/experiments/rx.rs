//! `bench rx` and `bench echo`: cost of receiving, or of receiving and answering. The two differ
//! in what receivers do with a datagram and in what counts as delivered. Otherwise the run is the
//! same:
//!
//! 1. Search: the highest rate that each receiver sustains ([`search`](crate::search)).
//! 2. Cost: all receivers, interleaved, at one common rate without loss.
//! 3. Overload: the rate that each still delivers at twice its own sustained rate. A receiver that
//!    collapses there has receive livelock.
//!
//! `bench gso` is the second step alone, with a sender that uses UDP GSO over loopback. The kernel
//! then carries a GSO message as one packet. A receiver with GRO gets it as one message; for one
//! without, the kernel segments it first.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::receivers::{Kind, Work};
use crate::sample::{check_stop, measure};
use crate::schema::{BENCH_ECHO, BENCH_GSO, BENCH_RX, BenchRow, BenchSettings, Document, Sample};
use crate::stats::{interleaved, median};
use crate::{
    Controller, Limits, Load, Options, SearchResult, Setup, Trial, oversubscribed_note, sustained_rate,
};

/// The cost rounds run at this share of the lowest sustained rate, well below the limit of all
/// receivers.
const COMMON_RATE_FRACTION: f64 = 0.9;
/// Usual number of trials of a search. Only the progress bar depends on it.
const TRIALS_EXPECTED: usize = 14;

/// Time at which a quick run stops searching rates and starts to measure cost.
const QUICK_SEARCH_TIMEOUT: Duration = Duration::from_secs(14);
/// Time at which a quick run ends, whatever is left, because everything takes longer on a busy
/// machine.
const QUICK_RUN_TIMEOUT: Duration = Duration::from_secs(36);

/// The receivers that `bench gso` compares by default.
pub const GSO_RECEIVERS: [Kind; 4] =
    [Kind::SocketRecvmmsg, Kind::ReuseportRecvmmsg, Kind::ReuseportGro, Kind::LaneMmsg];

/// One measured configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Config {
    kind: Kind,
    threads: usize,
    size: usize,
}

/// Runs the benchmark.
///
/// # Errors
/// Fails if a receiver or the sender fails, if no common rate can be found, or if it is stopped.
pub fn run(
    setup: &mut Setup,
    options: &Options,
    controller: &mut dyn Controller,
) -> Result<Document<BenchSettings, BenchRow>> {
    let limits = options.limits();
    let mut settings = options.settings(setup, &limits);
    settings.notes.extend(oversubscribed_note(setup));
    if let (Work::Echo, Some(counter)) = (options.work, setup.count_hook()) {
        settings.notes.push(format!("replies were counted and dropped in the {counter} of the sending host"));
    }
    if options.gso {
        settings.sender += " in GSO messages";
    }
    let (start, spent, planned) = (Instant::now(), Duration::ZERO, Duration::ZERO);
    let mut bench = Bench { setup, options, limits, controller, start, spent, planned };
    let mut rows = Vec::new();
    bench.plan();
    for &size in &options.sizes {
        let configs = bench.configs(size);
        let found = bench.search(&configs, &mut settings)?;
        let pps = bench.common_rate(&found)?;
        if let Some(pps) = pps {
            settings.notes.push(format!("{size} bytes: cost measured at {pps:.0} datagrams per second"));
        }
        let samples = bench.measure_cost(&configs, pps, &mut settings)?;
        for (config, samples) in configs.iter().zip(samples) {
            let lanes = config.kind.lanes(config.threads);
            let mut row = BenchRow::from_samples(config.kind.name(), config.threads, lanes, size, samples);
            if let Some(found) = found.get(config) {
                row.sustained_pps = Some(found.pps);
                row.sender_limited = Some(found.sender_limited);
                if !bench.is_overdue(QUICK_RUN_TIMEOUT) {
                    let (offered, goodput) = bench.measure_overload(config, found.pps * 2.0)?;
                    row.offered_at_double_pps = Some(offered);
                    row.goodput_at_double_pps = Some(goodput);
                }
            }
            rows.push(row);
        }
    }
    bench.controller.progress(1.0, "done");
    let schema = match options.work {
        _ if options.gso => BENCH_GSO,
        Work::Count => BENCH_RX,
        Work::Echo => BENCH_ECHO,
    };
    Ok(Document::new(schema, settings, rows))
}

struct Bench<'a> {
    setup: &'a mut Setup,
    options: &'a Options,
    limits: Limits,
    controller: &'a mut dyn Controller,
    start: Instant,
    /// Time of the samples so far, and of all that are planned.
    spent: Duration,
    planned: Duration,
}

impl Bench<'_> {
    /// True if a quick run is beyond `limit`. Other runs have no limit.
    fn is_overdue(&self, limit: Duration) -> bool {
        self.options.quick && self.start.elapsed() > limit
    }

    fn configs(&self, size: usize) -> Vec<Config> {
        let threads = self.options.threads.iter();
        threads
            .flat_map(|&threads| {
                self.options.receivers.iter().map(move |&kind| Config { kind, threads, size })
            })
            .collect()
    }

    /// The configurations whose sustained rate is searched: all, or in a quick run those with the
    /// most threads.
    fn searched_configs<'c>(&self, configs: &'c [Config]) -> impl Iterator<Item = &'c Config> + use<'c> {
        let threads_max = configs.iter().map(|config| config.threads).max();
        let quick = self.options.quick;
        configs.iter().filter(move |config| !quick || Some(config.threads) == threads_max)
    }

    fn plan(&mut self) {
        let configs = self.configs(0);
        let searched = self.searched_configs(&configs).count();
        let one_size = with_overhead(self.limits.trial) * (searched * self.trial_count()) as u32
            + with_overhead(self.options.duration) * (configs.len() * self.options.rounds + searched) as u32;
        self.planned = one_size * self.options.sizes.len() as u32;
    }

    /// Trials of a search; 0 without a search.
    fn trial_count(&self) -> usize {
        let is_given = self.options.pps.is_some() && self.options.quick;
        if self.options.gso || is_given { 0 } else { TRIALS_EXPECTED }
    }

    fn search(
        &mut self,
        configs: &[Config],
        settings: &mut BenchSettings,
    ) -> Result<HashMap<Config, SearchResult>> {
        if self.trial_count() == 0 {
            settings.notes.push("no search for sustained rates".into());
            return Ok(HashMap::new());
        }
        let mut found: HashMap<Config, SearchResult> = HashMap::new();
        let searched: Vec<Config> = self.searched_configs(configs).copied().collect();
        if searched.len() < configs.len() {
            let threads = searched.first().map_or(0, |config| config.threads);
            settings.notes.push(format!("quick run: sustained rates for {threads} threads only"));
        }
        if self.options.quick {
            let trial = self.limits.trial.as_millis();
            settings.notes.push(format!("quick run: trials of {trial} ms only estimate sustained rates"));
        }
        let limits = self.limits;
        for config in searched {
            if !found.is_empty() && self.is_overdue(QUICK_SEARCH_TIMEOUT) {
                let (kind, threads) = (config.kind, config.threads);
                settings
                    .notes
                    .push(format!("quick run, slow machine: no time for {kind}, {threads} threads"));
                continue;
            }
            // Start at half of the previous receiver's rate, to save steps.
            let guess = found.values().map(|found| found.pps / 2.0).fold(limits.start_pps, f64::max);
            let from = Limits { start_pps: guess, ..limits };
            let time = limits.trial;
            let planned = with_overhead(time) * TRIALS_EXPECTED as u32;
            let before = self.spent;
            let result = sustained_rate(&from, |pps| {
                let what = format!("{} with {} threads: {:.0} k/s", config.kind, config.threads, pps / 1e3);
                let sample = self.sample(&config, Some(pps), time, 0, &what)?;
                self.spent = self.spent.min(before + planned);
                Ok(Trial::of_sample(&sample))
            })?;
            self.spent = before + planned;
            found.insert(config, result);
        }
        Ok(found)
    }

    /// The rate of the cost rounds; `None` for as fast as the sender can.
    fn common_rate(&self, found: &HashMap<Config, SearchResult>) -> Result<Option<f64>> {
        if self.options.pps.is_some() || self.options.gso {
            return Ok(self.options.pps);
        }
        let lowest = found.values().map(|found| found.pps).fold(f64::INFINITY, f64::min);
        ensure!(
            lowest.is_finite() && lowest > 0.0,
            "a receiver loses datagrams at every rate: wait until the machine is idle, or set --rate"
        );
        Ok(Some(lowest * COMMON_RATE_FRACTION))
    }

    /// The samples of each configuration, in the order of `configs`.
    fn measure_cost(
        &mut self,
        configs: &[Config],
        pps: Option<f64>,
        settings: &mut BenchSettings,
    ) -> Result<Vec<Vec<Sample>>> {
        let mut samples = vec![Vec::new(); configs.len()];
        let mut longest = Duration::ZERO;
        for (round, order) in interleaved(self.options.rounds, configs.len()).enumerate() {
            // Only whole rounds, so that all receivers have the same number of samples.
            if round > 0 && self.is_overdue(QUICK_RUN_TIMEOUT.saturating_sub(longest)) {
                settings.notes.push(format!("quick run, slow machine: time for {round} rounds only"));
                break;
            }
            let begun = Instant::now();
            for index in order {
                let config = configs[index];
                let rounds = self.options.rounds;
                let what = format!(
                    "{} with {} threads, round {} of {rounds}",
                    config.kind,
                    config.threads,
                    round + 1
                );
                samples[index].push(self.sample(&config, pps, self.options.duration, round, &what)?);
            }
            longest = longest.max(begun.elapsed());
        }
        Ok(samples)
    }

    /// Offered and delivered rate when `pps` arrive: medians of three.
    fn measure_overload(&mut self, config: &Config, pps: f64) -> Result<(f64, f64)> {
        let what = format!("{} with {} threads: twice its rate", config.kind, config.threads);
        let times = if self.options.quick { 1 } else { 3 };
        let time = self.options.duration.div_f64(f64::from(times));
        let mut samples = Vec::new();
        for round in 0..times {
            samples.push(self.sample(config, Some(pps.max(1.0)), time, round as usize, &what)?);
        }
        Ok((
            median(samples.iter().map(|sample| sample.offered_pps)),
            median(samples.iter().map(|sample| sample.delivered_pps)),
        ))
    }

    fn sample(
        &mut self,
        config: &Config,
        pps: Option<f64>,
        duration: Duration,
        round: usize,
        what: &str,
    ) -> Result<Sample> {
        check_stop(self.controller.stop())?;
        let done = self.spent.as_secs_f64() / self.planned.as_secs_f64().max(1e-9);
        self.controller.progress(done.min(1.0), what);
        let load =
            Load { pps, duration, size: config.size, flows: self.options.flows, gso: self.options.gso };
        let receiver = self.options.receiver_options(self.setup, config.kind, config.threads, config.size);
        let sample = measure(self.setup, config.kind, &receiver, &load, round)?;
        self.spent += with_overhead(duration);
        Ok(sample)
    }
}

/// Duration of a sample with its set-up.
fn with_overhead(duration: Duration) -> Duration {
    duration.mul_f64(1.2) + Duration::from_millis(40)
}
