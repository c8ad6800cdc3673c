//! A member of a queue without its socket: its two rings, its batch, and its access to the
//! allocator.
//!
//! Everything a queue does except system calls is here and in the allocator, so that tests can
//! replace the kernel.

use std::cell::Cell;
use std::io;
use std::sync::Arc;

use libc::xdp_desc;

use super::allocator::FrameAllocator;
use super::frames::Packet;
use super::linearize::{Linearized, Linearizer};
use super::ring::Consumer;
use super::send::{Payloads, Sender};
use super::socket::MemberRings;
use super::tx_queue::TxQueue;
use super::wakeup::RingWakeup;
use super::{FrameCounts, QueueOptions};

/// Receives that an idle member may skip before it makes a full pass.
const IDLE_SKIPS_MAX: u32 = 64;

/// One member: its rings, and the packets of its current batch.
///
/// [`leave`](Self::leave) ends it; without that its frames are lost to the others.
///
/// A receive that finds nothing reads only the first cache line and the counter of the ring,
/// because a lane has many queues, most of which are empty when it wakes up.
#[repr(C, align(64))]
pub(super) struct QueueMember {
    rx: Consumer<xdp_desc>,
    /// Receives left that need to check only the RX ring: the last full pass found it empty, no
    /// frame missing and no completion pending.
    idle_skips: u32,
    /// The payloads of the batch were found.
    has_payloads: bool,
    /// See [`Payloads`].
    headers_written: Cell<usize>,
    tx_queue: TxQueue,
    /// The packets of a batch; the first `len` are in use.
    batch: Box<[Packet]>,
    len: usize,
    linearizer: Linearizer,
}

const _: () = assert!(std::mem::offset_of!(QueueMember, has_payloads) < 64);

impl QueueMember {
    /// A new member of an allocator; the options were checked. None if it has too many.
    pub(super) fn join(
        pool: Arc<FrameAllocator>,
        rings: MemberRings,
        options: &QueueOptions,
        assembly: Linearizer,
        checksums: bool,
    ) -> Option<Self> {
        let MemberRings { rx, tx } = rings;
        let me = pool.lock().join(rx.entries())?;
        Some(Self {
            rx,
            idle_skips: 0,
            has_payloads: true,
            headers_written: Cell::new(0),
            tx_queue: TxQueue::new(pool, me, tx, options.batch, checksums),
            batch: vec![Packet::NONE; options.batch].into(),
            len: 0,
            linearizer: assembly,
        })
    }

    /// See [`Queue::has_csum_offload`](super::Queue::has_csum_offload).
    pub(super) fn has_csum_offload(&self) -> bool {
        self.tx_queue.has_csum_offload
    }

    /// See [`Queue::receive`](super::Queue::receive).
    #[inline]
    pub(super) fn receive(&mut self, bell: &dyn RingWakeup, most: usize) -> usize {
        if self.is_idle() {
            return 0;
        }
        // Not read before the next `split`, which finds payloads first.
        self.has_payloads = false;
        self.headers_written.set(0);
        let TxQueue { allocator: pool, member: me, cache: purse, .. } = &mut self.tx_queue;
        let (pool, me) = (Arc::as_ref(pool), *me);
        let mut locked = pool.lock();
        // Reclaim first: most of the sent frames belong to this batch, and return to the kernel
        // with the others.
        locked.reap();
        locked.end_batch(me, &self.batch[..self.len]);
        self.len = 0;
        self.linearizer.clear();
        locked.refill();
        let wake = bell.is_zero_copy() && locked.needs_wakeup() == Some(true)
            || bell.is_busy_polling() && self.rx.is_empty();
        if wake {
            drop(locked);
            bell.receive();
            locked = pool.lock();
        }
        let mut budget = most.min(self.batch.len());
        while budget > 0 {
            if !self.linearizer.is_skipping() {
                let room = &mut self.batch[self.len..self.len + budget];
                let held = locked.hold_batch(me, &mut self.rx, room);
                self.len += held;
                budget -= held;
                if budget == 0 {
                    break;
                }
            }
            budget -= 1;
            let Some(desc) = self.rx.pop() else { break };
            let packet = if desc.options == 0 && !self.linearizer.is_skipping() {
                locked.hold(me, &desc)
            } else {
                match self.linearizer.linearize(me, desc, &mut self.rx, &mut locked) {
                    Linearized::Packet(packet) => Some(packet),
                    Linearized::Discarded => None,
                    Linearized::Deferred => break,
                }
            };
            if let Some(packet) = packet {
                self.batch[self.len] = packet;
                self.len += 1;
            }
        }
        self.rx.release();
        locked.refill_cache(me, purse, self.batch.len());
        // A kernel that works only when notified is notified each time.
        let is_asked = bell.is_zero_copy() || bell.is_busy_polling();
        let is_quiet = self.len == 0 && !is_asked && locked.is_idle(me, purse);
        drop(locked);
        self.idle_skips = if is_quiet { IDLE_SKIPS_MAX } else { 0 };
        if self.linearizer.has_copies() {
            self.linearizer.finish(me, pool);
        }
        self.len
    }

