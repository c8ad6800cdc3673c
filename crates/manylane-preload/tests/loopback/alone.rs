//! A thread that received alone gets a lane like every other one as soon as it is not alone any
//! more.

use crate::support::{build, run_native, run_preloaded};

/// Times that a program is run. An owner that a busy machine holds up for long loses its lane, and
/// may end without one.
const RUNS: usize = 3;

fn ends_with_lanes(ways: &[&str]) {
    let program = build("alone");
    for way in ways {
        let without = run_native(&program, &[way]);
        let all_have_lanes = (0..RUNS).any(|_| {
            let with = run_preloaded(&program, &[way], &[("MANYLANE_LANES", "8")]);
            assert_eq!(with.output, without.output, "{way}");
            assert_eq!(with.reasons(), [""; 0], "{way}");
            with.lanes() == 3
        });
        assert!(all_have_lanes, "{way}");
    }
}

#[test]
fn loopback_later_receivers_get_lanes_and_so_does_the_first() {
    ends_with_lanes(&["block", "poll", "select", "epoll", "messages"]);
}

#[test]
fn loopback_the_successor_of_a_sole_receiver_is_not_taken_for_it() {
    ends_with_lanes(&["successor", "fork", "reuse"]);
}

#[test]
fn loopback_a_sole_receiver_uses_any_descriptor_and_is_interrupted() {
    ends_with_lanes(&["turns", "signal"]);
}
