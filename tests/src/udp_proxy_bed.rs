//! Proxies of UDP, their servers and clients, on each engine.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use manylane::{Builder, Engine, Handle};
use manylane_proxy::lane::Result;
use manylane_proxy::udp::{PayloadKey, UdpCounters, UdpLaneCounters, UdpProxy};
use manylane_proxy::{Options, Shared};
use manylane_test_support::wait_for;
use manylane_testbed::{Host, Testbed};

use crate::TEST_TIMEOUT;
use crate::proxy_bed::spawn_lane;

/// Longest payload of a datagram over IPv4.
pub(crate) const PAYLOAD_LEN_MAX: usize = 65_507;

/// Where proxy, clients and servers are.
pub enum UdpBed {
    /// All on the loopback device, with lanes of an engine on kernel sockets.
    Loopback(Engine),
    /// The proxy on the second host, with lanes of engine `xdp`; clients and servers on the first
    /// one.
    Netns(Testbed),
}

/// A proxy that serves until it is stopped.
pub(crate) struct RunningUdpProxy {
    /// The address that clients send to.
    pub(crate) address: SocketAddr,
    /// What its lanes share.
    pub(crate) shared: Arc<Shared>,
    pub(crate) handle: Handle,
    counters: Vec<Arc<UdpLaneCounters>>,
    threads: Vec<JoinHandle<Result<()>>>,
}

impl RunningUdpProxy {
    /// The counters of all lanes.
    #[must_use]
    pub(crate) fn counters(&self) -> UdpCounters {
        sum(&self.counters)
    }

    /// Stops it and waits for the end; each datagram, answer and session is counted once.
    ///
    /// # Panics
    /// If a lane has failed, or a sum is not closed.
    #[must_use]
    pub(crate) fn stop(self) -> UdpCounters {
        self.shared.stop();
        let Self { counters, threads, handle, .. } = self;
        threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
        let total = sum(&counters);
        let outcomes = total.forwarded
            + total.too_short
            + total.truncated
            + total.over_limit
            + total.over_source_limit
            + total.no_server
            + total.no_socket
            + total.buffer_full
            + total.send_failed
            + total.stopping;
        assert_eq!(outcomes, total.datagrams, "{total:#?}");
        assert_eq!(total.answers_sent + total.answers_lost, total.answers, "{total:#?}");
        let ended = total.finished + total.idle + total.refused + total.cut_off;
        assert_eq!((total.open, ended), (0, total.sessions), "{total:#?}");
        // The lanes have counted the same.
        let lanes = handle.counters().total();
        assert_eq!(
            (lanes.delivered, lanes.offered, lanes.sent),
            (total.datagrams, total.answers, total.answers_sent),
            "{lanes:#?}"
        );
        total
    }
}

fn sum(counters: &[Arc<UdpLaneCounters>]) -> UdpCounters {
    let mut total = UdpCounters::default();
    counters.iter().for_each(|lane| total.add(&lane.snapshot()));
    total
}

/// A server that answers each datagram with its name and the datagram, until it is dropped.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub(crate) fn new(socket: UdpSocket, name: u8) -> Self {
        let address = socket.local_addr().unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let ends = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&ends);
        let body = move || {
            let mut bytes = vec![0; 1 + PAYLOAD_LEN_MAX];
            bytes[0] = name;
            while !stop.load(Ordering::Relaxed) {
                // An error is a timeout, or a client that is gone.
                if let Ok((len, peer)) = socket.recv_from(&mut bytes[1..]) {
                    _ = socket.send_to(&bytes[..(len + 1).min(PAYLOAD_LEN_MAX)], peer);
                }
            }
        };
        Self { address, ends, thread: Some(thread::spawn(body)) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}

impl UdpBed {
    fn peers(&self) -> Option<&Host> {
        match self {
            UdpBed::Loopback(_) => None,
            UdpBed::Netns(testbed) => Some(testbed.host(0)),
        }
    }

