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
use manylane_sys::lease::QUEUES_MAX;
use manylane_sys::shim::Reason;

use crate::lease::Lease;
use crate::leftovers::Leftovers;
use crate::memory::{self, Atomics};
use crate::prefetch::Prefetch;
use crate::send_batch::Outbox;
use crate::{identity, start, thread};

/// Lanes that a socket can have: bits of a word.
pub(crate) const MAX_LANES: usize = 64;
/// Threads that can receive on one socket.
pub(crate) const MAX_MEMBERS: usize = 128;
/// UDP sockets of a process that the library can know.
const MAX_SOCKS: usize = 4096;

pub(crate) const UNBOUND: u32 = 0;
pub(crate) const SINGLE: u32 = 1;
pub(crate) const OBSERVING: u32 = 2;
pub(crate) const MULTI_LANE: u32 = 3;
pub(crate) const PLAIN: u32 = 4;

/// A member is not waiting: it may be away for long.
pub(crate) const BUSY: u32 = 0;
/// A member waits in the kernel without a bound.
pub(crate) const UNBOUNDED: u32 = 1;
/// A member waits, with a bound, on the lane whose number is added.
pub(crate) const WAITS_ON: u32 = 2;

/// A member has received by a blocking call.
pub(crate) const BLOCKS: u32 = 1;
/// A member has waited in poll, select or epoll_wait.
pub(crate) const POLLS: u32 = 2;

/// A thread that receives on a socket, or waits for it. A cache line, which its thread alone writes
/// but for `lane`.
#[repr(C, align(64))]
pub(crate) struct Member {
    /// Process and thread; 0 if free.
    pub(crate) thread_id: AtomicU64,
    /// [`BUSY`], [`UNBOUNDED`], or [`WAITS_ON`] a lane.
    pub(crate) state: AtomicU32,
    /// Changes with each receive and each return from a wait: a member whose beat stands still is
    /// away, or dead.
    pub(crate) heartbeat: AtomicU32,
    /// Receives that brought something, or came too late after a wait; up to where it matters.
    pub(crate) receives: AtomicU32,
    /// Its lane, -1 if none.
    pub(crate) lane: AtomicI32,
    /// [`BLOCKS`], [`POLLS`].
    pub(crate) kind: AtomicU32,
    /// Its slot in the report, and one; 0 if none.
    pub(crate) slot: AtomicU32,
    /// It found something in a lane of somebody else: where there was something, there may be more.
    pub(crate) has_stolen: AtomicU32,
    /// Tells whether its thread is alive: `liveness.rs`; 0 while that is not known.
    pub(crate) liveness: AtomicU64,
    /// A datagram that it works on is looked at: how often it had slept, and how many microseconds
    /// it had run, before (`active_set.rs`).
    pub(crate) is_sampled: AtomicU32,
    pub(crate) sampled_switches: AtomicU32,
    pub(crate) sampled_cpu_micros: AtomicU32,
    /// When a wait of its own last looked at other lanes, in milliseconds (`coverage::now_ms`).
    pub(crate) polled_at_ms: AtomicU32,
}

const _: () = assert!(size_of::<Member>() == 64);

