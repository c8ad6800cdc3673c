//! Receivers that are killed or stopped, in a wait or between two, leave nothing out of reach, and
//! nobody turning round.

use crate::support::{build, for_each_at_once, run_native, run_preloaded};

/// Runs `survivors PATTERN HARM` for every pattern.
fn run_survivors(harm: &str) {
    let program = build("survivors");
    let expected = "all came once: yes, wrong 0, idle: yes\n";
    for_each_at_once(&["block", "poll", "epoll"], |pattern| {
        let args = [pattern, harm];
        assert_eq!(run_native(&program, &args).output, expected, "{args:?} without the library");
        let with = run_preloaded(&program, &args, &[("MANYLANE_LANES", "8")]);
        assert_eq!(with.output, expected, "{args:?} with the library");
        assert_eq!(with.reasons(), [""; 0], "{args:?}");
    });
}

#[test]
fn loopback_receivers_killed_in_a_wait_leave_nothing_behind() {
    run_survivors("waiting");
    run_survivors("reaped");
}

#[test]
fn loopback_receivers_killed_between_receives_leave_nothing_behind() {
    run_survivors("busy");
}

#[test]
fn loopback_receivers_that_are_stopped_come_back() {
    run_survivors("stopped");
}

#[test]
fn loopback_survivors_that_never_wait_long_recover_dead_lanes() {
    run_survivors("load");
}

#[test]
fn loopback_survivors_that_wait_in_between_recover_dead_lanes() {
    run_survivors("pauses");
}

#[test]
fn loopback_receivers_killed_under_load_leave_nothing_behind() {
    run_survivors("running");
}
