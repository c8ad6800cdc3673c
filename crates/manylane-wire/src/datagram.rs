//! Parses a received frame as one UDP datagram: the position of its payload, its addresses, and
//! its checksums.
//!
//! For a receiver of whole frames (AF_XDP). A frame that it refuses would be dropped by the kernel
//! as well, or is no plain UDP datagram (fragments, options, extension headers).
//!
//! The common frame has no tags, no options and consistent lengths: it is parsed in one step
//! (`parse_fast`). Any other frame is parsed layer by layer, as in the rest of this crate, with
//! the same result.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::checksum::Sum;
use crate::error::{Error, Layer, Result};
use crate::ethernet::{self, Ethernet, ether_type};
use crate::ipv4::{self, Ipv4};
use crate::ipv6::{self, Ipv6};
pub use crate::udp::Checksum;
use crate::udp::{self, Udp};

/// The UDP datagram of a frame. The struct is small, with the addresses as in the header, because
/// most receivers read few of them.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Datagram {
    pub(crate) addr_pair: AddrPair,
    /// The UDP header, as received.
    pub(crate) udp: [u8; udp::HEADER_LEN],
    /// Offset of the payload in the frame.
    pub payload_offset: u16,
    /// Length of the payload in bytes, without padding.
    pub len: u16,
    /// Differentiated services (six bits) and ECN (two bits).
    pub traffic_class: u8,
    /// Result of the checksum verification.
    pub checksum: Checksum,
    /// Offset of the IP header in the frame; zero if it has options.
    pub(crate) ip_offset: u8,
}

/// Source and destination address of a datagram.
#[derive(Clone, Copy, Default)]
pub struct AddrPair {
    /// Source and destination, in this order; bytes that IPv4 does not use are arbitrary.
    pub(crate) addresses: [u8; 32],
    pub(crate) is_v6: bool,
}

/// Length of both IPv4 addresses.
const ADDRS_V4_LEN: usize = 8;

impl PartialEq for AddrPair {
    #[inline]
    fn eq(&self, other: &Self) -> bool {
        self.is_v6 == other.is_v6
            && self.addresses[..ADDRS_V4_LEN] == other.addresses[..ADDRS_V4_LEN]
            && (!self.is_v6 || self.addresses[ADDRS_V4_LEN..] == other.addresses[ADDRS_V4_LEN..])
    }
}

impl Eq for AddrPair {}

/// Offset of IP in a frame without tags, and of UDP behind either IP.
const IP_OFFSET: usize = ethernet::HEADER_LEN;
const UDP_V4_OFFSET: usize = IP_OFFSET + ipv4::HEADER_LEN;
const UDP_V6_OFFSET: usize = IP_OFFSET + ipv6::HEADER_LEN;

impl Datagram {
    /// Parses the datagram in `frame`.
    ///
    /// # Errors
    /// If a header is malformed or its lengths are inconsistent, or if the frame is not a plain
    /// UDP datagram.
    #[inline]
    pub fn parse(frame: &[u8]) -> Result<Self> {
        let mut datagram = Self::default();
        datagram.read(frame).map(|()| datagram)
    }

    /// As [`parse`](Self::parse), into an existing value, which is undefined after an error.
    ///
    /// # Errors
    /// As for [`parse`](Self::parse).
    #[inline]
    pub fn read(&mut self, frame: &[u8]) -> Result<()> {
        if !self.parse_fast(frame) {
            *self = Self::parse_layers(frame)?;
        }
        Ok(())
    }

    /// Source address and port.
    #[must_use]
    #[inline]
    pub fn source(&self) -> SocketAddr {
        SocketAddr::new(self.addr_pair.address(0), self.ports().0)
    }

    /// Destination address and port.
    #[must_use]
    #[inline]
    pub fn destination(&self) -> SocketAddr {
        SocketAddr::new(self.addr_pair.address(1), self.ports().1)
    }

    /// Source and destination port.
    #[must_use]
    #[inline]
    pub fn ports(&self) -> (u16, u16) {
        (be16(&self.udp, 0), be16(&self.udp, 2))
    }

    /// The UDP checksum, as received.
    #[inline]
    pub(crate) fn udp_checksum(&self) -> u16 {
        be16(&self.udp, udp::CHECKSUM_OFFSET)
    }

