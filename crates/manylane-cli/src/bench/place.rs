//! The place of a benchmark. The arguments are checked against it before anything is created.

use std::fmt::Display;

use anyhow::{Context, Result, bail, ensure};
use manylane::{Probe, WaitPolicy};
use manylane_bench::Setup;
use manylane_bench::experiments::batch::RecvMethod;
use manylane_bench::experiments::rtt::Contender;
use manylane_bench::place::topology;
use manylane_bench::receivers::Kind;
use manylane_measure::machine;
use manylane_sys::kernel_module;

use crate::args::{BenchArgs, PlaceArgs};
use crate::output::{self, UsageError};

/// The selected place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Loopback,
    Testbed {
        links: usize,
        /// Receive queues of each device; `None` for the default.
        queues: Option<u32>,
    },
}

/// A testbed with one link.
pub(super) const ONE_LINK: Place = Place::Testbed { links: 1, queues: None };

impl Place {
    /// `testbed` if it is available and `--loopback` was not given, otherwise loopback. If the
    /// benchmark `must` have a testbed, there is no fallback.
    pub(super) fn select(args: &PlaceArgs, testbed: Self, must: bool) -> Result<Self> {
        if must {
            return testbed.require();
        }
        if args.loopback {
            return Ok(Self::Loopback);
        }
        match topology::available() {
            Ok(()) => Ok(testbed),
            Err(why) => {
                output::eprint_line(&format!("using loopback: {why:#}"));
                Ok(Self::Loopback)
            }
        }
    }

    /// The place, if it is available.
    pub(super) fn require(self) -> Result<Self> {
        if self.has_device() {
            topology::available().context("cannot create a testbed")?;
        }
        Ok(self)
    }

    pub(super) fn has_device(self) -> bool {
        self != Self::Loopback
    }

    /// Checks that each of the receivers can run here.
    pub(super) fn check_receivers<R: Receiver>(self, receivers: &[R]) -> Result<()> {
        let probe = manylane::probe();
        match receivers.iter().find_map(|receiver| receiver.obstacle(self, &probe).map(|why| (receiver, why)))
        {
            Some((receiver, why)) => bail!("{receiver} {why}"),
            None => Ok(()),
        }
    }

    /// Those of `all` that can run here.
    pub(super) fn available<R: Receiver + Copy>(self, all: &[R]) -> Vec<R> {
        let probe = manylane::probe();
        all.iter().copied().filter(|receiver| receiver.obstacle(self, &probe).is_none()).collect()
    }

    /// Checks that the payloads fit the frames of a testbed.
    pub(super) fn check_sizes(self, sizes: &[usize], size_max: usize) -> Result<()> {
        match sizes.iter().find(|size| self.has_device() && **size > size_max) {
            Some(size) => Err(UsageError(format!(
                "--size {size} does not fit into a frame of the testbed: expected at most {size_max}"
            ))
            .into()),
            None => Ok(()),
        }
    }

    /// Creates the place, once all arguments have been checked.
    pub(super) fn create(self, common: &BenchArgs) -> Result<Setup> {
        output::create_folder(&common.out)?;
        let cpus = common.receiver_cpus.clone();
        match self {
            Self::Loopback => Ok(Setup::loopback(cpus)),
            Self::Testbed { links, queues: None } => Setup::testbed(cpus, links),
            Self::Testbed { links, queues: Some(queues) } => Setup::testbed_with_queues(cpus, links, queues),
        }
    }
}

/// Checks the options that all benchmarks have. Only some benchmarks compare several batches.
pub(super) fn check(common: &BenchArgs, compares_batches: bool) -> Result<()> {
    if common.batch.len() > 1 && !compares_batches {
        bail!(UsageError(
            "several values of --batch: only bench batch and bench replies compare them".into()
        ));
    }
    let allowed = machine::allowed_cpus();
    let denied = common.receiver_cpus.iter().flatten().find(|cpu| !allowed.contains(cpu));
    if let Some(cpu) = denied {
        let all = allowed.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        bail!(UsageError(format!(
            "--receiver-cpus: this process may not run on CPU {cpu}: expected some of {all}"
        )));
    }
    Ok(())
}

/// Checks that `what` gets two CPUs: the sender's and the first one of the receivers.
pub(super) fn check_two_cpus(common: &BenchArgs, what: impl Display) -> Result<()> {
    let (sender, receivers) = Setup::assign_cpus(common.receiver_cpus.clone());
    ensure!(
        sender.is_some() && sender != receivers.first().copied(),
        "{what} needs two CPUs: one for the sender, another one for the receiver (--receiver-cpus)"
    );
    Ok(())
}

/// A receiver that may lack something on this machine.
pub(super) trait Receiver: Display {
    /// The reason why it cannot run at `place`, if any.
    fn obstacle(&self, place: Place, probe: &Probe) -> Option<String>;
}

fn obstacle(
    place: Place,
    probe: &Probe,
    (needs_device, needs_uring, needs_module): (bool, bool, bool),
) -> Option<String> {
    if needs_device && !place.has_device() {
        return Some("needs a device, and so a testbed (root, without --loopback)".into());
    }
    if needs_module && !kernel_module::is_loaded() {
        return Some("needs the kernel module (insmod kernel/manylane.ko)".into());
    }
    let missing = probe.uring.as_ref().err().filter(|_| needs_uring)?;
    Some(format!("needs io_uring: {missing}"))
}

impl Receiver for Kind {
    fn obstacle(&self, place: Place, probe: &Probe) -> Option<String> {
        obstacle(place, probe, (self.needs_device(), self.needs_uring(), self.needs_module()))
    }
}

impl Receiver for RecvMethod {
    fn obstacle(&self, place: Place, probe: &Probe) -> Option<String> {
        obstacle(place, probe, (self.needs_device(), self.needs_uring(), self.needs_module()))
    }
}

impl Receiver for Contender {
    fn obstacle(&self, place: Place, probe: &Probe) -> Option<String> {
        let polled: &[_] = match self.kind {
            _ if !matches!(self.wait, WaitPolicy::BusyPoll(_)) => &[],
            Kind::LaneUring => &[&probe.uring_napi],
            Kind::LaneXdp => &[&probe.busy_poll, &probe.epoll_busy_poll],
            _ => &[&probe.busy_poll],
        };
        let missing = polled.iter().find_map(|tried| tried.as_ref().err());
        self.kind.obstacle(place, probe).or_else(|| missing.map(|why| format!("needs busy polling: {why}")))
    }
}
