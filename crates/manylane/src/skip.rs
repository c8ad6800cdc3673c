//! Skips of the library's own tests.

use crate::io::uring;

/// True if io_uring is available. Reports the skip of test `name` if not.
pub(crate) fn need_uring(name: &str) -> bool {
    manylane_test_support::need_uring(name, uring::probe())
}
