//! The two views of a batch: its payloads, for reading, and the send side, which rewrites headers
//! in place.
//!
//! Both live for `'a`, a mutable borrow of the queue, so no batch begins or ends and no packet's
//! `payload_offset` changes meanwhile. Why they do not overlap in memory: the payload of a packet
//! is the bytes from `payload_offset` on, and is only read, here and by a device that sends it.
//! [`in_place_header_mut`](Sender::in_place_header_mut) is the bytes before `payload_offset`.
//! Those are also read in the view of payloads, by value ([`PacketRef::header`]), but only until a
//! mutable slice of them could have existed: both views know the last packet of which a mutable
//! slice was handed out, and reads are allowed only behind it. New frames are in no batch: a frame
//! of a batch, of any member, is not free, and so not allocated, before the batch ends; and only
//! the member that has allocated a frame hands out slices of it.

use std::cell::Cell;
use std::io;
use std::slice;

use super::frames::Packet;
use super::tx_queue::TxQueue;
use super::wakeup::RingWakeup;

/// The payloads of the current batch.
#[derive(Clone, Copy)]
pub struct Payloads<'a> {
    packets: &'a [Packet],
    /// Number of the last packet whose header may have been written to, plus one.
    headers_written: &'a Cell<usize>,
}

impl<'a> Payloads<'a> {
    /// The packets of a queue that is mutably borrowed for `'a`.
    pub(super) fn new(packets: &'a [Packet], written: &'a Cell<usize>) -> Self {
        Self { packets, headers_written: written }
    }

    /// The first packet at or after `i` with a header before its payload.
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

    /// The payload of packet `i`.
    #[inline]
    pub(super) fn payload(&self, i: usize) -> &'a [u8] {
        PacketRef { index: i, packet: &self.packets[i], headers_written: self.headers_written }.payload()
    }
}

/// The packets of the current batch, to be changed: beside a [`Sender`] that sends new frames only.
pub struct PacketsMut<'a> {
    packets: &'a [Packet],
}

impl<'a> PacketsMut<'a> {
    /// The packets of a queue that is mutably borrowed for `'a`, and of which no other view is
    /// handed out meanwhile.
    pub(super) fn new(packets: &'a [Packet]) -> Self {
        Self { packets }
    }

    /// Number of packets.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.packets.len()
    }

    /// True if there are none.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// The whole packet `i`.
    #[inline]
    pub fn get_mut(&mut self, i: usize) -> Option<&mut [u8]> {
        let Packet { start, len, .. } = *self.packets.get(i)?;
        // SAFETY: a packet is initialised memory of a frame that the batch holds for `'a` (see
        // `Packet`), and frames of a batch do not overlap. This is the only view of the batch (see
        // `new`), and the slice borrows it mutably.
        Some(unsafe { slice::from_raw_parts_mut(start, len as usize) })
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
    /// Its payload: as set by [`Queue::find_payloads`](super::Queue::find_payloads), or all of it.
    #[inline]
    #[must_use]
    pub fn payload(&self) -> &'a [u8] {
        // SAFETY: a packet is initialised memory, and its payload is within it (see `Packet`). Its
        // frame, or the buffer it is in, stays in the batch for `'a`, so the kernel does not write
        // to it and no member allocates it. There is no mutable slice of this range (see the top
        // of this file).
        unsafe {
            let start = self.packet.start.add(self.packet.payload_offset as usize);
            slice::from_raw_parts(start.cast_const(), self.packet.payload_len as usize)
        }
    }

    /// Its header as received, if that has `N` bytes. None once the header of this packet, or of a
    /// later one, may have been written to ([`Sender::in_place_header_mut`]).
    #[inline]
    #[must_use]
    pub fn header<const N: usize>(&self) -> Option<[u8; N]> {
        if self.packet.payload_offset as usize != N || self.index < self.headers_written.get() {
            return None;
        }
        // SAFETY: a packet is initialised memory, and has `payload_offset` bytes before its
        // payload (see `Packet`). Its frame stays in the batch for `'a`. No mutable slice of these
        // bytes was handed out in this batch (just checked), so none exists, and the copy is made
        // before one can.
        Some(unsafe { self.packet.start.cast::<[u8; N]>().read() })
    }
}

