//! The number of the calling process. A process id does not tell processes of a program apart: in
//! another PID namespace, a child may have the id of its parent. So each process takes a number
//! from memory that it shares with all processes forked later.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use crate::shared::memory;

manylane_sys::atomics! {
    struct Processes {
        /// Processes so far, without the first one.
        count: AtomicU32,
        /// 1 once a process has been forked into another PID namespace than its parent's.
        has_namespaces: AtomicU32,
    }
}

static PROCESSES: AtomicPtr<Processes> = AtomicPtr::new(ptr::null_mut());
/// Of the calling process; the first one has 0.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Maps the memory, at start.
pub(crate) fn start() {
    if let Some([processes]) = memory::map::<Processes>(1, true) {
        PROCESSES.store(ptr::from_ref(processes).cast_mut(), Ordering::Release);
    }
}

/// Runs in the child of a fork.
pub(crate) fn in_child() {
    let Some(processes) = processes() else { return };
    NUMBER.store(processes.count.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
    // SAFETY: getppid(2) takes nothing and touches no memory.
    if unsafe { libc::getppid() } == 0 {
        processes.has_namespaces.store(1, Ordering::Relaxed);
    }
}

/// The calling process's number. Without the memory it is its process id.
pub(crate) fn number() -> u32 {
    if processes().is_some() { NUMBER.load(Ordering::Relaxed) } else { std::process::id() }
}

/// True if an id of another process, or of its thread, may name something else here.
pub(crate) fn has_pid_namespaces() -> bool {
    processes().is_some_and(|processes| processes.has_namespaces.load(Ordering::Relaxed) != 0)
}

fn processes() -> Option<&'static Processes> {
    // SAFETY: null, or the value that start() mapped, never unmapped.
    unsafe { PROCESSES.load(Ordering::Acquire).as_ref() }
}
