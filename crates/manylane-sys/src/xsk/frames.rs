//! The frames of a queue: the memory itself, and who has which.
//!
//! A frame is in exactly one [`StateWord`], and each place has one hand that may move the frame on:
//!
//! | place | whose it is | who moves it on |
//! |---|---|---|
//! | free, filling, sending, held and sending, held and done | the allocator's, the kernel's | the holder of the lock of the [`FrameAllocator`](super::allocator::FrameAllocator) |
//! | held, cached, allocated | one member's | that member, without the lock |
//!
//! (A held frame that was not sent also becomes free under the lock, at the end of the batch, by
//! its member.) So no two threads ever write one place at a time, and a frame is never in two
//! hands: what the slices handed out elsewhere rely on. An address from the kernel that names a
//! frame which the kernel does not have is refused, whatever the kernel or another member says.
//!
//! Places are atomics because others may look while one writes: completions are checked against all
//! of them. A member that gives a frame to the kernel stores its place with `Release`, and who
//! takes the completion loads it with `Acquire`: what the member has written and read in the frame
//! comes before what its next owner does there, even if the kernel completes what it was never told
//! of.

use std::ptr;
use std::sync::atomic::{AtomicU16, Ordering};

use libc::xdp_desc;

use super::FrameCounts;
use crate::map::Mapping;

/// Number of a member of a queue; the highest is [`MEMBERS_MAX`] less one.
pub(super) type MemberId = u16;

/// Numbers that a place has room for.
pub(super) const MEMBERS_MAX: usize = 1 << 13;

/// Stands for the frame of a packet that is in none: it was put together from several.
pub(super) const NO_FRAME: u32 = u32::MAX;

/// Where a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum FrameState {
    /// Nobody has it: it is on the free list.
    Free,
    /// The kernel, to receive into: in the fill ring, in a receive ring, or in between.
    Filling,
    /// A member, for its next [`TxFrame`](super::TxFrame).
    Cached,
    /// Whoever has the [`TxFrame`](super::TxFrame).
    Allocated,
    /// The current batch of a member.
    Held,
    /// The current batch of a member; the kernel had it and is done.
    HeldSent,
    /// The current batch of a member; the kernel has it too, to send from.
    HeldSending,
    /// The kernel, to send from: in a send ring, in the completion ring, or in between.
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

/// What tells a frame that a batch holds from one that it held and the kernel has sent: one bit,
/// for one comparison of both.
const SENT_BIT: u16 = 1;
const _: () = assert!(
    FrameState::Held as u16 | SENT_BIT == FrameState::HeldSent as u16
        && FrameState::Held as u16 & SENT_BIT == 0
);

/// Where a frame is, and which member has it or has sent it: the kind in the lowest three bits.
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

/// A received packet of the current batch. `len` bytes from `start` on are initialised and this
/// batch's alone: they lie within `frame`, which is in one of the three held places while the
/// packet is in the batch, or in the buffer of the member for packets of several frames.
/// `at + payload <= len`, once payloads were found.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packet {
    pub(super) start: *mut u8,
    /// The frame that it came in, or [`NO_FRAME`].
    pub(super) frame: u32,
    pub(super) len: u32,
    /// Where its payload starts, counted from `start`.
    pub(super) payload_offset: u32,
    /// Bytes of payload.
    pub(super) payload_len: u32,
}

impl Packet {
    /// No packet.
    pub(super) const NONE: Self =
        Self { start: ptr::null_mut(), frame: NO_FRAME, len: 0, payload_offset: 0, payload_len: 0 };
}

// SAFETY: what `start` points at goes with the batch, and that with its queue, which one thread has
// at a time.
unsafe impl Send for Packet {}

/// All that a loop over a batch needs of the frames, by value, so that it stays in registers: for
/// whoever has the lock of the pool.
///
/// It moves frames between filling and the batch of the member that has the lock. Of those places
/// nobody else has one, and who had it before has moved it with the lock held, or is this member:
/// the lock is order enough, and no load or store has to be. What is in a frame goes to the kernel
/// and comes back by the rings, with their order.
#[derive(Clone, Copy)]
pub(super) struct BatchFrames<'a> {
    base: *mut u8,
    shift: u32,
    states: &'a [AtomicU16],
}

