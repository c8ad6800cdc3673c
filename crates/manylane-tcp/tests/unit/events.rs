//! Events of connections that the application gives up.

use manylane_tcp::time::Time;
use manylane_tcp::{Config, Secret, Stack, What};
use manylane_wire::tcp::{Flags, Options};

use crate::peer::{Last, Peer, SERVER};

/// Each connection has a second event when it is aborted, which is not told.
#[test]
fn nothing_is_told_of_connections_that_were_given_up() {
    const CONNECTIONS: u16 = 1000;
    let now = Time(1_000_000);
    let mut stack =
        Stack::new(Config { backlog: 1, ..Config::default() }, Secret::new([5; 16]), now).unwrap();
    stack.listen(SERVER.into()).unwrap();
    let mut out = Last::default();
    for port in 0..CONNECTIONS {
        let mut peer = Peer::default();
        peer.address.1 = 1000 + port;
        peer.connect(&mut stack, now, &mut out);
        stack.input(now, peer.segment(Flags::ACK, Options::default(), 1), false, &mut out);
    }
    let mut accepted = 0;
    while let Some(event) = stack.event() {
        assert_eq!(event.what, What::Accepted);
        accepted += 1;
        stack.abort(event.id);
    }
    assert_eq!(accepted, CONNECTIONS);
    stack.flush(now, &mut out);
    assert_eq!((stack.levels().connections, stack.event()), (0, None));
}
