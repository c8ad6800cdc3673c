//! Of threads that share a processor one is awake, unless their work sleeps.

use crate::support::{Outcome, build, run_preloaded};

const PATTERNS: [&str; 2] = ["block", "epoll"];

/// Whether one thread came to answer all, questions until then, and behind that.
fn parse_summary(with: &Outcome) -> (&str, u64, u64) {
    let mut words = with.output.split_whitespace();
    let word = words.next().unwrap();
    let mut number = || words.next().unwrap().parse().unwrap();
    (word, number(), number())
}

#[test]
fn loopback_one_of_the_threads_that_share_a_processor_is_awake() {
    let program = build("rest");
    for pattern in PATTERNS {
        let with = run_preloaded(&program, &["calm", pattern], &[]);
        let (word, before, after) = parse_summary(&with);
        // Each has its lane all the same.
        assert_eq!((word, with.lanes(), with.reasons()), ("one", 4, vec![]), "{pattern}");
        // With one call it takes many of those that come together.
        let calls = with.calls();
        assert!(calls < before + after / 2, "{pattern}: {calls} calls, {before} and {after} datagrams");
    }
}

/// Takes 7 s: 4000 requests for each pattern, one at a time, and half a millisecond of sleep each.
#[test]
fn loopback_all_are_awake_where_work_sleeps() {
    let program = build("rest");
    for pattern in PATTERNS {
        let with = run_preloaded(&program, &["sleeps", pattern], &[]);
        let (word, _, _) = parse_summary(&with);
        assert_eq!((word, with.lanes(), with.reasons()), ("all", 4, vec![]), "{pattern}");
        // Nothing is taken ahead of one that may be away for long.
        assert_eq!(with.calls(), with.received(), "{pattern}");
        assert_all_lanes_used(&with, pattern, 0);
    }
}

#[test]
fn loopback_all_are_awake_again_when_work_begins_to_sleep() {
    let program = build("rest");
    for pattern in PATTERNS {
        let with = run_preloaded(&program, &["turns", pattern], &[]);
        let (word, before, _) = parse_summary(&with);
        assert_eq!((word, with.lanes(), with.reasons()), ("one", 4, vec![]), "{pattern}");
        assert_all_lanes_used(&with, pattern, before);
    }
}

/// Three of the four lanes had a quarter of what came many at a time, give or take what flows are
/// spread by, beside what came `before`.
fn assert_all_lanes_used(with: &Outcome, pattern: &str, before: u64) {
    let mut own = with.own();
    own.sort_unstable();
    let others: u64 = own.iter().take(3).sum();
    assert!(others > 1000 + before, "{pattern}: {own:?}, {before} before");
}
