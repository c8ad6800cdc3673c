//! A process that dies in the middle of a change, at any step: the others finish the change, and
//! lose nothing.
//!
//! Failpoints exist only in builds with debug assertions.
#![cfg(debug_assertions)]
use crate::support::{Outcome, build, for_each_at_once, run_preloaded};
use manylane_ipc::report::Reason;

const PATTERNS: [&str; 3] = ["block", "poll", "epoll"];

/// Runs `crash_recovery PATTERN WHAT` with a death at `point`.
fn run_crash_recovery(pattern: &str, what: &str, point: &str, died: u32) -> Outcome {
    let program = build("crash_recovery");
    let vars = [("MANYLANE_LANES", "8"), ("MANYLANE_TEST_DIE_AT", point)];
    let with = run_preloaded(&program, &[pattern, what], &vars);
    let expected = format!("all received once: yes, wrong 0, died {died}\n");
    assert_eq!(with.output, expected, "{pattern} {what} {point}");
    with
}

#[test]
fn loopback_death_while_lanes_are_assigned_is_recovered() {
    for_each_at_once(&PATTERNS, |pattern| {
        for point in ["owner stored", "lanes assigned", "drain order set"] {
            let with = run_crash_recovery(pattern, "steer", point, 1);
            assert_eq!(with.reasons(), [""; 0], "{pattern} {point}");
            // On a busy machine, a thread that had to wait for long may just have lost its lane.
            assert!(with.lanes() >= 1, "{pattern} {point}");
        }
    });
}

#[test]
fn loopback_death_during_recovery_of_a_dead_lane_is_recovered() {
    for_each_at_once(&PATTERNS, |pattern| {
        for point in ["lane vacated", "steered away"] {
            let with = run_crash_recovery(pattern, "leave", point, 2);
            assert_eq!(with.reasons(), [""; 0], "{pattern} {point}");
        }
    });
}

/// May take 5 s: each of 36 programs sends until the survivors have finished.
#[test]
fn loopback_death_during_fallback_is_recovered() {
    for what in ["fallback", "own-fallback"] {
        for_each_at_once(&PATTERNS, |pattern| {
            for point in [
                "fallback begun",
                "steered to own socket",
                "lane retired",
                "retired lanes stored",
                "members detached",
                "plain",
            ] {
                let with = run_crash_recovery(pattern, what, point, u32::from(what == "own-fallback"));
                assert_eq!(with.count(Reason::ErrorQueue), 1, "{pattern} {what} {point}");
                assert_eq!(with.reasons(), ["error-queue"], "{pattern} {what} {point}");
                assert_eq!(with.lanes(), 0, "{pattern} {what} {point}");
            }
        });
    }
}

/// The bound on waits is the library's: the program must not see that it ended one.
#[test]
fn loopback_death_of_a_second_receiver_ends_no_other_wait() {
    let vars = [("MANYLANE_LANES", "8"), ("MANYLANE_TEST_DIE_AT", "waits bounded")];
    let with = run_preloaded(&build("bounded_wait"), &[], &vars);
    assert_eq!(with.output, "killed: yes, received: yes\n");
}

#[test]
fn loopback_a_fork_during_a_change_copies_no_socket() {
    let vars = [("MANYLANE_LANES", "8"), ("MANYLANE_TEST_END_AT", "fallback begun")];
    let with = run_preloaded(&build("fork_during_change"), &[], &vars);
    assert_eq!(with.output, "1\n");
    assert_eq!(with.reasons(), ["error-queue"], "the change was begun");
}
