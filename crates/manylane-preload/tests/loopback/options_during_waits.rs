//! Options that the kernel reads at the start of a call hold for the whole call: a later change
//! does not affect a thread that already waits.

use crate::support::{Outcome, build, for_each_at_once, run_native, run_preloaded, run_until};

fn assert_unchanged(what: &str, expected: &str, reasons: &[&str]) {
    let program = build("options_during_waits");
    assert_eq!(run_native(&program, &[what]).output, expected, "{what}");
    let with = run_preloaded(&program, &[what], &[("MANYLANE_LANES", "8")]);
    assert_eq!((with.output.as_str(), with.reasons()), (expected, reasons.to_vec()), "{what}");
}

#[test]
fn loopback_a_receive_that_waits_keeps_its_options() {
    for (what, reasons) in [("negative", &["option"][..]), ("nonblock", &[]), ("shorter", &[])] {
        assert_unchanged(what, "0 returned, then 1 1\n", reasons);
    }
}

/// The same, of a wait that is judged by its time. A thread that is held up for longer is late, so
/// there are several runs.
fn assert_in_time(what: &str, expected: &str, reasons: &[&str]) {
    let program = build("options_during_waits");
    let is_expected = |with: &Outcome| with.output == expected;
    assert_eq!(run_until(is_expected, || run_native(&program, &[what])).output, expected, "{what}");
    let run = || {
        let with = run_preloaded(&program, &[what], &[("MANYLANE_LANES", "8")]);
        assert_eq!(with.reasons(), reasons, "{what}");
        with
    };
    assert_eq!(run_until(is_expected, run).output, expected, "{what}");
}

#[test]
fn loopback_a_receive_that_waits_keeps_its_timeout() {
    let cases = [
        ("longer", "EAGAIN EAGAIN\n", &[][..]),
        ("plain", "EAGAIN EAGAIN\n", &["error-queue"]),
        ("shutdown", "0 0\n", &["error-queue"]),
    ];
    for_each_at_once(&cases, |(what, expected, reasons)| assert_in_time(what, expected, reasons));
}

#[test]
fn loopback_a_poll_that_waits_keeps_its_limit_of_files() {
    let refused = "20 of 19: EINVAL, 20 of 20: polled, 1 of 0: EINVAL, 1 of 1: polled";
    assert_in_time("limit", &format!("0 0, {refused}\n"), &[]);
}
