//! The queue for buffers, when there are fewer than connections want.

use manylane_tcp::time::Time;
use manylane_tcp::{Config, Id, Secret, Stack, What};
use manylane_wire::tcp::{Flags, Options};

use crate::peer::{Last, Peer, SERVER};

fn connect(stack: &mut Stack, port: u16, now: Time, out: &mut Last) -> (Peer, Id) {
    let mut peer = Peer::default();
    peer.address.1 = port;
    peer.connect(stack, now, out);
    let event = stack.event().unwrap();
    assert_eq!(event.what, What::Accepted);
    stack.flush(now, out);
    (peer, event.id)
}

#[test]
fn buffers_of_a_connection_that_ends_in_its_turn_go_to_the_next() {
    let now = Time(1_000_000);
    let config = Config { buffers_max: 1, ..Config::default() };
    let mut stack = Stack::new(config, Secret::new([5; 16]), now).unwrap();
    stack.listen(SERVER.into()).unwrap();
    let mut out = Last::default();
    let (mut first, _) = connect(&mut stack, 5000, now, &mut out);
    let (mut second, second_id) = connect(&mut stack, 5001, now, &mut out);
    let (_, third_id) = connect(&mut stack, 5002, now, &mut out);
    stack.input(now, first.segment(Flags::ACK, Options::default(), 100), false, &mut out);
    first.sequence += 100;
    assert_eq!(stack.event().map(|event| event.what), Some(What::Readable));
    for id in [second_id, third_id] {
        assert_eq!(stack.write(id, b"later", now), 0);
        stack.flush(now, &mut out);
    }
    // Both resets are in one batch.
    for peer in [&mut first, &mut second] {
        stack.input(now, peer.segment(Flags::RST, Options::default(), 0), false, &mut out);
        assert!(matches!(stack.event().unwrap().what, What::Closed(_)));
    }
    stack.flush(now, &mut out);
    let event = stack.event().expect("there are buffers");
    assert_eq!((event.id, event.what), (third_id, What::Writable));
}
