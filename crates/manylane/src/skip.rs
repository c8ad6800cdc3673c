//! Skips of tests, as `manylane_testbed::skip`, which the library's own tests cannot use.

use std::fs::OpenOptions;
use std::io::Write as _;

use crate::io::uring;

/// True if io_uring is available. Reports the skip of test `name` if not.
pub(crate) fn need_uring(name: &str) -> bool {
    let Err(err) = uring::probe() else { return true };
    write(&format!("SKIP {name}: no io_uring: {err} (forced by this kernel)\n"));
    false
}

/// Reports the skip of test `name`. Any machine can be set up for it, so in CI this is a failure.
pub(crate) fn report(name: &str, why: &str) {
    write(&format!("SKIP {name}: {why}\n"));
    assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "{name} may not be skipped in CI: {why}");
}

fn write(line: &str) {
    // Not eprint!, which the test harness captures.
    let _ = std::io::stderr().write_all(line.as_bytes());
    if let Some(path) = std::env::var_os("MANYLANE_SKIPS") {
        let file = OpenOptions::new().create(true).append(true).open(path);
        let _ = file.and_then(|mut file| file.write_all(line.as_bytes()));
    }
}
