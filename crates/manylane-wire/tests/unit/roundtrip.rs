//! Headers are read back as they were written, and no input makes a parser panic.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use manylane_wire::checksum::{Sum, checksum};
use manylane_wire::ethernet::{Mac, Vlan, ether_type};
use manylane_wire::frame::{Frame, Network, UdpFrame};
use manylane_wire::tcp::{self, Flags, Options, Tcp, TcpHeader};
use manylane_wire::{Error, Layer, udp};
use proptest::prelude::*;

fn mac() -> impl Strategy<Value = Mac> {
    any::<[u8; 6]>().prop_map(Mac)
}

fn vlan() -> impl Strategy<Value = Option<Vlan>> {
    let kind = prop_oneof![Just(ether_type::VLAN), Just(ether_type::SERVICE_VLAN)];
    prop::option::of((kind, any::<u16>()).prop_map(|(ether_type, control)| Vlan { ether_type, tci: control }))
}

fn endpoints() -> impl Strategy<Value = (SocketAddr, SocketAddr)> {
    let v4 = any::<(u32, u32)>()
        .prop_map(|(a, b)| -> (IpAddr, IpAddr) { (Ipv4Addr::from(a).into(), Ipv4Addr::from(b).into()) });
    let v6 = any::<(u128, u128)>()
        .prop_map(|(a, b)| -> (IpAddr, IpAddr) { (Ipv6Addr::from(a).into(), Ipv6Addr::from(b).into()) });
    (prop_oneof![v4, v6], any::<(u16, u16)>()).prop_map(|((a, b), (p, q))| ((a, p).into(), (b, q).into()))
}

prop_compose! {
    fn plan()(
        macs in (mac(), mac()),
        vlan in vlan(),
        ends in endpoints(),
        traffic_class: u8,
        ttl: u8,
        fragment_id: Option<u16>,
    ) -> UdpFrame<'static> {
        let plain = UdpFrame::new(macs.0, macs.1, ends.0, ends.1);
        UdpFrame { vlans: [vlan, None], traffic_class, ttl, fragment_id, ..plain }
    }
}

prop_compose! {
    fn options()(
        mss in prop::option::of(1..=u16::MAX),
        window_scale in prop::option::of(0..=tcp::WINDOW_SCALE_MAX),
        sack_permitted: bool,
        timestamps: Option<(u32, u32)>,
        blocks in prop::collection::vec(any::<(u32, u32)>(), 0..=tcp::SACK_BLOCKS_MAX),
    ) -> Options {
        let sack = std::array::from_fn(|at| blocks.get(at).copied());
        Options { mss, window_scale, sack_permitted, sack, timestamps }
    }
}

prop_compose! {
    fn tcp_header()(
        ends in endpoints(),
        numbers: (u32, u32),
        flags: u8,
        window: u16,
        urgent: u16,
        options in options(),
    ) -> TcpHeader {
        let flags = Flags(flags).with(Flags::SYN);
        let (sequence, acknowledgment) = numbers;
        TcpHeader { source: ends.0, destination: ends.1, sequence, acknowledgment, flags, window, urgent, options }
    }
}

fn written(plan: &UdpFrame<'_>) -> Vec<u8> {
    let mut bytes = vec![0xa5; plan.len()];
    assert_eq!(plan.write(&mut bytes), Ok(bytes.len()));
    bytes
}

