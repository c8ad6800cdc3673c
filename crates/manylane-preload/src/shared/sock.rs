//! A UDP socket of the program, and what its lanes share.
//!
//! [`Sock`] is this process's view: descriptors. [`Shared`] is the socket itself: one memory for
//! all processes that a fork gave the socket to, as the kernel's socket is one.
//!
//! # Modes
//!
//! ```text
//! UNBOUND ─bind─► SINGLE ─2nd receiver─► OBSERVING ─all come back─► MULTI_LANE
//!    └──────────────┴────────────────────────┴─────────────────────────┴─► PLAIN (for good, with a reason)
//! ```
//!
//! - SINGLE: one thread receives, with the kernel's own calls, and waits without a bound.
//! - OBSERVING: several threads receive, still on one kernel socket, and every wait has a bound (a
//!   slice). `lanes/create.rs` says when it ends.
//! - MULTI_LANE: the threads that come back have lanes.
//! - PLAIN: the kernel's socket, as without the library. Datagrams that are left in lanes are
//!   received first.

use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};

use libc::c_int;
use manylane_ipc::lease::QUEUES_MAX;
use manylane_ipc::report::Reason;

use crate::base::settings::MAX_LANES;
use crate::shared::lease::Lease;
use crate::shared::leftovers::LeftoverQueue;
use crate::shared::memory::{self, PerLane, Zeroed};

/// Max threads that receive on one socket.
pub(crate) const MAX_MEMBERS: usize = 128;
/// Max UDP sockets of a process that the library tracks.
const MAX_SOCKS: usize = 4096;

pub(crate) const UNBOUND: u32 = 0;
pub(crate) const SINGLE: u32 = 1;
pub(crate) const OBSERVING: u32 = 2;
pub(crate) const MULTI_LANE: u32 = 3;
pub(crate) const PLAIN: u32 = 4;

/// The member is not waiting, and may not poll for long.
pub(crate) const BUSY: u32 = 0;
/// The member waits in the kernel without a bound.
pub(crate) const UNBOUNDED: u32 = 1;
/// The member waits, with a bound, on the lane whose number is added.
pub(crate) const WAITS_ON: u32 = 2;

/// The member has received with a blocking call.
pub(crate) const BLOCKS: u32 = 1;
/// The member has waited in poll, select or epoll_wait.
pub(crate) const POLLS: u32 = 2;

/// A thread that receives on a socket, or waits for it. One cache line. Its thread alone writes
/// it, except for `lane`.
#[repr(C, align(64))]
pub(crate) struct Member {
    /// [`thread::id`](crate::shared::thread::id); 0 if the slot is free.
    pub(crate) thread_id: AtomicU64,
    /// [`BUSY`], [`UNBOUNDED`], or [`WAITS_ON`] a lane.
    pub(crate) state: AtomicU32,
    /// Changes with each receive and each return from a wait. If it does not change, the thread is
    /// stopped, dead or busy elsewhere.
    pub(crate) heartbeat: AtomicU32,
    /// Receives with a datagram, or too late for one after a wait. Stops at `PROVEN_RECEIVES_MIN`.
    pub(crate) receives: AtomicU32,
    /// The member's lane; -1 if it has none.
    pub(crate) lane: AtomicI32,
    /// [`BLOCKS`], [`POLLS`].
    pub(crate) kind: AtomicU32,
    /// Slot in the report plus 1; 0 if none.
    pub(crate) slot: AtomicU32,
    /// Its last poll of other lanes found a datagram, so there may be more.
    pub(crate) has_stolen: AtomicU32,
    /// Its process, as that sees itself; 0 if it is not known yet.
    pub(crate) pid: AtomicU32,
    /// Liveness token of its thread (`liveness.rs`); 0 if it has none.
    pub(crate) liveness: AtomicU64,
    /// A sample is running. The next two fields are the thread's voluntary switches and CPU time
    /// in microseconds when it began (`active_set.rs`).
    pub(crate) is_sampled: AtomicU32,
    pub(crate) sampled_switches: AtomicU32,
    pub(crate) sampled_cpu_micros: AtomicU32,
    /// When one of its own waits last polled other lanes, in milliseconds (`tick::coarse_ms`).
    pub(crate) polled_at_ms: AtomicU32,
}

const _: () = assert!(size_of::<Member>() == 64);

impl Member {
    /// The member's lane, if it has one.
    #[inline]
    pub(crate) fn own_lane(&self) -> Option<usize> {
        usize::try_from(self.lane.load(Ordering::Acquire)).ok().filter(|lane| *lane < MAX_LANES)
    }

