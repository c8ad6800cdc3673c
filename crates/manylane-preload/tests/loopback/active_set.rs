//! Of the threads that share a CPU, one is active, unless their work sleeps.

use crate::support::{Outcome, build, run_preloaded, run_until_lanes};

const PATTERNS: [&str; 2] = ["block", "epoll"];

/// Parses the program's summary: which threads answered in the end, and the number of requests
/// before that and after it.
fn parse_summary(with: &Outcome) -> (&str, u64, u64) {
    let mut words = with.output.split_whitespace();
    let word = words.next().unwrap();
    let mut number = || words.next().unwrap().parse().unwrap();
    (word, number(), number())
}

#[test]
fn loopback_threads_on_one_cpu_share_one_active_thread() {
    let program = build("active_set");
    for pattern in PATTERNS {
        let with = run_until_lanes(4, || run_preloaded(&program, &["none", pattern], &[]));
        let (word, before, after) = parse_summary(&with);
        // Each thread has a lane nevertheless.
        assert_eq!((word, with.lanes(), with.reasons()), ("one", 4, vec![]), "{pattern}");
        // One call receives many of the datagrams of a burst.
        let calls = with.calls();
        assert!(calls < before + after / 2, "{pattern}: {calls} calls, {before} and {after} datagrams");
    }
}

/// Takes 7 s: 4000 requests per pattern, one at a time, with a sleep of half a millisecond each.
#[test]
fn loopback_threads_whose_work_sleeps_stay_active() {
    let program = build("active_set");
    for pattern in PATTERNS {
        let with = run_until_lanes(4, || run_preloaded(&program, &["sleep", pattern], &[]));
        let (word, _, _) = parse_summary(&with);
        assert_eq!((word, with.lanes(), with.reasons()), ("all", 4, vec![]), "{pattern}");
        // Nothing is prefetched by a thread that may be away for long.
        assert_eq!(with.calls(), with.delivered(), "{pattern}");
        assert_all_lanes_used(&with, pattern, 0);
    }
}

#[test]
fn loopback_threads_become_active_when_work_starts_to_sleep() {
    let program = build("active_set");
    for pattern in PATTERNS {
        let with = run_until_lanes(4, || run_preloaded(&program, &["later", pattern], &[]));
        let (word, before, _) = parse_summary(&with);
        assert_eq!((word, with.lanes(), with.reasons()), ("one", 4, vec![]), "{pattern}");
        assert_all_lanes_used(&with, pattern, before);
    }
}

/// Three of the four lanes received about a quarter each of the bursts, as the flows are spread, in
/// addition to the `before` requests.
fn assert_all_lanes_used(with: &Outcome, pattern: &str, before: u64) {
    let mut own = with.own();
    own.sort_unstable();
    let others: u64 = own.iter().take(3).sum();
    assert!(others > 1000 + before, "{pattern}: {own:?}, {before} before");
}
