//! Descriptors of the library's own: lanes, queues on lease and their connections, copies of the
//! program's sockets, the report's, one that is always readable. The program does not see them.
//!
//! Those that the library opens are close-on-exec, with numbers that programs seldom use: from 512
//! on, or from half of the limit of open files if that is lower, if such a number is free. To the
//! program these numbers are not open: a call on one fails with EBADF, and `close_range` goes
//! around them. If the program puts a file at such a number (dup2(2)), a lane moves, dup2 waits for
//! a copy, fails for a lease, and replaces what the library can do without. The library opens and
//! marks a number under the same lock as dup2, so that neither side takes the other's file away.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, IntoRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use libc::c_int;

use crate::base::real::{self, call};
use crate::fds::table::{self, Entry};
use crate::shared::lock::{self, Guard};
use crate::shared::sock::Sock;
use crate::shared::{report, thread};

static FD_LOCK: AtomicU64 = AtomicU64::new(0);

/// While this is held, no other thread takes a number. Its holder may wait for the lock of an entry
/// (`entries::lock_entry`), whose holders do not wait for this one.
pub(crate) fn lock() -> Option<Guard<'static>> {
    lock::lock(&FD_LOCK, true)
}

/// In the child of a fork: a lock held by a thread of the parent is a copy that no thread will
/// release. So are the [`HiddenFd`]s that such threads have: left open, they would keep sockets
/// open, and their ports in use. But if the fork `interrupted` the library, in a signal handler,
/// the thread may go on with its own ones.
pub(crate) fn in_child(interrupted: bool) {
    FD_LOCK.store(0, Ordering::Relaxed);
    if !interrupted && OWNED_COUNT.swap(0, Ordering::Relaxed) != 0 {
        let hidden = table::tracked(0, u32::MAX).filter(|(_, entry)| *entry == Entry::Hidden);
        hidden.filter(|(fd, _)| !is_in_use(*fd)).for_each(|(fd, _)| close_locked(fd));
    }
}

/// True if a hidden descriptor belongs to the process, and not to a thread for a moment.
fn is_in_use(fd: c_int) -> bool {
    let has = |sock: &Sock| {
        sock.lane_fds().any(|(_, lane)| lane == fd) || sock.lease().is_some_and(|lease| lease.has_fd(fd))
    };
    report::is_report_fd(fd) || readable_fd_if_open() == Some(fd) || Sock::in_use().any(has)
}

/// Hides the descriptor that `open` returns, at a high number; a negative one is an error.
pub(crate) fn hide(open: impl FnOnce() -> c_int) -> c_int {
    let _numbers = lock();
    let low = open();
    if low < 0 {
        return low;
    }
    let high = dup_high(low);
    let fd = if high < 0 { low } else { high };
    table::set(fd, Entry::Hidden);
    if high >= 0 {
        call::close(low);
    }
    fd
}

/// Duplicates a descriptor to a number that programs seldom use; negative if none is free.
fn dup_high(fd: c_int) -> c_int {
    // Not at the very top: the kernel's table of descriptors grows with the largest number, and
    // select(2) takes sets to be as long as that table if a program passes a large count. Sets of
    // the C library's size must stay long enough.
    real::dup_from(fd, (fd_limit() / 2).min(libc::FD_SETSIZE as u64 / 2))
}

/// Moves a descriptor to such a number; the caller hides it. Requires the lock.
pub(crate) fn move_high(low: OwnedFd) -> OwnedFd {
    let high = dup_high(low.as_raw_fd());
    if high < 0 {
        return low;
    }
    close_unhidden(low);
    // SAFETY: the descriptor is new and has no other owner.
    unsafe { OwnedFd::from_raw_fd(high) }
}

/// Closes a descriptor that is not hidden. Requires the lock.
pub(crate) fn close_unhidden(fd: OwnedFd) {
    // By the C library's call: the library's own handles descriptors of the program.
    call::close(fd.into_raw_fd());
}

/// Closes a hidden descriptor, unless the program has closed it unseen and uses the number now.
pub(crate) fn close(fd: c_int) {
    let _numbers = lock();
    close_locked(fd);
}

/// [`close`]. Requires the lock.
pub(crate) fn close_locked(fd: c_int) {
    // In this order: once it is closed, the number may be another file's.
    if table::replace(fd, Entry::Hidden, Entry::None) {
        call::close(fd);
    }
}

static READABLE_FD: AtomicI32 = AtomicI32::new(-1);

