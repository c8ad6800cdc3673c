//! The frames that the program of the generator begins with.

use std::net::{IpAddr, Ipv4Addr, SocketAddrV4};

use anyhow::{Result, bail, ensure};
use manylane_measure::Traffic;
use manylane_wire::checksum::Sum;
use manylane_wire::ethernet::{self, Mac};
use manylane_wire::frame::UdpFrame;
use manylane_wire::tcp::{self, Flags, Options, TcpHeader};

use crate::host::Host;
use crate::tcp_frame::tcp_frame;

/// Bytes that fit one page beside the kernel's own data, on every kernel so far.
const PACKET_LEN_MAX: usize = 3300;

/// A frame as the program gets it, with what it fills in blank.
pub(super) struct Template {
    pub(super) frame: Vec<u8>,
    /// Bytes of its headers.
    pub(super) head: usize,
    /// The sum for the checksum of UDP or TCP, not complemented, without what is blank.
    pub(super) partial: u16,
}

/// A datagram with source port and checksum zero.
pub(super) fn datagram(
    from: &Host,
    to: &Host,
    link: usize,
    traffic: &Traffic,
    source: IpAddr,
) -> Result<Template> {
    let payload = traffic.datagram();
    let frame = build_frame(from, to, link, traffic, (&payload, source))?;
    let head = frame.len() - payload.len();
    let partial = partial_checksum(&frame[head - 8..head], source, traffic, &payload);
    Ok(Template { frame, head, partial })
}

/// A SYN with source port, number and checksum zero.
pub(super) fn syn(
    from: &Host,
    to: &Host,
    link: usize,
    target: SocketAddrV4,
    source: Ipv4Addr,
) -> Result<Template> {
    let tcp = TcpHeader {
        source: (source, 0).into(),
        destination: target.into(),
        sequence: 0,
        acknowledgment: 0,
        flags: Flags::SYN,
        window: 1000,
        urgent: 0,
        options: Options::default(),
    };
    let mut frame = tcp_frame((from, to, link), [None; 2], &tcp, &[])?;
    let head = frame.len();
    let segment = &mut frame[head - tcp::HEADER_LEN..];
    segment[16..18].fill(0);
    let length = tcp::HEADER_LEN as u16;
    let pseudo = Sum::pseudo_v4(source, *target.ip(), tcp::PROTOCOL, length);
    let partial = pseudo.add_bytes(segment).value();
    Ok(Template { frame, head, partial })
}

fn build_frame(
    from: &Host,
    to: &Host,
    link: usize,
    traffic: &Traffic,
    (payload, source): (&[u8], IpAddr),
) -> Result<Vec<u8>> {
    let plan = UdpFrame {
        payload,
        ..UdpFrame::new(Mac(from.mac(link)), Mac(to.mac(link)), (source, 0).into(), traffic.target)
    };
    let len_max = usize::try_from(from.mtu(link))?.min(PACKET_LEN_MAX) + ethernet::HEADER_LEN;
    let room = len_max - (plan.len() - payload.len());
    ensure!(
        payload.len() <= room,
        "{} bytes do not fit into a frame of this link, which carries {room}: lower the size",
        payload.len()
    );
    let mut frame = vec![0; plan.len()];
    if let Err(err) = plan.write(&mut frame) {
        bail!("cannot build a frame with {} bytes: {err}", payload.len());
    }
    let head = frame.len() - payload.len();
    frame[head - 2..head].fill(0);
    Ok(frame)
}

/// The sum for the checksum of the datagram, not complemented, with source port and checksum zero.
fn partial_checksum(udp: &[u8], source: IpAddr, traffic: &Traffic, payload: &[u8]) -> u16 {
    let length = (udp.len() + payload.len()) as u16;
    let addresses = match (source, traffic.target.ip()) {
        (IpAddr::V4(a), IpAddr::V4(b)) => Sum::pseudo_v4(a, b, manylane_wire::udp::PROTOCOL, length),
        (IpAddr::V6(a), IpAddr::V6(b)) => Sum::pseudo_v6(a, b, manylane_wire::udp::PROTOCOL, length.into()),
        // `ip` answers in the family of the target.
        _ => Sum::default(),
    };
    addresses.add_bytes(udp).add_bytes(payload).value()
}
