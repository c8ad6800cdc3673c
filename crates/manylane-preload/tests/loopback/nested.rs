//! Instances that are waited for as descriptors tell of what is still in lanes, once for each look
//! at them.

use crate::support::{build, run_native, run_preloaded};
use manylane_ipc::report::Reason;

const WAYS: [&str; 5] = ["poll", "ppoll", "select", "pselect", "epoll"];
const VARS: [&[(&str, &str)]; 3] = [
    &[("MANYLANE_LANES", "8")],
    &[("MANYLANE_LANES", "8"), ("MANYLANE_RX_USECS", "0")],
    &[("MANYLANE_LANES", "8"), ("MANYLANE_TEST_PREFETCH", "1")],
];

/// Runs `nested WAY WHAT` each way: what it prints without the library, and with it.
fn assert_reported(what: &str, expected: &str) {
    let program = build("nested");
    for way in WAYS {
        let args = [way, what];
        assert_eq!(run_native(&program, &args).output, expected, "{args:?}");
        let mut from_lanes = 0;
        for vars in VARS {
            let with = run_preloaded(&program, &args, vars);
            assert_eq!(with.output, expected, "{args:?} with {vars:?}");
            assert_eq!(with.count(Reason::NestedEpoll), 1, "{args:?} with {vars:?}");
            from_lanes += with.stolen();
        }
        assert!(from_lanes > 0, "{args:?}");
    }
}

const ONE_BY_ONE: &str = "told 28 times, received 28\nthen 0, 0, 0\nlater 1, 1\n";

#[test]
fn loopback_leftovers_in_nested_instances_are_told_of() {
    assert_reported("level", ONE_BY_ONE);
    assert_reported("one", ONE_BY_ONE);
}

#[test]
fn loopback_leftovers_in_nested_instances_are_told_of_as_an_edge() {
    assert_reported("edge", "told 1 times, received 28\nthen 0, 0, 0\nlater 1, 1\n");
}

#[test]
fn loopback_leftovers_that_come_into_nested_instances_are_told_of() {
    assert_reported("late", &format!("before: 0\n{ONE_BY_ONE}"));
    assert_reported("blocked", &format!("a blocked wait: 1\n{ONE_BY_ONE}"));
}

/// By another instance, leftovers in memory are not told of: the kernel does not know of them.
#[test]
fn loopback_leftovers_in_memory_are_told_of_to_polls_of_an_instance() {
    let program = build("nested");
    for way in &WAYS[..4] {
        let args = [way, "aside"];
        assert_eq!(run_native(&program, &args).output, ONE_BY_ONE, "{args:?}");
        for vars in VARS {
            assert_eq!(run_preloaded(&program, &args, vars).output, ONE_BY_ONE, "{args:?} with {vars:?}");
        }
    }
}