    /// The calling thread, whose member this is, waits no longer.
    #[inline]
    pub(crate) fn finish_wait(&self) {
        self.state.store(BUSY, Ordering::Release);
    }

    /// Counts one heartbeat of the calling thread, whose member this is.
    #[inline]
    pub(crate) fn beat(&self) {
        self.heartbeat.store(self.heartbeat.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }
}

/// A socket's state that all processes share. Another process can write anything here: it holds no
/// pointers, and each index is checked at its use.
#[repr(C)]
pub(crate) struct Shared {
    pub(crate) mode: AtomicU32,
    /// Guards changes of modes and lanes: `lock.rs`.
    pub(crate) lock: AtomicU64,
    /// The change that the holder of the lock is making. If it dies, the next holder finishes the
    /// change: `recovery.rs`.
    pub(crate) change: AtomicU32,
    /// The program made the socket non-blocking.
    pub(crate) nonblock: AtomicU32,
    /// The kernel's receive timeout is the library's (a slice), not the program's.
    pub(crate) bounded: AtomicU32,
    /// The program's own receive timeout in microseconds; 0 if none, `sockopt::NO_WAIT_US` if it is
    /// negative.
    pub(crate) timeout_us: AtomicU64,
    /// Too few descriptors could be spared for the lanes wanted.
    pub(crate) lacks_fds: AtomicU32,
    /// Kernel sockets of the group; 1 if only the program's own exists.
    pub(crate) lanes: AtomicU32,
    /// A fork gave the socket to another process, which would not have the descriptors of lanes
    /// opened from then on.
    pub(crate) forked: AtomicU32,
    /// Member slots that were ever used.
    pub(crate) joined: AtomicU32,
    /// Attempts to create lanes that failed.
    pub(crate) attempts: AtomicU32,
    pub(crate) port: AtomicU32,
    /// Nothing is prefetched, because the program would notice it: `prefetch.rs`.
    pub(crate) prefetch_off: AtomicU32,
    /// A batched reply failed, so that replies are no longer batched. `reply_error` keeps the
    /// error until a send has reported it.
    pub(crate) send_batch_off: AtomicU32,
    pub(crate) reply_error: AtomicI32,
    /// Lanes that several members share.
    pub(crate) oversubscribed: AtomicU64,
    /// Lanes whose datagrams are older than those of all others: they are drained first.
    pub(crate) drain_first: AtomicU64,
    /// Receives left from these lanes before only their owners drain them.
    pub(crate) drain_first_left: AtomicU32,
    /// Lanes that were taken out of steering for good and may not be empty; and `PREFETCH_BIT`
    /// (`prefetch.rs`) if prefetches may hold datagrams.
    pub(crate) retired: AtomicU64,
    /// Lanes that are steered to.
    pub(crate) steered: AtomicU64,
    /// It was bound before the program started, and is not in the report yet.
    pub(crate) inherited: AtomicU32,
    /// State of the active set, score of the sampled sleeps, clean samples required, and slices of
    /// all threads: `active_set.rs`.
    pub(crate) active_state: AtomicU32,
    pub(crate) sleep_score: AtomicU32,
    pub(crate) clean_required: AtomicU32,
    pub(crate) polls: AtomicU32,
    /// Owner at which the active set starts; advances with each rotation.
    pub(crate) first_active: AtomicU32,
    /// State of the queue lease: `lease.rs`.
    pub(crate) lease: AtomicU32,
    pub(crate) queue_count: AtomicU32,
    /// The lane of each queue.
    pub(crate) queue_lane: [AtomicU32; QUEUES_MAX],
    /// Member that owns each lane, plus 1; 0 if none.
    pub(crate) owner: [AtomicU32; MAX_LANES],
    /// The owner's heartbeat at the last check, the number of checks since it changed, and the
    /// time of the last counted check (milliseconds).
    pub(crate) seen_heartbeat: [AtomicU32; MAX_LANES],
    pub(crate) stalled_polls: [AtomicU32; MAX_LANES],
    pub(crate) polled_at_ms: [AtomicU32; MAX_LANES],
    /// Inodes of the kernel sockets, for the report; 0 if not known.
    pub(crate) inode: [AtomicU64; MAX_LANES],
    pub(crate) members: [Member; MAX_MEMBERS],
}

// SAFETY: atomics, and arrays of them; zeroes are a socket in mode UNBOUND.
unsafe impl Zeroed for Shared {}

impl Shared {
    #[inline]
    pub(crate) fn mode(&self) -> u32 {
        self.mode.load(Ordering::Acquire)
    }

