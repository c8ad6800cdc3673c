//! State of a socket that all processes share: its mode, its members, and the owner of each lane.

use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering, fence};

use libc::c_int;
use manylane_ipc::lease::QUEUES_MAX;

use crate::base::settings::LANES_MAX;
use crate::shared::memory::Zeroed;

/// Max threads that receive on one socket.
pub(crate) const MEMBERS_MAX: usize = 128;
/// Receives after which a thread is known to come back.
pub(crate) const PROVEN_RECEIVES_MIN: u32 = 2;

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
    /// Not 0: its last poll of other lanes found a datagram, so there may be more. Receives until
    /// their owners get the CPU again (`coverage.rs`).
    pub(crate) found_in_other_lanes: AtomicU32,
    /// Its process, as that sees itself; 0 if it is not known yet.
    pub(crate) pid: AtomicU32,
    /// Liveness token of its thread (`liveness.rs`); 0 if it has none.
    pub(crate) liveness: AtomicU64,
    /// A sample is running. The next two fields are the thread's voluntary switches and CPU time
    /// in microseconds when it began (`active_set.rs`).
    pub(crate) is_sampled: AtomicU32,
    pub(crate) sampled_switches: AtomicU32,
    pub(crate) sampled_cpu_micros: AtomicU32,
    /// Time of the last poll of other lanes in one of its own waits, in milliseconds
    /// (`tick::coarse_ms`).
    pub(crate) polled_at_ms: AtomicU32,
}

const _: () = assert!(size_of::<Member>() == 64);

impl Member {
    /// The member's lane, if it has one.
    #[inline]
    pub(crate) fn own_lane(&self) -> Option<usize> {
        usize::try_from(self.lane.load(Ordering::Acquire)).ok().filter(|lane| *lane < LANES_MAX)
    }

    /// The calling thread, whose member this is, no longer waits.
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
    /// Nothing is prefetched, because the program would notice it: `prefetch/`.
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
    /// (`prefetch/`) if prefetches may hold datagrams.
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
    pub(crate) owner: [AtomicU32; LANES_MAX],
    /// The owner's heartbeat at the last check, the number of checks since it changed, and the
    /// time of the last counted check (milliseconds).
    pub(crate) seen_heartbeat: [AtomicU32; LANES_MAX],
    pub(crate) stalled_polls: [AtomicU32; LANES_MAX],
    pub(crate) polled_at_ms: [AtomicU32; LANES_MAX],
    /// Inodes of the kernel sockets, for the report; 0 if not known.
    pub(crate) inode: [AtomicU64; LANES_MAX],
    pub(crate) members: [Member; MEMBERS_MAX],
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
        &self.members[..(self.joined.load(Ordering::Acquire) as usize).min(MEMBERS_MAX)]
    }

    /// Kernel sockets of the group.
    #[inline]
    pub(crate) fn lane_count(&self) -> usize {
        (self.lanes.load(Ordering::Acquire) as usize).min(LANES_MAX)
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
        let words = [
            &self.mode,
            &self.change,
            &self.nonblock,
            &self.bounded,
            &self.lacks_fds,
            &self.lanes,
            &self.forked,
            &self.joined,
            &self.attempts,
            &self.port,
            &self.prefetch_off,
            &self.send_batch_off,
            &self.drain_first_left,
            &self.inherited,
            &self.active_state,
            &self.sleep_score,
            &self.clean_required,
            &self.polls,
            &self.first_active,
            &self.lease,
            &self.queue_count,
        ];
        let by_lane = [&self.owner, &self.seen_heartbeat, &self.stalled_polls, &self.polled_at_ms];
        for word in words.into_iter().chain(&self.queue_lane).chain(by_lane.into_iter().flatten()) {
            word.store(0, Ordering::Relaxed);
        }
        for word in [&self.timeout_us, &self.drain_first, &self.retired, &self.steered, &self.oversubscribed]
        {
            word.store(0, Ordering::Relaxed);
        }
        self.reply_error.store(0, Ordering::Relaxed);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::memory;

    /// Another process has written all of it.
    #[test]
    fn numbers_of_another_process_stay_within_the_arrays() {
        let shared = &memory::map::<Shared>(1, true).unwrap()[0];
        // SAFETY: a mapping of its own; atomics, of which all bytes are values.
        unsafe { ptr::from_ref(shared).cast_mut().cast::<u8>().write_bytes(0x7f, size_of::<Shared>()) };
        assert_eq!((shared.joined_members().len(), shared.lane_count()), (MEMBERS_MAX, LANES_MAX));
        assert_eq!(shared.members[0].own_lane(), None);
        assert!(shared.owner_of(0).is_none() && shared.owner_of(usize::MAX).is_none());
    }
}
