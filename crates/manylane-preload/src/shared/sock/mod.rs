//! A UDP socket of the program, and what its lanes share.
//!
//! [`Sock`] is this process's view: descriptors. [`Shared`] is the socket itself: one memory for
//! all processes that a fork gave the socket to, as the kernel's socket is one (`state.rs`).
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

mod state;

use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};

use libc::c_int;
use manylane_ipc::report::Reason;

pub(crate) use self::state::*;
use crate::base::settings::LANES_MAX;
use crate::shared::lease::Lease;
use crate::shared::leftovers::LeftoverQueue;
use crate::shared::memory::{self, PerLane, Zeroed};

/// Max UDP sockets of a process that the library tracks.
const SOCKS_MAX: usize = 4096;

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
    /// The reason why it must stay plain, plus 1; found before bind.
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
    /// Of `prefetch/`, which alone maps them.
    pub(crate) prefetches: PerLane,
    /// The same, of `send_batch.rs`.
    pub(crate) outboxes: PerLane,
    /// Datagrams left in its lanes when the library detached, or null: `seccomp.rs`.
    leftovers: AtomicPtr<LeftoverQueue>,
    /// Descriptors of the lanes, plus 1; 0 if none. Lane 0 is the program's own descriptor,
    /// whichever it uses.
    lane_fd: [AtomicI32; LANES_MAX],
}

// SAFETY: atomics (a pointer may be null); zeroes are a slot that is not in use.
unsafe impl Zeroed for Sock {}

/// Forks that this process has started.
static FORKS: AtomicU32 = AtomicU32::new(0);

static SOCKS: AtomicPtr<Sock> = AtomicPtr::new(ptr::null_mut());

impl Sock {
    /// Maps the slots; once, at start.
    pub(crate) fn start() -> bool {
        let Some(socks) = memory::map::<Sock>(SOCKS_MAX, false) else { return false };
        SOCKS.store(socks.as_ptr().cast_mut(), Ordering::Release);
        true
    }

    fn all() -> &'static [Sock] {
        let at = SOCKS.load(Ordering::Acquire);
        // SAFETY: the array that start() mapped, never unmapped; calls are handled only after it
        // (state::is_ready).
        unsafe { std::slice::from_raw_parts(at, SOCKS_MAX) }
    }

    /// The slot `index`, which came from the table.
    #[inline]
    pub(crate) fn at(index: u32) -> &'static Sock {
        &Self::all()[index as usize % SOCKS_MAX]
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

    /// The reason why the socket must not get lanes, if it must not.
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
