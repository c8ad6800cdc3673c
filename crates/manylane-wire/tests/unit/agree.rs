//! Results on which our parser and etherparse have to agree. Used by the tests and by the fuzz
//! target `frame`.

use std::net::{IpAddr, SocketAddr};

use etherparse::{
    EtherType, LinkExtSlice, NetSlice, SlicedPacket, TcpOptionElement, TcpSlice, TransportSlice,
};
use manylane_wire::datagram::{Checksum, Datagram};
use manylane_wire::ethernet;
use manylane_wire::frame::{Frame, Network, Transport};
use manylane_wire::icmp::IcmpError;
use manylane_wire::packet::Packet;
use manylane_wire::rx_hint;
use manylane_wire::tcp::{Flags, Options, Tcp};

/// A receiver of frames reads from `bytes` what the layers say.
fn check_datagram(bytes: &[u8], frame: Option<&Frame<'_>>) {
    let datagram = Datagram::parse(bytes);
    // No hint makes the parser panic or read beyond the frame. Without one, the result is the same.
    let mut hinted = Datagram::default();
    let read = hinted.read_hinted(bytes).map(|()| hinted);
    if !rx_hint::has_hint(bytes) {
        assert_eq!(read, datagram);
    } else if let Ok(hinted) = read {
        assert!(
            usize::from(hinted.payload_offset) + usize::from(hinted.len) <= bytes.len(),
            "a payload beyond the frame"
        );
    }
    let Some((frame, udp)) = frame.and_then(|frame| Some((frame, frame.udp()?))) else {
        assert!(datagram.is_err(), "a datagram that the layers do not show: {datagram:?}");
        return;
    };
    let mapped = |ip: IpAddr| matches!(ip, IpAddr::V6(ip) if ip.to_ipv4_mapped().is_some());
    if frame.addresses().is_some_and(|(source, destination)| mapped(source) || mapped(destination)) {
        assert!(datagram.is_err(), "an address that is none: {datagram:?}");
        return;
    }
    let datagram = datagram.expect("a plain UDP datagram");
    assert_eq!(&bytes[datagram.payload_offset.into()..][..datagram.len.into()], udp.payload);
    assert_eq!(frame.endpoints(), Some((datagram.source(), datagram.destination())));
    assert_eq!(datagram.checksum == Checksum::Valid, frame.has_valid_checksums());
}

/// As a TCP segment: its fields, and the options that both know.
fn check_segment(bytes: &[u8]) {
    let (ours, theirs) = (Tcp::parse(bytes), TcpSlice::from_slice(bytes));
    let (Ok(ours), Ok(theirs)) = (&ours, &theirs) else {
        assert_eq!(ours.is_ok(), theirs.is_ok(), "{ours:?} {theirs:?}");
        return;
    };
    assert_eq!((ours.source, ours.destination), (theirs.source_port(), theirs.destination_port()));
    assert_eq!(
        (ours.sequence, ours.acknowledgment),
        (theirs.sequence_number(), theirs.acknowledgment_number())
    );
    assert_eq!((ours.window, ours.urgent), (theirs.window_size(), theirs.urgent_pointer()));
    let theirs_flags = [
        (Flags::FIN, theirs.fin()),
        (Flags::SYN, theirs.syn()),
        (Flags::RST, theirs.rst()),
        (Flags::PSH, theirs.psh()),
        (Flags::ACK, theirs.ack()),
        (Flags::URG, theirs.urg()),
        (Flags::ECE, theirs.ece()),
        (Flags::CWR, theirs.cwr()),
    ];
    assert!(theirs_flags.iter().all(|(flag, is_set)| ours.flags.contains(*flag) == *is_set));
    assert_eq!((ours.payload, ours.options), (theirs.payload(), theirs.options()));
    // etherparse ends at the first option that it does not know, and we go on behind it.
    let mut seen = Options::default();
    for option in theirs.options_iterator() {
        match option {
            Ok(TcpOptionElement::MaximumSegmentSize(mss)) => seen.mss = Some(mss).filter(|mss| *mss > 0),
            Ok(TcpOptionElement::WindowScale(shift)) => seen.window_scale = Some(shift.min(14)),
            Ok(TcpOptionElement::SelectiveAcknowledgementPermitted) => seen.sack_permitted = true,
            Ok(TcpOptionElement::SelectiveAcknowledgement(first, more)) => {
                seen.sack = [Some(first), more[0], more[1], more[2]];
            }
            Ok(TcpOptionElement::Timestamp(value, echo)) => seen.timestamps = Some((value, echo)),
            Ok(TcpOptionElement::Noop) => {}
            Err(_) => return,
        }
    }
    assert_eq!(Options::parse(ours.options, true), seen);
    let later = Options { mss: None, window_scale: None, sack_permitted: false, ..seen };
    assert_eq!(Options::parse(ours.options, false), later);
}

