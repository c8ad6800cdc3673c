//! Descriptors that are closed unseen by the library, and descriptor numbers that are reused.

use crate::support::{build, build_library, library, run_native, run_preloaded, run_until_lanes};
use manylane_testbed::skip::{self, is_kernel};

fn assert_same_as_native(what: &str, lanes: usize, reasons: &[&str]) {
    let program = build("fd_reuse");
    let without = run_native(&program, &[what]);
    let with = run_until_lanes(lanes, || {
        let with = run_preloaded(&program, &[what], &[("MANYLANE_LANES", "8")]);
        assert_eq!((&with.output, with.reasons()), (&without.output, reasons.to_vec()), "{what}");
        with
    });
    assert_eq!(with.lanes(), lanes, "{what}");
}

#[test]
fn loopback_read_of_a_reused_descriptor_is_not_intercepted() {
    assert_same_as_native("numbers", 0, &[]);
    assert_same_as_native("file", 3, &[]);
}

#[test]
fn loopback_calls_on_a_reused_descriptor_keep_its_socket() {
    assert_same_as_native("socket", 3, &[]);
}

#[test]
fn loopback_closing_a_socket_by_raw_syscall_frees_its_port() {
    assert_same_as_native("bind", 3, &[]);
    assert_same_as_native("share", 3, &["reuseport"]);
    assert_same_as_native("waiting", 3, &[]);
    assert_same_as_native("syscall", 3, &[]);
}

#[test]
fn loopback_reused_lane_descriptors_stay_with_the_program() {
    assert_same_as_native("hidden", 0, &["no-socket"]);
}

/// On a kernel that cannot tell the network namespace of a socket, the library knows that its
/// process has not changed namespaces.
#[test]
fn loopback_lanes_work_without_so_netns_cookie() {
    let both = format!("{}:{}", library().display(), build_library("inject_race").display());
    let vars = [("LD_PRELOAD", both.as_str()), ("RACE_NO_NETNS_COOKIE", "1"), ("MANYLANE_LANES", "8")];
    let with = run_until_lanes(3, || run_preloaded(&build("fd_reuse"), &["syscall"], &vars));
    assert_eq!((with.lanes(), with.reasons()), (3, vec![]));
}

#[test]
fn netns_lanes_are_in_the_namespace_of_their_socket() {
    if !skip::need_root("netns_lanes_are_in_the_namespace_of_their_socket") {
        return;
    }
    let program = build("netns");
    let both = format!("{}:{}", library().display(), build_library("inject_race").display());
    let kernels = [vec![], vec![("LD_PRELOAD", both.as_str()), ("RACE_NO_NETNS_COOKIE", "1")]];
    for (what, lanes, reasons) in [("move", 0, vec!["namespace"]), ("stay", 2, vec![])] {
        let without = run_native(&program, &[what]);
        assert_eq!(without.output, "0 foreign\n", "{what}");
        for vars in &kernels {
            // Such a kernel cannot tell that the process changed namespaces before it opened the
            // socket.
            let has_cookie = vars.is_empty() && is_kernel((5, 14));
            let expected = if has_cookie { (lanes, reasons.clone()) } else { (0, vec!["namespace"]) };
            let with = run_until_lanes(expected.0, || {
                let with = run_preloaded(&program, &[what], vars);
                assert_eq!(with.output, without.output, "{what} {vars:?}");
                with
            });
            assert_eq!((with.lanes(), with.reasons()), expected, "{what} {vars:?}");
        }
    }
}

#[test]
fn netns_receivers_with_equal_pids_are_distinct() {
    if !skip::need_root("netns_receivers_with_equal_pids_are_distinct") {
        return;
    }
    let program = build("pid_namespaces");
    for end in ["exit", "kill"] {
        let expected = "ids 1 and 1, 800 received after the end\n";
        assert_eq!(run_native(&program, &[end]).output, expected, "{end} without the library");
        let with = run_preloaded(&program, &[end], &[("MANYLANE_LANES", "8")]);
        assert_eq!((with.output.as_str(), with.receiver_count()), (expected, 2), "{end} with the library");
        assert_eq!(with.reasons(), [""; 0], "{end}");
        // If both were taken for one receiver, there would be no lanes. A receiver that gets no CPU
        // time for a while loses its lane until it has received twice.
        assert!(with.lanes() > 0, "{end}");
    }
}
