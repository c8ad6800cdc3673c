//! A client, a long link, and servers with each congestion control, on sockets of the kernel and on
//! a lane. Both are on the same host, behind the same [relay](manylane_testbed::relay).

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use manylane::tcp::congestion::Algorithm;
use manylane::tcp::{StackConfig, TcpBuilder, TcpLane, What};
use manylane_testbed::relay::{Bottleneck, Conditions, Relay};
use manylane_testbed::{Host, Layout, Testbed};
use socket2::SockRef;

/// The link, and a queue for one round-trip time.
const RATE: u64 = 40_000_000;
const DELAY: Duration = Duration::from_millis(10);
const QUEUE: usize = (RATE as u128 * DELAY.as_micros() * 2 / 8_000_000) as usize;
/// So much of a transfer does not count: its connections start.
const START_PARTS: u32 = 3;
/// Buffer of a connection of a lane: round trip and queue, several times.
const BUFFER: usize = 1 << 20;
/// Interval at which threads look whether they should end.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Timeout of a read: longer than retransmissions of a SYN take.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

// Numbers of the links.
const CLIENT_LINK: usize = 0;
const SERVER_LINK: usize = 1;

/// A server, by what is under it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Server {
    Kernel(Algorithm),
    Lane(Algorithm),
}

impl Server {
    pub(crate) fn all() -> impl Iterator<Item = Server> {
        Algorithm::ALL.into_iter().flat_map(|algorithm| [Server::Kernel(algorithm), Server::Lane(algorithm)])
    }

    pub(crate) fn line(self) -> String {
        match self {
            Server::Kernel(algorithm) => format!("kernel, {algorithm}"),
            Server::Lane(algorithm) => format!("lane, {algorithm}"),
        }
    }
}

/// A client, the link and both servers.
pub(crate) struct CongestionHosts {
    testbed: Testbed,
    servers: Vec<(Server, Result<SocketAddr, String>)>,
    end: Arc<AtomicBool>,
    lanes: Vec<JoinHandle<Result<()>>>,
}

impl CongestionHosts {
    /// Needs root.
    pub(crate) fn new() -> Result<CongestionHosts> {
        let layout =
            Layout { hosts: 3, links: vec![(0, 1), (1, 2)], queues: 1, ipv6: false, ..Layout::default() };
        let testbed = Testbed::new(&layout).context("cannot create a testbed")?;
        let (client, middle, behind) = (testbed.host(0), testbed.host(1), testbed.host(2));
        for (host, link) in
            [(client, CLIENT_LINK), (middle, CLIENT_LINK), (middle, SERVER_LINK), (behind, SERVER_LINK)]
        {
            host.set_checksums(link, false)?;
            host.set_gro(link, false)?;
        }
        route(client, CLIENT_LINK, behind.ip4(SERVER_LINK), middle)?;
        route(behind, SERVER_LINK, client.ip4(CLIENT_LINK), middle)?;
        let mut hosts = CongestionHosts {
            servers: Vec::new(),
            end: Arc::new(AtomicBool::new(false)),
            lanes: Vec::new(),
            testbed,
        };
        for algorithm in Algorithm::ALL {
            let server = serve_by_kernel(hosts.testbed.host(2), algorithm);
            hosts.servers.push((Server::Kernel(algorithm), server.map_err(|err| format!("{err:#}"))));
        }
        hosts.open_lane()?;
        Ok(hosts)
    }

    /// One lane, which listens on an address for each algorithm.
    fn open_lane(&mut self) -> Result<()> {
        let behind = self.testbed.host(2);
        let mut builder = TcpBuilder::new();
        for algorithm in Algorithm::ALL {
            builder.listen_with((behind.ip4(SERVER_LINK), 0), algorithm.new_controller())?;
        }
        let device = behind.device(SERVER_LINK).to_owned();
        builder.xdp(|xdp| _ = xdp.xdp_devices([device])).lanes(1);
        builder.stack(StackConfig { send_buffer: BUFFER, ..StackConfig::default() });
        for lane in behind.run(|| builder.open())? {
            let addresses = Algorithm::ALL.map(Server::Lane).into_iter().zip(lane.listeners());
            self.servers.extend(addresses.map(|(server, address)| (server, Ok(address))));
            let end = Arc::clone(&self.end);
            self.lanes.push(behind.spawn("lane", move || serve_by_lane(lane, &end))?);
        }
        Ok(())
    }

    fn address(&self, server: Server) -> Result<SocketAddr> {
        let found = self.servers.iter().find(|(known, _)| *known == server);
        let (_, address) = found.context("no such server")?;
        address.clone().map_err(anyhow::Error::msg)
    }

