//! What the members of a queue share: the fill and the completion ring, the free frames, and who
//! may send how many.
//!
//! A device queue has one fill and one completion ring, whoever receives from it and sends to it.
//! Each member takes the lock once a batch, when it receives: what the batch held goes back, what
//! was sent comes back (whoever sent it), the kernel gets frames to receive into, and the
//! descriptors of the member's own receive ring are checked and held. On demand, once for many
//! frames, it takes the lock when it has run out of what it may send. Nobody makes a system call or
//! takes another lock with this one held, so it cannot be part of a deadlock, and it is held for as
//! long as a batch takes to be counted.
//!
//! # Who may send
//!
//! A frame on its way out is one less to receive into. So `frames - receiving` may be out at a
//! time, in all, and a member's part of that is the same as everybody else's. A member has it
//! granted in portions, called credits: one for each frame that is in its supply, taken, or on its
//! way out, and those that it has not used yet. When the kernel has sent a frame, the place of the
//! frame says which member's account the credit goes back to.

mod batch_ops;

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::xdp_desc;

use super::FrameCounts;
use super::frames::{FrameState, Frames, MEMBERS_MAX, MemberId, Packet, StateWord};
use super::ring::{Consumer, Producer};
use super::socket::{Maps, UmemRings};

/// A value on cache lines of its own: what lies beside it is read all the time by threads that do
/// not take the lock.
#[repr(align(128))]
struct CachePadded<T>(T);

/// The socket that a queue was opened with, and what it is bound to.
pub(super) struct UmemSocket {
    pub(super) socket: OwnedFd,
    pub(super) ifindex: u32,
    pub(super) queue: u32,
}

/// What all members of a queue share.
pub(super) struct FrameAllocator {
    // Dropped from the top: the rings before their maps, and these before the socket and the
    // frames. (The kernel has the pages of the frames pinned, so that the rest of the order is for
    // tidiness.)
    inner: CachePadded<Mutex<Inner>>,
    _maps: Option<Maps>,
    /// By what the frames and both rings were made. A mapping keeps its socket open, whoever closes
    /// the descriptor: were these the first member's, its socket would stay while others have the
    /// queue. None in tests.
    pub(super) umem_socket: Option<UmemSocket>,
    /// Whether packets come in several frames if they are long.
    pub(super) multi_buffer: bool,
    pub(super) frames: Frames,
}

struct Inner {
    fill: Producer<u64>,
    completion: Consumer<u64>,
    free: Vec<u32>,
    /// Frames that the kernel has to receive into.
    filling: u32,
    /// So many it should have.
    fill_target: u32,
    /// What the kernel said and cannot be.
    invalid: u64,
    slots: Vec<MemberSlot>,
    /// Credits of all accounts.
    granted: u32,
    /// Accounts that are open.
    members: u32,
    /// Credits that all of them together may have, and that one may: kept, since to find out takes
    /// a division.
    quota: (u32, u32),
}

/// What is granted to one member.
#[derive(Clone, Copy, Default)]
struct MemberSlot {
    /// A closed account may have frames on their way out.
    is_open: bool,
    granted: u32,
    /// Entries of the member's receive ring.
    ring: u32,
}

/// What a member has at hand for sending, without the lock. All of it is granted.
#[derive(Default)]
pub(super) struct FrameCache {
    /// Credits for frames that are there already: those of the batch.
    pub(super) credits: u32,
    /// Frames to be taken, in their place of that name.
    pub(super) frames: Vec<u32>,
    /// Frames taken since the batch began: as many are there when the next one begins.
    pub(super) allocated: u32,
    /// The pool had nothing. It is not asked again before the next batch or flush: not per
    /// datagram.
    pub(super) is_exhausted: bool,
}

impl FrameAllocator {
    /// A pool without members, which has given the kernel frames to receive into for a member with
    /// a receive ring of so many entries. `kernel` is the socket of the rings and what they lie in.
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
            // The frame given back last is taken first: it is still in the cache.
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
        let pool = Self {
            inner: CachePadded(Mutex::new(inner)),
            _maps: maps,
            umem_socket: anchor,
            multi_buffer: false,
            frames,
        };
        pool.lock().refill();
        pool
    }

    /// All that may be done with the lock held.
    #[inline]
    pub(super) fn lock(&self) -> AllocatorGuard<'_> {
        // Whoever panicked with the lock held did so between two steps; each leaves everything in
        // order.
        let inner = self.inner.0.lock().unwrap_or_else(PoisonError::into_inner);
        AllocatorGuard { frames: &self.frames, inner }
    }

    pub(super) fn frame_counts(&self) -> FrameCounts {
        let invalid = self.lock().inner.invalid;
        FrameCounts { invalid, ..self.frames.frame_counts() }
    }
}

