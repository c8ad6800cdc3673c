//! Prefetched datagrams are returned as the kernel would have: by any call, in order, after a fork,
//! a fallback or the death of the receiver that prefetched them.

use crate::support::{FORCES_PREFETCH, Outcome, build, run_native, run_preloaded};

const VARS: [(&str, &str); 3] =
    [("MANYLANE_LANES", "8"), ("MANYLANE_TEST_PREFETCH", "1"), ("MANYLANE_RX_USECS", "0")];

fn assert_same_output(program: &str, args: &[&str]) -> Outcome {
    let program = build(program);
    let without = run_native(&program, args);
    let with = run_preloaded(&program, args, &VARS);
    assert_eq!(with.output, without.output, "{args:?}");
    with
}

/// Runs `prefetch CASE`, in which one call receives several datagrams.
fn run_prefetch(case: &str, reasons: &[&str]) {
    let with = assert_same_output("prefetch", &[case]);
    assert_eq!(with.reasons(), reasons, "{case}");
    assert!(with.output.contains("twice 0, out of order 0\nlost 0\n"), "{case}: {}", with.output);
    assert!(!FORCES_PREFETCH || with.calls() < with.delivered(), "{case}: {} calls", with.calls());
}

#[test]
fn loopback_prefetched_datagrams_are_returned_by_any_call() {
    run_prefetch("calls", &[]);
}

#[test]
fn loopback_prefetched_datagrams_are_inherited_by_fork() {
    run_prefetch("fork", &[]);
}

#[test]
fn loopback_prefetched_datagrams_survive_fallback() {
    run_prefetch("fallback", &["option"]);
    run_prefetch("recv-only", &["option"]);
}

#[test]
fn loopback_prefetched_datagrams_survive_their_receiver() {
    run_prefetch("kill", &[]);
}

#[test]
fn loopback_signal_handlers_receive_prefetched_datagrams() {
    run_prefetch("handler", &[]);
}
