//! The frames of a queue: the memory itself, and who has which.
//!
//! A frame is in exactly one [`Place`]. Every step a frame takes goes through a function here that checks where it
//! comes from; an address from the kernel that names a frame which the kernel does not have is refused. That is
//! what the slices handed out elsewhere rely on: no frame is ever in two hands.

use libc::xdp_desc;

use super::Census;
use crate::map::Mapping;

/// Who has a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Place {
    /// Nobody: it is on the free list.
    Free,
    /// The kernel, to receive into: in the fill ring, in the receive ring, or in between.
    Filling,
    /// The current batch.
    Held,
    /// The current batch; the kernel has it too, to send from.
    HeldSending,
    /// The current batch; the kernel had it and is done.
    HeldDone,
    /// Whoever has the [`Fresh`](super::Fresh).
    Taken,
    /// The kernel, to send from: in the send ring, in the completion ring, or in between.
    Sending,
}

/// A received packet of the current batch. While it is there, its frame is in one of the three held places;
/// `addr..addr + len` lies within that frame, and `at + payload <= len`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packet {
    /// Where it starts in the memory of all frames.
    pub(super) addr: u64,
    pub(super) len: u32,
    /// Where its payload starts, counted from `addr`.
    pub(super) at: u32,
    /// Bytes of payload.
    pub(super) payload: u32,
}

/// The memory of all frames, and their places.
pub(super) struct Frames {
    memory: Mapping,
    shift: u32,
    places: Box<[Place]>,
    free: Vec<u32>,
    filling: u32,
    held: u32,
    taken: u32,
    sending: u32,
    /// What the kernel said and cannot be.
    invalid: u64,
    /// Frames that are not for receiving: so many may be taken or be on their way out.
    outgoing: u32,
}

impl Frames {
    /// All of them free. `memory` has room for `count` frames of `size` bytes, a power of two; `receiving` of them
    /// are kept for receiving.
    pub(super) fn new(memory: Mapping, count: u32, size: u32, receiving: u32) -> Self {
        assert!(size.is_power_of_two() && memory.len() as u64 >= u64::from(count) * u64::from(size));
        Self {
            memory,
            shift: size.trailing_zeros(),
            places: vec![Place::Free; count as usize].into_boxed_slice(),
            // The frame given back last is taken first: it is still in the cache.
            free: (0..count).rev().collect(),
            filling: 0,
            held: 0,
            taken: 0,
            sending: 0,
            invalid: 0,
            outgoing: count.saturating_sub(receiving),
        }
    }

