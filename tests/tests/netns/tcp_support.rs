//! A host whose TCP is a stack of the library: frames come from a packet socket, at an address that
//! the kernel there does not have.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use manylane_sys::packet::PacketSocket;
use manylane_tcp::time::Time;
use manylane_tcp::{Config, Counters, Id, Levels, Output, Reason, Secret, Stack, What};
use manylane_testbed::Host;
use manylane_testbed::relay::Chance;
use manylane_tests::tcp_peer::exchange;
use manylane_wire::ethernet::{self, Ethernet, Mac};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const PORT: u16 = 80;
/// Longest time without a frame after which the test looks whether it is to end.
const TICK: Duration = Duration::from_millis(20);
/// Time that all connections have to end, once the test is over.
const END_TIMEOUT: Duration = Duration::from_secs(60);
const ETHERTYPES: [u16; 2] = [0x0800, 0x86dd];

/// What happens to frames, of a thousand each; by a generator with a fixed seed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Faults {
    lost: u64,
    doubled: u64,
    /// Held back until the next two have passed.
    late: u64,
    chance: Chance,
}

impl Faults {
    pub(crate) fn none() -> Faults {
        Faults::permille(0)
    }

    /// The same share for each kind.
    pub(crate) fn permille(share: u64) -> Faults {
        Faults { lost: share, doubled: share, late: share, chance: Chance::new(7) }
    }

    fn is_struck(&mut self, share: u64) -> bool {
        self.chance.is_drawn(share, 1000)
    }
}

/// One direction of the link.
struct Direction {
    faults: Faults,
    /// A frame that is held back, and how many have still to pass it.
    held: Option<(Vec<u8>, u8)>,
    passed: VecDeque<Vec<u8>>,
}

impl Direction {
    fn new(faults: Faults) -> Direction {
        Direction { faults, held: None, passed: VecDeque::new() }
    }

    fn add(&mut self, frame: Vec<u8>) {
        let Faults { lost, doubled, late, .. } = self.faults;
        if self.faults.is_struck(lost) {
            return;
        }
        if self.held.is_none() && self.faults.is_struck(late) {
            self.held = Some((frame, 2));
            return;
        }
        if self.faults.is_struck(doubled) {
            self.passed.push_back(frame.clone());
        }
        self.passed.push_back(frame);
        if let Some((frame, left)) = self.held.take() {
            match left {
                0 | 1 => self.passed.push_back(frame),
                _ => self.held = Some((frame, left - 1)),
            }
        }
    }

    /// No more frames come: what is held back passes.
    fn release(&mut self) {
        self.passed.extend(self.held.take().map(|(frame, _)| frame));
    }
}

/// What the stack is used for.
pub(crate) enum Use {
    /// A server that sends back what it gets.
    Echo,
    /// A client with a connection for each of the data: it sends them, and expects them back.
    Ask { server: SocketAddr, data: Vec<Vec<u8>> },
}

/// The stack, on a thread inside of a host.
pub(crate) struct StackHost {
    pub(crate) address: SocketAddr,
    end: Arc<AtomicBool>,
    thread: JoinHandle<(Counters, Levels)>,
}

impl StackHost {
    /// Starts it. `peer` is the host at the other end of the link.
    pub(crate) fn start(
        peer: &Host,
        host: &Host,
        ipv6: bool,
        config: Config,
        faults: Faults,
        what: Use,
    ) -> StackHost {
        let ip: IpAddr = if ipv6 { "fd77::200".parse().unwrap() } else { "10.77.0.200".parse().unwrap() };
        let mac = Mac(host.mac(0));
        peer.ip_batch(&format!("neigh add {ip} lladdr {mac} dev {} nud permanent", peer.device(0))).unwrap();
        if ipv6 {
            peer.ip_batch(&format!("route add fd77::200/128 dev {}", peer.device(0))).unwrap();
        }
        let (ifindex, peer_mac) = (host.device_index(0).unwrap(), Mac(peer.mac(0)));
        let socket = host.run(|| PacketSocket::listen(ifindex)).unwrap();
        let end = Arc::new(AtomicBool::new(false));
        let link = Link {
            socket,
            mac,
            peer_mac,
            ip,
            incoming: Direction::new(faults),
            outgoing: Direction::new(faults),
            space: vec![0; 2048],
        };
        let seen = Arc::clone(&end);
        let thread = host.spawn("stack", move || Lane::new(config, link, ip, what).run(&seen)).unwrap();
        StackHost { address: SocketAddr::new(ip, PORT), end, thread }
    }

    /// Ends it once it has no connection any more.
    pub(crate) fn stop(self) -> (Counters, Levels) {
        self.end.store(true, Ordering::Relaxed);
        self.wait()
    }

    /// Waits until all its own connections have ended.
    pub(crate) fn wait(self) -> (Counters, Levels) {
        self.thread.join().unwrap()
    }
}

/// Frames from and to the peer.
struct Link {
    socket: PacketSocket,
    mac: Mac,
    peer_mac: Mac,
    ip: IpAddr,
    incoming: Direction,
    outgoing: Direction,
    space: Vec<u8>,
}

impl Link {
    /// True if a frame has come within the time.
    fn wait(&self, time: Duration) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        let time = Timespec { tv_sec: time.as_secs() as _, tv_nsec: time.subsec_nanos() as _ };
        poll(&mut fds, Some(&time)).unwrap() > 0
    }

    /// Reads a frame; not those that the host sends.
    fn read(&mut self) {
        let frame = self.socket.receive().unwrap();
        let Ok((header, _)) = Ethernet::parse(&frame) else { return };
        if header.destination == self.mac && header.source == self.peer_mac {
            self.incoming.add(frame);
        }
    }

    fn send_passed(&mut self) {
        while let Some(frame) = self.outgoing.passed.pop_front() {
            self.socket.send(&frame).unwrap();
        }
    }
}

