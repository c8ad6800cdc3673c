//! Liveness of threads. `kill -9` runs no handler, and a thread that makes no progress may
//! only be stopped. So each thread takes a robust mutex once and keeps it. When the thread dies,
//! in whatever way, the kernel marks the mutex (a robust futex). A check costs two loads and no
//! call.
//!
//! The mutexes are in a mapping that is shared with all processes forked later. A thread has one
//! slot. Other threads know it by a [`Token`], the slot and its generation, which never fits
//! another thread. The token of a member is in its place in `Shared`, and the token of a holder is
//! in the lock of changes. A thread that is stopped is alive.
//!
//! Alternatives do not work: a lock on an open file is shared by a fork; a lock of a process says
//! nothing of threads; a pidfd takes a descriptor for each process and a call for each check, and
//! its number may mean another process by then. The list of robust futexes belongs to the C
//! library, one for each thread, so these are mutexes of the C library.
//!
//! Without a free slot ([`SLOTS_MAX`]), for a thread that the C library did not make, and where
//! robust mutexes are not available, a thread has no token, and is never taken for dead. Then only
//! its heartbeat tells (`coverage.rs`). A thread that the C library did not make loses a slot.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

use libc::{c_int, pid_t, pthread_mutex_t};

use crate::base::real::{self, call};
use crate::shared::memory;

/// Max threads with a token at a time, in a program and all that it forks. A token has 16 bits for
/// the slot.
const SLOTS_MAX: usize = 4096;
const _: () = assert!(SLOTS_MAX < u16::MAX as usize);

/// States of a slot: its mutex is not initialized, is being initialized, can be locked.
const UNINIT: u32 = 0;
const INITIALIZING: u32 = 1;
const READY: u32 = 2;

/// Identifies a thread for all time: generation of its slot, and the slot plus 1. 0: not known.
pub(crate) type Token = u64;

manylane_sys::atomics! {
    /// All zeroes: a slot whose mutex is not initialized.
    #[repr(align(64))]
    struct Liveness {
        state: AtomicU32,
        /// Changes with each thread that acquires the slot.
        generation: AtomicU32,
        /// A `pthread_mutex_t`. Its first word is the futex: the thread's id, or the kernel's mark
        /// that it died.
        mutex: [AtomicU32; 12],
    }
}

const _: () = assert!(size_of::<pthread_mutex_t>() <= size_of::<[AtomicU32; 12]>());
const _: () = assert!(align_of::<pthread_mutex_t>() <= 8);

static SLOTS: AtomicPtr<Liveness> = AtomicPtr::new(ptr::null_mut());

/// Maps the slots; once, at start. Without them no thread has a token.
pub(crate) fn start() {
    if let Some(slots) = memory::map::<Liveness>(SLOTS_MAX, true) {
        SLOTS.store(slots.as_ptr().cast_mut(), Ordering::Release);
    }
}

#[inline]
fn slots() -> &'static [Liveness] {
    let at = SLOTS.load(Ordering::Acquire);
    if at.is_null() {
        return &[];
    }
    // SAFETY: the array that start() mapped, never unmapped.
    unsafe { std::slice::from_raw_parts(at, SLOTS_MAX) }
}

/// True if the thread of `token` is known to have died.
#[inline]
pub(crate) fn has_exited(token: Token) -> bool {
    let Some(slot) = slots().get((token as u32).wrapping_sub(1) as usize) else { return false };
    slot.generation.load(Ordering::Acquire) != (token >> 32) as u32
        || slot.mutex[0].load(Ordering::Acquire) & libc::FUTEX_OWNER_DIED != 0
}

/// Acquires a token for the calling thread `tid` until it ends; 0 if none is free. The caller
/// blocks signals, because the C library's list of the thread's robust mutexes changes.
#[cold]
pub(crate) fn acquire(tid: u32) -> Token {
    let slots = slots();
    let start = tid as usize % SLOTS_MAX;
    let candidates = (start..SLOTS_MAX).chain(0..start);
    for (at, slot) in candidates.filter_map(|at| Some((at, slots.get(at)?))) {
        match slot.try_lock() {
            TryLock::Busy => {}
            TryLock::Unsupported => return 0,
            TryLock::Acquired => {
                // The word belongs to the kernel and the C library. Only if it has the format that
                // the kernel documents (and the C library made the thread) will it show that the
                // thread died. Otherwise the slot is lost: to unlock the mutex, the C library would
                // write through its pointers, which other processes can change.
                if slot.mutex[0].load(Ordering::Relaxed) & libc::FUTEX_TID_MASK != tid {
                    return 0;
                }
                let used = slot.generation.fetch_add(1, Ordering::AcqRel).wrapping_add(1);
                return u64::from(used) << 32 | (at as u64 + 1);
            }
        }
    }
    0
}