    /// The slots of members that were ever used.
    #[inline]
    pub(crate) fn joined_members(&self) -> &[Member] {
        &self.members[..(self.joined.load(Ordering::Acquire) as usize).min(MAX_MEMBERS)]
    }

    /// Kernel sockets of the group.
    #[inline]
    pub(crate) fn lane_count(&self) -> usize {
        (self.lanes.load(Ordering::Acquire) as usize).min(MAX_LANES)
    }

    /// Inode of a lane's kernel socket; of the program's own for a member without a lane.
    pub(crate) fn inode_of(&self, lane: c_int) -> u64 {
        let lane = usize::try_from(lane).unwrap_or(0);
        self.inode.get(lane).map_or(0, |inode| inode.load(Ordering::Relaxed))
    }

    /// The member that owns `lane`.
    pub(crate) fn owner_of(&self, lane: usize) -> Option<&Member> {
        let owner = self.owner.get(lane)?.load(Ordering::Acquire) as usize;
        self.members.get(owner.wrapping_sub(1))
    }

    /// Resets everything but the lock to the state of a fresh mapping.
    pub(crate) fn reset(&self) {
        let words = [&self.mode, &self.nonblock, &self.bounded, &self.lanes, &self.forked, &self.joined];
        for word in words.into_iter().chain([
            &self.change,
            &self.attempts,
            &self.lacks_fds,
            &self.port,
            &self.prefetch_off,
        ]) {
            word.store(0, Ordering::Relaxed);
        }
        for word in
            [&self.active_state, &self.sleep_score, &self.clean_required, &self.polls, &self.first_active]
        {
            word.store(0, Ordering::Relaxed);
        }
        self.drain_first_left.store(0, Ordering::Relaxed);
        self.inherited.store(0, Ordering::Relaxed);
        self.send_batch_off.store(0, Ordering::Relaxed);
        self.reply_error.store(0, Ordering::Relaxed);
        for word in [&self.timeout_us, &self.drain_first, &self.retired, &self.steered, &self.oversubscribed]
        {
            word.store(0, Ordering::Relaxed);
        }
        for word in [&self.lease, &self.queue_count].into_iter().chain(&self.queue_lane) {
            word.store(0, Ordering::Relaxed);
        }
        for word in
            self.owner.iter().chain(&self.seen_heartbeat).chain(&self.stalled_polls).chain(&self.polled_at_ms)
        {
            word.store(0, Ordering::Relaxed);
        }
        for member in &self.members {
            member.liveness.store(0, Ordering::Relaxed);
            member.pid.store(0, Ordering::Relaxed);
            member.thread_id.store(0, Ordering::Relaxed);
        }
    }

    /// True if `member` is the only one. It must have its slot and be counted in `joined`.
    pub(crate) fn is_single_receiver(&self, member: &Member) -> bool {
        // If two threads join at once, at least one sees the other: each takes its slot and counts
        // itself before it checks.
        fence(Ordering::SeqCst);
        let mut others = self.joined_members().iter().filter(|other| !ptr::eq(*other, member));
        others.all(|other| other.thread_id.load(Ordering::Relaxed) == 0)
    }
}

/// This process's view of a socket.
#[repr(C)]
pub(crate) struct Sock {
    /// 1 while in use.
    pub(crate) used: AtomicU32,
    /// The program's descriptors for it.
    pub(crate) refs: AtomicU32,
    /// Socket cookie (`identity.rs`); 0 if not known.
    pub(crate) cookie: AtomicU64,
    /// Changes with each use of the slot, so that a reference to an earlier socket does not match
    /// the next one.
    pub(crate) generation: AtomicU32,
    /// Why it must stay plain, plus 1; found before bind.
    plain_reason: AtomicU32,
    /// The program's own receive timeout in microseconds, set before bind.
    pub(crate) timeout_us: AtomicU64,
    /// If the socket gets a group, it receives every datagram until the library steers:
    /// `lane_socket::pre_steer`.
    pub(crate) pre_steered: AtomicU32,
    /// It was added to an epoll instance.
    pub(crate) in_epoll: AtomicU32,
    /// Held while an epoll instance is changed by one of its descriptors, and while one of its
    /// descriptor numbers gets another meaning.
    pub(crate) fd_lock: AtomicU64,
    shared: AtomicPtr<Shared>,
    lease: AtomicPtr<Lease>,
    /// Of `prefetch.rs`, which alone maps them.
    pub(crate) prefetches: PerLane,
    /// The same, of `send_batch.rs`.
    pub(crate) outboxes: PerLane,
    /// Datagrams left in its lanes when the library detached, or null: `seccomp.rs`.
    leftovers: AtomicPtr<LeftoverQueue>,
    /// Descriptors of the lanes, plus 1; 0 if none. Lane 0 is the program's own descriptor,
    /// whichever it uses.
    lane_fd: [AtomicI32; MAX_LANES],
}

// SAFETY: atomics (a pointer may be null); zeroes are a slot that is not in use.
unsafe impl Zeroed for Sock {}

/// Forks that this process has started.
static FORKS: AtomicU32 = AtomicU32::new(0);

static SOCKS: AtomicPtr<Sock> = AtomicPtr::new(ptr::null_mut());

impl Sock {
    /// Maps the slots; once, at start.
    pub(crate) fn start() -> bool {
        let Some(socks) = memory::map::<Sock>(MAX_SOCKS, false) else { return false };
        SOCKS.store(socks.as_ptr().cast_mut(), Ordering::Release);
        true
    }

