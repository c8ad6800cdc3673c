//! State shared by the members of a queue: the fill and the completion ring, the free frames, and
//! the limits for sending.
//!
//! A device queue has one fill and one completion ring for all its members. Each member takes the
//! lock once a pass over its rings. It then returns the frames of its batches, reclaims sent
//! frames (of any member), gives the kernel frames to receive into, and checks and holds the
//! descriptors of its own RX ring. It also takes the lock, once for many frames, when it has run
//! out of credits or frames for sending. No system call is made and no other lock is taken with
//! this one held. So it cannot be part of a deadlock, and is held for as long as counting a batch
//! takes.
//!
//! # Credits
//!
//! Each frame being sent is one less to receive into. So at most `frames - receiving` may be in
//! use for sending, in total, with an equal share for each member. A member is granted its share
//! in credits: one for each frame that is in its cache, allocated, or being sent, and unused ones.
//! When the kernel has sent a frame, the state of the frame tells to which member the credit
//! returns.

mod batch_ops;
mod members;

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::xdp_desc;

use super::frames::{FrameCounts, FrameState, Frames, MemberId, Packet, StateWord};
use super::ring::{Consumer, Producer};
use super::socket::{Maps, UmemRings};

/// A value on cache lines of its own: its neighbours are read all the time by threads that do not
/// take the lock.
#[repr(align(128))]
struct CachePadded<T>(T);

/// The socket that a queue was opened with, and its device queue.
pub(super) struct UmemSocket {
    pub(super) socket: OwnedFd,
    pub(super) ifindex: u32,
    pub(super) queue: u32,
}

/// State shared by all members of a queue.
pub(super) struct FrameAllocator {
    // Dropped in this order: the rings before their maps, and these before the socket and the
    // frames. (The kernel has the pages of the frames pinned, so the remaining order is only for
    // tidiness.)
    inner: CachePadded<Mutex<Inner>>,
    _maps: Option<Maps>,
    /// Owns the frames and both rings. A mapping keeps its socket open even after its descriptor
    /// is closed: if these belonged to the first member, its socket would stay open while others
    /// use the queue. None in tests.
    pub(super) umem_socket: Option<UmemSocket>,
    /// Long packets arrive in several frames.
    pub(super) multi_buffer: bool,
    pub(super) frames: Frames,
}

struct Inner {
    fill: Producer<u64>,
    completion: Consumer<u64>,
    free: Vec<u32>,
    /// Frames that the kernel has to receive into.
    filling: u32,
    /// The number that it should have.
    fill_target: u32,
    /// Invalid entries from the kernel.
    invalid: u64,
    slots: Vec<MemberSlot>,
    /// Credits granted to all members.
    granted: u32,
    /// Open members.
    members: u32,
    /// Maximum credits of all members, and of one; cached, because computing them takes a
    /// division.
    quota: (u32, u32),
}

/// Credits of one member. On lines of their own, like the lock: they are on the heap, and written
/// for each batch.
#[repr(align(128))]
#[derive(Clone, Copy, Default)]
struct MemberSlot {
    /// A closed member may have frames that are still being sent.
    is_open: bool,
    granted: u32,
    /// Entries of the member's RX ring.
    ring: u32,
}

/// Credits and frames that a member can send with, without the lock. All of them are granted.
#[derive(Default)]
pub(super) struct FrameCache {
    /// Credits for frames that exist already: those of the batch.
    pub(super) credits: u32,
    /// Cached frames.
    pub(super) frames: Vec<u32>,
    /// Frames allocated since the batch began; the next batch starts with that number cached.
    pub(super) allocated: u32,
    /// The allocator had none left. It is not asked again before the next batch or flush, to avoid
    /// a request per datagram.
    pub(super) is_exhausted: bool,
}

impl FrameAllocator {
    /// An allocator without members, which has given the kernel frames for a member whose RX ring
    /// has this many entries. `kernel` is the socket of the rings, and their maps.
    pub(super) fn new(
        rings: UmemRings,
        kernel: Option<(Maps, UmemSocket)>,
        frames: Frames,
        ring: u32,
    ) -> Self {
        let UmemRings { fill, completion } = rings;
        let inner = Inner {
            fill,
            completion,
            // The frame freed last is reused first, because it is still in the cache.
            free: (0..frames.count()).rev().collect(),
            filling: 0,
            fill_target: ring.min(frames.count() / 2),
            invalid: 0,
            slots: Vec::new(),
            granted: 0,
            members: 0,
            quota: (0, 0),
        };
        let (maps, anchor) = kernel.unzip();
        let allocator = Self {
            inner: CachePadded(Mutex::new(inner)),
            _maps: maps,
            umem_socket: anchor,
            multi_buffer: false,
            frames,
        };
        allocator.lock().refill();
        allocator
    }

