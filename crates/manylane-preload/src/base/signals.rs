//! Decides if a wait continues after a signal.
//!
//! The kernel restarts a blocking receive after a handler with SA_RESTART, but never a receive
//! with a timeout, which ours have. So the library records how the program installs its handlers,
//! and does what the kernel would have done. If a program has handlers of both kinds, the library
//! cannot tell which one ran, and blocking receivers get no lanes.
//!
//! A wait of ours consists of slices: a handler that runs between two slices would interrupt
//! neither. So a thread blocks all signals once a slice has passed in vain
//! ([`DeferredSignals::defer`]), waits with the program's mask ([`DeferredSignals::wait_mask`]) by
//! ppoll(2) or epoll_pwait(2), and restores its own mask at the end
//! ([`DeferredSignals::release`]). Most waits end in their first slice, and need none of this. A
//! program without handlers skips it, too.
//!
//! A signal that arrives between the first slice and the call that blocks signals, some hundred
//! nanoseconds later, does not interrupt the wait: as one that arrives just before a wait.

use std::cell::{Cell, UnsafeCell};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

use libc::{c_int, sighandler_t, sigset_t};

const SIGNALS_MAX: usize = 65;
/// Kinds of handlers of a signal: none, one that restarts calls, one that interrupts them.
const NONE: u8 = 0;
const RESTARTS: u8 = 1;
const INTERRUPTS: u8 = 2;

static KINDS: [AtomicU8; SIGNALS_MAX] = [const { AtomicU8::new(NONE) }; SIGNALS_MAX];
static COUNTS: [AtomicU32; 3] = [const { AtomicU32::new(0) }; 3];

/// Records a handler of the program. True if there are handlers of both kinds now that were not
/// before.
pub(crate) fn record_handler(signal: c_int, handler: sighandler_t, restarts: bool) -> bool {
    let Some(cell) = usize::try_from(signal).ok().and_then(|at| KINDS.get(at)) else { return false };
    let kind = match handler {
        libc::SIG_DFL | libc::SIG_IGN => NONE,
        _ if restarts => RESTARTS,
        _ => INTERRUPTS,
    };
    let before = cell.swap(kind, Ordering::Relaxed);
    COUNTS[kind as usize].fetch_add(1, Ordering::Relaxed);
    // The count of `NONE` may wrap, as it lacks signals never seen. It is never read.
    COUNTS[before as usize].fetch_sub(1, Ordering::Relaxed);
    before != kind && is_mixed()
}

/// True if the kernel would have restarted a receive that a signal interrupted.
pub(crate) fn should_restart() -> bool {
    COUNTS[INTERRUPTS as usize].load(Ordering::Relaxed) == 0
}

/// True if there are handlers of both kinds.
pub(crate) fn is_mixed() -> bool {
    !should_restart() && COUNTS[RESTARTS as usize].load(Ordering::Relaxed) != 0
}

/// True if there are handlers. They interrupt every wait but a receive without a timeout.
pub(crate) fn has_handlers() -> bool {
    COUNTS[RESTARTS as usize].load(Ordering::Relaxed) != 0 || !should_restart()
}

/// Signals of the calling thread that are blocked between the slices of a wait. `Drop` does not
/// restore the mask: a thread that is cancelled unwinds past it.
pub(crate) struct DeferredSignals {
    old_mask: UnsafeCell<MaybeUninit<sigset_t>>,
    active: Cell<bool>,
}

impl DeferredSignals {
    /// Starts with signals not blocked.
    pub(crate) fn new() -> Self {
        Self { old_mask: UnsafeCell::new(MaybeUninit::uninit()), active: Cell::new(false) }
    }

    /// A slice by `wait`, which gets the mask for the kernel's call. Signals are blocked once it
    /// has returned 0.
    pub(crate) fn wait_slice(
        &self,
        mask: Option<&sigset_t>,
        wait: impl FnOnce(Option<&sigset_t>) -> c_int,
    ) -> c_int {
        let answer = wait(self.wait_mask(mask));
        if answer == 0 {
            self.defer();
        }
        answer
    }

    /// As [`wait_slice`](Self::wait_slice), or a look that does not wait, which blocks no signals.
    pub(crate) fn wait_or_look(
        &self,
        mask: Option<&sigset_t>,
        time: Duration,
        wait: impl FnOnce(Option<&sigset_t>) -> c_int,
    ) -> c_int {
        if time.is_zero() { wait(self.wait_mask(mask)) } else { self.wait_slice(mask, wait) }
    }

    /// Blocks signals, if there are handlers.
    pub(crate) fn defer(&self) {
        if !self.active.get() && has_handlers() {
            self.block();
        }
    }

    fn block(&self) {
        let mut all = MaybeUninit::<sigset_t>::uninit();
        // SAFETY: sigfillset fills `all`; pthread_sigmask fills the other one, or fails, and says
        // so. No other reference to either exists.
        self.active.set(unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), self.old_mask.get().cast()) == 0
        });
    }

    /// The mask for a wait: the program's own `mask` if it gave one; else the one before
    /// [`defer`](Self::defer).
    pub(crate) fn wait_mask<'a>(&'a self, mask: Option<&'a sigset_t>) -> Option<&'a sigset_t> {
        if mask.is_none() && self.active.get() {
            // SAFETY: pthread_sigmask has filled the set, and nothing writes to it while this is
            // active.
            return Some(unsafe { &*self.old_mask.get().cast::<sigset_t>() });
        }
        mask
    }

    /// Restores the thread's mask.
    pub(crate) fn release(&self) {
        if self.active.replace(false) {
            // SAFETY: the set is the one that pthread_sigmask returned.
            unsafe {
                libc::pthread_sigmask(
                    libc::SIG_SETMASK,
                    self.old_mask.get().cast_const().cast(),
                    ptr::null_mut(),
                )
            };
        }
    }

    pub(crate) fn is_active(&self) -> bool {
        self.active.get()
    }
}

/// Blocks all signals of the calling thread until it is dropped.
pub(crate) struct SignalMask(DeferredSignals);

impl SignalMask {
    pub(crate) fn new() -> Self {
        let signals = DeferredSignals::new();
        signals.block();
        Self(signals)
    }
}

impl Drop for SignalMask {
    fn drop(&mut self) {
        self.0.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_blocked_after_a_slice_in_vain_if_there_are_handlers() {
        let is_blocked = || {
            let mut mask = MaybeUninit::<sigset_t>::uninit();
            // SAFETY: pthread_sigmask fills the set, which sigismember reads.
            unsafe {
                assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, ptr::null(), mask.as_mut_ptr()), 0);
                libc::sigismember(mask.as_ptr(), libc::SIGUSR1) == 1
            }
        };
        for (handler, ms, answer, expected) in [
            (7, 20, 0, true),
            (7, 0, 0, false),
            (7, 20, 1, false),
            (7, 20, -1, false),
            (libc::SIG_DFL, 20, 0, false),
        ] {
            record_handler(libc::SIGUSR1, handler, false);
            let signals = DeferredSignals::new();
            signals.wait_or_look(None, Duration::from_millis(ms), |mask| {
                assert!(mask.is_none() && !is_blocked());
                answer
            });
            assert_eq!((signals.is_active(), is_blocked()), (expected, expected), "{handler} {ms} {answer}");
            assert_eq!(signals.wait_mask(None).is_some(), expected);
            signals.release();
            assert!(!is_blocked());
        }
    }
}
