//! The fast path of a socket with a single receiving thread.
//!
//! Such a socket has no lanes, no second kernel socket and no bound on a wait, and each call of
//! its thread is the C library's own. The library checks that this is so, marks that the thread is
//! in a wait without a bound, and counts. [`find`] checks with one comparison: a [`FastPath`] for
//! each descriptor, of a socket or of an epoll instance around it, has the thread pointer of the
//! thread that may bypass the library. The rest of a call is kept out of the way (`#[cold]`), so
//! that few registers have to be saved around the C library's function.
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
//! one may get its thread pointer), when the descriptor means something else, and at a fork (the
//! child's thread has the same pointer). A socket that a fork has shared gets none, because a
//! receiver in another process could not clear it.

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
#[repr(C, align(16))]
pub(crate) struct FastPath {
    /// Thread pointer of the only receiver; 0 if no thread may bypass.
    thread: AtomicUsize,
    /// Set before `thread`, and never cleared.
    member: AtomicPtr<Member>,
}

impl FastPath {
    const fn new() -> Self {
        Self { thread: AtomicUsize::new(0), member: AtomicPtr::new(ptr::null_mut()) }
    }
}

/// The fast path of each descriptor, and its socket.
static SOCKET_PATHS: [FastPath; FAST_PATH_FD_LIMIT] = [const { FastPath::new() }; FAST_PATH_FD_LIMIT];
static SOCKETS: [AtomicPtr<Sock>; FAST_PATH_FD_LIMIT] =
    [const { AtomicPtr::new(ptr::null_mut()) }; FAST_PATH_FD_LIMIT];

/// The fast path of each epoll descriptor whose only UDP socket has one receiver, and that socket.
static EPOLL_PATHS: [FastPath; FAST_PATH_FD_LIMIT] = [const { FastPath::new() }; FAST_PATH_FD_LIMIT];
static EPOLL_SOCKETS: [AtomicPtr<Sock>; FAST_PATH_FD_LIMIT] =
    [const { AtomicPtr::new(ptr::null_mut()) }; FAST_PATH_FD_LIMIT];

/// The fast path of the only UDP socket in the instance behind `epfd`, if the calling thread may
/// use it.
#[inline(always)]
pub(crate) fn find_by_epoll(epfd: c_int) -> Option<&'static FastPath> {
    EPOLL_PATHS.get(epfd as usize).filter(|place| place.is_own())
}

/// Sets the fast path of the instance behind `epfd`, which has `sock` in it and no other. False if
/// that is not possible. The caller then checks again that this still is so.
pub(crate) fn arm_epoll(epfd: c_int, sock: &Sock) -> bool {
    let (Some(instance), Some(place)) = (EPOLL_PATHS.get(epfd as usize), find_by_sock(sock)) else {
        return false;
    };
    // One instance for a socket: the last one wins.
    disarm_epoll(sock);
    instance.member.store(place.member.load(Ordering::Relaxed), Ordering::Relaxed);
    EPOLL_SOCKETS[epfd as usize].store(ptr::from_ref(sock).cast_mut(), Ordering::Relaxed);
    sock.fast_path_epfd.store(epfd + 1, Ordering::SeqCst);
    instance.thread.store(thread_pointer(), Ordering::SeqCst);
    // Either a thread that clears the fast path sees this one, or this thread sees that.
    fence(Ordering::SeqCst);
    if !place.is_own() {
        disarm_epoll(sock);
    }
    true
}

/// The instance behind `epfd`, or its set of descriptors, changes.
pub(crate) fn clear_epoll(epfd: c_int) {
    if let Some(instance) = EPOLL_PATHS.get(epfd as usize) {
        instance.thread.store(0, Ordering::SeqCst);
    }
}

fn disarm_epoll(sock: &Sock) {
    let epfd = sock.fast_path_epfd.swap(0, Ordering::SeqCst) - 1;
    if EPOLL_SOCKETS.get(epfd as usize).is_some_and(|at| ptr::eq(at.load(Ordering::SeqCst), sock)) {
        clear_epoll(epfd);
    }
}

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
    SOCKET_PATHS.get(fd as usize).filter(|place| place.is_own())
}

