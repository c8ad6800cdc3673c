//! Skips of tests, as `manylane_testbed::skip`, which the library's own tests cannot use.

use manylane_test_support::skip;

use crate::io::uring;

/// True if io_uring is available. Reports the skip of test `name` if not.
pub(crate) fn need_uring(name: &str) -> bool {
    let Err(err) = uring::probe() else { return true };
    skip(name, &format_args!("no io_uring: {err} (forced by this kernel)"));
    false
}

/// Reports the skip of test `name`. Any machine can be set up for it, so in CI this is a failure.
pub(crate) fn report(name: &str, why: &str) {
    skip(name, &why);
    assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "{name} may not be skipped in CI: {why}");
}
