//! Points of a change at which a test has a process die. Release builds have none.

/// A process dies here, if a test asks for it: the first of all that come by.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub(crate) fn pass(_: &str) {}

#[cfg(debug_assertions)]
pub(crate) use armed::pass;

/// What the environment asks for, read at start.
#[cfg(not(debug_assertions))]
pub(crate) fn start() {}

#[cfg(debug_assertions)]
pub(crate) use armed::start;

#[cfg(debug_assertions)]
mod armed {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    use crate::memory::{self, Atomics};

    /// Whether somebody died already: one memory for all that is forked.
    #[repr(C)]
    struct Fired(AtomicU32);

    // SAFETY: an atomic.
    unsafe impl Atomics for Fired {}

    static POINT: OnceLock<(String, &'static Fired)> = OnceLock::new();

    pub(crate) fn start() {
        if let Ok(name) = std::env::var("MANYLANE_TEST_DIE_AT")
            && let Some([fired]) = memory::map::<Fired>(1, true)
        {
            _ = POINT.set((name, fired));
        }
    }

    pub(crate) fn pass(name: &str) {
        if let Some((point, fired)) = POINT.get()
            && point == name
            && fired.0.swap(1, Ordering::Relaxed) == 0
        {
            loop {
                // SAFETY: the calls take numbers; the first one ends the process.
                unsafe {
                    libc::kill(libc::getpid(), libc::SIGKILL);
                    libc::pause();
                }
            }
        }
    }
}