    /// Runs `work` where clients and servers are.
    fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        match self.peers() {
            Some(host) => host.run(work),
            None => work(),
        }
    }

    /// A socket where clients and servers are.
    pub(crate) fn bind(&self, port: u16) -> UdpSocket {
        let ip: IpAddr = self.peers().map_or(Ipv4Addr::LOCALHOST.into(), |host| host.ip(0, false));
        let socket = self.run(|| UdpSocket::bind((ip, port)).unwrap());
        socket.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        socket
    }

    /// A client: a connected socket, which receives from the address of the proxy alone.
    pub(crate) fn client(&self, proxy: &RunningUdpProxy) -> UdpSocket {
        let socket = self.bind(0);
        socket.connect(proxy.address).unwrap();
        socket
    }

    pub(crate) fn server(&self, name: u8) -> Server {
        Server::new(self.bind(0), name)
    }

    pub(crate) fn start(&self, options: Options, servers: &[SocketAddr]) -> RunningUdpProxy {
        self.start_with(options, servers, None, |_| {})
    }

    pub(crate) fn start_with(
        &self,
        options: Options,
        servers: &[SocketAddr],
        key: Option<PayloadKey>,
        change: impl FnOnce(&mut Builder) + Send,
    ) -> RunningUdpProxy {
        self.start_at(None, options, servers, key, change)
    }

    /// Starts a proxy with two lanes, at the address of its host or another one.
    pub(crate) fn start_at(
        &self,
        at: Option<IpAddr>,
        options: Options,
        servers: &[SocketAddr],
        key: Option<PayloadKey>,
        change: impl FnOnce(&mut Builder) + Send,
    ) -> RunningUdpProxy {
        let (host, ip, engine) = match self {
            UdpBed::Loopback(engine) => (None, Ipv4Addr::LOCALHOST.into(), *engine),
            UdpBed::Netns(testbed) => (Some(testbed.host(1)), testbed.host(1).ip(0, false), Engine::Xdp),
        };
        let open = || {
            let mut builder = Builder::new((at.unwrap_or(ip), 0)).unwrap();
            // The fragments of a large datagram need several times its size.
            builder.engine(engine).lanes(2).recv_buffer(4 << 20);
            match key {
                // Its device picks the queue of a datagram, not the key.
                Some(_) if engine == Engine::Xdp => _ = builder.lanes(1),
                Some(key) => _ = builder.steering(key.steering()),
                None => {}
            }
            change(&mut builder);
            builder.open().unwrap()
        };
        let socket = match host {
            Some(host) => host.run(open),
            None => open(),
        };
        assert_eq!(socket.engine(), engine);
        let shared = Shared::new(options, servers);
        let (address, handle) = (socket.local_addr(), socket.handle());
        let lanes = socket.into_lanes();
        let counters: Vec<Arc<UdpLaneCounters>> = lanes.iter().map(|_| Arc::default()).collect();
        let run = |(lane, counters): (_, &Arc<UdpLaneCounters>)| {
            let proxy = UdpProxy::new(vec![lane], Arc::clone(&shared), Arc::clone(counters), key);
            let mut proxy = proxy.unwrap();
            spawn_lane(host, move || proxy.run())
        };
        let threads = lanes.into_iter().zip(&counters).map(run).collect();
        RunningUdpProxy { address, shared, handle, counters, threads }
    }
}

/// Sends one datagram, and returns the name of the server that has answered it.
pub(crate) fn ask(client: &UdpSocket, payload: &[u8]) -> u8 {
    assert_eq!(client.send(payload).unwrap(), payload.len());
    let mut answer = vec![0; 1 + PAYLOAD_LEN_MAX];
    let len = client.recv(&mut answer).unwrap();
    let due = &payload[..payload.len().min(PAYLOAD_LEN_MAX - 1)];
    assert!(answer[1..len] == *due, "{} bytes came, {} other ones were due", len - 1, due.len());
    answer[0]
}

/// Sends one datagram until it is answered: a refusing server may have got the first ones.
pub(crate) fn ask_until_answered(client: &UdpSocket, payload: &[u8]) -> u8 {
    client.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let mut answer = [0; 2048];
    let ask = || {
        client.send(payload).unwrap();
        client.recv(&mut answer).ok().map(|_| answer[0])
    };
    let name = wait_for("an answer", ask, Option::is_some).unwrap();
    client.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    name
}
