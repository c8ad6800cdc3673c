//! A queue of a device: its rings, its batch, and its access to the allocator.
//!
//! Everything a queue does except system calls is here and in the allocator; tests replace the
//! kernel by another [`RingWakeup`].

use std::cell::Cell;
use std::io;
use std::sync::Arc;

use libc::xdp_desc;

use super::allocator::FrameAllocator;
use super::frames::{FrameCounts, Packet};
use super::linearize::{Linearized, Linearizer};
use super::options::QueueOptions;
use super::ring::Consumer;
use super::send::{PacketsMut, Payloads, Sender};
use super::socket::{Maps, MemberRings, Socket};
use super::tx_queue::TxQueue;
use super::wakeup::RingWakeup;
use crate::padded::PaddedSlice;

/// Receives that an idle member may skip before it makes a full pass.
const IDLE_SKIPS_MAX: u32 = 64;

/// One queue of a device, with its frames; see the [module](super).
///
/// One thread owns it at a time. The descriptor (`AsFd`) is readable while packets are pending.
///
/// Several can be members of one device queue ([`join`](Self::join)), each on a thread of its own.
/// A member that is dropped sends what it has queued, and returns everything else to the others.
/// The kernel does not know of that, so remove the socket from every XSKMAP first, and wait until
/// no packet is in flight to it: a packet that arrives after the drop has begun is lost together
/// with its frame, which stays in [`FrameCounts::filling`] until the last member is gone. A
/// duplicate of the descriptor keeps the socket open. With zero copy, frames that the device had
/// not taken stay in [`FrameCounts::sending`] until it has sent them.
///
/// A receive that finds nothing reads only the first cache line and the counter of the ring,
/// because a lane has many queues, most of which are empty when it wakes up.
#[repr(C, align(64))]
pub struct Queue<W: RingWakeup = Socket> {
    rx: Consumer<xdp_desc>,
    /// Receives left that need to check only the RX ring: the last full pass found it empty, no
    /// frame missing and no completion pending.
    idle_skips: u32,
    /// The payloads of the batch were found.
    has_payloads: bool,
    /// See [`Payloads`].
    headers_written: Cell<usize>,
    /// The packets taken from the RX ring, the first `taken`: those of batches that have ended, the
    /// batch from `begin` to `end`, and those ahead of it, whose ring entries are not released.
    packets: PaddedSlice<Packet>,
    begin: usize,
    end: usize,
    taken: usize,
    linearizer: Linearizer,
    // Dropped in this order: the descriptor, the maps of the rings, with which the socket closes,
    // then the allocator, if there is no other member. (The kernel has all the memory pinned, so
    // the order is only for tidiness.)
    pub(super) wakeup: W,
    _maps: Option<Maps>,
    pub(super) tx_queue: TxQueue,
}

const _: () = assert!(std::mem::offset_of!(Queue, has_payloads) < 64);

impl<W: RingWakeup> Queue<W> {
    /// A new member of an allocator; the options were checked. None if it has too many.
    pub(super) fn new(
        allocator: Arc<FrameAllocator>,
        rings: MemberRings,
        wakeup: W,
        options: &QueueOptions,
        linearizer: Linearizer,
        checksums: bool,
    ) -> Option<Self> {
        let MemberRings { rx, tx, maps } = rings;
        let member = allocator.lock().insert_member(rx.entries())?;
        Some(Self {
            rx,
            idle_skips: 0,
            has_payloads: true,
            headers_written: Cell::new(0),
            packets: PaddedSlice::new(Packet::NONE, options.batch),
            begin: 0,
            end: 0,
            taken: 0,
            linearizer,
            wakeup,
            _maps: maps,
            tx_queue: TxQueue::new(allocator, member, tx, options.batch, checksums),
        })
    }

    /// Begins a batch of up to `frames_max` packets (and up to [`QueueOptions::batch`]), and
    /// returns their number.
    ///
    /// Ends the previous batch: its frames are free, being sent, or will be. Takes up to
    /// [`QueueOptions::batch`] packets from the RX ring at once. A receive that asks for fewer gets
    /// the others next, without a pass over the rings. Until then, they count as pending, and the
    /// descriptor stays readable.
    #[inline]
    pub fn receive(&mut self, frames_max: usize) -> usize {
        if self.is_idle() {
            return 0;
        }
        // Not read before the next `split`, which finds payloads first.
        self.has_payloads = false;
        self.headers_written.set(0);
        let mut wanted = frames_max.min(self.packets.len());
        if self.ahead() < wanted.max(1) {
            wanted = self.pass(wanted);
        }
        self.begin = self.end;
        self.end += wanted.min(self.ahead());
        self.rx.release_all_but(self.ahead() as u32);
        self.end - self.begin
    }

    /// Packets that were taken from the RX ring and are in no batch yet.
    #[inline]
    fn ahead(&self) -> usize {
        self.taken - self.end
    }