    /// Both addresses, for comparisons.
    #[must_use]
    #[inline]
    pub fn addr_pair(&self) -> &AddrPair {
        &self.addr_pair
    }

    /// Parses a common frame; false if the frame is not one.
    #[inline]
    fn parse_fast(&mut self, frame: &[u8]) -> bool {
        /// EtherType, and the IP version with the header length.
        const ETHERTYPE_VERSION_V4: MaskedWord =
            MaskedWord::new([0x08, 0x00, 0x45, 0], [0xff, 0xff, 0xff, 0]);
        const ETHERTYPE_VERSION_V6: MaskedWord =
            MaskedWord::new([0x86, 0xdd, 0x60, 0], [0xff, 0xff, 0xf0, 0]);
        let Some(head) = frame.first_chunk::<{ UDP_V4_OFFSET + udp::HEADER_LEN }>() else { return false };
        let kind = ne32(head, IP_OFFSET - 2);
        if ETHERTYPE_VERSION_V4.matches(kind) {
            self.parse_fast_v4(frame, head)
        } else {
            ETHERTYPE_VERSION_V6.matches(kind) && self.parse_fast_v6(frame)
        }
    }

    #[inline]
    fn parse_fast_v4(&mut self, frame: &[u8], head: &[u8; UDP_V4_OFFSET + udp::HEADER_LEN]) -> bool {
        /// No fragment; the flag "don't fragment" and the time to live are ignored.
        const UNFRAGMENTED_UDP: MaskedWord = MaskedWord::new([0, 0, 0, udp::PROTOCOL], [0x3f, 0xff, 0, 0xff]);
        let (total, length) =
            (usize::from(be16(head, IP_OFFSET + 2)), usize::from(be16(head, UDP_V4_OFFSET + 4)));
        if !UNFRAGMENTED_UDP.matches(ne32(head, IP_OFFSET + 6))
            || length < udp::HEADER_LEN
            || total != ipv4::HEADER_LEN + length
        {
            return false;
        }
        let Some(datagram) = frame.get(UDP_V4_OFFSET..UDP_V4_OFFSET + length) else { return false };
        let ends = ne64(head, IP_OFFSET + 12);
        let addresses = Sum::default().add_u64(ends);
        let header = addresses.add_u64(ne64(head, IP_OFFSET)).add_u64(ne32(head, IP_OFFSET + 8).into());
        let field = be16(head, UDP_V4_OFFSET + udp::CHECKSUM_OFFSET);
        self.checksum = if !header.is_valid() {
            Checksum::Invalid
        } else if field == 0 {
            Checksum::Valid
        } else {
            // The 16-bit words that are in no other word that is summed.
            let protocol = ne32(&[0, udp::PROTOCOL, head[UDP_V4_OFFSET + 4], head[UDP_V4_OFFSET + 5]], 0);
            Checksum::verify(addresses.add_u64(protocol.into()), datagram, field)
        };
        self.set_headers_v4(head, length);
        true
    }

    #[inline]
    fn parse_fast_v6(&mut self, frame: &[u8]) -> bool {
        let Some(head) = frame.first_chunk::<{ UDP_V6_OFFSET + udp::HEADER_LEN }>() else { return false };
        let length = usize::from(be16(head, IP_OFFSET + 4));
        let field = be16(head, UDP_V6_OFFSET + 6);
        if head[IP_OFFSET + 6] != udp::PROTOCOL
            || length < udp::HEADER_LEN
            || usize::from(be16(head, UDP_V6_OFFSET + 4)) != length
            || field == 0
        {
            return false;
        }
        let Some(datagram) = frame.get(UDP_V6_OFFSET..UDP_V6_OFFSET + length) else { return false };
        let addresses: [u8; 32] = chunk(head, IP_OFFSET + 8);
        if is_v4_mapped(addresses.first_chunk()) || is_v4_mapped(addresses.last_chunk()) {
            return false;
        }
        let protocol = ne32(&[0, udp::PROTOCOL, head[UDP_V6_OFFSET + 4], head[UDP_V6_OFFSET + 5]], 0);
        let pseudo = Sum::default().add_bytes(&addresses).add_u64(protocol.into());
        self.checksum = Checksum::verify(pseudo, datagram, field);
        self.set_headers_v6(head, length);
        true
    }

