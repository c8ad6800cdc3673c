//! A program that lowers RLIMIT_NOFILE below the descriptors of its lanes receives every datagram,
//! and gets the errors that the kernel returns.

use crate::support::{build, for_each_at_once, run_native, run_preloaded, run_until_lanes};

/// Output after the limit was lowered to less than 20.
const REFUSED: &str = "poll: -1 EINVAL\nppoll: -1 EINVAL\n20 kept\ndup2: -1 EBADF\ndup3: -1 EBADF\n";

fn assert_all_arrive(calls: &[&str], limits: &[&str], reasons: &[&str]) {
    let program = build("rlimit_nofile");
    for_each_at_once(calls, |call| {
        let after = if call == "lanes" { "" } else { "then 0\nthen 0\n" };
        let expected = format!("{after}80 and 80 of 80\n{REFUSED}");
        for limit in limits {
            let args = [call, *limit];
            assert_eq!(run_native(&program, &args).output, expected, "{args:?}");
            let lanes = if reasons.is_empty() { 2 } else { 0 };
            let with = run_until_lanes(lanes, || {
                let with = run_preloaded(&program, &args, &[("MANYLANE_LANES", "8")]);
                assert_eq!(
                    (with.output.as_str(), with.reasons()),
                    (&*expected, reasons.to_vec()),
                    "{args:?}"
                );
                with
            });
            assert_eq!(with.lanes(), lanes, "{args:?}");
        }
    });
}

#[test]
fn loopback_receives_below_rlimit_nofile_lose_nothing() {
    assert_all_arrive(&["recv", "handler", "lanes"], &["16", "1", "0"], &[]);
}

#[test]
fn loopback_waits_below_rlimit_nofile_report_all_datagrams() {
    assert_all_arrive(&["select", "pselect", "many", "epoll"], &["16", "1", "0"], &[]);
    // The kernel refuses to poll anything with a limit of zero.
    assert_all_arrive(&["poll", "ppoll"], &["16", "1"], &[]);
}

#[test]
fn loopback_fallback_below_rlimit_nofile_keeps_datagrams() {
    assert_all_arrive(&["plain"], &["16", "1", "0"], &["error-queue"]);
    assert_all_arrive(&["nested"], &["16", "1", "0"], &["nested-epoll"]);
}
