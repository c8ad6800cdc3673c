//! Calls that change a socket with lanes: it keeps its lanes, or becomes plain for a reason that is
//! counted, and no datagram is lost.

use crate::support::{build, can_run_without, run_native, run_preloaded, run_until};
use manylane_ipc::report::Reason;
use manylane_testbed::skip;

/// Runs `fallback_reasons WHAT`; returns the counted reasons and the final number of lanes.
fn run_fallback(args: &[&str]) -> (Vec<&'static str>, usize) {
    let program = build("fallback_reasons");
    let without = run_native(&program, args);
    let run = || {
        let with = run_preloaded(&program, args, &[("MANYLANE_LANES", "8")]);
        assert_eq!(with.output, without.output, "{args:?}");
        with
    };
    // All three threads have lanes or none, unless one was held up for long and lost its own.
    let with = run_until(|with| [0, 3].contains(&with.lanes()), run);
    (with.reasons(), with.lanes())
}

#[test]
fn loopback_unsupported_changes_make_a_socket_plain() {
    for what in ["passed", "exec", "signals", "multicast", "option", "reuseport", "nested-epoll"] {
        assert_eq!(run_fallback(&[what]), (vec![what], 0), "{what}");
        // Before there are lanes, the result is the same, except for changes that concern only
        // lanes or receivers.
        if !matches!(what, "exec" | "signals") {
            assert_eq!(run_fallback(&[what, "early"]), (vec![what], 0), "{what}, early");
        }
    }
}

#[test]
fn loopback_queued_datagrams_survive_every_fallback_in_order() {
    let program = build("fallback_reasons");
    let mut from_lanes = 0;
    for what in [
        "connect",
        "reuseport",
        "option",
        "ioctl",
        "multicast",
        "error-queue",
        "passed",
        "exec",
        "shared-epoll",
        "nested-epoll",
        "events",
        "signals",
        "full",
        "shutdown",
    ] {
        let args = [what, "queued"];
        let without = run_native(&program, &args);
        assert!(without.output.contains("out of order 0\n"), "{what}: {}", without.output);
        let with = run_preloaded(&program, &args, &[("MANYLANE_LANES", "8")]);
        assert_eq!(with.output, without.output, "{what}");
        assert_eq!((with.reasons(), with.lanes()), (vec![what], 0), "{what}");
        assert_eq!(with.count(Reason::ALL.into_iter().find(|at| at.name() == what).unwrap()), 1, "{what}");
        from_lanes += with.delivered_from_other_lanes();
    }
    // Some lanes held datagrams; on a busy machine not in every run.
    assert!(from_lanes > 0);
}

#[test]
fn loopback_a_socket_twice_in_an_epoll_instance_becomes_plain() {
    assert_eq!(run_fallback(&["twice"]), (vec!["events"], 0));
}

#[test]
fn loopback_supported_options_keep_lanes() {
    for what in ["timestamp", "device"] {
        assert_eq!(run_fallback(&[what]), (vec![], 3), "{what}");
        assert_eq!(run_fallback(&[what, "early"]), (vec![], 3), "{what}, early");
    }
}

#[test]
fn loopback_mixed_sa_restart_handlers_prevent_lanes() {
    assert_eq!(run_fallback(&["signals", "early"]), (vec!["signals"], 0));
}

#[test]
fn loopback_exec_before_lanes_keeps_lanes() {
    assert_eq!(run_fallback(&["exec", "early"]), (vec![], 3));
}

#[test]
fn loopback_pthread_cancel_ends_waits_on_lanes() {
    let name = "loopback_pthread_cancel_ends_waits_on_lanes";
    let why = "AddressSanitizer takes the frames that a cancelled thread left for ones in use";
    if can_run_without(&["address"], name, why) {
        assert_eq!(run_fallback(&["cancel"]), (vec![], 3));
    }
}

#[test]
fn loopback_broadcasts_are_received_once() {
    assert_eq!(run_fallback(&["broadcast"]), (vec![], 3));
}

#[test]
fn loopback_fork_keeps_lanes() {
    assert_eq!(run_fallback(&["fork"]), (vec![], 3));
    assert_eq!(run_fallback(&["fork", "early"]), (vec![], 3));
}

#[test]
fn netns_lanes_survive_setuid() {
    if !skip::need_root("netns_lanes_survive_setuid") {
        return;
    }
    assert_eq!(run_fallback(&["user", "early"]), (vec![], 3));
    assert_eq!(run_fallback(&["user"]), (vec![], 3));
}
