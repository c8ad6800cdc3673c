//! What comes between two calls that one call of the program is made of: a signal interrupts a
//! wait, also where that is renewed inside; options are told as the program set them, also while
//! the socket becomes plain.

use crate::support::{build, build_library, library, run_preloaded};

fn run_between(pattern: &str, rx_usecs: &str) -> crate::support::Outcome {
    let both = format!("{}:{}", library().display(), build_library("gap").display());
    let vars = [("MANYLANE_LANES", "8"), ("MANYLANE_RX_USECS", rx_usecs), ("LD_PRELOAD", &both)];
    run_preloaded(&build("gaps"), &[pattern], &vars)
}

fn interrupt(pattern: &str, rx_usecs: &str) {
    let with = run_between(pattern, rx_usecs);
    assert_eq!(with.output, "interrupted 12 of 12\n", "{pattern}, pauses {rx_usecs}");
    assert_eq!(with.reasons(), [""; 0], "{pattern}");
}

#[test]
fn loopback_signals_between_waits_interrupt_a_receive() {
    interrupt("recv", "0");
    interrupt("recv", "500");
}

#[test]
fn loopback_signals_between_waits_interrupt_poll_and_select() {
    interrupt("poll", "0");
    interrupt("poll", "500");
    interrupt("select", "0");
    interrupt("mask", "500");
}

#[test]
fn loopback_signals_between_waits_interrupt_epoll() {
    interrupt("epoll", "0");
    interrupt("epoll", "500");
}

#[test]
fn loopback_own_options_stay_hidden_while_a_socket_becomes_plain() {
    for option in ["option", "time"] {
        let with = run_between(option, "0");
        assert_eq!(with.output, "before 0 between 0 after 0\n", "{option}");
        assert_eq!(with.reasons(), ["option"], "{option}");
    }
}
