//! Skips of the library's own tests.

use manylane_test_support::{Forced, need_unless_forced};

use crate::io::uring;

/// True if io_uring is available. Reports the skip of test `name` if not.
pub(crate) fn need_uring(name: &str) -> bool {
    let Err(err) = uring::probe() else { return true };
    need_unless_forced(name, false, Forced::Kernel, &format!("no io_uring: {err}"))
}
