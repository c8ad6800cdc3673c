//! Skips of tests.

use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::Write as _;

/// Reports that the test `name` cannot run here, past the test harness, which hides the output of
/// passing tests, and in the file that `MANYLANE_SKIPS` names.
pub fn skip(name: &str, why: &dyn Display) {
    let line = format!("SKIP {name}: {why}\n");
    // A skip that cannot be reported is not worth a failure.
    _ = std::io::stderr().write_all(line.as_bytes());
    if let Some(path) = std::env::var_os("MANYLANE_SKIPS") {
        // One write in append mode: tests run in parallel, also in several processes.
        let file = OpenOptions::new().create(true).append(true).open(path);
        _ = file.and_then(|mut file| file.write_all(line.as_bytes()));
    }
}
