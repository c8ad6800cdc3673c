//! Packets of several frames, put together in a buffer of the member.
//!
//! The kernel cuts a packet that is longer than a frame (Linux 6.6, `XDP_USE_SG`): all descriptors
//! of it but the last say that it goes on. Here they become one packet again, in three steps: with
//! the lock of the pool held, the frames are checked and held, and room is set aside; without it,
//! the bytes are copied; with it again, the frames are free.

use libc::xdp_desc;

use super::allocator::{AllocatorGuard, FrameAllocator};
use super::frames::{MemberId, NO_FRAME, Packet};
use super::ring::Consumer;
use crate::map::Mapping;

/// Bytes of the longest packet that is put together.
pub(super) const PACKET_LEN_MAX: usize = 1 << 16;
/// Frames that one packet comes in at most: of 2048 bytes, of which the kernel keeps 256, the
/// longest needs 37.
pub(super) const FRAGS_MAX: usize = 64;
/// Bytes of all packets of one batch that are put together. What does not fit comes with the next
/// batch.
const BUFFER_SIZE: usize = 16 * PACKET_LEN_MAX;
/// Where packets begin: so that two of them share no cache line.
const ALIGN: usize = 64;

/// What became of descriptors.
pub(super) enum Linearized {
    /// A packet; its bytes are there after [`Linearizer::finish`].
    Packet(Packet),
    /// Nothing that can be used.
    Discarded,
    /// They wait in the ring: for the rest of the packet, or for room, which the next batch has.
    Deferred,
}

/// A piece that is to be copied.
struct PendingCopy {
    src: Packet,
    dst: *mut u8,
}

// SAFETY: as for `Packet`; the buffer goes with the member, too.
unsafe impl Send for PendingCopy {}

/// The buffer of a member, and what of it the current batch uses.
pub(super) struct Linearizer {
    memory: Option<Mapping>,
    used: usize,
    copies: Vec<PendingCopy>,
    /// The rest of a packet that was given up is still to come.
    is_skipping: bool,
}

impl Linearizer {
    /// Puts no packets together; those that come are counted as invalid.
    pub(super) fn disabled() -> Self {
        Self { memory: None, used: 0, copies: Vec::new(), is_skipping: false }
    }

    /// With a buffer, for a receive ring of so many entries.
    pub(super) fn new(ring: u32) -> std::io::Result<Self> {
        let memory = Some(Mapping::new(BUFFER_SIZE)?);
        Ok(Self { memory, copies: Vec::with_capacity(ring as usize), ..Self::disabled() })
    }

    /// Whether what comes is the rest of a packet that was given up.
    #[inline]
    pub(super) fn is_skipping(&self) -> bool {
        self.is_skipping
    }

    /// The batch ends: all of the buffer is free.
    #[inline]
    pub(super) fn clear(&mut self) {
        self.used = 0;
    }

    /// Whether there is something to copy.
    #[inline]
    pub(super) fn has_copies(&self) -> bool {
        !self.copies.is_empty()
    }

    /// Takes the rest of the packet that begins with `first`, which was just taken from `rx`.
    #[cold]
    pub(super) fn linearize(
        &mut self,
        me: MemberId,
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
                // Too many, or more than the ring has room for, so that the end cannot come.
                return self.drop_packet(&pieces[..count], locked);
            }
            let Some(desc) = rx.pop() else {
                // The kernel shows whole packets; should it not, the rest is still to come.
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
            // What cannot be is counted there.
            if let Some(from) = locked.hold(me, piece) {
                self.copies.push(PendingCopy { src: from, dst: to });
                to = to.wrapping_add(from.len as usize);
            }
        }
        if self.copies.len() - before < count {
            for part in self.copies.drain(before..) {
                locked.release_held(me, part.src.frame);
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

    /// Gives up a packet of which these pieces have come.
    fn drop_packet(&mut self, pieces: &[xdp_desc], locked: &mut AllocatorGuard<'_>) -> Linearized {
        self.is_skipping = pieces.last().is_some_and(is_continued);
        locked.count_invalid();
        for piece in pieces {
            locked.discard(piece);
        }
        Linearized::Discarded
    }

    /// Copies what the batch has in pieces, and gives their frames back.
    #[cold]
    pub(super) fn finish(&mut self, me: MemberId, pool: &FrameAllocator) {
        for PendingCopy { src: from, dst: to } in &self.copies {
            // SAFETY: a piece is initialised memory of a frame that this batch holds (see
            // `Packet`), and `to` is in the buffer: `linearize` has set aside, behind each other,
            // as many bytes as the pieces have. Both are ours alone: no slice is leased while
            // `self` is borrowed mutably, and frames and buffer are two mappings.
            unsafe { to.copy_from_nonoverlapping(from.start.cast_const(), from.len as usize) };
        }
        let mut locked = pool.lock();
        for part in self.copies.drain(..) {
            locked.release_held(me, part.src.frame);
        }
        locked.refill();
    }
}

/// Whether the packet goes on in the next descriptor.
#[inline]
fn is_continued(desc: &xdp_desc) -> bool {
    desc.options & libc::XDP_PKT_CONTD != 0
}
