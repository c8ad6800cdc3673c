//! A received frame as one UDP datagram: where its payload is, from whom, and whether it may be believed.
//!
//! For a receiver that gets whole frames (AF_XDP). What it refuses, a kernel would drop as well; what is no plain
//! UDP datagram (fragments, options, extension headers) does not belong here.
//!
//! The common frame has no tags, no options and no lie in it: it is read in one go (`plain`). Every other
//! one is read layer by layer, as the rest of this crate does it, with the same result.

use std::net::{Ipv6Addr, SocketAddr};

use crate::checksum::Sum;
use crate::error::{Error, Layer, Result};
use crate::ethernet::{self, Ethernet, ether_type};
use crate::ipv4::{self, Ipv4};
use crate::ipv6::{self, Ipv6};
use crate::udp::{self, Udp};

/// What a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// The sender's address. IPv4 is mapped (`::ffff:a.b.c.d`), which no address of IPv6 itself is.
    pub source: Ipv6Addr,
    /// The address that it was sent to, in the same form.
    pub destination: Ipv6Addr,
    /// The sender's port.
    pub source_port: u16,
    /// The port that it was sent to.
    pub destination_port: u16,
    /// Where the payload starts in the frame.
    pub at: u16,
    /// Bytes of payload. Padding behind it belongs to nobody.
    pub len: u16,
    /// Differentiated services (six bits) and ECN (two bits).
    pub traffic_class: u8,
    /// What the checksums say.
    pub checksum: Checksum,
}

/// What the checksums of a frame say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// As they were computed by the sender. IPv4 without a checksum in UDP counts as right (RFC 768).
    Right,
    /// The sum of the pseudo header alone, not complemented: a sender on this machine left the rest to a device
    /// (`CHECKSUM_PARTIAL`), and the frame has not been on a wire. From a wire it is as wrong as any other.
    Unfinished,
    /// Wrong.
    Wrong,
}

impl Checksum {
    /// What the checksum of a UDP datagram says, header included, if its field is not zero.
    #[inline]
    pub(crate) fn of(pseudo: Sum, datagram: &[u8], field: u16) -> Self {
        if pseudo.bytes(datagram).holds() {
            Self::Right
        } else if pseudo.value() == field {
            Self::Unfinished
        } else {
            Self::Wrong
        }
    }
}

/// Where IP starts in a frame without tags, and UDP behind either IP.
const IP: usize = ethernet::HEADER;
const UDP4: usize = IP + ipv4::HEADER;
const UDP6: usize = IP + ipv6::HEADER;

impl Datagram {
    /// The datagram in `frame`.
    ///
    /// # Errors
    /// When a header is broken, lies about lengths, or the frame is not a plain UDP datagram.
    #[inline]
    pub fn parse(frame: &[u8]) -> Result<Self> {
        match Self::plain(frame) {
            Some(datagram) => Ok(datagram),
            None => Self::layered(frame),
        }
    }

    /// The sender, IPv4 as such.
    #[must_use]
    pub fn source(&self) -> SocketAddr {
        SocketAddr::new(self.source.to_canonical(), self.source_port)
    }

    /// Where it was sent to, IPv4 as such.
    #[must_use]
    pub fn destination(&self) -> SocketAddr {
        SocketAddr::new(self.destination.to_canonical(), self.destination_port)
    }

    /// A frame in which nothing is out of the ordinary; none if anything is.
    #[inline]
    fn plain(frame: &[u8]) -> Option<Self> {
        match *frame.get(IP - 2..=IP)? {
            [0x08, 0x00, 0x45] => Self::plain4(frame),
            [0x86, 0xdd, version] if version >> 4 == 6 => Self::plain6(frame),
            _ => None,
        }
    }

