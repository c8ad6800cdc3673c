//! If a socket becomes plain, threads that sleep on one of its lanes are woken by later datagrams.

use crate::support::{build, build_library, library, run_native, run_preloaded};
use manylane_ipc::lease::{LeaseToken, TOKEN_ENV_VAR};
use manylane_ipc::report::Reason;

const SOCKETS: u64 = 4;

fn assert_falls_back(way: &str, reason: Reason) {
    let program = build("fallback_wakeup");
    let args = [way, &SOCKETS.to_string()];
    let expected = format!("{SOCKETS} sockets fell back\n");
    assert_eq!(run_native(&program, &args).output, expected, "{way} without the library");
    for rx_usecs in ["0", ""] {
        let with =
            run_preloaded(&program, &args, &[("MANYLANE_LANES", "8"), ("MANYLANE_RX_USECS", rx_usecs)]);
        assert_eq!(with.output, expected, "{way} with the library");
        assert_eq!((with.reasons(), with.count(reason)), (vec![reason.name()], SOCKETS), "{way}");
    }
}

#[test]
fn loopback_fallback_wakes_threads_in_epoll_wait() {
    assert_falls_back("level", Reason::Option);
    assert_falls_back("edge", Reason::Option);
    assert_falls_back("closed", Reason::Option);
}

/// One thread closes a descriptor, and opens another file with its number. Meanwhile, another
/// thread adds it to an epoll instance, or makes the socket plain.
#[test]
fn loopback_fallback_moves_epoll_entries_despite_fd_reuse() {
    let program = build("epoll_fd_reuse");
    let both = format!("{}:{}", library().display(), build_library("inject_race").display());
    let vars = [("MANYLANE_LANES", "8"), ("LD_PRELOAD", both.as_str())];
    for (what, reason) in [("socket", "option"), ("instance", "option"), ("exec", "exec")] {
        let without = run_native(&program, &[what]);
        let expected = without.output.as_str();
        assert!(expected.ends_with("0 events of another file\n"), "{what}: {expected}");
        let with = run_preloaded(&program, &[what], &vars);
        assert_eq!((with.output.as_str(), with.reasons()), (expected, vec![reason]), "{what}");
    }
}

/// A thread duplicates a socket to the number at which the library briefly holds the socket that is
/// falling back (dup2).
#[test]
fn loopback_dup2_onto_a_temporary_descriptor_succeeds() {
    let program = build("epoll_fd_reuse");
    let both = format!("{}:{}", library().display(), build_library("inject_race").display());
    let without = run_native(&program, &["number"]);
    assert!(without.output.starts_with("its own socket: 1\nwaits for ever: 1\n"), "{}", without.output);
    let with =
        run_preloaded(&program, &["number"], &[("MANYLANE_LANES", "8"), ("LD_PRELOAD", both.as_str())]);
    assert_eq!((with.output.as_str(), with.reasons()), (without.output.as_str(), vec!["option"]));
}

#[test]
fn loopback_fallback_wakes_threads_in_nested_epoll() {
    assert_falls_back("nested", Reason::NestedEpoll);
}

#[test]
fn loopback_fallback_by_a_second_epoll_waiter_wakes_sleepers() {
    assert_falls_back("shared", Reason::SharedEpoll);
}

/// A thread duplicates a file to the number of the library's connection to the launcher while the
/// library requests queues (dup2).
#[test]
fn loopback_dup2_onto_the_lease_connection_succeeds() {
    let token = LeaseToken::new().unwrap().to_string();
    let vars = [("MANYLANE_ENGINE", "xdp"), (TOKEN_ENV_VAR, token.as_str())];
    let with = run_preloaded(&build("lease_fd_reuse"), &[], &vars);
    assert_eq!(with.output, "asked: 1\nits number: 1\nits file: 1\n");
    assert_eq!(with.reasons(), vec!["no-queue"]);
}
