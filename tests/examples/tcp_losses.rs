//! What lost segments cost: TCP of a lane beside Linux's, each as a server of a Linux client, over
//! a link that loses and delays frames. Prints a table; needs root:
//!
//! ```sh
//! sudo cargo run --release -p manylane-tests --example tcp_losses [ROUNDS]
//! ```
//!
//! The host in the middle takes frames from the client's link. It gives them to a stack of its own,
//! or to the host behind it, whose Linux answers; frames in both directions wait for the same time,
//! and of those with data, from the server, some are lost: by a generator with a seed that is
//! another one in each round, and the same for all servers.

#![allow(clippy::unwrap_used, reason = "a measurement ends when something is wrong")]

use std::collections::{HashMap, VecDeque};
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use manylane_sys::packet::PacketSocket;
use manylane_tcp::congestion::Algorithm;
use manylane_tcp::time::Time;
use manylane_tcp::{Config, Id, NewController, Output, Secret, Stack, What};
use manylane_testbed::{Host, Layout, Testbed};
use manylane_wire::ethernet::{HEADER_LEN, Mac};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::SockRef;

const PORT: u16 = 80;
const STACK: [u8; 4] = [10, 77, 0, 200];
/// A request, which says by its first byte what is wanted.
const REQUEST: usize = 100;
const TRANSFER: (u8, usize) = (b't', 1_000_000);
const ANSWER: (u8, usize) = (b'a', 2000);
const REQUESTS: usize = 300;

/// What the link does: frames wait this long, and so many of 10,000 with data begin a loss of so
/// many in a row.
#[derive(Clone, Copy)]
struct Faults {
    delay: Duration,
    lost: u64,
    in_a_row: u64,
}

/// One direction of the link.
struct Direction {
    faults: Faults,
    random: u64,
    left_to_lose: u64,
    waiting: VecDeque<(Instant, Vec<u8>)>,
}

impl Direction {
    fn new(faults: Faults, random: u64) -> Direction {
        Direction { faults, random, left_to_lose: 0, waiting: VecDeque::new() }
    }

    fn add(&mut self, frame: &[u8]) {
        // Headers with all their options are shorter.
        let has_data = frame.len() > HEADER_LEN + 80;
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        if has_data && self.left_to_lose == 0 && (self.random >> 33) % 10_000 < self.faults.lost {
            self.left_to_lose = self.faults.in_a_row;
        }
        if has_data && self.left_to_lose > 0 {
            self.left_to_lose -= 1;
            return;
        }
        self.waiting.push_back((Instant::now() + self.faults.delay, frame.to_vec()));
    }

    fn due(&mut self, now: Instant) -> Option<Vec<u8>> {
        let is_due = self.waiting.front().is_some_and(|(at, _)| *at <= now);
        is_due.then(|| self.waiting.pop_front().unwrap().1)
    }
}

/// An end of a link of the host in the middle.
struct End {
    socket: PacketSocket,
    own: Mac,
    peer: Mac,
}

impl End {
    fn new(middle: &Host, peer: &Host, link: usize) -> End {
        let ifindex = middle.device_index(link).unwrap();
        let socket = middle.run(|| PacketSocket::listen(ifindex)).unwrap();
        End { socket, own: Mac(middle.mac(link)), peer: Mac(peer.mac(link)) }
    }

    /// Hands over the frames that have come from the peer.
    fn receive(&self, mut take: impl FnMut(Vec<u8>)) {
        while poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&Timespec::default())).unwrap() > 0 {
            let frame = self.socket.receive().unwrap();
            if frame.len() > HEADER_LEN && frame[6..12] == self.peer.0 && frame[12..14] == [8, 0] {
                take(frame);
            }
        }
    }

    fn send(&self, mut frame: Vec<u8>) {
        frame[..6].copy_from_slice(&self.peer.0);
        frame[6..12].copy_from_slice(&self.own.0);
        frame[12..14].copy_from_slice(&[8, 0]);
        self.socket.send(&frame).unwrap();
    }
}

/// Packets of the stack, on their way.
struct Outgoing<'a> {
    direction: &'a mut Direction,
    frame: Vec<u8>,
}

impl Output for Outgoing<'_> {
    fn space(&mut self, length: usize) -> Option<&mut [u8]> {
        self.frame.get_mut(HEADER_LEN..HEADER_LEN + length)
    }

    fn send(&mut self, length: usize, _: u16) {
        self.direction.add(&self.frame[..HEADER_LEN + length]);
    }
}

