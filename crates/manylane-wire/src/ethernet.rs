//! Ethernet headers with up to two VLAN tags.

use std::fmt;

use crate::error::{Layer, Result, split, split_mut};

/// Length of a header without tags.
pub const HEADER_LEN: usize = 14;
/// Length of a tag.
pub const TAG_LEN: usize = 4;

/// Values of the type field.
pub mod ether_type {
    /// IPv4.
    pub const IPV4: u16 = 0x0800;
    /// A VLAN tag (802.1Q).
    pub const VLAN: u16 = 0x8100;
    /// The outer of two VLAN tags (802.1ad).
    pub const SERVICE_VLAN: u16 = 0x88a8;
    /// IPv6.
    pub const IPV6: u16 = 0x86dd;
}

/// A MAC address.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// The broadcast address.
    pub const BROADCAST: Mac = Mac([0xff; 6]);
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A VLAN tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vlan {
    /// The type field of the tag: [`ether_type::VLAN`] or [`ether_type::SERVICE_VLAN`].
    pub ether_type: u16,
    /// Priority, drop eligibility and VLAN id, as on the wire.
    pub tci: u16,
}

/// An Ethernet header with its tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ethernet {
    /// Destination.
    pub destination: Mac,
    /// Source.
    pub source: Mac,
    /// The tags, outer first; the second one is set only if the first one is.
    pub vlans: [Option<Vlan>; 2],
    /// Type of the payload. With three tags, the type of the third one.
    pub ether_type: u16,
}

impl Ethernet {
    /// Parses the header at the start of `frame`; also returns the bytes behind it.
    ///
    /// # Errors
    /// If the frame ends within the header or a tag.
    pub fn parse(frame: &[u8]) -> Result<(Ethernet, &[u8])> {
        let (&[d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5, t0, t1], mut rest) =
            split::<HEADER_LEN>(frame, Layer::Ethernet)?;
        let mut ether_type = u16::from_be_bytes([t0, t1]);
        let mut vlans = [None; 2];
        for vlan in &mut vlans {
            if ether_type != ether_type::VLAN && ether_type != ether_type::SERVICE_VLAN {
                break;
            }
            let (&[c0, c1, n0, n1], behind) = split::<TAG_LEN>(rest, Layer::Ethernet)?;
            *vlan = Some(Vlan { ether_type, tci: u16::from_be_bytes([c0, c1]) });
            ether_type = u16::from_be_bytes([n0, n1]);
            rest = behind;
        }
        let destination = Mac([d0, d1, d2, d3, d4, d5]);
        Ok((Ethernet { destination, source: Mac([s0, s1, s2, s3, s4, s5]), vlans, ether_type }, rest))
    }

    /// Length of the header, tags included.
    #[must_use]
    pub fn header_len(&self) -> usize {
        HEADER_LEN + TAG_LEN * self.vlans.iter().flatten().count()
    }

    /// Writes the header, and returns the bytes behind it.
    ///
    /// # Errors
    /// If `frame` is too short.
    pub fn write<'a>(&self, frame: &'a mut [u8]) -> Result<&'a mut [u8]> {
        let (head, mut rest) = split_mut::<HEADER_LEN>(frame, Layer::Ethernet)?;
        head[..6].copy_from_slice(&self.destination.0);
        head[6..12].copy_from_slice(&self.source.0);
        let mut kind = &mut head[12..];
        for vlan in self.vlans.iter().flatten() {
            let (tag, behind) = split_mut::<TAG_LEN>(rest, Layer::Ethernet)?;
            kind.copy_from_slice(&vlan.ether_type.to_be_bytes());
            tag[..2].copy_from_slice(&vlan.tci.to_be_bytes());
            kind = &mut tag[2..];
            rest = behind;
        }
        kind.copy_from_slice(&self.ether_type.to_be_bytes());
        Ok(rest)
    }
}
