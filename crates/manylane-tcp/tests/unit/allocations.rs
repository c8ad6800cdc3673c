//! Nothing is allocated for a segment.

use std::time::Duration;

use manylane_tcp::time::Time;
use manylane_tcp::{Config, Secret, Stack, What};
use manylane_wire::tcp::{Flags, Options};

use crate::peer::{Last, Peer, SERVER};

#[test]
fn requests_and_answers_allocate_nothing() {
    let config = Config { receive_buffer: 8192, send_buffer: 8192, ..Config::default() };
    let mut now = Time(1_000_000);
    let mut stack = Stack::new(config, Secret::new([5; 16]), now).unwrap();
    stack.listen(SERVER.into()).unwrap();
    let mut out = Last::default();
    let mut peer = Peer::default();
    peer.connect(&mut stack, now, &mut out);
    assert_eq!(stack.event().unwrap().what, What::Accepted);
    let mut serve = |requests: u32| {
        for _ in 0..requests {
            now = now + Duration::from_millis(1);
            peer.timestamp += 1;
            out.length = 0;
            let request = peer.segment(Flags::ACK.with(Flags::PSH), Options::default(), 100);
            stack.input(now, request, false, &mut out);
            (peer.sequence, peer.acknowledgment) =
                (peer.sequence + 100, peer.acknowledgment.wrapping_add(100));
            let event = stack.event().unwrap();
            assert_eq!(event.what, What::Readable);
            while stack.read(event.id, <[u8]>::len) > 0 {}
            assert_eq!(stack.write(event.id, &[b'a'; 100], now), 100);
            stack.flush(now, &mut out);
            assert_eq!(out.length, 20 + 32 + 100, "an answer that has the ACK, too");
        }
    };
    // Buffers are allocated for the first one, and lists grow.
    serve(100);
    let counted = allocation_counter::measure(|| serve(10_000));
    assert_eq!(counted.count_total, 0, "{counted:?}");
    assert_eq!(stack.counters().buffers_taken, 1);
}

/// A peer that sends its FIN again and again must not fill the memory with its end.
#[test]
fn fins_in_time_wait_are_remembered_once() {
    const FINS: u64 = 100_000;
    let mut now = Time(1_000_000);
    let mut stack = Stack::new(Config::default(), Secret::new([5; 16]), now).unwrap();
    stack.listen(SERVER.into()).unwrap();
    let mut out = Last::default();
    let mut peer = Peer::default();
    let mut in_time_wait = |port| {
        peer.address.1 = port;
        peer.sequence = 7;
        peer.acknowledgment = 0;
        peer.connect(&mut stack, now, &mut out);
        let id = stack.event().unwrap().id;
        stack.close(id, now);
        stack.flush(now, &mut out);
        peer.acknowledgment = peer.acknowledgment.wrapping_add(1);
        let fin = peer.segment(Flags::ACK.with(Flags::FIN), Options::default(), 0);
        stack.input(now, fin, false, &mut out);
        stack.flush(now, &mut out);
    };
    // The first one stays in front of the queue.
    in_time_wait(5000);
    in_time_wait(5001);
    assert_eq!(stack.levels().time_wait, 2);
    let counted = allocation_counter::measure(|| {
        for _ in 0..FINS {
            now.0 += 10;
            let fin = peer.segment(Flags::ACK.with(Flags::FIN), Options::default(), 0);
            stack.input(now, fin, false, &mut out);
            stack.flush(now, &mut out);
        }
    });
    assert_eq!(stack.levels().time_wait, 2);
    assert!(counted.bytes_max < 4096, "{counted:?}");
}
