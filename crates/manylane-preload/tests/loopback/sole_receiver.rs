//! A sole receiver of a socket gets a lane as soon as there are other receivers.

use crate::support::{build, run_native, run_preloaded};

/// Number of runs. On a busy machine, an owner that is held up for long loses its lane, and may end
/// without one.
const RUNS: usize = 3;

fn assert_three_lanes(ways: &[&str]) {
    let program = build("sole_receiver");
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
fn loopback_sole_receiver_gets_a_lane_when_others_start() {
    assert_three_lanes(&["block", "poll", "select", "epoll", "messages"]);
}

#[test]
fn loopback_successor_of_a_sole_receiver_is_a_new_receiver() {
    assert_three_lanes(&["successor", "fork", "reuse"]);
}

#[test]
fn loopback_sole_receiver_uses_dup_descriptors_and_gets_eintr() {
    assert_three_lanes(&["two-fds", "signal"]);
}