/// The checksum as RFC 1071 describes it, word by word.
fn slow_checksum(bytes: &[u8]) -> u16 {
    let mut sum = 0u64;
    for pair in bytes.chunks(2) {
        sum += u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    }
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    !(sum as u16)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn tcp_headers_are_read_as_written(header in tcp_header(), payload: Vec<u8>) {
        let mut bytes = vec![0xa5; tcp::HEADER_LEN + tcp::OPTIONS_LEN_MAX + payload.len()];
        let Ok(length) = header.encoded_len() else {
            prop_assert_eq!(header.write(&mut bytes, &payload), Err(Error::TooLong(Layer::Tcp)));
            return Ok(());
        };
        let short = header.write(&mut bytes[..length - 1], &payload);
        prop_assert_eq!(short, Err(Error::Truncated { layer: Layer::Tcp, needed: length, there: length - 1 }));
        prop_assert_eq!(header.write(&mut bytes, &payload), Ok(length));
        bytes[length..][..payload.len()].copy_from_slice(&payload);
        let segment = &bytes[..length + payload.len()];
        let read = Tcp::parse(segment).unwrap();
        prop_assert_eq!((read.source, read.destination), (header.source.port(), header.destination.port()));
        prop_assert_eq!((read.sequence, read.acknowledgment), (header.sequence, header.acknowledgment));
        prop_assert_eq!((read.flags, read.window, read.urgent), (header.flags, header.window, header.urgent));
        prop_assert_eq!(read.payload, &payload[..]);
        prop_assert_eq!(Options::parse(read.options, true), header.options);
        let (source, destination) = (header.source.ip(), header.destination.ip());
        prop_assert!(read.has_valid_checksum(source, destination));
        let pseudo = match (source, destination) {
            (IpAddr::V4(a), IpAddr::V4(b)) => [&a.octets()[..], &b.octets(), &[0, tcp::PROTOCOL]].concat(),
            (IpAddr::V6(a), IpAddr::V6(b)) => [&a.octets()[..], &b.octets(), &[0, tcp::PROTOCOL]].concat(),
            _ => unreachable!(),
        };
        let sum = slow_checksum(&[&pseudo, &(segment.len() as u16).to_be_bytes()[..], segment].concat());
        prop_assert_eq!(sum, 0);
    }

    #[test]
    fn any_tcp_options_are_parsed(bytes in prop::collection::vec(any::<u8>(), 0..=40), is_syn: bool) {
        let options = Options::parse(&bytes, is_syn);
        prop_assert!(is_syn || (options.mss, options.window_scale, options.sack_permitted) == (None, None, false));
        prop_assert!(options.window_scale.is_none_or(|shift| shift <= tcp::WINDOW_SCALE_MAX));
    }

    #[test]
    fn a_frame_is_read_as_it_was_written(
        plan in plan(),
        payload in prop::collection::vec(any::<u8>(), 0..2000),
        padding in 0usize..46,
    ) {
        let plan = UdpFrame { payload: &payload, ..plan };
        let mut bytes = written(&plan);
        bytes.extend(std::iter::repeat_n(0x5a, padding));
        let frame = Frame::parse(&bytes).unwrap();
        prop_assert_eq!(frame.endpoints(), Some((plan.source, plan.destination)));
        prop_assert_eq!(frame.udp().unwrap().payload, &payload[..]);
        prop_assert_eq!(frame.ethernet.source, plan.source_mac);
        prop_assert_eq!(frame.ethernet.destination, plan.destination_mac);
        prop_assert_eq!(frame.ethernet.vlans, plan.vlans);
        let (class, ttl) = match frame.network {
            Network::Ipv4(ip, _) => {
                prop_assert_eq!((!ip.dont_fragment).then_some(ip.id), plan.fragment_id);
                (ip.traffic_class, ip.ttl)
            }
            Network::Ipv6(ip, _) => (ip.traffic_class, ip.hop_limit),
            _ => panic!("not IP"),
        };
        prop_assert_eq!((class, ttl), (plan.traffic_class, plan.ttl));
        prop_assert!(frame.has_valid_checksums());
        prop_assert_ne!(frame.udp().unwrap().checksum, 0);
    }

    #[test]
    fn a_flipped_bit_is_noticed(plan in plan(), payload in prop::collection::vec(any::<u8>(), 0..200), bit in any::<prop::sample::Index>()) {
        let plan = UdpFrame { payload: &payload, vlans: [None; 2], ..plan };
        let mut bytes = written(&plan);
        // What checksums cover starts behind the Ethernet header.
        let bit = 14 * 8 + bit.index((bytes.len() - 14) * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        // Of an IPv6 header, only the addresses are covered; a checksum of zero over IPv4 means
        // none.
        let covered = plan.destination.is_ipv4() || bit / 8 >= 14 + 8;
        let noticed = match Frame::parse(&bytes) {
            Ok(frame) => frame.udp().is_none_or(|udp| !frame.has_valid_checksums() || udp.checksum == 0),
            Err(_) => true,
        };
        prop_assert!(noticed || !covered);
    }

    #[test]
    fn a_frame_cut_anywhere_is_refused(plan in plan(), payload in prop::collection::vec(any::<u8>(), 0..80)) {
        let bytes = written(&UdpFrame { payload: &payload, ..plan });
        for length in 0..bytes.len() {
            let refused = matches!(Frame::parse(&bytes[..length]), Err(Error::Truncated { .. }));
            prop_assert!(refused, "{} of {}", length, bytes.len());
        }
    }

    #[test]
    fn a_slice_too_short_is_not_written(plan in plan(), payload in prop::collection::vec(any::<u8>(), 0..80)) {
        let plan = UdpFrame { payload: &payload, ..plan };
        for length in 0..plan.len() {
            prop_assert!(plan.write(&mut vec![0; length]).is_err());
        }
    }

    #[test]
    fn random_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Frame::parse(&bytes).map(|frame| frame.has_valid_checksums());
        let _ = manylane_wire::ipv4::Ipv4::parse(&bytes);
        let _ = manylane_wire::ipv6::Ipv6::parse(&bytes);
        let _ = udp::Udp::parse(&bytes);
    }

    #[test]
    fn the_fast_checksum_matches_the_reference(bytes in prop::collection::vec(any::<u8>(), 0..3000), at in any::<prop::sample::Index>()) {
        prop_assert_eq!(checksum(&bytes), slow_checksum(&bytes));
        // In two pieces too, when the first one is even.
        let at = if bytes.is_empty() { 0 } else { at.index(bytes.len()) & !1 };
        prop_assert_eq!(Sum::default().add_bytes(&bytes[..at]).add_bytes(&bytes[at..]).finish(), checksum(&bytes));
    }
}

