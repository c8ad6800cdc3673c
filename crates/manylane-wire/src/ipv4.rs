//! IPv4 headers (RFC 791).

use std::net::Ipv4Addr;

use crate::checksum::{Sum, checksum};
use crate::error::{Error, Layer, Result, split, split_mut, take};

/// Length of a header without options.
pub const HEADER_LEN: usize = 20;

/// An IPv4 packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv4<'a> {
    /// Differentiated services (six bits) and ECN (two bits).
    pub traffic_class: u8,
    /// Identification of the fragments of one packet.
    pub id: u16,
    /// The flag "don't fragment".
    pub dont_fragment: bool,
    /// The flag "more fragments".
    pub more_fragments: bool,
    /// Offset of the fragment, in units of eight bytes; 13 bits.
    pub fragment_offset: u16,
    /// Time to live.
    pub ttl: u8,
    /// Protocol of the payload.
    pub protocol: u8,
    /// The header checksum, as received.
    pub checksum: u16,
    /// Source.
    pub source: Ipv4Addr,
    /// Destination.
    pub destination: Ipv4Addr,
    /// The header with its options.
    pub header: &'a [u8],
    /// The payload, with the length in the header, without padding.
    pub payload: &'a [u8],
}

impl<'a> Ipv4<'a> {
    /// Parses the packet at the start of `bytes`. Does not verify the checksum: see
    /// [`has_valid_checksum`](Self::has_valid_checksum).
    ///
    /// # Errors
    /// If it is not IPv4, or its lengths are inconsistent with each other or with `bytes`.
    pub fn parse(bytes: &'a [u8]) -> Result<Ipv4<'a>> {
        let (&[v, class, l0, l1, i0, i1, f0, f1, ttl, protocol, c0, c1, ref addresses @ ..], _) =
            split::<HEADER_LEN>(bytes, Layer::Ipv4)?;
        if v >> 4 != 4 {
            return Err(Error::BadVersion(Layer::Ipv4));
        }
        let header_length = usize::from(v & 0xf) * 4;
        let total = usize::from(u16::from_be_bytes([l0, l1]));
        if header_length < HEADER_LEN || total < header_length {
            return Err(Error::BadLength(Layer::Ipv4));
        }
        let packet = take(bytes, total, Layer::Ipv4)?;
        let (header, payload) = packet.split_at(header_length);
        let fragment = u16::from_be_bytes([f0, f1]);
        let &[s0, s1, s2, s3, d0, d1, d2, d3] = addresses;
        Ok(Ipv4 {
            traffic_class: class,
            id: u16::from_be_bytes([i0, i1]),
            dont_fragment: fragment & 0x4000 != 0,
            more_fragments: fragment & 0x2000 != 0,
            fragment_offset: fragment & 0x1fff,
            ttl,
            protocol,
            checksum: u16::from_be_bytes([c0, c1]),
            source: Ipv4Addr::new(s0, s1, s2, s3),
            destination: Ipv4Addr::new(d0, d1, d2, d3),
            header,
            payload,
        })
    }

    /// True if the packet is a fragment.
    #[must_use]
    pub fn is_fragment(&self) -> bool {
        self.more_fragments || self.fragment_offset != 0
    }

    /// True if the header checksum is valid.
    #[must_use]
    pub fn has_valid_checksum(&self) -> bool {
        Sum::default().add_bytes(self.header).is_valid()
    }
}

/// The fields of a header without options, for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv4Header {
    /// Differentiated services (six bits) and ECN (two bits).
    pub traffic_class: u8,
    /// Identification; ignored for a packet that may not be fragmented.
    pub id: u16,
    /// The flag "don't fragment".
    pub dont_fragment: bool,
    /// Time to live.
    pub ttl: u8,
    /// Protocol of the payload.
    pub protocol: u8,
    /// Source.
    pub source: Ipv4Addr,
    /// Destination.
    pub destination: Ipv4Addr,
}

impl Ipv4Header {
    /// Writes the header of a packet with `payload` bytes of payload, and returns the bytes behind
    /// it.
    ///
    /// # Errors
    /// If `bytes` is too short, or the packet is too long for its length field.
    pub fn write<'a>(&self, bytes: &'a mut [u8], payload: usize) -> Result<&'a mut [u8]> {
        let total = u16::try_from(HEADER_LEN + payload).map_err(|_| Error::TooLong(Layer::Ipv4))?;
        let (header, rest) = split_mut::<HEADER_LEN>(bytes, Layer::Ipv4)?;
        header[0] = 0x45;
        header[1] = self.traffic_class;
        header[2..4].copy_from_slice(&total.to_be_bytes());
        header[4..6].copy_from_slice(&self.id.to_be_bytes());
        header[6..8].copy_from_slice(&(u16::from(self.dont_fragment) << 14).to_be_bytes());
        header[8] = self.ttl;
        header[9] = self.protocol;
        header[10..12].fill(0);
        header[12..16].copy_from_slice(&self.source.octets());
        header[16..].copy_from_slice(&self.destination.octets());
        let sum = checksum(header);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        Ok(rest)
    }
}