    /// Start of the memory of all frames; it is as long as all frames, and stays where it is.
    pub(super) fn base(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    pub(super) fn size(&self) -> usize {
        1 << self.shift
    }

    /// Address of a frame, as the rings have it.
    pub(super) fn addr(&self, frame: u32) -> u64 {
        u64::from(frame) << self.shift
    }

    /// The frame that an address lies in, if there is one.
    fn frame_of(&self, addr: u64) -> Option<u32> {
        let frame = addr >> self.shift;
        (frame < self.places.len() as u64).then_some(frame as u32)
    }

    pub(super) fn census(&self) -> Census {
        Census {
            free: self.free.len() as u32,
            filling: self.filling,
            held: self.held,
            taken: self.taken,
            sending: self.sending,
            invalid: self.invalid,
        }
    }

    /// Whether one more frame may leave the receiving side: otherwise what is being sent could use up what the
    /// kernel needs to receive into.
    pub(super) fn may_send(&self) -> bool {
        self.taken + self.sending < self.outgoing
    }

    fn release(&mut self, frame: u32) {
        self.places[frame as usize] = Place::Free;
        self.free.push(frame);
    }

    /// Frames that the kernel has to receive into.
    pub(super) fn filling(&self) -> u32 {
        self.filling
    }

    /// Free to filling: the address to put into the fill ring.
    pub(super) fn fill(&mut self) -> Option<u64> {
        let frame = self.free.pop()?;
        self.places[frame as usize] = Place::Filling;
        self.filling += 1;
        Some(self.addr(frame))
    }

    /// Filling to free, for an address that did not get into the fill ring after all.
    pub(super) fn unfill(&mut self, addr: u64) {
        if let Some(frame) =
            self.frame_of(addr).filter(|&frame| self.places[frame as usize] == Place::Filling)
        {
            self.filling -= 1;
            self.release(frame);
        }
    }

    /// Filling to held: what the kernel says it has received. None, and counted, if that cannot be; the frame goes
    /// back to the free list if it was the kernel's.
    #[inline]
    pub(super) fn hold(&mut self, desc: xdp_desc) -> Option<Packet> {
        let frame = self.frame_of(desc.addr).filter(|&frame| self.places[frame as usize] == Place::Filling);
        let Some(frame) = frame else {
            self.invalid += 1;
            return None;
        };
        self.filling -= 1;
        let start = desc.addr - self.addr(frame);
        // A packet in several frames was not asked for, so an option set is no less wrong than a length.
        if start + u64::from(desc.len) > self.size() as u64 || desc.options != 0 {
            self.invalid += 1;
            self.release(frame);
            return None;
        }
        self.places[frame as usize] = Place::Held;
        self.held += 1;
        Some(Packet { addr: desc.addr, len: desc.len, at: 0, payload: desc.len })
    }

    /// Held to free, or to sending if it is still on its way out.
    #[inline]
    pub(super) fn end_hold(&mut self, packet: &Packet) {
        let Some(frame) = self.frame_of(packet.addr) else { return };
        match self.places[frame as usize] {
            Place::Held | Place::HeldDone => {
                self.held -= 1;
                self.release(frame);
            }
            // Counted as sending since it was put into the ring.
            Place::HeldSending => self.places[frame as usize] = Place::Sending,
            Place::Free | Place::Filling | Place::Taken | Place::Sending => {}
        }
    }

    /// Whether the packet of the current batch was sent.
    pub(super) fn is_sent(&self, packet: &Packet) -> bool {
        let place = self.frame_of(packet.addr).map(|frame| self.places[frame as usize]);
        place != Some(Place::Held)
    }

    /// Held to held and sending: call it when the descriptor is in the ring.
    pub(super) fn send_held(&mut self, packet: &Packet) {
        if let Some(frame) = self.frame_of(packet.addr).filter(|_| !self.is_sent(packet)) {
            self.places[frame as usize] = Place::HeldSending;
            self.held -= 1;
            self.sending += 1;
        }
    }

    /// Free to taken.
    pub(super) fn take(&mut self) -> Option<u32> {
        let frame = self.free.pop()?;
        self.places[frame as usize] = Place::Taken;
        self.taken += 1;
        Some(frame)
    }

    /// Whether the frame is taken.
    pub(super) fn is_taken(&self, frame: u32) -> bool {
        self.places.get(frame as usize) == Some(&Place::Taken)
    }

    /// Taken to free.
    pub(super) fn give_back(&mut self, frame: u32) {
        if self.is_taken(frame) {
            self.taken -= 1;
            self.release(frame);
        }
    }

    /// Taken to sending: call it when the descriptor is in the ring.
    pub(super) fn send_taken(&mut self, frame: u32) {
        if self.is_taken(frame) {
            self.taken -= 1;
            self.sending += 1;
            self.places[frame as usize] = Place::Sending;
        }
    }

    /// Sending to free: what the kernel says it has sent. A frame that the current batch holds waits for the end
    /// of the batch, since its payload may be borrowed.
    #[inline]
    pub(super) fn complete(&mut self, addr: u64) {
        let Some(frame) = self.frame_of(addr) else {
            self.invalid += 1;
            return;
        };
        match self.places[frame as usize] {
            Place::Sending => {
                self.sending -= 1;
                self.release(frame);
            }
            Place::HeldSending => {
                self.places[frame as usize] = Place::HeldDone;
                self.sending -= 1;
                self.held += 1;
            }
            Place::Free | Place::Filling | Place::Held | Place::HeldDone | Place::Taken => self.invalid += 1,
        }
    }

    /// The frames in a place, and whether all counts are right.
    #[cfg(test)]
    pub(super) fn audit(&self) -> impl Fn(Place) -> Vec<u32> {
        let all = self.places.clone();
        let of = move |place| (0..all.len() as u32).filter(|&frame| all[frame as usize] == place).collect();
        let count =
            |places: &[Place]| places.iter().map(|&place| Vec::<u32>::len(&of(place)) as u32).sum::<u32>();
        let mut free = self.free.clone();
        free.sort_unstable();
        assert_eq!(free, of(Place::Free), "the free list and the places differ");
        assert_eq!(self.filling, count(&[Place::Filling]));
        assert_eq!(self.held, count(&[Place::Held, Place::HeldDone]));
        assert_eq!(self.taken, count(&[Place::Taken]));
        assert_eq!(self.sending, count(&[Place::Sending, Place::HeldSending]));
        assert_eq!(self.census().total() as usize, self.places.len());
        of
    }
}
