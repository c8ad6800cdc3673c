//! Waits with unusual arguments, for many descriptors, or on small stacks return what they return
//! without lanes.

use crate::support::{
    build, build_library, can_run_without, for_each_at_once, library, run_native, run_preloaded, run_until,
};

#[test]
fn loopback_invalid_wait_arguments_return_kernel_results() {
    let name = "loopback_invalid_wait_arguments_return_kernel_results";
    if !can_run_without(
        &["address", "thread"],
        name,
        "the runtime reads what the kernel finds to be no memory",
    ) {
        return;
    }
    let program = build("wait_args");
    let both = format!("{}:{}", library().display(), build_library("count_ms_waits").display());
    for_each_at_once(&[("lanes", 2), ("one", 0)], |(how, lanes)| {
        let without = run_native(&program, &[how]);
        let run = || {
            let with = run_preloaded(&program, &[how], &[("MANYLANE_LANES", "8"), ("LD_PRELOAD", &both)]);
            assert_eq!(with.output, without.output, "{how}");
            with
        };
        // A thread that is held up for long loses its lane.
        let with = run_until(|with| with.lanes() >= lanes, run);
        assert!(with.lanes() >= lanes, "{how}: {} lanes", with.lanes());
        assert_eq!(with.reasons(), [""; 0], "{how}");
    });
}

#[test]
fn loopback_waits_for_too_many_descriptors_lose_nothing() {
    let program = build("many_fds");
    for_each_at_once(&["select", "high", "short", "poll"], |what| {
        for worker in ["0", "1"] {
            let args = [what, worker];
            assert_eq!(run_native(&program, &args).output, "20 of 20\n", "{args:?}");
            let with = run_preloaded(&program, &args, &[("MANYLANE_LANES", "8")]);
            assert_eq!(with.output, "20 of 20\n", "{args:?}");
            assert_eq!((with.reasons(), with.lanes()), (vec!["events"], 0), "{args:?}");
        }
    });
}

#[test]
fn loopback_waits_need_no_large_stack() {
    let name = "loopback_waits_need_no_large_stack";
    if !can_run_without(&["address", "thread"], name, "code with checks needs more stack") {
        return;
    }
    let program = build("small_stack");
    for whose in ["thread", "handler"] {
        let all = "20 20 20 20 20 of 20\n";
        assert_eq!(run_native(&program, &[whose]).output, all, "{whose}");
        let run = || {
            let with = run_preloaded(&program, &[whose], &[("MANYLANE_LANES", "8")]);
            assert_eq!(with.output, all, "{whose}");
            with
        };
        // A thread that is held up for long loses its lane.
        let with = run_until(|with| with.lanes() >= 2, run);
        assert_eq!(with.reasons(), [""; 0], "{whose}");
        assert!(with.lanes() >= 2, "{whose}: {} lanes", with.lanes());
    }
}

#[test]
fn loopback_a_handler_on_a_small_stack_makes_a_socket_plain() {
    let name = "loopback_a_handler_on_a_small_stack_makes_a_socket_plain";
    if !can_run_without(&["address", "thread"], name, "code with checks needs more stack") {
        return;
    }
    let program = build("small_stack");
    let all = "20 20 20 20 20 of 20\n";
    assert_eq!(run_native(&program, &["plain"]).output, all);
    let with = run_preloaded(&program, &["plain"], &[("MANYLANE_LANES", "8")]);
    assert_eq!((with.output.as_str(), with.reasons()), (all, vec!["error-queue"]));
}
