//! ICMP errors about packets that this machine has sent (RFC 792, RFC 1191, RFC 4443).

use crate::ipv4;

/// Length of the header of an ICMP error.
const HEADER_LEN: usize = 8;
/// What every link carries (RFC 791): taken where a router does not say what the next one does.
const MTU_MIN: u16 = 576;

/// What an error says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IcmpError {
    /// The packet is longer than the next link allows: this many bytes, with the IP header.
    TooBig(u16),
    /// Network, host, protocol or port cannot be reached.
    Unreachable,
}

impl IcmpError {
    /// Reads an ICMP packet with its IPv4 header. Returns what it says, and what it quotes of the
    /// packet that it is about: an IP header and at least the first eight bytes behind it.
    #[must_use]
    pub fn parse_v4(packet: &[u8]) -> Option<(IcmpError, &[u8])> {
        const DESTINATION_UNREACHABLE: u8 = 3;
        const FRAGMENTATION_NEEDED: u8 = 4;
        let header = usize::from(packet.first()? & 0xf) * 4;
        let message = packet.get(header.max(ipv4::HEADER_LEN)..)?;
        let (&[kind, code, _, _, _, _, m0, m1], quoted) = message.split_first_chunk::<HEADER_LEN>()?;
        let error = match (kind, code) {
            (DESTINATION_UNREACHABLE, FRAGMENTATION_NEEDED) => {
                IcmpError::TooBig(u16::from_be_bytes([m0, m1]).max(MTU_MIN))
            }
            (DESTINATION_UNREACHABLE, _) => IcmpError::Unreachable,
            _ => return None,
        };
        Some((error, quoted))
    }

    /// Reads an ICMPv6 message, without its IPv6 header. Returns as above.
    #[must_use]
    pub fn parse_v6(message: &[u8]) -> Option<(IcmpError, &[u8])> {
        const DESTINATION_UNREACHABLE: u8 = 1;
        const PACKET_TOO_BIG: u8 = 2;
        let (&[kind, _, _, _, m0, m1, m2, m3], quoted) = message.split_first_chunk::<HEADER_LEN>()?;
        let error = match kind {
            DESTINATION_UNREACHABLE => IcmpError::Unreachable,
            PACKET_TOO_BIG => {
                let mtu = u32::from_be_bytes([m0, m1, m2, m3]);
                IcmpError::TooBig(u16::try_from(mtu).unwrap_or(u16::MAX))
            }
            _ => return None,
        };
        Some((error, quoted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(kind: u8, code: u8, mtu: u16) -> Vec<u8> {
        let [m0, m1] = mtu.to_be_bytes();
        let mut packet = vec![0x46];
        packet.resize(24, 0);
        packet.extend([kind, code, 0, 0, 0, 0, m0, m1, 1, 2, 3]);
        packet
    }

    #[test]
    fn errors_of_ipv4_are_read_behind_options() {
        let quoted: &[u8] = &[1, 2, 3];
        assert_eq!(IcmpError::parse_v4(&v4(3, 4, 1400)), Some((IcmpError::TooBig(1400), quoted)));
        assert_eq!(IcmpError::parse_v4(&v4(3, 4, 0)), Some((IcmpError::TooBig(576), quoted)));
        assert_eq!(IcmpError::parse_v4(&v4(3, 1, 0)), Some((IcmpError::Unreachable, quoted)));
        assert_eq!(IcmpError::parse_v4(&v4(8, 0, 0)), None);
        assert_eq!(IcmpError::parse_v4(&v4(3, 1, 0)[..31]), None);
        assert_eq!(IcmpError::parse_v4(&[]), None);
    }

    #[test]
    fn errors_of_ipv6_are_read() {
        let quoted: &[u8] = &[9];
        let parse = |kind, mtu: u32| {
            let mut message = vec![kind, 0, 0, 0];
            message.extend(mtu.to_be_bytes());
            message.push(9);
            IcmpError::parse_v6(&message).map(|(error, quoted)| (error, quoted.to_vec()))
        };
        assert_eq!(parse(1, 0), Some((IcmpError::Unreachable, quoted.to_vec())));
        assert_eq!(parse(2, 1280), Some((IcmpError::TooBig(1280), quoted.to_vec())));
        assert_eq!(parse(2, 1 << 20), Some((IcmpError::TooBig(u16::MAX), quoted.to_vec())));
        assert_eq!(parse(128, 0), None);
        assert_eq!(IcmpError::parse_v6(&[1, 0, 0]), None);
    }
}
