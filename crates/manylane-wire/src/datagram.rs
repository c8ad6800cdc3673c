//! A received frame as one UDP datagram: where its payload is, from whom, and whether it may be believed.
//!
//! For a receiver that gets whole frames (AF_XDP). What it refuses, a kernel would drop as well; what is no plain
//! UDP datagram (fragments, options, extension headers) does not belong here.

use std::net::{IpAddr, SocketAddr};

use crate::error::{Error, Layer, Result};
use crate::ethernet::{Ethernet, ether_type};
use crate::ipv4::Ipv4;
use crate::ipv6::{self, Ipv6};
use crate::udp::{self, Udp};

/// What a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// Where the payload starts in the frame.
    pub at: usize,
    /// Bytes of payload. Padding behind it belongs to nobody.
    pub len: usize,
    /// The sender.
    pub source: SocketAddr,
    /// The address and port it was sent to.
    pub destination: SocketAddr,
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

impl Datagram {
    /// The datagram in `frame`.
    ///
    /// # Errors
    /// When a header is broken, lies about lengths, or the frame is not a plain UDP datagram.
    #[inline]
    pub fn parse(frame: &[u8]) -> Result<Self> {
        let (ethernet, packet) = Ethernet::parse(frame)?;
        let link = frame.len() - packet.len();
        match ethernet.ether_type {
            ether_type::IPV4 => {
                let ip = Ipv4::parse(packet)?;
                if ip.protocol != udp::PROTOCOL || ip.is_fragment() {
                    return Err(Error::BadVersion(Layer::Udp));
                }
                let ends = (IpAddr::V4(ip.source), IpAddr::V4(ip.destination));
                let at = link + ip.header.len();
                Self::udp(ip.payload, at, ends, ip.traffic_class, ip.checksum_holds())
            }
            ether_type::IPV6 => {
                let ip = Ipv6::parse(packet)?;
                if ip.next_header != udp::PROTOCOL {
                    return Err(Error::BadVersion(Layer::Udp));
                }
                let ends = (IpAddr::V6(ip.source), IpAddr::V6(ip.destination));
                Self::udp(ip.payload, link + ipv6::HEADER, ends, ip.traffic_class, true)
            }
            _ => Err(Error::BadVersion(Layer::Ethernet)),
        }
    }

    #[inline]
    fn udp(
        bytes: &[u8],
        at: usize,
        (from, to): (IpAddr, IpAddr),
        traffic_class: u8,
        header_holds: bool,
    ) -> Result<Self> {
        let udp = Udp::parse(bytes)?;
        let checksum = if header_holds { udp.checksum_state(from, to) } else { Checksum::Wrong };
        Ok(Self {
            at: at + udp::HEADER,
            len: udp.payload.len(),
            source: SocketAddr::new(from, udp.source),
            destination: SocketAddr::new(to, udp.destination),
            traffic_class,
            checksum,
        })
    }
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
                        assert_eq!(&frame[found.at..][..found.len], payload);
                        assert_eq!((found.source, found.destination), (plan.source, plan.destination));
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
}
