//! The packets that the state machine sees: IPv4 between two addresses that are always the same.

use std::net::Ipv4Addr;

use manylane_wire::tcp::PROTOCOL;

/// The addresses of every connection.
pub(crate) const INNER_LOCAL: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
pub(crate) const INNER_REMOTE: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
/// Length of the IP header.
pub(crate) const INNER_IP_LEN: usize = 20;

/// Writes the IP header in front of a segment from the peer.
pub(crate) fn write_inner_ip(packet: &mut [u8]) {
    let length = u16::try_from(packet.len()).unwrap_or(u16::MAX);
    let [l0, l1] = length.to_be_bytes();
    let Some(header) = packet.first_chunk_mut::<INNER_IP_LEN>() else { return };
    // Don't fragment, 64 hops, no checksum.
    header[..12].copy_from_slice(&[0x45, 0, l0, l1, 0, 0, 0x40, 0, 64, PROTOCOL, 0, 0]);
    header[12..16].copy_from_slice(&INNER_REMOTE.octets());
    header[16..].copy_from_slice(&INNER_LOCAL.octets());
}
