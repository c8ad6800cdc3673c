//! Packets of several frames, put together in a buffer of the member.
//!
//! The kernel cuts a packet that is longer than a frame (Linux 6.6, `XDP_USE_SG`): all descriptors of it but the last
//! say that it goes on. Here they become one packet again, in three steps: with the lock of the pool held, the frames
//! are checked and held, and room is set aside; without it, the bytes are copied; with it again, the frames are free.

use libc::xdp_desc;

use super::frames::{Member, NO_FRAME, Packet};
use super::pool::{Locked, Pool};
use super::ring::Consumer;
use crate::map::Mapping;

/// Bytes of the longest packet that is put together.
pub(super) const LONGEST: usize = 1 << 16;
/// Frames that one packet comes in at most: of 2048 bytes, of which the kernel keeps 256, the longest needs 37.
pub(super) const MOST_PIECES: usize = 64;
/// Bytes of all packets of one batch that are put together. What does not fit comes with the next batch.
const BUFFER: usize = 16 * LONGEST;
/// Where packets begin: so that two of them share no cache line.
const ALIGN: usize = 64;

/// What became of descriptors.
pub(super) enum Next {
    /// A packet; its bytes are there after [`Assembly::finish`].
    Packet(Packet),
    /// Nothing that can be used.
    Nothing,
    /// They wait in the ring: for the rest of the packet, or for room, which the next batch has.
    Later,
}

/// A piece that is to be copied.
struct Part {
    from: Packet,
    to: *mut u8,
}

// SAFETY: as for `Packet`; the buffer goes with the member, too.
unsafe impl Send for Part {}

/// The buffer of a member, and what of it the current batch uses.
pub(super) struct Assembly {
    memory: Option<Mapping>,
    used: usize,
    parts: Vec<Part>,
    /// The rest of a packet that was given up is still to come.
    skipping: bool,
}

impl Assembly {
    /// Puts no packets together; those that come are counted as invalid.
    pub(super) fn none() -> Self {
        Self { memory: None, used: 0, parts: Vec::new(), skipping: false }
    }

    /// With a buffer, for a receive ring of so many entries.
    pub(super) fn new(ring: u32) -> std::io::Result<Self> {
        let memory = Some(Mapping::new(BUFFER)?);
        Ok(Self { memory, parts: Vec::with_capacity(ring as usize), ..Self::none() })
    }

    /// Whether what comes is the rest of a packet that was given up.
    #[inline]
    pub(super) fn is_skipping(&self) -> bool {
        self.skipping
    }

    /// The batch ends: all of the buffer is free.
    #[inline]
    pub(super) fn clear(&mut self) {
        self.used = 0;
    }

    /// Whether there is something to copy.
    #[inline]
    pub(super) fn has_parts(&self) -> bool {
        !self.parts.is_empty()
    }

    /// Takes the rest of the packet that begins with `first`, which was just taken from `rx`.
    #[cold]
    pub(super) fn chain(
        &mut self,
        me: Member,
        first: xdp_desc,
        rx: &mut Consumer<xdp_desc>,
        locked: &mut Locked<'_>,
    ) -> Next {
        if self.skipping {
            self.skipping = goes_on(&first);
            locked.discard(&first);
            return Next::Nothing;
        }
        let mut pieces = [first; MOST_PIECES];
        let mut count = 1;
        while goes_on(&pieces[count - 1]) {
            if count == MOST_PIECES || count as u32 >= rx.entries() {
                // Too many, or more than the ring has room for, so that the end cannot come.
                return self.give_up(&pieces[..count], locked);
            }
            let Some(desc) = rx.take() else {
                // The kernel shows whole packets; should it not, the rest is still to come.
                rx.put_back(count as u32);
                return Next::Later;
            };
            pieces[count] = desc;
            count += 1;
        }
        let pieces = &pieces[..count];
        let len = pieces.iter().map(|piece| piece.len as usize).fold(0, usize::saturating_add);
        let odd = pieces.iter().any(|piece| piece.options & !libc::XDP_PKT_CONTD != 0);
        let Some(memory) = self.memory.as_ref().filter(|_| count > 1 && len <= LONGEST && !odd) else {
            return self.give_up(pieces, locked);
        };
        if len > BUFFER - self.used {
            rx.put_back(count as u32);
            return Next::Later;
        }
        let start = memory.as_ptr().wrapping_add(self.used);
        let (before, mut to) = (self.parts.len(), start);
        for piece in pieces {
            // What cannot be is counted there.
            if let Some(from) = locked.hold(me, piece) {
                self.parts.push(Part { from, to });
                to = to.wrapping_add(from.len as usize);
            }
        }
        if self.parts.len() - before < count {
            for part in self.parts.drain(before..) {
                locked.end_hold(me, part.from.frame);
            }
            locked.refill();
            return Next::Nothing;
        }
        self.used += len.next_multiple_of(ALIGN);
        Next::Packet(Packet { start, frame: NO_FRAME, len: len as u32, at: 0, payload: len as u32 })
    }

    /// Gives up a packet of which these pieces have come.
    fn give_up(&mut self, pieces: &[xdp_desc], locked: &mut Locked<'_>) -> Next {
        self.skipping = pieces.last().is_some_and(goes_on);
        locked.count_invalid();
        for piece in pieces {
            locked.discard(piece);
        }
        Next::Nothing
    }

    /// Copies what the batch has in pieces, and gives their frames back.
    #[cold]
    pub(super) fn finish(&mut self, me: Member, pool: &Pool) {
        for Part { from, to } in &self.parts {
            // SAFETY: a piece is initialised memory of a frame that this batch holds (see `Packet`), and `to` is in
            // the buffer: `chain` has set aside, behind each other, as many bytes as the pieces have. Both are ours
            // alone: no slice is lent while `self` is borrowed mutably, and frames and buffer are two mappings.
            unsafe { to.copy_from_nonoverlapping(from.start.cast_const(), from.len as usize) };
        }
        let mut locked = pool.lock();
        for part in self.parts.drain(..) {
            locked.end_hold(me, part.from.frame);
        }
        locked.refill();
    }
}

/// Whether the packet goes on in the next descriptor.
#[inline]
fn goes_on(desc: &xdp_desc) -> bool {
    desc.options & libc::XDP_PKT_CONTD != 0
}
