//! Whether a wait goes on after a signal. The kernel restarts a blocking receive after a handler with SA_RESTART, but
//! never one with a timeout, which ours have: so it is known here how the program's handlers were installed. With some
//! of each kind nobody could tell which one ran, and blocking receivers get no lanes.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use libc::{c_int, sighandler_t};

use crate::calls::call;
use crate::lanes;

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

pub(crate) fn sigaction(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
    let done = call::sigaction(signal, new, old);
    // SAFETY: null, or the program's struct, which the C library has just read.
    if let (0, Some(new)) = (done, unsafe { new.as_ref() }) {
        note(signal, new.sa_sigaction, new.sa_flags & libc::SA_RESTART != 0);
    }
    done
}

pub(crate) fn signal(signal: c_int, handler: sighandler_t) -> sighandler_t {
    let before = call::signal(signal, handler);
    if before != libc::SIG_ERR {
        note(signal, handler, true);
    }
    before
}
