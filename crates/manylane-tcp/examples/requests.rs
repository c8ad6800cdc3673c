//! What a request of 100 bytes and its answer cost, by the number of connections, on packets in
//! memory; and the memory of an idle connection. The connections take turns, far from each other in
//! the table. Making the requests is not counted.
//!
//! ```sh
//! cargo run --release -p manylane-tcp --example requests
//! ```

#![allow(clippy::unwrap_used, reason = "a measurement ends when something is wrong")]

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use manylane_tcp::time::Time;
use manylane_tcp::{Config, Output, Secret, Stack, What};
use manylane_wire::ipv4::{HEADER_LEN, Ipv4Header};
use manylane_wire::tcp::{Flags, Options, PROTOCOL, Tcp, TcpHeader};

const SERVER: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 0, 0, 1), 80);
const BATCH: usize = 32;
const REQUESTS: usize = 1_000_000;
const ROUNDS: usize = 5;
/// A prime: all connections have had their turn before one has it again.
const STRIDE: u64 = 7919;

/// Counts packets, and keeps the last one.
#[derive(Default)]
struct Sink {
    space: Vec<u8>,
    length: usize,
    packets: usize,
}

impl Output for Sink {
    fn space(&mut self, length: usize) -> Option<&mut [u8]> {
        if self.space.len() < length {
            self.space.resize(length, 0);
        }
        self.space.get_mut(..length)
    }

    fn send(&mut self, length: usize, _: u16) {
        self.length = length;
        self.packets += 1;
    }
}

/// A peer: its next number, and the next one that it expects.
#[derive(Clone, Copy, Default)]
struct Peer {
    sequence: u32,
    acknowledgment: u32,
}

fn write_segment(
    packet: &mut Vec<u8>,
    number: u32,
    peer: Peer,
    flags: Flags,
    options: Options,
    payload: &[u8],
) {
    // 32,768 ports of each address.
    let source = Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 0, 0, 2)) + (number >> 15));
    let header = TcpHeader {
        source: (source, 1024 + (number & 0x7fff) as u16).into(),
        destination: SERVER.into(),
        sequence: peer.sequence,
        acknowledgment: peer.acknowledgment,
        flags,
        window: 60_000,
        urgent: 0,
        options,
    };
    let tcp = header.encoded_len().unwrap();
    packet.resize(HEADER_LEN + tcp + payload.len(), 0);
    packet[HEADER_LEN + tcp..].copy_from_slice(payload);
    header.write(&mut packet[HEADER_LEN..], payload).unwrap();
    let ip = Ipv4Header {
        traffic_class: 0,
        id: 0,
        dont_fragment: true,
        ttl: 64,
        protocol: PROTOCOL,
        source,
        destination: SERVER.0,
    };
    ip.write(packet, tcp + payload.len()).unwrap();
}

/// Resident memory of the process, in bytes.
fn resident() -> usize {
    const PAGE: usize = 4096;
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * PAGE
}

fn connect(stack: &mut Stack, number: u32, now: Time, sink: &mut Sink) -> Peer {
    let options =
        Options { mss: Some(1460), window_scale: Some(7), sack_permitted: true, ..Options::default() };
    let mut packet = Vec::new();
    let mut peer = Peer { sequence: 99, acknowledgment: 0 };
    write_segment(&mut packet, number, peer, Flags::SYN, options, &[]);
    stack.input(now, &mut packet, true, sink);
    let answer = Tcp::parse(&sink.space[HEADER_LEN..sink.length]).unwrap();
    peer = Peer { sequence: 100, acknowledgment: answer.sequence.wrapping_add(1) };
    write_segment(&mut packet, number, peer, Flags::ACK, Options::default(), &[]);
    stack.input(now, &mut packet, true, sink);
    assert_eq!(stack.event().unwrap().what, What::Accepted);
    peer
}

fn main() {
    println!("{:>11} {:>12} {:>22} {:>10}", "connections", "set-up, ns", "request, ns (median)", "idle, B");
    for connections in [50_000_u32, 10_000, 1000, 64] {
        let config = Config {
            receive_buffer: 8192,
            send_buffer: 8192,
            backlog: 1 << 16,
            buffers_max: 1 << 16,
            ..Config::default()
        };
        let mut now = Time(1_000_000);
        let mut stack = Stack::new(config, Secret::new([7; 16]), now).unwrap();
        stack.listen(SERVER.into()).unwrap();
        let mut sink = Sink::default();
        let (before, begun) = (resident(), Instant::now());
        let mut peers: Vec<Peer> =
            (0..connections).map(|number| connect(&mut stack, number, now, &mut sink)).collect();
        stack.flush(now, &mut sink);
        let set_up = begun.elapsed() / connections;
        let idle = resident().saturating_sub(before) / connections as usize;
        // Later ones get memory that was freed.
        let idle = if idle > 100 { idle.to_string() } else { "-".into() };
        let mut packets = vec![Vec::new(); BATCH];
        let mut times: Vec<Duration> = (0..ROUNDS)
            .map(|_| {
                let mut counted = Duration::ZERO;
                let mut turn = 0_u64;
                for _ in 0..REQUESTS / BATCH {
                    for packet in &mut packets {
                        turn += 1;
                        let number = (turn * STRIDE % u64::from(connections)) as u32;
                        let peer = &mut peers[number as usize];
                        write_segment(
                            packet,
                            number,
                            *peer,
                            Flags::ACK.with(Flags::PSH),
                            Options::default(),
                            &[b'q'; 100],
                        );
                        peer.sequence = peer.sequence.wrapping_add(100);
                        peer.acknowledgment = peer.acknowledgment.wrapping_add(100);
                    }
                    let begun = Instant::now();
                    sink.packets = 0;
                    for packet in &mut packets {
                        stack.input(now, packet, true, &mut sink);
                    }
                    while let Some(event) = stack.event() {
                        while stack.read(event.id, <[u8]>::len) > 0 {}
                        stack.write(event.id, &[b'a'; 100], now);
                    }
                    stack.flush(now, &mut sink);
                    counted += begun.elapsed();
                    assert_eq!(sink.packets, BATCH);
                    // So little that no timeout comes.
                    now.0 += 1;
                }
                counted / REQUESTS as u32
            })
            .collect();
        times.sort();
        println!(
            "{connections:>11} {:>12} {:>22} {idle:>10}",
            set_up.as_nanos(),
            format!(
                "{} ({} to {})",
                times[ROUNDS / 2].as_nanos(),
                times[0].as_nanos(),
                times[ROUNDS - 1].as_nanos()
            )
        );
    }
}
