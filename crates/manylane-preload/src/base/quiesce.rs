//! Threads that are in the library, and how all of them leave it for good before the program
//! installs a seccomp filter (`seccomp.rs`).
//!
//! The library may make other system calls than the program's own. Before the first of them and
//! after the last, a thread says so in a *slot* of its own, by plain stores: [`enter`],
//! [`Inside::leave`], and [`run_inside`] for both. The program's own call, which may wait without
//! a bound, is [`run_outside`]. A thread that finds that all are to leave ([`is_detaching`]) makes
//! the program's own call instead. Before that it *parks* until the library is done with the
//! sockets.
//!
//! | stage | a thread that enters | that is in | that is parked |
//! |---|---|---|---|
//! | ATTACHED | goes on | goes on | |
//! | DETACHING | parks | parks as soon as it can, or leaves | stays |
//! | DETACHED | makes the program's own call | | leaves |
//!
//! No barrier orders the store to the slot with the check of the stage. The thread that changes
//! the stage makes all threads pass one (`barrier::fence_all_threads`). After that, either a
//! thread sees the stage, or its slot is visible. So no thread is between two system calls of the
//! library when a filter is applied to all threads (`SECCOMP_FILTER_FLAG_TSYNC`).

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering, compiler_fence};
use std::time::{Duration, Instant};

use libc::{c_void, timespec};
use manylane_sys::barrier;

use crate::base::real;

const ATTACHED: u32 = 0;
const DETACHING: u32 = 1;
const DETACHED: u32 = 2;
static STAGE: AtomicU32 = AtomicU32::new(ATTACHED);

/// Max threads of a process with a slot at a time; other threads are not waited for.
const SLOTS_MAX: usize = 4096;
/// Nanoseconds between two checks of the stage, or of slots.
const POLL_INTERVAL_NS: i64 = 100_000;
/// The longest wait for threads to leave. A thread that left the library by `longjmp` never does.
const DETACH_TIMEOUT: Duration = Duration::from_secs(2);

#[repr(align(64))]
struct Slot {
    is_used: AtomicU32,
    /// Calls that its thread is in; more than one in a signal handler. Written only by that
    /// thread.
    depth: AtomicU32,
    /// Its thread waits until the stage is `DETACHED`.
    is_parked: AtomicU32,
}

static SLOTS: [Slot; SLOTS_MAX] =
    [const { Slot { is_used: AtomicU32::new(0), depth: AtomicU32::new(0), is_parked: AtomicU32::new(0) } };
        SLOTS_MAX];
/// Slots from here on were never used.
static TOP: AtomicU32 = AtomicU32::new(0);
/// The thread-specific key whose destructor frees a slot, plus 1; 0 before it exists.
static TLS_KEY: AtomicU32 = AtomicU32::new(0);

thread_local! {
    // Constant and without a destructor: needs neither the heap nor a registration.
    static THREAD_SLOT: Cell<Option<&'static Slot>> = const { Cell::new(None) };
}

/// Runs once, at start.
pub(crate) fn start() {
    let mut key = 0;
    // SAFETY: `key` is written before it is read; the destructor is our function and accepts any
    // argument.
    if unsafe { libc::pthread_key_create(&raw mut key, Some(release_slot)) } == 0 {
        TLS_KEY.store(key + 1, Ordering::Relaxed);
    }
}

extern "C" fn release_slot(_: *mut c_void) {
    if let Some(slot) = THREAD_SLOT.with(|here| here.replace(None)) {
        // A thread that was cancelled in a wait has not left.
        slot.depth.store(0, Ordering::Relaxed);
        slot.is_used.store(0, Ordering::Release);
    }
}

/// True if the calling thread is in the library. In the handlers of a fork: a signal handler forks
/// that interrupted it there.
pub(crate) fn is_inside() -> bool {
    thread_slot().is_some_and(|slot| slot.depth.load(Ordering::Relaxed) > 0)
}

/// In the child of a fork: the parent's threads do not exist here.
pub(crate) fn in_child() {
    for slot in used_slots() {
        slot.depth.store(0, Ordering::Relaxed);
        slot.is_parked.store(0, Ordering::Relaxed);
        slot.is_used.store(0, Ordering::Relaxed);
    }
    THREAD_SLOT.with(|here| here.set(None));
}

fn used_slots() -> impl Iterator<Item = &'static Slot> {
    SLOTS[..TOP.load(Ordering::SeqCst) as usize]
        .iter()
        .filter(|slot| slot.is_used.load(Ordering::SeqCst) != 0)
}

#[cold]
fn alloc_slot() -> Option<&'static Slot> {
    let key = TLS_KEY.load(Ordering::Relaxed).checked_sub(1)?;
    let is_free =
        |slot: &Slot| slot.is_used.compare_exchange(0, 1, Ordering::SeqCst, Ordering::Relaxed).is_ok();
    let at = SLOTS.iter().position(is_free)?;
    TOP.fetch_max(at as u32 + 1, Ordering::SeqCst);
    let slot = &SLOTS[at];
    // SAFETY: the key is ours; any value but null makes the destructor run when the thread ends.
    unsafe { libc::pthread_setspecific(key, ptr::from_ref(slot).cast::<c_void>()) };
    THREAD_SLOT.with(|here| here.set(Some(slot)));
    Some(slot)
}