/// The server of the stack: bytes that it still has to send on each connection, and whether it
/// closes then.
struct Server {
    stack: Stack,
    owed: HashMap<Id, (usize, bool)>,
    begun: Instant,
}

impl Server {
    fn new(controller: NewController) -> Server {
        let config =
            Config { controller, send_buffer: 1 << 20, receive_buffer: 1 << 20, ..Config::default() };
        let mut stack = Stack::new(config, Secret::new([9; 16]), Time(0)).unwrap();
        stack.listen((STACK, PORT).into()).unwrap();
        Server { stack, owed: HashMap::new(), begun: Instant::now() }
    }

    fn run(&mut self, packets: &mut Direction, now: Instant, direction: &mut Direction) {
        let time = Time(0) + now.duration_since(self.begun);
        let mut out = Outgoing { direction, frame: vec![0; 2048] };
        while let Some(mut frame) = packets.due(now) {
            self.stack.input(time, &mut frame[HEADER_LEN..], false, &mut out);
        }
        while let Some(event) = self.stack.event() {
            match event.what {
                What::Closed(_) => _ = self.owed.remove(&event.id),
                _ => self.answer(event.id, time),
            }
        }
        self.stack.flush(time, &mut out);
    }

    fn answer(&mut self, id: Id, time: Time) {
        let owed = self.owed.entry(id).or_default();
        let mut kind = 0;
        while self.stack.read(id, |bytes| {
            kind = bytes[0];
            bytes.len()
        }) > 0
        {}
        for (byte, length) in [TRANSFER, ANSWER] {
            if kind == byte {
                *owed = (length, kind == TRANSFER.0);
            }
        }
        while owed.0 > 0 {
            let written = self.stack.write(id, &[b'x'; 65_536][..owed.0.min(65_536)], time);
            owed.0 -= written;
            if written == 0 {
                return;
            }
        }
        if owed.1 || self.stack.is_at_end(id) {
            self.stack.shutdown(id, time);
        }
    }

    fn next(&self, now: Instant) -> Option<Instant> {
        let time = Time(0) + now.duration_since(self.begun);
        self.stack.next(time).map(|next| now + next.since(time))
    }
}

/// Runs the link, and the stack if there is one, until the end.
fn run_link(
    near: &End,
    far: Option<&End>,
    mut server: Option<Server>,
    faults: Faults,
    seed: u64,
    end: &AtomicBool,
) {
    let mut requests = Direction::new(Faults { lost: 0, ..faults }, seed);
    let mut answers = Direction::new(faults, seed);
    while !end.load(Ordering::Relaxed) {
        near.receive(|frame| requests.add(&frame));
        let now = Instant::now();
        if let Some(far) = far {
            far.receive(|frame| answers.add(&frame));
            while let Some(frame) = requests.due(now) {
                far.send(frame);
            }
        }
        if let Some(server) = &mut server {
            server.run(&mut requests, now, &mut answers);
        }
        while let Some(frame) = answers.due(now) {
            near.send(frame);
        }
        let waiting = [&requests, &answers].map(|direction| direction.waiting.front().map(|(at, _)| *at));
        let next =
            waiting.into_iter().flatten().chain(server.as_ref().and_then(|server| server.next(now))).min();
        let wait =
            next.map_or(Duration::from_millis(10), |next| next.saturating_duration_since(Instant::now()));
        let wait = wait.min(Duration::from_millis(10));
        let time = Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() };
        let mut fds = vec![PollFd::new(&near.socket, PollFlags::IN)];
        fds.extend(far.map(|far| PollFd::new(&far.socket, PollFlags::IN)));
        poll(&mut fds, Some(&time)).unwrap();
    }
}

/// Linux's server, for as long as the program runs.
fn serve_by_linux(host: &Host, algorithm: &'static str) -> SocketAddr {
    let listener = host.run(|| TcpListener::bind((host.ip4(1), 0)).unwrap());
    SockRef::from(&listener).set_tcp_congestion(algorithm.as_bytes()).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            stream.set_nodelay(true).unwrap();
            thread::spawn(move || {
                let mut request = [0; REQUEST];
                while stream.read_exact(&mut request).is_ok() {
                    let [(_, length)] = [TRANSFER, ANSWER]
                        .into_iter()
                        .filter(|(kind, _)| *kind == request[0])
                        .collect::<Vec<_>>()[..]
                    else {
                        return;
                    };
                    if stream.write_all(&vec![b'x'; length]).is_err() || request[0] == TRANSFER.0 {
                        return;
                    }
                }
            });
        }
    });
    address
}

