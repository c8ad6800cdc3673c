//! UDP headers (RFC 768; over IPv6, RFC 8200 section 8.1).

use std::net::{IpAddr, SocketAddr};

use crate::checksum::Sum;
use crate::error::{Error, Layer, Result, split, split_mut, take};

/// Length of a header.
pub const HEADER_LEN: usize = 8;
/// Offset of the checksum in the header.
pub const CHECKSUM_OFFSET: usize = 6;
/// Protocol number of UDP in IP headers.
pub const PROTOCOL: u8 = 17;

/// Result of a checksum verification.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksum {
    /// Valid. IPv4 without a UDP checksum counts as valid (RFC 768).
    Valid,
    /// The sum of the pseudo header alone, not complemented: a sender on this machine left the
    /// rest to a device (`CHECKSUM_PARTIAL`), and the frame has not been on a wire. In a frame
    /// from a wire it is invalid.
    Partial,
    /// Invalid.
    #[default]
    Invalid,
}

impl Checksum {
    /// True if the kernel would deliver a datagram with this checksum. [`Partial`](Self::Partial)
    /// is accepted only in a frame from a veth, which has not been on a wire.
    #[must_use]
    #[inline]
    pub fn is_accepted(self, from_veth: bool) -> bool {
        self == Self::Valid || from_veth && self == Self::Partial
    }

    /// Verifies a UDP datagram, header included, whose checksum `field` is not zero.
    #[inline]
    pub(crate) fn verify(pseudo: Sum, datagram: &[u8], field: u16) -> Self {
        if pseudo.add_bytes(datagram).is_valid() {
            Self::Valid
        } else if pseudo.value() == field {
            Self::Partial
        } else {
            Self::Invalid
        }
    }
}

/// A UDP datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Udp<'a> {
    /// Source port.
    pub source: u16,
    /// Destination port.
    pub destination: u16,
    /// The checksum, as received; zero if there is none.
    pub checksum: u16,
    /// The header and the payload.
    pub datagram: &'a [u8],
    /// The payload, with the length in the header.
    pub payload: &'a [u8],
}

impl<'a> Udp<'a> {
    /// Parses the datagram at the start of the payload of an IP packet. As in the kernel, bytes
    /// behind the datagram are ignored.
    ///
    /// # Errors
    /// If the length in the header is less than the header, or more than `bytes`.
    pub fn parse(bytes: &'a [u8]) -> Result<Udp<'a>> {
        let (&[s0, s1, d0, d1, l0, l1, c0, c1], _) = split::<HEADER_LEN>(bytes, Layer::Udp)?;
        let length = usize::from(u16::from_be_bytes([l0, l1]));
        if length < HEADER_LEN {
            return Err(Error::BadLength(Layer::Udp));
        }
        let datagram = take(bytes, length, Layer::Udp)?;
        Ok(Udp {
            source: u16::from_be_bytes([s0, s1]),
            destination: u16::from_be_bytes([d0, d1]),
            checksum: u16::from_be_bytes([c0, c1]),
            datagram,
            payload: &datagram[HEADER_LEN..],
        })
    }

    /// True if the checksum is valid for these addresses. A missing checksum is valid with IPv4,
    /// and invalid with IPv6, where nothing else protects the addresses.
    #[must_use]
    pub fn has_valid_checksum(&self, source: IpAddr, destination: IpAddr) -> bool {
        self.checksum_state(source, destination) == Checksum::Valid
    }

    /// Verifies the checksum for these addresses; see [`Checksum`].
    #[must_use]
    #[inline]
    pub fn checksum_state(&self, source: IpAddr, destination: IpAddr) -> Checksum {
        if self.checksum == 0 {
            let optional = source.is_ipv4() && destination.is_ipv4();
            return if optional { Checksum::Valid } else { Checksum::Invalid };
        }
        let Ok(length) = u16::try_from(self.datagram.len()) else { return Checksum::Invalid };
        let Ok(pseudo) = Sum::pseudo(source, destination, PROTOCOL, length) else { return Checksum::Invalid };
        Checksum::verify(pseudo, self.datagram, self.checksum)
    }
}

/// Writes the header of a datagram, with the checksum over `payload`, which is stored elsewhere.
///
/// # Errors
/// If there is no room for the header, the families differ, or the payload is too long for a
/// datagram.
pub fn write_header(
    bytes: &mut [u8],
    source: SocketAddr,
    destination: SocketAddr,
    payload: &[u8],
) -> Result<()> {
    let length = datagram_len(payload.len())?;
    let pseudo = Sum::pseudo(source.ip(), destination.ip(), PROTOCOL, length)?;
    let (header, _) = split_mut::<HEADER_LEN>(bytes, Layer::Udp)?;
    header[..2].copy_from_slice(&source.port().to_be_bytes());
    header[2..4].copy_from_slice(&destination.port().to_be_bytes());
    header[4..6].copy_from_slice(&length.to_be_bytes());
    header[6..].fill(0);
    let checksum = nonzero_checksum(pseudo.add_bytes(header).add_bytes(payload).finish());
    header[6..].copy_from_slice(&checksum.to_be_bytes());
    Ok(())
}

/// Writes the header for `payload` bytes of payload, with the sum of the pseudo header as the
/// checksum; a device adds the rest.
///
/// # Errors
/// As for [`write_header`].
pub fn write_header_partial_checksum(
    bytes: &mut [u8],
    source: SocketAddr,
    destination: SocketAddr,
    payload: usize,
) -> Result<()> {
    let length = datagram_len(payload)?;
    let pseudo = Sum::pseudo(source.ip(), destination.ip(), PROTOCOL, length)?;
    let (header, _) = split_mut::<HEADER_LEN>(bytes, Layer::Udp)?;
    header[..2].copy_from_slice(&source.port().to_be_bytes());
    header[2..4].copy_from_slice(&destination.port().to_be_bytes());
    header[4..CHECKSUM_OFFSET].copy_from_slice(&length.to_be_bytes());
    header[CHECKSUM_OFFSET..].copy_from_slice(&pseudo.value().to_be_bytes());
    Ok(())
}

/// The checksum as UDP sends it: zero means none, so `0xffff` is sent instead.
#[must_use]
#[inline]
pub fn nonzero_checksum(checksum: u16) -> u16 {
    if checksum == 0 { 0xffff } else { checksum }
}

/// Length of a datagram with its header.
fn datagram_len(payload: usize) -> Result<u16> {
    u16::try_from(HEADER_LEN + payload).map_err(|_| Error::TooLong(Layer::Udp))
}
