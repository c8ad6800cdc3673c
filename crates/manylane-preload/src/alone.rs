//! One receiver: what a program with a single receiving thread pays, which is next to nothing.
//!
//! A socket that one thread receives on has no lanes, and each of that thread's calls is the C library's own. What is left
//! to do is to know that it is so, to say whether the thread is in a wait without a bound, and to count. [`find`] does the
//! first by one load and a comparison: a [`Place`] for each descriptor names the thread, by its thread pointer, that may
//! go straight through.
//!
//! # Why nobody is overlooked
//!
//! A second receiver must know whether the first one is in a wait that has no bound. The first says so in its member's
//! state with plain stores; no barrier orders them with its look at the place. Instead the second one, once for each socket,
//! takes the place away and then makes all CPUs pass a barrier (`everywhere`): after it the first one either has
//! seen that the place is gone, or its state can be seen. Only then does the mode change (`me::join`).
//!
//! A place is taken away ([`leave`]) when a second thread joins, when the thread ends (another one may get its thread
//! pointer), when the descriptor means something else, and at a fork (the child's thread has the same pointer). A socket that a
//! fork has shared gets none: who receives on it in another process could not take it away.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering, compiler_fence, fence};

use libc::c_int;
use manylane_sys::barrier;
use manylane_sys::shim::Receiver;

use crate::sock::{BUSY, Member, SINGLE, Shared, Sock, UNBOUNDED};
use crate::table::{self, Entry};
use crate::{lanes, queues, real, report};

/// Descriptors below this number can have a place.
const PLACES: usize = 1024;

/// Who may go straight through with a descriptor.
pub(crate) struct Place {
    /// The thread pointer of the one receiver; 0 if nobody may.
    thread: AtomicUsize,
    /// Of which socket.
    sock: AtomicPtr<Sock>,
    member: AtomicPtr<Member>,
    /// Where it is counted; null if nowhere.
    slot: AtomicPtr<Receiver>,
}

static ALL: [Place; PLACES] = [const {
    Place {
        thread: AtomicUsize::new(0),
        sock: AtomicPtr::new(ptr::null_mut()),
        member: AtomicPtr::new(ptr::null_mut()),
        slot: AtomicPtr::new(ptr::null_mut()),
    }
}; PLACES];

/// For each descriptor of an epoll instance whose only UDP socket has one receiver: that socket's descriptor, and one, in the
/// upper half, its index in the lower one; 0 if it is not known to be so.
static INSTANCES: [AtomicU32; PLACES] = [const { AtomicU32::new(0) }; PLACES];

/// The place of the one UDP socket in the instance behind `epfd`, if the calling thread may go straight through to it.
#[inline(always)]
pub(crate) fn find_in(epfd: c_int) -> Option<&'static Place> {
    let word = INSTANCES.get(epfd as usize)?.load(Ordering::Acquire);
    let place = find((word >> 16) as c_int - 1)?;
    // The number may mean another socket by now, with which the thread is alone, too.
    ptr::eq(place.sock.load(Ordering::Relaxed), Sock::at(word & 0xffff)).then_some(place)
}

/// The instance behind `epfd` has `sock` in it and no other. Whether that could be noted; who says so looks again whether it still
/// is so.
pub(crate) fn note_instance(epfd: c_int, sock: &Sock) -> bool {
    let (Some(word), fd @ 1..) = (INSTANCES.get(epfd as usize), sock.alone.load(Ordering::Relaxed)) else {
        return false;
    };
    word.store((fd as u32) << 16 | sock.index(), Ordering::SeqCst);
    true
}

/// The instance behind `epfd`, or what is in it, changes.
pub(crate) fn forget_instance(epfd: c_int) {
    if let Some(word) = INSTANCES.get(epfd as usize) {
        word.store(0, Ordering::SeqCst);
    }
}

/// What tells the threads of a process apart at the cost of one instruction; 0 where no such thing is known.
#[inline(always)]
fn thread_pointer() -> usize {
    let pointer: usize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the first word of the thread's control block is its own address (ABI of thread-local storage, variant II).
    unsafe {
        std::arch::asm!("mov {}, fs:[0]", out(reg) pointer, options(nostack, preserves_flags, readonly));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the register is the thread's to read, and memory is not touched.
    unsafe {
        std::arch::asm!("mrs {}, tpidr_el0", out(reg) pointer, options(nostack, preserves_flags, nomem));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        pointer = 0;
    }
    pointer
}

/// The place of `fd`, if the calling thread may go straight through.
#[inline(always)]
pub(crate) fn find(fd: c_int) -> Option<&'static Place> {
    let place = ALL.get(fd as usize)?;
    place.is_mine().then_some(place)
}

/// The place of a descriptor of `sock`, if the calling thread may go straight through.
#[inline]
pub(crate) fn of(sock: &Sock) -> Option<&'static Place> {
    let place = find(sock.alone.load(Ordering::Relaxed) - 1)?;
    // The number may mean another socket by now, with which the thread is alone, too.
    ptr::eq(place.sock.load(Ordering::Relaxed), sock).then_some(place)
}

