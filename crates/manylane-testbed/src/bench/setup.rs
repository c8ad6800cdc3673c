//! Where a benchmark runs: on loopback, or between two hosts of a testbed.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use manylane_sys::cpu;

use crate::machine;
use crate::receiver::{Kind, ReceiverOptions, Running};
use crate::testbed::{Layout, Testbed};
use crate::traffic::live::LiveSender;
use crate::traffic::{Sent, Traffic, Until, portable};

/// One stretch of traffic.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// Datagrams per second; `None` for as fast as the sender can.
    pub pps: Option<f64>,
    /// How long.
    pub duration: Duration,
    /// Payload in bytes.
    pub size: usize,
    /// Sources, each a flow.
    pub flows: u16,
    /// Let the kernel cut trains into datagrams (UDP GSO). Loopback only.
    pub segment: bool,
}

/// A place to measure in: it starts receivers and sends to them.
pub struct Setup {
    place: Place,
    /// Processor of the sender, when it has one of its own.
    sender_cpu: Option<usize>,
    receiver_cpus: Vec<usize>,
}

enum Place {
    Loopback,
    Testbed(Box<Hosts>),
}

struct Hosts {
    testbed: Testbed,
    /// The sender and the traffic that it was made for: it keeps its program while only the rate changes.
    sender: Option<(Traffic, LiveSender)>,
}

impl Hosts {
    fn send(&mut self, traffic: &Traffic, cpu: Option<usize>, until: Until) -> Result<Sent> {
        let form = Traffic { pps: None, ..traffic.clone() };
        let sender = match &mut self.sender {
            Some((made_for, sender)) if *made_for == form => sender,
            other => {
                let sender = LiveSender::new(self.testbed.host(0), self.testbed.host(1), 0, &form)?;
                &mut other.insert((form, sender)).1
            }
        };
        if let Some(cpu) = cpu {
            sender.pin(cpu);
        }
        sender.set_rate(traffic.pps).send(until)
    }
}

/// Port of the receivers in the testbed, where nobody else has one.
const PORT: u16 = 7;

/// Queues of the devices of the testbed: as many as the most lanes of a default run.
const QUEUES: u32 = 8;

impl Setup {
    /// Loopback: ordinary sockets on both sides, no privileges.
    ///
    /// # Errors
    /// Never yet; as [`Setup::testbed`].
    pub fn loopback(receiver_cpus: Option<Vec<usize>>) -> Result<Self> {
        Ok(Self::of(Place::Loopback, receiver_cpus))
    }

    /// Two hosts joined by a veth pair of several queues; the sender makes frames in XDP.
    ///
    /// # Errors
    /// Without root, or where a network namespace cannot be made.
    pub fn testbed(receiver_cpus: Option<Vec<usize>>) -> Result<Self> {
        let testbed = Testbed::new(&Layout { queues: QUEUES, ..Layout::default() })
            .context("cannot make a testbed (root is needed; --loopback does without)")?;
        Ok(Self::of(Place::Testbed(Box::new(Hosts { testbed, sender: None })), receiver_cpus))
    }

    fn of(place: Place, receiver_cpus: Option<Vec<usize>>) -> Self {
        let cpus = machine::allowed_cpus();
        // The sender has the last processor for itself, where there is more than one.
        let sender_cpu = if cpus.len() > 1 { cpus.last().copied() } else { None };
        let others = cpus.iter().copied().filter(|cpu| Some(*cpu) != sender_cpu).collect();
        Self { place, sender_cpu, receiver_cpus: receiver_cpus.unwrap_or(others) }
    }

    /// `loopback` or `testbed`.
    pub fn name(&self) -> &'static str {
        match &self.place {
            Place::Loopback => "loopback",
            Place::Testbed(_) => "testbed",
        }
    }

    /// The device that the traffic goes through.
    pub fn device(&self) -> String {
        match &self.place {
            Place::Loopback => "lo".into(),
            Place::Testbed(_) => format!("veth pair, {QUEUES} queues"),
        }
    }

    /// Name of the device that receivers can take frames from.
    pub fn device_name(&self) -> Option<String> {
        match &self.place {
            Place::Loopback => None,
            Place::Testbed(hosts) => Some(hosts.testbed.host(1).device(0).to_owned()),
        }
    }

    /// What makes the traffic.
    pub fn sender(&self) -> &'static str {
        match &self.place {
            Place::Loopback => "sockets (sendmmsg)",
            Place::Testbed(_) => "XDP live frames",
        }
    }

    /// Processor of the sender.
    pub fn sender_cpu(&self) -> Option<usize> {
        self.sender_cpu
    }

    /// Processors that receiving threads are pinned to, in turn.
    pub fn receiver_cpus(&self) -> &[usize] {
        &self.receiver_cpus
    }

    /// The address that receivers bind.
    pub fn bind_addr(&self) -> SocketAddr {
        match &self.place {
            Place::Loopback => ([127, 0, 0, 1], 0).into(),
            Place::Testbed(hosts) => (hosts.testbed.host(1).ip4(0), PORT).into(),
        }
    }

    /// Starts a receiver where the traffic arrives.
    ///
    /// # Errors
    /// When the receiver cannot start.
    pub fn start(&self, kind: Kind, options: &ReceiverOptions) -> Result<Box<dyn Running>> {
        self.inside(|| kind.start(options))
            .with_context(|| format!("cannot start {kind} with {} threads", options.threads))
    }

    /// Does `work` where the traffic arrives; sockets and threads that it makes are there too.
    pub fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        match &self.place {
            Place::Loopback => work(),
            Place::Testbed(hosts) => hosts.testbed.host(1).run(work),
        }
    }

    /// Sends to `to` for the duration of the load and returns when it is over.
    ///
    /// # Errors
    /// When the sender fails.
    pub fn send(&mut self, to: SocketAddr, load: &Load) -> Result<Sent> {
        self.send_until(to, load, Until::Duration(load.duration))
    }

    /// Sends to `to` until what `until` says; the duration of the load does not count.
    ///
    /// # Errors
    /// When the sender fails.
    pub fn send_until(&mut self, to: SocketAddr, load: &Load, until: Until) -> Result<Sent> {
        let traffic = Traffic {
            pps: load.pps,
            flows: load.flows,
            segment: load.segment,
            ..Traffic::new(to, load.size)
        };
        let cpu = self.sender_cpu;
        match &mut self.place {
            Place::Testbed(hosts) => hosts.send(&traffic, cpu, until),
            // On a thread of its own: the pinning must not outlive it.
            Place::Loopback => std::thread::scope(|scope| {
                let sender = scope.spawn(|| {
                    if let Some(cpu) = cpu {
                        cpu::pin(cpu).with_context(|| format!("cannot pin the sender to CPU {cpu}"))?;
                    }
                    portable::send(&traffic, until)
                });
                sender.join().map_err(|_| anyhow::anyhow!("the sender panicked"))?
            }),
        }
        .context("the sender failed")
    }
}