    #[inline]
    fn plain4(frame: &[u8]) -> Option<Self> {
        let head: &[u8; UDP4 + udp::HEADER] = frame.first_chunk()?;
        let total = usize::from(be16(head, IP + 2));
        let is_fragment = be16(head, IP + 6) & 0x3fff != 0;
        if is_fragment || head[IP + 9] != udp::PROTOCOL || total < ipv4::HEADER {
            return None;
        }
        let addresses = Sum::default().bytes(&head[IP + 12..UDP4]);
        let header = addresses.bytes(&head[IP..IP + 12]);
        let protocol = [0, udp::PROTOCOL, head[UDP4 + 4], head[UDP4 + 5]];
        let field = be16(head, UDP4 + 6);
        let datagram = frame.get(UDP4..IP + total)?;
        if usize::from(be16(head, UDP4 + 4)) != datagram.len() || datagram.len() < udp::HEADER {
            return None;
        }
        let checksum = match field {
            _ if !header.holds() => Checksum::Wrong,
            0 => Checksum::Right,
            _ => Checksum::of(addresses.bytes(&protocol), datagram, field),
        };
        Some(Self {
            source: mapped(head, IP + 12),
            destination: mapped(head, IP + 16),
            source_port: be16(head, UDP4),
            destination_port: be16(head, UDP4 + 2),
            at: (UDP4 + udp::HEADER) as u16,
            len: (datagram.len() - udp::HEADER) as u16,
            traffic_class: head[IP + 1],
            checksum,
        })
    }

    #[inline]
    fn plain6(frame: &[u8]) -> Option<Self> {
        let head: &[u8; UDP6 + udp::HEADER] = frame.first_chunk()?;
        let length = usize::from(be16(head, IP + 4));
        let datagram = frame.get(UDP6..UDP6 + length)?;
        let field = be16(head, UDP6 + 6);
        if head[IP + 6] != udp::PROTOCOL
            || length < udp::HEADER
            || usize::from(be16(head, UDP6 + 4)) != length
            || field == 0
        {
            return None;
        }
        let (source, destination) = (chunk(head, IP + 8), chunk(head, IP + 24));
        let (source, destination) = (Ipv6Addr::from(source), Ipv6Addr::from(destination));
        if is_mapped(source) || is_mapped(destination) {
            return None;
        }
        let protocol = [0, udp::PROTOCOL, head[UDP6 + 4], head[UDP6 + 5]];
        let pseudo = Sum::default().bytes(&head[IP + 8..UDP6]).bytes(&protocol);
        Some(Self {
            source,
            destination,
            source_port: be16(head, UDP6),
            destination_port: be16(head, UDP6 + 2),
            at: (UDP6 + udp::HEADER) as u16,
            len: (length - udp::HEADER) as u16,
            traffic_class: head[IP] << 4 | head[IP + 1] >> 4,
            checksum: Checksum::of(pseudo, datagram, field),
        })
    }

    /// Any frame, layer by layer.
    #[cold]
    fn layered(frame: &[u8]) -> Result<Self> {
        let (ethernet, packet) = Ethernet::parse(frame)?;
        let link = frame.len() - packet.len();
        let (bytes, at, (source, destination), traffic_class, header_holds) = match ethernet.ether_type {
            ether_type::IPV4 => {
                let ip = Ipv4::parse(packet)?;
                if ip.protocol != udp::PROTOCOL || ip.is_fragment() {
                    return Err(Error::BadVersion(Layer::Udp));
                }
                let ends = (ip.source.to_ipv6_mapped(), ip.destination.to_ipv6_mapped());
                (ip.payload, link + ip.header.len(), ends, ip.traffic_class, ip.checksum_holds())
            }
            ether_type::IPV6 => {
                let ip = Ipv6::parse(packet)?;
                if ip.next_header != udp::PROTOCOL {
                    return Err(Error::BadVersion(Layer::Udp));
                }
                // On a wire nothing has an address of this form, and Linux takes none.
                if is_mapped(ip.source) || is_mapped(ip.destination) {
                    return Err(Error::BadVersion(Layer::Ipv6));
                }
                (ip.payload, link + ipv6::HEADER, (ip.source, ip.destination), ip.traffic_class, true)
            }
            _ => return Err(Error::BadVersion(Layer::Ethernet)),
        };
        let udp = Udp::parse(bytes)?;
        let checksum = if header_holds {
            udp.checksum_state(source.to_canonical(), destination.to_canonical())
        } else {
            Checksum::Wrong
        };
        let short = |length: usize| u16::try_from(length).map_err(|_| Error::TooLong(Layer::Udp));
        Ok(Self {
            source,
            destination,
            source_port: udp.source,
            destination_port: udp.destination,
            at: short(at + udp::HEADER)?,
            len: short(udp.payload.len())?,
            traffic_class,
            checksum,
        })
    }
}

