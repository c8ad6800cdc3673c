//! The frames of a queue: the memory, and the state of each frame.
//!
//! A frame has exactly one [`StateWord`], and for each state only one kind of code may change it:
//!
//! | state | owner | may change it |
//! |---|---|---|
//! | free, filling, sending, held and sending, held and sent | the allocator or the kernel | the holder of the lock of the [`FrameAllocator`](super::allocator::FrameAllocator) |
//! | held, cached, allocated | one member | that member, without the lock |
//!
//! (A held frame that was not sent also becomes free under the lock, at the end of the batch, by
//! its member.) So no two threads write one state at a time, and a frame never has two owners; the
//! slices handed out elsewhere rely on that. An address from the kernel of a frame that the kernel
//! does not have is refused, whatever the kernel or another member claims.
//!
//! States are atomics because other threads may read them during a write: completions are checked
//! against all of them. A member that gives a frame to the kernel stores its state with `Release`,
//! and the code that takes the completion loads it with `Acquire`. So the member's accesses to the
//! frame come before those of its next owner, even if the kernel completes a frame that it was
//! never given.

use std::ptr;
use std::sync::atomic::{AtomicU16, Ordering};

use libc::xdp_desc;

use crate::map::Mapping;
use crate::padded::PaddedSlice;

/// Number of a member of a queue, below [`MEMBERS_MAX`].
pub(super) type MemberId = u16;

/// Number of member ids that a state word has room for.
pub(super) const MEMBERS_MAX: usize = 1 << 13;

/// The frame number of a packet that was assembled from several frames.
pub(super) const NO_FRAME: u32 = u32::MAX;

/// State of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum FrameState {
    /// On the free list.
    Free,
    /// With the kernel, to receive into: in the fill ring, in an RX ring, or in between.
    Filling,
    /// In a member's cache, for its next [`TxFrame`](super::TxFrame).
    Cached,
    /// Owned by a [`TxFrame`](super::TxFrame).
    Allocated,
    /// In the current batch of a member.
    Held,
    /// In the current batch of a member; the kernel has sent it.
    HeldSent,
    /// In the current batch of a member; also with the kernel, to send.
    HeldSending,
    /// With the kernel, to send: in a TX ring, in the completion ring, or in between.
    Sending,
}

const FRAME_STATES: [FrameState; 8] = [
    FrameState::Free,
    FrameState::Filling,
    FrameState::Cached,
    FrameState::Allocated,
    FrameState::Held,
    FrameState::HeldSent,
    FrameState::HeldSending,
    FrameState::Sending,
];

/// The bit in which `Held` and `HeldSent` differ, so that one comparison covers both.
const SENT_BIT: u16 = 1;
const _: () = assert!(
    FrameState::Held as u16 | SENT_BIT == FrameState::HeldSent as u16
        && FrameState::Held as u16 & SENT_BIT == 0
);

/// Numbers of frames of a queue by state, over all members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FrameCounts {
    /// On the free list, or in a member's cache.
    pub free: u32,
    /// With the kernel to receive into, or received and still in an RX ring.
    pub filling: u32,
    /// In the current batch of a member and not being sent.
    pub held: u32,
    /// Allocated by [`Sender::alloc`](super::Sender::alloc), and neither sent nor freed yet.
    pub allocated: u32,
    /// With the kernel to send, or sent and not reclaimed yet; includes those of current batches.
    pub sending: u32,
    /// Not frames: invalid entries from the kernel, which named no frame of its own, or too many
    /// bytes of one.
    pub invalid: u64,
}

impl FrameCounts {
    /// The number of all frames: always that with which the queue was opened.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.free + self.filling + self.held + self.allocated + self.sending
    }
}

/// State of a frame, in the lowest three bits, and the member that has it or has sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StateWord(u16);

impl StateWord {
    pub(super) const FREE: Self = Self(FrameState::Free as u16);
    pub(super) const FILLING: Self = Self(FrameState::Filling as u16);

    #[inline]
    pub(super) fn new(kind: FrameState, member: MemberId) -> Self {
        Self(member << 3 | kind as u16)
    }