    /// Returns the frames of all batches that have ended. Reclaims sent frames, gives the kernel
    /// frames to receive into, and takes packets from the RX ring: whole ones of one frame as far
    /// as there is room for them, others only if they are among the next `wanted`. Returns
    /// `wanted` without those of them that were dropped.
    #[inline]
    fn pass(&mut self, mut wanted: usize) -> usize {
        let wakeup = &self.wakeup;
        let TxQueue { allocator, member, cache, .. } = &mut self.tx_queue;
        let (allocator, member) = (Arc::as_ref(allocator), *member);
        let mut locked = allocator.lock();
        // Reclaim first: most of the sent frames belong to this batch, and return to the kernel
        // with the others.
        locked.reap();
        locked.end_batch(member, &self.packets[..self.end]);
        // Fewer than `wanted`.
        self.packets.copy_within(self.end..self.taken, 0);
        self.taken -= self.end;
        (self.begin, self.end) = (0, 0);
        self.linearizer.clear();
        locked.refill();
        let wake = wakeup.is_zero_copy() && locked.needs_wakeup() == Some(true)
            || wakeup.is_busy_polling() && self.rx.is_empty();
        if wake {
            drop(locked);
            wakeup.receive();
            locked = allocator.lock();
        }
        let mut budget = wanted.saturating_sub(self.taken);
        while budget > 0 {
            if !self.linearizer.is_skipping() {
                let held = locked.hold_batch(member, &mut self.rx, &mut self.packets[self.taken..]);
                self.taken += held;
                budget = budget.saturating_sub(held);
                if budget == 0 {
                    break;
                }
            }
            budget -= 1;
            let Some(desc) = self.rx.pop() else { break };
            let packet = if desc.options == 0 && !self.linearizer.is_skipping() {
                locked.hold(member, &desc)
            } else {
                match self.linearizer.linearize(member, desc, &mut self.rx, &mut locked) {
                    Linearized::Packet(packet) => Some(packet),
                    Linearized::Discarded => None,
                    Linearized::Deferred => break,
                }
            };
            if let Some(packet) = packet {
                self.packets[self.taken] = packet;
                self.taken += 1;
            } else {
                wanted -= 1;
            }
        }
        locked.refill_cache(member, cache, self.packets.len());
        // A kernel that works only when notified is notified each time.
        let is_asked = wakeup.is_zero_copy() || wakeup.is_busy_polling();
        let is_quiet = self.taken == 0 && !is_asked && locked.is_idle(member, cache);
        drop(locked);
        self.idle_skips = if is_quiet { IDLE_SKIPS_MAX } else { 0 };
        if self.linearizer.has_copies() {
            self.linearizer.finish(member, allocator);
        }
        wanted
    }

    /// True if [`receive`](Self::receive) can be skipped: the RX ring is empty and nothing else is
    /// to be done. Reads one cache line of ours and the counter of the ring. Returns false now and
    /// then to force a full pass.
    #[inline]
    #[must_use]
    pub fn is_idle(&mut self) -> bool {
        let is_idle = self.idle_skips > 0 && self.rx.is_empty();
        self.idle_skips -= u32::from(is_idle);
        is_idle
    }

    /// The kernel's mode has changed: the next receive makes a full pass.
    pub(super) fn reset_idle(&mut self) {
        self.idle_skips = 0;
    }

    /// True if packets are pending.
    #[inline]
    #[must_use]
    pub fn has_received(&self) -> bool {
        self.ahead() > 0 || !self.rx.is_empty()
    }

    /// Pending entries of the RX ring (packets, or parts of one), and the size of the ring.
    #[must_use]
    pub fn backlog(&self) -> (u32, u32) {
        (self.rx.pending() + self.ahead() as u32, self.rx.entries())
    }

    /// Entries that were in the RX ring when it was last read, and are in no batch yet. Does not
    /// read the ring, whose counter another core writes.
    #[inline]
    #[must_use]
    pub fn cached_backlog(&self) -> u32 {
        self.rx.cached_pending() + self.ahead() as u32
    }

    /// True with zero copy.
    #[must_use]
    pub fn is_zero_copy(&self) -> bool {
        self.wakeup.is_zero_copy()
    }

    #[cfg(test)]
    pub(super) fn has_idle_skips(&self) -> bool {
        self.idle_skips > 0
    }

    /// Calls [`Sender::flush`] if the kernel has not taken all that was submitted, and returns as
    /// that does; otherwise it costs only a check of our side of the ring.
    ///
    /// # Errors
    /// As for [`Sender::flush`].
    #[inline]
    pub fn flush_pending(&mut self) -> io::Result<usize> {
        // An idle member has nothing to send; that is known without reading the cache lines of its
        // TX ring.
        if self.idle_skips > 0 || !self.tx_queue.tx.has_unconsumed() {
            return Ok(0);
        }
        // Sent frames will have to be reclaimed.
        self.idle_skips = 0;
        self.tx_queue.flush(&self.wakeup)
    }

