//! Whether a wait continues after a signal.
//!
//! The kernel restarts a blocking receive after a handler with SA_RESTART, but never a receive
//! with a timeout, which ours have. So the library records how the program installs its handlers,
//! and does what the kernel would have done. If a program has handlers of both kinds, the library
//! cannot tell which one ran, and blocking receivers get no lanes.
//!
//! A wait of ours consists of slices: a handler that runs between two slices would interrupt
//! neither. So a thread that waits in slices blocks all signals before the first one
//! ([`DeferredSignals::defer`]), waits with the program's mask ([`DeferredSignals::wait_mask`]) by
//! ppoll(2) or epoll_pwait(2), and restores its own mask at the end
//! ([`DeferredSignals::release`]). A program without handlers skips all this. A thread that seldom
//! has to wait polls first ([`DeferredSignals::poll_before_wait`]).

use std::cell::{Cell, UnsafeCell};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use libc::{c_int, sighandler_t, sigset_t};

use crate::calls::call;
use crate::{lanes, real};

const SIGNALS_MAX: usize = 65;
/// What is known of a signal: no handler, one that restarts calls, one that interrupts them.
const NONE: u8 = 0;
const RESTARTS: u8 = 1;
const INTERRUPTS: u8 = 2;

static KINDS: [AtomicU8; SIGNALS_MAX] = [const { AtomicU8::new(NONE) }; SIGNALS_MAX];
static COUNTS: [AtomicU32; 3] = [const { AtomicU32::new(0) }; 3];

fn record_handler(signal: c_int, handler: sighandler_t, restarts: bool) {
    let Some(cell) = usize::try_from(signal).ok().and_then(|at| KINDS.get(at)) else { return };
    let kind = match handler {
        libc::SIG_DFL | libc::SIG_IGN => NONE,
        _ if restarts => RESTARTS,
        _ => INTERRUPTS,
    };
    let before = cell.swap(kind, Ordering::Relaxed);
    COUNTS[kind as usize].fetch_add(1, Ordering::Relaxed);
    // The first count also has all that were never seen, so that it may wrap: nobody reads it.
    COUNTS[before as usize].fetch_sub(1, Ordering::Relaxed);
    if before != kind && is_mixed() {
        lanes::on_mixed_signals();
    }
}

/// Whether a receive that a signal interrupted would have gone on without us.
pub(crate) fn should_restart() -> bool {
    COUNTS[INTERRUPTS as usize].load(Ordering::Relaxed) == 0
}

/// Whether there are handlers of both kinds.
pub(crate) fn is_mixed() -> bool {
    !should_restart() && COUNTS[RESTARTS as usize].load(Ordering::Relaxed) != 0
}

/// Whether there are handlers, which interrupt waits of every kind but a receive without a timeout.
pub(crate) fn has_handlers() -> bool {
    COUNTS[RESTARTS as usize].load(Ordering::Relaxed) != 0 || !should_restart()
}

/// Looks before a wait that may find nothing until they are made now and then only, and how often
/// that is.
const CREDITS_MAX: u8 = 4;
const PROBE_INTERVAL: u8 = 8;

thread_local! {
    // Without a destructor and with a constant: neither the heap nor a registration is involved.
    static CREDITS: Cell<(u8, u8)> = const { Cell::new((0, 0)) };
}

/// The calling thread's signals, which may wait for the end of a wait in turns. Not given back by
/// `Drop`: a thread that is cancelled unwinds past it.
pub(crate) struct DeferredSignals {
    old_mask: UnsafeCell<MaybeUninit<sigset_t>>,
    active: Cell<bool>,
}

impl DeferredSignals {
    /// Signals come as ever.
    pub(crate) fn new() -> Self {
        Self { old_mask: UnsafeCell::new(MaybeUninit::uninit()), active: Cell::new(false) }
    }

