//! Replies that a thread has kept to be sent together leave by others' doing where it computes from
//! then on, also where nothing is left that these could take from it.
//!
//! Prefetching can be forced only in builds with debug assertions.
#![cfg(debug_assertions)]
use crate::support::{build, run_native, run_preloaded};

fn assert_replies_flushed(case: &str) {
    let program = build("looks");
    let without = run_native(&program, &[case]);
    let vars = [("MANYLANE_LANES", "8"), ("MANYLANE_TEST_PREFETCH", "1"), ("MANYLANE_RX_USECS", "0")];
    let with = run_preloaded(&program, &[case], &vars);
    assert_eq!(with.output, without.output, "{case}");
    assert_eq!(with.reasons(), [""; 0], "{case}");
    let (sent, calls) = with.sent();
    assert!(calls < sent, "{case}: {calls} calls for {sent} replies");
}

#[test]
fn loopback_who_waits_looks_after_what_others_keep() {
    assert_replies_flushed("receives");
    assert_replies_flushed("polls");
}

#[test]
fn loopback_who_has_no_lane_looks_after_what_others_keep() {
    assert_replies_flushed("guest");
}

#[test]
fn loopback_who_never_waits_looks_after_what_others_keep() {
    assert_replies_flushed("busy");
}
