//! Calls that hand out descriptors. What their numbers meant before was closed past the library, and is forgotten.

use libc::{c_char, c_int, c_uint, mode_t, msghdr, sigset_t, sockaddr, socklen_t};

use crate::calls::call;
use crate::descriptors::remember;
use crate::table::{self, Entry};
use crate::{hidden, inside};

/// `fd` is none of the library's business.
#[inline]
pub(crate) fn fresh(fd: c_int) -> c_int {
    if fd >= 0 && table::entry(fd) != Entry::None && inside::enter() {
        remember(fd, Entry::None);
        inside::leave();
    }
    fd
}

/// Two of them, where the call has succeeded.
fn both(done: c_int, fds: *const c_int) -> c_int {
    if done == 0 {
        for nth in 0..2 {
            // SAFETY: the program's array of two, which the kernel has just written.
            fresh(unsafe { *fds.wrapping_add(nth) });
        }
    }
    done
}

pub(crate) fn open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    fresh(call::open(path, flags, mode))
}

pub(crate) fn open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    fresh(call::open64(path, flags, mode))
}

pub(crate) fn openat(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    fresh(call::openat(hidden::seen(folder), path, flags, mode))
}

pub(crate) fn openat64(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
    fresh(call::openat64(hidden::seen(folder), path, flags, mode))
}

pub(crate) fn open_2(path: *const c_char, flags: c_int) -> c_int {
    fresh(call::__open_2(path, flags))
}

pub(crate) fn open64_2(path: *const c_char, flags: c_int) -> c_int {
    fresh(call::__open64_2(path, flags))
}

pub(crate) fn openat_2(folder: c_int, path: *const c_char, flags: c_int) -> c_int {
    fresh(call::__openat_2(hidden::seen(folder), path, flags))
}

pub(crate) fn openat64_2(folder: c_int, path: *const c_char, flags: c_int) -> c_int {
    fresh(call::__openat64_2(hidden::seen(folder), path, flags))
}

pub(crate) fn creat(path: *const c_char, mode: mode_t) -> c_int {
    fresh(call::creat(path, mode))
}

pub(crate) fn creat64(path: *const c_char, mode: mode_t) -> c_int {
    fresh(call::creat64(path, mode))
}

pub(crate) fn memfd_create(name: *const c_char, flags: c_uint) -> c_int {
    fresh(call::memfd_create(name, flags))
}

pub(crate) fn pipe(fds: *mut c_int) -> c_int {
    both(call::pipe(fds), fds)
}

pub(crate) fn pipe2(fds: *mut c_int, flags: c_int) -> c_int {
    both(call::pipe2(fds, flags), fds)
}

pub(crate) fn socketpair(domain: c_int, kind: c_int, protocol: c_int, fds: *mut c_int) -> c_int {
    both(call::socketpair(domain, kind, protocol, fds), fds)
}

pub(crate) fn accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
    fresh(call::accept(hidden::seen(fd), addr, len))
}

pub(crate) fn accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int {
    fresh(call::accept4(hidden::seen(fd), addr, len, flags))
}

pub(crate) fn eventfd(count: c_uint, flags: c_int) -> c_int {
    fresh(call::eventfd(count, flags))
}

pub(crate) fn timerfd_create(clock: c_int, flags: c_int) -> c_int {
    fresh(call::timerfd_create(clock, flags))
}

pub(crate) fn signalfd(fd: c_int, mask: *const sigset_t, flags: c_int) -> c_int {
    let new = call::signalfd(hidden::seen(fd), mask, flags);
    if new == fd { new } else { fresh(new) }
}

pub(crate) fn inotify_init() -> c_int {
    fresh(call::inotify_init())
}

pub(crate) fn inotify_init1(flags: c_int) -> c_int {
    fresh(call::inotify_init1(flags))
}

/// A message was received on something that is not UDP: descriptors may have come with it (SCM_RIGHTS).
pub(crate) fn came_with(message: *const msghdr) {
    crate::send::for_each_descriptor(message, |fd| _ = fresh(fd));
}