/// The pool while one member has its lock.
pub(super) struct AllocatorGuard<'a> {
    frames: &'a Frames,
    inner: MutexGuard<'a, Inner>,
}

impl AllocatorGuard<'_> {
    /// Opens an account for a member whose receive ring has so many entries, and gives the kernel
    /// frames for it. None if there are no more numbers.
    pub(super) fn join(&mut self, ring: u32) -> Option<MemberId> {
        let accounts = &mut self.inner.slots;
        // A number whose frames are still on their way would get the credits of two.
        let vacant = accounts.iter().position(|account| !account.is_open && account.granted == 0);
        let at = match vacant {
            Some(at) => at,
            None if accounts.len() == MEMBERS_MAX => return None,
            None => {
                accounts.push(MemberSlot::default());
                accounts.len() - 1
            }
        };
        accounts[at] = MemberSlot { is_open: true, granted: 0, ring };
        self.rebalance();
        self.refill();
        Some(at as MemberId)
    }

    /// Shares out the frames anew between receiving and sending. What is unread in receive rings is
    /// no more to receive into; with as many frames as all rings have entries, a member that does
    /// not read takes none from the others.
    fn rebalance(&mut self) {
        let open = self.inner.slots.iter().filter(|account| account.is_open);
        let (members, rings) = open
            .fold((0, 0_u32), |(members, rings), account| (members + 1, rings.saturating_add(account.ring)));
        self.inner.members = members;
        self.inner.fill_target = rings.min(self.frames.count() / 2);
        let outgoing = self.frames.count() - self.inner.fill_target;
        // With more members than frames each may still send: one after the other.
        self.inner.quota = (outgoing, (outgoing / members.max(1)).max(1));
    }

    /// Closes the account of a member. What it had is free, but for what the kernel is still
    /// sending. What the kernel has not taken from its send ring is free, too, if it takes nothing
    /// without being asked (`asked`), which nobody does any more; otherwise it may take it yet.
    pub(super) fn leave(
        &mut self,
        me: MemberId,
        rx: &mut Consumer<xdp_desc>,
        tx: &mut Producer<xdp_desc>,
        asked: bool,
    ) {
        let frames = self.frames;
        for kind in [FrameState::Cached, FrameState::Held, FrameState::HeldSent, FrameState::Allocated] {
            frames.in_state(kind, Some(me)).for_each(|frame| self.release(frame));
        }
        for frame in frames.in_state(FrameState::HeldSending, Some(me)) {
            frames.set_state(frame, StateWord::new(FrameState::Sending, me));
        }
        // First what was sent: the kernel may have dropped a packet, which completes it, and not
        // moved on in the ring.
        self.reap();
        for desc in tx.unconsumed(asked) {
            let frame = self.frames.frame_of(desc.addr);
            if let Some(frame) =
                frame.filter(|&frame| self.frames.state(frame) == StateWord::new(FrameState::Sending, me))
            {
                self.release(frame);
            }
        }
        for _ in 0..rx.entries() {
            let Some(desc) = rx.pop() else { break };
            if let Some(frame) = self.accept_desc(&desc) {
                self.release(frame);
            }
        }
        rx.release();
        let still = self.frames.in_state(FrameState::Sending, Some(me)).count() as u32;
        if let Some(account) = self.inner.slots.get_mut(usize::from(me)) {
            let before = account.granted;
            *account = MemberSlot { is_open: false, granted: still, ring: 0 };
            self.inner.granted = (self.inner.granted + still).saturating_sub(before);
        }
        self.rebalance();
        self.refill();
    }

    #[inline]
    fn release(&mut self, frame: u32) {
        self.frames.set_state(frame, StateWord::FREE);
        self.inner.free.push(frame);
    }

    /// Gives the kernel what it lacks to receive into, as far as the fill ring has room.
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

    /// Whether the kernel wants to be told that the fill ring has entries; none where it cannot say
    /// so.
    #[inline]
    pub(super) fn needs_wakeup(&self) -> Option<bool> {
        self.inner.fill.needs_wakeup()
    }

    /// The frame that the kernel says it has received into: from filling to nowhere, where the
    /// caller takes it from. None, and counted, if that cannot be.
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

    /// Filling to held: what the kernel says it has received, in one frame. None, and counted, if
    /// that cannot be; the frame goes back to the free list if it was the kernel's.
    #[inline]
    pub(super) fn hold(&mut self, me: MemberId, desc: &xdp_desc) -> Option<Packet> {
        let frame = self.accept_desc(desc)?;
        let Some(packet) = self.frames.packet(frame, desc) else {
            self.inner.invalid += 1;
            self.release(frame);
            return None;
        };
        self.frames.set_state(frame, StateWord::new(FrameState::Held, me));
        Some(packet)
    }

    /// Filling to free, for what is part of nothing that can be used.
    pub(super) fn discard(&mut self, desc: &xdp_desc) {
        if let Some(frame) = self.accept_desc(desc) {
            self.release(frame);
        }
    }

    /// Counts something that the kernel said and that cannot be.
    pub(super) fn count_invalid(&mut self) {
        self.inner.invalid += 1;
    }

    /// Held to free (to filling at once, if the kernel lacks some), or to sending if it is still on
    /// its way out.
    #[inline]
    pub(super) fn release_held(&mut self, me: MemberId, frame: u32) {
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
            // Granted since it was put into the ring.
            FrameState::HeldSending => self.frames.set_state(frame, StateWord::new(FrameState::Sending, me)),
            FrameState::Free
            | FrameState::Filling
            | FrameState::Cached
            | FrameState::Allocated
            | FrameState::Sending => {}
        }
    }

    /// Grants up to `wanted` credits.
    #[inline]
    fn grant(&mut self, me: MemberId, wanted: u32) -> u32 {
        let (outgoing, quota) = self.inner.quota;
        let inner = &mut *self.inner;
        let Some(account) = inner.slots.get_mut(usize::from(me)) else { return 0 };
        let own = quota.saturating_sub(account.granted);
        let granted = wanted.min(own).min(outgoing.saturating_sub(inner.granted));
        account.granted += granted;
        inner.granted += granted;
        granted
    }

    /// Whether nothing is to be done for a member: the kernel has all frames that it should have to
    /// receive into, and what is granted to the member is in its purse, so that nothing of its
    /// comes back.
    #[inline]
    pub(super) fn is_idle(&self, me: MemberId, cache: &FrameCache) -> bool {
        let granted = self.inner.slots.get(usize::from(me)).map_or(0, |account| account.granted);
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

    /// Gets what the batch that begins will need, if it is like the one before: a batch of up to so
    /// many packets.
    #[inline]
    pub(super) fn refill_cache(&mut self, me: MemberId, cache: &mut FrameCache, batch: usize) {
        let frames = cache.allocated.min(cache.frames.capacity() as u32);
        self.fill_cache(me, cache, batch as u32, frames);
        (cache.allocated, cache.is_exhausted) = (0, false);
    }

    /// Fills a purse up to so many credits and frames. A purse that has more keeps it, unless the
    /// part of each member has become smaller: then it gives up what it has too much.
    #[inline]
    pub(super) fn fill_cache(&mut self, me: MemberId, cache: &mut FrameCache, credits: u32, frames: u32) {
        if cache.credits < credits {
            cache.credits += self.grant(me, credits - cache.credits);
        }
        for _ in cache.frames.len()..frames as usize {
            if self.inner.free.is_empty() || (cache.credits == 0 && self.grant(me, 1) == 0) {
                break;
            }
            cache.credits = cache.credits.saturating_sub(1);
            let Some(frame) = self.inner.free.pop() else { break };
            self.frames.set_state(frame, StateWord::new(FrameState::Cached, me));
            cache.frames.push(frame);
        }
        let (_, quota) = self.inner.quota;
        let granted = self.inner.slots.get(usize::from(me)).map_or(0, |account| account.granted);
        if granted > quota {
            self.trim_cache(me, cache, granted - quota);
        }
    }

    /// Gives up so much of what is in a purse, as far as it has that.
    fn trim_cache(&mut self, me: MemberId, cache: &mut FrameCache, count: u32) {
        let credits = count.min(cache.credits);
        cache.credits -= credits;
        let frames = (count - credits).min(cache.frames.len() as u32);
        self.release_cached(cache, frames);
        self.return_credits(me, credits + frames);
    }

    /// Makes credits of frames: the newest `count` of the supply are free again.
    fn release_cached(&mut self, cache: &mut FrameCache, count: u32) {
        for _ in 0..count {
            if let Some(frame) = cache.frames.pop() {
                self.release(frame);
            }
        }
    }

    /// Makes credits of half of the supply.
    pub(super) fn shrink_cache(&mut self, cache: &mut FrameCache) {
        let count = cache.frames.len().div_ceil(2) as u32;
        self.release_cached(cache, count);
        cache.credits += count;
    }

    /// Makes one credit at least of what is in the supply, if that is the only way to one.
    pub(super) fn convert_to_credits(&mut self, cache: &mut FrameCache) {
        if cache.credits == 0 {
            cache.credits = cache.frames.len() as u32;
            self.release_cached(cache, cache.credits);
        }
    }
}

#[cfg(test)]
impl AllocatorGuard<'_> {
    /// Whether all counts are right, by the places of the frames and by what each member has
    /// unused.
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
        // What one that has left is still sending was granted when there were others to share with,
        // or none.
        let of_members = self.inner.slots.iter().filter(|account| account.is_open);
        let of_members = of_members.map(|account| account.granted).sum::<u32>();
        assert!(of_members + self.inner.fill_target <= self.frames.count() || self.inner.members != 1);
    }
}
