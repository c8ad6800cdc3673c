//! UDP headers (RFC 768; over IPv6, RFC 8200 section 8.1).

use std::net::IpAddr;

use crate::bytes::{split, split_mut, take};
use crate::checksum::Sum;
use crate::error::{Error, Layer, Result};

/// Bytes of a header.
pub const HEADER: usize = 8;
/// UDP's number in IP headers.
pub const PROTOCOL: u8 = 17;

/// A UDP datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Udp<'a> {
    /// Port of the sender.
    pub source: u16,
    /// Port of the receiver.
    pub destination: u16,
    /// The checksum, as received; zero is none.
    pub checksum: u16,
    /// The header and the payload.
    pub datagram: &'a [u8],
    /// The payload: as long as the header says.
    pub payload: &'a [u8],
}

impl<'a> Udp<'a> {
    /// The datagram at the start of the payload of an IP packet. As in the kernel, bytes behind the
    /// datagram are cut off.
    ///
    /// # Errors
    /// When the length in the header is less than the header, or more than the bytes there.
    pub fn parse(bytes: &'a [u8]) -> Result<Udp<'a>> {
        let (&[s0, s1, d0, d1, l0, l1, c0, c1], _) = split::<HEADER>(bytes, Layer::Udp)?;
        let length = usize::from(u16::from_be_bytes([l0, l1]));
        if length < HEADER {
            return Err(Error::BadLength(Layer::Udp));
        }
        let datagram = take(bytes, length, Layer::Udp)?;
        Ok(Udp {
            source: u16::from_be_bytes([s0, s1]),
            destination: u16::from_be_bytes([d0, d1]),
            checksum: u16::from_be_bytes([c0, c1]),
            datagram,
            payload: &datagram[HEADER..],
        })
    }

    /// Whether the checksum is right for a packet between these addresses. None at all is right with IPv4
    /// and wrong with IPv6, where nothing else protects the addresses.
    #[must_use]
    pub fn checksum_holds(&self, source: IpAddr, destination: IpAddr) -> bool {
        if self.checksum == 0 {
            return source.is_ipv4() && destination.is_ipv4();
        }
        match pseudo(source, destination, self.datagram.len()) {
            Ok(sum) => sum.bytes(self.datagram).holds(),
            Err(_) => false,
        }
    }
}

/// Writes header and checksum of a datagram whose payload is already in its place: `datagram` is the
/// header and the payload, to its end.
///
/// # Errors
/// When there is no room for the header, or the datagram is longer than its length field can say.
pub fn seal(
    datagram: &mut [u8],
    source: IpAddr,
    source_port: u16,
    destination: IpAddr,
    destination_port: u16,
) -> Result<()> {
    let sum = pseudo(source, destination, datagram.len())?;
    let length = datagram.len() as u16;
    let (header, _) = split_mut::<HEADER>(datagram, Layer::Udp)?;
    header[..2].copy_from_slice(&source_port.to_be_bytes());
    header[2..4].copy_from_slice(&destination_port.to_be_bytes());
    header[4..6].copy_from_slice(&length.to_be_bytes());
    header[6..].fill(0);
    let checksum = on_the_wire(sum.bytes(datagram).finish());
    datagram[6..HEADER].copy_from_slice(&checksum.to_be_bytes());
    Ok(())
}

/// A checksum as UDP sends it: zero would say that there is none, so its other form is used.
#[must_use]
pub fn on_the_wire(checksum: u16) -> u16 {
    if checksum == 0 { 0xffff } else { checksum }
}

fn pseudo(source: IpAddr, destination: IpAddr, length: usize) -> Result<Sum> {
    let length = u16::try_from(length).map_err(|_| Error::TooLong(Layer::Udp))?;
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            Ok(Sum::pseudo4(source, destination, PROTOCOL, length))
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            Ok(Sum::pseudo6(source, destination, PROTOCOL, length.into()))
        }
        _ => Err(Error::MixedFamilies),
    }
}
