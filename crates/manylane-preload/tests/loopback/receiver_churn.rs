//! Threads that join and leave while datagrams are queued.

use crate::support::{build, run_native, run_preloaded};

const NO_REASON: [&str; 0] = [];

#[test]
fn loopback_flows_that_change_lanes_keep_their_order() {
    let program = build("receiver_churn");
    let without = run_native(&program, &["order"]);
    assert_eq!(without.output, "received 72, out of order 0\n");
    let with = run_preloaded(&program, &["order"], &[("MANYLANE_LANES", "8")]);
    assert_eq!((with.output.as_str(), with.reasons()), (without.output.as_str(), NO_REASON.to_vec()));
    assert!(with.lanes() >= 2, "{} lanes", with.lanes());
}

#[test]
fn loopback_a_flooded_lane_does_not_starve_others() {
    let program = build("receiver_churn");
    let with = run_preloaded(&program, &["flood"], &[("MANYLANE_LANES", "8")]);
    assert_eq!(with.output, "each flow was received: yes, out of order 0\n");
    assert_eq!((with.reasons(), with.lanes()), (NO_REASON.to_vec(), 2));
}
