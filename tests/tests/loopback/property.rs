//! Random sequences of datagrams and GSO messages through an echo by hand, checked against a
//! model: each peer gets its datagrams back, in order.

use manylane_tests::{Client, LaneDriver, on_every_variant, pattern, send_and_wait};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const PEERS: usize = 3;

/// One send of a peer: datagrams of `segment` bytes each, `len` bytes in total.
#[derive(Clone, Debug)]
struct Sending {
    peer: usize,
    segment: usize,
    len: usize,
}

fn sending() -> impl Strategy<Value = Sending> {
    let size = prop_oneof![0_usize..20, 0_usize..2000, Just(1472), Just(1473), Just(9000)];
    let one = (0..PEERS, size).prop_map(|(peer, len)| Sending { peer, segment: len, len });
    let gso = (0..PEERS, prop_oneof![1_usize..40, 1_usize..1400], 1_usize..20, 0_usize..1400).prop_map(
        |(peer, segment, count, last)| Sending { peer, segment, len: segment * count + last % segment },
    );
    prop_oneof![one, gso]
}

/// The datagrams of a send.
fn datagrams(seed: usize, sending: &Sending) -> Vec<Vec<u8>> {
    let payload = pattern(seed, sending.len);
    if payload.is_empty() {
        vec![payload]
    } else {
        payload.chunks(sending.segment).map(<[u8]>::to_vec).collect()
    }
}

on_every_variant! {
    fn random_sequences_match_the_model(variant) {
        let mut driver = LaneDriver::new(variant.builder("127.0.0.1:0").batch(16).open().unwrap());
        let clients: Vec<_> = (0..PEERS).map(|_| Client::to(driver.addr())).collect();
        let driver = std::cell::RefCell::new(&mut driver);
        let mut runner = TestRunner::new(Config { cases: 24, failure_persistence: None, ..Config::default() });
        let sequences = prop::collection::vec(sending(), 1..8);
        runner
            .run(&(sequences, 0..3_usize), |(sequence, how)| {
                let mut driver = driver.borrow_mut();
                let mut model = vec![Vec::new(); PEERS];
                let before = driver.handle.counters().total();
                send_and_wait(|| {
                    for (seed, sending) in sequence.iter().enumerate() {
                        let payload = pattern(seed, sending.len);
                        let client = &clients[sending.peer];
                        if sending.len > sending.segment {
                            client.send_gso(&payload, sending.segment as u16);
                        } else {
                            client.send(&payload);
                        }
                    }
                });
                for (seed, sending) in sequence.iter().enumerate() {
                    model[sending.peer].extend(datagrams(seed, sending));
                }
                let count: usize = model.iter().map(Vec::len).sum();
                driver.receive(count, |_, datagram, out| match how {
                    0 => out.reply(&datagram, datagram.payload()),
                    1 => out.reply_borrowed(&datagram, datagram.payload()),
                    _ => out.send_to(datagram.peer(), datagram.payload()),
                });
                for (client, due) in clients.iter().zip(&mut model) {
                    let mut got: Vec<_> = due.iter().map(|_| client.recv()).collect();
                    if variant.is_xdp() {
                        // Datagrams in one frame pass the kernel by, fragmented ones pass through
                        // it, in no common order.
                        got.sort();
                        due.sort();
                    }
                    prop_assert!(got == *due);
                    prop_assert!(client.is_idle());
                }
                let after = driver.handle.counters().total();
                let bytes: usize = model.iter().flatten().map(Vec::len).sum();
                prop_assert_eq!(after.delivered - before.delivered, count as u64);
                prop_assert_eq!(after.delivered_bytes - before.delivered_bytes, bytes as u64);
                prop_assert_eq!(after.sent_bytes - before.sent_bytes, bytes as u64);
                prop_assert_eq!((after.sent, after.lost()), (after.delivered, 0));
                prop_assert_eq!(after.arrived(), after.delivered);
                Ok(())
            })
            .unwrap();
    }
}