#[test]
fn payloads_up_to_the_limit_of_ipv4_fit_and_no_more() {
    let ends = ("10.0.0.1:1".parse().unwrap(), "10.0.0.2:2".parse().unwrap());
    let plan = UdpFrame::new(Mac::default(), Mac::default(), ends.0, ends.1);
    let payload = vec![1; 65_508];
    let largest = UdpFrame { payload: &payload[..65_507], ..plan };
    let bytes = written(&largest);
    assert_eq!(Frame::parse(&bytes).unwrap().udp().unwrap().payload.len(), 65_507);
    assert!(Frame::parse(&bytes).unwrap().has_valid_checksums());
    let larger = UdpFrame { payload: &payload, ..plan };
    assert_eq!(larger.write(&mut vec![0; larger.len()]), Err(Error::TooLong(Layer::Ipv4)));
}

#[test]
fn families_do_not_mix() {
    let ends = ("10.0.0.1:1".parse().unwrap(), "[::1]:2".parse().unwrap());
    let plan = UdpFrame::new(Mac::default(), Mac::default(), ends.0, ends.1);
    assert_eq!(plan.write(&mut [0; 200]), Err(Error::MixedFamilies));
}

#[test]
fn no_checksum_is_right_over_ipv4_only() {
    let bytes = [0, 1, 0, 2, 0, 8, 0, 0];
    let datagram = udp::Udp::parse(&bytes).unwrap();
    let (v4, v6): (IpAddr, IpAddr) = ("10.0.0.1".parse().unwrap(), "::1".parse().unwrap());
    assert!(datagram.has_valid_checksum(v4, v4));
    assert!(!datagram.has_valid_checksum(v6, v6));
}

