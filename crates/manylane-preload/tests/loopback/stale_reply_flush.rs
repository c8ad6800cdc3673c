//! If a thread batches replies and then only computes, other threads send them, even if its lane
//! has no datagrams left for them.

use crate::support::{FORCES_PREFETCH, build, run_native, run_preloaded};

fn assert_replies_flushed(case: &str) {
    let program = build("stale_reply_flush");
    let without = run_native(&program, &[case]);
    let vars = [("MANYLANE_LANES", "8"), ("MANYLANE_TEST_PREFETCH", "1"), ("MANYLANE_RX_USECS", "0")];
    let with = run_preloaded(&program, &[case], &vars);
    assert_eq!(with.output, without.output, "{case}");
    assert_eq!(with.reasons(), [""; 0], "{case}");
    let (sent, calls) = with.sent();
    assert!(!FORCES_PREFETCH || calls < sent, "{case}: {calls} calls for {sent} replies");
}

#[test]
fn loopback_waiting_threads_flush_stale_replies() {
    assert_replies_flushed("receives");
    assert_replies_flushed("polls");
}

#[test]
fn loopback_laneless_threads_flush_stale_replies() {
    assert_replies_flushed("laneless");
}

#[test]
fn loopback_busy_threads_flush_stale_replies() {
    assert_replies_flushed("busy");
}
