//! Skips of tests, and of those that need a testbed.

pub use manylane_test_support::{Forced, need, need_unless_forced};

/// True if the calling test, `name`, can build a [`Testbed`](crate::topology::Testbed) here.
/// Reports a skip if not: `if !skip::need_root("netns_name") { return; }`
///
/// # Panics
/// In CI, where it must be possible.
#[must_use]
pub fn need_root(name: &str) -> bool {
    match crate::topology::available() {
        Ok(()) => true,
        Err(why) => need(name, false, &format!("{why:#}")),
    }
}
