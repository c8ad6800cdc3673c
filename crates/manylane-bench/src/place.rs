//! The place of a benchmark: loopback, or two hosts of a testbed.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use manylane_measure::machine;
use manylane_measure::sockets::{self, Flows};
use manylane_measure::{Sent, Traffic, Until};
use manylane_testbed::Host;
use manylane_testbed::generator::LiveSender;
pub use manylane_testbed::reply_count::CountHook;
use manylane_testbed::reply_count::{ReplyCounter, ReplyFlows, SharedFlows};
pub use manylane_testbed::topology;
use manylane_testbed::{Layout, Testbed};

use crate::pinned::run_pinned;
use crate::receivers::{Kind, ReceiverOptions, RunningReceiver};

/// Traffic of one sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// Datagrams per second; `None` for as fast as the sender can.
    pub pps: Option<f64>,
    /// Duration.
    pub duration: Duration,
    /// Payload in bytes.
    pub size: usize,
    /// Number of flows.
    pub flows: u16,
    /// Send GSO messages, which the kernel segments into datagrams. Loopback only.
    pub gso: bool,
}

/// A place to measure in: it starts receivers and sends to them.
pub struct Setup {
    environment: Environment,
    /// CPU of the sender, if it has one of its own.
    sender_cpu: Option<usize>,
    receiver_cpus: Vec<usize>,
    /// Counts replies, once that was requested.
    reply_counter: Option<ReplyCounter>,
    count_hook: CountHook,
}

enum Environment {
    Loopback(LoopbackSender),
    Testbed(Box<TestbedState>),
}

/// Sends over loopback.
#[derive(Default)]
struct LoopbackSender {
    /// The target of the flows, and the flows, at which replies are counted.
    target: Option<Traffic>,
    flows: SharedFlows,
}

impl LoopbackSender {
    fn lock_flows(&self) -> MutexGuard<'_, ReplyFlows> {
        // After a panic, the flows and the count still belong together.
        self.flows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&mut self, traffic: &Traffic, until: Until, keep: bool) -> Result<Sent> {
        if !keep {
            return sockets::send(traffic, until);
        }
        let form = Traffic { pps: None, ..traffic.clone() };
        let known = self.lock_flows().flows();
        let flows = match known {
            Some(flows) if self.target.as_ref() == Some(&form) => flows,
            _ => {
                let flows = Arc::new(Flows::open(traffic)?);
                self.lock_flows().replace(Arc::clone(&flows))?;
                self.target = Some(form);
                flows
            }
        };
        flows.send(traffic.pps, &until)
    }
}

/// A testbed, and its current sender.
struct TestbedState {
    testbed: Testbed,
    /// Receive queues of each device.
    queues: u32,
    /// The sender and the traffic that it was created for. It keeps its program while only the
    /// rate changes.
    sender: Option<(Traffic, LiveSender)>,
}

impl TestbedState {
    fn links(&self) -> Vec<usize> {
        (0..self.testbed.links()).collect()
    }

    fn send(&mut self, traffic: &Traffic, cpu: Option<usize>, until: Until) -> Result<Sent> {
        let form = Traffic { pps: None, ..traffic.clone() };
        let links = self.links();
        let sender = match &mut self.sender {
            Some((made_for, sender)) if *made_for == form => sender,
            other => {
                let (from, to) = (self.testbed.host(0), self.testbed.host(1));
                let sender = LiveSender::over_links(from, to, &links, &form)?;
                &mut other.insert((form, sender)).1
            }
        };
        if let Some(cpu) = cpu {
            sender.pin(cpu);
        }
        sender.set_rate(traffic.pps).send(until)
    }
}

/// Port of the receivers in the testbed, where it is free.
const RECEIVER_PORT: u16 = 7;

/// Largest payload in bytes that the frames of a testbed carry: the MTU without the headers of IPv4
/// and UDP.
pub const FRAME_PAYLOAD_MAX: usize = 1500 - 28;

