//! What connections without traffic cost a proxy: memory, and the time of a request among them.
//!
//! Clients and servers are TCP lanes here: tens of thousands of connections would need as many
//! descriptors. One thread serves both, without sleeping.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use manylane::tcp::{Id, TcpBuilder, TcpLane, What};

use super::bed::{Bed, SERVER_LINK};
use super::contender::{Contender, RunningProxy};
use super::plan::{Config, FEW, IDLE, Load, PORT, Plan, WARM_UP_TIME};
use super::servers::{ANSWER_LEN, KEEP, REQUEST_LEN};

use crate::schema::ProxySample;

/// Connections that are asked for at a time.
const CONNECTING_MAX: usize = 256;
/// Timeout until they are there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);
/// Port of the servers.
const SERVER_PORT: u16 = 9000;

/// Lanes at both ends.
struct Peers {
    clients: TcpLane,
    servers: TcpLane,
    /// Connections of clients that were made, and those that servers have accepted.
    connected: Vec<Id>,
    accepted: usize,
    /// Those of clients that were closed.
    failed: usize,
    answered: u64,
}

impl Peers {
    fn open(bed: &Bed) -> Result<Peers> {
        let address = (bed.servers().ip4(SERVER_LINK), SERVER_PORT);
        let clients = bed.clients().run(|| TcpBuilder::new().source_ports(2048..=65_535).open());
        let servers = bed.servers().run(|| TcpBuilder::new().listen(address)?.open());
        let only = |lanes: manylane::Result<Vec<TcpLane>>| lanes?.pop().context("no lane was opened");
        let (clients, servers) = (only(clients)?, only(servers)?);
        Ok(Peers { clients, servers, connected: Vec::new(), accepted: 0, failed: 0, answered: 0 })
    }

    /// Takes and answers what has come. Clients send the next request if `asks`.
    fn turn(&mut self, asks: bool) -> Result<()> {
        self.servers.wait(Duration::ZERO)?;
        while let Some(event) = self.servers.event() {
            match event.what {
                What::Accepted => self.accepted += 1,
                What::Readable => {
                    let mut stream = self.servers.stream(event.id);
                    let mut received = 0;
                    loop {
                        match stream.read(<[u8]>::len) {
                            0 => break,
                            read => received += read,
                        }
                    }
                    for _ in 0..received / REQUEST_LEN {
                        stream.write(&[7; ANSWER_LEN]);
                    }
                }
                _ => {}
            }
        }
        self.clients.wait(Duration::ZERO)?;
        while let Some(event) = self.clients.event() {
            match event.what {
                What::Connected => self.connected.push(event.id),
                What::Readable => {
                    let mut stream = self.clients.stream(event.id);
                    // An answer is one segment.
                    while stream.read(<[u8]>::len) > 0 {}
                    self.answered += 1;
                    if asks {
                        stream.write(&[KEEP; REQUEST_LEN]);
                    }
                }
                What::Closed(_) => {
                    self.failed += 1;
                    self.connected.retain(|id| *id != event.id);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Makes connections until there are so many.
    fn connect(&mut self, bed: &Bed, total: usize) -> Result<()> {
        let start = Instant::now();
        let mut asked = self.connected.len() + self.failed;
        while self.connected.len() < total || self.accepted < total {
            // Those that failed are asked for again.
            let connecting = asked - self.failed - self.connected.len();
            for _ in connecting..CONNECTING_MAX.min(total - self.connected.len()) {
                self.clients.connect(bed.proxy_addr(PORT))?;
                asked += 1;
            }
            self.turn(false)?;
            ensure!(
                start.elapsed() < CONNECT_TIMEOUT,
                "{} of {total} connections to the proxy, {} to servers",
                self.connected.len(),
                self.accepted
            );
        }
        Ok(())
    }

    /// Sends requests on the first connections for this time. Returns their number.
    fn run(&mut self, duration: Duration) -> Result<(u64, Duration)> {
        let (start, before) = (Instant::now(), self.answered);
        for id in self.connected.clone().into_iter().take(FEW) {
            self.clients.stream(id).write(&[KEEP; REQUEST_LEN]);
        }
        while start.elapsed() < duration {
            self.turn(true)?;
        }
        let (requests, elapsed) = (self.answered - before, start.elapsed());
        // The last answers.
        let outstanding = self.answered + FEW as u64;
        while self.answered < outstanding && start.elapsed() < duration + CONNECT_TIMEOUT {
            self.turn(false)?;
        }
        Ok((requests, elapsed))
    }
}

/// A sample: requests among [`IDLE`] connections, or among none.
pub(super) fn sample(
    bed: &Bed,
    plan: &Plan,
    config: Config,
    round: usize,
    duration: Duration,
) -> Result<ProxySample> {
    let server = (bed.servers().ip4(SERVER_LINK), SERVER_PORT).into();
    let mut peers = Peers::open(bed)?;
    let listen = bed.proxy_addr(PORT);
    let running: RunningProxy = Contender::start(config.contender, bed, &plan.manylane, listen, server)?;
    // The connection that has found the proxy ready.
    let before = running.memory_bytes();
    let idle = if config.load == Load::AmongIdle { IDLE } else { 0 };
    // Their addresses come from the routes of this thread's namespace.
    bed.clients().namespace().enter().context("cannot enter a namespace")?;
    peers.connect(bed, FEW + idle)?;
    let memory = running.memory_bytes().saturating_sub(before);
    peers.run(WARM_UP_TIME)?;
    let cpu = bed.proxy_cpu_time(running.process());
    let (requests, elapsed) = peers.run(duration)?;
    let busy = bed.proxy_cpu_time(running.process()).saturating_sub(cpu);
    ensure!(requests > 0, "no request was answered");
    Ok(ProxySample {
        round,
        requests,
        requests_per_s: requests as f64 / elapsed.as_secs_f64(),
        proxy_cpu_ns: busy.as_nanos() as f64 / requests as f64,
        proxy_cores: busy.as_secs_f64() / elapsed.as_secs_f64(),
        bytes_per_connection: (idle > 0).then(|| memory as f64 / idle as f64),
        failed: peers.failed as u64,
        ..ProxySample::default()
    })
}
