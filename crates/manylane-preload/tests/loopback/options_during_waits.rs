//! Options that the kernel reads at the start of a call hold for the whole call: a later change
//! does not affect a thread that already waits.

use crate::support::{build, for_each_at_once, run_native, run_preloaded};

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

#[test]
fn loopback_a_receive_that_waits_keeps_its_timeout() {
    let cases = [
        ("longer", "EAGAIN EAGAIN\n", &[][..]),
        ("plain", "EAGAIN EAGAIN\n", &["error-queue"]),
        ("shutdown", "0 0\n", &["error-queue"]),
    ];
    for_each_at_once(&cases, |(what, expected, reasons)| assert_unchanged(what, expected, reasons));
}

#[test]
fn loopback_a_poll_that_waits_keeps_its_limit_of_files() {
    let refused = "20 of 19: EINVAL, 20 of 20: polled, 1 of 0: EINVAL, 1 of 1: polled";
    assert_unchanged("limit", &format!("0 0, {refused}\n"), &[]);
}
