//! Test-only control in builds with debug assertions. Release builds ignore these variables.
//!
//! | variable | effect |
//! |---|---|
//! | `MANYLANE_TEST_DIE_AT`, `MANYLANE_TEST_END_AT` | the first process (thread) that reaches the point of a change with this name dies there |
//! | `MANYLANE_TEST_PREFETCH` | 1: datagrams are prefetched also while all lanes are active; 0: never |

/// A test may kill the process or thread that gets here first. In release builds, nothing.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub(crate) fn hit(_: &str) {}

/// True to prefetch, false not to, if a test decides this instead of the active set. In release
/// builds, none.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub(crate) fn prefetch() -> Option<bool> {
    None
}

/// Reads the variables from the environment, at start.
#[cfg(not(debug_assertions))]
pub(crate) fn start() {}

#[cfg(debug_assertions)]
pub(crate) use armed::{hit, prefetch, start};

#[cfg(debug_assertions)]
mod armed {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    use crate::shared::memory;

    struct Failpoint {
        name: String,
        /// Ends only the thread, without any handler; else kills its process.
        thread_only: bool,
        /// 1 once it has fired; shared with all forked processes.
        fired: &'static AtomicU32,
    }

    static FAILPOINT: OnceLock<Failpoint> = OnceLock::new();
    static PREFETCH: OnceLock<bool> = OnceLock::new();

    pub(crate) fn start() {
        if let Ok(value) = std::env::var("MANYLANE_TEST_PREFETCH") {
            _ = PREFETCH.set(value == "1");
        }
        for (variable, thread) in [("MANYLANE_TEST_DIE_AT", false), ("MANYLANE_TEST_END_AT", true)] {
            if let Ok(name) = std::env::var(variable)
                && let Some([fired]) = memory::map::<AtomicU32>(1, true)
            {
                _ = FAILPOINT.set(Failpoint { name, thread_only: thread, fired });
            }
        }
    }

    pub(crate) fn prefetch() -> Option<bool> {
        PREFETCH.get().copied()
    }

    pub(crate) fn hit(name: &str) {
        if let Some(point) = FAILPOINT.get()
            && point.name == name
            && point.fired.swap(1, Ordering::Relaxed) == 0
        {
            loop {
                // SAFETY: the calls take numbers; the first one ends the thread, or the second one
                // the process.
                unsafe {
                    if point.thread_only {
                        libc::syscall(libc::SYS_exit, 0);
                    }
                    libc::kill(libc::getpid(), libc::SIGKILL);
                    libc::pause();
                }
            }
        }
    }
}
