//! Calls that hand out new descriptors. If the table still has an entry for such a number, the old
//! descriptor was closed past the library, and the entry is removed. Those that do no more than
//! that are only in the list (`functions.rs`).

use libc::{c_char, c_int, mode_t, sigset_t, sockaddr, socklen_t};

use crate::base::real::call;
use crate::fds::hidden_fds;
use crate::lanes::registry::clear_stale;

/// Makes handlers that only make the program's own call, which returns a new descriptor.
macro_rules! new_fd {
    ($(unsafe fn $name:ident($($arg:ident: $ty:ty),*) => $own:expr;)*) => {
        $(pub(crate) unsafe fn $name($($arg: $ty),*) -> c_int {
            // SAFETY: program arguments.
            clear_stale(unsafe { $own })
        })*
    };
}

new_fd! {
    unsafe fn openat(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t)
        => call::openat(hidden_fds::kernel_fd(folder), path, flags, mode);
    unsafe fn openat64(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t)
        => call::openat64(hidden_fds::kernel_fd(folder), path, flags, mode);
    unsafe fn openat_2(folder: c_int, path: *const c_char, flags: c_int)
        => call::__openat_2(hidden_fds::kernel_fd(folder), path, flags);
    unsafe fn openat64_2(folder: c_int, path: *const c_char, flags: c_int)
        => call::__openat64_2(hidden_fds::kernel_fd(folder), path, flags);
    unsafe fn accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t)
        => call::accept(hidden_fds::kernel_fd(fd), addr, len);
    unsafe fn accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int)
        => call::accept4(hidden_fds::kernel_fd(fd), addr, len, flags);
}

/// Removes stale entries of two new descriptors, if the call has succeeded.
unsafe fn clear_stale_pair(done: c_int, fds: *const c_int) -> c_int {
    if done == 0 {
        for nth in 0..2 {
            // SAFETY: program arguments: the kernel has just written both.
            clear_stale(unsafe { *fds.wrapping_add(nth) });
        }
    }
    done
}

pub(crate) unsafe fn pipe(fds: *mut c_int) -> c_int {
    // SAFETY: program arguments.
    unsafe { clear_stale_pair(call::pipe(fds), fds) }
}

pub(crate) unsafe fn pipe2(fds: *mut c_int, flags: c_int) -> c_int {
    // SAFETY: program arguments.
    unsafe { clear_stale_pair(call::pipe2(fds, flags), fds) }
}

pub(crate) unsafe fn socketpair(domain: c_int, kind: c_int, protocol: c_int, fds: *mut c_int) -> c_int {
    // SAFETY: program arguments.
    unsafe { clear_stale_pair(call::socketpair(domain, kind, protocol, fds), fds) }
}

pub(crate) unsafe fn signalfd(fd: c_int, mask: *const sigset_t, flags: c_int) -> c_int {
    // SAFETY: program arguments.
    let new = unsafe { call::signalfd(hidden_fds::kernel_fd(fd), mask, flags) };
    if new == fd { new } else { clear_stale(new) }
}
