//! The calling thread: its id, and its member in each socket. Nothing here uses the heap.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

use libc::{c_int, c_void};
use manylane_sys::shim::Reason;

use crate::lock::SignalMask;
use crate::sock::{BUSY, MAX_MEMBERS, Member, OBSERVING, SINGLE, Shared, Sock};
use crate::{identity, lanes, liveness, pollfds, queues, quiesce, report, send_batch, single_receiver};

/// Sockets whose member a thread caches; for others it is searched.
const MEMBER_CACHE_SIZE: usize = 8;
/// The thread cannot get a liveness token.
const NO_LIVENESS: u64 = u64::MAX;

/// Changes with each fork: the parent's cached state is not valid in the child.
static EPOCH: AtomicU32 = AtomicU32::new(1);
/// The process that the library's memory belongs to.
static PID: AtomicU32 = AtomicU32::new(0);
/// The thread-specific key whose destructor runs when a thread ends, plus 1; 0 before it exists.
static KEY: AtomicU32 = AtomicU32::new(0);

struct ThreadState {
    epoch: Cell<u32>,
    id: Cell<u64>,
    /// Liveness token, by which others know that the thread is alive; 0 if not acquired yet,
    /// [`NO_LIVENESS`] if none is available.
    liveness: Cell<u64>,
    /// Index of the socket plus 1, its generation, the member.
    member_cache: [Cell<(u32, u32, u32)>; MEMBER_CACHE_SIZE],
    /// A lane that the thread peeked at or asked the size of, and its socket's index plus 1: the
    /// next receive takes from it.
    peeked: Cell<(u32, u32)>,
}

thread_local! {
    // Constant and without a destructor: needs neither the heap nor a registration.
    static THREAD: ThreadState = const {
        ThreadState {
            epoch: Cell::new(0),
            id: Cell::new(0),
            liveness: Cell::new(0),
            member_cache: [const { Cell::new((0, 0, 0)) }; MEMBER_CACHE_SIZE],
            peeked: Cell::new((0, 0)),
        }
    };
}

/// Runs at start, and in the child of a fork.
pub(crate) fn start() {
    PID.store(std::process::id(), Ordering::Relaxed);
    EPOCH.fetch_add(1, Ordering::Relaxed);
    if KEY.load(Ordering::Relaxed) == 0 {
        let mut key = 0;
        // SAFETY: `key` is written before it is read; the destructor is our function and accepts
        // any argument.
        if unsafe { libc::pthread_key_create(&raw mut key, Some(on_thread_exit)) } == 0 {
            KEY.store(key + 1, Ordering::Relaxed);
        }
    }
}

/// True if the library's memory belongs to the calling process. Between vfork and exec it is the
/// parent's. After a clone that bypassed the C library it is not valid.
pub(crate) fn is_own_process() -> bool {
    PID.load(Ordering::Relaxed) == std::process::id()
}

/// True if the library is called when a thread ends.
pub(crate) fn has_exit_hook() -> bool {
    KEY.load(Ordering::Relaxed) != 0
}

impl ThreadState {
    /// After a fork the child has another process and thread id.
    #[cold]
    fn reset_after_fork(&self, epoch: u32) {
        if !quiesce::enter() {
            return;
        }
        // SAFETY: gettid(2) takes nothing and touches no memory.
        let tid = unsafe { libc::syscall(libc::SYS_gettid) } as u32;
        self.id.set(u64::from(std::process::id()) << 32 | u64::from(tid));
        self.member_cache.iter().for_each(|place| place.set((0, 0, 0)));
        self.peeked.set((0, 0));
        self.liveness.set(0);
        self.epoch.set(epoch);
        quiesce::leave();
    }

    #[inline]
    fn id(&self) -> u64 {
        let epoch = EPOCH.load(Ordering::Relaxed);
        if self.epoch.get() != epoch {
            self.reset_after_fork(epoch);
        }
        self.id.get()
    }
}

/// The calling process and thread.
#[inline]
pub(crate) fn id() -> u64 {
    THREAD.with(ThreadState::id)
}

/// Liveness token of the calling thread; 0 if it has none. Signals are blocked.
pub(crate) fn liveness() -> liveness::Token {
    THREAD.with(|me| {
        let who = me.id();
        if me.liveness.get() == 0 {
            let token = liveness::acquire(who as u32);
            me.liveness.set(if token == 0 { NO_LIVENESS } else { token });
        }
        if me.liveness.get() == NO_LIVENESS { 0 } else { me.liveness.get() }
    })
}

/// Names the calling thread as the holder of a queue's lock, so that others see when it has died.
/// Without a liveness token it gets a value that matches no slot: it is never taken for dead.
#[inline]
pub(crate) fn holder_token() -> liveness::Token {
    THREAD.with(|me| {
        let who = me.id();
        match me.liveness.get() {
            0 | NO_LIVENESS => acquire_holder_token(who),
            token => token,
        }
    })
}

#[cold]
fn acquire_holder_token(who: u64) -> liveness::Token {
    let signal_mask = SignalMask::new();
    let token = liveness();
    drop(signal_mask);
    if token == 0 { who << 32 | u64::from(u16::MAX) } else { token }
}

