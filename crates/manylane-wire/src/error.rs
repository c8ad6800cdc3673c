//! Errors of parsing and writing headers, and slices of a checked length.

use std::fmt;

/// The result of parsing or writing a header.
pub type Result<T> = std::result::Result<T, Error>;

/// The reason why a header cannot be parsed or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// Fewer bytes than the header has, or than its length field says.
    Truncated {
        /// The layer.
        layer: Layer,
        /// Bytes needed.
        needed: usize,
        /// Bytes available.
        there: usize,
    },
    /// The length in the header is less than the header.
    BadLength(Layer),
    /// The version or type is not the expected one.
    BadVersion(Layer),
    /// The content does not fit the length fields of the header.
    TooLong(Layer),
    /// Source and destination have different families.
    MixedFamilies,
}

/// A layer of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// Ethernet, including VLAN tags.
    Ethernet,
    /// IPv4.
    Ipv4,
    /// IPv6.
    Ipv6,
    /// UDP.
    Udp,
    /// TCP.
    Tcp,
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Layer::Ethernet => "Ethernet",
            Layer::Ipv4 => "IPv4",
            Layer::Ipv6 => "IPv6",
            Layer::Udp => "UDP",
            Layer::Tcp => "TCP",
        })
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Truncated { layer, needed, there } => {
                write!(f, "{layer}: {needed} bytes needed, {there} there")
            }
            Error::BadLength(layer) => write!(f, "{layer}: a length that is less than the header"),
            Error::BadVersion(layer) => write!(f, "{layer}: another version or type"),
            Error::TooLong(layer) => write!(f, "{layer}: too long for its length field"),
            Error::MixedFamilies => f.write_str("source and destination are not of the same family"),
        }
    }
}

impl std::error::Error for Error {}

/// The first `N` bytes and the rest.
pub(crate) fn split<const N: usize>(bytes: &[u8], layer: Layer) -> Result<(&[u8; N], &[u8])> {
    bytes.split_first_chunk().ok_or(Error::Truncated { layer, needed: N, there: bytes.len() })
}

/// As [`split`], mutable.
pub(crate) fn split_mut<const N: usize>(bytes: &mut [u8], layer: Layer) -> Result<(&mut [u8; N], &mut [u8])> {
    let there = bytes.len();
    bytes.split_first_chunk_mut().ok_or(Error::Truncated { layer, needed: N, there })
}

/// The first `needed` bytes.
pub(crate) fn take(bytes: &[u8], needed: usize, layer: Layer) -> Result<&[u8]> {
    bytes.get(..needed).ok_or(Error::Truncated { layer, needed, there: bytes.len() })
}
