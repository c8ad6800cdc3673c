//! Skips of tests, and of those that need a testbed.

pub use manylane_test_support::{
    Forced, is_kernel, need, need_kernel, need_leases, need_unless_forced, need_uring, need_whole_gso,
    passes_whole_gso,
};

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

/// The same for a test with a [`LiveSender`](crate::generator::LiveSender) (Linux 5.18).
///
/// # Panics
/// As [`need_root`].
#[must_use]
pub fn need_live_sender(name: &str) -> bool {
    need_root(name) && need_kernel(name, (5, 18), "frames sent by BPF_PROG_TEST_RUN")
}