/// What all processes know of a socket.
#[repr(C)]
pub(crate) struct Shared {
    pub(crate) mode: AtomicU32,
    /// Guards what changes modes and lanes: `lock.rs`.
    pub(crate) lock: AtomicU64,
    /// The change that the holder of the lock is making; the next holder finishes one that was left
    /// unfinished: `recovery.rs`.
    pub(crate) change: AtomicU32,
    /// The program made it non-blocking.
    pub(crate) nonblock: AtomicU32,
    /// The kernel's receive timeout is ours (a slice), not the program's.
    pub(crate) bounded: AtomicU32,
    /// The program's own receive timeout in microseconds; 0: none.
    pub(crate) timeout_us: AtomicU64,
    /// There were fewer descriptors to spare than it was to have lanes.
    pub(crate) lacks_fds: AtomicU32,
    /// Kernel sockets of the group; 1 if there is only the program's own.
    pub(crate) lanes: AtomicU32,
    /// A fork gave the socket to another process: lanes that do not exist yet could not be reached
    /// by all.
    pub(crate) forked: AtomicU32,
    /// Places of members that were ever taken.
    pub(crate) joined: AtomicU32,
    /// Looks at whether lanes can be made, in vain.
    pub(crate) attempts: AtomicU32,
    pub(crate) port: AtomicU32,
    /// Something would show that datagrams are taken ahead, or they cannot be: none are. A bit for
    /// each reason, by its number.
    pub(crate) prefetch_off: AtomicU32,
    /// Of the reasons why they are not, those that are in the report.
    pub(crate) counted_reasons: AtomicU32,
    /// A reply that was put together with others failed: none are any more. The error, until a send
    /// has reported it.
    pub(crate) send_batch_off: AtomicU32,
    pub(crate) reply_error: AtomicI32,
    /// Lanes that several members have.
    pub(crate) oversubscribed: AtomicU64,
    /// Lanes that hold older datagrams than any other: they are emptied first.
    pub(crate) drain_first: AtomicU64,
    /// Receives out of those before they are emptied by their owners alone.
    pub(crate) drain_first_left: AtomicU32,
    /// Lanes that were taken out of steering for good, and may still hold something; and whether
    /// anything is held (`hold::PREFETCH_BIT`).
    pub(crate) retired: AtomicU64,
    /// Lanes that are steered to.
    pub(crate) steered: AtomicU64,
    /// It was bound before the program started, which the report does not say yet.
    pub(crate) inherited: AtomicU32,
    /// Whether threads beyond the processors rest, what speaks for it or against it, how much has
    /// to, and slices since the processors were looked at: `active_set.rs`.
    pub(crate) active_state: AtomicU32,
    pub(crate) sleep_score: AtomicU32,
    pub(crate) clean_required: AtomicU32,
    pub(crate) polls: AtomicU32,
    /// Whose turn it is to be awake.
    pub(crate) first_active: AtomicU32,
    /// What queues the socket has: `lease.rs`.
    pub(crate) lease: AtomicU32,
    pub(crate) queue_count: AtomicU32,
    /// The lane of each queue.
    pub(crate) queue_lane: [AtomicU32; QUEUES_MAX],
    /// Member of each lane, and one; 0 if none.
    pub(crate) owner: [AtomicU32; MAX_LANES],
    /// The beat of the owner when somebody last looked, how often it had not changed since, and
    /// when that was counted last (milliseconds).
    pub(crate) seen_heartbeat: [AtomicU32; MAX_LANES],
    pub(crate) stalled_polls: [AtomicU32; MAX_LANES],
    pub(crate) polled_at_ms: [AtomicU32; MAX_LANES],
    /// Numbers of the kernel sockets, for the report; 0 where not known.
    pub(crate) inode: [AtomicU64; MAX_LANES],
    pub(crate) members: [Member; MAX_MEMBERS],
}

// SAFETY: atomics, and arrays of them; zeroes are a socket in mode UNBOUND.
unsafe impl Atomics for Shared {}

impl Shared {
    #[inline]
    pub(crate) fn mode(&self) -> u32 {
        self.mode.load(Ordering::Acquire)
    }

    /// Number of the kernel socket of a lane; of the program's own for who has none.
    pub(crate) fn inode_of(&self, lane: c_int) -> u64 {
        let lane = usize::try_from(lane).unwrap_or(0);
        self.inode.get(lane).map_or(0, |inode| inode.load(Ordering::Relaxed))
    }

    /// The member that owns lane `lane`.
    pub(crate) fn owner_of(&self, lane: usize) -> Option<&Member> {
        let owner = self.owner[lane].load(Ordering::Acquire) as usize;
        self.members.get(owner.wrapping_sub(1))
    }