/// Default number of receive queues of testbed devices: the largest number of lanes in a default
/// run.
const DEFAULT_QUEUES: u32 = 8;

impl Setup {
    /// Loopback: ordinary sockets on both sides, no privileges.
    #[must_use]
    pub fn loopback(receiver_cpus: Option<Vec<usize>>) -> Self {
        Self::with_environment(Environment::Loopback(LoopbackSender::default()), receiver_cpus)
    }

    /// Two hosts joined by `interfaces` veth pairs of several queues. The sender generates frames
    /// in XDP, and uses the pairs in turn.
    ///
    /// # Errors
    /// Without root, or if a network namespace cannot be created.
    pub fn testbed(receiver_cpus: Option<Vec<usize>>, interfaces: usize) -> Result<Self> {
        Self::testbed_with_queues(receiver_cpus, interfaces, DEFAULT_QUEUES)
    }

    /// The same, with a given number of receive queues for each device.
    pub fn testbed_with_queues(
        receiver_cpus: Option<Vec<usize>>,
        interfaces: usize,
        queues: u32,
    ) -> Result<Self> {
        let links = vec![(0, 1); interfaces.max(1)];
        // Without IPv6 the kernels send no packets of their own, which the devices would count in
        // addition to the traffic.
        let testbed = Testbed::new(&Layout { queues, links, ipv6: false, ..Layout::default() })
            .context("cannot create a testbed")?;
        Ok(Self::with_environment(
            Environment::Testbed(Box::new(TestbedState { testbed, queues, sender: None })),
            receiver_cpus,
        ))
    }

    fn with_environment(place: Environment, receiver_cpus: Option<Vec<usize>>) -> Self {
        let (sender_cpu, receiver_cpus) = Self::assign_cpus(receiver_cpus);
        Self {
            environment: place,
            sender_cpu,
            receiver_cpus,
            reply_counter: None,
            count_hook: CountHook::default(),
        }
    }

    /// The CPU of the sender, if there is more than one, and those of the receivers: by
    /// default all others.
    #[must_use]
    pub fn assign_cpus(receiver_cpus: Option<Vec<usize>>) -> (Option<usize>, Vec<usize>) {
        let cpus = machine::allowed_cpus();
        let sender_cpu = if cpus.len() > 1 { cpus.last().copied() } else { None };
        let others = || cpus.iter().copied().filter(|cpu| Some(*cpu) != sender_cpu).collect();
        (sender_cpu, receiver_cpus.unwrap_or_else(others))
    }

    /// The name of the place, the device of the traffic, and its sender.
    #[must_use]
    pub fn describe(&self) -> [String; 3] {
        let Environment::Testbed(hosts) = &self.environment else {
            return ["loopback", "lo", "sockets (sendmmsg)"].map(String::from);
        };
        let device = match (hosts.testbed.links(), hosts.queues) {
            (1, 1) => "veth pair, one queue".into(),
            (1, queues) => format!("veth pair, {queues} queues"),
            (links, 1) => format!("{links} veth pairs, one queue each"),
            (links, queues) => format!("{links} veth pairs, {queues} queues each"),
        };
        ["testbed".into(), device, "XDP live frames".into()]
    }

    /// Names of the devices that receivers can get frames from; none over loopback.
    pub fn device_names(&self) -> Vec<String> {
        match &self.environment {
            Environment::Loopback(_) => Vec::new(),
            Environment::Testbed(hosts) => {
                hosts.links().iter().map(|&link| hosts.testbed.host(1).device(link).to_owned()).collect()
            }
        }
    }

    /// The sending and the receiving host, if there are two.
    pub fn hosts(&self) -> Option<(&Host, &Host)> {
        match &self.environment {
            Environment::Loopback(_) => None,
            Environment::Testbed(hosts) => Some((hosts.testbed.host(0), hosts.testbed.host(1))),
        }
    }

