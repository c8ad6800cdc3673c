//! Events of connections that the application gives up.

use std::time::Instant;

use manylane_tcp::time::Time;
use manylane_tcp::{Config, Secret, Stack, What};
use manylane_wire::tcp::{Flags, Options};

use crate::peer::{Last, Peer, SERVER};

/// Aborts each connection when it is accepted, with an event of each left. Returns the time.
fn abort_all(connections: u16) -> std::time::Duration {
    let now = Time(1_000_000);
    let mut stack =
        Stack::new(Config { backlog: 1, ..Config::default() }, Secret::new([5; 16]), now).unwrap();
    stack.listen(SERVER.into()).unwrap();
    let mut out = Last::default();
    for port in 0..connections {
        let mut peer = Peer::default();
        peer.address.1 = 1000 + port;
        peer.connect(&mut stack, now, &mut out);
        stack.input(now, peer.segment(Flags::ACK, Options::default(), 1), false, &mut out);
    }
    let begin = Instant::now();
    let mut accepted = 0;
    while let Some(event) = stack.event() {
        // What comes after a connection is given up is not told.
        if event.what == What::Accepted {
            accepted += 1;
            stack.abort(event.id);
        } else {
            panic!("{event:?}");
        }
    }
    assert_eq!(accepted, connections);
    stack.flush(now, &mut out);
    assert_eq!((stack.levels().connections, stack.event()), (0, None));
    begin.elapsed()
}

#[test]
fn giving_up_costs_the_same_with_many_events() {
    let least = |connections| (0..3).map(|_| abort_all(connections)).min().unwrap();
    let (few, many) = (least(1000), least(8000));
    assert!(many < few * 24, "{few:?} for 1,000 and {many:?} for 8,000");
}