    /// Sets everything but the checksum of a plain IPv4 frame with `length` bytes of UDP.
    #[inline]
    pub(crate) fn set_headers_v4(&mut self, head: &[u8; UDP_V4_OFFSET + udp::HEADER_LEN], length: usize) {
        self.addr_pair.addresses[..ADDRS_V4_LEN]
            .copy_from_slice(&chunk::<ADDRS_V4_LEN, _>(head, IP_OFFSET + 12));
        self.addr_pair.is_v6 = false;
        self.traffic_class = head[IP_OFFSET + 1];
        self.set_udp_header(head, UDP_V4_OFFSET, length);
    }

    /// As above, for IPv6.
    #[inline]
    pub(crate) fn set_headers_v6(&mut self, head: &[u8; UDP_V6_OFFSET + udp::HEADER_LEN], length: usize) {
        self.addr_pair = AddrPair { addresses: chunk(head, IP_OFFSET + 8), is_v6: true };
        self.traffic_class = head[IP_OFFSET] << 4 | head[IP_OFFSET + 1] >> 4;
        self.set_udp_header(head, UDP_V6_OFFSET, length);
    }

    /// Sets the fields behind IP: `length` bytes of UDP at offset `at`.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "from 16-bit fields, and checked against the frame")]
    fn set_udp_header<const N: usize>(&mut self, head: &[u8; N], at: usize, length: usize) {
        self.udp = chunk(head, at);
        self.ip_offset = IP_OFFSET as u8;
        (self.payload_offset, self.len) = ((at + udp::HEADER_LEN) as u16, (length - udp::HEADER_LEN) as u16);
    }

    /// Parses any frame, layer by layer.
    #[cold]
    fn parse_layers(frame: &[u8]) -> Result<Self> {
        let (ethernet, packet) = Ethernet::parse(frame)?;
        let link = frame.len() - packet.len();
        let (bytes, at, (source, destination), traffic_class, header_holds) = match ethernet.ether_type {
            ether_type::IPV4 => {
                let ip = Ipv4::parse(packet)?;
                if ip.protocol != udp::PROTOCOL || ip.is_fragment() {
                    return Err(Error::BadVersion(Layer::Udp));
                }
                let ends = (IpAddr::from(ip.source), IpAddr::from(ip.destination));
                (ip.payload, link + ip.header.len(), ends, ip.traffic_class, ip.has_valid_checksum())
            }
            ether_type::IPV6 => {
                let ip = Ipv6::parse(packet)?;
                if ip.next_header != udp::PROTOCOL {
                    return Err(Error::BadVersion(Layer::Udp));
                }
                // No address on a wire has this form, and Linux accepts none.
                if is_v4_mapped(Some(&ip.source.octets())) || is_v4_mapped(Some(&ip.destination.octets())) {
                    return Err(Error::BadVersion(Layer::Ipv6));
                }
                let ends = (ip.source.into(), ip.destination.into());
                (ip.payload, link + ipv6::HEADER_LEN, ends, ip.traffic_class, true)
            }
            _ => return Err(Error::BadVersion(Layer::Ethernet)),
        };
        let udp = Udp::parse(bytes)?;
        let checksum = if header_holds { udp.checksum_state(source, destination) } else { Checksum::Invalid };
        let mut addresses = [0; 32];
        match (source, destination) {
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                addresses[..16].copy_from_slice(&source.octets());
                addresses[16..].copy_from_slice(&destination.octets());
            }
            (source, destination) => {
                for (to, ip) in addresses.chunks_exact_mut(4).zip([source, destination]) {
                    if let IpAddr::V4(ip) = ip {
                        to.copy_from_slice(&ip.octets());
                    }
                }
            }
        }
        let short = |length: usize| u16::try_from(length).map_err(|_| Error::TooLong(Layer::Udp));
        let is_v6 = source.is_ipv6();
        let has_options = at - link != if is_v6 { ipv6::HEADER_LEN } else { ipv4::HEADER_LEN };
        Ok(Self {
            addr_pair: AddrPair { addresses, is_v6 },
            udp: bytes.first_chunk().copied().unwrap_or_default(),
            payload_offset: short(at + udp::HEADER_LEN)?,
            len: short(udp.payload.len())?,
            traffic_class,
            checksum,
            // A header with two tags has 22 bytes.
            ip_offset: if has_options { 0 } else { u8::try_from(link).unwrap_or(0) },
        })
    }
}

