//! A flood of SYNs from random sources: peers that mean it are still connected, and memory is flat.

use std::net::Ipv4Addr;
use std::time::Duration;

use manylane_tcp::time::Time;
use manylane_tcp::{Config, Secret, Stack, What};

use crate::peer::{Last, Peer, SERVER};

#[test]
fn peers_connect_in_a_flood_of_syns() {
    const SYNS: u32 = 500_000;
    const SYNS_PER_PEER: u32 = 500;
    let mut now = Time(1_000_000);
    let mut stack = Stack::new(Config::default(), Secret::new([5; 16]), now).unwrap();
    stack.listen(SERVER.into()).unwrap();
    let mut out = Last::default();
    let mut random = 1_u64;
    let mut flood = Peer::default();
    let mut run = |syns: u32| {
        for number in 0..syns {
            // 500,000 each second.
            now = now + Duration::from_micros(2);
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let [_, a, b, c, d, e, ..] = random.to_be_bytes();
            flood.address = (Ipv4Addr::new(10 + a % 80, b, c, d), 1024 + u16::from(e));
            flood.ask(&mut stack, now, &mut out);
            if number % SYNS_PER_PEER == 0 {
                let mut peer = Peer::default();
                peer.address = (Ipv4Addr::new(192, 0, 2, 2), 2000 + (number / SYNS_PER_PEER) as u16);
                peer.connect(&mut stack, now, &mut out);
                let event = stack.event().expect("the peer is connected");
                assert_eq!(event.what, What::Accepted);
                stack.abort(event.id);
            }
            if number % 64 == 0 {
                stack.flush(now, &mut out);
            }
        }
        stack.levels()
    };
    // Tables grow to what the settings allow.
    run(20_000);
    let mut levels = None;
    let counted = allocation_counter::measure(|| levels = Some(run(SYNS)));
    let levels = levels.unwrap();
    assert!(levels.connections <= Config::default().backlog + 1, "{levels:?}");
    // Nothing is kept but the connection that has just been made.
    assert!(counted.bytes_current < 4096, "{counted:?}");
    let counters = stack.counters();
    let peers = u64::from((SYNS + 20_000) / SYNS_PER_PEER);
    assert_eq!((counters.accepted, counters.dropped_full), (peers, 0), "{counters:?}");
    assert!(counters.cookies_accepted > peers * 9 / 10, "{counters:?}");
}
