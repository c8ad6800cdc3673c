//! Descriptors of the library's own: lanes, queues on loan, copies of the program's sockets. The program does not know of them.
//!
//! Their numbers are where programs seldom look. The program may name one all the same (dup2(2)): lanes move then, copies are
//! waited for, and queues stay. So that neither side takes the other's file away, a number is taken, and marked in the table,
//! under a lock that dup2 has, too.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use libc::{c_int, c_ulong};

use crate::calls::call;
use crate::lock::{self, Guard};
use crate::sock::Sock;
use crate::table::{self, Entry};
use crate::{loan, me, open, report};

static NUMBERS: AtomicU64 = AtomicU64::new(0);

/// No number is taken by another thread while this is held. No other lock is waited for with it.
pub(crate) fn lock() -> Option<Guard<'static>> {
    lock::lock(&NUMBERS, true)
}

/// In the child of a fork: what threads of the parent had locked is a copy, and nobody will open it.
pub(crate) fn in_child() {
    NUMBERS.store(0, Ordering::Relaxed);
}

/// Hides the descriptor that `open` returns, out of the way; a negative one is an error.
pub(crate) fn take(open: impl FnOnce() -> c_int) -> c_int {
    let _numbers = lock();
    let low = open();
    if low < 0 {
        return low;
    }
    let high = copy(low);
    let fd = if high < 0 { low } else { high };
    table::set(fd, Entry::Hidden);
    if high >= 0 {
        call::close(low);
    }
    fd
}

/// Another descriptor for the same, where programs seldom look; negative if there is none left.
fn copy(fd: c_int) -> c_int {
    // Not at the very top: the kernel's table of descriptors grows with the largest number, and select(2) takes sets to be as
    // long as that table where a program says no less. Sets of the C library's size are to remain enough.
    call::fcntl(fd, libc::F_DUPFD_CLOEXEC, (open::limit() / 2).min(libc::FD_SETSIZE as u64 / 2))
}

/// Moves a descriptor there, without hiding it yet.
pub(crate) fn out_of_the_way(low: c_int) -> c_int {
    let _numbers = lock();
    let high = copy(low);
    if high < 0 {
        return low;
    }
    call::close(low);
    high
}

/// Closes a descriptor of the library's own, unless the program has closed it past the library and has the number now.
pub(crate) fn close(fd: c_int) {
    if table::entry(fd) == Entry::Hidden {
        call::close(fd);
        table::replace(fd, Entry::Hidden, Entry::None);
    }
}

static READABLE: AtomicI32 = AtomicI32::new(-1);

/// A descriptor that is always readable, the same for all uses; none if there is no room for one.
pub(crate) fn readable() -> Option<c_int> {
    if let Some(fd) = readable_if_any() {
        return Some(fd);
    }
    let new = take(|| call::eventfd(1, libc::EFD_CLOEXEC));
    match READABLE.compare_exchange(-1, new, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => (new >= 0).then_some(new),
        Err(other) => {
            close(new);
            Some(other)
        }
    }
}

/// The same, if there has been a use of it.
pub(crate) fn readable_if_any() -> Option<c_int> {
    Some(READABLE.load(Ordering::Acquire)).filter(|fd| *fd >= 0)
}

/// The program has the number `fd` now.
pub(crate) fn lost(fd: c_int) {
    _ = READABLE.compare_exchange(fd, -1, Ordering::AcqRel, Ordering::Relaxed);
}

/// A descriptor of our own for a socket of the program, which may close its own, and use their numbers for something else, while
/// this is used.
pub(crate) struct Kept(c_int);

impl Kept {
    pub(crate) fn of(fd: c_int) -> Option<Self> {
        let _numbers = lock();
        let copy = copy(fd);
        (copy >= 0).then(|| {
            table::set(copy, Entry::Hidden);
            Self(copy)
        })
    }

    pub(crate) fn fd(&self) -> c_int {
        self.0
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        close(self.0);
    }
}

/// What the program gets of a number that it wants.
pub(crate) enum Room {
    /// The number: a lane was there, and has moved.
    Made,
    /// The number, with what is there: it is not worth failing the program for.
    Given,
    /// Nothing yet: the descriptor there is in use for a moment.
    Later,
    Never,
}

/// The program wants the number of a descriptor of the library's own. With the lock.
pub(crate) fn make_room(to: c_int) -> Room {
    // Queues cannot move.
    if loan::has(to) {
        return Room::Never;
    }
    if report::has(to) || READABLE.load(Ordering::Relaxed) == to {
        return Room::Given;
    }
    let lanes = Sock::in_use().flat_map(|sock| sock.lane_fds().map(move |(lane, fd)| (sock, lane, fd)));
    let Some((sock, lane, _)) = lanes.into_iter().find(|(_, _, fd)| *fd == to) else { return Room::Later };
    let new = call::fcntl(to, libc::F_DUPFD_CLOEXEC, to as c_ulong + 1);
    if new < 0 {
        return Room::Never;
    }
    table::set(new, Entry::Hidden);
    sock.set_lane_fd(lane, Some(new));
    table::replace(to, Entry::Hidden, Entry::None);
    Room::Made
}

/// A number that is never open; a negative one is none to poll(2).
const NOT_OPEN: c_int = c_int::MAX;

/// The number that the kernel is given for `fd` of a call of the program: of a descriptor that the program does not have, one
/// that is not open, so that the call fails as it would without the library.
#[inline]
pub(crate) fn seen(fd: c_int) -> c_int {
    if table::entry(fd) == Entry::Hidden { out_of_sight(fd) } else { fd }
}

#[cold]
fn out_of_sight(fd: c_int) -> c_int {
    // The child of a vfork may have put a file of its own there, which the table of the parent does not say.
    if me::is_ours() { NOT_OPEN } else { fd }
}

/// The UDP socket behind `fd` of a call of the program; if it is none, the number for the kernel, as of [`seen`].
#[inline]
pub(crate) fn sock(fd: c_int) -> Result<&'static Sock, c_int> {
    match table::entry(fd) {
        Entry::Sock(index) => Ok(Sock::at(index)),
        Entry::Hidden => Err(out_of_sight(fd)),
        _ => Err(fd),
    }
}
