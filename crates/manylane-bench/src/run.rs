//! The runner of the benchmarks: options, rounds, progress.

use std::fmt::Display;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use manylane::Steering;

use crate::place::{Load, Setup};
use crate::receivers::{Kind, ReceiverOptions, Work, default_recv_buffer, fixed_delay};
use crate::sample::{check_stop, measure};
use crate::schema::BenchSettings;
use crate::search::{Limits, Trial, sustained_rate};
use crate::stats::interleaved;
use crate::work::SyntheticWork;

/// Number of flows: enough for the hash of the kernel to spread them over eight lanes.
pub const DEFAULT_FLOWS: u16 = 64;

/// Options of all benchmarks.
#[derive(Debug, Clone)]
pub struct Options {
    /// Numbers of receiving threads.
    pub threads: Vec<usize>,
    /// Payload sizes in bytes.
    pub sizes: Vec<usize>,
    /// The receivers to compare.
    pub receivers: Vec<Kind>,
    /// Handling of each datagram.
    pub work: Work,
    /// Simulated work of the application for each datagram.
    pub synthetic_work: SyntheticWork,
    /// Rounds; each measures every receiver once.
    pub rounds: usize,
    /// Length of a sample.
    pub duration: Duration,
    /// Rate of the cost rounds and of churn; found by the search if `None`.
    pub pps: Option<f64>,
    /// Number of flows.
    pub flows: u16,
    /// Maximum number of datagrams of one call.
    pub batch: usize,
    /// Receive buffer of each socket in bytes.
    pub recv_buffer: usize,
    /// Delay of lanes and `reuseport/*` after a batch that was not full; by default that of lanes.
    pub rx_coalesce: Option<Duration>,
    /// Steering of the lanes.
    pub steering: Steering,
    /// The sender sends GSO messages. Loopback only.
    pub gso: bool,
    /// Shorter: fewer searches, shorter samples.
    pub quick: bool,
    /// The command line, for the record.
    pub command: String,
}

impl Options {
    /// One round of a second, of counting receivers with one thread and datagrams of ten bytes.
    #[must_use]
    pub fn new(receivers: Vec<Kind>) -> Self {
        Self {
            threads: vec![1],
            sizes: vec![10],
            receivers,
            work: Work::Count,
            synthetic_work: SyntheticWork::default(),
            rounds: 1,
            duration: Duration::from_secs(1),
            pps: None,
            flows: DEFAULT_FLOWS,
            batch: 64,
            recv_buffer: default_recv_buffer(),
            rx_coalesce: None,
            steering: Steering::Flow,
            gso: false,
            quick: false,
            command: String::new(),
        }
    }

    pub(crate) fn receiver_options(
        &self,
        setup: &Setup,
        kind: Kind,
        threads: usize,
        size: usize,
    ) -> ReceiverOptions {
        let cpus = setup.receiver_cpus().len();
        ReceiverOptions {
            work: self.work,
            synthetic_work: self.synthetic_work,
            batch: self.batch,
            recv_buffer: self.recv_buffer,
            rx_coalesce: Some(self.rx_coalesce(kind.needs_device(), threads, cpus)),
            steering: self.steering,
            ..setup.receiver(threads, size)
        }
    }

    /// The delay for this number of threads and CPUs, of receivers of frames and of others;
    /// none if threads are not pinned.
    fn rx_coalesce(&self, frames: bool, threads: usize, cpus: usize) -> Duration {
        let cpus = if cpus == 0 { usize::MAX } else { cpus };
        self.rx_coalesce.unwrap_or_else(|| fixed_delay(frames, threads, cpus))
    }

    fn rx_coalesce_usecs(&self, frames: bool, setup: &Setup) -> Vec<u64> {
        let cpus = setup.receiver_cpus().len();
        self.threads
            .iter()
            .map(|&threads| self.rx_coalesce(frames, threads, cpus).as_micros() as u64)
            .collect()
    }

    /// The limits of searches for sustained rates.
    pub(crate) fn limits(&self) -> Limits {
        if self.quick { Limits::quick(self.duration) } else { Limits::default() }
    }