    /// Megabits per second that a client gets from each of these servers at the same time, behind
    /// the first third of the `duration`.
    pub(crate) fn rates(
        &self,
        servers: &[Server],
        losses: u64,
        seed: u64,
        duration: Duration,
    ) -> Result<Vec<f64>> {
        let (client, middle, behind) = (self.testbed.host(0), self.testbed.host(1), self.testbed.host(2));
        let delay = Conditions { delay: DELAY, ..Conditions::default() };
        let bottleneck = Some(Bottleneck { rate: RATE, queue: QUEUE });
        let data = Conditions { bottleneck, losses, ..delay };
        let relay =
            Relay::start(middle, [(client, CLIENT_LINK), (behind, SERVER_LINK)], [delay, data], seed)?;
        let addresses: Vec<_> = servers.iter().map(|server| self.address(*server)).collect::<Result<_>>()?;
        let end = AtomicBool::new(false);
        let counts: Vec<_> = servers.iter().map(|_| AtomicU64::new(0)).collect();
        let read = || counts.iter().map(|count| count.load(Relaxed)).collect::<Vec<_>>();
        let (time, first, last) = thread::scope(|scope| -> Result<_> {
            let readers: Vec<_> = addresses
                .iter()
                .zip(&counts)
                .map(|(address, count)| scope.spawn(|| client.run(|| drain(*address, count, &end))))
                .collect();
            thread::sleep(duration / START_PARTS);
            let (start, first) = (Instant::now(), read());
            thread::sleep(duration - duration / START_PARTS);
            let (time, last) = (start.elapsed(), read());
            end.store(true, Relaxed);
            for reader in readers {
                reader.join().map_err(|_| anyhow::anyhow!("a reader has panicked"))??;
            }
            Ok((time, first, last))
        })?;
        relay.end()?;
        let rate = |(last, first): (u64, u64)| (last - first) as f64 * 8.0 / time.as_secs_f64() / 1e6;
        let rates: Vec<_> = last.into_iter().zip(first).map(rate).collect();
        ensure!(rates.iter().sum::<f64>() > 0.0, "no bytes from {servers:?}");
        Ok(rates)
    }
}

impl Drop for CongestionHosts {
    fn drop(&mut self) {
        self.end.store(true, Relaxed);
        for lane in self.lanes.drain(..) {
            // What it failed by, clients have seen.
            _ = lane.join();
        }
    }
}

/// Sends what is for `to` by way of the middle host.
fn route(host: &Host, link: usize, to: Ipv4Addr, middle: &Host) -> Result<()> {
    let mac: Vec<_> = middle.mac(link).iter().map(|byte| format!("{byte:02x}")).collect();
    let (device, mac) = (host.device(link), mac.join(":"));
    host.ip_batch(&format!(
        "route replace {to}/32 dev {device}\nneigh replace {to} lladdr {mac} dev {device} nud permanent\n"
    ))
}

/// Reads from a server until the end, and counts.
fn drain(address: SocketAddr, count: &AtomicU64, end: &AtomicBool) -> Result<()> {
    let mut stream = TcpStream::connect(address).with_context(|| format!("cannot connect to {address}"))?;
    stream.set_read_timeout(Some(POLL_INTERVAL))?;
    let mut buffer = vec![0; 1 << 16];
    let mut last = Instant::now();
    while !end.load(Relaxed) {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => {
                count.fetch_add(length as u64, Relaxed);
                last = Instant::now();
            }
            Err(err) if matches!(err.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                ensure!(last.elapsed() < READ_TIMEOUT, "{address} is silent");
            }
            Err(err) => return Err(err).context("cannot read"),
        }
    }
    Ok(())
}

/// Sends without an end to each client, for as long as this process lives.
fn serve_by_kernel(host: &Host, algorithm: Algorithm) -> Result<SocketAddr> {
    let listener = host.run(|| TcpListener::bind((host.ip4(SERVER_LINK), 0)))?;
    let name = algorithm.kernel_name();
    SockRef::from(&listener).set_tcp_congestion(name.as_bytes()).with_context(|| {
        format!("the kernel does not have {name} (net.ipv4.tcp_available_congestion_control)")
    })?;
    let address = listener.local_addr()?;
    host.spawn("server", move || {
        for mut stream in listener.incoming().flatten() {
            // Until the client is gone.
            thread::spawn(move || while stream.write_all(&[b'x'; 1 << 16]).is_ok() {});
        }
    })?;
    Ok(address)
}

/// The same on a lane.
fn serve_by_lane(mut lane: TcpLane, end: &AtomicBool) -> Result<()> {
    while !end.load(Relaxed) {
        lane.wait(POLL_INTERVAL)?;
        while let Some(event) = lane.event() {
            if let What::Accepted | What::Writable = event.what {
                let mut stream = lane.stream(event.id);
                while stream.write(&[b'x'; 1 << 16]) > 0 {}
            } else if event.what == What::Readable {
                lane.stream(event.id).abort();
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queue_holds_what_is_on_the_way_in_a_round_trip() {
        assert_eq!(QUEUE, 100_000);
    }
}
