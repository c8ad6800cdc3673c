//! Any bytes as what peers, routers and an application do: the stack does not panic, what it sends
//! is valid, and it stays within its limits. The fuzz target `tcp` calls `check`, too.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use manylane_tcp::time::Time;
use manylane_tcp::{Config, Id, NetworkError, Output, Secret, Stack, What};
use manylane_wire::ipv4::{Ipv4, Ipv4Header};
use manylane_wire::ipv6::{Ipv6, Ipv6Header};
use manylane_wire::tcp::{Flags, Options, PROTOCOL, Tcp, TcpHeader};

const CONFIG_MTU: u16 = 1500;

fn config() -> Config {
    Config {
        connections_max: 8,
        backlog: 2,
        buffers_max: 3,
        receive_buffer: 3000,
        send_buffer: 3000,
        mtu: CONFIG_MTU,
        keep_alive: Some(Duration::from_secs(20)),
        time_wait_max: 4,
        ..Config::default()
    }
}

/// The bytes that decide; zeros behind their end.
struct Choices<'a>(&'a [u8]);

impl<'a> Choices<'a> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn short(&mut self) -> u16 {
        u16::from_be_bytes([self.byte(), self.byte()])
    }

    fn bytes(&mut self, length: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// A difference from what is right: mostly little.
    fn off(&mut self) -> u32 {
        match self.byte() {
            near @ 0..=199 if near & 1 == 0 => 0,
            near @ 0..=199 => u32::from(near).wrapping_sub(100),
            far @ 200..=240 => u32::from(far - 200) * 1460,
            _ => u32::from_be_bytes([self.byte(), self.byte(), self.byte(), self.byte()]),
        }
    }
}

/// Takes what the stack sends, and remembers for each peer what it expects next.
#[derive(Default)]
struct Sink {
    space: Vec<u8>,
    /// By the peer's end: the number behind the last segment, and the number that is expected.
    seen: HashMap<SocketAddr, (u32, u32)>,
    is_full: bool,
    last: Vec<u8>,
}

impl Output for Sink {
    fn space(&mut self, length: usize) -> Option<&mut [u8]> {
        if self.is_full {
            return None;
        }
        self.space.resize(length.max(self.space.len()), 0xee);
        self.space.get_mut(..length)
    }

    fn send(&mut self, length: usize, _: u16) {
        assert!(length <= usize::from(CONFIG_MTU), "a packet of {length} bytes");
        let packet = &self.space[..length];
        let (source, destination, payload) = if packet[0] >> 4 == 4 {
            let ip = Ipv4::parse(packet).unwrap();
            assert!(ip.has_valid_checksum());
            (ip.source.into(), ip.destination.into(), ip.payload)
        } else {
            let ip = Ipv6::parse(packet).unwrap();
            (ip.source.into(), ip.destination.into(), ip.payload)
        };
        let tcp = Tcp::parse(payload).unwrap();
        assert!(tcp.has_valid_checksum(source, destination));
        assert_eq!(payload.as_ptr() as usize - packet.as_ptr() as usize + payload.len(), length);
        let end = tcp.sequence.wrapping_add(tcp.sequence_len() as u32);
        self.seen.insert(SocketAddr::new(destination, tcp.destination), (end, tcp.acknowledgment));
        self.last = packet.to_vec();
    }
}

