//! A peer whose segments are made one after the other, without an allocation.

use std::net::Ipv4Addr;

use manylane_tcp::time::Time;
use manylane_tcp::{Output, Stack};
use manylane_wire::ipv4::Ipv4Header;
use manylane_wire::tcp::{Flags, Options, PROTOCOL, Tcp, TcpHeader};

/// The address that connections are accepted to.
pub(crate) const SERVER: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 1), 80);

/// Keeps the last packet.
pub(crate) struct Last {
    pub(crate) space: Vec<u8>,
    pub(crate) length: usize,
}

impl Default for Last {
    fn default() -> Last {
        Last { space: vec![0; 2048], length: 0 }
    }
}

impl Output for Last {
    fn space(&mut self, length: usize) -> Option<&mut [u8]> {
        self.space.get_mut(..length)
    }

    fn send(&mut self, length: usize, _: u16) {
        self.length = length;
    }
}

/// A peer that sends segments one after the other.
pub(crate) struct Peer {
    packet: Vec<u8>,
    pub(crate) address: (Ipv4Addr, u16),
    pub(crate) sequence: u32,
    pub(crate) acknowledgment: u32,
    pub(crate) timestamp: u32,
}

impl Default for Peer {
    fn default() -> Peer {
        let address = ([192, 0, 2, 2].into(), 5000);
        Peer { packet: vec![0; 2048], address, sequence: 7, acknowledgment: 0, timestamp: 1 }
    }
}

impl Peer {
    pub(crate) fn segment(&mut self, flags: Flags, options: Options, payload: usize) -> &mut [u8] {
        let options = Options { timestamps: Some((self.timestamp, 0)), ..options };
        let header = TcpHeader {
            source: self.address.into(),
            destination: SERVER.into(),
            sequence: self.sequence,
            acknowledgment: self.acknowledgment,
            flags,
            window: 60_000,
            urgent: 0,
            options,
        };
        let length = header.encoded_len().unwrap();
        let ip = Ipv4Header {
            traffic_class: 0,
            id: 0,
            dont_fragment: true,
            ttl: 64,
            protocol: PROTOCOL,
            source: self.address.0,
            destination: SERVER.0,
        };
        ip.write(&mut self.packet, length + payload).unwrap();
        let (head, rest) = self.packet[20..].split_at_mut(length);
        header.write(head, &rest[..payload]).unwrap();
        &mut self.packet[..20 + length + payload]
    }

    /// Sends a SYN.
    pub(crate) fn ask(&mut self, stack: &mut Stack, now: Time, out: &mut Last) {
        let syn =
            Options { mss: Some(1460), window_scale: Some(7), sack_permitted: true, ..Options::default() };
        out.length = 0;
        stack.input(now, self.segment(Flags::SYN, syn, 0), false, out);
    }

    /// Connects.
    pub(crate) fn connect(&mut self, stack: &mut Stack, now: Time, out: &mut Last) {
        self.ask(stack, now, out);
        let answer = Tcp::parse(&out.space[20..out.length]).unwrap();
        assert_eq!(answer.acknowledgment, self.sequence + 1);
        (self.sequence, self.acknowledgment) = (self.sequence + 1, answer.sequence.wrapping_add(1));
        stack.input(now, self.segment(Flags::ACK, Options::default(), 0), false, out);
    }
}