enum TryLock {
    Acquired,
    /// Another thread holds it.
    Busy,
    /// Robust mutexes are not available.
    Unsupported,
}

impl Liveness {
    fn mutex(&self) -> *mut pthread_mutex_t {
        self.mutex.as_ptr().cast_mut().cast()
    }

    fn try_lock(&self) -> TryLock {
        if self.state.compare_exchange(UNINIT, INITIALIZING, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            if !self.init() {
                self.state.store(UNINIT, Ordering::Release);
                return TryLock::Unsupported;
            }
            self.state.store(READY, Ordering::Release);
        }
        // A thread that dies during init leaves the slot unusable.
        if self.state.load(Ordering::Acquire) != READY {
            return TryLock::Busy;
        }
        // SAFETY: initialized once, as a robust mutex that processes share, in memory that is
        // never unmapped.
        match unsafe { libc::pthread_mutex_trylock(self.mutex()) } {
            0 => TryLock::Acquired,
            libc::EOWNERDEAD => {
                // SAFETY: as above; the call before has locked it and said that its owner died.
                unsafe { libc::pthread_mutex_consistent(self.mutex()) };
                TryLock::Acquired
            }
            _ => TryLock::Busy,
        }
    }

    fn init(&self) -> bool {
        let mut how = std::mem::MaybeUninit::uninit();
        let all = |results: &[c_int]| results.iter().all(|result| *result == 0);
        // SAFETY: the attributes are initialized before they are changed and read; the mutex is
        // memory that only the caller uses (the slot's state says so), zero, large and aligned
        // enough (asserted above).
        unsafe {
            all(&[
                libc::pthread_mutexattr_init(how.as_mut_ptr()),
                libc::pthread_mutexattr_setpshared(how.as_mut_ptr(), libc::PTHREAD_PROCESS_SHARED),
                libc::pthread_mutexattr_setrobust(how.as_mut_ptr(), libc::PTHREAD_MUTEX_ROBUST),
                libc::pthread_mutex_init(self.mutex(), how.as_ptr()),
            ])
        }
    }
}

/// True if a process has exited: the pid is free, or the process is a zombie that its parent has
/// not waited for yet.
#[cold]
pub(crate) fn has_process_exited(pid: pid_t) -> bool {
    let errno = real::errno();
    // SAFETY: signal 0 is sent to no process; the call only checks that it could be.
    let mut gone = unsafe { libc::kill(pid, 0) != 0 } && real::errno() == libc::ESRCH;
    if !gone {
        // SAFETY: pidfd_open(2), since Linux 5.3, takes two numbers.
        let watch = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } as c_int;
        if watch >= 0 {
            let mut at = [libc::pollfd { fd: watch, events: libc::POLLIN, revents: 0 }];
            gone = real::ppoll_raw(&mut at, real::NO_WAIT, None) > 0;
            call::close(watch);
        }
    }
    real::set_errno(errno);
    gone
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tid() -> u32 {
        // SAFETY: gettid(2) takes nothing and touches no memory.
        unsafe { libc::syscall(libc::SYS_gettid) as u32 }
    }

    #[test]
    fn a_liveness_flag_ends_only_with_its_thread() {
        start();
        let mine = acquire(tid());
        assert!(mine != 0 && !has_exited(mine));
        let other = std::thread::spawn(|| acquire(tid())).join().unwrap();
        assert!(other != 0 && other != mine);
        // The kernel marks it before the thread can be joined.
        assert!(has_exited(other));
        assert!(!has_exited(mine));
        // 0 means no thread.
        assert!(!has_exited(0));
        // Slots of dead threads are reused, and the new threads are not taken for dead.
        let reused = std::thread::spawn(|| (0..SLOTS_MAX).map(|_| acquire(tid())).collect::<Vec<_>>());
        let reused = reused.join().unwrap();
        assert_eq!(reused.iter().filter(|token| **token == 0).count(), 1, "all but the one that is alive");
        assert!(!reused.contains(&other) && !reused.contains(&mine));
        assert!(has_exited(other) && !has_exited(mine));
    }
}
