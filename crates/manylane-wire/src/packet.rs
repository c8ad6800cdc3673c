//! IP packets of either version.

use std::net::IpAddr;

use crate::ipv4::Ipv4;
use crate::ipv6::Ipv6;

/// An IP packet that is no fragment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// Protocol of the payload (IANA's protocol numbers).
    pub protocol: u8,
    /// All behind the header of IP and its options.
    pub payload: &'a [u8],
}

impl<'a> Packet<'a> {
    /// Reads the header. None if it is inconsistent, and for fragments. Extension headers of IPv6
    /// are part of the payload.
    #[must_use]
    pub fn parse(packet: &'a [u8]) -> Option<Packet<'a>> {
        match packet.first()? >> 4 {
            4 => {
                let ip = Ipv4::parse(packet).ok().filter(|ip| !ip.is_fragment())?;
                let (source, destination) = (ip.source.into(), ip.destination.into());
                Some(Packet { source, destination, protocol: ip.protocol, payload: ip.payload })
            }
            6 => {
                let ip = Ipv6::parse(packet).ok()?;
                let (source, destination) = (ip.source.into(), ip.destination.into());
                Some(Packet { source, destination, protocol: ip.next_header, payload: ip.payload })
            }
            _ => None,
        }
    }
}
