//! The calling thread: its id, and its member in each socket. Nothing here uses the heap.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::base::quiesce;
use crate::base::signals::SignalMask;
use crate::shared::sock::{Member, Shared, Sock};
use crate::shared::{liveness, processes};

/// Sockets whose member a thread caches; for others it is searched.
const MEMBER_CACHE_SIZE: usize = 32;
/// The thread cannot get a liveness token.
const NO_LIVENESS: u64 = u64::MAX;

/// Changes with each fork: the parent's cached state is not valid in the child.
static EPOCH: AtomicU32 = AtomicU32::new(1);
/// The process that the library's memory belongs to.
static PID: AtomicU32 = AtomicU32::new(0);

struct ThreadState {
    epoch: Cell<u32>,
    id: Cell<u64>,
    /// Liveness token, by which others know that the thread is alive; 0 if not acquired yet,
    /// [`NO_LIVENESS`] if none is available.
    liveness: Cell<u64>,
    /// Address of the socket's slot, its generation, the member.
    member_cache: [Cell<(usize, u32, u32)>; MEMBER_CACHE_SIZE],
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
}

/// True if the library's memory belongs to the calling process. Between vfork and exec it is the
/// parent's. After a clone that bypassed the C library it is not valid.
pub(crate) fn is_own_process() -> bool {
    PID.load(Ordering::Relaxed) == std::process::id()
}

impl ThreadState {
    /// After a fork the child has another process and thread id. The child of a vfork runs on the
    /// state of its parent's thread, and keeps its own id out of it.
    #[cold]
    fn reset_after_fork(&self, epoch: u32) -> u64 {
        let fresh = quiesce::run_inside(|| {
            // SAFETY: gettid(2) takes nothing and touches no memory.
            let tid = unsafe { libc::syscall(libc::SYS_gettid) } as u32;
            let id = u64::from(processes::number()) << 32 | u64::from(tid);
            if is_own_process() {
                self.id.set(id);
                self.member_cache.iter().for_each(|place| place.set((0, 0, 0)));
                self.peeked.set((0, 0));
                self.liveness.set(0);
                self.epoch.set(epoch);
            }
            id
        });
        fresh.unwrap_or_else(|| self.id.get())
    }

    #[inline]
    fn id(&self) -> u64 {
        let epoch = EPOCH.load(Ordering::Relaxed);
        if self.epoch.get() == epoch { self.id.get() } else { self.reset_after_fork(epoch) }
    }

    /// The field `liveness`, unless it is from before a fork.
    #[inline]
    fn token(&self) -> u64 {
        self.id();
        if self.epoch.get() == EPOCH.load(Ordering::Relaxed) { self.liveness.get() } else { NO_LIVENESS }
    }

    /// The liveness token; 0 if the thread has none.
    fn acquired_token(&self) -> liveness::Token {
        match self.token() {
            NO_LIVENESS => 0,
            token => token,
        }
    }
}

/// The number of the calling process (`processes.rs`), and the thread's id within it.
#[inline]
pub(crate) fn id() -> u64 {
    THREAD.with(ThreadState::id)
}

/// Liveness token of the calling thread; 0 if it has none. Signals are blocked.
pub(crate) fn liveness() -> liveness::Token {
    THREAD.with(|thread| {
        // To the C library, the child of a vfork is its parent's thread.
        if thread.token() == 0 && is_own_process() {
            let token = liveness::acquire(thread.id() as u32);
            thread.liveness.set(if token == 0 { NO_LIVENESS } else { token });
        }
        thread.acquired_token()
    })
}

/// Names the calling thread as the holder of a queue's lock, so that others see when it has died.
/// Without a liveness token it gets a value that matches no slot: it is never taken for dead.
#[inline]
pub(crate) fn holder_token() -> liveness::Token {
    THREAD.with(|thread| {
        let id = thread.id();
        match thread.token() {
            0 | NO_LIVENESS => acquire_holder_token(id),
            token => token,
        }
    })
}

