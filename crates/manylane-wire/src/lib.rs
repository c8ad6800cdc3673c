//! Headers of Ethernet, IPv4, IPv6, UDP and TCP, and their checksums: bytes in, bytes out.
//!
//! Nothing here does I/O, allocates, or panics on untrusted input. Parsing returns small values
//! that borrow the bytes they do not interpret. Lengths in headers are checked against the bytes
//! available, and padding behind a packet is removed. Builders write into a slice of the caller.
//!
//! | module | holds |
//! |---|---|
//! | [`ethernet`] | addresses, VLAN tags, Ethernet headers |
//! | [`ipv4`], [`ipv6`] | the network layer |
//! | [`udp`] | UDP with its checksum |
//! | [`tcp`] | TCP with its options and its checksum |
//! | [`checksum`] | the Internet checksum |
//! | [`frame`] | a whole frame, layer by layer |
//! | [`datagram`] | a received frame as one UDP datagram, checksums verified, and the headers of a reply to it |
//! | [`rx_hint`] | the rx hint: results of the XDP program about a frame, which save parsing it |
//!
//! ```
//! use manylane_wire::ethernet::Mac;
//! use manylane_wire::frame::{Frame, UdpFrame};
//!
//! let plan = UdpFrame {
//!     payload: b"hello",
//!     ..UdpFrame::new(
//!         Mac([2, 0, 0, 0, 0, 1]),
//!         Mac([2, 0, 0, 0, 0, 2]),
//!         "10.0.0.1:1000".parse()?,
//!         "10.0.0.2:53".parse()?,
//!     )
//! };
//! let mut bytes = [0; 64];
//! let length = plan.write(&mut bytes)?;
//! let frame = Frame::parse(&bytes[..length])?;
//! let udp = frame.udp().ok_or("no UDP")?;
//! assert_eq!((udp.destination, udp.payload), (53, &b"hello"[..]));
//! assert!(frame.has_valid_checksums());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

// Lengths and numbers here come from the network: no cast may change them silently.
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_possible_wrap)
)]

pub mod checksum;
pub mod datagram;
mod error;
pub mod ethernet;
pub mod frame;
pub mod icmp;
pub mod ipv4;
pub mod ipv6;
pub mod packet;
mod reply;
pub mod rx_hint;
pub mod tcp;
pub mod udp;

pub use error::{Error, Layer, Result};
