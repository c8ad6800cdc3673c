//! Receivers that are killed or stopped, in a wait or between two, strand no datagrams, and make no
//! other receiver spin.
//!
//! Some tests take 5 to 7 s: each pattern runs without the library and with it, waits for its
//! processes to stop, and sends at a pace that the receivers keep up with.

use crate::support::{build, for_each_at_once, run_native, run_preloaded};

/// Runs `receiver_death PATTERN FAULT` for every pattern.
fn run_receiver_death(fault: &str) {
    let program = build("receiver_death");
    let expected = "all received once: yes, wrong 0, idle: yes\n";
    for_each_at_once(&["block", "poll", "epoll"], |pattern| {
        let args = [pattern, fault];
        assert_eq!(run_native(&program, &args).output, expected, "{args:?} without the library");
        let with = run_preloaded(&program, &args, &[("MANYLANE_LANES", "8")]);
        assert_eq!(with.output, expected, "{args:?} with the library");
        assert_eq!(with.reasons(), [""; 0], "{args:?}");
    });
}

#[test]
fn loopback_killing_waiting_receivers_loses_no_datagrams() {
    run_receiver_death("waiting");
    run_receiver_death("reaped");
}

#[test]
fn loopback_killing_receivers_between_calls_loses_no_datagrams() {
    run_receiver_death("busy");
}

#[test]
fn loopback_stopped_receivers_resume() {
    run_receiver_death("stopped");
}

#[test]
fn loopback_busy_receivers_recover_dead_lanes() {
    run_receiver_death("load");
}

#[test]
fn loopback_waiting_receivers_recover_dead_lanes() {
    run_receiver_death("pauses");
}

#[test]
fn loopback_killed_receivers_lose_no_queued_datagrams() {
    run_receiver_death("running");
}
