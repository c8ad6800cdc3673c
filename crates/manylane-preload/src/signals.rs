//! Whether a wait goes on after a signal. The kernel restarts a blocking receive after a handler with SA_RESTART, but
//! never one with a timeout, which ours have: so it is known here how the program's handlers were installed. With some
//! of each kind nobody could tell which one ran, and blocking receivers get no lanes.
//!
//! Our waits are renewed: a handler that ran between two of them would interrupt none. So a thread that waits in turns blocks
//! signals before the first one ([`Held::hold_back`]), waits with the mask that the program has ([`Held::mask`]), as ppoll(2) and
//! its kin are made for, and has its own mask back at the end ([`Held::let_go`]). Without handlers nothing of it is done, and
//! who seldom has to wait looks first ([`Held::before_wait`]).

use std::cell::{Cell, UnsafeCell};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use libc::{c_int, sighandler_t, sigset_t};

use crate::calls::call;
use crate::{lanes, real};

const SIGNALS: usize = 65;
/// What is known of a signal: no handler, one that restarts calls, one that interrupts them.
const NONE: u8 = 0;
const RESTARTS: u8 = 1;
const INTERRUPTS: u8 = 2;

static KINDS: [AtomicU8; SIGNALS] = [const { AtomicU8::new(NONE) }; SIGNALS];
static COUNTS: [AtomicU32; 3] = [const { AtomicU32::new(0) }; 3];

fn note(signal: c_int, handler: sighandler_t, restarts: bool) {
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
    if before != kind && are_mixed() {
        lanes::signals_are_mixed();
    }
}

/// Whether a receive that a signal interrupted would have gone on without us.
pub(crate) fn restarts() -> bool {
    COUNTS[INTERRUPTS as usize].load(Ordering::Relaxed) == 0
}

/// Whether there are handlers of both kinds.
pub(crate) fn are_mixed() -> bool {
    !restarts() && COUNTS[RESTARTS as usize].load(Ordering::Relaxed) != 0
}

/// Whether there are handlers, which interrupt waits of every kind but a receive without a timeout.
pub(crate) fn are_handled() -> bool {
    COUNTS[RESTARTS as usize].load(Ordering::Relaxed) != 0 || !restarts()
}

/// Looks before a wait that may find nothing until they are made now and then only, and how often that is.
const LUCK: u8 = 4;
const NOW_AND_THEN: u8 = 8;

thread_local! {
    // Without a destructor and with a constant: neither the heap nor a registration is involved.
    static LOOKS: Cell<(u8, u8)> = const { Cell::new((0, 0)) };
}

/// The calling thread's signals, which may wait for the end of a wait in turns. Not given back by `Drop`: a thread that is
/// cancelled unwinds past it.
pub(crate) struct Held {
    before: UnsafeCell<MaybeUninit<sigset_t>>,
    on: Cell<bool>,
}

impl Held {
    /// Signals come as ever.
    pub(crate) fn not() -> Self {
        Self { before: UnsafeCell::new(MaybeUninit::uninit()), on: Cell::new(false) }
    }

    /// Signals are blocked from now on, if there are handlers.
    pub(crate) fn hold_back(&self) {
        if self.on.get() || !are_handled() {
            return;
        }
        let mut all = MaybeUninit::<sigset_t>::uninit();
        // SAFETY: sigfillset fills `all`; pthread_sigmask fills the other one, or fails, and says so. Nobody else has a
        // reference to either.
        self.on.set(unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), self.before.get().cast()) == 0
        });
    }

    /// The first wait of a call is about to begin: `look` says what is there already, and is asked first while it finds
    /// something, else now and then. What it found; none: signals are held back, and the wait begins.
    pub(crate) fn before_wait<T>(&self, look: impl FnOnce() -> Option<T>) -> Option<T> {
        if self.on.get() || !are_handled() {
            return None;
        }
        let asked = LOOKS.with(|looks| {
            let (luck, count) = looks.get();
            looks.set((luck, count.wrapping_add(1)));
            luck > 0 || count.is_multiple_of(NOW_AND_THEN)
        });
        let found = if asked { look() } else { None };
        if asked {
            LOOKS.with(|looks| {
                let (luck, count) = looks.get();
                looks.set((if found.is_some() { LUCK } else { luck.saturating_sub(1) }, count));
            });
        }
        if found.is_none() {
            self.hold_back();
        }
        found
    }

    /// What a wait is to be given: the program's own `mask`, if it gave one; else what was in force.
    pub(crate) fn mask(&self, mask: *const sigset_t) -> *const sigset_t {
        if mask.is_null() && self.on.get() { self.before.get().cast_const().cast() } else { mask }
    }

    /// Signals come as before.
    pub(crate) fn let_go(&self) {
        if self.on.replace(false) {
            // SAFETY: the set is one that pthread_sigmask gave.
            unsafe {
                libc::pthread_sigmask(
                    libc::SIG_SETMASK,
                    self.before.get().cast_const().cast(),
                    ptr::null_mut(),
                )
            };
        }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.on.get()
    }
}

pub(crate) fn sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
    let done = call::sigaction(signal, new, old);
    // SAFETY: null, or the program's struct, which the C library has just read.
    if let (0, Some(new)) = (done, unsafe { new.as_ref() }) {
        note(signal, new.sa_sigaction, new.sa_flags & libc::SA_RESTART != 0);
    }
    done
}

/// A call of the C library has changed what is done about a signal, and has its own idea of how: after siginterrupt(3), signal(2)
/// installs handlers that interrupt, too.
fn look(signal: c_int) {
    let errno = real::errno();
    let mut now = MaybeUninit::<libc::sigaction>::uninit();
    if call::sigaction(signal, ptr::null(), now.as_mut_ptr()) == 0 {
        // SAFETY: the call has succeeded, and has written it.
        let now = unsafe { now.assume_init() };
        note(signal, now.sa_sigaction, now.sa_flags & libc::SA_RESTART != 0);
    }
    real::set_errno(errno);
}

fn installed(signal: c_int, before: sighandler_t) -> sighandler_t {
    if before != libc::SIG_ERR {
        look(signal);
    }
    before
}

pub(crate) fn signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    installed(signal, call::signal(signal, handler))
}

pub(crate) fn bsd_signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    installed(signal, call::bsd_signal(signal, handler))
}

pub(crate) fn ssignal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    installed(signal, call::ssignal(signal, handler))
}

pub(crate) fn sysv_signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    installed(signal, call::sysv_signal(signal, handler))
}

pub(crate) fn sysv_signal_too(signal: c_int, handler: sighandler_t) -> sighandler_t {
    installed(signal, call::__sysv_signal(signal, handler))
}

pub(crate) fn sigset(signal: c_int, handler: sighandler_t) -> sighandler_t {
    installed(signal, call::sigset(signal, handler))
}

pub(crate) fn sigignore(signal: c_int) -> c_int {
    let done = call::sigignore(signal);
    look(signal);
    done
}

pub(crate) fn siginterrupt(signal: c_int, interrupts: c_int) -> c_int {
    let done = call::siginterrupt(signal, interrupts);
    look(signal);
    done
}
