//! Two stacks, connected by a network that loses, duplicates, delays and reorders: all bytes arrive
//! once and in order, and nothing is left. No cookies: with them, an old copy of a connection's
//! first segment begins it again after its end.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::SocketAddr;
use std::time::Duration;

use manylane_tcp::time::Time;
use manylane_tcp::{Config, Event, Id, Reason, Secret, Stack, What};
use proptest::prelude::*;

use crate::output::{Packets, pattern};

const START: Time = Time(1_000_000);
/// All is done by then, or something hangs.
const TIME_MAX: Duration = Duration::from_secs(3000);
const SERVER: &str = "192.0.2.2:80";

/// What a case is made of.
#[derive(Clone, Debug)]
struct Case {
    seed: u64,
    connections: usize,
    /// Bytes of each connection and direction, at most.
    length_max: u64,
    /// Of each packet, in thousandths.
    loss: u64,
    duplication: u64,
    /// Microseconds, at most: each packet has its own delay, so they overtake each other.
    delay_max: u64,
    /// Packets that the device takes between two flushes.
    room: usize,
    receive_buffer: usize,
    send_buffer: usize,
    mtu: u16,
    /// Pairs of buffers of the client's side, less than the connections if it is below them.
    buffers_max: usize,
}

fn cases() -> impl Strategy<Value = Case> {
    let network = (0..=100u64, 0..=100u64, 1_000..100_000u64, 1..64usize);
    let settings = (500..100_000usize, 500..100_000usize, 576..1500u16, 10..30usize);
    (any::<u64>(), 1..=20usize, 0..40_000u64, network, settings).prop_map(
        |(seed, connections, length_max, network, settings)| {
            let (loss, duplication, delay_max, room) = network;
            let (receive_buffer, send_buffer, mtu, buffers_max) = settings;
            Case {
                seed,
                connections,
                length_max,
                loss,
                duplication,
                delay_max,
                room,
                receive_buffer,
                send_buffer,
                mtu,
                buffers_max,
            }
        },
    )
}

/// Numbers that follow from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % end
    }

    fn size(&mut self, end: u64) -> usize {
        usize::try_from(self.below(end)).unwrap()
    }
}

/// One end of a connection, and its application.
#[derive(Debug, Default)]
struct End {
    id: Option<Id>,
    /// Bytes to write, written, and read.
    length: usize,
    written: usize,
    read: usize,
    /// It waits for an event before it goes on.
    waits_to_read: bool,
    waits_to_write: bool,
    has_shut_down: bool,
    is_over: bool,
}

struct Host {
    stack: Stack,
    out: Packets,
    ends: Vec<End>,
    given: u64,
    taken: u64,
}

/// What happens later, at which host.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Later {
    Packet(Vec<u8>),
    /// The application of a connection acts.
    Act(usize),
    /// A full device has room again.
    Room,
}

struct World {
    hosts: [Host; 2],
    later: BinaryHeap<Reverse<(Time, u64, usize, Later)>>,
    order: u64,
    now: Time,
    random: Random,
    case: Case,
}

impl World {
    fn new(case: Case) -> World {
        let mut random = Random(case.seed);
        let hosts = [0, 1].map(|side| {
            let config = Config {
                receive_buffer: case.receive_buffer,
                send_buffer: case.send_buffer,
                mtu: case.mtu,
                buffers_max: if side == 0 { case.buffers_max } else { 100 },
                user_timeout: TIME_MAX,
                ..Config::default()
            };
            let mut end =
                || End { length: random.size(case.length_max + 1), waits_to_write: true, ..End::default() };
            let ends = (0..case.connections).map(|_| end()).collect();
            let stack = Stack::new(config, Secret::new([u8::try_from(side).unwrap(); 16]), START).unwrap();
            Host { stack, out: Packets::default(), ends, given: 0, taken: 0 }
        });
        let mut world = World { hosts, later: BinaryHeap::new(), order: 0, now: START, random, case };
        world.hosts[1].stack.listen(SERVER.parse().unwrap()).unwrap();
        for place in 0..world.case.connections {
            let client = SocketAddr::new([192, 0, 2, 1].into(), port(place));
            let host = &mut world.hosts[0];
            host.ends[place].id = Some(host.stack.connect(client, SERVER.parse().unwrap(), START).unwrap());
        }
        world
    }

    fn run(&mut self) {
        for side in [0, 1] {
            self.flush(side);
        }
        while !self.hosts.iter().all(|host| host.ends.iter().all(|end| end.is_over)) {
            self.step();
            assert!(self.now.since(START) < TIME_MAX, "hangs: {:?}", self.describe());
        }
        // The last packets arrive, and TIME-WAIT ends.
        let end = self.now + Duration::from_secs(100);
        while self.now < end && self.next().is_some() {
            self.step();
        }
        for host in &self.hosts {
            let (levels, counters) = (host.stack.levels(), host.stack.counters());
            let left = (levels.connections, levels.backlog, levels.time_wait, levels.buffers_used);
            assert_eq!(left, (0, 0, 0, 0), "{levels:?}");
            assert_eq!((counters.segments_in, counters.segments_out), (host.given, host.taken));
            assert!(host.stack.next(self.now).is_none(), "a deadline is left");
        }
        let [client, server] = &self.hosts;
        for (client, server) in client.ends.iter().zip(&server.ends) {
            assert_eq!((client.read, server.read), (server.length, client.length));
        }
    }

