//! The fast path of a socket with a single receiving thread.
//!
//! Such a socket has no lanes, no second kernel socket and no bound on a wait, and each call of
//! its thread is the C library's own. The library checks that this is so, marks that the thread is
//! in a wait without a bound, and counts. The check is one comparison ([`find`]): the [`FastPath`]
//! of a descriptor holds the thread pointer of the thread that may bypass the library. The
//! descriptor is that of the socket, or of an epoll instance with this socket alone. All other code
//! of a call is in `#[cold]` functions, so that few registers have to be saved around the C
//! library's function.
//!
//! # Why a second receiver sees the first
//!
//! A second receiver must know whether the first one is in a wait without a bound. The first one
//! says so in its member's state, with plain stores. No barrier orders these with its check of the
//! fast path. Instead the second one, once for each socket, clears the fast path and then makes
//! all threads pass a barrier (`barrier::fence_all_threads`). After that, either the first one has
//! seen that the fast path is cleared, or its state is visible. Only then does the mode change
//! (`members::join`).
//!
//! A fast path is cleared ([`disarm`]) when a second thread joins, when the thread ends (another
//! one may get its thread pointer), when the descriptor means something else or its instance
//! changes, and at a fork (the child's thread has the same pointer). A socket that a fork has
//! shared gets none, because a receiver in another process could not clear it.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering, compiler_fence, fence};

use libc::c_int;
use manylane_sys::barrier;

use crate::base::real;
use crate::shared::report;
use crate::shared::sock::{BUSY, Member, Sock, UNBOUNDED};

/// Descriptors below this number can have a fast path.
const FAST_PATH_FD_LIMIT: usize = 1024;

/// The thread that may bypass the library with a descriptor.
#[repr(C, align(32))]
pub(crate) struct FastPath {
    /// Thread pointer of the only receiver; 0 if no thread may bypass.
    thread: AtomicUsize,
    /// The receiver's state in the socket. Set before `thread`, and never cleared; so is `sock`.
    member: AtomicPtr<Member>,
    /// The socket of the descriptor, or the only UDP socket in its epoll instance.
    sock: AtomicPtr<Sock>,
}

/// The fast path of each descriptor.
static PATHS: [FastPath; FAST_PATH_FD_LIMIT] = [const {
    FastPath {
        thread: AtomicUsize::new(0),
        member: AtomicPtr::new(ptr::null_mut()),
        sock: AtomicPtr::new(ptr::null_mut()),
    }
}; FAST_PATH_FD_LIMIT];

/// A value that differs between the threads of a process, for one instruction; 0 if the
/// architecture has none.
#[inline(always)]
fn thread_pointer() -> usize {
    let pointer: usize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the first word of the thread's control block is its own address (ABI of thread-local
    // storage, variant II).
    unsafe {
        std::arch::asm!("mov {}, fs:[0]", out(reg) pointer, options(nostack, preserves_flags, readonly));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a thread may read this register, and memory is not accessed.
    unsafe {
        std::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, preserves_flags, nomem));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        pointer = 0;
    }
    pointer
}

/// True if [`thread_pointer`] differs between threads here.
const HAS_THREAD_POINTER: bool = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));

/// The fast path of `fd`, if the calling thread may use it.
#[inline(always)]
pub(crate) fn find(fd: c_int) -> Option<&'static FastPath> {
    PATHS.get(fd as usize).filter(|path| path.is_own())
}

/// As [`find`], but none if `fd` now means another socket than `sock`.
#[inline]
pub(crate) fn find_for(sock: &Sock, fd: c_int) -> Option<&'static FastPath> {
    find(fd).filter(|path| path.is_for(sock))
}

/// Starts a wait of the calling thread if it is the only receiver of `sock`. True: the wait is the
/// program's own call.
#[inline]
pub(crate) fn start_wait_for(sock: &Sock, fd: c_int) -> bool {
    find_for(sock, fd).and_then(FastPath::start_wait).is_some()
}

/// Ends a wait of the calling thread, whose member this is.
#[inline]
pub(crate) fn finish_wait(member: &Member) {
    member.state.store(BUSY, Ordering::Release);
}

impl FastPath {
    #[inline(always)]
    fn is_own(&self) -> bool {
        HAS_THREAD_POINTER && self.thread.load(Ordering::Relaxed) == thread_pointer()
    }

    fn is_for(&self, sock: &Sock) -> bool {
        ptr::eq(self.sock.load(Ordering::SeqCst), sock)
    }