    fn all() -> &'static [Sock] {
        let at = SOCKS.load(Ordering::Acquire);
        // SAFETY: the array that start() mapped, never unmapped; calls are handled only after it
        // (state::is_ready).
        unsafe { std::slice::from_raw_parts(at, MAX_SOCKS) }
    }

    /// The slot `index`, which came from the table.
    #[inline]
    pub(crate) fn at(index: u32) -> &'static Sock {
        &Self::all()[index as usize % MAX_SOCKS]
    }

    /// The sockets in use.
    pub(crate) fn in_use() -> impl Iterator<Item = &'static Sock> {
        Self::all().iter().filter(|sock| sock.used.load(Ordering::Acquire) == 1)
    }

    pub(crate) fn index(&self) -> u32 {
        let start = SOCKS.load(Ordering::Relaxed) as usize;
        ((ptr::from_ref(self) as usize - start) / size_of::<Sock>()) as u32
    }

    /// Takes a slot for a socket that has one descriptor and this cookie.
    pub(crate) fn alloc(cookie: u64) -> Option<&'static Sock> {
        let sock = Self::all()
            .iter()
            .find(|sock| sock.used.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok())?;
        sock.generation.fetch_add(1, Ordering::Relaxed);
        sock.refs.store(1, Ordering::Relaxed);
        sock.cookie.store(cookie, Ordering::Relaxed);
        sock.plain_reason.store(0, Ordering::Relaxed);
        sock.timeout_us.store(0, Ordering::Relaxed);
        sock.pre_steered.store(0, Ordering::Relaxed);
        sock.in_epoll.store(0, Ordering::Relaxed);
        sock.fd_lock.store(0, Ordering::Relaxed);
        // The slot was released while a fork marked it.
        if sock.shared().is_some_and(|shared| shared.forked.load(Ordering::SeqCst) != 0) {
            sock.unshare();
        }
        Some(sock)
    }

    /// A fork begins: after it, both processes share the mappings of sockets in use.
    pub(crate) fn before_fork() {
        FORKS.fetch_add(1, Ordering::SeqCst);
    }

    /// In the child of a fork: locks held by the parent's threads are copies that no thread will
    /// release. Mappings that free slots keep for the next socket are the parent's.
    pub(crate) fn in_child() {
        for sock in Self::all() {
            match sock.used.load(Ordering::Relaxed) {
                0 => sock.unshare(),
                _ => sock.fd_lock.store(0, Ordering::Relaxed),
            }
        }
    }

    /// Releases the slot. Mappings shared by a fork still belong to the other process. Otherwise
    /// `reset` empties the socket's state for the next one, and returns whether it has emptied the
    /// prefetches and outboxes, too.
    pub(crate) fn release(&self, reset: impl FnOnce(&Shared) -> bool) {
        let forks = FORKS.load(Ordering::SeqCst);
        match self.shared() {
            Some(shared) if shared.forked.load(Ordering::SeqCst) != 0 => self.unshare(),
            Some(shared) => {
                if !reset(shared) {
                    // The next socket gets new ones of both. The limit on prefetch mappings bounds
                    // their number.
                    self.prefetches.clear();
                    self.outboxes.clear();
                }
                // A fork that began meanwhile may just have set `forked`, which was reset.
                if FORKS.load(Ordering::SeqCst) != forks {
                    self.unshare();
                }
            }
            None => {}
        }
        self.generation.fetch_add(1, Ordering::Relaxed);
        self.used.store(0, Ordering::Release);
    }

    /// The next socket in this slot gets its own mappings: another process uses these.
    fn unshare(&self) {
        self.shared.store(ptr::null_mut(), Ordering::Relaxed);
        self.prefetches.clear();
        self.outboxes.clear();
    }

    /// The state that all processes share; mapped at bind.
    #[inline]
    pub(crate) fn shared(&self) -> Option<&'static Shared> {
        let at = self.shared.load(Ordering::Acquire);
        // SAFETY: null, or a mapping from memory::map, which is never unmapped.
        unsafe { at.as_ref() }
    }

    /// [`shared`](Self::shared), which is mapped first if needed.
    pub(crate) fn map_shared(&self) -> Option<&'static Shared> {
        if self.shared().is_none() {
            let fresh = memory::map::<Shared>(1, true)?;
            self.shared.store(fresh.as_ptr().cast_mut(), Ordering::Release);
        }
        self.shared()
    }

    /// The socket must not get lanes, for `reason`; the first reason counts.
    pub(crate) fn mark_plain(&self, reason: Reason) {
        _ = self.plain_reason.compare_exchange(0, reason as u32 + 1, Ordering::Relaxed, Ordering::Relaxed);
        // As in `plain_reason`: either the thread that forks sees the shared socket, or the one
        // that binds sees this.
        fence(Ordering::SeqCst);
    }

    /// Why the socket must not get lanes, if it must not.
    pub(crate) fn plain_reason(&self) -> Option<Reason> {
        fence(Ordering::SeqCst);
        Reason::ALL.get((self.plain_reason.load(Ordering::Relaxed) as usize).wrapping_sub(1)).copied()
    }

    /// The queues that this process has on lease for it.
    #[inline]
    pub(crate) fn lease(&self) -> Option<&'static Lease> {
        // SAFETY: null, or one that `set_lease` was given, which is never freed.
        unsafe { self.lease.load(Ordering::Acquire).as_ref() }
    }

    pub(crate) fn set_lease(&self, lease: Option<&'static Lease>) {
        let at = lease.map_or(ptr::null_mut(), |lease| ptr::from_ref(lease).cast_mut());
        self.lease.store(at, Ordering::Release);
    }

    /// Datagrams left in its lanes when the library detached.
    pub(crate) fn leftovers(&self) -> Option<&'static LeftoverQueue> {
        // SAFETY: null, or the value that `set_leftovers` was given, which is never unmapped.
        unsafe { self.leftovers.load(Ordering::Acquire).as_ref() }
    }

    /// Called once: after it no slot is released or taken.
    pub(crate) fn set_leftovers(&self, leftovers: &'static LeftoverQueue) {
        self.leftovers.store(ptr::from_ref(leftovers).cast_mut(), Ordering::Release);
    }

    /// The descriptor of a lane; `fd` is the program's own.
    #[inline]
    pub(crate) fn fd_of(&self, lane: usize, fd: c_int) -> c_int {
        if lane == 0 {
            return fd;
        }
        match self.lane_fd.get(lane).map_or(0, |lane| lane.load(Ordering::Acquire)) {
            0 => fd,
            number => number - 1,
        }
    }

    /// The lanes' own descriptors.
    pub(crate) fn lane_fds(&self) -> impl Iterator<Item = (usize, c_int)> {
        let fds = self.lane_fd.iter().enumerate();
        fds.map(|(lane, fd)| (lane, fd.load(Ordering::Acquire) - 1)).filter(|(_, fd)| *fd >= 0)
    }

    pub(crate) fn set_lane_fd(&self, lane: usize, fd: c_int) {
        self.lane_fd[lane].store(fd + 1, Ordering::Release);
    }

    /// The lane has `new` in place of `old`, or none. False, and nothing changes, if it does not
    /// have `old`: another thread has moved or taken it.
    pub(crate) fn replace_lane_fd(&self, lane: usize, old: c_int, new: Option<c_int>) -> bool {
        let new = new.map_or(0, |fd| fd + 1);
        self.lane_fd[lane].compare_exchange(old + 1, new, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

/// Receives after which a thread is known to come back.
pub(crate) const PROVEN_RECEIVES_MIN: u32 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    /// Another process has written all of it.
    #[test]
    fn numbers_of_another_process_stay_within_the_arrays() {
        let shared = &memory::map::<Shared>(1, true).unwrap()[0];
        // SAFETY: a mapping of its own; atomics, of which all bytes are values.
        unsafe { ptr::from_ref(shared).cast_mut().cast::<u8>().write_bytes(0x7f, size_of::<Shared>()) };
        assert_eq!((shared.joined_members().len(), shared.lane_count()), (MAX_MEMBERS, MAX_LANES));
        assert_eq!(shared.members[0].own_lane(), None);
        assert!(shared.owner_of(0).is_none() && shared.owner_of(usize::MAX).is_none());
    }
}