    /// Takes the lock for all operations that need it.
    #[inline]
    pub(super) fn lock(&self) -> AllocatorGuard<'_> {
        // A panic with the lock held happened between two steps, each of which leaves valid state.
        let inner = self.inner.0.lock().unwrap_or_else(PoisonError::into_inner);
        AllocatorGuard { frames: &self.frames, inner }
    }

    pub(super) fn frame_counts(&self) -> FrameCounts {
        let invalid = self.lock().inner.invalid;
        FrameCounts { invalid, ..self.frames.frame_counts() }
    }
}

/// The allocator with its lock held.
pub(super) struct AllocatorGuard<'a> {
    frames: &'a Frames,
    inner: MutexGuard<'a, Inner>,
}

impl AllocatorGuard<'_> {
    #[inline]
    fn release(&mut self, frame: u32) {
        self.frames.set_state(frame, StateWord::FREE);
        self.inner.free.push(frame);
    }

    /// Gives the kernel the frames that it lacks, as far as the fill ring has room.
    #[inline]
    pub(super) fn refill(&mut self) {
        while self.inner.filling < self.inner.fill_target {
            let Some(&frame) = self.inner.free.last() else { break };
            if !self.inner.fill.push(self.frames.addr(frame)) {
                break;
            }
            self.inner.free.pop();
            self.inner.filling += 1;
            self.frames.set_state(frame, StateWord::FILLING);
        }
        self.inner.fill.publish();
    }

    /// True if the kernel wants to be notified that the fill ring has entries; none if it has no
    /// such flag.
    #[inline]
    pub(super) fn needs_wakeup(&self) -> Option<bool> {
        self.inner.fill.needs_wakeup()
    }

    /// Accepts a frame that the kernel says it has received into; the caller sets its new state.
    /// None, and counted, if it is invalid.
    #[inline]
    fn accept_desc(&mut self, desc: &xdp_desc) -> Option<u32> {
        let frame =
            self.frames.frame_of(desc.addr).filter(|&frame| self.frames.state(frame) == StateWord::FILLING);
        if frame.is_some() {
            self.inner.filling -= 1;
        } else {
            self.inner.invalid += 1;
        }
        frame
    }

    /// Filling to held, for one received packet in one frame. None, and counted, if it is invalid;
    /// the frame is freed if it was the kernel's.
    #[inline]
    pub(super) fn hold(&mut self, member: MemberId, desc: &xdp_desc) -> Option<Packet> {
        let frame = self.accept_desc(desc)?;
        let Some(packet) = self.frames.packet(frame, desc) else {
            self.inner.invalid += 1;
            self.release(frame);
            return None;
        };
        self.frames.set_state(frame, StateWord::new(FrameState::Held, member));
        Some(packet)
    }

    /// Filling to free, for a part of a packet that cannot be used.
    pub(super) fn discard(&mut self, desc: &xdp_desc) {
        if let Some(frame) = self.accept_desc(desc) {
            self.release(frame);
        }
    }

    /// Counts an invalid entry from the kernel.
    pub(super) fn count_invalid(&mut self) {
        self.inner.invalid += 1;
    }

    /// Held to free (to filling at once, if the kernel lacks frames), or to sending if it is still
    /// being sent.
    #[inline]
    pub(super) fn release_held(&mut self, member: MemberId, frame: u32) {
        match self.frames.state(frame).state() {
            FrameState::Held | FrameState::HeldSent => {
                let inner = &mut *self.inner;
                if inner.filling < inner.fill_target && inner.fill.push(self.frames.addr(frame)) {
                    inner.filling += 1;
                    self.frames.set_state(frame, StateWord::FILLING);
                } else {
                    self.release(frame);
                }
            }
            // Its credit has been in use since it was put into the ring.
            FrameState::HeldSending => {
                self.frames.set_state(frame, StateWord::new(FrameState::Sending, member))
            }
            FrameState::Free
            | FrameState::Filling
            | FrameState::Cached
            | FrameState::Allocated
            | FrameState::Sending => {}
        }
    }

    /// Grants up to `wanted` credits.
    #[inline]
    fn grant(&mut self, member: MemberId, wanted: u32) -> u32 {
        let (outgoing, quota) = self.inner.quota;
        let inner = &mut *self.inner;
        let Some(account) = inner.slots.get_mut(usize::from(member)) else { return 0 };
        let own = quota.saturating_sub(account.granted);
        let granted = wanted.min(own).min(outgoing.saturating_sub(inner.granted));
        account.granted += granted;
        inner.granted += granted;
        granted
    }

    /// True if there is nothing to do for a member: the kernel has all frames that it should have,
    /// and all the member's credits are in its cache, so none will return.
    #[inline]
    pub(super) fn is_idle(&self, member: MemberId, cache: &FrameCache) -> bool {
        let granted = self.inner.slots.get(usize::from(member)).map_or(0, |account| account.granted);
        self.inner.filling >= self.inner.fill_target
            && granted as usize == cache.credits as usize + cache.frames.len()
    }

    #[inline]
    fn return_credits(&mut self, member: MemberId, count: u32) {
        let inner = &mut *self.inner;
        if let Some(account) = inner.slots.get_mut(usize::from(member)) {
            account.granted -= count;
            inner.granted -= count;
        }
    }

    /// Provides what the batch that begins will need, assuming that it is like the previous one: a
    /// batch of up to `batch` packets.
    #[inline]
    pub(super) fn refill_cache(&mut self, member: MemberId, cache: &mut FrameCache, batch: usize) {
        let frames = cache.allocated.min(cache.frames.capacity() as u32);
        self.fill_cache(member, cache, batch as u32, frames);
        (cache.allocated, cache.is_exhausted) = (0, false);
    }

    /// Fills a cache up to this many credits and frames. A cache with more keeps them, unless the
    /// share of each member has shrunk: then it returns the excess.
    #[inline]
    pub(super) fn fill_cache(&mut self, member: MemberId, cache: &mut FrameCache, credits: u32, frames: u32) {
        if cache.credits < credits {
            cache.credits += self.grant(member, credits - cache.credits);
        }
        for _ in cache.frames.len()..frames as usize {
            if self.inner.free.is_empty() || (cache.credits == 0 && self.grant(member, 1) == 0) {
                break;
            }
            cache.credits = cache.credits.saturating_sub(1);
            let Some(frame) = self.inner.free.pop() else { break };
            self.frames.set_state(frame, StateWord::new(FrameState::Cached, member));
            cache.frames.push(frame);
        }
        let (_, quota) = self.inner.quota;
        let granted = self.inner.slots.get(usize::from(member)).map_or(0, |account| account.granted);
        if granted > quota {
            self.trim_cache(member, cache, granted - quota);
        }
    }

    /// Returns `count` credits or frames of a cache, as far as it has them.
    fn trim_cache(&mut self, member: MemberId, cache: &mut FrameCache, count: u32) {
        let credits = count.min(cache.credits);
        cache.credits -= credits;
        let frames = (count - credits).min(cache.frames.len() as u32);
        self.release_cached(cache, frames);
        self.return_credits(member, credits + frames);
    }

    /// Frees the newest `count` cached frames; the caller keeps their credits.
    fn release_cached(&mut self, cache: &mut FrameCache, count: u32) {
        for _ in 0..count {
            if let Some(frame) = cache.frames.pop() {
                self.release(frame);
            }
        }
    }

    /// Converts half of the cached frames to credits.
    pub(super) fn shrink_cache(&mut self, cache: &mut FrameCache) {
        let count = cache.frames.len().div_ceil(2) as u32;
        self.release_cached(cache, count);
        cache.credits += count;
    }

    /// Converts all cached frames to credits, if there is no other way to get one.
    pub(super) fn convert_to_credits(&mut self, cache: &mut FrameCache) {
        if cache.credits == 0 {
            cache.credits = cache.frames.len() as u32;
            self.release_cached(cache, cache.credits);
        }
    }
}

