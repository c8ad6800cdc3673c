//! The two views of a batch: its payloads, to be read, and the way out, where headers are rewritten
//! in place.
//!
//! Both live as long as `'a`, a mutable borrow of the queue, so that no batch begins or ends and no
//! packet's `at` changes meanwhile. Why they do not meet in memory: of a packet of the batch,
//! payloads are the bytes from `at` on and are only read, here and by a device that sends them;
//! [`header_mut`](Sender::header_mut) is the bytes before `at`. Those are also read in the view of
//! payloads, by value ([`PacketRef::header`]), but not once somebody could write to them: both
//! views know behind which packet nobody has had a slice that could be written to. Fresh frames are
//! in no batch: a frame of a batch, of whichever member, is not free, and so not taken, before the
//! batch ends; and a frame is leased by the member alone that has taken it.

use std::cell::Cell;
use std::io;
use std::slice;

use super::frames::{NO_FRAME, Packet};
use super::tx_queue::TxQueue;
use super::wakeup::RingWakeup;

/// The payloads of the current batch.
#[derive(Clone, Copy)]
pub struct Payloads<'a> {
    packets: &'a [Packet],
    /// Behind the last packet whose header somebody may write to.
    headers_written: &'a Cell<usize>,
}

impl<'a> Payloads<'a> {
    /// Of the packets of a queue that is mutably borrowed for `'a`.
    pub(super) fn new(packets: &'a [Packet], written: &'a Cell<usize>) -> Self {
        Self { packets, headers_written: written }
    }

    /// The first packet from number `i` on that has a header before its payload.
    #[inline]
    #[must_use]
    pub fn next_with_header(&self, mut i: usize) -> Option<PacketRef<'a>> {
        loop {
            let packet = self.packets.get(i)?;
            if packet.payload_offset > 0 {
                return Some(PacketRef { index: i, packet, headers_written: self.headers_written });
            }
            i += 1;
        }
    }

    /// The payload of packet `i`: what [`Queue::find_payloads`](super::Queue::find_payloads) was
    /// told, or all of it.
    ///
    /// # Panics
    /// If the batch has no such packet.
    #[inline]
    #[must_use]
    pub fn payload(&self, i: usize) -> &'a [u8] {
        PacketRef { index: i, packet: &self.packets[i], headers_written: self.headers_written }.payload()
    }
}

/// A packet of the current batch.
#[derive(Clone, Copy)]
pub struct PacketRef<'a> {
    /// Its number in the batch.
    pub index: usize,
    packet: &'a Packet,
    headers_written: &'a Cell<usize>,
}

impl<'a> PacketRef<'a> {
    /// Its payload: what [`Queue::find_payloads`](super::Queue::find_payloads) was told, or all of
    /// it.
    #[inline]
    #[must_use]
    pub fn payload(&self) -> &'a [u8] {
        // SAFETY: a packet is initialised memory, and its payload lies in it (see `Packet`). Its
        // frame, or the buffer it is in, stays in the batch for `'a`, so that the kernel does not
        // write to it and nobody takes it; of this range nobody has a mutable slice (see the top of
        // this file).
        unsafe {
            let start = self.packet.start.add(self.packet.payload_offset as usize);
            slice::from_raw_parts(start.cast_const(), self.packet.payload_len as usize)
        }
    }

    /// Its header, as it was received, if that has `N` bytes. None once the header of this packet,
    /// or of one behind it, may have been written to ([`Sender::header_mut`]).
    #[inline]
    #[must_use]
    pub fn header<const N: usize>(&self) -> Option<[u8; N]> {
        if self.packet.payload_offset as usize != N || self.index < self.headers_written.get() {
            return None;
        }
        // SAFETY: a packet is initialised memory, and has `at` bytes before its payload (see
        // `Packet`). Its frame stays in the batch for `'a`; nobody has had a mutable slice of these
        // bytes in this batch (just checked), so that there is none, and the copy is made before
        // there can be one.
        Some(unsafe { self.packet.start.cast::<[u8; N]>().read() })
    }
}

/// A free frame that was taken to be filled and sent.
///
/// One that is dropped, neither sent nor given back, is lost until the queue closes: it stays in
/// [`FrameCounts::taken`](super::FrameCounts::allocated).
#[derive(Debug)]
#[must_use = "a frame that is neither sent nor given back is lost to the queue"]
pub struct TxFrame {
    pub(super) frame: u32,
}

/// The way out of a queue.
pub struct Sender<'a> {
    payloads: Payloads<'a>,
    tx_queue: &'a mut TxQueue,
    wakeup: &'a dyn RingWakeup,
}