/// The liveness token (`liveness.rs`) if the thread has acquired it; else 0.
pub(crate) fn acquired_liveness() -> liveness::Token {
    THREAD.with(|me| {
        me.id();
        if me.liveness.get() == NO_LIVENESS { 0 } else { me.liveness.get() }
    })
}

/// The calling thread's member in `sock`, if it is cached.
#[inline]
pub(crate) fn cached_member<'a>(sock: &Sock, shared: &'a Shared) -> Option<&'a Member> {
    let index = sock.index();
    // One access to the thread-local state: in a shared library each costs a call.
    let (who, (at, generation, member)) =
        THREAD.with(|me| (me.id(), me.member_cache[index as usize % MEMBER_CACHE_SIZE].get()));
    if at != index + 1 || generation != sock.generation.load(Ordering::Relaxed) {
        return None;
    }
    shared.members.get(member as usize).filter(|member| member.thread_id.load(Ordering::Relaxed) == who)
}

/// The calling thread's member in `sock`; it joins if it has none. None if all slots are taken
/// (then the socket falls back), or if `fd` is not the socket's any more.
#[inline]
pub(crate) fn member<'a>(sock: &'static Sock, shared: &'a Shared, fd: c_int) -> Option<&'a Member> {
    cached_member(sock, shared).or_else(|| join(sock, shared, fd))
}

#[cold]
fn join<'a>(sock: &'static Sock, shared: &'a Shared, fd: c_int) -> Option<&'a Member> {
    let who = id();
    let joined = (shared.joined.load(Ordering::Acquire) as usize).min(MAX_MEMBERS);
    let mut place =
        shared.members[..joined].iter().position(|member| member.thread_id.load(Ordering::Relaxed) == who);
    if place.is_none() {
        // Checked before the thread joins: the number may have come to mean something else.
        if !identity::revalidate(sock, fd) {
            return None;
        }
        place = shared.members.iter().position(|member| {
            member.thread_id.compare_exchange(0, who, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        });
        let Some(at) = place else {
            lanes::fall_back(sock, fd, Reason::Full);
            return None;
        };
        let member = &shared.members[at];
        member.state.store(BUSY, Ordering::Relaxed);
        member.receives.store(0, Ordering::Relaxed);
        member.kind.store(0, Ordering::Relaxed);
        member.has_stolen.store(0, Ordering::Relaxed);
        member.is_sampled.store(0, Ordering::Relaxed);
        member.polled_at_ms.store(0, Ordering::Relaxed);
        member.lane.store(-1, Ordering::Relaxed);
        let signal_mask = SignalMask::new();
        member.liveness.store(liveness(), Ordering::Release);
        drop(signal_mask);
        let slot = report::claim_slot(who, lanes::local_addr(fd), shared.inode_of(0));
        member.slot.store(slot, Ordering::Relaxed);
        shared.joined.fetch_max(at as u32 + 1, Ordering::AcqRel);
        // The second receiver: every wait gets a bound. The mode changes only after the bound is
        // set.
        if !shared.is_single_receiver(&shared.members[at]) && shared.mode() == SINGLE {
            lanes::set_wait_bound(shared, fd);
            single_receiver::disarm_sync(sock);
            _ = shared.mode.compare_exchange(SINGLE, OBSERVING, Ordering::SeqCst, Ordering::Relaxed);
        }
        let key = KEY.load(Ordering::Relaxed);
        if key != 0 {
            // SAFETY: the key is ours; any value but null makes the destructor run when the thread
            // ends.
            unsafe { libc::pthread_setspecific(key - 1, std::ptr::from_ref(sock).cast::<c_void>()) };
        }
    }
    let at = place?;
    let index = sock.index();
    let generation = sock.generation.load(Ordering::Relaxed);
    THREAD.with(|me| {
        me.member_cache[index as usize % MEMBER_CACHE_SIZE].set((index + 1, generation, at as u32))
    });
    shared.members.get(at)
}

/// A thread ends: its lanes are taken out of steering, and the other threads drain them.
extern "C" fn on_thread_exit(_: *mut c_void) {
    if quiesce::enter() {
        leave_all();
        quiesce::leave();
    }
}

fn leave_all() {
    queues::flush();
    send_batch::flush();
    pollfds::free_cached();
    let who = id();
    for sock in Sock::in_use() {
        let Some(shared) = sock.shared() else { continue };
        if single_receiver::find_by_sock(sock).is_some() {
            single_receiver::disarm(sock);
        }
        for (at, member) in shared.members.iter().enumerate() {
            if member.thread_id.load(Ordering::Relaxed) == who {
                lanes::remove_member(sock, shared, at);
            }
        }
    }
}

/// Records that the calling thread peeked at a datagram in `lane`.
pub(crate) fn set_peeked(sock: &Sock, lane: usize) {
    THREAD.with(|me| me.peeked.set((sock.index() + 1, lane as u32)));
}

/// Takes the lane that the calling thread peeked at last.
#[inline]
pub(crate) fn take_peeked(sock: &Sock) -> Option<usize> {
    THREAD.with(|me| {
        let (at, lane) = me.peeked.get();
        (at == sock.index() + 1).then(|| {
            me.peeked.set((0, 0));
            lane as usize
        })
    })
}
