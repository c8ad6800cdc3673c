//! Replies that are kept to be sent together arrive exactly once, in order and byte by byte,
//! whatever the thread that kept them does next, and whatever becomes of it.
//!
//! Prefetching can be forced only in builds with debug assertions.
#![cfg(debug_assertions)]
use crate::support::{Outcome, build, run_native, run_preloaded};
use manylane_ipc::report::Reason;
use manylane_testbed::skip;

const VARS: [(&str, &str); 3] =
    [("MANYLANE_LANES", "8"), ("MANYLANE_TEST_PREFETCH", "1"), ("MANYLANE_RX_USECS", "0")];

fn replies(case: &str) -> Outcome {
    let program = build("replies");
    let without = run_native(&program, &[case]);
    let with = run_preloaded(&program, &[case], &VARS);
    assert_eq!(with.output, without.output, "{case}");
    let (sent, calls) = with.sent();
    assert!(calls < sent, "{case}: {calls} calls for {sent} replies");
    with
}

fn run_all(cases: &[&str]) {
    for case in cases {
        assert_eq!(replies(case).reasons(), [""; 0], "{case}");
    }
}

#[test]
fn loopback_what_was_kept_goes_out_before_the_thread_waits() {
    run_all(&[
        "poll", "ppoll", "select", "pselect", "epoll", "pwait", "pwait2", "read", "readv", "recv", "recvmmsg",
    ]);
}

#[test]
fn loopback_kept_replies_leave_before_another_socket_is_used() {
    run_all(&["spin", "other-poll", "other-epoll", "learn-epoll"]);
}

#[test]
fn loopback_what_was_kept_goes_out_where_the_thread_wants_no_more() {
    run_all(&["own-epoll", "refused"]);
}

#[test]
fn loopback_what_was_kept_goes_out_before_the_thread_sleeps() {
    run_all(&["sleep", "usleep", "nanosleep", "clock"]);
}

#[test]
fn loopback_what_was_kept_goes_out_before_what_others_could_see() {
    run_all(&[
        "write",
        "send",
        "client",
        "sendmmsg",
        "other",
        "errors",
        "fork",
        "spawn",
        "option",
        "setsockopt",
    ]);
}

#[test]
fn loopback_what_was_kept_goes_out_before_a_descriptor_changes() {
    run_all(&["close", "range", "connect", "shutdown", "dup2", "dup3"]);
}

#[test]
fn loopback_what_was_kept_goes_out_when_the_thread_ends() {
    run_all(&["thread", "cancel", "closed"]);
}

#[test]
fn loopback_what_was_kept_goes_out_when_the_process_ends() {
    run_all(&["exit", "_exit", "quick", "exec"]);
}

#[test]
fn loopback_kept_replies_of_absent_and_dead_threads_leave() {
    run_all(&["look", "die"]);
}

#[test]
fn loopback_what_was_kept_goes_out_before_a_fall() {
    assert_eq!(replies("fall").reasons(), ["option"]);
    assert_eq!(replies("ioctl").reasons(), ["ioctl"]);
}

#[test]
fn netns_a_reply_that_fails_is_told_with_the_next_one() {
    if !skip::need_root("netns_a_reply_that_fails_is_told_with_the_next_one") {
        return;
    }
    let program = build("replies");
    let with = run_preloaded(&program, &["error"], &VARS);
    assert_eq!(with.output, "then Network is unreachable\nthen sent\n");
    assert!(with.count(Reason::ReplyFailed) > 0);
    assert_eq!(with.reasons(), ["reply-failed"]);
}
