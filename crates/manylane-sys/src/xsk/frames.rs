//! The frames of a queue: the memory itself, and who has which.
//!
//! A frame is in exactly one [`Place`], and each place has one hand that may move the frame on:
//!
//! | place | whose it is | who moves it on |
//! |---|---|---|
//! | free, filling, sending, held and sending, held and done | the pool's, the kernel's | whoever has the lock of the [`Pool`](super::pool::Pool) |
//! | held, in supply, taken | one member's | that member, without the lock |
//!
//! (A held frame that was not sent also becomes free under the lock, at the end of the batch, by its member.) So no
//! two threads ever write one place at a time, and a frame is never in two hands: what the slices handed out elsewhere
//! rely on. An address from the kernel that names a frame which the kernel does not have is refused, whatever the
//! kernel or another member says.
//!
//! Places are atomics because others may look while one writes: completions are checked against all of them. A member
//! that gives a frame to the kernel stores its place with `Release`, and who takes the completion loads it with
//! `Acquire`: what the member has written and read in the frame comes before what its next owner does there, even if
//! the kernel completes what it was never told of.

use std::ptr;
use std::sync::atomic::{AtomicU16, Ordering};

use libc::xdp_desc;

use super::Census;
use crate::map::Mapping;

/// Number of a member of a queue; the highest is [`MOST_MEMBERS`] less one.
pub(super) type Member = u16;

/// Numbers that a place has room for.
pub(super) const MOST_MEMBERS: usize = 1 << 13;

/// Stands for the frame of a packet that is in none: it was put together from several.
pub(super) const NO_FRAME: u32 = u32::MAX;

/// Where a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(super) enum Kind {
    /// Nobody has it: it is on the free list.
    Free,
    /// The kernel, to receive into: in the fill ring, in a receive ring, or in between.
    Filling,
    /// A member, for its next [`Fresh`](super::Fresh).
    Supply,
    /// Whoever has the [`Fresh`](super::Fresh).
    Taken,
    /// The current batch of a member.
    Held,
    /// The current batch of a member; the kernel had it and is done.
    HeldDone,
    /// The current batch of a member; the kernel has it too, to send from.
    HeldSending,
    /// The kernel, to send from: in a send ring, in the completion ring, or in between.
    Sending,
}

const KINDS: [Kind; 8] = [
    Kind::Free,
    Kind::Filling,
    Kind::Supply,
    Kind::Taken,
    Kind::Held,
    Kind::HeldDone,
    Kind::HeldSending,
    Kind::Sending,
];

/// What tells a frame that a batch holds from one that it held and the kernel has sent: one bit, for one comparison of both.
const DONE: u16 = 1;
const _: () = assert!(Kind::Held as u16 | DONE == Kind::HeldDone as u16 && Kind::Held as u16 & DONE == 0);

/// Where a frame is, and which member has it or has sent it: the kind in the lowest three bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place(u16);

impl Place {
    pub(super) const FREE: Self = Self(Kind::Free as u16);
    pub(super) const FILLING: Self = Self(Kind::Filling as u16);

    #[inline]
    pub(super) fn of(kind: Kind, member: Member) -> Self {
        Self(member << 3 | kind as u16)
    }

    #[inline]
    pub(super) fn kind(self) -> Kind {
        KINDS[usize::from(self.0 & 7)]
    }

    #[inline]
    pub(super) fn member(self) -> Member {
        self.0 >> 3
    }
}

/// A received packet of the current batch. `len` bytes from `start` on are initialised and this batch's alone: they
/// lie within `frame`, which is in one of the three held places while the packet is in the batch, or in the buffer of
/// the member for packets of several frames. `at + payload <= len`, once payloads were found.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packet {
    pub(super) start: *mut u8,
    /// The frame that it came in, or [`NO_FRAME`].
    pub(super) frame: u32,
    pub(super) len: u32,
    /// Where its payload starts, counted from `start`.
    pub(super) at: u32,
    /// Bytes of payload.
    pub(super) payload: u32,
}

impl Packet {
    /// No packet.
    pub(super) const NONE: Self = Self { start: ptr::null_mut(), frame: NO_FRAME, len: 0, at: 0, payload: 0 };
}

// SAFETY: what `start` points at goes with the batch, and that with its queue, which one thread has at a time.
unsafe impl Send for Packet {}

/// All that a loop over a batch needs of the frames, by value, so that it stays in registers: for whoever has the lock of
/// the pool.
///
/// It moves frames between filling and the batch of the member that has the lock. Of those places nobody else has one, and who
/// had it before has moved it with the lock held, or is this member: the lock is order enough, and no load or store has to be.
/// What is in a frame goes to the kernel and comes back by the rings, with their order.
#[derive(Clone, Copy)]
pub(super) struct Turnover<'a> {
    base: *mut u8,
    shift: u32,
    places: &'a [AtomicU16],
}