impl<'a> Sender<'a> {
    pub(super) fn new(payloads: Payloads<'a>, out: &'a mut TxQueue, bell: &'a dyn RingWakeup) -> Self {
        Self { payloads, tx_queue: out, wakeup: bell }
    }

    /// The header of packet `i`: the bytes before its payload.
    ///
    /// # Panics
    /// If the batch has no such packet, or it was sent: the device may be reading it.
    #[inline]
    pub fn header_mut(&mut self, i: usize) -> &mut [u8] {
        let packet = &self.payloads.packets[i];
        assert!(!self.tx_queue.is_sent(packet), "packet {i} was sent");
        self.payloads.headers_written.set(self.payloads.headers_written.get().max(i + 1));
        // SAFETY: these bytes are of a packet that the batch holds for `'a` and that no ring names
        // (just checked); no payload has them, nobody reads them by value any more (see the top of
        // this file), and the slice borrows `self` mutably.
        unsafe { slice::from_raw_parts_mut(packet.start, packet.payload_offset as usize) }
    }

    /// The header of packet `i` if the packet can be sent from where it is
    /// ([`send_in_place`](Self::send_in_place)): if it was not sent before, and came in one frame.
    ///
    /// # Panics
    /// If the batch has no such packet.
    #[inline]
    pub fn in_place_header_mut(&mut self, i: usize) -> Option<&mut [u8]> {
        let packet = &self.payloads.packets[i];
        if !self.tx_queue.can_send_in_place(packet) {
            return None;
        }
        self.payloads.headers_written.set(self.payloads.headers_written.get().max(i + 1));
        // SAFETY: as in `header_mut`: held and not sent, so that no ring names it.
        Some(unsafe { slice::from_raw_parts_mut(packet.start, packet.payload_offset as usize) })
    }

    /// The header of packet `i`, to be read, also after it was sent.
    ///
    /// # Panics
    /// If the batch has no such packet.
    #[inline]
    #[must_use]
    pub fn header(&self, i: usize) -> &[u8] {
        let packet = &self.payloads.packets[i];
        // SAFETY: these bytes are of a frame that the batch holds for `'a`, sent or not; the kernel
        // does not write to frames that it sends from, and we only through `header_mut`, which
        // borrows `self` mutably.
        unsafe { slice::from_raw_parts(packet.start.cast_const(), packet.payload_offset as usize) }
    }

