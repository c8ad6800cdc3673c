//! The child of a fork closes a socket that its parent still uses.

use crate::support::{build, run_native, run_preloaded};

#[test]
fn loopback_a_child_that_closes_a_socket_keeps_the_epolls_of_its_parent() {
    let program = build("fork_closes");
    assert_eq!(run_native(&program, &[]).output, "lanes: 0, changed: 0\n");
    let with = run_preloaded(&program, &[], &[("MANYLANE_LANES", "2")]);
    assert!(
        ["lanes: 1, changed: 0\n", "lanes: 2, changed: 0\n"].contains(&with.output.as_str()),
        "{}",
        with.output
    );
}