impl AddrPair {
    /// True if they are IPv6 addresses.
    #[must_use]
    #[inline]
    pub fn is_ipv6(&self) -> bool {
        self.is_v6
    }

    #[inline]
    fn address(&self, number: usize) -> IpAddr {
        if self.is_v6 {
            Ipv6Addr::from(chunk::<16, _>(&self.addresses, number * 16)).into()
        } else {
            Ipv4Addr::from(chunk::<4, _>(&self.addresses, number * 4)).into()
        }
    }
}

impl fmt::Debug for AddrPair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entry(&self.address(0)).entry(&self.address(1)).finish()
    }
}

impl fmt::Debug for Datagram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { payload_offset: at, len, traffic_class, checksum, .. } = self;
        f.debug_struct("Datagram")
            .field("source", &self.source())
            .field("destination", &self.destination())
            .field("at", at)
            .field("len", len)
            .field("traffic_class", traffic_class)
            .field("checksum", checksum)
            .finish()
    }
}

/// Four bytes of a header with a mask, as one number.
struct MaskedWord {
    value: u32,
    mask: u32,
}

impl MaskedWord {
    const fn new(value: [u8; 4], mask: [u8; 4]) -> Self {
        Self { value: u32::from_ne_bytes(value), mask: u32::from_ne_bytes(mask) }
    }

    #[inline]
    fn matches(&self, bytes: u32) -> bool {
        bytes & self.mask == self.value
    }
}

#[inline]
pub(crate) fn be16<const N: usize>(head: &[u8; N], at: usize) -> u16 {
    u16::from_be_bytes(chunk(head, at))
}

#[inline]
pub(crate) fn ne32<const N: usize>(head: &[u8; N], at: usize) -> u32 {
    u32::from_ne_bytes(chunk(head, at))
}

#[inline]
pub(crate) fn ne64<const N: usize>(head: &[u8; N], at: usize) -> u64 {
    u64::from_ne_bytes(chunk(head, at))
}

/// Bytes of a header at a fixed offset: one load, if they are eight or fewer.
///
/// # Panics
/// If the header is too short; length and offset are known at compile time, so the check is
/// removed.
#[inline]
pub(crate) fn chunk<const M: usize, const N: usize>(head: &[u8; N], at: usize) -> [u8; M] {
    head[at..at + M].try_into().unwrap_or([0; M])
}

