//! Calls that install signal handlers, and what they install: `signals.rs`.

use std::mem::MaybeUninit;
use std::ptr;

use libc::{c_int, sighandler_t};

use crate::base::real::{self, call};
use crate::base::signals;
use crate::lanes::fallback;

fn record(signal: c_int, handler: sighandler_t, restarts: bool) {
    if signals::record_handler(signal, handler, restarts) {
        fallback::on_mixed_signals();
    }
}

pub(crate) unsafe fn sigaction(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    // SAFETY: program arguments.
    unsafe {
        let done = call::sigaction(signal, new, old);
        if let (0, Some(new)) = (done, new.as_ref()) {
            record(signal, new.sa_sigaction, new.sa_flags & libc::SA_RESTART != 0);
        }
        done
    }
}

/// Reads back the handler that a call of the C library installed, with flags of its choice: after
/// siginterrupt(3), signal(2) installs handlers that interrupt, too. Returns the call's result.
pub(crate) fn refresh<T>(done: T, signal: c_int) -> T {
    let errno = real::errno();
    let mut now = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: the call installs nothing, and writes the struct if it succeeds.
    unsafe {
        if call::sigaction(signal, ptr::null(), now.as_mut_ptr()) == 0 {
            let now = now.assume_init();
            record(signal, now.sa_sigaction, now.sa_flags & libc::SA_RESTART != 0);
        }
    }
    real::set_errno(errno);
    done
}
