//! Batched replies arrive exactly once, in order and byte by byte, whatever the thread that batched
//! them does next, and even if it dies.

use crate::support::{FORCES_PREFETCH, Outcome, build, run_native, run_preloaded};
use manylane_ipc::report::Reason;
use manylane_testbed::skip;

const VARS: [(&str, &str); 3] =
    [("MANYLANE_LANES", "8"), ("MANYLANE_TEST_PREFETCH", "1"), ("MANYLANE_RX_USECS", "0")];

fn run_replies(case: &str) -> Outcome {
    let program = build("reply_batching");
    let without = run_native(&program, &[case]);
    let with = run_preloaded(&program, &[case], &VARS);
    assert_eq!(with.output, without.output, "{case}");
    let (sent, calls) = with.sent();
    assert!(!FORCES_PREFETCH || calls < sent, "{case}: {calls} calls for {sent} replies");
    with
}

fn run_all(cases: &[&str]) {
    for case in cases {
        assert_eq!(run_replies(case).reasons(), [""; 0], "{case}");
    }
}

#[test]
fn loopback_batched_replies_are_sent_before_a_wait() {
    run_all(&[
        "poll", "ppoll", "select", "pselect", "epoll", "pwait", "pwait2", "read", "readv", "recv", "recvmmsg",
    ]);
}

#[test]
fn loopback_batched_replies_leave_before_use_of_another_socket() {
    run_all(&["spin", "other-poll", "other-epoll", "learn-epoll"]);
}

#[test]
fn loopback_batched_replies_are_sent_when_receiving_stops() {
    run_all(&["own-epoll", "refused"]);
}

#[test]
fn loopback_batched_replies_are_sent_before_a_sleep() {
    run_all(&["sleep", "usleep", "nanosleep", "clock"]);
}

#[test]
fn loopback_batched_replies_leave_before_other_visible_calls() {
    run_all(&[
        "write",
        "send",
        "client",
        "sendmmsg",
        "other",
        "errors",
        "fork",
        "spawn",
        "vfork",
        "option",
        "setsockopt",
    ]);
}

#[test]
fn loopback_batched_replies_leave_before_a_descriptor_changes() {
    run_all(&["close", "range", "connect", "shutdown", "dup2", "dup3"]);
}

#[test]
fn loopback_batched_replies_are_sent_at_thread_exit() {
    run_all(&["thread", "cancel", "closed"]);
}

#[test]
fn loopback_batched_replies_are_sent_at_process_exit() {
    run_all(&["exit", "_exit", "quick", "exec"]);
}

#[test]
fn loopback_batched_replies_of_dead_threads_are_sent() {
    run_all(&["flush", "kill"]);
}

#[test]
fn loopback_batched_replies_are_sent_before_fallback() {
    assert_eq!(run_replies("fallback").reasons(), ["option"]);
    assert_eq!(run_replies("ioctl").reasons(), ["ioctl"]);
}

#[test]
#[cfg_attr(not(debug_assertions), ignore = "needs MANYLANE_TEST_PREFETCH, which release builds ignore")]
fn netns_a_failed_batched_reply_is_reported_by_the_next_send() {
    let name = "netns_a_failed_batched_reply_is_reported_by_the_next_send";
    // Its program unshares its network namespace.
    if !skip::need_root(name) || !skip::need_kernel(name, (5, 14), "lanes after unshare(2)") {
        return;
    }
    let program = build("reply_batching");
    let with = run_preloaded(&program, &["error"], &VARS);
    assert_eq!(with.output, "then Network is unreachable\nthen sent\n");
    assert!(with.count(Reason::ReplyFailed) > 0);
    assert_eq!(with.reasons(), ["reply-failed"]);
}