/// Milliseconds of a transfer, and the median and 99th percentile of requests.
fn measure(client: &Host, server: SocketAddr, requests: bool) -> Vec<f64> {
    client.run(|| {
        let mut stream = TcpStream::connect(server).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let mut ask = |kind: (u8, usize)| {
            let begun = Instant::now();
            stream.write_all(&[kind.0; REQUEST]).unwrap();
            stream.read_exact(&mut vec![0; kind.1]).unwrap();
            begun.elapsed().as_secs_f64() * 1e3
        };
        if !requests {
            return vec![ask(TRANSFER)];
        }
        let mut times: Vec<f64> = (0..REQUESTS).map(|_| ask(ANSWER)).collect();
        times.sort_by(f64::total_cmp);
        vec![times[REQUESTS / 2], times[REQUESTS * 99 / 100]]
    })
}

fn show(samples: &mut [f64]) -> String {
    samples.sort_by(f64::total_cmp);
    let last = samples.len() - 1;
    format!("{:.1} ({:.1} to {:.1})", samples[last / 2], samples[0], samples[last])
}

fn main() {
    let rounds: u64 = std::env::args().nth(1).map_or(5, |rounds| rounds.parse().unwrap());
    let layout =
        Layout { hosts: 3, links: vec![(0, 1), (1, 2)], queues: 1, ipv6: false, ..Layout::default() };
    let testbed = Testbed::new(&layout).unwrap();
    let (client, middle, behind) = (testbed.host(0), testbed.host(1), testbed.host(2));
    for (host, link) in [(client, 0), (middle, 0), (middle, 1), (behind, 1)] {
        host.set_checksums(link, false).unwrap();
        host.set_gro(link, false).unwrap();
    }
    let (own, far_ip) = (client.ip4(0), behind.ip4(1));
    let far: IpAddr = far_ip.into();
    let stack = IpAddr::from(STACK);
    let near_mac = Mac(middle.mac(0));
    let lines = format!(
        "route replace {far}/32 dev {device}\nneigh replace {far} lladdr {near_mac} dev {device} nud permanent\n\
         neigh replace {stack} lladdr {near_mac} dev {device} nud permanent\n",
        device = client.device(0)
    );
    client.ip_batch(&lines).unwrap();
    let lines = format!(
        "route replace {own}/32 dev {device}\nneigh replace {own} lladdr {} dev {device} nud permanent\n",
        Mac(middle.mac(1)),
        device = behind.device(1)
    );
    behind.ip_batch(&lines).unwrap();
    let controllers: [(&str, NewController); 2] =
        [("cubic", |mss| Algorithm::Cubic.controller(mss)), ("bbr", |mss| Algorithm::Bbr.controller(mss))];
    let losses = [(0, 1), (10, 1), (100, 1), (500, 1), (100, 4)];
    println!(
        "| ms, median of {rounds} (least to most) | lost | Linux, cubic | lane, cubic | Linux, bbr | lane, bbr |\n|---|---|---|---|---|---|"
    );
    for (name, requests, delay) in [("1 MB", false, 5), ("2 kB answers: median", true, 1)] {
        for (lost, in_a_row) in losses {
            let faults = Faults { delay: Duration::from_millis(delay), lost, in_a_row };
            let mut samples = vec![vec![Vec::new(); 4]; 1 + usize::from(requests)];
            for round in 0..rounds {
                for (column, (algorithm, controller)) in
                    controllers.iter().flat_map(|c| [(c.0, None), (c.0, Some(c.1))]).enumerate()
                {
                    let near = End::new(middle, client, 0);
                    let far = controller.is_none().then(|| End::new(middle, behind, 1));
                    let server = controller.map(Server::new);
                    let address = match controller {
                        Some(_) => (STACK, PORT).into(),
                        None => serve_by_linux(behind, algorithm),
                    };
                    let end = Arc::new(AtomicBool::new(false));
                    let seen = Arc::clone(&end);
                    let link =
                        thread::spawn(move || run_link(&near, far.as_ref(), server, faults, round, &seen));
                    for (samples, sample) in samples.iter_mut().zip(measure(client, address, requests)) {
                        samples[column].push(sample);
                    }
                    end.store(true, Ordering::Relaxed);
                    link.join().unwrap();
                }
            }
            for (row, samples) in samples.iter_mut().enumerate() {
                let name = if row == 0 { name } else { "p99" };
                let lost =
                    format!("{} %{}", lost as f64 / 100.0, if in_a_row > 1 { ", 4 in a row" } else { "" });
                let cells: Vec<_> = samples.iter_mut().map(|samples| show(samples)).collect();
                println!("| {name} | {lost} | {} |", cells.join(" | "));
            }
        }
    }
}
