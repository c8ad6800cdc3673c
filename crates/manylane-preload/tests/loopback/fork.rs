//! Lanes that are created ahead of a fork: datagrams that arrive at that moment are received, and
//! plain sockets get no lanes. Nor do sockets that are bound after the fork.

use crate::support::{build, build_library, can_run_without, library, run_native, run_preloaded};
use manylane_ipc::report::Reason;

/// True if the program `fork_resources`, which counts allocations, can run.
fn can_count_allocations(test: &str) -> bool {
    can_run_without(
        &["address", "thread"],
        test,
        "the sanitizers bring the malloc that the program brings, too",
    )
}

#[test]
fn loopback_fork_under_traffic_loses_no_datagrams() {
    let program = build("fork_under_traffic");
    let expected = "64 before, 64 during, 64 later\n";
    assert_eq!(run_native(&program, &["before"]).output, expected);
    for prefetch in ["0", "1"] {
        let both = format!("{}:{}", library().display(), build_library("inject_race").display());
        let vars = [("MANYLANE_LANES", "8"), ("MANYLANE_TEST_PREFETCH", prefetch), ("LD_PRELOAD", &both)];
        for way in ["before", "during", "late", "asleep"] {
            let with = run_preloaded(&program, &[way], &vars);
            let name = format!("{way}, prefetch {prefetch}");
            assert_eq!((with.output.as_str(), with.reasons()), (expected, vec![]), "{name}");
        }
    }
}

/// Takes 9 s: each of 2000 sockets waits for one or two forks, so that rare orders of the threads
/// occur.
#[test]
fn loopback_a_socket_made_plain_during_a_fork_gets_no_lanes() {
    let program = build("fork_fallback_race");
    let expected = "0 shared, 0 missing\n";
    assert_eq!(run_native(&program, &[]).output, expected);
    let with = run_preloaded(&program, &[], &[("MANYLANE_LANES", "8")]);
    assert_eq!((with.output.as_str(), with.reasons()), (expected, vec!["error-queue"]));
}

/// Takes 9 s, as the test above.
#[test]
fn loopback_a_socket_bound_during_a_fork_is_plain() {
    let program = build("fork_fallback_race");
    let expected = "0 shared, 0 missing\n";
    assert_eq!(run_native(&program, &["unbound"]).output, expected);
    let with = run_preloaded(&program, &["unbound"], &[("MANYLANE_LANES", "8")]);
    assert_eq!(with.output, expected);
    // The scheduler decides which reason comes first; each socket has one.
    let reasons = with.count(Reason::ErrorQueue) + with.count(Reason::Forked);
    assert_eq!((reasons, with.lanes()), (with.sockets(), 0));
}

/// Takes 10 to 25 s, as the tests above, with more threads in the way of each fork.
#[test]
fn loopback_lanes_prepared_by_fork_survive_descriptor_reuse() {
    let program = build("fork_fallback_race");
    let expected = "0 shared, 0 missing\n";
    assert_eq!(run_native(&program, &["copies"]).output, expected);
    let with = run_preloaded(&program, &["copies"], &[("MANYLANE_LANES", "8")]);
    assert_eq!((with.output.as_str(), with.reasons()), (expected, vec!["error-queue"]));
}

#[test]
fn loopback_a_socket_bound_after_a_fork_is_plain_in_both() {
    let program = build("bind_after_fork");
    let expected = "parent: timeout 0 s 0 us\nchild: timeout 0 s 0 us\nchild: got c\n";
    assert_eq!(run_native(&program, &[]).output, expected);
    let with = run_preloaded(&program, &[], &[("MANYLANE_LANES", "8")]);
    assert_eq!(with.output, expected);
    assert_eq!((with.reasons(), with.count(Reason::Forked), with.lanes()), (vec!["forked"], 1, 0));
}

#[test]
fn loopback_fork_leaves_descriptors_to_the_program() {
    if !can_count_allocations("loopback_fork_leaves_descriptors_to_the_program") {
        return;
    }
    let program = build("fork_resources");
    let left = |args: &[&str]| -> (u32, u32) {
        let with = run_preloaded(&program, args, &[("MANYLANE_LANES", "64")]);
        (run_native(&program, args).output.trim().parse().unwrap(), with.output.trim().parse().unwrap())
    };
    // With few descriptors, none is spare for lanes.
    let (alone, with) = left(&["open", "64", "16"]);
    assert!(alone > 16 && with == alone, "{with} of {alone}");
    // If more lanes are wanted than descriptors are free, lanes get half of them.
    let (alone, with) = left(&["open", "256", "60"]);
    assert!((alone.div_ceil(2)..=alone.div_ceil(2) + 2).contains(&with), "{with} of {alone}");
}

#[test]
fn loopback_lanes_without_a_reserved_descriptor_are_reported() {
    if !can_count_allocations("loopback_lanes_without_a_reserved_descriptor_are_reported") {
        return;
    }
    let with = run_preloaded(&build("fork_resources"), &["full"], &[("MANYLANE_LANES", "64")]);
    assert_eq!(with.output, "both: yes\n");
    assert_eq!((with.lanes(), with.reasons()), (0, vec!["full"]));
}

#[test]
fn loopback_fork_allocates_no_heap_and_opens_no_file() {
    if !can_count_allocations("loopback_fork_allocates_no_heap_and_opens_no_file") {
        return;
    }
    let program = build("fork_resources");
    let expected = "heap 0, files 0\n";
    assert_eq!(run_native(&program, &["fork"]).output, expected);
    assert_eq!(run_preloaded(&program, &["fork"], &[("MANYLANE_LANES", "8")]).output, expected);
}