/// A descriptor that is always readable, shared by all uses; none if it cannot be opened.
pub(crate) fn readable_fd() -> Option<c_int> {
    if let Some(fd) = readable_fd_if_open() {
        return Some(fd);
    }
    let new = hide(|| call::eventfd(1, libc::EFD_CLOEXEC));
    match READABLE_FD.compare_exchange(-1, new, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => (new >= 0).then_some(new),
        Err(other) => {
            close(new);
            Some(other)
        }
    }
}

/// The same, if it has been opened.
pub(crate) fn readable_fd_if_open() -> Option<c_int> {
    Some(READABLE_FD.load(Ordering::Acquire)).filter(|fd| *fd >= 0)
}

/// Closes it. No instance of epoll may contain it.
pub(crate) fn close_readable_fd() {
    let fd = READABLE_FD.swap(-1, Ordering::AcqRel);
    if fd >= 0 {
        close(fd);
    }
}

/// The program has taken the number `fd`.
pub(crate) fn handle_lost_fd(fd: c_int) {
    _ = READABLE_FD.compare_exchange(fd, -1, Ordering::AcqRel, Ordering::Relaxed);
}

/// Number of [`HiddenFd`]s.
static OWNED_COUNT: AtomicU32 = AtomicU32::new(0);

/// An owned hidden descriptor: of a connection, or a duplicate of a socket of the program, which
/// may close its own and reuse their numbers while this is in use.
pub(crate) struct HiddenFd(c_int);

impl HiddenFd {
    /// As [`hide`].
    pub(crate) fn open(open: impl FnOnce() -> c_int) -> Option<Self> {
        Self::count(|| hide(open))
    }

    fn count(open: impl FnOnce() -> c_int) -> Option<Self> {
        // Before it is open: the child of a fork closes only what is counted.
        OWNED_COUNT.fetch_add(1, Ordering::Relaxed);
        let fd = open();
        if fd < 0 {
            Self::discount();
            return None;
        }
        Some(Self(fd))
    }

    /// Passes ownership to the caller.
    pub(crate) fn into_fd(self) -> c_int {
        let fd = self.0;
        Self::discount();
        std::mem::forget(self);
        fd
    }

    fn discount() {
        // In the child of a fork it is none already.
        _ = OWNED_COUNT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| count.checked_sub(1));
    }

    pub(crate) fn dup(fd: c_int) -> Option<Self> {
        let _numbers = lock();
        Self::count(|| {
            let copy = dup_high(fd);
            if copy >= 0 {
                table::set(copy, Entry::Hidden);
            }
            copy
        })
    }

    pub(crate) fn fd(&self) -> c_int {
        self.0
    }
}

impl AsFd for HiddenFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open and hidden from the program as long as `self`.
        unsafe { BorrowedFd::borrow_raw(self.0) }
    }
}

impl Drop for HiddenFd {
    fn drop(&mut self) {
        close(self.0);
        Self::discount();
    }
}

/// A number that is never open. Not a negative one, which poll(2) ignores.
const INVALID_FD: c_int = c_int::MAX;

/// The number to pass to the kernel for `fd` of the program's call. For a hidden descriptor it is
/// one that is not open, so that the call fails as it would without the library.
#[inline]
pub(crate) fn kernel_fd(fd: c_int) -> c_int {
    if table::entry(fd) == Entry::Hidden { masked_fd(fd) } else { fd }
}

#[cold]
fn masked_fd(fd: c_int) -> c_int {
    // The child of a vfork may have a file of its own there, which the parent's table does not
    // show.
    if thread::is_own_process() { INVALID_FD } else { fd }
}

/// The UDP socket behind `fd` of the program's call; else the number for the kernel, as in
/// [`kernel_fd`].
#[inline]
pub(crate) fn sock(fd: c_int) -> Result<&'static Sock, c_int> {
    table::sock_or_entry(fd).map_err(|entry| if entry == Entry::Hidden { masked_fd(fd) } else { fd })
}

/// The process's limit of open files.
pub(crate) fn fd_limit() -> u64 {
    let mut limit = MaybeUninit::<libc::rlimit>::zeroed();
    // SAFETY: getrlimit fills the struct, which zeroes are a value of in any case.
    unsafe {
        libc::getrlimit(libc::RLIMIT_NOFILE, limit.as_mut_ptr());
        limit.assume_init().rlim_cur
    }
}
