//! If a server installs a seccomp filter, the library makes no system calls of its own from then
//! on, and no datagram is lost.

use crate::support::{build, can_run_without, run_native, run_preloaded};
use manylane_ipc::report::Reason;

const WAIT_CALLS: [&str; 4] = ["poll", "select", "epoll", "recvfrom"];

/// Runs the server natively and preloaded. Its socket falls back because of the filter alone.
fn assert_seccomp_fallback(when: &str, lanes: &str, output: &str, fallbacks: u64) {
    let program = build("seccomp");
    for way in WAIT_CALLS {
        assert_eq!(
            run_native(&program, &[when, way, "1"]).output,
            output,
            "{when}, {way}, without the library"
        );
        for prefetch in ["0", "1"] {
            let vars = [("MANYLANE_LANES", "8"), ("MANYLANE_TEST_PREFETCH", prefetch)];
            let with = run_preloaded(&program, &[when, way, lanes], &vars);
            assert_eq!(with.output, output, "{when}, {way}, prefetch {prefetch}");
            assert_eq!(with.count(Reason::Seccomp), fallbacks, "{when}, {way}, prefetch {prefetch}");
            let reasons = if fallbacks == 0 { vec![] } else { vec!["seccomp"] };
            assert_eq!(with.reasons(), reasons, "{when}, {way}, prefetch {prefetch}");
        }
    }
}

#[test]
fn loopback_seccomp_filtered_receiver_makes_no_extra_syscalls() {
    assert_seccomp_fallback("prctl", "1", "0 missing\n", 1);
    assert_seccomp_fallback("seccomp", "1", "0 missing\n", 1);
}

#[test]
fn loopback_seccomp_filtered_fork_and_exit_add_no_syscalls() {
    let name = "loopback_seccomp_filtered_fork_and_exit_add_no_syscalls";
    if can_run_without(
        &["thread"],
        name,
        "the runtime starts a thread in each child, which the filter forbids",
    ) {
        assert_seccomp_fallback("forks", "1", "0 missing\n", 1);
    }
}

#[test]
fn loopback_seccomp_filtered_workers_make_no_extra_syscalls() {
    assert_seccomp_fallback("workers", "1", "0 missing\n", 1);
}

#[test]
fn loopback_seccomp_filtered_bind_makes_no_extra_syscalls() {
    assert_seccomp_fallback("bind", "1", "0 missing\n", 1);
}

#[test]
fn loopback_querying_seccomp_keeps_lanes() {
    assert_seccomp_fallback("query", "1", "0 missing\n", 0);
}

#[test]
fn loopback_queued_datagrams_are_received_after_seccomp() {
    assert_seccomp_fallback("waiting", "2", "0 missing\n", 1);
}

#[test]
fn loopback_seccomp_tsync_during_waits_adds_no_syscalls() {
    assert_seccomp_fallback("blocked", "2", "0 missing\n", 1);
}

#[test]
fn loopback_seccomp_of_one_thread_makes_the_socket_plain() {
    assert_seccomp_fallback("partial", "2", "0 missing\n", 1);
}

/// A filter that another thread installs for all threads (TSYNC) does not kill a thread that is
/// closing descriptors. Takes 3 s: 60 processes for each way to close, because the filter must come
/// into force inside a call.
#[test]
fn loopback_closes_during_seccomp_tsync_make_no_extra_syscalls() {
    let name = "loopback_closes_during_seccomp_tsync_make_no_extra_syscalls";
    if !can_run_without(&["address", "thread"], name, "the runtime makes calls of its own") {
        return;
    }
    let program = build("seccomp_close_race");
    for way in ["close", "range", "fclose"] {
        assert_eq!(run_native(&program, &[way]).output, "0 killed\n", "{way}, without the library");
        let with = run_preloaded(&program, &[way], &[("MANYLANE_LANES", "8")]);
        assert_eq!(with.output, "0 killed\n", "{way}");
    }
}

#[test]
fn loopback_invalid_arguments_after_seccomp_return_kernel_results() {
    let name = "loopback_invalid_arguments_after_seccomp_return_kernel_results";
    let why = "the runtime reads what the kernel does not";
    if can_run_without(&["address", "thread"], name, why) {
        assert_seccomp_fallback("arguments", "2", "0 missing\n", 1);
    }
}

/// Closing the socket discards the datagrams in its lanes, and frees the port.
#[test]
fn loopback_close_after_seccomp_frees_port_and_lanes() {
    for way in ["close", "fclose", "dup3", "close_range", "closefrom"] {
        assert_seccomp_fallback(way, "2", "", 1);
    }
}
