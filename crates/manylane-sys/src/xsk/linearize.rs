//! Packets of several frames, assembled in a buffer of the member.
//!
//! The kernel splits a packet that is longer than a frame (Linux 6.6, `XDP_USE_SG`): all its
//! descriptors except the last have a flag that it continues. Three steps make it one packet
//! again. With the allocator's lock held, the frames are checked and held, and room is reserved.
//! Without the lock, the bytes are copied. With it again, the frames are freed.

use libc::xdp_desc;

use super::allocator::{AllocatorGuard, FrameAllocator};
use super::frames::{MemberId, NO_FRAME, Packet};
use super::ring::Consumer;
use crate::map::Mapping;

/// Size of the longest packet that is assembled, in bytes.
pub(super) const PACKET_LEN_MAX: usize = 1 << 16;
/// Maximum number of frames of one packet: with 2048 bytes, of which the kernel reserves 256, the
/// longest needs 37.
pub(super) const FRAGS_MAX: usize = 64;
/// Total bytes of the assembled packets of one batch. Packets that do not fit are in the next
/// batch.
const BUFFER_SIZE: usize = 16 * PACKET_LEN_MAX;
/// Alignment of packets in bytes, so that two of them share no cache line.
const ALIGN: usize = 64;

/// The result for the descriptors of a packet.
pub(super) enum Linearized {
    /// A packet; its bytes are valid after [`Linearizer::finish`].
    Packet(Packet),
    /// Unusable.
    Discarded,
    /// Left in the ring, until the packet is complete or the next batch has room.
    Deferred,
}

/// A fragment that is to be copied.
struct PendingCopy {
    src: Packet,
    dst: *mut u8,
}

// SAFETY: as for `Packet`; the buffer moves with the member, too.
unsafe impl Send for PendingCopy {}

/// The buffer of a member, and its use by the current batch.
pub(super) struct Linearizer {
    memory: Option<Mapping>,
    used: usize,
    copies: Vec<PendingCopy>,
    /// The remaining fragments of a dropped packet are still to come.
    is_skipping: bool,
}

impl Linearizer {
    /// Assembles no packets; fragments are counted as invalid.
    pub(super) fn disabled() -> Self {
        Self { memory: None, used: 0, copies: Vec::new(), is_skipping: false }
    }

    /// With a buffer, for an RX ring of `ring` entries.
    pub(super) fn new(ring: u32) -> std::io::Result<Self> {
        let memory = Some(Mapping::new(BUFFER_SIZE)?);
        Ok(Self { memory, copies: Vec::with_capacity(ring as usize), ..Self::disabled() })
    }

    /// True if the next fragments belong to a dropped packet.
    #[inline]
    pub(super) fn is_skipping(&self) -> bool {
        self.is_skipping
    }

    /// The batch ends: the whole buffer is free.
    #[inline]
    pub(super) fn clear(&mut self) {
        self.used = 0;
    }

    /// True if there is something to copy.
    #[inline]
    pub(super) fn has_copies(&self) -> bool {
        !self.copies.is_empty()
    }

    /// Takes the remaining fragments of the packet that begins with `first`, which was just taken
    /// from `rx`.
    #[cold]
    pub(super) fn linearize(
        &mut self,
        member: MemberId,
        first: xdp_desc,
        rx: &mut Consumer<xdp_desc>,
        locked: &mut AllocatorGuard<'_>,
    ) -> Linearized {
        if self.is_skipping {
            self.is_skipping = is_continued(&first);
            locked.discard(&first);
            return Linearized::Discarded;
        }
        let mut pieces = [first; FRAGS_MAX];
        let mut count = 1;
        while is_continued(&pieces[count - 1]) {
            if count == FRAGS_MAX || count as u32 >= rx.entries() {
                // Too many fragments, or more than the ring has room for, so the end cannot
                // arrive.
                return self.drop_packet(&pieces[..count], locked);
            }
            let Some(desc) = rx.pop() else {
                // The kernel produces whole packets; if it does not, the remaining fragments are
                // still to come.
                rx.cancel(count as u32);
                return Linearized::Deferred;
            };
            pieces[count] = desc;
            count += 1;
        }
        let pieces = &pieces[..count];
        let len = pieces.iter().map(|piece| piece.len as usize).fold(0, usize::saturating_add);
        let odd = pieces.iter().any(|piece| piece.options & !libc::XDP_PKT_CONTD != 0);
        let Some(memory) = self.memory.as_ref().filter(|_| count > 1 && len <= PACKET_LEN_MAX && !odd) else {
            return self.drop_packet(pieces, locked);
        };
        if len > BUFFER_SIZE - self.used {
            rx.cancel(count as u32);
            return Linearized::Deferred;
        }
        let start = memory.as_ptr().wrapping_add(self.used);
        let (before, mut to) = (self.copies.len(), start);
        for piece in pieces {
            // `hold` counts invalid fragments.
            if let Some(from) = locked.hold(member, piece) {
                self.copies.push(PendingCopy { src: from, dst: to });
                to = to.wrapping_add(from.len as usize);
            }
        }
        if self.copies.len() - before < count {
            for part in self.copies.drain(before..) {
                locked.release_held(member, part.src.frame);
            }
            locked.refill();
            return Linearized::Discarded;
        }
        self.used += len.next_multiple_of(ALIGN);
        Linearized::Packet(Packet {
            start,
            frame: NO_FRAME,
            len: len as u32,
            payload_offset: 0,
            payload_len: len as u32,
        })
    }

    /// Drops a packet of which these fragments have arrived.
    fn drop_packet(&mut self, pieces: &[xdp_desc], locked: &mut AllocatorGuard<'_>) -> Linearized {
        self.is_skipping = pieces.last().is_some_and(is_continued);
        locked.count_invalid();
        for piece in pieces {
            locked.discard(piece);
        }
        Linearized::Discarded
    }

    /// Copies the fragments of the batch, and frees their frames.
    #[cold]
    pub(super) fn finish(&mut self, member: MemberId, allocator: &FrameAllocator) {
        for PendingCopy { src: from, dst: to } in &self.copies {
            // SAFETY: a fragment is initialised memory of a frame that this batch holds (see
            // `Packet`), and `to` is in the buffer, where `linearize` has reserved room for all
            // fragments in sequence. Both are ours alone: no slice is borrowed while `self` is
            // borrowed mutably, and frames and buffer are two mappings.
            unsafe { to.copy_from_nonoverlapping(from.start.cast_const(), from.len as usize) };
        }
        let mut locked = allocator.lock();
        for part in self.copies.drain(..) {
            locked.release_held(member, part.src.frame);
        }
        locked.refill();
    }
}

/// True if the packet continues in the next descriptor.
#[inline]
fn is_continued(desc: &xdp_desc) -> bool {
    desc.options & libc::XDP_PKT_CONTD != 0
}
