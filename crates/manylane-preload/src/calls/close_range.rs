//! Calls that close all descriptors of a range, except hidden ones.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, IntoRawFd as _};

use libc::{SYS_close, c_int, c_long, c_uint};
use manylane_sys::fd;

use crate::base::quiesce;
use crate::base::real::{self, call};
use crate::batching::send_batch;
use crate::calls::descriptors::{close, close_with, unregister};
use crate::fds::hidden_fds;
use crate::fds::table::{self, Entry};
use crate::shared::thread;
use crate::transfer::detached;

/// Numbers to try, at least, if descriptors cannot be listed: the kernel's default maximum of the
/// limit of open files (`fs.nr_open`).
const NUMBERS_MIN: u64 = 1 << 20;

pub(crate) fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    quiesce::run_inside(|| close_range_tracked(first, last, flags))
        .unwrap_or_else(|| detached::close_range(first, last, flags))
}

fn close_range_tracked(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    const UNSHARE: c_int = 1 << 1;
    const CLOEXEC: c_int = 1 << 2;
    if first > last || flags & !(UNSHARE | CLOEXEC) != 0 || !thread::is_own_process() {
        return call::close_range(first, last, flags);
    }
    send_batch::flush_unless_vforked();
    let mut tracked = table::tracked(first, last).peekable();
    // If the call is refused, the program keeps its descriptors: learn that by a range without any.
    if tracked.peek().is_some() && call::close_range(c_uint::MAX, c_uint::MAX, 0) < 0 {
        return -1;
    }
    // Skip hidden descriptors: lanes close with their sockets.
    let mut from = first;
    for (fd, entry) in tracked {
        let fd = fd as c_uint;
        match entry {
            Entry::Hidden => {
                if fd > from && call::close_range(from, fd - 1, flags) < 0 {
                    return -1;
                }
                from = fd + 1;
            }
            _ if flags & CLOEXEC == 0 => unregister(fd as c_int),
            _ => {}
        }
    }
    if from > last { 0 } else { call::close_range(from, last, flags) }
}

/// closefrom(3). The C library closes what `/proc/self/fd` lists where close_range(2) is refused,
/// by a kernel before 5.9 or a seccomp filter that the program was started with. So does this, if
/// hidden descriptors must stay open.
pub(crate) fn closefrom(first: c_int) {
    let first = first.max(0);
    if close_range(first as c_uint, c_uint::MAX, 0) == 0 {
        return;
    }
    // In the child of a vfork the table is the parent's.
    if thread::is_own_process() {
        let tracked = || table::tracked(first as c_uint, c_uint::MAX);
        tracked().filter(|(_, entry)| *entry != Entry::Hidden).for_each(|(fd, _)| _ = close(fd));
        if tracked().next().is_some() && close_listed(first) {
            return;
        }
    }
    call::closefrom(first);
}

/// Closes the descriptors from `first` on, except hidden ones. False if they cannot be listed: the
/// C library then ends the program.
fn close_listed(first: c_int) -> bool {
    // As in the C library, no cancellation point: a cancelled thread would leave the list open.
    // SAFETY: the argument of this call is a number.
    let close =
        |fd: c_int| close_with(fd, || unsafe { real::syscall(SYS_close, &[c_long::from(fd)]) } as c_int);
    let is_own = |fd: &c_int| table::entry(*fd) != Entry::Hidden;
    // Also above the limit, which may have been lowered below numbers in use.
    let end = c_int::try_from(hidden_fds::fd_limit().max(NUMBERS_MIN)).unwrap_or(c_int::MAX);
    let mut by_number = (first..end).filter(is_own);
    let list = loop {
        match fd::open_list() {
            Ok(list) => break list,
            Err(err) if !is_shortage(&err) => return false,
            // There may be room for the list once a descriptor is closed.
            Err(_) if by_number.any(|fd| close(fd) == 0) => {}
            Err(_) => return true,
        }
    };
    let number = list.as_raw_fd();
    let others = |fd| {
        if fd >= first && fd != number && is_own(&fd) {
            close(fd);
        }
    };
    let listed = fd::for_each_open(list.as_fd(), others);
    close(list.into_raw_fd());
    listed.is_ok()
}

/// True if closing descriptors helps against the error.
fn is_shortage(err: &io::Error) -> bool {
    matches!(err.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM))
}
