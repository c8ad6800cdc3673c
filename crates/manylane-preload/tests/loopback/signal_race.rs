//! Events between the system calls of one call of the program: a signal interrupts a wait of
//! several system calls, and during a fallback socket options read as the program set them.

use crate::support::{build, build_library, library, run_preloaded};

fn run_between(pattern: &str, rx_usecs: &str) -> crate::support::Outcome {
    let both = format!("{}:{}", library().display(), build_library("inject_signal").display());
    let vars = [("MANYLANE_LANES", "8"), ("MANYLANE_RX_USECS", rx_usecs), ("LD_PRELOAD", &both)];
    run_preloaded(&build("signal_race"), &[pattern], &vars)
}

fn assert_interrupted(pattern: &str, rx_usecs: &str) {
    let with = run_between(pattern, rx_usecs);
    assert_eq!(with.output, "interrupted 12 of 12\n", "{pattern}, pauses {rx_usecs}");
    assert_eq!(with.reasons(), [""; 0], "{pattern}");
}

#[test]
fn loopback_signals_between_waits_interrupt_a_receive() {
    assert_interrupted("recv", "0");
    assert_interrupted("recv", "500");
}

#[test]
fn loopback_signals_between_waits_interrupt_poll_and_select() {
    assert_interrupted("poll", "0");
    assert_interrupted("poll", "500");
    assert_interrupted("select", "0");
    assert_interrupted("mask", "500");
}

#[test]
fn loopback_signals_between_waits_interrupt_epoll() {
    assert_interrupted("epoll", "0");
    assert_interrupted("epoll", "500");
}

#[test]
fn loopback_lane_socket_options_stay_hidden_during_fallback() {
    for option in ["option", "time"] {
        let with = run_between(option, "0");
        assert_eq!(with.output, "before 0 between 0 after 0\n", "{option}");
        assert_eq!(with.reasons(), ["option"], "{option}");
    }
}
