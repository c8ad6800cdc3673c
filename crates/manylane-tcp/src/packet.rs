//! Packets: IP and TCP headers, read and written.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;

use manylane_wire::ipv4::{self, Ipv4, Ipv4Header};
use manylane_wire::ipv6::{self, Ipv6Header};
use manylane_wire::packet::Packet;
use manylane_wire::tcp::{self, Flags, Options, Tcp, TcpHeader};

use crate::flow::Flow;
use crate::output::Output;

/// Hops of what we send, as Linux has it.
const TTL: u8 = 64;
/// Headers at most: IPv6, and TCP with all its options.
const HEADERS_MAX: usize = ipv6::HEADER_LEN + tcp::HEADER_LEN + tcp::OPTIONS_LEN_MAX;

/// Why a packet is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unfit {
    /// Not what we can read, or from a sender that cannot exist.
    Malformed,
    /// Damaged on the way.
    Checksum,
}

/// A segment and where it lies in the packet.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub(crate) flow: Flow,
    pub(crate) sequence: u32,
    pub(crate) acknowledgment: u32,
    pub(crate) flags: Flags,
    pub(crate) window: u16,
    pub(crate) options: Options,
    /// Header and payload, in the packet.
    pub(crate) tcp: Range<usize>,
    /// Length of the payload.
    pub(crate) payload: usize,
}

impl Segment {
    /// Reads a packet that came over a link. `is_verified`: its checksums are known to be valid.
    pub(crate) fn parse(packet: &[u8], link: u16, is_verified: bool) -> Result<Segment, Unfit> {
        let Packet { source, destination, payload, .. } = Packet::parse(packet)
            .filter(|packet| packet.protocol == tcp::PROTOCOL)
            .ok_or(Unfit::Malformed)?;
        if !is_verified && !has_valid_ip_checksum(packet) {
            return Err(Unfit::Checksum);
        }
        if !can_send(source) || !can_send(destination) {
            return Err(Unfit::Malformed);
        }
        let tcp = Tcp::parse(payload).map_err(|_| Unfit::Malformed)?;
        // From ourselves to ourselves is no one's ("land").
        let is_loop = (source, tcp.source) == (destination, tcp.destination);
        if tcp.source == 0 || tcp.destination == 0 || is_loop {
            return Err(Unfit::Malformed);
        }
        if !is_verified && !tcp.has_valid_checksum(source, destination) {
            return Err(Unfit::Checksum);
        }
        let start = payload.as_ptr() as usize - packet.as_ptr() as usize;
        Ok(Segment {
            flow: Flow::new(
                SocketAddr::new(destination, tcp.destination),
                SocketAddr::new(source, tcp.source),
                link,
            ),
            sequence: tcp.sequence,
            acknowledgment: tcp.acknowledgment,
            flags: tcp.flags,
            window: tcp.window,
            options: Options::parse(tcp.options, tcp.flags.contains(Flags::SYN)),
            tcp: start..start + tcp.segment.len(),
            payload: tcp.payload.len(),
        })
    }

    /// True if all of these bits are set.
    pub(crate) fn has(&self, flags: Flags) -> bool {
        self.flags.contains(flags)
    }

    /// Number behind the segment.
    pub(crate) fn end(&self) -> u32 {
        let control = u32::from(self.has(Flags::SYN)) + u32::from(self.has(Flags::FIN));
        self.sequence.wrapping_add(length32(self.payload)).wrapping_add(control)
    }
}

/// What an ICMP error quotes of a packet of ours: its flow, without the link, and its number. It
/// may end behind the first eight bytes of TCP.
pub(crate) fn parse_quoted(packet: &[u8]) -> Option<(Flow, u32)> {
    let (source, destination, at): (IpAddr, IpAddr, usize) = match packet.first()? >> 4 {
        4 => {
            let header =
                packet.first_chunk::<{ ipv4::HEADER_LEN }>().filter(|header| header[9] == tcp::PROTOCOL)?;
            let &[.., s0, s1, s2, s3, d0, d1, d2, d3] = header;
            ([s0, s1, s2, s3].into(), [d0, d1, d2, d3].into(), usize::from(header[0] & 0xf) * 4)
        }
        6 => {
            let header =
                packet.first_chunk::<{ ipv6::HEADER_LEN }>().filter(|header| header[6] == tcp::PROTOCOL)?;
            let (source, destination) = header[8..].split_first_chunk::<16>()?;
            ((*source).into(), (*destination.first_chunk::<16>()?).into(), ipv6::HEADER_LEN)
        }
        _ => return None,
    };
    let &[s0, s1, d0, d1, q0, q1, q2, q3] = packet.get(at..)?.first_chunk()?;
    let (local, remote) = (u16::from_be_bytes([s0, s1]), u16::from_be_bytes([d0, d1]));
    let flow = Flow::new((source, local).into(), (destination, remote).into(), 0);
    Some((flow, u32::from_be_bytes([q0, q1, q2, q3])))
}

