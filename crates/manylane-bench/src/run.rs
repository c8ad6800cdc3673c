//! Options, progress, and the common steps of the benchmarks.

use std::fmt::Display;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use manylane::{Builder, Steering, WaitPolicy};
use manylane_sys::sock::{self, Buffer};

use crate::place::{Load, Setup};
use crate::receivers::{Kind, ReceiverOptions, Work};
use crate::sample::{check_stop, measure};
use crate::schema::BenchSettings;
use crate::search::{Limits, Trial, no_loss_rate};
use crate::stats::interleaved;
use crate::work::SyntheticWork;

/// Entries of the rings of each queue, of all receivers with rings: the maximum of lanes. A
/// hypervisor may take a core away for longer than a quarter of them lasts, and kernel sockets
/// have large queues, too.
pub const RING_SIZE: u32 = 16_384;

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
    /// Shorter: fewer searches, shorter samples.
    pub quick: bool,
    /// The command line, for the record.
    pub command: String,
}

impl Options {
    pub(crate) fn receiver_options(
        &self,
        setup: &Setup,
        kind: Kind,
        threads: usize,
        size: usize,
    ) -> ReceiverOptions {
        let cpus = setup.receiver_cpus();
        ReceiverOptions {
            addr: setup.bind_addr(),
            work: self.work,
            synthetic_work: self.synthetic_work,
            threads,
            batch: self.batch,
            recv_buffer: self.recv_buffer,
            rx_coalesce: self.rx_coalesce(kind.needs_device(), threads, cpus.len()),
            devices: setup.device_names(),
            ring: RING_SIZE,
            wait: WaitPolicy::Sleep,
            size,
            cpus: cpus.to_vec(),
            steering: self.steering,
        }
    }

    /// The delay for this number of threads and processors, of receivers of frames and of others;
    /// none if threads are not pinned.
    fn rx_coalesce(&self, frames: bool, threads: usize, cpus: usize) -> Duration {
        let cpus = if cpus == 0 { usize::MAX } else { cpus };
        let usual = if frames { Builder::default_xdp_rx_coalesce } else { Builder::default_rx_coalesce };
        self.rx_coalesce.unwrap_or_else(|| usual(threads, cpus))
    }

    fn rx_coalesce_usecs(&self, frames: bool, setup: &Setup) -> Vec<u64> {
        let cpus = setup.receiver_cpus().len();
        self.threads
            .iter()
            .map(|&threads| self.rx_coalesce(frames, threads, cpus).as_micros() as u64)
            .collect()
    }

    pub(crate) fn settings(&self, setup: &Setup, limits: &Limits) -> BenchSettings {
        BenchSettings {
            command: self.command.clone(),
            started_unix: SystemTime::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs()),
            setup: setup.name().into(),
            device: setup.device_description(),
            sender: setup.sender_name().into(),
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
    director: &mut dyn Controller,
    mut sample: impl FnMut(&C, usize, &AtomicBool) -> Result<S>,
) -> Result<Vec<Vec<S>>> {
    let mut samples: Vec<Vec<S>> = configs.iter().map(|_| Vec::new()).collect();
    for (round, order) in interleaved(rounds, configs.len()).enumerate() {
        for (taken, index) in order.into_iter().enumerate() {
            check_stop(director.stop())?;
            let what = format!("{}, round {} of {rounds}", configs[index], round + 1);
            let done = (round * configs.len() + taken) as f64;
            director.progress(done / (configs.len() * rounds) as f64, &what);
            samples[index].push(sample(&configs[index], round, director.stop()).context(what)?);
        }
    }
    Ok(samples)
}

/// The requested rate, or else half of the lowest no-loss rate of `kinds`, so that any losses have
/// another reason.
pub(crate) fn safe_rate(
    setup: &mut Setup,
    options: &Options,
    kinds: &[Kind],
    (threads, size): (usize, usize),
    limits: &Limits,
    director: &mut dyn Controller,
) -> Result<f64> {
    const NO_LOSS_FRACTION: f64 = 0.5;
    const TRIAL_TIME: Duration = Duration::from_millis(200);
    if let Some(pps) = options.pps {
        return Ok(pps);
    }
    let mut lowest = f64::INFINITY;
    for &kind in kinds {
        let receiver = options.receiver_options(setup, kind, threads, size);
        let found = no_loss_rate(limits, |pps| {
            check_stop(director.stop())?;
            director.progress(0.0, &format!("looking for the no-loss rate: {:.0} k/s?", pps / 1e3));
            let load = Load { pps: Some(pps), duration: TRIAL_TIME, size, flows: options.flows, gso: false };
            let sample = measure(setup, kind, &receiver, &load, 0)?;
            Ok(Trial { offered_pps: sample.offered_pps, loss: sample.loss })
        })?;
        lowest = lowest.min(found.pps);
    }
    ensure!(
        lowest.is_finite() && lowest > 0.0,
        "datagrams are lost even at the lowest rate that was tried: is the machine busy? (--rate sets one)"
    );
    Ok(lowest * NO_LOSS_FRACTION)
}

/// A note about a machine with too few processors, if it is one.
pub(crate) fn oversubscribed_note(setup: &Setup) -> Option<String> {
    setup.sender_cpu().is_none().then(|| {
        "one processor: sender and receivers share it, so rates are far below what a receiver can do".into()
    })
}

/// Default receive buffer of each socket: 64 MiB, or the maximum of this process.
///
/// On a shared machine the receivers stop for tens of milliseconds now and then, while the
/// hypervisor runs other guests. Only with a queue that outlasts this does a loss mean that the
/// receiver is too slow.
#[must_use]
pub fn default_recv_buffer() -> usize {
    const RECV_BUFFER_MAX: usize = 64 << 20;
    let socket = std::net::UdpSocket::bind(("127.0.0.1", 0));
    let got = socket.and_then(|socket| sock::set_buffer(socket.as_fd(), Buffer::Receive, RECV_BUFFER_MAX));
    got.map_or(0, |bytes| bytes.min(RECV_BUFFER_MAX))
}