#[inline]
fn thread_slot() -> Option<&'static Slot> {
    THREAD_SLOT.with(Cell::get)
}

/// The calling thread may make system calls of the library's own, until it calls
/// [`leave`](Self::leave).
pub(crate) struct Inside(Option<&'static Slot>);

/// None: the library has detached for good, and the caller must make the program's own call.
#[inline]
pub(crate) fn enter() -> Option<Inside> {
    let Some(slot) = thread_slot().or_else(alloc_slot) else {
        return (!is_detaching()).then_some(Inside(None));
    };
    let inside = Inside(Some(slot));
    let depth = slot.depth.load(Ordering::Relaxed);
    slot.depth.store(depth + 1, Ordering::Relaxed);
    compiler_fence(Ordering::SeqCst);
    // Within another call of its own it may hold locks: the detaching thread waits for it.
    if !is_detaching() || depth > 0 {
        return Some(inside);
    }
    inside.park_and_leave();
    None
}

impl Inside {
    /// The calling thread makes only the program's own system calls from here on.
    #[inline]
    pub(crate) fn leave(self) {
        if let Some(slot) = self.0 {
            slot.depth.store(slot.depth.load(Ordering::Relaxed).saturating_sub(1), Ordering::Release);
        }
    }

    /// Leaves the library for good, once the detaching thread is done with the sockets. The caller
    /// then makes the program's own call.
    #[cold]
    fn park_and_leave(self) {
        park();
        self.leave();
    }
}

/// Calls `own` inside. None: as for [`enter`].
#[inline]
pub(crate) fn run_inside<T>(own: impl FnOnce() -> T) -> Option<T> {
    let inside = enter()?;
    let answer = own();
    inside.leave();
    Some(answer)
}

/// [`run_inside`] for a call that waits, and returns none if it finds that the library detaches.
#[inline]
pub(crate) fn wait_inside<T>(wait: impl FnOnce() -> Option<T>) -> Option<T> {
    let inside = enter()?;
    let answer = wait();
    if answer.is_some() {
        inside.leave();
    } else {
        inside.park_and_leave();
    }
    answer
}

/// True if threads must leave the library, for good.
#[inline]
pub(crate) fn is_detaching() -> bool {
    STAGE.load(Ordering::Relaxed) != ATTACHED
}

/// Makes the program's own call from within the library. If [`is_detaching`] after that, the
/// caller must do nothing else.
#[inline]
pub(crate) fn run_outside<T>(own: impl FnOnce() -> T) -> T {
    let Some(slot) = thread_slot() else { return own() };
    let depth = slot.depth.load(Ordering::Relaxed);
    slot.depth.store(0, Ordering::Release);
    let answer = own();
    slot.depth.store(depth, Ordering::Relaxed);
    compiler_fence(Ordering::SeqCst);
    if is_detaching() {
        park();
    }
    answer
}

#[cold]
fn park() {
    let errno = real::errno();
    if let Some(slot) = thread_slot() {
        slot.is_parked.store(1, Ordering::SeqCst);
    }
    while STAGE.load(Ordering::SeqCst) == DETACHING {
        sleep();
    }
    if let Some(slot) = thread_slot() {
        slot.is_parked.store(0, Ordering::SeqCst);
    }
    real::set_errno(errno);
}

/// A direct system call: the C library's function is one that the library replaces.
fn sleep() {
    let time = timespec { tv_sec: 0, tv_nsec: POLL_INTERVAL_NS };
    // SAFETY: the kernel reads the time, which lives through the call, and writes nothing.
    unsafe { libc::syscall(libc::SYS_nanosleep, &raw const time, ptr::null_mut::<timespec>()) };
}

/// Makes all threads leave but the calling one. False if another thread did so before: then they
/// have left when this returns.
pub(crate) fn start_detach() -> bool {
    if STAGE.compare_exchange(ATTACHED, DETACHING, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
        barrier::fence_all_threads();
        return true;
    }
    while STAGE.load(Ordering::SeqCst) == DETACHING {
        sleep();
    }
    false
}

/// Waits until all other threads have left or are parked.
pub(crate) fn wait_for_others() {
    wait(|slot| slot.depth.load(Ordering::SeqCst) == 0 || slot.is_parked.load(Ordering::SeqCst) != 0);
}

/// Detaches for good. When this returns, all threads make only the program's own calls.
pub(crate) fn finish_detach() {
    STAGE.store(DETACHED, Ordering::SeqCst);
    wait(|slot| slot.depth.load(Ordering::SeqCst) == 0 && slot.is_parked.load(Ordering::SeqCst) == 0);
}

fn wait(has_left: impl Fn(&Slot) -> bool) {
    let until = Instant::now() + DETACH_TIMEOUT;
    let own = thread_slot();
    let is_own = |slot: &Slot| own.is_some_and(|own| ptr::eq(own, slot));
    while used_slots().any(|slot| !is_own(slot) && !has_left(slot)) && Instant::now() < until {
        sleep();
    }
}
