//! Threads with lanes delay before they sleep if they are configured to, and no other threads do.

use crate::support::{build, run_native, run_preloaded};

/// Max rounds of a program that stops once it has delayed, and rounds of one that must not delay:
/// enough to get lanes, and to show delays if there were any.
const ROUNDS_MAX: &str = "1000000";
const ROUNDS_FEW: &str = "500";

const PATTERNS: [&str; 4] = ["block", "poll", "select", "epoll"];

#[test]
fn loopback_threads_with_lanes_coalesce_rx() {
    let program = build("rx_coalesce");
    for pattern in PATTERNS {
        let with = run_preloaded(&program, &[pattern, "3", ROUNDS_MAX], &[("MANYLANE_RX_USECS", "20000")]);
        assert_eq!(with.output, "received all, delays yes\n", "{pattern}");
    }
}

#[test]
fn loopback_rx_coalescing_needs_several_lanes_and_a_delay() {
    let program = build("rx_coalesce");
    for pattern in PATTERNS {
        assert_eq!(
            run_native(&program, &[pattern, "3", ROUNDS_FEW]).output,
            "received all, delays no\n",
            "{pattern}"
        );
        let never = run_preloaded(&program, &[pattern, "3", ROUNDS_FEW], &[("MANYLANE_RX_USECS", "0")]);
        assert_eq!(never.output, "received all, delays no\n", "{pattern}");
        let alone = run_preloaded(&program, &[pattern, "1", ROUNDS_FEW], &[("MANYLANE_RX_USECS", "20000")]);
        assert_eq!((alone.output.as_str(), alone.lanes()), ("received all, delays no\n", 0), "{pattern}");
    }
}
