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
