//! `bench rtt`: round-trip times and cost of each wait policy.
//!
//! ```text
//! for each layout, round, contender (in turn):  start it ─► warm up ─► each mode: a series of requests ─► stop it
//! ```
//!
//! A contender is a receiver with a wait policy. The modes are a closed ping-pong (the next
//! request when the reply has arrived), open loops at fixed rates ([`generator`]), and no requests
//! at all, which shows the cost of an idle server.

pub mod cpu_layout;
pub mod generator;

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use manylane::WaitPolicy;

use self::cpu_layout::CpuLayout;
use self::generator::{Arrivals, Generator, RequestStats};
use crate::receivers::{Kind, ReceiverOptions, RunningReceiver, Work};
use crate::sample::{CpuBusyTimer, check_stop};
use crate::schema::{BENCH_RTT, BenchSettings, Document, RttMetrics, RttRow, RttSample, Sample};
use crate::{Controller, Limits, Options, Setup, Trial, oversubscribed_note, run_rounds, sustained_rate};

/// Default rates of open loops, as shares of the sustained rate.
const RATE_FRACTIONS: [f64; 3] = [0.1, 0.4, 0.8];
/// A rate that is always included, at which polling all the time would be a waste.
const MODERATE_PPS: f64 = 20_000.0;
/// Warm-up ping-pong, in which next hops are resolved and lanes adapt to the intervals.
const WARM_UP_TIME: Duration = Duration::from_millis(20);

/// A receiver with its wait policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Contender {
    /// The receiver.
    pub kind: Kind,
    /// The wait policy.
    pub wait: WaitPolicy,
}

impl Contender {
    /// The default contenders: the baselines, and each engine with each policy. The caller leaves
    /// out those that are not available.
    #[must_use]
    pub fn defaults() -> Vec<Self> {
        let spin = WaitPolicy::Spin(Duration::from_millis(1));
        let kernel = WaitPolicy::BusyPoll(Duration::from_micros(100));
        let mut all = vec![
            Self { kind: Kind::SocketRecvfrom, wait: WaitPolicy::Sleep },
            Self { kind: Kind::SocketRecvmmsg, wait: WaitPolicy::Sleep },
            Self { kind: Kind::SocketRecvfrom, wait: spin },
            Self { kind: Kind::SocketRecvfrom, wait: kernel },
        ];
        for kind in [Kind::LaneMmsg, Kind::LaneUring, Kind::LaneXdp] {
            all.extend(
                [WaitPolicy::Sleep, kernel, spin, WaitPolicy::Adaptive].map(|wait| Self { kind, wait }),
            );
        }
        all
    }

    fn is_supported(self) -> bool {
        match self.wait {
            WaitPolicy::Sleep => true,
            WaitPolicy::Spin(_) | WaitPolicy::BusyPoll(_) if self.kind == Kind::SocketRecvfrom => true,
            _ => self.kind.is_lane(),
        }
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}+{}", self.kind, self.wait))
    }
}

impl FromStr for Contender {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, wait) = text.split_once('+').unwrap_or((text, "sleep"));
        let wait = wait.parse().map_err(|err: manylane::Error| err.to_string())?;
        let contender = Self { kind: kind.parse()?, wait };
        let none = format!(
            "{kind} does not support wait {wait}: lanes have all policies, socket/recvfrom spin:… and busy-poll:…"
        );
        contender.is_supported().then_some(contender).ok_or(none)
    }
}

/// Options of the benchmark.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The contenders.
    pub contenders: Vec<Contender>,
    /// CPU layouts of server, generator and device work.
    pub cpu_layouts: Vec<CpuLayout>,
    /// Requests per second of the open loops; by default shares of the lowest sustained rate.
    pub rates: Vec<f64>,
    /// Intervals of the open loops.
    pub arrivals: Arrivals,
}

/// One series of requests.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Mode {
    PingPong,
    OpenLoop(f64),
    Idle,
}

impl Mode {
    fn name(self) -> &'static str {
        match self {
            Self::PingPong => "ping-pong",
            Self::OpenLoop(_) => "open",
            Self::Idle => "idle",
        }
    }

    fn rate(self) -> Option<f64> {
        if let Self::OpenLoop(rate) = self { Some(rate) } else { None }
    }
}

