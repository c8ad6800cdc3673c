//! The send side of a member: its TX ring, and what it may send without the allocator's lock.

use std::io;
use std::sync::Arc;

use libc::xdp_desc;

use super::allocator::{FrameAllocator, FrameCache};
use super::frames::{FrameState, MemberId, Packet, StateWord};
use super::ring::Producer;
use super::tx_metadata::{METADATA_LEN, Metadata};
use super::wakeup::{KickOutcome, RingWakeup};

/// Calls without progress after which a flush gives up. The first may free room in the completion
/// ring.
const IDLE_KICKS_MAX: u32 = 2;

/// Maximum credits and frames that are requested under one lock.
const CREDIT_BATCH: u32 = 64;

/// A partial checksum: the first byte of the packet that it covers, and the offset of the
/// result from that byte.
pub(super) type PartialChecksum = (u16, u16);

/// The state of a member for sending.
pub(super) struct TxQueue {
    pub(super) allocator: Arc<FrameAllocator>,
    pub(super) member: MemberId,
    pub(super) tx: Producer<xdp_desc>,
    pub(super) cache: FrameCache,
    /// The kernel completes checksums. Frames then have room for [`Metadata`] before a packet to
    /// be sent.
    pub(super) has_csum_offload: bool,
}

impl TxQueue {
    /// For a member with batches of this many packets. `checksums` only if frames have room for
    /// metadata.
    pub(super) fn new(
        allocator: Arc<FrameAllocator>,
        member: MemberId,
        tx: Producer<xdp_desc>,
        batch: usize,
        checksums: bool,
    ) -> Self {
        let supply = Vec::with_capacity(batch.max(CREDIT_BATCH as usize));
        let cache = FrameCache { frames: supply, ..FrameCache::default() };
        let checksums = checksums && allocator.frames.tx_metadata_len() == METADATA_LEN;
        Self { allocator, member, tx, cache, has_csum_offload: checksums }
    }

    /// Requests credits, or frames with their credits, from the allocator.
    #[cold]
    fn refill(&mut self, credits: u32, frames: u32) {
        let mut locked = self.allocator.lock();
        locked.reap();
        locked.fill_cache(self.member, &mut self.cache, credits, frames);
        if credits > 0 {
            locked.convert_to_credits(&mut self.cache);
        }
        self.cache.is_exhausted = self.cache.credits == 0 && self.cache.frames.is_empty();
    }

    /// Uses a credit; false if none is available.
    #[inline]
    fn take_credit(&mut self) -> bool {
        if self.cache.credits == 0 && !self.cache.is_exhausted {
            self.refill(CREDIT_BATCH, 0);
        }
        let paid = self.cache.credits > 0;
        self.cache.credits -= u32::from(paid);
        paid
    }

    /// True if the packet of the current batch can be sent in place: it was received in one frame,
    /// and was not sent.
    #[inline]
    pub(super) fn can_send_in_place(&self, packet: &Packet) -> bool {
        self.allocator.frames.state(packet.frame) == StateWord::new(FrameState::Held, self.member)
    }

    /// Held to held and sending: puts the first `len` bytes of a packet of the batch into the
    /// ring. False if it cannot be sent in place, or there is no room.
    #[inline]
    pub(super) fn send_in_place(
        &mut self,
        packet: &Packet,
        len: u32,
        checksum: Option<PartialChecksum>,
    ) -> bool {
        let held = self.can_send_in_place(packet);
        let frames = &self.allocator.frames;
        let addr = frames.addr_of(packet.start);
        let before = addr.wrapping_sub(frames.addr(packet.frame)) as usize;
        // The kernel skips an empty descriptor, and one without the required room before it, and
        // does not complete it: the frame would be lost.
        if len == 0
            || !held
            || before < frames.tx_metadata_len()
            || !self.can_offload_csum(checksum, addr, len)
            || !self.take_credit()
        {
            return false;
        }
        if !self.push_desc(packet.frame, addr, len, checksum) {
            self.cache.credits += 1;
            return false;
        }
        self.allocator.frames.set_state(packet.frame, StateWord::new(FrameState::HeldSending, self.member));
        true
    }

    /// True if the kernel will accept a packet with this checksum: a refused one would block the
    /// ring.
    #[inline]
    fn can_offload_csum(&self, checksum: Option<PartialChecksum>, addr: u64, len: u32) -> bool {
        checksum.is_none_or(|(start, offset)| {
            let end = u32::from(start) + u32::from(offset) + 2;
            self.has_csum_offload && end <= len && addr.is_multiple_of(align_of::<Metadata>() as u64)
        })
    }

    /// Puts a packet into the ring. It is in a frame that this member holds or has allocated,
    /// behind the frame's metadata room, and [`can_offload_csum`](Self::can_offload_csum) is true
    /// for its checksum.
    #[inline]
    fn push_desc(&mut self, frame: u32, addr: u64, len: u32, checksum: Option<PartialChecksum>) -> bool {
        let mut options = 0;
        if let Some((start, offset)) = checksum {
            let flags = u64::from(libc::XDP_TXMD_FLAGS_CHECKSUM);
            let metadata = Metadata { flags, start, offset, unused: 0, launch_time: 0 };
            let frames = &self.allocator.frames;
            debug_assert!(addr >= frames.addr(frame) + METADATA_LEN as u64);
            // SAFETY: the bytes are in the same frame as the packet, aligned, and in the memory of
            // all frames (checked by the callers). The frame is ours, no ring names it yet, and
            // there is no slice of the bytes before a packet.
            unsafe { frames.base().add(addr as usize - METADATA_LEN).cast::<Metadata>().write(metadata) };
            options = libc::XDP_TX_METADATA;
        }
        self.tx.push(xdp_desc { addr, len, options })
    }