/// Plays what the bytes say.
pub(crate) fn check(bytes: &[u8]) {
    let mut choices = Choices(bytes);
    let mut now = Time(1_000_000);
    let mut stack = Stack::new(config(), Secret::new([1; 16]), now).unwrap();
    let (four, six): (SocketAddr, SocketAddr) =
        ("10.0.0.1:80".parse().unwrap(), "[fd00::1]:80".parse().unwrap());
    stack.listen(four).unwrap();
    stack.listen(six).unwrap();
    let mut sink = Sink::default();
    let mut ids: Vec<Id> = Vec::new();
    let mut given = 0;
    while !choices.0.is_empty() {
        let what = choices.byte();
        let peer_number = choices.byte() % 4;
        let (local, ip) = if what & 0x80 == 0 { (four, "10.0.0.2") } else { (six, "fd00::2") };
        let peer = SocketAddr::new(ip.parse().unwrap(), 1024 + u16::from(peer_number));
        let id = ids.get(usize::from(peer_number) % ids.len().max(1)).copied();
        match what & 0x0f {
            0..=5 => {
                let mut packet = segment(&mut choices, &sink, local, peer);
                given += 1;
                // With options, the checksum is wrong.
                stack.input(now, &mut packet, what & 0x70 != 0, &mut sink);
            }
            6 => {
                let length = usize::from(choices.byte());
                let mut packet = choices.bytes(length).to_vec();
                given += 1;
                stack.input(now, &mut packet, true, &mut sink);
            }
            7 => now.0 += u64::from(choices.short()) * 100,
            8 => now.0 += u64::from(choices.short()) * 10_000,
            9 => ids.extend(stack.connect(local, peer, now).ok()),
            10 => {
                let length = usize::from(choices.short()) % 5000;
                id.map(|id| stack.write(id, &vec![what; length], now));
            }
            11 => {
                let most = usize::from(choices.short());
                id.map(|id| stack.read(id, |bytes| bytes.len().min(most)));
            }
            12 => match (id, choices.byte() & 3) {
                (Some(id), 0) => stack.close(id, now),
                (Some(id), 1) => stack.abort(id),
                (Some(id), _) => stack.shutdown(id, now),
                _ => {}
            },
            13 => {
                let mtu = choices.short();
                let error =
                    if mtu & 1 == 0 { NetworkError::TooBig { mtu } } else { NetworkError::Unreachable };
                let quoted = sink.last.clone();
                stack.network_error(error, &quoted[..quoted.len().min(28)]);
                stack.network_error(error, choices.bytes(48));
            }
            14 => sink.is_full = !sink.is_full,
            _ => stack.flush(now, &mut sink),
        }
        while let Some(event) = stack.event() {
            match event.what {
                What::Accepted => ids.push(event.id),
                What::Closed(_) => ids.retain(|id| *id != event.id),
                _ => {}
            }
        }
        assert_limits(&stack);
    }
    assert_eq!(stack.counters().segments_in, given);
    // Left alone, nothing stays for ever but connections that the application has.
    sink.is_full = false;
    for id in ids {
        stack.abort(id);
    }
    for _ in 0..10_000 {
        stack.flush(now, &mut sink);
        let Some(next) = stack.next(now) else { break };
        now = Time(next.0.max(now.0 + 1));
    }
    let levels = stack.levels();
    assert_eq!((levels.connections, levels.time_wait, levels.buffers_used), (0, 0, 0), "{levels:?}");
}

fn assert_limits(stack: &Stack) {
    let (levels, config) = (stack.levels(), config());
    assert!(levels.connections <= config.connections_max, "{levels:?}");
    assert!(levels.backlog <= config.backlog, "{levels:?}");
    assert!(levels.time_wait <= config.time_wait_max, "{levels:?}");
    assert!(levels.buffers <= config.buffers_max, "{levels:?}");
    assert!(levels.buffers_used <= levels.connections, "{levels:?}");
}

/// A segment that is about what the stack expects of the peer.
fn segment(choices: &mut Choices<'_>, sink: &Sink, local: SocketAddr, peer: SocketAddr) -> Vec<u8> {
    let (acknowledgment, sequence) = sink.seen.get(&peer).copied().unwrap_or((0, 5000));
    let flags = match choices.byte() {
        0..=15 => Flags::SYN,
        16..=31 => Flags::SYN.with(Flags::ACK),
        32..=160 => Flags::ACK,
        161..=190 => Flags::ACK.with(Flags::FIN),
        any => Flags(any.wrapping_mul(7)),
    };
    let header = TcpHeader {
        source: peer,
        destination: local,
        sequence: sequence.wrapping_add(choices.off()),
        acknowledgment: acknowledgment.wrapping_add(choices.off()),
        flags,
        window: choices.short(),
        urgent: choices.short(),
        options: Options::default(),
    };
    let options = usize::from(choices.byte() % 11) * 4;
    let payload = usize::from(choices.short()) % 1461;
    let length = 20 + options + payload;
    let mut tcp = vec![0; length];
    header.write(&mut tcp, &[]).unwrap();
    tcp[12] = ((20 + options) << 2) as u8;
    let bytes = choices.bytes(options);
    tcp[20..20 + bytes.len()].copy_from_slice(bytes);
    let mut packet = vec![0; 40];
    let at = match (peer.ip(), local.ip()) {
        (std::net::IpAddr::V4(source), std::net::IpAddr::V4(destination)) => {
            let ip = Ipv4Header {
                traffic_class: 0,
                id: 0,
                dont_fragment: true,
                ttl: 64,
                protocol: PROTOCOL,
                source,
                destination,
            };
            packet.truncate(20);
            packet.extend_from_slice(&tcp);
            ip.write(&mut packet, length).unwrap();
            20
        }
        (std::net::IpAddr::V6(source), std::net::IpAddr::V6(destination)) => {
            let ip = Ipv6Header {
                traffic_class: 0,
                flow_label: 0,
                next_header: PROTOCOL,
                hop_limit: 64,
                source,
                destination,
            };
            packet.extend_from_slice(&tcp);
            ip.write(&mut packet, length).unwrap();
            40
        }
        _ => unreachable!("both are of one family"),
    };
    assert_eq!(packet.len(), at + length);
    packet
}