/// True if an IP header has no checksum, or a valid one (RFC 1122, section 3.2.1.2).
fn has_valid_ip_checksum(packet: &[u8]) -> bool {
    packet.first().is_none_or(|first| first >> 4 != 4)
        || Ipv4::parse(packet).is_ok_and(|ip| ip.has_valid_checksum())
}

/// True for an address that one host has (RFC 1122, section 3.2.1.3). IPv4 addresses that are
/// mapped to IPv6 are not for the wire.
fn can_send(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => {
            !address.is_unspecified() && !address.is_multicast() && !address.is_broadcast()
        }
        IpAddr::V6(address) => {
            !address.is_unspecified() && !address.is_multicast() && address.to_ipv4_mapped().is_none()
        }
    }
}

/// A segment without payload, to be sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Control {
    pub(crate) flow: Flow,
    pub(crate) sequence: u32,
    pub(crate) acknowledgment: u32,
    pub(crate) flags: Flags,
    pub(crate) window: u16,
    pub(crate) options: Options,
}

impl Control {
    /// The reset that answers a segment of no connection (RFC 9293, section 3.10.7.1).
    pub(crate) fn reset(segment: &Segment) -> Control {
        let (sequence, acknowledgment, flags) = if segment.has(Flags::ACK) {
            (segment.acknowledgment, 0, Flags::RST)
        } else {
            (0, segment.end(), Flags::RST.with(Flags::ACK))
        };
        let (flow, options) = (segment.flow, Options::default());
        Control { flow, sequence, acknowledgment, flags, window: 0, options }
    }

    /// Sends it. False if there was no space.
    pub(crate) fn send(&self, out: &mut impl Output) -> bool {
        let Some(space) = out.space(HEADERS_MAX) else { return false };
        let header = self.header();
        let Ok(length) = header.encoded_len() else { return false };
        let Some(length) = write_headers(space, &header, length, 0) else { return false };
        out.send(length, self.flow.link());
        true
    }

    fn header(&self) -> TcpHeader {
        TcpHeader {
            source: self.flow.local(),
            destination: self.flow.remote(),
            sequence: self.sequence,
            acknowledgment: self.acknowledgment,
            flags: self.flags,
            window: self.window,
            urgent: 0,
            options: self.options,
        }
    }
}

/// Length of the IP header of a flow.
pub(crate) fn ip_header_len(flow: &Flow) -> usize {
    if flow.is_ipv4() { ipv4::HEADER_LEN } else { ipv6::HEADER_LEN }
}

/// Writes the headers of a segment whose payload already lies behind them: `tcp_length` bytes of
/// TCP header and `payload` bytes. Returns the length of the packet, or `None` if it has no room.
pub(crate) fn write_headers(
    packet: &mut [u8],
    header: &TcpHeader,
    tcp_length: usize,
    payload: usize,
) -> Option<usize> {
    let behind = tcp_length + payload;
    let ip = match (header.source.ip(), header.destination.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let ip = Ipv4Header {
                traffic_class: 0,
                // Of packets that are not to be fragmented, which nothing reads (RFC 6864).
                id: 0,
                dont_fragment: true,
                ttl: TTL,
                protocol: tcp::PROTOCOL,
                source,
                destination,
            };
            ip.write(packet, behind).ok()?;
            ipv4::HEADER_LEN
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let ip = Ipv6Header {
                traffic_class: 0,
                flow_label: 0,
                next_header: tcp::PROTOCOL,
                hop_limit: TTL,
                source,
                destination,
            };
            ip.write(packet, behind).ok()?;
            ipv6::HEADER_LEN
        }
        _ => return None,
    };
    let (header_bytes, payload) = packet.get_mut(ip..ip + behind)?.split_at_mut(tcp_length);
    header.write(header_bytes, payload).ok()?;
    Some(ip + behind)
}

/// A length that is below that of an IP packet, as a difference of sequence numbers.
pub(crate) fn length32(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
