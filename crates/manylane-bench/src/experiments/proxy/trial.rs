//! One sample of one proxy, for experiments that are not `bench proxy`.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use manylane_measure::named_enum;

use super::bed::Bed;
use super::contender::{Contender, Manylane, RunningProxy, find};
use super::library::RunningLanes;
pub use super::library::{LaneStack, LibraryProxy};
use super::plan::{FEW, Load, PORT};
use super::servers::Servers;
use super::{measure, wrk};
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
    manylane: Manylane,
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
            format!("{lanes} lanes beside clients and servers need {needed} CPUs, but there are {present}")
        })?;
        proxy_cpus.truncate(lanes);
        Self::on_cpus(proxy_cpus, peers_cpu, manylane)
    }

    /// The same on these CPUs, one for each lane.
    fn on_cpus(proxy_cpus: Vec<usize>, peers_cpu: usize, manylane: PathBuf) -> Result<Self> {
        let bed = Bed::with_queues(&proxy_cpus, peers_cpu)?;
        let servers = Servers::start(&bed)?;
        let manylane = Manylane { path: manylane, rx_coalesce: None };
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

#[cfg(test)]
mod tests {
    use manylane_testbed::skip;

    use super::*;

    const DURATION: Duration = Duration::from_millis(100);

    /// Hosts for so many lanes, which may share a CPU, and which need no program.
    fn hosts(name: &str, lanes: usize) -> Option<ProxyHosts> {
        let able = skip::need_root(name) && skip::need_kernel(name, (5, 12), "threaded NAPI");
        let (Some(peers_cpu), proxy_cpus) = Setup::assign_cpus(None) else { return None };
        able.then(|| ProxyHosts::on_cpus(vec![proxy_cpus[0]; lanes], peers_cpu, PathBuf::new()).unwrap())
    }

    /// Requests are answered, bytes in bulk arrive, and the proxy's CPU time is seen.
    fn assert_serves(hosts: &ProxyHosts, proxy: LibraryProxy) {
        let stop = AtomicBool::new(false);
        let subject = Subject::Library(proxy);
        let sample = hosts.sample(subject, Generator::Own, DURATION, &stop).unwrap();
        assert!(
            sample.requests > 0 && sample.failed == 0 && sample.proxy_cpu_ns > 0.0,
            "{proxy:?}: {sample:?}"
        );
        let bulk = hosts.bulk(subject, DURATION, &stop).unwrap();
        assert!(bulk.bytes_per_s > 0.0 && bulk.failed == 0, "{proxy:?}: {bulk:?}");
    }

    #[test]
    fn netns_two_lanes_of_a_proxy_serve() {
        let Some(hosts) = hosts("netns_two_lanes_of_a_proxy_serve", 2) else { return };
        for stack in [LaneStack::Kernel, LaneStack::Xdp { batch: None, buffer: None, delays: true }] {
            assert_serves(&hosts, LibraryProxy { stack, is_pinned: true, offloads: true });
        }
    }

    #[test]
    fn netns_a_lane_of_a_proxy_serves_without_optimisations() {
        let name = "netns_a_lane_of_a_proxy_serves_without_optimisations";
        let Some(hosts) = hosts(name, 1) else { return };
        let stack = LaneStack::Xdp { batch: Some(1), buffer: Some(4096), delays: false };
        assert_serves(&hosts, LibraryProxy { stack, is_pinned: false, offloads: false });
        // The next proxy can listen at once, with other options.
        assert_serves(&hosts, LibraryProxy { stack, is_pinned: true, offloads: true });
    }

    #[test]
    fn netns_wrk_is_answered() {
        let name = "netns_wrk_is_answered";
        if !skip::need(name, Generator::Wrk.is_installed(), "wrk") {
            return;
        }
        let Some(hosts) = hosts(name, 1) else { return };
        let proxy = LibraryProxy { stack: LaneStack::Kernel, is_pinned: true, offloads: true };
        let sample =
            hosts.sample(Subject::Library(proxy), Generator::Wrk, DURATION, &AtomicBool::new(false)).unwrap();
        assert!(sample.requests > 0 && sample.p99_ns > 0.0 && sample.proxy_cpu_ns > 0.0, "{sample:?}");
    }

    #[test]
    fn more_lanes_than_cpus_are_refused_with_the_reason() {
        let Err(err) = ProxyHosts::new(1000, PathBuf::new()) else { panic!("1000 lanes") };
        assert!(err.to_string().contains("need 1001 CPUs"), "{err:#}");
    }
}
