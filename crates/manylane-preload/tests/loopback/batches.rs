//! Datagrams that are taken ahead, many with one call, are handed out as the kernel would have: to
//! whom, in which order, by which call, whoever dies, forks or falls back meanwhile.
//!
//! Prefetching can be forced only in builds with debug assertions.
#![cfg(debug_assertions)]
use crate::support::{Outcome, build, run_native, run_preloaded};

const VARS: [(&str, &str); 3] =
    [("MANYLANE_LANES", "8"), ("MANYLANE_TEST_PREFETCH", "1"), ("MANYLANE_RX_USECS", "0")];

fn assert_same_output(program: &str, args: &[&str]) -> Outcome {
    let program = build(program);
    let without = run_native(&program, args);
    let with = run_preloaded(&program, args, &VARS);
    assert_eq!(with.output, without.output, "{args:?}");
    with
}

/// Runs `batches CASE`: one call brought several datagrams.
fn batches(case: &str, reasons: &[&str]) {
    let with = assert_same_output("batches", &[case]);
    assert_eq!(with.reasons(), reasons, "{case}");
    assert!(with.output.contains("twice 0, out of order 0\nlost 0\n"), "{case}: {}", with.output);
    assert!(with.calls() < with.received(), "{case}: {} calls", with.calls());
}

#[test]
fn loopback_what_was_taken_ahead_is_handed_out_by_any_call() {
    batches("calls", &[]);
}

#[test]
fn loopback_what_was_taken_ahead_is_there_for_a_child() {
    batches("fork", &[]);
}

#[test]
fn loopback_what_was_taken_ahead_outlives_a_fall() {
    batches("fall", &["option"]);
    batches("blunt", &["option"]);
}

#[test]
fn loopback_what_was_taken_ahead_outlives_who_took_it() {
    batches("die", &[]);
}

#[test]
fn loopback_handlers_that_receive_find_what_was_taken_ahead() {
    batches("handler", &[]);
}
