//! Other buffers while lanes run: larger ones, more of them, for lanes by hand and for those that
//! serve.

use std::time::Instant;

use manylane::{Builder, Engine, ErrorKind, Lane};
use manylane_tests::{Client, Serving, TEST_TIMEOUT, need_uring, pattern};

/// Engines that have kernel sockets.
fn engines(test: &'static str) -> impl Iterator<Item = Engine> {
    [Engine::Mmsg, Engine::Uring]
        .into_iter()
        .filter(move |engine| *engine == Engine::Mmsg || need_uring(test))
}

fn builder(engine: Engine) -> Builder {
    let mut builder = Builder::new("127.0.0.1:0").unwrap();
    builder.engine(engine).lanes(1).batch(4).datagram_size(100).gro(false).recv_buffer(400_000);
    builder
}

/// Takes what is there; the payloads, and the largest batch.
fn drain(lane: &mut Lane, got: &mut Vec<u32>) -> usize {
    let mut largest = 0;
    loop {
        let batch = lane.recv().unwrap().batch;
        if batch.is_empty() {
            return largest;
        }
        largest = largest.max(batch.len());
        got.extend(batch.map(|datagram| u32::from_ne_bytes(datagram.payload().try_into().unwrap())));
    }
}

#[test]
fn loopback_a_lane_by_hand_gets_other_buffers_and_loses_nothing() {
    for engine in engines("loopback_a_lane_by_hand_gets_other_buffers_and_loses_nothing") {
        let mut lane = builder(engine).open().unwrap().into_lanes().remove(0);
        let client = Client::to(lane.local_addr());
        let mut got = Vec::new();
        for (round, batch) in (0_u32..).zip([64, 1, 16, 3, 1024]) {
            (round * 200..(round + 1) * 200).for_each(|number| client.send(&number.to_ne_bytes()));
            // In the midst of it.
            let some = lane.recv().unwrap().batch;
            assert!(!some.is_empty());
            got.extend(some.map(|datagram| u32::from_ne_bytes(datagram.payload().try_into().unwrap())));
            lane.resize(batch, 100 + batch).unwrap();
            assert_eq!(lane.capabilities().batch, batch);
            // What was taken into the old buffers may be a batch of its own.
            let largest = drain(&mut lane, &mut got);
            assert_eq!(largest, batch.min(largest.max(64)), "{engine}");
        }
        assert_eq!(got, (0..1000).collect::<Vec<_>>(), "{engine}");
    }
}

#[test]
fn loopback_larger_buffers_take_larger_datagrams() {
    for engine in engines("loopback_larger_buffers_take_larger_datagrams") {
        let mut lane = builder(engine).open().unwrap().into_lanes().remove(0);
        let client = Client::to(lane.local_addr());
        for size in [100, 2000, 60_000, 500] {
            lane.resize(8, size).unwrap();
            for (len, fits) in [(size, true), (size + 1, false)] {
                client.send(&pattern(len, len));
                let mut batch = lane.recv_timeout(TEST_TIMEOUT).unwrap().batch;
                assert_eq!(batch.len(), 1);
                let datagram = batch.next().unwrap();
                assert_eq!((datagram.is_truncated(), datagram.full_len()), (!fits, len), "{engine}");
                assert_eq!(datagram.payload(), &pattern(len, len)[..size], "{engine}");
            }
        }
    }
}

#[test]
fn loopback_lanes_that_serve_get_other_buffers_and_lose_nothing() {
    for engine in engines("loopback_lanes_that_serve_get_other_buffers_and_lose_nothing") {
        let serving = Serving::echo(builder(engine).lanes(3).open().unwrap());
        let handle = serving.handle.clone();
        let clients: Vec<_> = (0..12).map(|_| Client::to(serving.addr)).collect();
        let mut sent = 1;
        for (batch, size) in [(64, 1000), (1, 3000), (256, 20_000)] {
            handle.resize(batch, size).unwrap();
            // One that comes later has them, too.
            handle.add_lane().unwrap();
            for client in &clients {
                let start = Instant::now();
                // Idle lanes follow within some milliseconds.
                loop {
                    client.send(&pattern(size, size));
                    sent += 1;
                    if client.recv() == pattern(size, size) {
                        break;
                    }
                    assert!(start.elapsed() < TEST_TIMEOUT, "{engine}: no larger buffers");
                }
            }
            assert!(handle.lane_ids().len() > 3);
        }
        let total = serving.stop().unwrap().total();
        assert_eq!((total.delivered, total.sent, total.lost()), (sent, sent, 0), "{engine}");
        assert_eq!((total.arrived(), total.uring_fallbacks, total.recv_errors), (sent, 0, 0), "{engine}");
    }
}

#[test]
fn loopback_sizes_that_cannot_be_are_refused_and_nothing_changes() {
    for engine in engines("loopback_sizes_that_cannot_be_are_refused_and_nothing_changes") {
        let socket = builder(engine).open().unwrap();
        let handle = socket.handle();
        let mut lane = socket.into_lanes().remove(0);
        let before = lane.capabilities();
        for (batch, size) in [(0, 100), (1025, 100), (4, 0), (4, 65_536)] {
            assert_eq!(lane.resize(batch, size).unwrap_err().kind(), ErrorKind::Config);
            assert_eq!(handle.resize(batch, size).unwrap_err().kind(), ErrorKind::Config);
        }
        assert_eq!(lane.capabilities(), before);
        Client::to(lane.local_addr()).send(b"0123");
        assert_eq!(lane.recv_timeout(TEST_TIMEOUT).unwrap().batch.len(), 1);
    }
}