impl BatchFrames<'_> {
    /// Where in the memory the packet is that a descriptor of the kernel's names, if it lies within
    /// the frame that its address is in, and is not empty.
    #[inline]
    fn start(self, desc: &xdp_desc) -> Option<*mut u8> {
        // Its first and its last byte have the same frame.
        let last = desc.addr.wrapping_add(u64::from(desc.len)).wrapping_sub(1);
        let fits = (last ^ desc.addr) >> self.shift == 0;
        fits.then(|| self.base.wrapping_add(desc.addr as usize))
    }

    /// Filling to `to`: makes `packet` the one that a descriptor names, and that lies within its
    /// frame. False, and nothing is moved or written, if that cannot be.
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
        // No more places than numbers of 32 bits. Where its payload is nobody asks before it was
        // looked for.
        (packet.start, packet.frame, packet.len) = (start, frame as u32, desc.len);
        true
    }

    /// To filling, if a member's batch holds it and the kernel does not send it: its address, for
    /// the fill ring, which has room for it. None, and nothing is moved, if not. `held` is the
    /// place of a frame that the batch holds.
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

/// The memory of all frames, and their places.
pub(super) struct Frames {
    memory: Mapping,
    shift: u32,
    /// Bytes at the beginning of a frame that no packet may start in if it is to be sent: what the
    /// kernel is told of the packet goes there. Zero if nothing is told.
    tx_metadata_len: usize,
    states: Box<[AtomicU16]>,
}

impl Frames {
    /// All of them free. `memory` has room for `count` frames of `size` bytes, a power of two.
    pub(super) fn new(memory: Mapping, count: u32, size: u32, room: usize) -> Self {
        assert!(size.is_power_of_two() && memory.len() as u64 >= u64::from(count) * u64::from(size));
        assert!(room < size as usize);
        let places = (0..count).map(|_| AtomicU16::new(StateWord::FREE.0)).collect();
        Self { memory, shift: size.trailing_zeros(), tx_metadata_len: room, states: places }
    }

    /// How many there are.
    pub(super) fn count(&self) -> u32 {
        self.states.len() as u32
    }

    /// Start of the memory of all frames; it is as long as all frames, and stays where it is.
    #[inline]
    pub(super) fn base(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    /// Bytes of one.
    #[inline]
    pub(super) fn size(&self) -> usize {
        1 << self.shift
    }

    /// See the field.
    #[inline]
    pub(super) fn tx_metadata_len(&self) -> usize {
        self.tx_metadata_len
    }

    /// Address of a frame, as the rings have it.
    #[inline]
    pub(super) fn addr(&self, frame: u32) -> u64 {
        u64::from(frame) << self.shift
    }

    /// Address of what is in one of our frames, as the rings have it.
    #[inline]
    pub(super) fn addr_of(&self, start: *const u8) -> u64 {
        start.addr().wrapping_sub(self.base().addr()) as u64
    }

    /// The frame that an address lies in, if there is one.
    #[inline]
    pub(super) fn frame_of(&self, addr: u64) -> Option<u32> {
        let frame = addr >> self.shift;
        (frame < self.states.len() as u64).then_some(frame as u32)
    }

    /// Where a frame is; free if there is no such frame, so that nobody has it.
    #[inline]
    pub(super) fn state(&self, frame: u32) -> StateWord {
        self.states
            .get(frame as usize)
            .map_or(StateWord::FREE, |place| StateWord(place.load(Ordering::Acquire)))
    }

    /// Moves a frame. The caller is the one that may (see the top of this file).
    #[inline]
    pub(super) fn set_state(&self, frame: u32, place: StateWord) {
        if let Some(at) = self.states.get(frame as usize) {
            at.store(place.0, Ordering::Release);
        }
    }

    /// The packet that a descriptor of the kernel's names in `frame`, if it lies within it and is
    /// not empty.
    #[inline]
    pub(super) fn packet(&self, frame: u32, desc: &xdp_desc) -> Option<Packet> {
        let start = self.batch_frames().start(desc)?;
        Some(Packet { start, frame, len: desc.len, payload_offset: 0, payload_len: desc.len })
    }

    /// The frames for a loop of whoever has the lock.
    #[inline]
    pub(super) fn batch_frames(&self) -> BatchFrames<'_> {
        BatchFrames { base: self.base(), shift: self.shift, states: &self.states }
    }

    /// How many frames are where; what is `invalid` is not known here. While other members work,
    /// frames may be counted where they were a moment ago, but each once.
    pub(super) fn frame_counts(&self) -> FrameCounts {
        let mut census = FrameCounts::default();
        for place in &self.states {
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

    /// The frames in a place of this kind, of one member or of all.
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