/// True for an IPv4-mapped IPv6 address (`::ffff:a.b.c.d`).
#[inline]
fn is_v4_mapped(ip: Option<&[u8; 16]>) -> bool {
    ip.is_some_and(|ip| u128::from_be_bytes(*ip) >> 32 == 0xffff)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checksum::Sum;
    use crate::ethernet::{Mac, Vlan};
    use crate::frame::UdpFrame;

    fn plan(payload: &[u8], v6: bool) -> UdpFrame<'_> {
        let (from, to) = if v6 { ("[fd00::1]:7", "[fd00::2]:53") } else { ("10.0.0.1:7", "10.0.0.2:53") };
        UdpFrame {
            payload,
            ..UdpFrame::new(Mac([2; 6]), Mac([4; 6]), from.parse().unwrap(), to.parse().unwrap())
        }
    }

    #[test]
    fn finds_the_payload_behind_tags_and_before_padding() {
        for v6 in [false, true] {
            let tag = Some(Vlan { ether_type: ether_type::VLAN, tci: 5 });
            for vlans in [[None, None], [tag, None], [tag, tag]] {
                for payload in [&b""[..], b"x", b"hello world"] {
                    let plan = UdpFrame { vlans, ..plan(payload, v6) };
                    let mut bytes = [0xaa; 120];
                    let length = plan.write(&mut bytes).unwrap();
                    for frame in [&bytes[..length], &bytes] {
                        let found = Datagram::parse(frame).unwrap();
                        assert_eq!(&frame[found.payload_offset.into()..][..found.len.into()], payload);
                        assert_eq!((found.source(), found.destination()), (plan.source, plan.destination));
                        assert_eq!(found.checksum, Checksum::Valid);
                    }
                }
            }
        }
    }

    #[test]
    fn any_flipped_bit_that_checksums_cover_is_seen() {
        for v6 in [false, true] {
            let mut bytes = [0; 90];
            let length = plan(b"payload", v6).write(&mut bytes).unwrap();
            // From the IP header on. No checksum covers the class, label and hop limit of IPv6.
            for bit in 14 * 8..length * 8 {
                if v6 && matches!(bit / 8, 14..=17 | 21) {
                    continue;
                }
                let mut flipped = bytes;
                flipped[bit / 8] ^= 1 << (bit % 8);
                if let Ok(found) = Datagram::parse(&flipped[..length]) {
                    assert_eq!(found.checksum, Checksum::Invalid, "bit {bit}, v6 {v6}");
                }
            }
        }
    }

    #[test]
    fn no_checksum_is_right_over_ipv4_only() {
        for (v6, expected) in [(false, Checksum::Valid), (true, Checksum::Invalid)] {
            let mut bytes = [0; 90];
            let length = plan(b"payload", v6).write(&mut bytes).unwrap();
            let at = length - 7 - 2;
            bytes[at..at + 2].fill(0);
            assert_eq!(Datagram::parse(&bytes[..length]).unwrap().checksum, expected);
        }
    }

    #[test]
    fn a_partial_checksum_differs_from_a_wrong_one() {
        let mut bytes = [0; 90];
        let length = plan(b"payload", false).write(&mut bytes).unwrap();
        let pseudo = Sum::pseudo_v4(
            [10, 0, 0, 1].into(),
            [10, 0, 0, 2].into(),
            udp::PROTOCOL,
            (udp::HEADER_LEN + 7) as u16,
        );
        let at = length - 7 - 2;
        bytes[at..at + 2].copy_from_slice(&pseudo.value().to_be_bytes());
        assert_eq!(Datagram::parse(&bytes[..length]).unwrap().checksum, Checksum::Partial);
        bytes[at] ^= 1;
        assert_eq!(Datagram::parse(&bytes[..length]).unwrap().checksum, Checksum::Invalid);
    }

    /// True if `parse_fast` accepts the frame, which then has to agree with the layers.
    fn agree(frame: &[u8]) -> bool {
        // Old content must not show through.
        let mut found = Datagram {
            addr_pair: AddrPair { addresses: [0xaa; 32], is_v6: true },
            udp: [0xbb; udp::HEADER_LEN],
            ip_offset: 0xcc,
            ..Datagram::default()
        };
        let short = found.parse_fast(frame);
        if short {
            assert_eq!(Ok(found), Datagram::parse_layers(frame));
        }
        short
    }

    #[test]
    fn the_fast_path_agrees_with_the_layers_on_damaged_frames() {
        for v6 in [false, true] {
            let mut bytes = [0; 90];
            let length = plan(b"payload", v6).write(&mut bytes).unwrap();
            assert!(agree(&bytes[..length]) && agree(&bytes));
            for cut in 0..length {
                assert!(!agree(&bytes[..cut]));
            }
            let mut short = 0;
            for bit in 0..length * 8 {
                let mut flipped = bytes;
                flipped[bit / 8] ^= 1 << (bit % 8);
                short += usize::from(agree(&flipped[..length]));
                for other in bit + 1..length * 8 {
                    let mut twice = flipped;
                    twice[other / 8] ^= 1 << (other % 8);
                    agree(&twice[..length]);
                }
            }
            // Most flips leave a frame in the common form.
            assert!(short > 250, "{short}");
        }
    }

    #[test]
    fn a_v4_mapped_address_is_not_an_ipv6_address() {
        for mapped in ["[::ffff:10.0.0.1]:7", "[fd00::1]:7"] {
            let plan = UdpFrame { source: mapped.parse().unwrap(), ..plan(b"x", true) };
            let mut bytes = [0; 90];
            let length = plan.write(&mut bytes).unwrap();
            assert_eq!(Datagram::parse(&bytes[..length]).is_ok(), mapped.starts_with("[fd"));
        }
    }
}
