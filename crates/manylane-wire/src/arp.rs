//! ARP, for IPv4 over Ethernet (RFC 826).

use std::net::Ipv4Addr;

use crate::bytes::{split, split_mut};
use crate::error::{Error, Layer, Result};
use crate::ethernet::Mac;

/// Length of a packet in bytes.
pub const PACKET_LEN: usize = 28;
/// Hardware Ethernet, protocol IPv4, and the sizes of their addresses.
const ETHERNET_IPV4: [u8; 6] = [0, 1, 0x08, 0x00, 6, 4];

/// ARP operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// A request: which station has the target address?
    Request,
    /// A reply: the sender has its address.
    Reply,
    /// Any other operation.
    Other(u16),
}

impl From<u16> for Operation {
    fn from(number: u16) -> Operation {
        match number {
            1 => Operation::Request,
            2 => Operation::Reply,
            other => Operation::Other(other),
        }
    }
}

impl From<Operation> for u16 {
    fn from(operation: Operation) -> u16 {
        match operation {
            Operation::Request => 1,
            Operation::Reply => 2,
            Operation::Other(number) => number,
        }
    }
}

/// An ARP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arp {
    /// The operation.
    pub operation: Operation,
    /// Hardware address of the sender.
    pub sender_mac: Mac,
    /// Address of the sender.
    pub sender: Ipv4Addr,
    /// Hardware address of the target; zero in a request.
    pub target_mac: Mac,
    /// The requested address.
    pub target: Ipv4Addr,
}

impl Arp {
    /// Parses the packet at the start of `bytes`; padding may follow.
    ///
    /// # Errors
    /// If it is too short, or not for IPv4 over Ethernet.
    pub fn parse(bytes: &[u8]) -> Result<Arp> {
        let (packet, _) = split::<PACKET_LEN>(bytes, Layer::Arp)?;
        let &[k0, k1, k2, k3, k4, k5, o0, o1, a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, ref target @ ..] =
            packet;
        if [k0, k1, k2, k3, k4, k5] != ETHERNET_IPV4 {
            return Err(Error::BadVersion(Layer::Arp));
        }
        let &[c0, c1, c2, c3, c4, c5, d0, d1, d2, d3] = target;
        Ok(Arp {
            operation: u16::from_be_bytes([o0, o1]).into(),
            sender_mac: Mac([a0, a1, a2, a3, a4, a5]),
            sender: Ipv4Addr::new(b0, b1, b2, b3),
            target_mac: Mac([c0, c1, c2, c3, c4, c5]),
            target: Ipv4Addr::new(d0, d1, d2, d3),
        })
    }

    /// Writes the packet, and returns the bytes behind it.
    ///
    /// # Errors
    /// If `bytes` is too short.
    pub fn write<'a>(&self, bytes: &'a mut [u8]) -> Result<&'a mut [u8]> {
        let (packet, rest) = split_mut::<PACKET_LEN>(bytes, Layer::Arp)?;
        packet[..6].copy_from_slice(&ETHERNET_IPV4);
        packet[6..8].copy_from_slice(&u16::from(self.operation).to_be_bytes());
        packet[8..14].copy_from_slice(&self.sender_mac.0);
        packet[14..18].copy_from_slice(&self.sender.octets());
        packet[18..24].copy_from_slice(&self.target_mac.0);
        packet[24..].copy_from_slice(&self.target.octets());
        Ok(rest)
    }

    /// The reply that `mac` has the requested address; `None` if this is not a request.
    #[must_use]
    pub fn reply(&self, mac: Mac) -> Option<Arp> {
        (self.operation == Operation::Request).then_some(Arp {
            operation: Operation::Reply,
            sender_mac: mac,
            sender: self.target,
            target_mac: self.sender_mac,
            target: self.sender,
        })
    }
}
