//! Servers of every pattern get lanes or stay plain, and lose no datagram in either case.

use crate::support::{Outcome, build, run_native, run_preloaded, run_until, run_until_lanes};
use manylane_ipc::report::Reason;

/// Number of datagrams that a server receives.
const DATAGRAMS: u64 = 6000;

fn run_both(pattern: &str, receivers: u64) -> Outcome {
    run_both_with(pattern, receivers, &[])
}

fn run_both_with(pattern: &str, receivers: u64, more: &[(&str, &str)]) -> Outcome {
    let program = build("server_patterns");
    let args = [pattern, &receivers.to_string(), &DATAGRAMS.to_string()];
    let expected = format!("once {DATAGRAMS} never 0 often 0 wrong 0\n");
    assert_eq!(run_native(&program, &args).output, expected, "{pattern} without the library");
    let with = run_preloaded(&program, &args, &[&[("MANYLANE_LANES", "8")], more].concat());
    assert_eq!(with.output, expected, "{pattern} with the library");
    with
}

/// Four receivers get four lanes, and each datagram reaches one of them. The four "stop" messages
/// are datagrams, too.
fn assert_lanes(pattern: &str) {
    let with = run_until_lanes(4, || {
        let with = run_both(pattern, 4);
        assert_eq!(with.reasons(), [""; 0], "{pattern}");
        assert_eq!(with.delivered(), DATAGRAMS + 4, "{pattern}");
        with
    });
    assert_eq!(with.lanes(), 4, "{pattern}");
}

fn assert_plain(pattern: &str, reason: Reason) {
    let with = run_both(pattern, 4);
    assert_eq!(with.reasons(), [reason.name()], "{pattern}");
    assert_eq!(with.lanes(), 0, "{pattern}");
}

#[test]
fn loopback_blocking_threads_get_lanes() {
    assert_lanes("block");
}

#[test]
fn loopback_threads_with_an_epoll_instance_each_get_lanes() {
    assert_lanes("level");
    assert_lanes("edge");
    assert_lanes("exclusive");
}

#[test]
fn loopback_polling_threads_get_lanes() {
    assert_lanes("poll");
    assert_lanes("select");
}

#[test]
fn loopback_forked_children_get_lanes() {
    assert_lanes("fork");
}

#[test]
fn loopback_killing_a_child_loses_no_datagrams() {
    let with = run_until_lanes(4, || {
        let with = run_both("kill", 4);
        assert_eq!((with.reasons(), with.delivered()), (vec![], DATAGRAMS + 3));
        with
    });
    assert_eq!(with.lanes(), 4);
}

#[test]
fn loopback_more_threads_than_lanes_share_them() {
    for pattern in ["block", "leave", "fork"] {
        let program = build("server_patterns");
        let args = [pattern, "12", &DATAGRAMS.to_string()];
        let run = || {
            let with = run_preloaded(&program, &args, &[("MANYLANE_LANES", "3")]);
            assert_eq!(with.output, format!("once {DATAGRAMS} never 0 often 0 wrong 0\n"), "{pattern}");
            assert_eq!(with.reasons(), [""; 0], "{pattern}");
            with
        };
        // Threads that leave early may be gone before they are due for a lane.
        let lanes = if pattern == "leave" { 1..=3 } else { 3..=3 };
        // A thread that is held up for long loses its lane.
        let with = run_until(|with| lanes.contains(&with.lanes()), run);
        assert!(lanes.contains(&with.lanes()), "{pattern}: {} lanes", with.lanes());
    }
}

#[test]
fn loopback_recvmmsg_receivers_get_lanes() {
    // A receiver that gets two "stop" messages sends one back, so more datagrams may arrive than
    // were sent at first.
    let with = run_until_lanes(4, || {
        let with = run_both("messages", 4);
        assert_eq!(with.reasons(), [""; 0]);
        assert!(with.delivered() >= DATAGRAMS + 4);
        with
    });
    assert_eq!(with.lanes(), 4);
}

#[test]
fn loopback_rx_coalescing_loses_no_datagrams() {
    for pattern in ["block", "level", "edge", "poll", "select", "fork", "messages"] {
        let run = || {
            let with = run_both_with(pattern, 4, &[("MANYLANE_RX_USECS", "1000")]);
            assert_eq!(with.reasons(), [""; 0], "{pattern}");
            with
        };
        // If a thread starts slowly, the others may already have received everything.
        let with = run_until(|with| with.lanes() >= 2, run);
        assert!((2..=4).contains(&with.lanes()), "{pattern}: {} lanes", with.lanes());
    }
}

#[test]
fn loopback_one_shot_events_make_a_socket_plain() {
    assert_plain("oneshot", Reason::Events);
}

#[test]
fn loopback_shared_epoll_instance_makes_a_socket_plain() {
    assert_plain("one-epoll", Reason::SharedEpoll);
}

#[test]
fn loopback_dispatching_threads_get_no_lanes() {
    let with = run_both("dispatch", 4);
    assert_eq!(with.lanes(), 0);
}

#[test]
fn loopback_exiting_threads_lose_no_datagrams() {
    let with = run_both("leave", 4);
    assert_eq!(with.reasons(), [""; 0]);
    // A thread that has not left yet may take a "stop", too.
    assert!((DATAGRAMS + 1..=DATAGRAMS + 4).contains(&with.delivered()), "{}", with.delivered());
}

#[test]
fn loopback_connect_with_lanes_loses_no_datagrams() {
    let with = run_both("connect", 4);
    assert_eq!(with.reasons(), ["connect"]);
}

#[test]
fn loopback_one_thread_keeps_the_programs_own_socket() {
    let with = run_both("block", 1);
    assert_eq!((with.reasons(), with.lanes()), (vec![], 0));
    assert_eq!(with.delivered(), DATAGRAMS + 1);
}
