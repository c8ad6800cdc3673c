//! Under overload the newest wins, for who asked for it: what is thrown away is counted, what is
//! left is the end of the queue, in order, and what the program was told of comes next.

use crate::support::{Outcome, build, run_native, run_preloaded};

const HEAD_DROP: (&str, &str) = ("MANYLANE_DROP", "head");

fn run_head_drop(case: &str) -> Outcome {
    let vars = [("MANYLANE_LANES", "8"), ("MANYLANE_RX_USECS", "0"), HEAD_DROP];
    run_preloaded(&build("overload"), &[case], &vars)
}

/// The number behind a word of the last line.
fn number(outcome: &Outcome, word: &str) -> u64 {
    number_in(outcome.output.lines().last().expect("a line"), word)
}

fn number_in(line: &str, word: &str) -> u64 {
    let mut words = line.split(' ').skip_while(|at| *at != word);
    words.nth(1).and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{word} is not in {line}"))
}

/// The program got the end of what was queued, no more than a quarter of it and what one look
/// leaves, and all was counted.
fn assert_newest_kept(outcome: &Outcome) {
    let of = |word| number(outcome, word);
    let said = &outcome.output;
    assert!(outcome.dropped_stale() > 0, "{said}");
    assert_eq!(of("received") + outcome.dropped_stale() + of("dropped"), of("sent"), "{said}");
    assert_eq!((of("last"), of("disorder")), (of("queued"), 0), "{said}");
    assert!(of("received") <= of("quarter") + 8, "{said}");
    assert_eq!(outcome.received(), of("received"), "{said}");
}

#[test]
fn loopback_who_comes_late_gets_the_newest_by_any_call() {
    for case in ["recvfrom", "recv", "read", "readv", "recvmsg", "recvmmsg"] {
        assert_newest_kept(&run_head_drop(case));
    }
}

#[test]
fn loopback_the_oldest_wins_unless_it_is_said() {
    let program = build("overload");
    for case in ["recvfrom", "recvmmsg"] {
        let without = run_native(&program, &[case]);
        assert!(number(&without, "dropped") > 0, "{}", without.output);
        for vars in [&[][..], &[("MANYLANE_DROP", "tail")]] {
            let with = run_preloaded(&program, &[case], vars);
            assert_eq!((&with.output, with.dropped_stale()), (&without.output, 0));
        }
    }
}

/// Each of two threads throws away what is old of its own lane, and nothing of the other's.
#[test]
fn loopback_each_lane_has_its_newest() {
    let vars = [("MANYLANE_LANES", "8"), ("MANYLANE_RX_USECS", "0"), ("MANYLANE_BATCH", "1"), HEAD_DROP];
    let with = run_preloaded(&build("overloads"), &[], &vars);
    let said = &with.output;
    let mut missed = 0;
    for line in said.lines().filter(|line| line.starts_with("sent")) {
        let of = |word| number_in(line, word);
        assert_eq!(of("received") + of("missed"), of("sent"), "{said}");
        // At once, and by a thread's eighth receive at the latest.
        assert_eq!(of("gaps"), 1, "{said}");
        assert!(of("received") <= of("quarter") + 8, "{said}");
        missed += of("missed");
    }
    assert_eq!((with.lanes(), said.lines().count()), (2, 3), "{said}");
    assert!(said.ends_with("others 0\n"), "{said}");
    assert_eq!(with.dropped_stale(), missed, "{said}");
}

/// What is thrown away is less than a quarter of the queue, of which the kernel says nothing for
/// long.
#[test]
fn loopback_a_bit_more_than_half_a_queue_is_not_thrown_away_whole() {
    let with = run_head_drop("some");
    assert_newest_kept(&with);
    assert!(2 * number(&with, "received") > number(&with, "quarter"), "{}", with.output);
}

#[test]
fn loopback_half_a_queue_is_no_overload() {
    let (with, without) = (run_head_drop("few"), run_native(&build("overload"), &["few"]));
    assert_eq!((&with.output, with.dropped_stale()), (&without.output, 0));
}

#[test]
fn loopback_what_a_program_was_told_of_comes_next() {
    for case in ["peek", "size"] {
        let with = run_head_drop(case);
        assert!(with.output.contains("taken 0\n"), "{}", with.output);
        assert_eq!(number(&with, "first"), 1, "{}", with.output);
        // Later, when nothing was announced, it is as ever.
        let of = |word| number(&with, word);
        assert!(with.dropped_stale() > 0, "{}", with.output);
        assert_eq!(1 + of("received") + with.dropped_stale() + of("dropped"), of("sent"), "{}", with.output);
        assert_eq!(of("last"), of("queued"), "{}", with.output);
    }
}

#[test]
fn loopback_lengths_are_those_of_one_receive() {
    let with = run_head_drop("lengths");
    assert_eq!(with.output, run_native(&build("overload"), &["lengths"]).output);
    assert!(with.output.contains("name 16, kept 1, control 1"), "{}", with.output);
    assert!(with.dropped_stale() > 0);
}
