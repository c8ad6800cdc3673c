//! Lanes that are made ahead of a fork: what comes in that moment is received, and sockets that are plain get none.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use support::{build, build_library, laned, library, plain};

#[test]
fn loopback_what_comes_while_lanes_are_made_ahead_of_a_fork_is_received() {
    let program = build("early");
    let expected = "64 before, 64 early, 64 later\n";
    assert_eq!(plain(&program, &["calm"]).output, expected);
    for batch in ["1", "32"] {
        let both = format!("{}:{}", library().display(), build_library("rush").display());
        let vars = [("MANYLANE_LANES", "8"), ("MANYLANE_BATCH", batch), ("LD_PRELOAD", &both)];
        for way in ["calm", "rush", "late", "asleep"] {
            let with = laned(&program, &[way], &vars);
            assert_eq!((with.output.as_str(), with.reasons()), (expected, vec![]), "{way}, batch {batch}");
        }
    }
}

#[test]
fn loopback_a_socket_that_becomes_plain_beside_a_fork_gets_no_lanes_any_more() {
    let program = build("spoilt");
    let expected = "0 shared, 0 missing\n";
    assert_eq!(plain(&program, &[]).output, expected);
    let with = laned(&program, &[], &[("MANYLANE_LANES", "8")]);
    assert_eq!((with.output.as_str(), with.reasons()), (expected, vec!["error-queue"]));
}

#[test]
fn loopback_lanes_ahead_of_a_fork_are_those_of_the_socket_whatever_its_descriptors_come_to_mean() {
    let program = build("spoilt");
    let expected = "0 shared, 0 missing\n";
    assert_eq!(plain(&program, &["copies"]).output, expected);
    let with = laned(&program, &["copies"], &[("MANYLANE_LANES", "8")]);
    assert_eq!((with.output.as_str(), with.reasons()), (expected, vec!["error-queue"]));
}
