//! Our parser and builder against etherparse.

use etherparse::PacketBuilder;
use manylane_wire::ethernet::Mac;
use manylane_wire::frame::UdpFrame;
use proptest::prelude::*;

use crate::agree::check;

fn theirs(ipv6: bool, ports: (u16, u16), ttl: u8, payload: &[u8]) -> Vec<u8> {
    let ethernet = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
    let ip = if ipv6 {
        let (mut a, mut b) = ([0xfd; 16], [0xfd; 16]);
        (a[15], b[15]) = (1, 2);
        ethernet.ipv6(a, b, ttl)
    } else {
        ethernet.ipv4([10, 0, 0, 1], [10, 0, 0, 2], ttl)
    };
    let udp = ip.udp(ports.0, ports.1);
    let mut bytes = Vec::with_capacity(udp.size(payload.len()));
    udp.write(&mut bytes, payload).unwrap();
    bytes
}

fn ours(ipv6: bool, ports: (u16, u16), ttl: u8, payload: &[u8]) -> Vec<u8> {
    let host = |last: u8| match ipv6 {
        true => {
            let mut ip = [0xfd; 16];
            ip[15] = last;
            std::net::IpAddr::from(ip)
        }
        false => [10, 0, 0, last].into(),
    };
    let (source, destination) = ((host(1), ports.0).into(), (host(2), ports.1).into());
    let plan = UdpFrame {
        ttl,
        payload,
        ..UdpFrame::new(Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 2]), source, destination)
    };
    let mut bytes = vec![0xaa; plan.len()];
    assert_eq!(plan.write(&mut bytes), Ok(bytes.len()));
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn both_implementations_build_the_same_bytes(ipv6: bool, ports: (u16, u16), ttl: u8, payload in prop::collection::vec(any::<u8>(), 0..1500)) {
        prop_assert_eq!(ours(ipv6, ports, ttl, &payload), theirs(ipv6, ports, ttl, &payload));
    }

    #[test]
    fn both_implementations_agree_on_damaged_frames(
        ipv6: bool,
        payload in prop::collection::vec(any::<u8>(), 0..64),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
        whole: bool,
        padding in 0usize..20,
    ) {
        let mut frame = ours(ipv6, (1, 2), 64, &payload);
        for (at, byte) in damage {
            // Where the headers are, damage shows most.
            let at = at.index(frame.len().min(64));
            frame[at] = byte;
        }
        if whole {
            frame.extend(std::iter::repeat_n(0, padding));
        } else {
            frame.truncate(cut.index(frame.len()));
        }
        check(&frame);
    }

    #[test]
    fn both_implementations_agree_on_random_bytes(mut bytes in prop::collection::vec(any::<u8>(), 0..120), kind in 0usize..7) {
        // Noise alone is hardly ever IP: say that it is.
        let kinds = [0x0800, 0x86dd, 0x0806, 0x8100, 0x88a8, 0x9100, 0u16];
        if bytes.len() > 14 && kind < 6 {
            bytes[12..14].copy_from_slice(&kinds[kind].to_be_bytes());
            if kind == 0 {
                bytes[14] = 0x45;
            } else if kind == 1 {
                bytes[14] = 0x60;
            }
        }
        check(&bytes);
    }
}
