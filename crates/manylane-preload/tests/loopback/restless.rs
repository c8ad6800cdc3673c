//! Waits that return at once although nothing is there do not make anybody turn round.

use crate::support::{build, build_library, library, run_preloaded};

/// Runs `restless CASE` with a library behind ours that counts its calls.
fn run_restless(case: &str) {
    let program = build("restless");
    let both = format!("{}:{}", library().display(), build_library("calls").display());
    let with = run_preloaded(&program, &[case], &[("MANYLANE_LANES", "8"), ("LD_PRELOAD", &both)]);
    assert_eq!(with.output, "waits: yes\nturns: yes\n", "{case}");
    assert_eq!(with.reasons(), [""; 0], "{case}");
    // Who is away for long may have lost its lane by then.
    assert!(with.lanes() >= 1, "{case}");
}

#[test]
fn loopback_a_descriptor_made_nonblocking_unseen_does_not_spin() {
    run_restless("nonblock");
}

#[test]
fn loopback_a_lane_that_tells_of_nothing_is_no_reason_to_spin() {
    run_restless("guest");
    run_restless("poll");
    run_restless("epoll");
}
