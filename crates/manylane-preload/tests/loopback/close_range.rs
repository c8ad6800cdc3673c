//! closefrom(3) where close_range(2) is refused: it closes what the program has open, and nothing
//! of the library's.

use crate::support::{build, run_native, run_preloaded, run_until_lanes};

#[test]
fn loopback_closefrom_without_close_range_keeps_lanes() {
    let program = build("close_range_refused");
    for (errno, name) in [(libc::EPERM, "EPERM"), (libc::ENOSYS, "ENOSYS")] {
        for (files, open) in [("some", "open: 302"), ("full", "full: 1")] {
            let args = [&*errno.to_string(), files];
            let output = format!("close_range: -1, {name}\n{open}\nafter closefrom: 0\n");
            assert_eq!(run_native(&program, &args).output, output, "{args:?}, without the library");
            let with = run_until_lanes(2, || {
                let with = run_preloaded(&program, &args, &[("MANYLANE_LANES", "8")]);
                assert_eq!(with.output, output, "{args:?}");
                with
            });
            // The reason is of the program that installed the filter, and started this one.
            assert_eq!((with.lanes(), with.reasons()), (2, vec!["seccomp"]), "{args:?}");
        }
    }
}

#[test]
fn loopback_closefrom_by_close_closes_above_a_lowered_limit() {
    let program = build("close_range_refused");
    let with = run_until_lanes(2, || {
        let with = run_preloaded(&program, &["1", "lowered"], &[("MANYLANE_LANES", "8")]);
        assert_eq!(with.output, "close_range: -1, EPERM\nfull: 1\nafter closefrom: 0\n");
        with
    });
    assert_eq!((with.lanes(), with.reasons()), (2, vec!["seccomp"]));
}