    #[inline]
    pub(super) fn state(self) -> FrameState {
        FRAME_STATES[usize::from(self.0 & 7)]
    }

    #[inline]
    pub(super) fn member(self) -> MemberId {
        self.0 >> 3
    }
}

/// A received packet of the current batch. `len` bytes from `start` on are initialised and belong
/// to this batch alone. They are within `frame`, which is in one of the three held states while
/// the packet is in the batch, or in the member's buffer for packets of several frames.
/// `payload_offset + payload_len <= len`, once payloads were found.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packet {
    pub(super) start: *mut u8,
    /// Its frame, or [`NO_FRAME`].
    pub(super) frame: u32,
    pub(super) len: u32,
    /// Offset of its payload from `start`.
    pub(super) payload_offset: u32,
    /// Length of the payload.
    pub(super) payload_len: u32,
}

impl Packet {
    /// No packet.
    pub(super) const NONE: Self =
        Self { start: ptr::null_mut(), frame: NO_FRAME, len: 0, payload_offset: 0, payload_len: 0 };
}

// SAFETY: what `start` points at moves with the batch, and the batch with its queue, which one
// thread has at a time.
unsafe impl Send for Packet {}

/// All that a loop over a batch needs of the frames, by value, so that it stays in registers. Only
/// the holder of the allocator's lock may use it.
///
/// It moves frames between filling and the batch of the member that holds the lock. No other
/// thread owns a frame in these states, and the previous owner has changed the state with the lock
/// held, or is this member. So the lock is sufficient ordering, and the loads and stores can be
/// relaxed. The content of a frame goes to the kernel and returns through the rings, with their
/// ordering.
#[derive(Clone, Copy)]
pub(super) struct BatchFrames<'a> {
    base: *mut u8,
    shift: u32,
    states: &'a [AtomicU16],
}

impl BatchFrames<'_> {
    /// Address of the packet in a descriptor of the kernel's, if it is within the frame of its
    /// address and not empty.
    #[inline]
    fn start(self, desc: &xdp_desc) -> Option<*mut u8> {
        // Its first and its last byte are in the same frame.
        let last = desc.addr.wrapping_add(u64::from(desc.len)).wrapping_sub(1);
        let fits = (last ^ desc.addr) >> self.shift == 0;
        fits.then(|| self.base.wrapping_add(desc.addr as usize))
    }

    /// From filling to `to`: sets `packet` to that in a descriptor, which has to be within its
    /// frame. False, with nothing changed, if it is invalid.
    #[inline]
    pub(super) fn accept_desc(self, desc: &xdp_desc, to: StateWord, packet: &mut Packet) -> bool {
        let frame = desc.addr >> self.shift;
        let Some(place) = usize::try_from(frame).ok().and_then(|frame| self.states.get(frame)) else {
            return false;
        };
        let Some(start) = self.start(desc) else { return false };
        if place.load(Ordering::Relaxed) != StateWord::FILLING.0 {
            return false;
        }
        place.store(to.0, Ordering::Relaxed);
        // There are at most 2^32 states. The payload fields are set before they are read.
        (packet.start, packet.frame, packet.len) = (start, frame as u32, desc.len);
        true
    }

    /// To filling, if a member's batch holds the frame and the kernel is not sending it. Returns
    /// its address for the fill ring, which has room for it. None, with nothing changed,
    /// otherwise. `held` is the state of a frame that the batch holds.
    #[inline]
    pub(super) fn refill(self, frame: u32, held: StateWord) -> Option<u64> {
        let place = self.states.get(frame as usize)?;
        if place.load(Ordering::Relaxed) & !SENT_BIT != held.0 {
            return None;
        }
        place.store(StateWord::FILLING.0, Ordering::Relaxed);
        Some(u64::from(frame) << self.shift)
    }
}

/// The memory of all frames, and their states.
pub(super) struct Frames {
    memory: Mapping,
    shift: u32,
    /// Bytes at the beginning of a frame that are reserved for the TX metadata of a packet. Zero
    /// without metadata.
    tx_metadata_len: usize,
    states: PaddedSlice<AtomicU16>,
}