    /// See [`Queue::is_idle`](super::Queue::is_idle).
    #[inline]
    pub(super) fn is_idle(&mut self) -> bool {
        let rests = self.idle_skips > 0 && self.rx.is_empty();
        self.idle_skips -= u32::from(rests);
        rests
    }

    /// The kernel's mode has changed: the next receive makes a full pass.
    pub(super) fn reset_idle(&mut self) {
        self.idle_skips = 0;
    }

    /// True if packets are pending.
    #[inline]
    pub(super) fn has_received(&self) -> bool {
        !self.rx.is_empty()
    }

    /// See [`Queue::backlog`](super::Queue::backlog).
    pub(super) fn backlog(&self) -> (u32, u32) {
        (self.rx.pending(), self.rx.entries())
    }

    /// See [`Queue::cached_backlog`](super::Queue::cached_backlog).
    #[inline]
    pub(super) fn cached_backlog(&self) -> u32 {
        self.rx.cached_pending()
    }

    #[cfg(test)]
    pub(super) fn has_idle_skips(&self) -> bool {
        self.idle_skips > 0
    }

    /// See [`Queue::flush_pending`](super::Queue::flush_pending).
    #[inline]
    pub(super) fn flush_pending(&mut self, bell: &dyn RingWakeup) -> io::Result<()> {
        // An idle member has nothing to send; that is known without reading the cache lines of its
        // TX ring.
        if self.idle_skips > 0 || !self.tx_queue.tx.has_unconsumed() {
            return Ok(());
        }
        // Sent frames will have to be reclaimed.
        self.idle_skips = 0;
        self.tx_queue.flush(bell).map(drop)
    }

    /// See [`Queue::packet`](super::Queue::packet).
    #[inline]
    pub(super) fn packet(&self, i: usize) -> &[u8] {
        let Packet { start, len, .. } = self.batch[..self.len][i];
        // SAFETY: the packet is in initialised memory that belongs to the batch alone as long as
        // `self` is borrowed (see `Packet`); mutable slices of it borrow `self` mutably.
        unsafe { std::slice::from_raw_parts(start.cast_const(), len as usize) }
    }

    /// See [`Queue::edit_packets`](super::Queue::edit_packets).
    pub(super) fn edit_packets(&mut self, mut edit: impl FnMut(&mut [u8])) {
        for packet in &self.batch[..self.len] {
            // SAFETY: as in `packet`; `self` is borrowed mutably, so there is no other slice of
            // it.
            edit(unsafe { std::slice::from_raw_parts_mut(packet.start, packet.len as usize) });
        }
    }

    /// See [`Queue::find_payloads`](super::Queue::find_payloads).
    #[inline]
    pub(super) fn find_payloads(&mut self, mut find: impl FnMut(usize, &[u8]) -> Option<(usize, usize)>) {
        for (i, packet) in self.batch[..self.len].iter_mut().enumerate() {
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

    /// See [`Queue::split`](super::Queue::split).
    #[inline]
    pub(super) fn split<'a>(&'a mut self, bell: &'a dyn RingWakeup) -> (Payloads<'a>, Sender<'a>) {
        // Sent frames will have to be reclaimed.
        self.idle_skips = 0;
        if !self.has_payloads {
            self.find_payloads(|_, _| None);
        }
        let payloads = Payloads::new(&self.batch[..self.len], &self.headers_written);
        (payloads, Sender::new(payloads, &mut self.tx_queue, bell))
    }

    /// Returns everything that this member has. See [`Queue`](super::Queue) for what the kernel
    /// may still have.
    pub(super) fn leave(&mut self, bell: &dyn RingWakeup) {
        // Queued packets are sent if possible; the others are reclaimed.
        let _ = self.tx_queue.flush(bell);
        self.len = 0;
        let TxQueue { allocator: pool, member: me, tx, .. } = &mut self.tx_queue;
        pool.lock().leave(*me, &mut self.rx, tx, !bell.is_zero_copy());
    }

    pub(super) fn frame_counts(&self) -> FrameCounts {
        self.tx_queue.allocator.frame_counts()
    }

    /// Sets the payload of one packet.
    #[cfg(test)]
    pub(super) fn set_payload(&mut self, i: usize, at: usize, len: usize) {
        assert!(i < self.len);
        if !self.has_payloads {
            self.find_payloads(|_, _| None);
        }
        let found = |packet: &Packet| (packet.payload_offset as usize, packet.payload_len as usize);
        let mut all: Vec<_> = self.batch[..self.len].iter().map(found).collect();
        all[i] = (at, len);
        self.find_payloads(|i, _| Some(all[i]));
    }

    /// Maximum packets of a batch.
    #[cfg(test)]
    pub(super) fn batch_max(&self) -> usize {
        self.batch.len()
    }

    /// Unused credits of this member, for tests.
    #[cfg(test)]
    pub(super) fn cache(&self) -> (super::frames::MemberId, &super::allocator::FrameCache) {
        (self.tx_queue.member, &self.tx_queue.cache)
    }
}

/// Not inlined, so that the loop that calls it keeps its values in registers.
#[cold]
#[inline(never)]
fn payload_out_of_range(bytes: usize, at: usize, len: usize) -> ! {
    panic!("a packet of {bytes} bytes has no {len} bytes at {at}")
}