/// The calling thread, whose member this is, waits no more.
#[inline]
pub(crate) fn end(member: &Member) {
    member.state.store(BUSY, Ordering::Release);
}

impl Place {
    #[inline(always)]
    pub(crate) fn is_mine(&self) -> bool {
        let thread = self.thread.load(Ordering::Relaxed);
        thread != 0 && thread == thread_pointer()
    }

    #[inline]
    pub(crate) fn member(&self) -> Option<&'static Member> {
        // SAFETY: null, or a member in a mapping that is never unmapped (sock.rs); set before `thread`, by this thread.
        unsafe { self.member.load(Ordering::Relaxed).as_ref() }
    }

    /// The calling thread may wait from now on, without a bound; none if the place is not its own any more. What it gets is for
    /// [`end`]: by then the place may be somebody else's.
    #[inline]
    pub(crate) fn begin(&self) -> Option<&'static Member> {
        let member = self.member()?;
        member.state.store(UNBOUNDED, Ordering::Relaxed);
        // Not to be reordered by the compiler; the CPU's part is the barrier of who takes the place away.
        compiler_fence(Ordering::SeqCst);
        if self.is_mine() {
            return Some(member);
        }
        end(member);
        None
    }

    fn slot(&self) -> Option<&'static Receiver> {
        // SAFETY: null, or a slot of the report, which stays mapped.
        unsafe { self.slot.load(Ordering::Relaxed).as_ref() }
    }

    /// A receive brought so much.
    #[inline]
    pub(crate) fn received(&self, (datagrams, bytes): (u64, isize)) {
        if let Some(slot) = self.slot() {
            report::count_received(slot, datagrams, bytes.max(0) as u64);
        }
    }

    /// A send brought so many bytes on their way, or failed.
    #[inline]
    pub(crate) fn sent(&self, sent: isize) -> isize {
        if sent >= 0
            && let Some(slot) = self.slot()
        {
            report::count_sent(slot, 1, sent as u64);
        }
        sent
    }
}

/// The calling thread received on a socket in mode SINGLE: from now on it goes straight through, if it is alone and comes
/// back.
#[inline]
pub(crate) fn arm(sock: &'static Sock, shared: &Shared, member: &Member, fd: c_int) {
    let comes_back = member.receives.load(Ordering::Relaxed) >= lanes::COMES_BACK;
    if comes_back && may_have(shared) {
        give(sock, shared, member, fd);
    }
}

fn may_have(shared: &Shared) -> bool {
    if queues::are_open(shared) {
        return false;
    }
    let joined = shared.joined.load(Ordering::SeqCst) as usize;
    let members =
        || shared.members.iter().take(joined).filter(|member| member.who.load(Ordering::SeqCst) != 0);
    shared.mode.load(Ordering::SeqCst) == SINGLE
        && shared.forked.load(Ordering::SeqCst) == 0
        && members().nth(1).is_none()
}

#[cold]
fn give(sock: &'static Sock, shared: &Shared, member: &Member, fd: c_int) {
    let Some(place) = ALL.get(fd as usize) else { return };
    if !crate::me::ends_are_seen() {
        return;
    }
    // One place for a socket: a program that uses two descriptors in turn goes the long way with both.
    leave(sock);
    place.sock.store(ptr::from_ref(sock).cast_mut(), Ordering::Relaxed);
    place.member.store(ptr::from_ref(member).cast_mut(), Ordering::Relaxed);
    place.slot.store(report::slot_at(member), Ordering::Relaxed);
    sock.was_alone.store(1, Ordering::SeqCst);
    sock.alone.store(fd + 1, Ordering::SeqCst);
    place.thread.store(thread_pointer(), Ordering::SeqCst);
    // Either whoever ends this sees the place, or we see what ended it.
    fence(Ordering::SeqCst);
    if !may_have(shared) || table::entry(fd) != Entry::Sock(sock.index()) {
        sock.alone.store(0, Ordering::SeqCst);
        place.thread.store(0, Ordering::SeqCst);
    }
}

/// Nobody goes straight through to `sock` any more; who is on the way may still be.
pub(crate) fn leave(sock: &Sock) {
    fence(Ordering::SeqCst);
    let fd = sock.alone.swap(0, Ordering::SeqCst);
    if let Some(place) = ALL.get((fd - 1) as usize)
        && ptr::eq(place.sock.load(Ordering::SeqCst), sock)
    {
        place.thread.store(0, Ordering::SeqCst);
    }
}

/// [`leave`], for a second receiver: after this, the state of the first one says what it does.
#[cold]
pub(crate) fn leave_and_settle(sock: &Sock) {
    let errno = real::errno();
    leave(sock);
    // Otherwise nobody can be on the way.
    if sock.was_alone.load(Ordering::SeqCst) != 0 {
        barrier::everywhere();
    }
    real::set_errno(errno);
}

/// `fd` means something else from now on.
#[inline]
pub(crate) fn forget(fd: c_int) {
    if let Some(place) = ALL.get(fd as usize) {
        fence(Ordering::SeqCst);
        place.thread.store(0, Ordering::SeqCst);
    }
    forget_instance(fd);
}

/// Before and after a fork.
pub(crate) fn leave_all() {
    Sock::in_use().for_each(leave);
}
