//! IPv6 headers (RFC 8200). Extension headers are not parsed: packets with them are left to the
//! kernel.

use std::net::Ipv6Addr;

use crate::error::{Error, Layer, Result, split, split_mut, take};

/// Length of a header.
pub const HEADER_LEN: usize = 40;

/// Next header value of a fragment.
pub const FRAGMENT: u8 = 44;

/// An IPv6 packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv6<'a> {
    /// Differentiated services (six bits) and ECN (two bits).
    pub traffic_class: u8,
    /// The flow label; 20 bits.
    pub flow_label: u32,
    /// Protocol of the payload, or the first extension header.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Source.
    pub source: Ipv6Addr,
    /// Destination.
    pub destination: Ipv6Addr,
    /// The payload, with the length in the header, without padding.
    pub payload: &'a [u8],
}

impl<'a> Ipv6<'a> {
    /// Parses the packet at the start of `bytes`.
    ///
    /// # Errors
    /// If it is not IPv6, or longer than `bytes`.
    pub fn parse(bytes: &'a [u8]) -> Result<Ipv6<'a>> {
        let (&[v0, v1, v2, v3, l0, l1, next_header, hop_limit, ref addresses @ ..], rest) =
            split::<HEADER_LEN>(bytes, Layer::Ipv6)?;
        let word = u32::from_be_bytes([v0, v1, v2, v3]);
        if word >> 28 != 6 {
            return Err(Error::BadVersion(Layer::Ipv6));
        }
        let length = usize::from(u16::from_be_bytes([l0, l1]));
        let payload = take(rest, length, Layer::Ipv6)?;
        let (source, addresses) = split::<16>(addresses, Layer::Ipv6)?;
        let (destination, _) = split::<16>(addresses, Layer::Ipv6)?;
        Ok(Ipv6 {
            traffic_class: v0 << 4 | v1 >> 4,
            flow_label: word & 0xf_ffff,
            next_header,
            hop_limit,
            source: Ipv6Addr::from(*source),
            destination: Ipv6Addr::from(*destination),
            payload,
        })
    }
}

/// The fields of a header, for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv6Header {
    /// Differentiated services (six bits) and ECN (two bits).
    pub traffic_class: u8,
    /// The flow label; only the lower 20 bits are used.
    pub flow_label: u32,
    /// Protocol of the payload.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Source.
    pub source: Ipv6Addr,
    /// Destination.
    pub destination: Ipv6Addr,
}

impl Ipv6Header {
    /// Writes the header of a packet with `payload` bytes of payload, and returns the bytes behind
    /// it.
    ///
    /// # Errors
    /// If `bytes` is too short, or the packet is too long for its length field.
    pub fn write<'a>(&self, bytes: &'a mut [u8], payload: usize) -> Result<&'a mut [u8]> {
        let length = u16::try_from(payload).map_err(|_| Error::TooLong(Layer::Ipv6))?;
        let (header, rest) = split_mut::<HEADER_LEN>(bytes, Layer::Ipv6)?;
        let word = 6 << 28 | u32::from(self.traffic_class) << 20 | (self.flow_label & 0xf_ffff);
        header[..4].copy_from_slice(&word.to_be_bytes());
        header[4..6].copy_from_slice(&length.to_be_bytes());
        header[6] = self.next_header;
        header[7] = self.hop_limit;
        header[8..24].copy_from_slice(&self.source.octets());
        header[24..].copy_from_slice(&self.destination.octets());
        Ok(rest)
    }
}