    /// Signals are blocked from now on, if there are handlers.
    pub(crate) fn defer(&self) {
        if self.active.get() || !has_handlers() {
            return;
        }
        let mut all = MaybeUninit::<sigset_t>::uninit();
        // SAFETY: sigfillset fills `all`; pthread_sigmask fills the other one, or fails, and says
        // so. Nobody else has a reference to either.
        self.active.set(unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), self.old_mask.get().cast()) == 0
        });
    }

    /// The first wait of a call is about to begin: `look` says what is there already, and is asked
    /// first while it finds something, else now and then. What it found; none: signals are held
    /// back, and the wait begins.
    pub(crate) fn poll_before_wait<T>(&self, look: impl FnOnce() -> Option<T>) -> Option<T> {
        if self.active.get() || !has_handlers() {
            return None;
        }
        let asked = CREDITS.with(|looks| {
            let (luck, count) = looks.get();
            looks.set((luck, count.wrapping_add(1)));
            luck > 0 || count.is_multiple_of(PROBE_INTERVAL)
        });
        let found = if asked { look() } else { None };
        if asked {
            CREDITS.with(|looks| {
                let (luck, count) = looks.get();
                looks.set((if found.is_some() { CREDITS_MAX } else { luck.saturating_sub(1) }, count));
            });
        }
        if found.is_none() {
            self.defer();
        }
        found
    }

    /// What a wait is to be given: the program's own `mask`, if it gave one; else what was in
    /// force.
    pub(crate) fn wait_mask(&self, mask: *const sigset_t) -> *const sigset_t {
        if mask.is_null() && self.active.get() { self.old_mask.get().cast_const().cast() } else { mask }
    }

    /// Signals come as before.
    pub(crate) fn release(&self) {
        if self.active.replace(false) {
            // SAFETY: the set is one that pthread_sigmask gave.
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

pub(crate) fn sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
    let done = call::sigaction(signal, new, old);
    // SAFETY: null, or the program's struct, which the C library has just read.
    if let (0, Some(new)) = (done, unsafe { new.as_ref() }) {
        record_handler(signal, new.sa_sigaction, new.sa_flags & libc::SA_RESTART != 0);
    }
    done
}

/// A call of the C library has changed what is done about a signal, and has its own idea of how:
/// after siginterrupt(3), signal(2) installs handlers that interrupt, too.
fn refresh(signal: c_int) {
    let errno = real::errno();
    let mut now = MaybeUninit::<libc::sigaction>::uninit();
    if call::sigaction(signal, ptr::null(), now.as_mut_ptr()) == 0 {
        // SAFETY: the call has succeeded, and has written it.
        let now = unsafe { now.assume_init() };
        record_handler(signal, now.sa_sigaction, now.sa_flags & libc::SA_RESTART != 0);
    }
    real::set_errno(errno);
}

fn refresh_installed(signal: c_int, before: sighandler_t) -> sighandler_t {
    if before != libc::SIG_ERR {
        refresh(signal);
    }
    before
}

pub(crate) fn signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    refresh_installed(signal, call::signal(signal, handler))
}

pub(crate) fn bsd_signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    refresh_installed(signal, call::bsd_signal(signal, handler))
}

pub(crate) fn ssignal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    refresh_installed(signal, call::ssignal(signal, handler))
}

pub(crate) fn sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    refresh_installed(signal, call::sysv_signal(signal, handler))
}

pub(crate) fn sysv_signal_alias(signal: c_int, handler: sighandler_t) -> sighandler_t {
    refresh_installed(signal, call::__sysv_signal(signal, handler))
}

pub(crate) fn sigset(signal: c_int, handler: sighandler_t) -> sighandler_t {
    refresh_installed(signal, call::sigset(signal, handler))
}

pub(crate) fn sigignore(signal: c_int) -> c_int {
    let done = call::sigignore(signal);
    refresh(signal);
    done
}

pub(crate) fn siginterrupt(signal: c_int, interrupts: c_int) -> c_int {
    let done = call::siginterrupt(signal, interrupts);
    refresh(signal);
    done
}