    pub(crate) fn settings(&self, setup: &Setup, limits: &Limits) -> BenchSettings {
        let [place, device, sender] = setup.describe();
        BenchSettings {
            command: self.command.clone(),
            started_unix: SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs()),
            setup: place,
            device,
            sender,
            sender_cpus: setup.sender_cpu().into_iter().collect(),
            receiver_cpus: setup.receiver_cpus().to_vec(),
            threads: self.threads.clone(),
            sizes: self.sizes.clone(),
            receivers: self.receivers.iter().map(ToString::to_string).collect(),
            rounds: self.rounds,
            sample_seconds: self.duration.as_secs_f64(),
            flows: usize::from(self.flows),
            batch: self.batch,
            recv_buffer: self.recv_buffer,
            rx_usecs: self.rx_coalesce_usecs(false, setup),
            xdp_rx_usecs: if self.receivers.iter().any(|kind| kind.needs_device()) {
                self.rx_coalesce_usecs(true, setup)
            } else {
                Vec::new()
            },
            steering: self.steering.to_string(),
            work_nanos: self.synthetic_work.nanos(),
            loss_limit: limits.loss,
            trial_seconds: limits.trial.as_secs_f64(),
            quick: self.quick,
            notes: Vec::new(),
        }
    }
}

/// The caller of a benchmark: gets its progress, and may end it.
pub trait Controller {
    /// Reports progress: the fraction `done`, and the current step `what`.
    fn progress(&mut self, done: f64, what: &str);

    /// Set to end the benchmark early.
    fn stop(&self) -> &AtomicBool;
}

/// Samples of each of `configs`, in rounds: `sample` takes one of a configuration in a round.
///
/// Rounds are interleaved (A B C, then all again), so that slow changes of the machine affect all
/// alike. Each starts with another configuration, so that none always runs after the same one.
pub(crate) fn run_rounds<C: Display, S>(
    rounds: usize,
    configs: &[C],
    controller: &mut dyn Controller,
    mut sample: impl FnMut(&C, usize, &AtomicBool) -> Result<S>,
) -> Result<Vec<Vec<S>>> {
    let mut samples: Vec<Vec<S>> = configs.iter().map(|_| Vec::new()).collect();
    for (round, order) in interleaved(rounds, configs.len()).enumerate() {
        for (taken, index) in order.into_iter().enumerate() {
            check_stop(controller.stop())?;
            let what = format!("{}, round {} of {rounds}", configs[index], round + 1);
            let done = (round * configs.len() + taken) as f64;
            controller.progress(done / (configs.len() * rounds) as f64, &what);
            samples[index].push(sample(&configs[index], round, controller.stop()).context(what)?);
        }
    }
    Ok(samples)
}

/// The requested rate, or else half of the lowest sustained rate of `kinds`, so that any losses
/// have another reason.
pub(crate) fn safe_rate(
    setup: &mut Setup,
    options: &Options,
    kinds: &[Kind],
    (threads, size): (usize, usize),
    limits: &Limits,
    controller: &mut dyn Controller,
) -> Result<f64> {
    const SUSTAINED_FRACTION: f64 = 0.5;
    if let Some(pps) = options.pps {
        return Ok(pps);
    }
    let mut lowest = f64::INFINITY;
    for &kind in kinds {
        let receiver = options.receiver_options(setup, kind, threads, size);
        let found = sustained_rate(&limits.below(lowest), |pps| {
            check_stop(controller.stop())?;
            controller.progress(0.0, &format!("searching for the sustained rate: {:.0} k/s", pps / 1e3));
            let load =
                Load { pps: Some(pps), duration: limits.trial, size, flows: options.flows, gso: false };
            let sample = measure(setup, kind, &receiver, &load, 0)?;
            Ok(Trial::of_sample(&sample))
        })?;
        ensure!(
            found.pps > 0.0,
            "{kind} loses datagrams at every rate: wait until the machine is idle, or set --rate"
        );
        lowest = lowest.min(found.pps);
    }
    Ok(lowest * SUSTAINED_FRACTION)
}

/// A note about a machine with too few CPUs, if it is one.
pub(crate) fn oversubscribed_note(setup: &Setup) -> Option<String> {
    setup.sender_cpu().is_none().then(|| {
        "one CPU: sender and receivers share it, so that rates are far below those of a receiver alone".into()
    })
}