/// Runs the benchmark.
///
/// # Errors
/// Fails if a contender or the generator fails, if a layout is not available, or if it is
/// stopped.
pub fn run(
    setup: &mut Setup,
    options: &Options,
    plan: &Plan,
    controller: &mut dyn Controller,
) -> Result<Document<BenchSettings, RttRow>> {
    let limits = Limits { start_pps: MODERATE_PPS, max_pps: 1e6, precision: 0.1, ..options.limits() };
    let mut settings = options.settings(setup, &limits);
    let options = &Options { work: Work::Echo, ..options.clone() };
    settings.receivers = plan.contenders.iter().map(ToString::to_string).collect();
    settings.sender = "a socket, and a thread that never sleeps".into();
    settings.flows = 1;
    settings.rx_usecs.clear();
    settings.notes.extend(oversubscribed_note(setup));
    let mut rows = Vec::new();
    for &size in &options.sizes {
        let bench = Bench { setup, options, plan, size };
        let rates = if plan.rates.is_empty() {
            bench.find_rates(&limits, &mut settings, controller)?
        } else {
            plan.rates.clone()
        };
        for &layout in &plan.cpu_layouts {
            rows.extend(bench.compare(layout, &rates, controller)?);
        }
    }
    controller.progress(1.0, "done");
    Ok(Document::new(BENCH_RTT, settings, rows))
}

struct Bench<'a> {
    setup: &'a Setup,
    options: &'a Options,
    plan: &'a Plan,
    size: usize,
}

impl Bench<'_> {
    /// Shares of the highest rate that all contenders sustain, with this generator.
    fn find_rates(
        &self,
        limits: &Limits,
        settings: &mut BenchSettings,
        controller: &mut dyn Controller,
    ) -> Result<Vec<f64>> {
        let (mut lowest, mut slowest) = (f64::INFINITY, None);
        for &contender in &self.plan.contenders {
            let cpus = CpuLayout::SeparateCpus.cpus(self.setup);
            let running = self.start(contender, cpus.server)?;
            let mut generator = Generator::open(self.setup, running.addr(), self.size)?;
            let stop = controller.stop();
            let found = sustained_rate(&limits.below(lowest), |pps| {
                check_stop(stop)?;
                let asked = generator.run_pinned(cpus, |generator| {
                    generator.open_loop(pps, Arrivals::Even, limits.trial, stop)
                })?;
                let p99 = Duration::from_nanos(asked.latency.value_at_quantile(0.99));
                Ok(Trial { offered_pps: asked.offered_pps(), loss: asked.loss(), delay: p99 })
            })?;
            controller.progress(0.0, &format!("{contender}: {:.0} k/s", found.pps / 1e3));
            ensure!(
                found.pps > 0.0,
                "{contender} loses requests at every rate: wait until the machine is idle, or set --rate"
            );
            if found.pps < lowest {
                (lowest, slowest) = (found.pps, Some((contender, found.sender_limited)));
            }
        }
        if let Some((contender, sender_limited)) = slowest {
            let limit = if sender_limited { "the generator's maximum".into() } else { contender.to_string() };
            settings.notes.push(format!("all sustain {lowest:.0} requests per second (limit: {limit})"));
        }
        let mut rates: Vec<f64> =
            RATE_FRACTIONS.iter().map(|share| (lowest * share / 1e3).round() * 1e3).collect();
        rates.push(MODERATE_PPS);
        rates.retain(|rate| *rate >= 1e3 && *rate <= lowest);
        rates.sort_by(f64::total_cmp);
        rates.dedup();
        Ok(rates)
    }

    fn start(&self, contender: Contender, cpu: Option<usize>) -> Result<Box<dyn RunningReceiver>> {
        let kind = contender.kind;
        let usual = self.options.receiver_options(self.setup, kind, 1, self.size);
        // Lanes as they are without options: their delay follows the load.
        let rx_coalesce = self.options.rx_coalesce;
        let options =
            ReceiverOptions { wait: contender.wait, cpus: cpu.into_iter().collect(), rx_coalesce, ..usual };
        self.setup.start(kind, &options).with_context(|| contender.to_string())
    }

    /// All contenders in one layout, interleaved.
    fn compare(
        &self,
        layout: CpuLayout,
        rates: &[f64],
        controller: &mut dyn Controller,
    ) -> Result<Vec<RttRow>> {
        let held = layout.apply(self.setup)?;
        let mut modes = vec![Mode::PingPong];
        modes.extend(rates.iter().map(|&rate| Mode::OpenLoop(rate)));
        modes.push(Mode::Idle);
        let contenders = &self.plan.contenders;
        let samples = run_rounds(self.options.rounds, contenders, controller, |&contender, round, stop| {
            self.sample(contender, layout, &modes, round, stop)
        })?;
        drop(held);
        let mut rows = Vec::new();
        for (contender, samples) in contenders.iter().zip(samples) {
            for (index, mode) in modes.iter().enumerate() {
                let samples = samples.iter().map(|round: &Vec<RttSample>| round[index]).collect();
                rows.push(RttRow {
                    wait: contender.wait.to_string(),
                    cpu_layout: layout.to_string(),
                    mode: mode.name().into(),
                    rate: mode.rate(),
                    arrivals: self.plan.arrivals.to_string(),
                    ..RttRow::from_samples(contender.kind.name(), self.size, samples)
                });
            }
        }
        Ok(rows)
    }

    /// One contender, once in each mode.
    fn sample(
        &self,
        contender: Contender,
        layout: CpuLayout,
        modes: &[Mode],
        round: usize,
        stop: &AtomicBool,
    ) -> Result<Vec<RttSample>> {
        let cpus = layout.cpus(self.setup);
        let running = self.start(contender, cpus.server)?;
        let mut generator = Generator::open(self.setup, running.addr(), self.size)?;
        let (arrivals, duration) = (self.plan.arrivals, self.options.duration);
        generator.run_pinned(cpus, move |generator| {
            let mut samples = Vec::with_capacity(modes.len());
            generator.ping_pong(WARM_UP_TIME, stop)?;
            for mode in modes {
                check_stop(stop)?;
                let (clock, before) = (CpuBusyTimer::start(), running.snapshot());
                let asked = match mode {
                    Mode::PingPong => generator.ping_pong(duration, stop)?,
                    Mode::OpenLoop(rate) => generator.open_loop(*rate, arrivals, duration, stop)?,
                    Mode::Idle => {
                        std::thread::sleep(duration);
                        RequestStats::new()?
                    }
                };
                let (after, (elapsed, busy)) = (running.snapshot(), clock.stop());
                let server = after.rx_cpu.saturating_sub(before.rx_cpu);
                let dropped = after.kernel_dropped - before.kernel_dropped;
                samples.push(summarize(round, &asked, elapsed, server, busy, dropped));
            }
            running.stop()?;
            Ok(samples)
        })
    }
}

