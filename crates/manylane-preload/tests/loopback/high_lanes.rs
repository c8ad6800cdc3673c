//! Lanes with descriptors above FD_SETSIZE.

use crate::support::{build, run_native, run_preloaded, run_until_lanes};

#[test]
fn loopback_high_lane_descriptors_are_polled() {
    let (program, expected) = (build("high_lanes"), "0 in vain, 80 of 80\n");
    assert_eq!(run_native(&program, &[]).output, expected);
    let with = run_until_lanes(2, || {
        let with = run_preloaded(&program, &[], &[("MANYLANE_LANES", "8")]);
        assert_eq!((with.output.as_str(), with.reasons()), (expected, vec![]));
        with
    });
    assert_eq!(with.lanes(), 2);
}
