//! Threads that sleep on a lane of a socket that becomes plain are woken by what comes for it after that.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use manylane_sys::shim::Reason;
use support::{build, laned, plain};

const SOCKETS: u64 = 4;

fn fall(way: &str, reason: Reason) {
    let program = build("fallen");
    let args = [way, &SOCKETS.to_string()];
    let expected = format!("{SOCKETS} sockets fell\n");
    assert_eq!(plain(&program, &args).output, expected, "{way} without the library");
    for linger in ["0", ""] {
        let with = laned(&program, &args, &[("MANYLANE_LANES", "8"), ("MANYLANE_LINGER", linger)]);
        assert_eq!(with.output, expected, "{way} with the library");
        assert_eq!((with.reasons(), with.count(reason)), (vec![reason.name()], SOCKETS), "{way}");
    }
}

#[test]
fn loopback_sleepers_in_epoll_are_woken_after_a_fall() {
    fall("level", Reason::Option);
    fall("edge", Reason::Option);
    fall("closed", Reason::Option);
}

#[test]
fn loopback_instances_that_are_waited_for_as_descriptors_watch_the_programs_socket() {
    fall("nested", Reason::NestedEpoll);
}

#[test]
fn loopback_sleepers_in_an_instance_that_gets_a_second_waiter_are_woken() {
    fall("one", Reason::SharedEpoll);
}
