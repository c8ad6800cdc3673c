//! What happens to a socket with lanes: it keeps them, or becomes plain for a reason that is
//! counted, and loses nothing.

use crate::support::{build, can_run_without, run_native, run_preloaded};
use manylane_ipc::report::Reason;
use manylane_testbed::skip;

/// Runs `turns WHAT`; the reasons that were counted, and the lanes at the end.
fn run_turns(args: &[&str]) -> (Vec<&'static str>, usize) {
    let program = build("turns");
    let without = run_native(&program, args);
    let with = run_preloaded(&program, args, &[("MANYLANE_LANES", "8")]);
    assert_eq!(with.output, without.output, "{args:?}");
    (with.reasons(), with.lanes())
}

#[test]
fn loopback_what_a_lane_cannot_have_makes_a_socket_plain() {
    for what in ["passed", "exec", "signals", "multicast", "option", "reuseport", "nested-epoll"] {
        assert_eq!(run_turns(&[what]), (vec![what], 0), "{what}");
        // From the start it is the same, but for what concerns only lanes, or receivers.
        if !matches!(what, "exec" | "signals") {
            assert_eq!(run_turns(&[what, "early"]), (vec![what], 0), "{what}, early");
        }
    }
}

#[test]
fn loopback_what_is_queued_outlives_every_reason_and_keeps_its_order() {
    let program = build("turns");
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
        from_lanes += with.stolen();
    }
    // There were lanes with something in them; on a busy machine not each time.
    assert!(from_lanes > 0);
}

#[test]
fn loopback_a_socket_twice_in_an_epoll_instance_becomes_plain() {
    assert_eq!(run_turns(&["twice"]), (vec!["events"], 0));
}

#[test]
fn loopback_what_a_lane_can_have_it_has() {
    for what in ["timestamp", "device"] {
        assert_eq!(run_turns(&[what]), (vec![], 3), "{what}");
        assert_eq!(run_turns(&[what, "early"]), (vec![], 3), "{what}, early");
    }
}

#[test]
fn loopback_handlers_of_both_kinds_are_known_before_lanes() {
    assert_eq!(run_turns(&["signals", "early"]), (vec!["signals"], 0));
}

#[test]
fn loopback_a_program_started_before_there_are_lanes_takes_none_away() {
    assert_eq!(run_turns(&["exec", "early"]), (vec![], 3));
}

#[test]
fn loopback_threads_that_wait_on_a_lane_can_be_cancelled() {
    let name = "loopback_threads_that_wait_on_a_lane_can_be_cancelled";
    let why = "AddressSanitizer takes the frames that a cancelled thread left for ones in use";
    if can_run_without(&["address"], name, why) {
        assert_eq!(run_turns(&["cancel"]), (vec![], 3));
    }
}

#[test]
fn loopback_broadcasts_come_once() {
    assert_eq!(run_turns(&["broadcast"]), (vec![], 3));
}

#[test]
fn loopback_a_fork_takes_no_lane_away() {
    assert_eq!(run_turns(&["fork"]), (vec![], 3));
    assert_eq!(run_turns(&["fork", "early"]), (vec![], 3));
}

#[test]
fn netns_lanes_are_there_before_privileges_go() {
    if !skip::need_root("netns_lanes_are_there_before_privileges_go") {
        return;
    }
    assert_eq!(run_turns(&["user", "early"]), (vec![], 3));
    assert_eq!(run_turns(&["user"]), (vec![], 3));
}