#[test]
fn inconsistent_lengths_are_refused() {
    // IPv4: total length less than the header, header longer than the packet.
    let mut ip = [0; 40];
    (ip[0], ip[3]) = (0x45, 19);
    assert_eq!(manylane_wire::ipv4::Ipv4::parse(&ip), Err(Error::BadLength(Layer::Ipv4)));
    (ip[0], ip[3]) = (0x4f, 40);
    assert_eq!(manylane_wire::ipv4::Ipv4::parse(&ip), Err(Error::BadLength(Layer::Ipv4)));
    (ip[0], ip[3]) = (0x44, 40);
    assert_eq!(manylane_wire::ipv4::Ipv4::parse(&ip), Err(Error::BadLength(Layer::Ipv4)));
    (ip[0], ip[3]) = (0x45, 41);
    assert!(manylane_wire::ipv4::Ipv4::parse(&ip).is_err());
    // UDP: 0 to 7, and more than there is.
    for length in (0..8).chain([13]) {
        assert!(udp::Udp::parse(&[0, 1, 0, 2, 0, length, 0, 0, 1, 2, 3, 4]).is_err(), "{length}");
    }
}

/// What Linux makes of options that are not as they should be (`tcp_parse_options`).
#[test]
fn malformed_tcp_options_end_or_skip() {
    let parse = |bytes: &[u8]| Options::parse(bytes, true);
    let mss = Options { mss: Some(1460), ..Options::default() };
    assert_eq!(parse(&[30, 4, 9, 9, 2, 4, 5, 180]), mss, "an unknown one is skipped");
    assert_eq!(parse(&[2, 3, 5, 2, 4, 5, 180]), mss, "one of a wrong length is skipped");
    assert_eq!(parse(&[2, 4, 5, 180, 0, 3, 3, 7]), mss, "nothing behind the end");
    assert_eq!(parse(&[2, 4, 5, 180, 3, 1, 7]), mss, "a length that is too small ends the list");
    assert_eq!(parse(&[2, 4, 5, 180, 3, 9, 7]), mss, "and one beyond the header");
    assert_eq!(parse(&[2, 4, 5, 180, 3]), mss, "and a missing one");
    assert_eq!(parse(&[2, 4, 0, 0]), Options::default(), "no segment size");
    assert_eq!(parse(&[3, 3, 200]).window_scale, Some(14));
    assert_eq!(parse(&[5, 9, 0, 0, 0, 1, 0, 0, 0]).sack, [None; 4], "half a block");
}

#[test]
fn the_header_of_a_segment_has_a_valid_length() {
    let mut segment = [0; 24];
    for (offset, expected) in [
        (4, Err(Error::BadLength(Layer::Tcp))),
        (5, Ok(4)),
        (6, Ok(0)),
        (7, Err(Error::Truncated { layer: Layer::Tcp, needed: 28, there: 24 })),
    ] {
        segment[12] = offset << 4;
        assert_eq!(Tcp::parse(&segment).map(|read| read.payload.len()), expected);
    }
    assert_eq!(
        Tcp::parse(&segment[..19]),
        Err(Error::Truncated { layer: Layer::Tcp, needed: 20, there: 19 })
    );
}

/// The order and the padding of `tcp_options_write` in Linux.
#[test]
fn a_syn_of_linux_is_written_alike() {
    let options = Options {
        mss: Some(1460),
        window_scale: Some(7),
        sack_permitted: true,
        timestamps: Some((0x0102_0304, 0)),
        ..Options::default()
    };
    let header = TcpHeader {
        source: "10.0.0.1:40000".parse().unwrap(),
        destination: "10.0.0.2:80".parse().unwrap(),
        sequence: 1,
        acknowledgment: 0,
        flags: Flags::SYN,
        window: 64240,
        urgent: 0,
        options,
    };
    let mut bytes = [0; 60];
    assert_eq!(header.write(&mut bytes, &[]), Ok(40));
    let linux = [2, 4, 5, 180, 4, 2, 8, 10, 1, 2, 3, 4, 0, 0, 0, 0, 1, 3, 3, 7];
    assert_eq!(bytes[20..40], linux);
    assert_eq!(bytes[12], 0xa0);
}