/// The fast path of a descriptor of `sock`, if the calling thread may use it.
#[inline]
pub(crate) fn find_by_sock(sock: &Sock) -> Option<&'static FastPath> {
    let fd = sock.fast_path_fd.load(Ordering::Relaxed) - 1;
    let place = find(fd)?;
    // The number may mean another socket of which the thread is the only receiver, too.
    ptr::eq(SOCKETS[fd as usize].load(Ordering::Relaxed), sock).then_some(place)
}

/// The wait of the calling thread, whose member this is, has ended.
#[inline]
pub(crate) fn finish_wait(member: &Member) {
    member.state.store(BUSY, Ordering::Release);
}

impl FastPath {
    #[inline(always)]
    pub(crate) fn is_own(&self) -> bool {
        HAS_THREAD_POINTER && self.thread.load(Ordering::Relaxed) == thread_pointer()
    }

    /// The member, for the thread that owns the fast path.
    #[inline(always)]
    pub(crate) fn member(&self) -> &'static Member {
        // SAFETY: a member in a mapping that is never unmapped (sock.rs): set before `thread`,
        // which the caller has seen to be its own, and never null after that. If the number has
        // come to mean another socket, it may be another thread's.
        unsafe { &*self.member.load(Ordering::Relaxed) }
    }

    /// Starts a wait of the calling thread, without a bound. None if the fast path is no longer
    /// its own. The member is to be passed to [`finish_wait`], because the fast path may belong to
    /// another thread by then.
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

/// Sets the fast path of `sock`: the calling thread, whose member this is, is its only receiver,
/// by `fd`, as long as `is_valid`.
#[cold]
pub(crate) fn install(sock: &'static Sock, member: &Member, fd: c_int, is_valid: impl Fn() -> bool) {
    let Some(place) = SOCKET_PATHS.get(fd as usize) else { return };
    // One fast path for a socket: a program that alternates between two descriptors uses the slow
    // path with both.
    disarm(sock);
    SOCKETS[fd as usize].store(ptr::from_ref(sock).cast_mut(), Ordering::Relaxed);
    place.member.store(ptr::from_ref(member).cast_mut(), Ordering::Relaxed);
    sock.had_fast_path.store(1, Ordering::SeqCst);
    sock.fast_path_fd.store(fd + 1, Ordering::SeqCst);
    place.thread.store(thread_pointer(), Ordering::SeqCst);
    // Either a thread that ends this sees the fast path, or this one sees what ended it.
    fence(Ordering::SeqCst);
    if !is_valid() {
        sock.fast_path_fd.store(0, Ordering::SeqCst);
        place.thread.store(0, Ordering::SeqCst);
    }
}

/// Clears the fast path of `sock`. A call that has already passed the check goes on.
pub(crate) fn disarm(sock: &Sock) {
    fence(Ordering::SeqCst);
    let fd = sock.fast_path_fd.swap(0, Ordering::SeqCst);
    if let Some(place) = SOCKET_PATHS.get((fd - 1) as usize)
        && ptr::eq(SOCKETS[(fd - 1) as usize].load(Ordering::SeqCst), sock)
    {
        place.thread.store(0, Ordering::SeqCst);
    }
    disarm_epoll(sock);
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

/// `fd` is about to mean something else.
#[inline]
pub(crate) fn disarm_fd(fd: c_int) {
    if let Some(place) = SOCKET_PATHS.get(fd as usize) {
        fence(Ordering::SeqCst);
        place.thread.store(0, Ordering::SeqCst);
        // SAFETY: null, or a slot for a socket, which is never unmapped.
        let sock = unsafe { SOCKETS[fd as usize].load(Ordering::SeqCst).as_ref() };
        if let Some(sock) = sock.filter(|sock| sock.fast_path_fd.load(Ordering::SeqCst) == fd + 1) {
            disarm_epoll(sock);
        }
    }
    clear_epoll(fd);
}

/// Clears all fast paths of the calling thread.
#[cold]
pub(crate) fn disarm_own() {
    Sock::in_use().filter(|sock| find_by_sock(sock).is_some()).for_each(disarm);
}

/// Runs before and after a fork.
pub(crate) fn disarm_all() {
    Sock::in_use().for_each(disarm);
}