#[cfg(test)]
impl AllocatorGuard<'_> {
    /// Checks all counts against the states of the frames and the unused credits of each member.
    pub(super) fn audit(&self, caches: &[(MemberId, &FrameCache)]) {
        let mut free = self.inner.free.clone();
        free.sort_unstable();
        assert_eq!(
            free,
            self.frames.in_state(FrameState::Free, None).collect::<Vec<_>>(),
            "the free list and the places differ"
        );
        assert_eq!(self.inner.filling as usize, self.frames.in_state(FrameState::Filling, None).count());
        assert_eq!(self.frames.frame_counts().total(), self.frames.count());
        for (at, account) in self.inner.slots.iter().enumerate() {
            let out =
                [FrameState::Cached, FrameState::Allocated, FrameState::Sending, FrameState::HeldSending];
            let out = out
                .iter()
                .map(|&kind| self.frames.in_state(kind, Some(at as MemberId)).count() as u32)
                .sum::<u32>();
            let cache = caches.iter().find(|(member, _)| usize::from(*member) == at).map(|(_, cache)| cache);
            assert_eq!(account.is_open, cache.is_some());
            assert_eq!(
                account.granted,
                out + cache.map_or(0, |cache| cache.credits),
                "the account of member {at}"
            );
            if let Some(cache) = cache {
                let mut supply = cache.frames.clone();
                supply.sort_unstable();
                assert_eq!(
                    supply,
                    self.frames.in_state(FrameState::Cached, Some(at as MemberId)).collect::<Vec<_>>()
                );
            }
        }
        let granted = self.inner.slots.iter().map(|account| account.granted).sum::<u32>();
        assert_eq!(self.inner.granted, granted);
        // Credits of a removed member that is still sending were granted when there were other
        // members, or none.
        let of_members = self.inner.slots.iter().filter(|account| account.is_open);
        let of_members = of_members.map(|account| account.granted).sum::<u32>();
        assert!(of_members + self.inner.fill_target <= self.frames.count() || self.inner.members != 1);
    }
}
