//! Who dies in the middle of a change leaves it to the others, at whatever step: they lose nothing,
//! and finish it.
//!
//! The library dies where it is told only in builds with debug assertions.
#![cfg(debug_assertions)]
use crate::support::{Outcome, build, for_each_at_once, run_preloaded};
use manylane_ipc::report::Reason;

const PATTERNS: [&str; 3] = ["block", "poll", "epoll"];

/// Runs `heirs PATTERN WHAT` with a death at `point`.
fn run_heirs(pattern: &str, what: &str, point: &str, died: u32) -> Outcome {
    let program = build("heirs");
    let vars = [("MANYLANE_LANES", "8"), ("MANYLANE_TEST_DIE_AT", point)];
    let with = run_preloaded(&program, &[pattern, what], &vars);
    let expected = format!("all came once: yes, wrong 0, died {died}\n");
    assert_eq!(with.output, expected, "{pattern} {what} {point}");
    with
}

#[test]
fn loopback_who_dies_while_lanes_are_given_has_heirs() {
    for_each_at_once(&PATTERNS, |pattern| {
        for point in ["owner named", "lanes given", "first set"] {
            let with = run_heirs(pattern, "come", point, 1);
            assert_eq!(with.reasons(), [""; 0], "{pattern} {point}");
            // Who had to wait for long on a busy machine may just have lost its own.
            assert!(with.lanes() >= 1, "{pattern} {point}");
        }
    });
}

#[test]
fn loopback_who_dies_while_the_lane_of_the_dead_is_left_has_heirs() {
    for_each_at_once(&PATTERNS, |pattern| {
        for point in ["lane left", "steered past"] {
            let with = run_heirs(pattern, "go", point, 2);
            assert_eq!(with.reasons(), [""; 0], "{pattern} {point}");
        }
    });
}

/// May take 5 s: each of 36 programs sends until the survivors have finished.
#[test]
fn loopback_who_dies_while_a_socket_falls_back_has_heirs() {
    for what in ["fall", "own"] {
        for_each_at_once(&PATTERNS, |pattern| {
            for point in ["falling", "steered to one", "cut off", "retired", "nobody's", "plain"] {
                let with = run_heirs(pattern, what, point, u32::from(what == "own"));
                assert_eq!(with.count(Reason::ErrorQueue), 1, "{pattern} {what} {point}");
                assert_eq!(with.reasons(), ["error-queue"], "{pattern} {what} {point}");
                assert_eq!(with.lanes(), 0, "{pattern} {what} {point}");
            }
        });
    }
}