    fn describe(&self) -> Vec<(usize, usize, &End)> {
        let ends = |(side, host)| {
            let host: &Host = host;
            host.ends.iter().enumerate().map(move |(place, end)| (side, place, end))
        };
        self.hosts.iter().enumerate().flat_map(ends).filter(|(_, _, end)| !end.is_over).collect()
    }

    fn next(&self) -> Option<Time> {
        let stacks = self.hosts.iter().filter(|host| host.out.room > 0);
        let stacks = stacks.filter_map(|host| host.stack.next(self.now));
        stacks.chain(self.later.peek().map(|Reverse((at, ..))| *at)).min()
    }

    fn add(&mut self, delay: u64, side: usize, later: Later) {
        self.order += 1;
        let at = self.now + Duration::from_micros(delay);
        self.later.push(Reverse((at, self.order, side, later)));
    }

    fn step(&mut self) {
        let next = self.next().unwrap_or_else(|| panic!("nothing happens any more: {:?}", self.describe()));
        self.now = self.now.max(next);
        while self.later.peek().is_some_and(|Reverse((at, ..))| *at <= self.now) {
            let Some(Reverse((_, _, side, later))) = self.later.pop() else { break };
            let host = &mut self.hosts[side];
            match later {
                Later::Packet(mut packet) => {
                    host.given += 1;
                    host.stack.input(self.now, &mut packet, false, &mut host.out);
                }
                Later::Act(place) => self.act(side, place),
                Later::Room => host.out.room = self.case.room,
            }
        }
        for side in [0, 1] {
            self.events(side);
            self.flush(side);
        }
    }

    fn flush(&mut self, side: usize) {
        let host = &mut self.hosts[side];
        host.stack.flush(self.now, &mut host.out);
        let packets: Vec<_> = host.out.sent.drain(..).collect();
        host.taken += packets.len() as u64;
        if host.out.room == 0 {
            self.add(1000, side, Later::Room);
        } else {
            host.out.room = self.case.room;
        }
        for packet in packets {
            let copies = if self.random.below(1000) < self.case.duplication { 2 } else { 1 };
            for _ in 0..copies {
                if self.random.below(1000) >= self.case.loss {
                    let delay = 500 + self.random.below(self.case.delay_max);
                    self.add(delay, 1 - side, Later::Packet(packet.clone()));
                }
            }
        }
    }

    fn events(&mut self, side: usize) {
        while let Some(Event { id, what }) = self.hosts[side].stack.event() {
            let host = &mut self.hosts[side];
            if what == What::Accepted {
                let (_, peer) = host.stack.addresses(id).unwrap();
                let end = &mut host.ends[usize::from(peer.port() - port(0))];
                assert_eq!(end.id.replace(id), None, "accepted twice");
            }
            let place = host.ends.iter().position(|end| end.id == Some(id)).expect("an unknown id");
            let end = &mut host.ends[place];
            match what {
                What::Accepted | What::Connected | What::Writable => end.waits_to_write = false,
                What::Readable => end.waits_to_read = false,
                What::Closed(reason) => {
                    assert_eq!(reason, Reason::Finished, "{end:?}");
                    end.is_over = true;
                }
            }
            let delay = self.random.below(3000);
            self.add(delay, side, Later::Act(place));
        }
    }

    /// Reads and writes something, and goes on later unless it has to wait.
    fn act(&mut self, side: usize, place: usize) {
        let (read_max, write_max) = (1 + self.random.size(20_000), 1 + self.random.size(20_000));
        let host = &mut self.hosts[side];
        let (end, stack) = (&mut host.ends[place], &mut host.stack);
        let Some(id) = end.id.filter(|_| !end.is_over) else { return };
        if !end.waits_to_read {
            let taken = stack.read(id, |bytes| {
                let bytes = &bytes[..bytes.len().min(read_max)];
                for (at, byte) in bytes.iter().enumerate() {
                    assert_eq!(*byte, content(1 - side, place, end.read + at), "byte {}", end.read + at);
                }
                bytes.len()
            });
            end.read += taken;
            end.waits_to_read = taken == 0;
        }
        if !end.waits_to_write && end.written < end.length {
            let stop = end.length.min(end.written + write_max);
            let bytes: Vec<u8> = (end.written..stop).map(|at| content(side, place, at)).collect();
            let taken = stack.write(id, &bytes, self.now);
            end.written += taken;
            end.waits_to_write = taken < bytes.len();
        }
        if !end.waits_to_write && end.written == end.length && !end.has_shut_down {
            stack.shutdown(id, self.now);
            end.has_shut_down = true;
        }
        if !end.waits_to_read || !end.waits_to_write && end.written < end.length {
            let delay = self.random.below(3000);
            self.add(delay, side, Later::Act(place));
        }
    }
}

fn port(place: usize) -> u16 {
    10_000 + u16::try_from(place).unwrap()
}

/// A byte of what one side of a connection writes.
fn content(side: usize, place: usize, at: usize) -> u8 {
    pattern(u32::try_from(at + 1).unwrap()) ^ u8::try_from(2 * place + side).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn bytes_arrive_once_and_in_order(case in cases()) {
        World::new(case).run();
    }
}