/// A free frame that was allocated to be filled and sent.
///
/// A frame that is dropped, neither sent nor freed, is lost until the queue closes: it stays in
/// [`FrameCounts::allocated`](super::FrameCounts::allocated).
#[derive(Debug)]
#[must_use = "a frame that is neither sent nor given back is lost to the queue"]
pub struct TxFrame {
    pub(super) frame: u32,
}

/// The send side of a queue.
pub struct Sender<'a> {
    payloads: Payloads<'a>,
    tx_queue: &'a mut TxQueue,
    wakeup: &'a dyn RingWakeup,
}

impl<'a> Sender<'a> {
    pub(super) fn new(payloads: Payloads<'a>, out: &'a mut TxQueue, wakeup: &'a dyn RingWakeup) -> Self {
        Self { payloads, tx_queue: out, wakeup }
    }

    /// The header of packet `i` if the packet can be sent in place
    /// ([`send_in_place`](Self::send_in_place)): it was not sent before, and was received in one
    /// frame.
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
        // SAFETY: these bytes belong to a packet that the batch holds for `'a` and that no ring
        // names: it is held and was not sent. No payload includes them, they are no longer read by
        // value (see the top of this file), and the slice borrows `self` mutably.
        Some(unsafe { slice::from_raw_parts_mut(packet.start, packet.payload_offset as usize) })
    }

    /// The header of packet `i` for reading, even after it was sent. None if the batch has no such
    /// packet.
    #[inline]
    #[must_use]
    pub fn header(&self, i: usize) -> Option<&[u8]> {
        let packet = self.payloads.packets.get(i)?;
        // SAFETY: these bytes belong to a frame that the batch holds for `'a`, sent or not. The
        // kernel does not write to frames that it sends from, and we do only through
        // `in_place_header_mut`, which borrows `self` mutably.
        Some(unsafe { slice::from_raw_parts(packet.start.cast_const(), packet.payload_offset as usize) })
    }

    /// The payload of packet `i`: as set by [`Queue::find_payloads`](super::Queue::find_payloads),
    /// or all of it. None if the batch has no such packet.
    #[inline]
    #[must_use]
    pub fn payload(&self, i: usize) -> Option<&'a [u8]> {
        (i < self.payloads.packets.len()).then(|| self.payloads.payload(i))
    }

    /// The bytes that [`send_in_place`](Self::send_in_place) would send: the header of packet `i`
    /// and the first `payload_len` bytes of its payload.
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
        // SAFETY: a packet is within the memory of the frames, which is initialised, and its
        // payload within the packet (see `Packet`). The batch holds its frame for `'a`; after it
        // was sent, the device reads it, and no code writes to it. Header slices, the only mutable
        // ones, borrow `self` mutably.
        unsafe {
            slice::from_raw_parts(packet.start.cast_const(), packet.payload_offset as usize + payload_len)
        }
    }

    /// True if packets with partial checksums may be sent (Linux 6.11, in copy mode): see
    /// [`send_in_place_partial`](Self::send_in_place_partial). Never with zero copy, where only
    /// some drivers support it.
    #[inline]
    #[must_use]
    pub fn has_csum_offload(&self) -> bool {
        self.tx_queue.has_csum_offload
    }

    /// True if packet `i` was put into the TX ring.
    #[cfg(test)]
    pub(super) fn is_sent(&self, i: usize) -> bool {
        use super::frames::FrameState::{HeldSending, HeldSent};
        let state = self.tx_queue.allocator.frames.state(self.payloads.packets[i].frame).state();
        matches!(state, HeldSending | HeldSent)
    }

    /// True if packet `i` was received in several frames. It is then in none.
    #[cfg(test)]
    pub(super) fn is_multi_buffer(&self, i: usize) -> bool {
        self.payloads.packets[i].frame == super::frames::NO_FRAME
    }

    /// Queues packet `i`: its header and the first `payload_len` bytes of its payload. False, with
    /// nothing queued, if it was sent before, would be empty, was received in several frames, or
    /// if there is no room to send.
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

    /// As [`send_in_place`](Self::send_in_place), for a packet whose checksum the device, or the
    /// kernel in its place, completes. It covers all bytes from byte `csum_start` of the packet
    /// on, and is written `csum_offset` bytes behind that one, where the sum of the pseudo header
    /// has to be. Also false if that is not supported
    /// ([`has_csum_offload`](Self::has_csum_offload)) or not within the packet.
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

    /// The same send side, for a while.
    #[inline]
    pub fn reborrow(&mut self) -> Sender<'_> {
        Sender { payloads: self.payloads, tx_queue: self.tx_queue, wakeup: self.wakeup }
    }

    /// True if the TX ring has room for a packet.
    #[inline]
    #[must_use]
    pub fn has_room(&mut self) -> bool {
        self.tx_queue.tx.has_room()
    }

    /// Allocates a free frame; none if all frames for sending are in use.
    #[inline]
    pub fn alloc(&mut self) -> Option<TxFrame> {
        let frame = self.tx_queue.alloc()?;
        Some(TxFrame { frame })
    }

    /// The usable bytes of an allocated frame: all, except a few at its beginning if there is TX
    /// metadata.
    ///
    /// # Panics
    /// If the frame was allocated from another queue, or by another member (where that is
    /// detectable).
    #[inline]
    pub fn frame_mut(&mut self, fresh: &mut TxFrame) -> &mut [u8] {
        assert!(self.tx_queue.is_allocated(fresh.frame), "a frame of another queue");
        let (addr, len) = self.tx_queue.tx_area(fresh.frame);
        // SAFETY: an allocated frame is within the memory of all frames, in no ring and no batch,
        // and belongs to this member alone (just checked). The slice borrows `self` mutably, so
        // there is no second one of the same frame.
        unsafe {
            let start = self.tx_queue.allocator.frames.base().add(addr as usize);
            slice::from_raw_parts_mut(start, len)
        }
    }

    /// As [`frame_mut`](Self::frame_mut), for as long as the queue is borrowed.
    ///
    /// # Panics
    /// As there.
    #[inline]
    pub fn into_frame_mut(self, fresh: &mut TxFrame) -> &'a mut [u8] {
        assert!(self.tx_queue.is_allocated(fresh.frame), "a frame of another queue");
        let (addr, len) = self.tx_queue.tx_area(fresh.frame);
        // SAFETY: as in `frame_mut`. The slice lives as long as the mutable borrow of the queue,
        // which this send side was; a reborrowed one is not used before the slice is gone.
        unsafe {
            let start = self.tx_queue.allocator.frames.base().add(addr as usize);
            slice::from_raw_parts_mut(start, len)
        }
    }

    /// Queues the first `len` bytes of an allocated frame.
    ///
    /// # Errors
    /// The frame, if the TX ring is full or `len` is zero or more than the frame has room for.
    #[inline]
    pub fn send_frame(&mut self, fresh: TxFrame, len: usize) -> Result<(), TxFrame> {
        if self.tx_queue.send_allocated(fresh.frame, len, None) { Ok(()) } else { Err(fresh) }
    }

    /// As [`send_frame`](Self::send_frame), with a partial checksum: see
    /// [`send_in_place_partial`](Self::send_in_place_partial).
    ///
    /// # Errors
    /// The frame, in the same cases, and if checksums are not supported or this one is not within
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

    /// Frees an allocated frame that is not to be sent.
    #[expect(clippy::needless_pass_by_value, reason = "a returned frame has no owner")]
    pub fn free(&mut self, fresh: TxFrame) {
        self.tx_queue.free(fresh.frame);
    }

    /// Removes all that was queued since the last flush: it is not sent.
    pub fn abandon(&mut self) {
        self.tx_queue.abandon();
    }

    /// Submits the queued packets to the kernel, and returns how many descriptors it has left for a
    /// later flush. They stay in the ring, in order. With zero copy there are none: the device
    /// takes them by itself.
    ///
    /// In copy mode the packets are sent in this call, until all are sent or the kernel makes no
    /// progress: the device is busy or down, or its buffer or the completion ring is full. If the
    /// device is down, some kernels drop packets and report only that it was busy. They may count
    /// such a packet as not taken until the ring is empty.
    ///
    /// # Errors
    /// Those of `sendto(2)` beyond these states: `ENXIO` if the device is gone.
    #[inline]
    pub fn flush(&mut self) -> io::Result<usize> {
        self.tx_queue.flush(self.wakeup)
    }
}
