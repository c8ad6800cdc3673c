//! Calls on a socket return what they return without lanes.

use crate::support::{
    FORCES_PREFETCH, build, can_run_without, run_native, run_preloaded, run_preloaded_with_fd,
    run_until_lanes,
};

#[test]
fn loopback_lanes_of_absent_owners_do_not_change_results() {
    let program = build("socket_semantics");
    let without = run_native(&program, &[]);
    assert!(!without.output.contains(": no"), "{}", without.output);
    // Default delays before sleeps, none, and long ones.
    for (steering, rx_usecs) in [("flow", ""), ("random", "0"), ("cpu", "20000")] {
        let vars =
            [("MANYLANE_STEERING", steering), ("MANYLANE_LANES", "8"), ("MANYLANE_RX_USECS", rx_usecs)];
        let with = run_preloaded(&program, &[], &vars);
        assert_eq!(with.output, without.output, "{steering}");
        // There were lanes until the program enabled the error queue: the main thread received from
        // those of other threads.
        assert_eq!(with.reasons(), ["error-queue"], "{steering}");
        assert!(with.delivered_from_other_lanes() > 0, "{steering}");
    }
}

#[test]
fn loopback_negative_so_rcvtimeo_does_not_block() {
    let program = build("so_rcvtimeo");
    let expected = "set 0, is 0.000000, recv -1 Resource temporarily unavailable, then 32 of 32\n";
    assert_eq!(run_native(&program, &[]).output, expected);
    let with = run_preloaded(&program, &[], &[("MANYLANE_LANES", "8")]);
    // Two threads with lanes, and the main thread, which sets the timeout. A thread that gets no
    // CPU time for a while loses its lane until it has received twice.
    assert_eq!((with.output.as_str(), with.receiver_count(), with.reasons()), (expected, 3, vec!["option"]));
    assert!(with.lanes() > 0);
}

#[test]
fn loopback_unlisted_ports_get_no_lanes() {
    let program = build("socket_semantics");
    let without = run_native(&program, &[]);
    // Unusable ranges are not all ports.
    for vars in [("MANYLANE_PORTS", "1-2"), ("MANYLANE_PORTS", "2-1"), ("MANYLANE_LANES", "1")] {
        let with = run_preloaded(&program, &[], &[vars]);
        assert_eq!(with.output, without.output);
        assert_eq!((with.reasons(), with.delivered()), (vec![], 0));
    }
}

/// Without prefetches, and with them. A prefetched datagram is copied by the library, which cannot
/// tell that a buffer is not mapped.
#[test]
fn loopback_invalid_call_arguments_return_native_results() {
    let program = build("call_args");
    for (prefetch, args) in [("0", &["unmapped"][..]), ("1", &[])] {
        let without = run_native(&program, args);
        let vars =
            [("MANYLANE_LANES", "8"), ("MANYLANE_TEST_PREFETCH", prefetch), ("MANYLANE_RX_USECS", "0")];
        let with = run_preloaded(&program, args, &vars);
        assert_eq!(with.output, without.output, "prefetch {prefetch}");
        assert_eq!(with.reasons(), ["reuseport"], "prefetch {prefetch}");
        // Four rows of the table receive two messages with one call, for eight flows each.
        let together = with.delivered() - with.calls();
        let prefetches = prefetch == "1" && FORCES_PREFETCH;
        assert!(if prefetches { together > 200 } else { together == 32 }, "prefetch {prefetch}: {together}");
    }
}

/// Descriptors of the library: that of the report, and those of lanes.
#[test]
fn loopback_hidden_descriptors_return_ebadf() {
    let program = build("hidden_fds");
    let without = run_native(&program, &[]);
    let with = run_until_lanes(2, || {
        let with = run_preloaded_with_fd(&program, &[]);
        assert_eq!((&with.output, with.reasons()), (&without.output, vec![]));
        with
    });
    assert_eq!(with.lanes(), 2);
}

/// Whichever call decides if a handler interrupts receives, lanes obey it as the kernel does.
#[test]
fn loopback_sa_restart_is_honoured_however_it_was_set() {
    let program = build("sa_restart");
    for (what, reasons) in [
        ("signal", &[][..]),
        ("bsd_signal", &[]),
        ("ssignal", &[]),
        ("siginterrupt", &[]),
        ("siginterrupt ahead", &[]),
        ("siginterrupt off", &[]),
        ("sigset", &[]),
        ("sysv_signal", &[]),
        ("sigignore", &[]),
        ("both", &["signals"]),
    ] {
        let name = format!("loopback_sa_restart_is_honoured_however_it_was_set, {what}");
        let why = "the runtime runs a handler once the call that it came in is over, which goes on here";
        if what == "siginterrupt off" && !can_run_without(&["thread"], &name, why) {
            continue;
        }
        let without = run_native(&program, &[what]);
        let lanes = if reasons.is_empty() { 2 } else { 0 };
        let with = run_until_lanes(lanes, || {
            let with = run_preloaded(&program, &[what], &[("MANYLANE_LANES", "8")]);
            assert_eq!((&with.output, with.reasons()), (&without.output, reasons.to_vec()), "{what}");
            with
        });
        assert_eq!(with.lanes(), lanes, "{what}");
    }
}

/// The program may do anything to descriptors that it does not know.
#[test]
fn loopback_exec_passes_on_the_report_descriptor() {
    for (what, seen) in [
        ("closefrom", "no descriptor, then no descriptor\n"),
        // The library then finds the report by its path.
        ("closed", "no descriptor, then no descriptor\n"),
        ("reused", "open, then open\n"),
    ] {
        let with = run_preloaded_with_fd(&build("report_fd"), &[what]);
        assert_eq!((with.output.as_str(), with.processes()), (seen, 2), "{what}");
    }
}