    /// CPU of the sender.
    pub fn sender_cpu(&self) -> Option<usize> {
        self.sender_cpu
    }

    /// CPUs that receiving threads are pinned to, in turn.
    pub fn receiver_cpus(&self) -> &[usize] {
        &self.receiver_cpus
    }

    /// The address that receivers bind: the wildcard if traffic arrives at several addresses.
    pub fn bind_addr(&self) -> SocketAddr {
        match &self.environment {
            Environment::Loopback(_) => ([127, 0, 0, 1], 0).into(),
            Environment::Testbed(hosts) if hosts.testbed.links() > 1 => {
                (Ipv4Addr::UNSPECIFIED, RECEIVER_PORT).into()
            }
            Environment::Testbed(hosts) => (hosts.testbed.host(1).ip4(0), RECEIVER_PORT).into(),
        }
    }

    /// Options of receivers here, pinned to the CPUs of receivers.
    #[must_use]
    pub fn receiver(&self, threads: usize, size: usize) -> ReceiverOptions {
        ReceiverOptions {
            cpus: self.receiver_cpus.clone(),
            devices: self.device_names(),
            ..ReceiverOptions::new(self.bind_addr(), threads, size)
        }
    }

    /// Selects where replies between hosts are counted, if counting has not started yet.
    pub fn set_count_hook(&mut self, counter: CountHook) {
        self.count_hook = counter;
    }

    /// The place where replies between hosts are counted; none over loopback.
    pub fn count_hook(&self) -> Option<CountHook> {
        self.hosts().map(|_| self.count_hook)
    }

    /// The counter of replies to the traffic. From the first call on, they are dropped at the
    /// sending host. Over loopback it counts those of the last target, and the earlier count.
    ///
    /// # Errors
    /// If eBPF cannot be loaded.
    pub fn reply_counter(&mut self) -> Result<ReplyCounter> {
        if let Some(replies) = &self.reply_counter {
            return Ok(replies.clone());
        }
        let replies = match &self.environment {
            Environment::Loopback(local) => ReplyCounter::from_flows(Arc::clone(&local.flows)),
            Environment::Testbed(hosts) => {
                ReplyCounter::attach(hosts.testbed.host(0), &hosts.links(), RECEIVER_PORT, self.count_hook)?
            }
        };
        Ok(self.reply_counter.insert(replies).clone())
    }

    /// Starts a receiver where the traffic arrives.
    pub fn start(&self, kind: Kind, options: &ReceiverOptions) -> Result<Box<dyn RunningReceiver>> {
        self.run_at_receiver(|| kind.start(options))
            .with_context(|| format!("cannot start {kind} with {} threads", options.threads))
    }

    /// Runs `work` where the traffic arrives. Sockets and threads that it creates are there, too.
    pub fn run_at_receiver<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        match &self.environment {
            Environment::Loopback(_) => work(),
            Environment::Testbed(hosts) => hosts.testbed.host(1).run(work),
        }
    }

    /// Sends to `to` for the duration of the load and returns when it is over.
    pub fn send(&mut self, to: SocketAddr, load: &Load) -> Result<Sent> {
        self.send_until(to, load, Until::Duration(load.duration))
    }

    /// Sends to `to` as `until` says; the duration of the load is ignored.
    pub fn send_until(&mut self, to: SocketAddr, load: &Load, until: Until) -> Result<Sent> {
        let traffic =
            Traffic { pps: load.pps, flows: load.flows, gso: load.gso, ..Traffic::new(to, load.size) };
        let (cpu, keep) = (self.sender_cpu, self.reply_counter.is_some());
        match &mut self.environment {
            Environment::Testbed(hosts) => hosts.send(&traffic, cpu, until),
            Environment::Loopback(local) => run_pinned(cpu, || local.send(&traffic, until, keep)),
        }
        .context("the sender failed")
    }
}