/// Parses `bytes` by both, and panics where they see different things.
pub(crate) fn check(bytes: &[u8]) {
    check_segment(bytes);
    // Whatever they find: no panic.
    _ = (IcmpError::parse_v4(bytes), IcmpError::parse_v6(bytes), Packet::parse(bytes));
    let ours = Frame::parse(bytes);
    if let Ok(frame) = &ours {
        check_consistency(bytes, frame);
    }
    check_datagram(bytes, ours.as_ref().ok());
    let Ok(theirs) = SlicedPacket::from_ethernet(bytes) else {
        // What it refuses and we take: only what we do not look into.
        if let Ok(frame) = ours {
            assert!(frame.udp().is_none(), "UDP that etherparse refuses: {frame:?}");
        }
        return;
    };
    if !is_comparable(&theirs) {
        return;
    }
    match (&theirs.net, &theirs.transport) {
        (Some(NetSlice::Ipv4(ip)), Some(TransportSlice::Udp(udp))) if udp.length() != 0 => {
            let frame = ours.expect("an IPv4 frame that etherparse takes");
            let header = ip.header();
            check_udp(&frame, header.source_addr().into(), header.destination_addr().into(), udp);
            let sum = header.to_header().calc_header_checksum();
            let Network::Ipv4(packet, _) = frame.network else { panic!("not IPv4: {frame:?}") };
            // Its checksum is that of a header built anew, which has no options and no reserved
            // flag.
            if header.options().is_empty() && header.slice()[6] & 0x80 == 0 {
                assert_eq!(packet.has_valid_checksum(), checksums_equal(sum, header.header_checksum()));
            }
            assert_eq!((packet.ttl, packet.id), (header.ttl(), header.identification()));
        }
        (Some(NetSlice::Ipv6(ip)), Some(TransportSlice::Udp(udp))) if udp.length() != 0 => {
            let header = ip.header();
            // etherparse takes a length of zero for a jumbogram, which no Ethernet frame carries.
            if header.payload_length() == 0 {
                return;
            }
            let frame = ours.expect("an IPv6 frame that etherparse takes");
            check_udp(&frame, header.source_addr().into(), header.destination_addr().into(), udp);
            let Network::Ipv6(packet, _) = frame.network else { panic!("not IPv6: {frame:?}") };
            assert_eq!(packet.traffic_class, header.traffic_class());
            assert_eq!(packet.flow_label, header.flow_label().value());
            assert_eq!(packet.hop_limit, header.hop_limit());
        }
        _ => {}
    }
}

/// True if both sides parse the layers below IP: at most two tags of the kinds we know, and no
/// extension headers, which we leave to the kernel.
fn is_comparable(packet: &SlicedPacket<'_>) -> bool {
    let known = [ethernet::ether_type::VLAN, ethernet::ether_type::SERVICE_VLAN].map(EtherType);
    let mut announced =
        packet.link.as_ref().and_then(|link| link.ether_payload()).map(|next| next.ether_type);
    for ext in &packet.link_exts {
        let LinkExtSlice::Vlan(vlan) = ext else { return false };
        if !announced.is_some_and(|kind| known.contains(&kind)) {
            return false;
        }
        announced = Some(vlan.ether_type());
    }
    let plain = match &packet.net {
        Some(NetSlice::Ipv4(ip)) => ip.extensions().is_empty(),
        Some(NetSlice::Ipv6(ip)) => ip.extensions().is_empty(),
        _ => true,
    };
    plain && packet.link_exts.len() <= 2
}

fn check_udp(frame: &Frame<'_>, source: IpAddr, destination: IpAddr, theirs: &etherparse::UdpSlice<'_>) {
    let udp = frame.udp().expect("a datagram that etherparse sees");
    assert_eq!((udp.source, udp.destination), (theirs.source_port(), theirs.destination_port()));
    assert_eq!(udp.payload, theirs.payload());
    assert_eq!(udp.checksum, theirs.checksum());
    let ends = (SocketAddr::new(source, udp.source), SocketAddr::new(destination, udp.destination));
    assert_eq!(frame.endpoints(), Some(ends));
    if udp.checksum == 0 {
        return;
    }
    let header = theirs.to_header();
    let right = match (source, destination) {
        (IpAddr::V4(a), IpAddr::V4(b)) => {
            header.calc_checksum_ipv4_raw(a.octets(), b.octets(), udp.payload).unwrap()
        }
        (IpAddr::V6(a), IpAddr::V6(b)) => {
            header.calc_checksum_ipv6_raw(a.octets(), b.octets(), udp.payload).unwrap()
        }
        _ => panic!("one frame of two families"),
    };
    assert_eq!(
        udp.has_valid_checksum(source, destination),
        checksums_equal(right, udp.checksum),
        "{frame:?}"
    );
}

/// Zero has two forms in ones' complement.
fn checksums_equal(a: u16, b: u16) -> bool {
    a == b || (a.is_multiple_of(0xffff) && b.is_multiple_of(0xffff))
}

/// Checks what holds for every frame that we accept, whatever etherparse says.
fn check_consistency(bytes: &[u8], frame: &Frame<'_>) {
    let within = |part: &[u8]| {
        let (all, part) = (bytes.as_ptr_range(), part.as_ptr_range());
        assert!(all.start <= part.start && part.end <= all.end, "a slice of something else");
    };
    let transport = match frame.network {
        Network::Ipv4(ip, transport) => {
            within(ip.payload);
            assert_eq!(ip.is_fragment(), matches!(transport, Transport::Fragment(_)));
            assert!(ip.header.len() >= 20 && ip.header.len().is_multiple_of(4));
            transport
        }
        Network::Ipv6(ip, transport) => {
            within(ip.payload);
            transport
        }
        Network::Other(rest) => return within(rest),
    };
    match transport {
        Transport::Udp(udp) => {
            within(udp.payload);
            assert_eq!(udp.datagram.len(), udp.payload.len() + 8);
            // Must not panic; its value is compared elsewhere.
            let _ = frame.has_valid_checksums();
        }
        Transport::Fragment(rest) | Transport::Other(rest) => within(rest),
    }
    let mut again = vec![0; frame.ethernet.header_len()];
    frame.ethernet.write(&mut again).unwrap();
    assert_eq!(again, bytes[..again.len()]);
}
