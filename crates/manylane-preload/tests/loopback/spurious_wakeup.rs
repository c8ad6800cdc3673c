//! Waits that return at once although no datagram is queued do not make a thread spin.

use crate::support::{build, build_library, library, run_preloaded};

/// Runs `spurious_wakeup CASE` with a second preloaded library, which counts the calls of ours.
fn run_spurious_wakeup(case: &str) {
    let program = build("spurious_wakeup");
    let both = format!("{}:{}", library().display(), build_library("count_calls").display());
    let with = run_preloaded(&program, &[case], &[("MANYLANE_LANES", "8"), ("LD_PRELOAD", &both)]);
    assert_eq!(with.output, "waits: yes\nprogram: yes\n", "{case}");
    assert_eq!(with.reasons(), [""; 0], "{case}");
    // A thread that was held up for long may have lost its lane by then.
    assert!(with.lanes() >= 1, "{case}");
}

#[test]
fn loopback_o_nonblock_set_by_raw_syscall_does_not_spin() {
    run_spurious_wakeup("nonblock");
}

#[test]
fn loopback_spurious_lane_events_do_not_spin() {
    run_spurious_wakeup("laneless");
    run_spurious_wakeup("poll");
    run_spurious_wakeup("epoll");
}
