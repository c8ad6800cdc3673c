//! Control messages: ancillary data of received datagrams, and options of sends.
//!
//! Parsing works on plain bytes, with every length checked, so it needs no `unsafe` and can be
//! fuzzed.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, SystemTime};

use crate::addr::Source;

/// Size of `struct cmsghdr`.
const HEADER_LEN: usize = size_of::<libc::cmsghdr>();
/// Control messages start at multiples of this.
const ALIGN: usize = size_of::<usize>();

/// Space of a control message with `len` bytes of data (`CMSG_SPACE`).
pub(crate) const fn space(len: usize) -> usize {
    HEADER_LEN + len.next_multiple_of(ALIGN)
}

/// Bytes for everything that a lane may enable (destination address, ECN, GRO segment size, time
/// stamp), and for other options of the socket.
pub(crate) const RECV_CAPACITY: usize = 192;

/// Ancillary data of one message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ancillary {
    /// Local address to reply from, if enabled (`IP_PKTINFO`, `IPV6_RECVPKTINFO`).
    pub local: Option<Source>,
    /// Type of service or traffic class, if enabled; the two low bits are ECN (RFC 3168).
    pub tos: Option<u8>,
    /// Bytes of each datagram in a GRO message (`UDP_GRO`, Linux 5.0), 0 for a single datagram.
    pub segment_size: u16,
    /// Time at which the kernel received the packet, if enabled (`SO_TIMESTAMPNS`).
    pub timestamp: Option<SystemTime>,
}

/// Parses the control messages of one received message; skips unknown and malformed ones.
#[must_use]
pub fn parse(mut bytes: &[u8]) -> Ancillary {
    let mut found = Ancillary::default();
    while let Some((level, kind, data)) = next(&mut bytes) {
        match (level, kind) {
            (libc::SOL_UDP, libc::UDP_GRO) => {
                found.segment_size = read_u32(data, 0).map_or(0, |size| u16::try_from(size).unwrap_or(0));
            }
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => found.local = pktinfo_v4(data),
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => found.local = pktinfo_v6(data),
            (libc::IPPROTO_IP, libc::IP_TOS) => found.tos = data.first().copied(),
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => found.tos = read_u32(data, 0).map(|class| class as u8),
            (libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS) => found.timestamp = timestamp(data),
            _ => {}
        }
    }
    found
}

/// Splits off the first control message: level, type, data.
fn next<'a>(bytes: &mut &'a [u8]) -> Option<(i32, i32, &'a [u8])> {
    let len = usize::from_ne_bytes(bytes.get(..size_of::<usize>())?.try_into().ok()?);
    let level = read_u32(bytes, HEADER_LEN - 8)? as i32;
    let kind = read_u32(bytes, HEADER_LEN - 4)? as i32;
    let data = bytes.get(HEADER_LEN..len)?;
    *bytes = bytes.get(len.next_multiple_of(ALIGN)..).unwrap_or_default();
    Some((level, kind, data))
}

fn read_u32(data: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(data.get(at..at + 4)?.try_into().ok()?))
}

/// `struct in_pktinfo`: the second word is the address to reply from, even for a broadcast.
fn pktinfo_v4(data: &[u8]) -> Option<Source> {
    let ip: [u8; 4] = data.get(4..8)?.try_into().ok()?;
    Some(Source { ip: IpAddr::V4(Ipv4Addr::from(ip)), interface: 0 })
}

/// `struct in6_pktinfo`: address, interface. Only link-local addresses need the interface.
fn pktinfo_v6(data: &[u8]) -> Option<Source> {
    let ip: [u8; 16] = data.get(..16)?.try_into().ok()?;
    let ip = Ipv6Addr::from(ip);
    let interface = if ip.is_unicast_link_local() { read_u32(data, 16)? } else { 0 };
    Some(Source { ip: IpAddr::V6(ip), interface })
}

fn timestamp(data: &[u8]) -> Option<SystemTime> {
    let seconds = i64::from_ne_bytes(data.get(..8)?.try_into().ok()?);
    let nanos = i64::from_ne_bytes(data.get(8..16)?.try_into().ok()?);
    let since = Duration::new(u64::try_from(seconds).ok()?, u32::try_from(nanos).ok()?);
    SystemTime::UNIX_EPOCH.checked_add(since)
}

/// Offset of the segment size in a [`SendControl`]; the source address ends there.
const SEGMENT_OFFSET: usize = space(size_of::<libc::in6_pktinfo>());
const SEND_LEN: usize = SEGMENT_OFFSET + space(2);

/// Control messages of one send, in a fixed place: the source address, then the GSO segment size.
///
/// The headers are written once. A send points at the part of it that applies, so only the address
/// and the size are written per datagram.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(crate) struct SendControl([u8; SEND_LEN]);

impl SendControl {
    pub(crate) fn new() -> Self {
        let mut bytes = [0; SEND_LEN];
        let (len, level, kind) = (HEADER_LEN + 2, libc::SOL_UDP, libc::UDP_SEGMENT);
        write_header(&mut bytes[SEGMENT_OFFSET..], len, level, kind);
        Self(bytes)
    }

    /// Writes the parts that apply; returns their offset and length, (0, 0) for none.
    pub(crate) fn fill(&mut self, source: Option<&Source>, segment: Option<u16>) -> (usize, usize) {
        let start = source.map_or(SEGMENT_OFFSET, |source| self.write_source(source));
        let end = match segment {
            Some(size) => {
                self.0[SEGMENT_OFFSET + HEADER_LEN..][..2].copy_from_slice(&size.to_ne_bytes());
                SEND_LEN
            }
            None => SEGMENT_OFFSET,
        };
        if start == end { (0, 0) } else { (start, end - start) }
    }