impl Output for Link {
    fn space(&mut self, length: usize) -> Option<&mut [u8]> {
        self.space.get_mut(ethernet::HEADER_LEN..ethernet::HEADER_LEN + length)
    }

    fn send(&mut self, length: usize, _: u16) {
        let ethertype = ETHERTYPES[usize::from(self.ip.is_ipv6())];
        self.space[..6].copy_from_slice(&self.peer_mac.0);
        self.space[6..12].copy_from_slice(&self.mac.0);
        self.space[12..14].copy_from_slice(&ethertype.to_be_bytes());
        let frame = self.space[..ethernet::HEADER_LEN + length].to_vec();
        self.outgoing.add(frame);
    }
}

/// What the application has of a connection.
#[derive(Default)]
struct Stream {
    to_write: VecDeque<u8>,
    expected: Option<Vec<u8>>,
    read: Vec<u8>,
    is_shut: bool,
}

struct Lane {
    stack: Stack,
    link: Link,
    begun: Instant,
    streams: HashMap<Id, Stream>,
    is_server: bool,
}

impl Lane {
    fn new(config: Config, link: Link, ip: IpAddr, what: Use) -> Lane {
        let begun = Instant::now();
        let mut stack = Stack::new(config, Secret::new([3; 16]), Time(0)).unwrap();
        let mut streams = HashMap::new();
        let is_server = matches!(what, Use::Echo);
        match what {
            Use::Echo => stack.listen((ip, PORT).into()).unwrap(),
            Use::Ask { server, data } => {
                for (number, bytes) in data.into_iter().enumerate() {
                    let port = 20_000 + number as u16;
                    let id = stack.connect((ip, port).into(), server, Time(0)).unwrap();
                    let to_write = bytes.iter().copied().collect();
                    streams.insert(id, Stream { to_write, expected: Some(bytes), ..Stream::default() });
                }
            }
        }
        Lane { stack, link, begun, streams, is_server }
    }

    fn now(&self) -> Time {
        Time(0) + self.begun.elapsed()
    }

    fn run(mut self, end: &AtomicBool) -> (Counters, Levels) {
        let mut over = None;
        loop {
            let now = self.now();
            self.stack.flush(now, &mut self.link);
            self.link.send_passed();
            let next = self.stack.next(now).map_or(TICK, |next| next.since(now));
            if self.link.wait(next.min(TICK)) {
                self.link.read();
                while self.link.incoming.passed.len() < 64 && self.link.wait(Duration::ZERO) {
                    self.link.read();
                }
            } else {
                self.link.incoming.release();
                self.link.outgoing.release();
            }
            let now = self.now();
            while let Some(mut frame) = self.link.incoming.passed.pop_front() {
                let packet = &mut frame[ethernet::HEADER_LEN..];
                self.stack.input(now, packet, false, &mut self.link);
            }
            self.serve(now);
            let is_over = end.load(Ordering::Relaxed) || !self.is_server;
            if is_over && self.stack.levels().connections == 0 {
                return (self.stack.counters(), self.stack.levels());
            }
            let since = over.get_or_insert(Instant::now());
            if !(is_over && self.is_server) {
                *since = Instant::now();
            }
            assert!(since.elapsed() < END_TIMEOUT, "connections do not end: {:?}", self.stack.levels());
        }
    }

    fn serve(&mut self, now: Time) {
        while let Some(event) = self.stack.event() {
            match event.what {
                What::Accepted => _ = self.streams.insert(event.id, Stream::default()),
                What::Closed(reason) => {
                    let stream = self.streams.remove(&event.id).unwrap();
                    assert_eq!(reason, Reason::Finished);
                    assert!(stream.expected.is_none_or(|bytes| bytes == stream.read), "other bytes");
                }
                What::Connected | What::Readable | What::Writable => self.exchange(event.id, now),
            }
        }
    }

    fn exchange(&mut self, id: Id, now: Time) {
        let (stack, stream) = (&mut self.stack, self.streams.get_mut(&id).unwrap());
        loop {
            while !stream.to_write.is_empty() {
                let written = stack.write(id, stream.to_write.as_slices().0, now);
                stream.to_write.drain(..written);
                if written == 0 {
                    break;
                }
            }
            // A server that is not read from reads no more.
            if stream.expected.is_none() && !stream.to_write.is_empty() {
                return;
            }
            let is_client = stream.expected.is_some();
            let (read, to_write) = (&mut stream.read, &mut stream.to_write);
            let taken = stack.read(id, |bytes| {
                if is_client {
                    read.extend_from_slice(bytes);
                } else {
                    to_write.extend(bytes);
                }
                bytes.len()
            });
            if taken == 0 {
                break;
            }
        }
        let is_done = stream.to_write.is_empty() && (stream.expected.is_some() || stack.is_at_end(id));
        if is_done && !std::mem::replace(&mut stream.is_shut, true) {
            stack.shutdown(id, now);
        }
    }
}

/// Clients of the kernel, each on a thread with this many connections at a time.
pub(crate) fn kernel_clients(client: &Host, server: SocketAddr, threads: usize, each: usize, length: usize) {
    client.run(|| {
        thread::scope(|scope| {
            for number in 0..threads {
                scope.spawn(move || {
                    let streams: Vec<_> = (0..each).map(|_| TcpStream::connect(server).unwrap()).collect();
                    for (at, stream) in streams.into_iter().enumerate() {
                        exchange(stream, number * each + at, length);
                    }
                });
            }
        });
    });
}