    /// The payload of packet `i`, as [`Payloads::payload`].
    ///
    /// # Panics
    /// If the batch has no such packet.
    #[inline]
    #[must_use]
    pub fn payload(&self, i: usize) -> &'a [u8] {
        self.payloads.payload(i)
    }

    /// What [`send_in_place`](Self::send_in_place) would send: the header of packet `i` and the
    /// first `payload_len` bytes of its payload.
    ///
    /// # Panics
    /// If the batch has no such packet, or its payload is shorter.
    #[inline]
    #[must_use]
    pub fn in_place_packet(&self, i: usize, payload_len: usize) -> &[u8] {
        let packet = &self.payloads.packets[i];
        assert!(
            payload_len <= packet.payload_len as usize,
            "packet {i} has no {payload_len} bytes of payload"
        );
        // SAFETY: a packet lies in the memory of the frames, which is initialised, and its payload
        // in the packet (see `Packet`). The batch holds its frame for `'a`; once it was sent, the
        // device reads it, and nobody writes to it. Header slices, which are the only ones that may
        // be written to, borrow `self` mutably.
        unsafe {
            slice::from_raw_parts(packet.start.cast_const(), packet.payload_offset as usize + payload_len)
        }
    }

    /// As [`Queue::has_csum_offload`](super::Queue::has_csum_offload).
    #[inline]
    #[must_use]
    pub fn has_csum_offload(&self) -> bool {
        self.tx_queue.has_csum_offload
    }

    /// Whether packet `i` was put into the send ring.
    ///
    /// # Panics
    /// If the batch has no such packet.
    #[must_use]
    pub fn is_sent(&self, i: usize) -> bool {
        self.tx_queue.is_sent(&self.payloads.packets[i])
    }

    /// Whether packet `i` came in several frames. It then lies in none, and cannot be sent from
    /// where it is: a reply needs a frame of its own.
    ///
    /// # Panics
    /// If the batch has no such packet.
    #[must_use]
    pub fn is_multi_buffer(&self, i: usize) -> bool {
        self.payloads.packets[i].frame == NO_FRAME
    }

    /// Queues packet `i`: its header and the first `payload_len` bytes of its payload. False, and
    /// nothing is queued, if it was sent before, if it would be empty, if it came in several
    /// frames, or if there is no room to send.
    ///
    /// # Panics
    /// If the batch has no such packet, or its payload is shorter.
    #[inline]
    pub fn send_in_place(&mut self, i: usize, payload_len: usize) -> bool {
        let packet = &self.payloads.packets[i];
        assert!(
            payload_len <= packet.payload_len as usize,
            "packet {i} has no {payload_len} bytes of payload"
        );
        self.tx_queue.send_in_place(packet, packet.payload_offset + payload_len as u32, None)
    }

    /// As [`send_in_place`](Self::send_in_place), for a packet whose checksum the device finishes,
    /// or the kernel in its place: that of all bytes from byte `csum_start` of the packet on,
    /// written `csum_offset` bytes behind that one. The sum of the pseudo header has to be there
    /// already. Also false where that is not offered
    /// ([`Queue::has_csum_offload`](super::Queue::has_csum_offload)) or does not lie in the packet.
    ///
    /// # Panics
    /// If the batch has no such packet, or its payload is shorter.
    #[inline]
    pub fn send_in_place_partial(
        &mut self,
        i: usize,
        payload_len: usize,
        csum_start: u16,
        csum_offset: u16,
    ) -> bool {
        let packet = &self.payloads.packets[i];
        assert!(
            payload_len <= packet.payload_len as usize,
            "packet {i} has no {payload_len} bytes of payload"
        );
        self.tx_queue.send_in_place(
            packet,
            packet.payload_offset + payload_len as u32,
            Some((csum_start, csum_offset)),
        )
    }

    /// Takes a free frame; none if all that may be sent from are on their way out.
    #[inline]
    pub fn alloc(&mut self) -> Option<TxFrame> {
        let frame = self.tx_queue.alloc()?;
        Some(TxFrame { frame })
    }

    /// All the room of a frame that was taken: the frame without a few bytes at its beginning where
    /// the kernel is told of checksums.
    ///
    /// # Panics
    /// If the frame was taken from another queue, or by another member (where that shows).
    #[inline]
    pub fn frame_mut(&mut self, fresh: &mut TxFrame) -> &mut [u8] {
        assert!(self.tx_queue.is_allocated(fresh.frame), "a frame of another queue");
        let (addr, len) = self.tx_queue.tx_area(fresh.frame);
        // SAFETY: a taken frame lies in the memory of all frames, in no ring and no batch, and this
        // member alone has it (just checked); the slice borrows `self` mutably, so that there is no
        // second one of the same frame.
        unsafe {
            let start = self.tx_queue.allocator.frames.base().add(addr as usize);
            slice::from_raw_parts_mut(start, len)
        }
    }

    /// Queues the first `len` bytes of a frame that was taken.
    ///
    /// # Errors
    /// The frame, if the send ring is full or `len` is zero or more than the frame has room for.
    #[inline]
    pub fn send_frame(&mut self, fresh: TxFrame, len: usize) -> Result<(), TxFrame> {
        if self.tx_queue.send_allocated(fresh.frame, len, None) { Ok(()) } else { Err(fresh) }
    }

    /// As [`send_frame`](Self::send_frame), with a checksum that is not finished: see
    /// [`send_in_place_partial`](Self::send_in_place_partial).
    ///
    /// # Errors
    /// The frame, in the same cases, and where no checksums are offered or this one does not lie in
    /// the packet.
    #[inline]
    pub fn send_frame_partial(
        &mut self,
        fresh: TxFrame,
        len: usize,
        csum_start: u16,
        csum_offset: u16,
    ) -> Result<(), TxFrame> {
        let checksum = Some((csum_start, csum_offset));
        if self.tx_queue.send_allocated(fresh.frame, len, checksum) { Ok(()) } else { Err(fresh) }
    }

    /// Gives a frame back that was taken and is not to be sent.
    #[expect(clippy::needless_pass_by_value, reason = "whoever gives a frame back has it no longer")]
    pub fn free(&mut self, fresh: TxFrame) {
        self.tx_queue.free(fresh.frame);
    }

    /// Takes back all that was queued since the last flush: it is not sent.
    pub fn abandon(&mut self) {
        self.tx_queue.abandon();
    }

    /// Hands what was queued to the kernel, and returns how many descriptors it has not taken yet.
    /// They stay in the ring, in order, and go with a later flush, if the device does not get to
    /// them by itself, as it does without copying.
    ///
    /// With copying the sending happens in this call, until all is sent or the kernel does not get
    /// on: device busy or down, its buffer or the completion ring full. Some kernels drop what a
    /// device that is down shall send, and say no more than that it was busy; they may count it as
    /// not taken until the ring is empty.
    ///
    /// # Errors
    /// What `sendto(2)` reports beyond these states: `ENXIO` when the device is gone.
    #[inline]
    pub fn flush(&mut self) -> io::Result<usize> {
        self.tx_queue.flush(self.wakeup)
    }
}
