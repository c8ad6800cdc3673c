//! Threads with lanes pause before they sleep, where they are to, and nobody else does.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use support::{build, laned, plain};

/// Turns of a program that is to pause: as many as it takes. Of one that is not to: enough for lanes and some pauses.
const UNTIL_SEEN: &str = "1000000";
const SOME: &str = "500";

const PATTERNS: [&str; 4] = ["block", "poll", "select", "epoll"];

#[test]
fn loopback_threads_with_lanes_pause_before_they_sleep() {
    let program = build("pauses");
    for pattern in PATTERNS {
        let with = laned(&program, &[pattern, "3", UNTIL_SEEN], &[("MANYLANE_LINGER", "20000")]);
        assert_eq!(with.output, "received all, pauses yes\n", "{pattern}");
    }
    // As long as suits the machine.
    let with = laned(&program, &["block", "3", UNTIL_SEEN], &[]);
    assert_eq!(with.output, "received all, pauses yes\n");
}

#[test]
fn loopback_nobody_pauses_alone_or_unasked() {
    let program = build("pauses");
    for pattern in PATTERNS {
        assert_eq!(plain(&program, &[pattern, "3", SOME]).output, "received all, pauses no\n", "{pattern}");
        let never = laned(&program, &[pattern, "3", SOME], &[("MANYLANE_LINGER", "0")]);
        assert_eq!(never.output, "received all, pauses no\n", "{pattern}");
        let alone = laned(&program, &[pattern, "1", SOME], &[("MANYLANE_LINGER", "20000")]);
        assert_eq!((alone.output.as_str(), alone.lanes()), ("received all, pauses no\n", 0), "{pattern}");
    }
}
