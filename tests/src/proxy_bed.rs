//! TCP proxies, their servers and clients, on each stack.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use manylane::tcp::TcpBuilder;
use manylane_proxy::lane::{ProxyLane, Result};
use manylane_proxy::{Counters, KernelLane, LaneCounters, Options, Proxy, Shared, StackStats};
use manylane_testbed::{Host, Testbed};

use crate::TEST_TIMEOUT;

/// Where proxy, clients and servers are.
pub enum ProxyBed {
    /// All on the loopback device, with lanes on kernel sockets.
    Loopback,
    /// The proxy on the second host, with TCP lanes; clients and servers on the first one.
    Netns(Testbed),
}

/// A proxy that serves until it is stopped.
pub struct RunningProxy {
    /// The address that clients connect to.
    pub address: SocketAddr,
    /// What its lanes share.
    pub shared: Arc<Shared>,
    counters: Vec<Arc<LaneCounters>>,
    stacks: Vec<Arc<StackStats>>,
    threads: Vec<JoinHandle<Result<()>>>,
}

impl RunningProxy {
    /// The counters of all lanes.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let mut total = Counters::default();
        self.counters.iter().for_each(|lane| total.add(&lane.snapshot()));
        total
    }

    /// The values that each lane's stack has published for this name.
    pub(crate) fn stack_stats(&self, name: &str) -> Vec<u64> {
        let of_lane = |stack: &Arc<StackStats>| stack.iter().find(|stat| stat.name == name).unwrap().value;
        self.stacks.iter().map(of_lane).collect()
    }

    /// Stops it and waits for the end; each connection is counted once.
    ///
    /// # Panics
    /// If a lane has failed, or the sum is not closed.
    #[must_use]
    pub fn stop(self) -> Counters {
        self.shared.stop();
        let Self { counters, threads, .. } = self;
        threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
        let mut total = Counters::default();
        counters.iter().for_each(|lane| total.add(&lane.snapshot()));
        let ended = total.finished
            + total.client_gone
            + total.server_gone
            + total.no_server
            + total.idle
            + total.over_limit
            + total.over_source_limit
            + total.cut_off;
        assert_eq!((total.open, ended), (0, total.accepted), "{total:#?}");
        total
    }
}

impl ProxyBed {
    fn peers(&self) -> Option<&Host> {
        match self {
            ProxyBed::Loopback => None,
            ProxyBed::Netns(testbed) => Some(testbed.host(0)),
        }
    }

    /// Runs `work` where clients and servers are.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        match self.peers() {
            Some(host) => host.run(work),
            None => work(),
        }
    }

    pub(crate) fn peer_ip(&self) -> IpAddr {
        self.peers().map_or(Ipv4Addr::LOCALHOST.into(), |host| host.ip(0, false))
    }

    /// A socket that servers accept at.
    ///
    /// # Panics
    /// If the system refuses it.
    #[must_use]
    pub fn listen(&self) -> TcpListener {
        let at = (self.peer_ip(), 0);
        self.run(|| TcpListener::bind(at).unwrap())
    }

    /// A client.
    ///
    /// # Panics
    /// If it is refused.
    #[must_use]
    pub fn connect(&self, proxy: &RunningProxy) -> TcpStream {
        let stream = self.run(|| TcpStream::connect(proxy.address).unwrap());
        stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        stream
    }

    /// Starts a proxy.
    ///
    /// # Panics
    /// If its lanes cannot be opened.
    #[must_use]
    pub fn start(&self, options: Options, servers: &[SocketAddr]) -> RunningProxy {
        self.start_within(1 << 30, options, servers)
    }

    /// Starts a proxy that buffers so many bytes at most.
    pub(crate) fn start_within(
        &self,
        memory: usize,
        options: Options,
        servers: &[SocketAddr],
    ) -> RunningProxy {
        match self {
            ProxyBed::Loopback => {
                let mut lane = KernelLane::open(&[(Ipv4Addr::LOCALHOST, 0).into()]).unwrap();
                let address = lane.listeners()[0];
                let mut more = KernelLane::open(&[address]).unwrap();
                lane.limit_memory(memory / 2);
                more.limit_memory(memory / 2);
                start(None, vec![lane, more], address, options, servers)
            }
            ProxyBed::Netns(testbed) => {
                let host = testbed.host(1);
                let lanes = host.run(|| {
                    let mut builder = TcpBuilder::new();
                    let at = SocketAddr::new(host.ip(0, false), 0);
                    builder.listen(at).unwrap().source_ports(61_184..=65_535);
                    builder.buffer_memory(memory).open().unwrap()
                });
                let address = lanes[0].listeners().next().unwrap();
                start(Some(host), lanes, address, options, servers)
            }
        }
    }
}

/// The thread of a lane. Routes are asked for, and sockets opened, in the namespace of its host.
pub(crate) fn spawn_lane<T: Send + 'static>(
    host: Option<&Host>,
    run: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    match host {
        Some(host) => host.spawn("lane", run).unwrap(),
        None => thread::spawn(run),
    }
}

fn start<L: ProxyLane + Send + 'static>(
    host: Option<&Host>,
    lanes: Vec<L>,
    address: SocketAddr,
    options: Options,
    servers: &[SocketAddr],
) -> RunningProxy {
    let shared = Shared::new(options, servers);
    let counters: Vec<Arc<LaneCounters>> = lanes.iter().map(|_| Arc::default()).collect();
    let mut stacks = Vec::new();
    let run = |(lane, counters): (L, &Arc<LaneCounters>)| {
        let mut proxy = Proxy::new(lane, Arc::clone(&shared), Arc::clone(counters));
        stacks.push(proxy.stack_stats());
        spawn_lane(host, move || proxy.run())
    };
    let threads = lanes.into_iter().zip(&counters).map(run).collect();
    RunningProxy { address, shared, counters, stacks, threads }
}