#[inline]
fn be16<const N: usize>(head: &[u8; N], at: usize) -> u16 {
    u16::from_be_bytes([head[at], head[at + 1]])
}

/// Sixteen bytes of a header that has them.
#[inline]
fn chunk<const N: usize>(head: &[u8; N], at: usize) -> [u8; 16] {
    std::array::from_fn(|index| head[at + index])
}

/// The IPv4 address at `at`, mapped.
#[inline]
fn mapped<const N: usize>(head: &[u8; N], at: usize) -> Ipv6Addr {
    let [a, b, c, d] = [head[at], head[at + 1], head[at + 2], head[at + 3]];
    Ipv6Addr::from([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d])
}

#[inline]
fn is_mapped(ip: Ipv6Addr) -> bool {
    u128::from(ip) >> 32 == 0xffff
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
            let tag = Some(Vlan { ether_type: ether_type::VLAN, control: 5 });
            for vlans in [[None, None], [tag, None], [tag, tag]] {
                for payload in [&b""[..], b"x", b"hello world"] {
                    let plan = UdpFrame { vlans, ..plan(payload, v6) };
                    let mut bytes = [0xaa; 120];
                    let length = plan.write(&mut bytes).unwrap();
                    for frame in [&bytes[..length], &bytes] {
                        let found = Datagram::parse(frame).unwrap();
                        assert_eq!(&frame[found.at.into()..][..found.len.into()], payload);
                        assert_eq!((found.source(), found.destination()), (plan.source, plan.destination));
                        assert_eq!(found.checksum, Checksum::Right);
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
            // From the IP header on. IPv6 protects its class, label and hop limit by nothing.
            for bit in 14 * 8..length * 8 {
                if v6 && matches!(bit / 8, 14..=17 | 21) {
                    continue;
                }
                let mut flipped = bytes;
                flipped[bit / 8] ^= 1 << (bit % 8);
                if let Ok(found) = Datagram::parse(&flipped[..length]) {
                    assert_eq!(found.checksum, Checksum::Wrong, "bit {bit}, v6 {v6}");
                }
            }
        }
    }

    #[test]
    fn no_checksum_is_right_over_ipv4_only() {
        for (v6, expected) in [(false, Checksum::Right), (true, Checksum::Wrong)] {
            let mut bytes = [0; 90];
            let length = plan(b"payload", v6).write(&mut bytes).unwrap();
            let at = length - 7 - 2;
            bytes[at..at + 2].fill(0);
            assert_eq!(Datagram::parse(&bytes[..length]).unwrap().checksum, expected);
        }
    }

    #[test]
    fn an_unfinished_checksum_is_told_from_a_wrong_one() {
        let mut bytes = [0; 90];
        let length = plan(b"payload", false).write(&mut bytes).unwrap();
        let pseudo =
            Sum::pseudo4([10, 0, 0, 1].into(), [10, 0, 0, 2].into(), udp::PROTOCOL, (udp::HEADER + 7) as u16);
        let at = length - 7 - 2;
        bytes[at..at + 2].copy_from_slice(&pseudo.value().to_be_bytes());
        assert_eq!(Datagram::parse(&bytes[..length]).unwrap().checksum, Checksum::Unfinished);
        bytes[at] ^= 1;
        assert_eq!(Datagram::parse(&bytes[..length]).unwrap().checksum, Checksum::Wrong);
    }

    /// The short way says nothing that the long way does not say.
    fn agree(frame: &[u8]) -> bool {
        let short = Datagram::plain(frame);
        if let Some(found) = short {
            assert_eq!(Ok(found), Datagram::layered(frame));
        }
        short.is_some()
    }

    #[test]
    fn the_short_way_agrees_with_the_layers_whatever_is_flipped_or_cut() {
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
            // Most flips leave a frame that is plain in form.
            assert!(short > 250, "{short}");
        }
    }

    #[test]
    fn an_address_of_the_mapped_form_is_no_address_of_ipv6() {
        for mapped in ["[::ffff:10.0.0.1]:7", "[fd00::1]:7"] {
            let plan = UdpFrame { source: mapped.parse().unwrap(), ..plan(b"x", true) };
            let mut bytes = [0; 90];
            let length = plan.write(&mut bytes).unwrap();
            assert_eq!(Datagram::parse(&bytes[..length]).is_ok(), mapped.starts_with("[fd"));
        }
    }
}