impl Turnover<'_> {
    /// Where in the memory the packet is that a descriptor of the kernel's names, if it lies within the frame that its address
    /// is in, and is not empty.
    #[inline]
    fn start(self, desc: &xdp_desc) -> Option<*mut u8> {
        // Its first and its last byte have the same frame.
        let last = desc.addr.wrapping_add(u64::from(desc.len)).wrapping_sub(1);
        let fits = (last ^ desc.addr) >> self.shift == 0;
        fits.then(|| self.base.wrapping_add(desc.addr as usize))
    }

    /// Filling to `to`: makes `packet` the one that a descriptor names, and that lies within its frame. False, and nothing is
    /// moved or written, if that cannot be.
    #[inline]
    pub(super) fn received(self, desc: &xdp_desc, to: Place, packet: &mut Packet) -> bool {
        let frame = desc.addr >> self.shift;
        let Some(place) = usize::try_from(frame).ok().and_then(|frame| self.places.get(frame)) else {
            return false;
        };
        let Some(start) = self.start(desc) else { return false };
        if place.load(Ordering::Relaxed) != Place::FILLING.0 {
            return false;
        }
        place.store(to.0, Ordering::Relaxed);
        // No more places than numbers of 32 bits. Where its payload is nobody asks before it was looked for.
        (packet.start, packet.frame, packet.len) = (start, frame as u32, desc.len);
        true
    }

    /// To filling, if a member's batch holds it and the kernel does not send it: its address, for the fill ring, which has
    /// room for it. None, and nothing is moved, if not. `held` is the place of a frame that the batch holds.
    #[inline]
    pub(super) fn refill(self, frame: u32, held: Place) -> Option<u64> {
        let place = self.places.get(frame as usize)?;
        if place.load(Ordering::Relaxed) & !DONE != held.0 {
            return None;
        }
        place.store(Place::FILLING.0, Ordering::Relaxed);
        Some(u64::from(frame) << self.shift)
    }
}

/// The memory of all frames, and their places.
pub(super) struct Frames {
    memory: Mapping,
    shift: u32,
    /// Bytes at the beginning of a frame that no packet may start in if it is to be sent: what the kernel is told of
    /// the packet goes there. Zero if nothing is told.
    room: usize,
    places: Box<[AtomicU16]>,
}

impl Frames {
    /// All of them free. `memory` has room for `count` frames of `size` bytes, a power of two.
    pub(super) fn new(memory: Mapping, count: u32, size: u32, room: usize) -> Self {
        assert!(size.is_power_of_two() && memory.len() as u64 >= u64::from(count) * u64::from(size));
        assert!(room < size as usize);
        let places = (0..count).map(|_| AtomicU16::new(Place::FREE.0)).collect();
        Self { memory, shift: size.trailing_zeros(), room, places }
    }

    /// How many there are.
    pub(super) fn count(&self) -> u32 {
        self.places.len() as u32
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
    pub(super) fn room(&self) -> usize {
        self.room
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
        (frame < self.places.len() as u64).then_some(frame as u32)
    }

    /// Where a frame is; free if there is no such frame, so that nobody has it.
    #[inline]
    pub(super) fn place(&self, frame: u32) -> Place {
        self.places.get(frame as usize).map_or(Place::FREE, |place| Place(place.load(Ordering::Acquire)))
    }

    /// Moves a frame. The caller is the one that may (see the top of this file).
    #[inline]
    pub(super) fn put(&self, frame: u32, place: Place) {
        if let Some(at) = self.places.get(frame as usize) {
            at.store(place.0, Ordering::Release);
        }
    }

    /// The packet that a descriptor of the kernel's names in `frame`, if it lies within it and is not empty.
    #[inline]
    pub(super) fn packet(&self, frame: u32, desc: &xdp_desc) -> Option<Packet> {
        let start = self.turnover().start(desc)?;
        Some(Packet { start, frame, len: desc.len, at: 0, payload: desc.len })
    }

    /// The frames for a loop of whoever has the lock.
    #[inline]
    pub(super) fn turnover(&self) -> Turnover<'_> {
        Turnover { base: self.base(), shift: self.shift, places: &self.places }
    }

    /// How many frames are where; what is `invalid` is not known here. While other members work, frames may be
    /// counted where they were a moment ago, but each once.
    pub(super) fn census(&self) -> Census {
        let mut census = Census::default();
        for place in &self.places {
            let count = match Place(place.load(Ordering::Relaxed)).kind() {
                Kind::Free | Kind::Supply => &mut census.free,
                Kind::Filling => &mut census.filling,
                Kind::Held | Kind::HeldDone => &mut census.held,
                Kind::Taken => &mut census.taken,
                Kind::Sending | Kind::HeldSending => &mut census.sending,
            };
            *count += 1;
        }
        census
    }

    /// The frames in a place of this kind, of one member or of all.
    pub(super) fn all(&self, kind: Kind, member: Option<Member>) -> impl Iterator<Item = u32> + '_ {
        (0..self.count()).filter(move |&frame| {
            let place = self.place(frame);
            place.kind() == kind && member.is_none_or(|member| place.member() == member)
        })
    }
}
