//! The child of a fork closes a socket that its parent still uses.

use crate::support::{build, run_native, run_preloaded};

/// Most runs until one has lanes.
const RUNS_MAX: usize = 4;

#[test]
fn loopback_a_close_in_a_child_keeps_the_epolls_of_its_parent() {
    let program = build("fork_closes");
    let without = run_native(&program, &[]).output;
    assert_eq!(without, "lanes: 0, changed: 0\n");
    // A thread may park before its instance watches its lane: then nothing could have changed.
    let has_lanes = (0..RUNS_MAX).any(|_| {
        let with = run_preloaded(&program, &[], &[("MANYLANE_LANES", "2")]).output;
        assert!(with.ends_with(", changed: 0\n"), "{with}");
        with != without
    });
    assert!(has_lanes);
}
