//! Of threads that share a processor one is awake, unless their work sleeps.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use support::{Outcome, build, laned};

const PATTERNS: [&str; 2] = ["block", "epoll"];

/// Whether one thread came to answer all, questions until then, and behind that.
fn said(with: &Outcome) -> (&str, u64, u64) {
    let mut words = with.output.split_whitespace();
    let word = words.next().unwrap();
    let mut number = || words.next().unwrap().parse().unwrap();
    (word, number(), number())
}

#[test]
fn loopback_one_of_the_threads_that_share_a_processor_is_awake() {
    let program = build("rest");
    for pattern in PATTERNS {
        let with = laned(&program, &["calm", pattern], &[]);
        let (word, before, after) = said(&with);
        // Each has its lane all the same.
        assert_eq!((word, with.lanes(), with.reasons()), ("one", 4, vec![]), "{pattern}");
        // With one call it takes many of those that come together.
        let calls = with.calls();
        assert!(calls < before + after / 2, "{pattern}: {calls} calls, {before} and {after} datagrams");
        // As few as asked for.
        let with = laned(&program, &["calm", pattern], &[("MANYLANE_BATCH", "1")]);
        assert_eq!((said(&with).0, with.calls()), ("one", with.received()), "{pattern}");
    }
}

#[test]
fn loopback_all_are_awake_where_work_sleeps() {
    let program = build("rest");
    for pattern in PATTERNS {
        let with = laned(&program, &["sleeps", pattern], &[]);
        let (word, _, _) = said(&with);
        assert_eq!((word, with.lanes(), with.reasons()), ("all", 4, vec![]), "{pattern}");
        // Nothing is taken ahead of one that may be away for long.
        assert_eq!(with.calls(), with.received(), "{pattern}");
        least_of_four(&with, pattern, 0);
    }
}

#[test]
fn loopback_all_are_awake_again_when_work_begins_to_sleep() {
    let program = build("rest");
    for pattern in PATTERNS {
        let with = laned(&program, &["turns", pattern], &[]);
        let (word, before, _) = said(&with);
        assert_eq!((word, with.lanes(), with.reasons()), ("one", 4, vec![]), "{pattern}");
        least_of_four(&with, pattern, before);
    }
}

/// Three of the four lanes had a quarter of what came many at a time, give or take what flows are spread by, beside what came `before`.
fn least_of_four(with: &Outcome, pattern: &str, before: u64) {
    let mut own = with.own();
    own.sort_unstable();
    let others: u64 = own.iter().take(3).sum();
    assert!(others > 1000 + before, "{pattern}: {own:?}, {before} before");
}
