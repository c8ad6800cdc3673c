//! The lock around what changes modes and lanes. Never taken to receive or to send on a lane.
//!
//! Signals are blocked while it is held, so that no handler of the same thread can meet it taken; a thread elsewhere
//! holds it for some system calls at most. A process that dies with it leaves it taken: who wants it gives up after a
//! while, and the socket stays as it is.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Yields before sleeping, and sleeps before giving up: the holder may be waiting for a grace period, or for its turn on a
/// machine that is busy. Only one that died takes longer than these 5 s.
const YIELDS: u32 = 100;
const SLEEPS: u32 = 10_000;
const SLEEP: Duration = Duration::from_micros(500);

/// The lock, held.
pub(crate) struct Guard<'a> {
    word: &'a AtomicU32,
    before: libc::sigset_t,
}

/// Takes the lock, unless somebody else has it and `wait` says not to wait.
pub(crate) fn lock(word: &AtomicU32, wait: bool) -> Option<Guard<'_>> {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigfillset fills `all`, and pthread_sigmask fills `before`: neither fails with these arguments.
    let before = unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        before.assume_init()
    };
    let guard = Guard { word, before };
    for attempt in 0..if wait { YIELDS + SLEEPS } else { 1 } {
        if word.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            return Some(guard);
        }
        if wait && attempt < YIELDS {
            std::thread::yield_now();
        } else if wait {
            std::thread::sleep(SLEEP);
        }
    }
    restore(&guard.before);
    std::mem::forget(guard);
    None
}

fn restore(before: &libc::sigset_t) {
    // SAFETY: the set is one that pthread_sigmask gave.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.word.store(0, Ordering::Release);
        restore(&self.before);
    }
}
