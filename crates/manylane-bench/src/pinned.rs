//! Work on one CPU.

use std::thread;

use anyhow::{Context, Result, anyhow};
use manylane_sys::cpu;

/// Runs `work` on a thread of its own, which is pinned to `cpu` if there is one, because the
/// pinning must not outlive the work.
///
/// # Errors
/// Fails if the thread cannot be pinned, and those of `work`.
pub fn run_pinned<T: Send>(cpu: Option<usize>, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| {
        let worker = scope.spawn(|| {
            if let Some(cpu) = cpu {
                cpu::pin(cpu).with_context(|| format!("cannot pin a thread to CPU {cpu}"))?;
            }
            work()
        });
        worker.join().map_err(|_| anyhow!("a thread panicked"))?
    })
}