    /// Back to the state of a fresh mapping, but for the lock.
    pub(crate) fn reset(&self) {
        let words = [&self.mode, &self.nonblock, &self.bounded, &self.lanes, &self.forked, &self.joined];
        for word in words.into_iter().chain([
            &self.change,
            &self.attempts,
            &self.lacks_fds,
            &self.port,
            &self.prefetch_off,
            &self.counted_reasons,
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
            member.thread_id.store(0, Ordering::Relaxed);
        }
    }

    /// Whether `member`, which has taken its place and is counted in `joined`, is the only one.
    pub(crate) fn is_single_receiver(&self, member: &Member) -> bool {
        // Of two that come at a time, one at least sees the other: each has taken its place, and
        // counts, before it looks.
        fence(Ordering::SeqCst);
        let joined = self.joined.load(Ordering::Relaxed) as usize;
        let mut others = self.members.iter().take(joined).filter(|other| !ptr::eq(*other, member));
        others.all(|other| other.thread_id.load(Ordering::Relaxed) == 0)
    }
}

/// This process's view of a socket.
#[repr(C)]
pub(crate) struct Sock {
    /// 1 while in use.
    pub(crate) used: AtomicU32,
    /// Descriptors of the program that mean it.
    pub(crate) refs: AtomicU32,
    /// What the kernel tells it by: `identity.rs`; 0 if that is not known.
    pub(crate) cookie: AtomicU64,
    /// Changes with each use of the slot: what others remember of a socket that is gone does not
    /// fit the next one.
    pub(crate) generation: AtomicU32,
    /// Why it must stay plain, and one, found before it was bound.
    plain_reason: AtomicU32,
    /// The program's own receive timeout in microseconds, set before it was bound.
    pub(crate) timeout_us: AtomicU64,
    /// The descriptor with which its one receiver goes straight through, and one; 0 if none:
    /// `single_receiver.rs`.
    pub(crate) fast_path_fd: AtomicI32,
    /// The descriptor of an epoll instance that does so, and one; 0 if none.
    pub(crate) fast_path_epfd: AtomicI32,
    /// There was such a descriptor.
    pub(crate) had_fast_path: AtomicU32,
    /// Should a group come of it, all that comes is its own until somebody steers:
    /// `open::pre_steer`.
    pub(crate) pre_steered: AtomicU32,
    /// It was put into an epoll instance.
    pub(crate) in_epoll: AtomicU32,
    /// Held by who tells an epoll instance of one of its descriptors, and by who makes the number
    /// of one mean something else.
    pub(crate) fd_lock: AtomicU64,
    shared: AtomicPtr<Shared>,
    lease: AtomicPtr<Lease>,
    /// One for each lane that there may be; null: `prefetch.rs`.
    prefetches: AtomicPtr<Prefetch>,
    /// As many, or null: `send_batch.rs`.
    outboxes: AtomicPtr<Outbox>,
    /// Datagrams left in its lanes when the library stood aside, or null: `seccomp.rs`.
    leftovers: AtomicPtr<Leftovers>,
    /// Descriptors of the lanes, and one; 0 if none. The first is the program's own, whichever it
    /// uses.
    lane_fd: [AtomicI32; MAX_LANES],
}

// SAFETY: atomics (a pointer may be null); zeroes are a slot that is not in use.
unsafe impl Atomics for Sock {}

/// Forks that this process has begun.
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
        // SAFETY: the array that start() mapped, never unmapped; calls come in only after it
        // (start::is_ready).
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