    fn clear(&self) {
        self.thread.store(0, Ordering::SeqCst);
    }

    /// The member, for the thread that owns the fast path.
    #[inline(always)]
    pub(crate) fn member(&self) -> &'static Member {
        // SAFETY: a member in a mapping that is never unmapped (sock.rs): set before `thread`,
        // which the caller has seen to be its own, and never null after that. If the number has
        // come to mean another socket, it may be another thread's.
        unsafe { &*self.member.load(Ordering::Relaxed) }
    }

    /// Starts a wait of the calling thread without a bound. None if the fast path is no longer the
    /// thread's own. The caller passes the member to [`finish_wait`], because the fast path may
    /// belong to another thread by then.
    #[inline(always)]
    pub(crate) fn start_wait(&self) -> Option<&'static Member> {
        let member = self.member();
        member.state.store(UNBOUNDED, Ordering::Relaxed);
        // The compiler must not reorder this. For the CPU, the barrier in `disarm_sync` orders it.
        compiler_fence(Ordering::SeqCst);
        if self.is_own() {
            return Some(member);
        }
        finish_wait(member);
        None
    }

    /// Calls `send`, and counts the bytes that it sent unless it failed.
    #[inline(always)]
    pub(crate) fn count_send(&self, send: impl FnOnce() -> isize) -> isize {
        let member = self.member();
        let sent = send();
        if sent >= 0
            && let Some(slot) = report::slot_of(member)
        {
            report::count_sent(slot, 1, sent as u64);
        }
        sent
    }
}

/// Counts a receive of the thread whose member this is.
#[inline(always)]
pub(crate) fn count_received(member: &Member, datagrams: u64, bytes: isize) {
    if let Some(slot) = report::slot_of(member) {
        report::count_received(slot, datagrams, bytes as u64);
    }
}

/// Sets the fast path of `fd` for the calling thread, whose member this is. `fd` is a descriptor of
/// `sock`, or of an epoll instance with no other UDP socket. The fast path is cleared again unless
/// `is_valid`: the thread is still the only receiver.
#[cold]
pub(crate) fn install(sock: &'static Sock, member: &Member, fd: c_int, is_valid: impl Fn() -> bool) {
    let Some(path) = PATHS.get(fd as usize) else { return };
    // The number may have been another socket's: its owner must not use the member of this one.
    path.clear();
    path.sock.store(ptr::from_ref(sock).cast_mut(), Ordering::Relaxed);
    path.member.store(ptr::from_ref(member).cast_mut(), Ordering::Relaxed);
    sock.had_fast_path.store(1, Ordering::SeqCst);
    path.thread.store(thread_pointer(), Ordering::SeqCst);
    // Either the thread that makes it invalid sees the fast path, or this one sees why.
    fence(Ordering::SeqCst);
    if !is_valid() {
        path.clear();
    }
}

/// Clears all fast paths of `sock`. A call that has already passed the check goes on.
pub(crate) fn disarm(sock: &Sock) {
    fence(Ordering::SeqCst);
    if sock.had_fast_path.load(Ordering::SeqCst) != 0 {
        PATHS.iter().filter(|path| path.is_for(sock)).for_each(FastPath::clear);
    }
}

/// [`disarm`], for a second receiver: after this, the state of the first one is up to date.
#[cold]
pub(crate) fn disarm_sync(sock: &Sock) {
    let errno = real::errno();
    disarm(sock);
    // Otherwise no call can have passed the check.
    if sock.had_fast_path.load(Ordering::SeqCst) != 0 {
        barrier::fence_all_threads();
    }
    real::set_errno(errno);
}

/// Clears the fast path of `fd`, before it means something else or its instance changes.
#[inline]
pub(crate) fn disarm_fd(fd: c_int) {
    fence(Ordering::SeqCst);
    if let Some(path) = PATHS.get(fd as usize) {
        path.clear();
    }
}

/// Clears all fast paths of the calling thread.
#[cold]
pub(crate) fn disarm_own() {
    PATHS.iter().filter(|path| path.is_own()).for_each(FastPath::clear);
}

/// Clears all fast paths, before and after a fork.
pub(crate) fn disarm_all() {
    // Pages without a fast path are not written to, so they need no memory.
    let is_set = |path: &&FastPath| path.thread.load(Ordering::SeqCst) != 0;
    PATHS.iter().filter(is_set).for_each(FastPath::clear);
}