fn summarize(
    round: usize,
    asked: &RequestStats,
    elapsed: Duration,
    server: Duration,
    busy: Duration,
    kernel_dropped: u64,
) -> RttSample {
    let cores = |time: Duration| time.as_secs_f64() / elapsed.as_secs_f64().max(1e-9);
    let at = |share: f64| asked.latency.value_at_quantile(share) as f64;
    let cpu = [server, busy];
    let sample = Sample::from_totals(round, asked.requests, asked.replies, elapsed, cpu, kernel_dropped);
    RttSample {
        sample: Sample { offered_pps: asked.offered_pps(), ..sample },
        rtt: RttMetrics {
            p50_ns: at(0.5),
            p90_ns: at(0.9),
            p99_ns: at(0.99),
            p999_ns: at(0.999),
            max_ns: asked.latency.max() as f64,
            behind_p99_ns: asked.send_lag.value_at_quantile(0.99) as f64,
            server_cores: cores(server),
            machine_cores: cores(busy),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contenders_are_read_back() {
        for contender in Contender::defaults() {
            assert_eq!(contender.to_string().parse(), Ok(contender));
        }
        let plain: Contender = "lane/mmsg".parse().unwrap();
        assert_eq!(plain.wait, WaitPolicy::Sleep);
        assert!(
            "socket/recvmmsg+adaptive".parse::<Contender>().unwrap_err().contains("socket/recvfrom spin")
        );
        assert!("xsk/raw+spin:5".parse::<Contender>().is_err());
        assert!("lane/none+sleep".parse::<Contender>().unwrap_err().contains("lane/mmsg"));
        assert!("lane/mmsg+nap".parse::<Contender>().unwrap_err().contains("adaptive"));
    }
}