#[cold]
fn acquire_holder_token(id: u64) -> liveness::Token {
    let signal_mask = SignalMask::new();
    let token = liveness();
    drop(signal_mask);
    if token == 0 { id << 32 | u64::from(u16::MAX) } else { token }
}

/// The liveness token (`liveness.rs`) if the thread has acquired it; else 0.
pub(crate) fn acquired_liveness() -> liveness::Token {
    THREAD.with(ThreadState::acquired_token)
}

/// Address of the socket's slot, and the place of its member in the cache. Sockets with consecutive
/// slots have different places.
#[inline]
fn cache_place(sock: &Sock) -> (usize, usize) {
    const { assert!(size_of::<Sock>() / align_of::<Sock>() % 2 == 1) };
    let at = std::ptr::from_ref(sock) as usize;
    (at, at / align_of::<Sock>() % MEMBER_CACHE_SIZE)
}

/// The calling thread's member in `sock`, if it has one.
#[inline]
pub(crate) fn member<'a>(sock: &Sock, shared: &'a Shared) -> Option<&'a Member> {
    cached_member(sock, shared).or_else(|| find_member(sock, shared))
}

/// The member that another socket's has replaced in the cache.
#[cold]
fn find_member<'a>(sock: &Sock, shared: &'a Shared) -> Option<&'a Member> {
    let own = id();
    let is_own = |member: &&Member| member.thread_id.load(Ordering::Relaxed) == own;
    let (at, member) = shared.joined_members().iter().enumerate().find(|(_, member)| is_own(member))?;
    cache_member(sock, at);
    Some(member)
}

/// The calling thread's member in `sock`, if it is cached.
#[inline]
pub(crate) fn cached_member<'a>(sock: &Sock, shared: &'a Shared) -> Option<&'a Member> {
    let (own, place) = cache_place(sock);
    // One access to the thread-local state: in a shared library each costs a call.
    let (id, (at, generation, member)) =
        THREAD.with(|thread| (thread.id(), thread.member_cache[place].get()));
    if at != own || generation != sock.generation.load(Ordering::Relaxed) {
        return None;
    }
    shared.members.get(member as usize).filter(|member| member.thread_id.load(Ordering::Relaxed) == id)
}

/// Remembers the calling thread's member in `sock`.
pub(crate) fn cache_member(sock: &Sock, member: usize) {
    let (own, place) = cache_place(sock);
    let generation = sock.generation.load(Ordering::Relaxed);
    THREAD.with(|thread| thread.member_cache[place].set((own, generation, member as u32)));
}

/// Records that the calling thread peeked at a datagram in `lane`.
pub(crate) fn set_peeked(sock: &Sock, lane: usize) {
    THREAD.with(|thread| thread.peeked.set((sock.index() + 1, lane as u32)));
}

/// Takes the lane that the calling thread peeked at last.
#[inline]
pub(crate) fn take_peeked(sock: &Sock) -> Option<usize> {
    THREAD.with(|thread| {
        let (at, lane) = thread.peeked.get();
        (at == sock.index() + 1).then(|| {
            thread.peeked.set((0, 0));
            lane as usize
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::memory;

    /// One thread may receive on any number of sockets.
    #[test]
    fn a_member_that_left_the_cache_is_found_again() {
        let socks = memory::map::<Sock>(2 * MEMBER_CACHE_SIZE, false).unwrap();
        let shared = memory::map::<Shared>(1, true).unwrap();
        let shared = &shared[0];
        for (at, thread_id) in [(0, u64::MAX), (1, id())] {
            shared.members[at].thread_id.store(thread_id, Ordering::Relaxed);
        }
        shared.joined.store(2, Ordering::Relaxed);
        for _ in 0..2 {
            for sock in socks {
                let found = member(sock, shared).unwrap();
                assert!(std::ptr::eq(found, &shared.members[1]));
            }
        }
        assert!(cached_member(&socks[0], shared).is_none());
        assert!(cached_member(&socks[MEMBER_CACHE_SIZE], shared).is_some());
        shared.members[1].thread_id.store(0, Ordering::Relaxed);
        assert!(socks.iter().all(|sock| member(sock, shared).is_none()));
    }
}
