//! Calls that hand out new descriptors. If the table still has an entry for such a number, the old
//! descriptor was closed past the library, and the entry is removed.

use libc::{c_char, c_int, c_uint, mode_t, sigset_t, sockaddr, socklen_t};

use crate::base::real::call;
use crate::fds::hidden_fds;
use crate::lanes::registry::clear_stale;

/// The same for two descriptors, if the call has succeeded.
fn clear_stale_pair(done: c_int, fds: *const c_int) -> c_int {
    if done == 0 {
        for nth in 0..2 {
            // SAFETY: the program's array of two, which the kernel has just written.
            clear_stale(unsafe { *fds.wrapping_add(nth) });
        }
    }
    done
}

pub(crate) fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    clear_stale(call::open(path, flags, mode))
}

pub(crate) fn open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    clear_stale(call::open64(path, flags, mode))
}

pub(crate) fn openat(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    clear_stale(call::openat(hidden_fds::kernel_fd(folder), path, flags, mode))
}

pub(crate) fn openat64(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    clear_stale(call::openat64(hidden_fds::kernel_fd(folder), path, flags, mode))
}

pub(crate) fn open_2(path: *const c_char, flags: c_int) -> c_int {
    clear_stale(call::__open_2(path, flags))
}

pub(crate) fn open64_2(path: *const c_char, flags: c_int) -> c_int {
    clear_stale(call::__open64_2(path, flags))
}

pub(crate) fn openat_2(folder: c_int, path: *const c_char, flags: c_int) -> c_int {
    clear_stale(call::__openat_2(hidden_fds::kernel_fd(folder), path, flags))
}

pub(crate) fn openat64_2(folder: c_int, path: *const c_char, flags: c_int) -> c_int {
    clear_stale(call::__openat64_2(hidden_fds::kernel_fd(folder), path, flags))
}

pub(crate) fn creat(path: *const c_char, mode: mode_t) -> c_int {
    clear_stale(call::creat(path, mode))
}

pub(crate) fn creat64(path: *const c_char, mode: mode_t) -> c_int {
    clear_stale(call::creat64(path, mode))
}

pub(crate) fn memfd_create(name: *const c_char, flags: c_uint) -> c_int {
    clear_stale(call::memfd_create(name, flags))
}

pub(crate) fn pipe(fds: *mut c_int) -> c_int {
    clear_stale_pair(call::pipe(fds), fds)
}

pub(crate) fn pipe2(fds: *mut c_int, flags: c_int) -> c_int {
    clear_stale_pair(call::pipe2(fds, flags), fds)
}

pub(crate) fn socketpair(domain: c_int, kind: c_int, protocol: c_int, fds: *mut c_int) -> c_int {
    clear_stale_pair(call::socketpair(domain, kind, protocol, fds), fds)
}

pub(crate) fn accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
    clear_stale(call::accept(hidden_fds::kernel_fd(fd), addr, len))
}

pub(crate) fn accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int {
    clear_stale(call::accept4(hidden_fds::kernel_fd(fd), addr, len, flags))
}

pub(crate) fn eventfd(count: c_uint, flags: c_int) -> c_int {
    clear_stale(call::eventfd(count, flags))
}

pub(crate) fn timerfd_create(clock: c_int, flags: c_int) -> c_int {
    clear_stale(call::timerfd_create(clock, flags))
}

pub(crate) fn signalfd(fd: c_int, mask: *const sigset_t, flags: c_int) -> c_int {
    let new = call::signalfd(hidden_fds::kernel_fd(fd), mask, flags);
    if new == fd { new } else { clear_stale(new) }
}

pub(crate) fn inotify_init() -> c_int {
    clear_stale(call::inotify_init())
}

pub(crate) fn inotify_init1(flags: c_int) -> c_int {
    clear_stale(call::inotify_init1(flags))
}