    /// The whole packet `i` of the batch.
    ///
    /// # Panics
    /// If the batch has no such packet.
    #[inline]
    #[must_use]
    pub fn packet(&self, i: usize) -> &[u8] {
        let Packet { start, len, .. } = self.packets[self.begin..self.end][i];
        // SAFETY: the packet is in initialised memory that belongs to the batch alone as long as
        // `self` is borrowed (see `Packet`); mutable slices of it borrow `self` mutably.
        unsafe { std::slice::from_raw_parts(start.cast_const(), len as usize) }
    }

    /// Lets `edit` overwrite every packet of the batch, in order.
    pub fn edit_packets(&mut self, mut edit: impl FnMut(&mut [u8])) {
        for packet in &self.packets[self.begin..self.end] {
            // SAFETY: as in `packet`; `self` is borrowed mutably, so there is no other slice of
            // it.
            edit(unsafe { std::slice::from_raw_parts_mut(packet.start, packet.len as usize) });
        }
    }

    /// Calls `find` with the number and the bytes of every packet of the batch, in order. `find`
    /// returns the offset and the length of the payload. The bytes before it are the header; those
    /// behind it are not used. If `find` returns none, and before this call, the payload is the
    /// whole packet.
    ///
    /// # Panics
    /// If the returned range is not within the packet.
    #[inline]
    pub fn find_payloads(&mut self, mut find: impl FnMut(usize, &[u8]) -> Option<(usize, usize)>) {
        for (i, packet) in self.packets[self.begin..self.end].iter_mut().enumerate() {
            // SAFETY: as in `packet`.
            let bytes = unsafe { std::slice::from_raw_parts(packet.start.cast_const(), packet.len as usize) };
            let (at, len) = find(i, bytes).unwrap_or((0, bytes.len()));
            if at.checked_add(len).is_none_or(|end| end > bytes.len()) {
                payload_out_of_range(bytes.len(), at, len);
            }
            (packet.payload_offset, packet.payload_len) = (at as u32, len as u32);
        }
        self.has_payloads = true;
    }

    /// The payloads of the batch, and the send side. The payloads may be read while replies to
    /// them are written and sent.
    #[inline]
    pub fn split(&mut self) -> (Payloads<'_>, Sender<'_>) {
        // Sent frames will have to be reclaimed.
        self.idle_skips = 0;
        if !self.has_payloads {
            self.find_payloads(|_, _| None);
        }
        let payloads = Payloads::new(&self.packets[self.begin..self.end], &self.headers_written);
        (payloads, Sender::new(payloads, &mut self.tx_queue, &self.wakeup))
    }

    /// The packets of the batch, to be changed, and a send side that does not send them in place.
    #[inline]
    pub fn split_mut(&mut self) -> (PacketsMut<'_>, Sender<'_>) {
        // Sent frames will have to be reclaimed.
        self.idle_skips = 0;
        let none = Payloads::new(&[], &self.headers_written);
        let packets = PacketsMut::new(&self.packets[self.begin..self.end]);
        (packets, Sender::new(none, &mut self.tx_queue, &self.wakeup))
    }

    /// Numbers of frames by state.
    pub(super) fn frame_counts(&self) -> FrameCounts {
        self.tx_queue.allocator.frame_counts()
    }

    /// Sets the payload of one packet.
    #[cfg(test)]
    pub(super) fn set_payload(&mut self, i: usize, at: usize, len: usize) {
        assert!(i < self.end - self.begin);
        if !self.has_payloads {
            self.find_payloads(|_, _| None);
        }
        let found = |packet: &Packet| (packet.payload_offset as usize, packet.payload_len as usize);
        let mut all: Vec<_> = self.packets[self.begin..self.end].iter().map(found).collect();
        all[i] = (at, len);
        self.find_payloads(|i, _| Some(all[i]));
    }

    /// Maximum packets of a batch.
    #[cfg(test)]
    pub(super) fn batch_max(&self) -> usize {
        self.packets.len()
    }

    /// Frames of the packets that are in no batch yet.
    #[cfg(test)]
    pub(super) fn frames_ahead(&self) -> impl Iterator<Item = u32> {
        self.packets[self.end..self.taken].iter().map(|packet| packet.frame)
    }

    /// Unused credits of this member, for tests.
    #[cfg(test)]
    pub(super) fn cache(&self) -> (super::frames::MemberId, &super::allocator::FrameCache) {
        (self.tx_queue.member, &self.tx_queue.cache)
    }
}

impl<W: RingWakeup> Drop for Queue<W> {
    fn drop(&mut self) {
        // Queued packets are sent if possible; the others are reclaimed.
        let _ = self.tx_queue.flush(&self.wakeup);
        let TxQueue { allocator, member, tx, .. } = &mut self.tx_queue;
        allocator.lock().remove_member(*member, &mut self.rx, tx, !self.wakeup.is_zero_copy());
    }
}

/// Not inlined, so that the loop that calls it keeps its values in registers.
#[cold]
#[inline(never)]
fn payload_out_of_range(bytes: usize, at: usize, len: usize) -> ! {
    panic!("a packet of {bytes} bytes has no {len} bytes at {at}")
}
