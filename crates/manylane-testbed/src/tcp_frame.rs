//! Frames of TCP, as a host of a testbed sends them.

use std::net::SocketAddr;

use anyhow::{Result, anyhow, bail};
use manylane_wire::ethernet::{Ethernet, Mac, Vlan, ether_type};
use manylane_wire::ipv4::{self, Ipv4Header};
use manylane_wire::tcp::{self, TcpHeader};

use crate::host::Host;

/// A frame of IPv4 from one end of a link to the other one: a header without options, and a
/// payload.
///
/// # Errors
/// If the addresses are not IPv4, or the frame would be too long.
pub fn tcp_frame(
    (from, to, link): (&Host, &Host, usize),
    vlans: [Option<Vlan>; 2],
    tcp: &TcpHeader,
    payload: &[u8],
) -> Result<Vec<u8>> {
    let (SocketAddr::V4(source), SocketAddr::V4(destination)) = (tcp.source, tcp.destination) else {
        bail!("a frame of TCP over IPv6");
    };
    let ethernet = Ethernet {
        destination: Mac(to.mac(link)),
        source: Mac(from.mac(link)),
        vlans,
        ether_type: ether_type::IPV4,
    };
    let ip = Ipv4Header {
        traffic_class: 0,
        id: 0,
        dont_fragment: true,
        ttl: 64,
        protocol: tcp::PROTOCOL,
        source: *source.ip(),
        destination: *destination.ip(),
    };
    let length = tcp::HEADER_LEN + payload.len();
    let mut frame = vec![0; ethernet.header_len() + ipv4::HEADER_LEN + length];
    let written = ethernet.write(&mut frame).and_then(|packet| ip.write(packet, length));
    let segment = written.map_err(|err| anyhow!("cannot build a frame of TCP: {err:?}"))?;
    tcp.write(segment, payload).map_err(|err| anyhow!("cannot build a segment: {err:?}"))?;
    segment[tcp::HEADER_LEN..].copy_from_slice(payload);
    Ok(frame)
}
