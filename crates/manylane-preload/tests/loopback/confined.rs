//! A server that forbids itself all system calls but its own (seccomp) lives on, and loses nothing.

use crate::support::{build, can_run_without, run_native, run_preloaded};
use manylane_ipc::report::Reason;

const WAYS: [&str; 4] = ["poll", "select", "epoll", "recvfrom"];

/// Runs the server natively and with the library, where its socket falls back for the filter alone.
fn confined(when: &str, lanes: &str, output: &str, fallen: u64) {
    let program = build("confined");
    for way in WAYS {
        assert_eq!(
            run_native(&program, &[when, way, "1"]).output,
            output,
            "{when}, {way}, without the library"
        );
        for prefetch in ["0", "1"] {
            let vars = [("MANYLANE_LANES", "8"), ("MANYLANE_TEST_PREFETCH", prefetch)];
            let with = run_preloaded(&program, &[when, way, lanes], &vars);
            assert_eq!(with.output, output, "{when}, {way}, prefetch {prefetch}");
            assert_eq!(with.count(Reason::Seccomp), fallen, "{when}, {way}, prefetch {prefetch}");
            let reasons = if fallen == 0 { vec![] } else { vec!["seccomp"] };
            assert_eq!(with.reasons(), reasons, "{when}, {way}, prefetch {prefetch}");
        }
    }
}

#[test]
fn loopback_one_receiver_makes_no_calls_but_its_own_behind_a_filter() {
    confined("alone", "1", "0 missing\n", 1);
    confined("call", "1", "0 missing\n", 1);
}

#[test]
fn loopback_forks_and_ends_behind_a_filter_make_no_other_calls() {
    let name = "loopback_forks_and_ends_behind_a_filter_make_no_other_calls";
    if can_run_without(
        &["thread"],
        name,
        "the runtime starts a thread in each child, which the filter forbids",
    ) {
        confined("forks", "1", "0 missing\n", 1);
    }
}

#[test]
fn loopback_workers_confine_themselves_before_they_receive() {
    confined("workers", "1", "0 missing\n", 1);
}

#[test]
fn loopback_a_bind_behind_a_seccomp_filter_makes_no_other_calls() {
    confined("early", "1", "0 missing\n", 1);
}

#[test]
fn loopback_asking_for_filters_leaves_the_socket_as_it_is() {
    confined("asks", "1", "0 missing\n", 0);
}

#[test]
fn loopback_what_waits_in_lanes_is_received_behind_a_filter() {
    confined("waiting", "2", "0 missing\n", 1);
}

#[test]
fn loopback_threads_that_wait_come_under_a_filter_with_no_other_call() {
    confined("blocked", "2", "0 missing\n", 1);
}

#[test]
fn loopback_a_filter_of_one_thread_makes_the_socket_plain_for_all() {
    confined("one", "2", "0 missing\n", 1);
}

/// The filter comes into force for a thread that just closes, by calls that wait for nothing.
#[test]
fn loopback_closes_make_no_other_calls_once_a_filter_is_in_force() {
    let name = "loopback_closes_make_no_other_calls_once_a_filter_is_in_force";
    if !can_run_without(&["address", "thread"], name, "the runtime makes calls of its own") {
        return;
    }
    let program = build("closing");
    for way in ["close", "range", "fclose"] {
        assert_eq!(run_native(&program, &[way]).output, "0 killed\n", "{way}, without the library");
        let with = run_preloaded(&program, &[way], &[("MANYLANE_LANES", "8")]);
        assert_eq!(with.output, "0 killed\n", "{way}");
    }
}

/// What waits in lanes goes with the socket, and so does the port.
#[test]
fn loopback_a_socket_that_is_closed_behind_a_filter_leaves_nothing() {
    for way in ["cut", "cut-fclose", "cut-dup3", "cut-range"] {
        confined(way, "2", "", 1);
    }
}