impl Frames {
    /// All frames are free. `memory` has room for `count` frames of `size` bytes, a power of two.
    pub(super) fn new(memory: Mapping, count: u32, size: u32, room: usize) -> Self {
        assert!(size.is_power_of_two() && memory.len() as u64 >= u64::from(count) * u64::from(size));
        assert!(room < size as usize);
        let places = PaddedSlice::from_fn(count as usize, || AtomicU16::new(StateWord::FREE.0));
        Self { memory, shift: size.trailing_zeros(), tx_metadata_len: room, states: places }
    }

    /// Number of frames.
    pub(super) fn count(&self) -> u32 {
        self.states.len() as u32
    }

    /// Start of the memory of all frames, which has their total length and never moves.
    #[inline]
    pub(super) fn base(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    /// Size of a frame.
    #[inline]
    pub(super) fn size(&self) -> usize {
        1 << self.shift
    }

    /// See the field.
    #[inline]
    pub(super) fn tx_metadata_len(&self) -> usize {
        self.tx_metadata_len
    }

    /// Address of a frame, as in the rings.
    #[inline]
    pub(super) fn addr(&self, frame: u32) -> u64 {
        u64::from(frame) << self.shift
    }

    /// Address of a byte in one of the frames, as in the rings.
    #[inline]
    pub(super) fn addr_of(&self, start: *const u8) -> u64 {
        start.addr().wrapping_sub(self.base().addr()) as u64
    }

    /// The frame that contains an address, if there is one.
    #[inline]
    pub(super) fn frame_of(&self, addr: u64) -> Option<u32> {
        let frame = addr >> self.shift;
        (frame < self.states.len() as u64).then_some(frame as u32)
    }

    /// State of a frame; free if there is no such frame, so that it has no owner.
    #[inline]
    pub(super) fn state(&self, frame: u32) -> StateWord {
        self.states
            .get(frame as usize)
            .map_or(StateWord::FREE, |place| StateWord(place.load(Ordering::Acquire)))
    }

    /// Sets the state of a frame. The caller must be the one that may (see the top of this file).
    #[inline]
    pub(super) fn set_state(&self, frame: u32, place: StateWord) {
        if let Some(at) = self.states.get(frame as usize) {
            at.store(place.0, Ordering::Release);
        }
    }

    /// The packet in a descriptor of the kernel's, if it is within `frame` and not empty.
    #[inline]
    pub(super) fn packet(&self, frame: u32, desc: &xdp_desc) -> Option<Packet> {
        let start = self.batch_frames().start(desc)?;
        Some(Packet { start, frame, len: desc.len, payload_offset: 0, payload_len: desc.len })
    }

    /// The frames for a loop of the lock's holder.
    #[inline]
    pub(super) fn batch_frames(&self) -> BatchFrames<'_> {
        BatchFrames { base: self.base(), shift: self.shift, states: &self.states }
    }

    /// Numbers of frames by state, without `invalid`. While other members work, a frame may be
    /// counted in its previous state, but is counted once.
    pub(super) fn frame_counts(&self) -> FrameCounts {
        let mut census = FrameCounts::default();
        for place in self.states.iter() {
            let count = match StateWord(place.load(Ordering::Relaxed)).state() {
                FrameState::Free | FrameState::Cached => &mut census.free,
                FrameState::Filling => &mut census.filling,
                FrameState::Held | FrameState::HeldSent => &mut census.held,
                FrameState::Allocated => &mut census.allocated,
                FrameState::Sending | FrameState::HeldSending => &mut census.sending,
            };
            *count += 1;
        }
        census
    }

    /// The frames in this state, of one member or of all.
    pub(super) fn in_state(
        &self,
        kind: FrameState,
        member: Option<MemberId>,
    ) -> impl Iterator<Item = u32> + '_ {
        (0..self.count()).filter(move |&frame| {
            let place = self.state(frame);
            place.state() == kind && member.is_none_or(|member| place.member() == member)
        })
    }
}
