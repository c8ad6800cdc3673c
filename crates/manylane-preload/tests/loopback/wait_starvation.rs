//! Datagrams in the lane of an absent thread are reported, even by waits that always return at once
//! because of another descriptor.

use crate::support::{build, run_native, run_preloaded, run_until_lanes};

fn assert_reported(call: &str) {
    let program = build("wait_starvation");
    for beside in ["pipe", "out", "socket"] {
        let args = [call, beside];
        assert_eq!(run_native(&program, &args).output, "20 of 20\n", "{args:?}");
        let with = run_until_lanes(3, || {
            let with = run_preloaded(&program, &args, &[("MANYLANE_LANES", "8")]);
            assert_eq!((with.output.as_str(), with.reasons()), ("20 of 20\n", vec![]), "{args:?}");
            with
        });
        assert_eq!(with.lanes(), 3, "{args:?}");
        assert_eq!(with.main_delivered_from_other_lanes(), 20, "{args:?}");
    }
}

#[test]
fn loopback_poll_reports_other_lanes_beside_ready_descriptors() {
    assert_reported("poll");
    assert_reported("ppoll");
}

#[test]
fn loopback_select_reports_lanes_beside_ready_descriptors() {
    assert_reported("select");
    assert_reported("pselect");
}

#[test]
fn loopback_epoll_reports_other_lanes_beside_ready_descriptors() {
    assert_reported("epoll");
}

#[test]
fn loopback_epoll_wait_for_one_event_starves_no_descriptor() {
    assert_reported("one");
}

/// If an epoll instance has more sockets than its table holds, the last one becomes plain, and the
/// datagrams of its lanes are still reported.
#[test]
fn loopback_socket_beyond_the_epoll_table_keeps_its_events() {
    let program = build("epoll_many_sockets");
    let all = "40 of 40\nthen 0, later 1, out 0\n";
    // Each of two lanes held 20 datagrams. One is the program's own socket, which does not count as
    // another lane once the socket is plain.
    for (sockets, reasons, helped) in [("31", vec![], 40), ("32", vec!["full"], 20), ("40", vec!["full"], 20)]
    {
        assert_eq!(run_native(&program, &[sockets]).output, all, "{sockets}");
        let with = run_preloaded(&program, &[sockets], &[("MANYLANE_LANES", "8")]);
        assert_eq!((with.output.as_str(), with.reasons()), (all, reasons), "{sockets}");
        assert_eq!(with.main_delivered_from_other_lanes(), helped, "{sockets}");
    }
}

#[test]
fn loopback_other_lanes_do_not_starve_one_event_waits() {
    let program = build("epoll_fairness");
    let all = "3\n3\n3\n";
    assert_eq!(run_native(&program, &[]).output, all);
    let with = run_preloaded(&program, &[], &[("MANYLANE_LANES", "8")]);
    assert_eq!((with.output.as_str(), with.reasons()), (all, vec![]));
}
