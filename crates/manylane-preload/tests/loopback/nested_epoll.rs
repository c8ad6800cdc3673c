//! Epoll instances that are polled as descriptors report the datagrams that are queued in lanes,
//! once for each poll.

use crate::support::{build, run_native, run_preloaded};
use manylane_ipc::report::Reason;

const WAIT_CALLS: [&str; 5] = ["poll", "ppoll", "select", "pselect", "epoll"];
const VARS: [&[(&str, &str)]; 3] = [
    &[("MANYLANE_LANES", "8")],
    &[("MANYLANE_LANES", "8"), ("MANYLANE_RX_USECS", "0")],
    &[("MANYLANE_LANES", "8"), ("MANYLANE_TEST_PREFETCH", "1")],
];

/// Runs `nested_epoll WAY WHAT` with each wait call: the output is `expected` natively and
/// preloaded.
fn assert_reported(what: &str, expected: &str) {
    let program = build("nested_epoll");
    for way in WAIT_CALLS {
        let args = [way, what];
        assert_eq!(run_native(&program, &args).output, expected, "{args:?}");
        let mut from_lanes = 0;
        for vars in VARS {
            let with = run_preloaded(&program, &args, vars);
            assert_eq!(with.output, expected, "{args:?} with {vars:?}");
            assert_eq!(with.count(Reason::NestedEpoll), 1, "{args:?} with {vars:?}");
            from_lanes += with.delivered_from_other_lanes();
        }
        assert!(from_lanes > 0, "{args:?}");
    }
}

const ONE_BY_ONE: &str = "reported 28 times, received 28\nthen 0, 0, 0\nlater 1, 1\n";

#[test]
fn loopback_nested_epoll_reports_queued_datagrams() {
    assert_reported("level", ONE_BY_ONE);
    assert_reported("one", ONE_BY_ONE);
}

#[test]
fn loopback_edge_triggered_nested_epoll_reports_datagrams() {
    assert_reported("edge", "reported 1 times, received 28\nthen 0, 0, 0\nlater 1, 1\n");
}

#[test]
fn loopback_nested_epoll_reports_a_socket_added_later() {
    assert_reported("late", &format!("before: 0\n{ONE_BY_ONE}"));
    assert_reported("blocked", &format!("a blocked wait: 1\n{ONE_BY_ONE}"));
}

/// Not by an outer epoll instance: it cannot report leftovers in memory, of which the kernel knows
/// nothing.
#[test]
fn loopback_nested_epoll_polls_report_prefetched_datagrams() {
    let program = build("nested_epoll");
    for way in &WAIT_CALLS[..4] {
        let args = [way, "seccomp"];
        assert_eq!(run_native(&program, &args).output, ONE_BY_ONE, "{args:?}");
        for vars in VARS {
            assert_eq!(run_preloaded(&program, &args, vars).output, ONE_BY_ONE, "{args:?} with {vars:?}");
        }
    }
}
