//! The lock of changes to modes and lanes. No receive or send on a lane takes it.
//!
//! Signals are blocked while a thread holds it, so that no handler of that thread can find it
//! taken. A thread holds it for a few system calls at most. Its value is the holder's liveness
//! token (`liveness.rs`): the lock of a thread that died counts as free, and the next holder
//! finishes the change that was begun (`recovery.rs`). A holder that is stopped may continue: a
//! thread that waits for the lock gives up after some seconds, and the socket stays as it is.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::base::signals::SignalMask;
use crate::shared::{liveness, thread};

/// Yields before sleeping, and sleeps before giving up. The holder may be waiting for a grace
/// period, or for a busy CPU. Only a stopped holder takes longer than these 5 s.
const YIELDS_MAX: u32 = 100;
const SLEEPS_MAX: u32 = 10_000;
const SLEEP_INTERVAL: Duration = Duration::from_micros(500);

/// Holder without a liveness token: other threads will not see it die.
pub(crate) const UNTRACKED_HOLDER: u64 = u64::MAX;

/// The lock, held.
pub(crate) struct Guard<'a> {
    word: &'a AtomicU64,
    /// Dropped after the lock is released.
    _signal_mask: SignalMask,
}

/// Takes the lock. With `wait` false, gives up at once if another live thread holds it.
pub(crate) fn lock(word: &AtomicU64, wait: bool) -> Option<Guard<'_>> {
    let signal_mask = SignalMask::new();
    let mine = match thread::liveness() {
        0 => UNTRACKED_HOLDER,
        token => token,
    };
    for attempt in 0..if wait { YIELDS_MAX + SLEEPS_MAX } else { 1 } {
        let holder = word.load(Ordering::Relaxed);
        // A token is never reused: the holder seen dead here is the one that is replaced below.
        if (holder == 0 || liveness::has_exited(holder))
            && word.compare_exchange(holder, mine, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        {
            return Some(Guard { word, _signal_mask: signal_mask });
        }
        if wait && attempt < YIELDS_MAX {
            std::thread::yield_now();
        } else if wait {
            std::thread::sleep(SLEEP_INTERVAL);
        }
    }
    None
}

/// True if the holder of the lock has died.
#[inline]
pub(crate) fn is_holder_dead(word: &AtomicU64) -> bool {
    let holder = word.load(Ordering::Relaxed);
    holder != 0 && liveness::has_exited(holder)
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.word.store(0, Ordering::Release);
    }
}
