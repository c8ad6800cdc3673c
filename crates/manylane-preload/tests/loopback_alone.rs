//! A thread that received alone gets a lane like every other one as soon as it is not alone any more.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use support::{build, laned, plain};

fn ends_with_lanes(ways: &[&str]) {
    let program = build("alone");
    for way in ways {
        let without = plain(&program, &[way]);
        let with = laned(&program, &[way], &[("MANYLANE_LANES", "8")]);
        assert_eq!(with.output, without.output, "{way}");
        assert_eq!((with.reasons(), with.lanes()), (vec![], 3), "{way}");
    }
}

#[test]
fn loopback_receivers_that_come_later_get_lanes_and_so_does_the_first() {
    ends_with_lanes(&["block", "poll", "select", "epoll", "messages"]);
}

#[test]
fn loopback_who_comes_after_a_thread_that_was_alone_is_not_taken_for_it() {
    ends_with_lanes(&["successor", "fork", "reuse"]);
}

#[test]
fn loopback_a_thread_that_is_alone_uses_any_descriptor_and_is_interrupted() {
    ends_with_lanes(&["turns", "signal"]);
}
