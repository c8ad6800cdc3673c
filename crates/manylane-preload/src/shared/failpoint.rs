//! Points of a change at which a test kills a process or a thread. Release builds have none.

/// A test may kill the process or thread that gets here first. In release builds, nothing.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub(crate) fn hit(_: &str) {}

#[cfg(debug_assertions)]
pub(crate) use armed::hit;

/// Reads the failpoint from the environment, at start.
#[cfg(not(debug_assertions))]
pub(crate) fn start() {}

#[cfg(debug_assertions)]
pub(crate) use armed::start;

#[cfg(debug_assertions)]
mod armed {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};

    use crate::shared::memory::{self, Zeroed};

    /// 1 once it has fired; shared with all forked processes.
    #[repr(C)]
    struct Fired(AtomicU32);

    // SAFETY: an atomic.
    unsafe impl Zeroed for Fired {}

    struct Failpoint {
        name: String,
        /// Ends only the thread, without any handler; else kills its process.
        thread_only: bool,
        fired: &'static Fired,
    }

    static FAILPOINT: OnceLock<Failpoint> = OnceLock::new();

    pub(crate) fn start() {
        for (variable, thread) in [("MANYLANE_TEST_DIE_AT", false), ("MANYLANE_TEST_END_AT", true)] {
            if let Ok(name) = std::env::var(variable)
                && let Some([fired]) = memory::map::<Fired>(1, true)
            {
                _ = FAILPOINT.set(Failpoint { name, thread_only: thread, fired });
            }
        }
    }

    pub(crate) fn hit(name: &str) {
        if let Some(point) = FAILPOINT.get()
            && point.name == name
            && point.fired.0.swap(1, Ordering::Relaxed) == 0
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