    /// Takes a slot for a socket that has one descriptor.
    pub(crate) fn alloc(fd: c_int) -> Option<&'static Sock> {
        let sock = Self::all()
            .iter()
            .find(|sock| sock.used.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok())?;
        sock.generation.fetch_add(1, Ordering::Relaxed);
        sock.refs.store(1, Ordering::Relaxed);
        sock.cookie.store(identity::cookie(fd), Ordering::Relaxed);
        sock.plain_reason.store(0, Ordering::Relaxed);
        sock.timeout_us.store(0, Ordering::Relaxed);
        sock.fast_path_fd.store(0, Ordering::Relaxed);
        sock.fast_path_epfd.store(0, Ordering::Relaxed);
        sock.had_fast_path.store(0, Ordering::Relaxed);
        sock.pre_steered.store(0, Ordering::Relaxed);
        sock.in_epoll.store(0, Ordering::Relaxed);
        sock.fd_lock.store(0, Ordering::Relaxed);
        // It was given back while a fork marked it.
        if sock.shared().is_some_and(|shared| shared.forked.load(Ordering::SeqCst) != 0) {
            sock.unshare();
        }
        Some(sock)
    }

    /// A fork begins; after it, what is shared by sockets in use belongs to both processes.
    pub(crate) fn before_fork() {
        FORKS.fetch_add(1, Ordering::SeqCst);
    }

    /// In the child of a fork: what threads of the parent had locked is a copy, and nobody will
    /// open it. What slots that are not in use keep for the next socket is the parent's.
    pub(crate) fn in_child() {
        for sock in Self::all() {
            match sock.used.load(Ordering::Relaxed) {
                0 => sock.unshare(),
                _ => sock.fd_lock.store(0, Ordering::Relaxed),
            }
        }
    }

    /// Gives the slot back. What was shared by a fork still belongs to the other process.
    pub(crate) fn release(&self) {
        let forks = FORKS.load(Ordering::SeqCst);
        match self.shared() {
            Some(shared) if shared.forked.load(Ordering::SeqCst) != 0 => self.unshare(),
            Some(shared) => {
                let mine = thread::holder_token();
                let holds = self.prefetches().unwrap_or_default();
                let outboxes = self.outboxes().unwrap_or_default();
                let is_free = holds.iter().all(|hold| hold.reset(mine))
                    && outboxes.iter().all(|outbox| outbox.reset(mine));
                shared.reset();
                if is_free {
                    holds.iter().for_each(Prefetch::reopen);
                    outboxes.iter().for_each(Outbox::reopen);
                } else {
                    // The next socket gets others, of both: the number of mappings is bound by that
                    // of holds.
                    self.prefetches.store(ptr::null_mut(), Ordering::Relaxed);
                    self.outboxes.store(ptr::null_mut(), Ordering::Relaxed);
                }
                // A fork that has begun meanwhile may just have said so in what was reset.
                if FORKS.load(Ordering::SeqCst) != forks {
                    self.unshare();
                }
            }
            None => {}
        }
        self.generation.fetch_add(1, Ordering::Relaxed);
        self.used.store(0, Ordering::Release);
    }

    /// The next socket in this slot gets mappings of its own: another process has these.
    fn unshare(&self) {
        self.shared.store(ptr::null_mut(), Ordering::Relaxed);
        self.prefetches.store(ptr::null_mut(), Ordering::Relaxed);
        self.outboxes.store(ptr::null_mut(), Ordering::Relaxed);
    }

    /// What is shared; mapped at bind.
    #[inline]
    pub(crate) fn shared(&self) -> Option<&'static Shared> {
        let at = self.shared.load(Ordering::Acquire);
        // SAFETY: null, or a mapping from memory::map, which is never unmapped.
        unsafe { at.as_ref() }
    }

    /// [`shared`](Self::shared), mapped if it was not yet.
    pub(crate) fn map_shared(&self) -> Option<&'static Shared> {
        if self.shared().is_none() {
            let fresh = memory::map::<Shared>(1, true)?;
            self.shared.store(fresh.as_ptr().cast_mut(), Ordering::Release);
        }
        self.shared()
    }

    /// It is not to have lanes, for a reason; the first one counts.
    pub(crate) fn mark_plain(&self, reason: Reason) {
        _ = self.plain_reason.compare_exchange(0, reason as u32 + 1, Ordering::Relaxed, Ordering::Relaxed);
        // As in `plain_reason`: either the thread that forks sees the shared socket, or the one
        // that binds sees this.
        fence(Ordering::SeqCst);
    }

    /// Why it is not to have lanes, if that is so.
    pub(crate) fn plain_reason(&self) -> Option<Reason> {
        fence(Ordering::SeqCst);
        Reason::ALL.get((self.plain_reason.load(Ordering::Relaxed) as usize).wrapping_sub(1)).copied()
    }

    /// The queues that this process has for it.
    #[inline]
    pub(crate) fn lease(&self) -> Option<&'static Lease> {
        // SAFETY: null, or one that `set_lease` was given, which lives for ever.
        unsafe { self.lease.load(Ordering::Acquire).as_ref() }
    }

    pub(crate) fn set_lease(&self, lease: Option<&'static Lease>) {
        let at = lease.map_or(ptr::null_mut(), |lease| ptr::from_ref(lease).cast_mut());
        self.lease.store(at, Ordering::Release);
    }

    /// What was taken ahead of its lanes, lane by lane.
    #[inline]
    pub(crate) fn prefetches(&self) -> Option<&'static [Prefetch]> {
        let at = self.prefetches.load(Ordering::Acquire);
        if at.is_null() {
            return None;
        }
        let count = start::settings().map_or(0, |settings| settings.lanes.min(MAX_LANES));
        // SAFETY: what `set_prefetches` was given: as many as there may be lanes, in a mapping that
        // is never unmapped.
        Some(unsafe { std::slice::from_raw_parts(at, count) })
    }

    /// `holds` are as many as there may be lanes.
    pub(crate) fn set_prefetches(&self, holds: &'static [Prefetch]) {
        self.prefetches.store(holds.as_ptr().cast_mut(), Ordering::Release);
    }

    /// What its lanes have kept to be sent, lane by lane.
    #[inline]
    pub(crate) fn outboxes(&self) -> Option<&'static [Outbox]> {
        let at = self.outboxes.load(Ordering::Acquire);
        if at.is_null() {
            return None;
        }
        let count = start::settings().map_or(0, |settings| settings.lanes.min(MAX_LANES));
        // SAFETY: what `set_outboxes` was given: as many as there may be lanes, in a mapping that
        // is never unmapped.
        Some(unsafe { std::slice::from_raw_parts(at, count) })
    }

    /// `outboxes` are as many as there may be lanes.
    pub(crate) fn set_outboxes(&self, outboxes: &'static [Outbox]) {
        self.outboxes.store(outboxes.as_ptr().cast_mut(), Ordering::Release);
    }

    /// Datagrams left in its lanes when the library stood aside.
    pub(crate) fn leftovers(&self) -> Option<&'static Leftovers> {
        // SAFETY: null, or what `set_leftovers` was given, which is never unmapped.
        unsafe { self.leftovers.load(Ordering::Acquire).as_ref() }
    }

    /// Once: no slot is given back or taken after that.
    pub(crate) fn set_leftovers(&self, leftovers: &'static Leftovers) {
        self.leftovers.store(ptr::from_ref(leftovers).cast_mut(), Ordering::Release);
    }

    /// The descriptor of a lane, where the program's own is `fd`.
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

    pub(crate) fn set_lane_fd(&self, lane: usize, fd: Option<c_int>) {
        self.lane_fd[lane].store(fd.map_or(0, |fd| fd + 1), Ordering::Release);
    }
}
