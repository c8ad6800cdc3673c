//! One sample of one proxy, for experiments that are not `bench proxy`.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use manylane_measure::named_enum;

use super::bed::Bed;
use super::contender::{Contender, RunningProxy, find};
pub use super::library::{LaneStack, LibraryProxy};
use super::library::RunningLanes;
use super::servers::Servers;
use super::{FEW, Load, PORT, measure, wrk};
use crate::schema::ProxySample;
use crate::{Setup, check_stop, run_pinned};

named_enum! {
    /// What sends the requests, on 64 connections that live on.
    pub enum Generator {
        /// The program of that name. It sends HTTP, and counts the time of whole seconds.
        Wrk = "wrk",
        /// The clients of `bench proxy`.
        Own = "own generator",
    }
}

impl Generator {
    /// True if it can be run here.
    #[must_use]
    pub fn is_installed(self) -> bool {
        self == Self::Own || find(self.name()).is_some()
    }
}

/// A proxy.
#[derive(Clone, Copy, Debug)]
pub enum Subject {
    /// A process.
    Process(Contender),
    /// Threads of this process.
    Library(LibraryProxy),
}

/// A proxy that runs.
enum Running {
    Process(RunningProxy),
    Library(RunningLanes),
}

/// Clients, a proxy and servers, each a host.
pub struct ProxyHosts {
    bed: Bed,
    servers: Servers,
    proxy_cpus: Vec<usize>,
    manylane: PathBuf,
}

impl ProxyHosts {
    /// Hosts whose devices have as many queues as the proxy has `lanes`, each on a CPU of its own.
    /// `manylane` is the program of that name.
    ///
    /// # Errors
    /// Fails without root, and if there are fewer CPUs than lanes and one more.
    pub fn new(lanes: usize, manylane: PathBuf) -> Result<Self> {
        let (peers_cpu, mut proxy_cpus) = Setup::assign_cpus(None);
        let (needed, present) = (lanes + 1, proxy_cpus.len() + usize::from(peers_cpu.is_some()));
        let peers_cpu = peers_cpu.filter(|_| present >= needed);
        let peers_cpu = peers_cpu.with_context(|| {
            format!("{lanes} lanes, and clients and servers need {needed} CPUs, but there are {present}")
        })?;
        proxy_cpus.truncate(lanes);
        let bed = Bed::with_queues(&proxy_cpus, peers_cpu)?;
        let servers = Servers::start(&bed)?;
        Ok(Self { bed, servers, proxy_cpus, manylane })
    }

    /// Starts a proxy, sends requests for this time, and ends it. Processes have one lane.
    ///
    /// # Errors
    /// Fails if the proxy or the generator does not start, or if it is stopped.
    pub fn sample(
        &self,
        subject: Subject,
        generator: Generator,
        duration: Duration,
        stop: &AtomicBool,
    ) -> Result<ProxySample> {
        let running = self.start(subject, stop)?;
        match generator {
            Generator::Own => measure(&self.bed, Load::KeepAlive, 0.0, duration, || self.busy(&running)),
            Generator::Wrk => self.run_wrk(duration, || self.busy(&running)),
        }
    }

    /// Starts a proxy, and moves bytes from the servers to the clients for this time.
    ///
    /// # Errors
    /// Fails if the proxy does not start, or if it is stopped.
    pub fn bulk(&self, subject: Subject, duration: Duration, stop: &AtomicBool) -> Result<ProxySample> {
        let running = self.start(subject, stop)?;
        measure(&self.bed, Load::Bulk, 0.0, duration, || self.busy(&running))
    }

    fn start(&self, subject: Subject, stop: &AtomicBool) -> Result<Running> {
        check_stop(stop)?;
        let (bed, server) = (&self.bed, self.servers.addr());
        let listen = bed.proxy_addr(PORT);
        match subject {
            Subject::Process(contender) => {
                bed.set_offloads(true)?;
                contender.start(bed, &self.manylane, listen, server).map(Running::Process)
            }
            Subject::Library(proxy) => {
                proxy.start(bed, &self.proxy_cpus, listen, server).map(Running::Library)
            }
        }
    }

    fn busy(&self, running: &Running) -> Duration {
        match running {
            Running::Process(process) => self.bed.proxy_cpu_time(process.process()),
            Running::Library(lanes) => self.bed.cpu_time(lanes.ids().iter().copied()),
        }
    }

    fn run_wrk(&self, duration: Duration, busy: impl Fn() -> Duration + Sync) -> Result<ProxySample> {
        let program = find(Generator::Wrk.name()).context("wrk is not installed")?;
        let command = self.bed.clients().command(program)?;
        let url = format!("http://{}/", self.bed.proxy_addr(PORT));
        // The process has the CPU of the thread that starts it.
        run_pinned(Some(self.bed.peers_cpu), || {
            let before = busy();
            let sample = wrk::run(command, &url, FEW, wrk::whole_seconds(duration))?;
            let busy = busy().saturating_sub(before);
            ensure!(sample.requests_per_s > 0.0, "no request was answered");
            let seconds = sample.requests as f64 / sample.requests_per_s;
            Ok(ProxySample {
                proxy_cpu_ns: busy.as_nanos() as f64 / sample.requests as f64,
                proxy_cores: busy.as_secs_f64() / seconds,
                ..sample
            })
        })
    }
}
