//! The clients: connected sockets, which receive datagrams only from the address that they sent
//! to.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::thread;

use manylane_sys::send_burst::set_segment_size;
use manylane_sys::{cpu, errno, sock};
use manylane_test_support::fence_loopback;
use manylane_testbed::Host;

use crate::{TEST_TIMEOUT, test_env};

/// Maximum number of datagrams queued at the other side of a veth pair, for each of its queues,
/// divided by those that the kernel takes at a time, with a margin.
const ROUNDS: usize = 256 / 64 + 4;

/// A peer: a connected socket.
pub struct Client {
    /// The socket.
    pub socket: UdpSocket,
}

impl Client {
    /// A client of `server` at a loopback address of the same family.
    #[must_use]
    pub fn to(server: SocketAddr) -> Self {
        let from = if server.is_ipv4() { "127.0.0.1:0" } else { "[::1]:0" };
        Self::between(from.parse().unwrap(), server)
    }

    /// A client at `from`. Addresses of loopback stand for others where the test is over a testbed:
    /// see [`map_addr`](crate::map_addr).
    #[must_use]
    pub fn between(from: SocketAddr, server: SocketAddr) -> Self {
        let socket = test_env::bind_peer(from);
        socket.connect(test_env::map_addr(server)).unwrap();
        socket.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        // The size that any unprivileged process gets: room for some hundred small replies.
        sock::set_buffer(socket.as_fd(), sock::Buffer::Receive, 212_992).unwrap();
        Self { socket }
    }

    /// Its address.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.socket.local_addr().unwrap()
    }

    /// Sends one datagram.
    pub fn send(&self, payload: &[u8]) {
        assert_eq!(self.socket.send(payload).unwrap(), payload.len());
    }

    /// Sends `payload` as one GSO message with datagrams of `segment` bytes, of which the last may
    /// be shorter.
    pub fn send_gso(&self, payload: &[u8], segment: u16) {
        send_gso(&self.socket, payload, segment);
    }

    /// Receives one datagram.
    #[must_use]
    pub fn recv(&self) -> Vec<u8> {
        let queue = || sock::queue_state(self.socket.as_fd());
        self.receive().unwrap_or_else(|err| panic!("an answer was due, not: {err} ({:?})", queue()))
    }

    /// Receives one datagram; none if none arrives.
    #[must_use]
    pub fn try_recv(&self) -> Option<Vec<u8>> {
        self.receive().ok()
    }

    fn receive(&self) -> io::Result<Vec<u8>> {
        let mut buffer = vec![0; 66_000];
        let len = retry_eintr(|| self.socket.recv(&mut buffer))?;
        buffer.truncate(len);
        Ok(buffer)
    }

    /// Receives one datagram, which must be `payload`.
    pub fn expect(&self, payload: &[u8]) {
        let got = self.recv();
        assert!(got == payload, "{} bytes came, {} other ones were due", got.len(), payload.len());
    }

    /// Sends one datagram and waits for its echo.
    pub fn ping(&self) {
        self.send(b"ping");
        self.expect(b"ping");
    }

    /// True if no datagram is queued.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.socket.set_nonblocking(true).unwrap();
        let quiet = matches!(self.socket.recv(&mut [0; 1]), Err(err) if err.kind() == ErrorKind::WouldBlock);
        self.socket.set_nonblocking(false).unwrap();
        quiet
    }
}

/// As [`Client::send_gso`], over any connected socket.
pub fn send_gso(socket: &UdpSocket, payload: &[u8], segment: u16) {
    set_segment_size(socket.as_fd(), segment).unwrap();
    let sent = socket.send(payload);
    set_segment_size(socket.as_fd(), 0).unwrap();
    match sent {
        // Before Linux 6.11, the device has to compute checksums.
        Err(err) if err.raw_os_error() == Some(errno::EIO) => {
            payload.chunks(segment.into()).for_each(|one| assert_eq!(socket.send(one).unwrap(), one.len()));
        }
        sent => assert_eq!(sent.unwrap(), payload.len()),
    }
}

/// `len` bytes that are computed from `seed` and differ from those of other seeds.
#[must_use]
pub fn pattern(seed: usize, len: usize) -> Vec<u8> {
    let mut state = (seed as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ len as u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Runs `send` and returns when all its datagrams have been queued or dropped.
///
/// The kernel may do the receive side of loopback a moment later, but in order on each CPU. When a
/// later datagram from the same CPU has arrived, the earlier ones have, too. A veth pair is polled
/// with a limited number of frames at a time, by any CPU that has sent over it before.
pub fn send_and_wait<T: Send>(send: impl FnOnce() -> T + Send) -> T {
    let testbed = test_env::is_testbed();
    thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let cpus = cpu::affinity().unwrap();
            cpu::pin(cpus[0]).unwrap();
            let done = send();
            drain_devices();
            let (rounds, cpus) = if testbed { (ROUNDS, &cpus[..]) } else { (1, &cpus[..1]) };
            for cpu in cpus {
                cpu::pin(*cpu).unwrap();
                (0..rounds).for_each(|_| fence_loopback());
            }
            done
        });
        sender.join().unwrap()
    })
}

/// Returns when all that the calling CPU has sent is out of the devices: other ones than a veth
/// pair deliver later. Of each of many flows, and so in each receive queue, a datagram comes after
/// them.
fn drain_devices() {
    const FLOWS: usize = 64;
    let Some((client, server)) = test_env::hosts_of_existing_devices() else { return };
    let bind = |host: &Host| host.run(|| UdpSocket::bind((host.ip4(0), 0)).unwrap());
    let fence = bind(&server);
    fence.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    // With an XDP program, some drivers use a page or more for each of them.
    sock::set_buffer(fence.as_fd(), sock::Buffer::Receive, FLOWS << 14).unwrap();
    let to = fence.local_addr().unwrap();
    (0..FLOWS).for_each(|_| _ = bind(&client).send_to(b"fence", to).unwrap());
    (0..FLOWS).for_each(|_| assert_eq!(retry_eintr(|| fence.recv(&mut [0; 8])).unwrap(), 5));
}

/// The result of `receive`, repeated after `EINTR`. A receive with a timeout returns `EINTR` if
/// its thread was stopped for a while (by a debugger, a signal, the freezer of its control group),
/// or if the kernel ends an io_uring ring that it had created.
pub fn retry_eintr<T>(mut receive: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match receive() {
            Err(err) if err.kind() == ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// The v4-mapped form in which a dual-stack socket sees an address.
#[must_use]
pub fn v4_mapped(addr: SocketAddr) -> SocketAddr {
    match addr.ip() {
        IpAddr::V4(ip) => SocketAddr::new(ip.to_ipv6_mapped().into(), addr.port()),
        IpAddr::V6(_) => addr,
    }
}
