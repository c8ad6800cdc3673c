//! Receivers that are killed or stopped, in a wait or between two, leave nothing out of reach, and nobody turning round.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use support::{build, laned, plain};

/// Runs `survivors PATTERN HARM` for every pattern.
fn survive(harm: &str) {
    let program = build("survivors");
    let expected = "all came once: yes, wrong 0, idle: yes\n";
    for pattern in ["block", "poll", "epoll"] {
        let args = [pattern, harm];
        assert_eq!(plain(&program, &args).output, expected, "{args:?} without the library");
        let with = laned(&program, &args, &[("MANYLANE_LANES", "8")]);
        assert_eq!(with.output, expected, "{args:?} with the library");
        assert_eq!(with.reasons(), [""; 0], "{args:?}");
    }
}

#[test]
fn loopback_receivers_killed_in_a_wait_leave_nothing_behind() {
    survive("waiting");
    survive("reaped");
}

#[test]
fn loopback_receivers_killed_between_two_receives_leave_nothing_behind() {
    survive("busy");
}

#[test]
fn loopback_receivers_that_are_stopped_come_back() {
    survive("stopped");
}

#[test]
fn loopback_what_the_killed_leave_is_found_by_those_who_never_wait_long() {
    survive("load");
}

#[test]
fn loopback_what_the_killed_leave_is_found_by_those_who_wait_in_between() {
    survive("pauses");
}

#[test]
fn loopback_receivers_killed_under_load_leave_nothing_behind() {
    survive("running");
}