    /// Cached to allocated.
    #[inline]
    pub(super) fn alloc(&mut self) -> Option<u32> {
        if self.cache.frames.is_empty() && !self.cache.is_exhausted {
            self.refill(0, CREDIT_BATCH);
        }
        let frame = self.cache.frames.pop()?;
        self.cache.allocated += 1;
        self.allocator.frames.set_state(frame, StateWord::new(FrameState::Allocated, self.member));
        Some(frame)
    }

    /// True if this member has allocated the frame.
    #[inline]
    pub(super) fn is_allocated(&self, frame: u32) -> bool {
        self.allocator.frames.state(frame) == StateWord::new(FrameState::Allocated, self.member)
    }

    /// Allocated to cached.
    pub(super) fn free(&mut self, frame: u32) {
        if !self.is_allocated(frame) {
            return;
        }
        if self.cache.frames.len() == self.cache.frames.capacity() {
            self.allocator.lock().shrink_cache(&mut self.cache);
        }
        self.allocator.frames.set_state(frame, StateWord::new(FrameState::Cached, self.member));
        self.cache.frames.push(frame);
    }

    /// The usable area of an allocated frame: its offset in the memory of all frames, and its
    /// length.
    #[inline]
    pub(super) fn tx_area(&self, frame: u32) -> (u64, usize) {
        let frames = &self.allocator.frames;
        (frames.addr(frame) + frames.tx_metadata_len() as u64, frames.size() - frames.tx_metadata_len())
    }

    /// Allocated to sending: puts the first `len` bytes of a frame into the ring. False if there
    /// is no room, or they cannot be sent.
    #[inline]
    pub(super) fn send_allocated(
        &mut self,
        frame: u32,
        len: usize,
        checksum: Option<PartialChecksum>,
    ) -> bool {
        let (addr, len_max) = self.tx_area(frame);
        let fits = len > 0 && len <= len_max && self.is_allocated(frame);
        if !fits
            || !self.can_offload_csum(checksum, addr, len as u32)
            || !self.push_desc(frame, addr, len as u32, checksum)
        {
            return false;
        }
        self.allocator.frames.set_state(frame, StateWord::new(FrameState::Sending, self.member));
        true
    }

    /// Removes what was put into the ring since the last flush.
    pub(super) fn abandon(&mut self) {
        while let Some(desc) = self.tx.pop_unpublished() {
            let Some(frame) = self.allocator.frames.frame_of(desc.addr) else { continue };
            if self.allocator.frames.state(frame) == StateWord::new(FrameState::HeldSending, self.member) {
                self.allocator.frames.set_state(frame, StateWord::new(FrameState::Held, self.member));
                self.cache.credits += 1;
            } else {
                self.allocator.frames.set_state(frame, StateWord::new(FrameState::Allocated, self.member));
                self.free(frame);
            }
        }
    }

    /// See [`Sender::flush`](super::Sender::flush).
    pub(super) fn flush(&mut self, wakeup: &dyn RingWakeup) -> io::Result<usize> {
        self.cache.is_exhausted = false;
        self.tx.publish();
        let left = self.tx.pending();
        if left == 0 {
            return Ok(0);
        }
        if wakeup.is_zero_copy() {
            if wakeup.is_busy_polling() || self.tx.needs_wakeup().unwrap_or(true) {
                wakeup.send()?;
            }
            return Ok(0);
        }
        let (allocator, mut idle) = (&self.allocator, 0);
        let left = kick(&mut self.tx, wakeup, left + IDLE_KICKS_MAX, || {
            // A full completion ring stops the kernel from sending, whichever member its entries
            // belong to.
            allocator.lock().reap();
            idle += 1;
            idle < IDLE_KICKS_MAX
        })?;
        Ok(left as usize)
    }
}

/// Makes the kernel send the packets of a TX ring in copy mode, by at most `kicks_max` calls:
/// each takes descriptors, drops one, or does nothing. Goes on after one that did nothing if
/// `on_idle` returns true. Returns the number of packets left.
///
/// A call that ends with its budget leaves the ring as it found it, until one finds no more packets
/// (`xskq_cons_peek_desc`): so calls that show no progress are repeated until their budgets are as
/// many as the packets. Only then it is sure that they did nothing.
pub(super) fn kick(
    tx: &mut Producer<xdp_desc>,
    wakeup: &dyn RingWakeup,
    kicks_max: u32,
    mut on_idle: impl FnMut() -> bool,
) -> io::Result<u32> {
    let (mut left, mut kicks, mut hidden) = (tx.pending(), 0, 0_u32);
    while left > 0 && kicks < kicks_max {
        kicks += 1;
        let outcome = wakeup.send()?;
        let before = std::mem::replace(&mut left, tx.pending());
        if outcome == KickOutcome::Down {
            break;
        }
        if left < before || outcome == KickOutcome::Dropped {
            continue;
        }
        if outcome == KickOutcome::Partial {
            hidden = hidden.saturating_add(wakeup.tx_budget());
            if hidden < left {
                continue;
            }
        }
        if !on_idle() {
            break;
        }
    }
    Ok(left)
}