    /// Writes the source address so that it ends where the segment size starts; returns its
    /// offset.
    fn write_source(&mut self, source: &Source) -> usize {
        match source.ip {
            IpAddr::V4(ip) => {
                let len = size_of::<libc::in_pktinfo>();
                let start = SEGMENT_OFFSET - space(len);
                let bytes = &mut self.0[start..SEGMENT_OFFSET];
                write_header(bytes, HEADER_LEN + len, libc::IPPROTO_IP, libc::IP_PKTINFO);
                bytes[HEADER_LEN..][..4].copy_from_slice(&source.interface.to_ne_bytes());
                bytes[HEADER_LEN + 4..][..4].copy_from_slice(&ip.octets());
                bytes[HEADER_LEN + 8..][..4].fill(0);
                start
            }
            IpAddr::V6(ip) => {
                let bytes = &mut self.0[..SEGMENT_OFFSET];
                let len = HEADER_LEN + size_of::<libc::in6_pktinfo>();
                write_header(bytes, len, libc::IPPROTO_IPV6, libc::IPV6_PKTINFO);
                bytes[HEADER_LEN..][..16].copy_from_slice(&ip.octets());
                bytes[HEADER_LEN + 16..][..4].copy_from_slice(&source.interface.to_ne_bytes());
                0
            }
        }
    }
}

fn write_header(bytes: &mut [u8], len: usize, level: i32, kind: i32) {
    bytes[..size_of::<usize>()].copy_from_slice(&len.to_ne_bytes());
    bytes[HEADER_LEN - 8..HEADER_LEN - 4].copy_from_slice(&level.to_ne_bytes());
    bytes[HEADER_LEN - 4..HEADER_LEN].copy_from_slice(&kind.to_ne_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(level: i32, kind: i32, data: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; space(data.len())];
        write_header(&mut bytes, HEADER_LEN + data.len(), level, kind);
        bytes[HEADER_LEN..HEADER_LEN + data.len()].copy_from_slice(data);
        bytes
    }

    #[test]
    fn reads_every_kind_in_one_buffer() {
        let mut bytes = message(libc::SOL_UDP, libc::UDP_GRO, &1200_i32.to_ne_bytes());
        bytes.extend(message(libc::IPPROTO_IP, libc::IP_PKTINFO, &[1, 0, 0, 0, 10, 0, 0, 1, 10, 0, 0, 255]));
        bytes.extend(message(libc::IPPROTO_IP, libc::IP_TOS, &[0xb9]));
        let mut time = 5_i64.to_ne_bytes().to_vec();
        time.extend(7_i64.to_ne_bytes());
        bytes.extend(message(libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS, &time));
        bytes.extend(message(libc::SOL_SOCKET, libc::SO_RXQ_OVFL, &[9, 0, 0, 0]));
        let found = parse(&bytes);
        assert_eq!(found.segment_size, 1200);
        assert_eq!(found.local, Some(Source { ip: "10.0.0.1".parse().unwrap(), interface: 0 }));
        assert_eq!(found.tos, Some(0xb9));
        assert_eq!(found.timestamp, SystemTime::UNIX_EPOCH.checked_add(Duration::new(5, 7)));
    }

    #[test]
    fn a_link_local_address_keeps_its_interface() {
        let mut data = "fe80::1".parse::<Ipv6Addr>().unwrap().octets().to_vec();
        data.extend(4_u32.to_ne_bytes());
        let found = parse(&message(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &data));
        assert_eq!(found.local, Some(Source { ip: "fe80::1".parse().unwrap(), interface: 4 }));
    }

    #[test]
    fn invalid_lengths_end_the_walk() {
        let good = message(libc::IPPROTO_IP, libc::IP_TOS, &[3]);
        for len in [0_usize, 1, HEADER_LEN - 1, HEADER_LEN + 100, usize::MAX - 7, usize::MAX] {
            let mut bytes = good.clone();
            bytes[..8].copy_from_slice(&len.to_ne_bytes());
            assert_eq!(parse(&bytes), Ancillary::default(), "length {len}");
        }
        for cut in 0..HEADER_LEN {
            assert_eq!(parse(&good[..cut]), Ancillary::default());
        }
    }

    #[test]
    fn send_control_messages_round_trip() {
        let mut control = SendControl::new();
        assert_eq!(control.fill(None, None), (0, 0));
        let source = Source { ip: "192.0.2.7".parse().unwrap(), interface: 0 };
        let (at, len) = control.fill(Some(&source), None);
        assert_eq!(len, space(12));
        assert_eq!(parse(&control.0[at..at + len]).local, Some(source));
        let source = Source { ip: "fe80::7".parse().unwrap(), interface: 3 };
        let (at, len) = control.fill(Some(&source), Some(1400));
        assert_eq!((at, len), (0, SEND_LEN));
        assert_eq!(parse(&control.0[at..at + len]).local, Some(source));
        let (at, len) = control.fill(None, Some(1400));
        let (level, kind, data) = next(&mut &control.0[at..at + len]).unwrap();
        assert_eq!((level, kind, data), (libc::SOL_UDP, libc::UDP_SEGMENT, &1400_u16.to_ne_bytes()[..]));
    }
}
