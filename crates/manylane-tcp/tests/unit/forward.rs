//! Bytes that go from one connection to another one.

use std::time::Duration;

use manylane_tcp::time::Time;
use manylane_tcp::{Config, Event, Id, Secret, Stack, What};
use manylane_wire::tcp::{Flags, Options, Tcp};

use crate::output::Packets;
use crate::peer::{Last, Peer, SERVER};

const NOW: Time = Time(1_000_000);
const ROOM: usize = 64;

/// Two peers that are connected to a stack whose connections can hold few unacknowledged bytes.
fn connected() -> (Stack, [Peer; 2], [Id; 2]) {
    let config = Config { send_buffer: ROOM, ..Config::default() };
    let mut stack = Stack::new(config, Secret::new([5; 16]), NOW).unwrap();
    stack.listen(SERVER.into()).unwrap();
    let mut out = Last::default();
    let peers = [1000, 1001].map(|port| {
        let mut peer = Peer::default();
        peer.address.1 = port;
        peer.connect(&mut stack, NOW, &mut out);
        peer
    });
    let ids = [0, 1].map(|_| stack.event().unwrap().id);
    (stack, peers, ids)
}

/// The lengths of the segments with data to this port.
fn data_to(out: &mut Packets, port: u16) -> Vec<usize> {
    let lengths = out.sent.drain(..).filter_map(|packet| {
        let tcp = Tcp::parse(&packet[20..]).unwrap();
        (tcp.destination == port && !tcp.payload.is_empty()).then_some(tcp.payload.len())
    });
    lengths.collect()
}

#[test]
fn bytes_are_moved_as_far_as_there_is_room() {
    let (mut stack, [mut from_peer, mut to_peer], [from, to]) = connected();
    let mut out = Packets::default();
    let push = Flags::ACK.with(Flags::PSH);
    stack.input(NOW, from_peer.segment(push, Options::default(), 100), false, &mut out);
    assert_eq!(stack.event(), Some(Event { id: from, what: What::Readable }));
    assert_eq!(stack.forward(from, to, NOW), ROOM);
    assert_eq!(stack.forward(from, to, NOW), 0);
    stack.flush(NOW, &mut out);
    assert_eq!(data_to(&mut out, 1001), [ROOM]);
    // Room again, once they are acknowledged.
    to_peer.acknowledgment = to_peer.acknowledgment.wrapping_add(ROOM as u32);
    stack.input(NOW, to_peer.segment(Flags::ACK, Options::default(), 0), false, &mut out);
    stack.flush(NOW, &mut out);
    assert_eq!(stack.event(), Some(Event { id: to, what: What::Writable }));
    assert_eq!(stack.forward(from, to, NOW), 100 - ROOM);
    stack.flush(NOW, &mut out);
    assert_eq!(data_to(&mut out, 1001), [100 - ROOM]);
    assert_eq!(stack.forward(from, to, NOW), 0);
}

#[test]
fn nothing_is_moved_to_itself_or_to_a_connection_that_is_over() {
    let (mut stack, [mut from_peer, _], [from, to]) = connected();
    let mut out = Packets::default();
    stack.input(NOW, from_peer.segment(Flags::ACK, Options::default(), 10), false, &mut out);
    assert_eq!(stack.forward(from, from, NOW), 0);
    stack.abort(to);
    let later = NOW + Duration::from_secs(1);
    stack.flush(later, &mut out);
    assert_eq!((stack.forward(from, to, later), stack.forward(to, from, later)), (0, 0));
    // They are still there.
    assert_eq!(stack.read(from, <[u8]>::len), 10);
}
