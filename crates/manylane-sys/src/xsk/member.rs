//! A member of a queue without its socket: its two rings, its batch, and its way to the pool.
//!
//! Everything a queue does but system calls is here and in the pool, so that tests can be the
//! kernel.

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

/// Receives that a quiet member may leave out before it looks at all of its queue again.
const IDLE_SKIPS_MAX: u32 = 64;

/// One member: its rings, and the packets of its current batch.
///
/// It ends with [`leave`](Self::leave); what it had is lost to the others otherwise.
///
/// A look that finds nothing reads the first cache line and the counter of the ring: a lane has
/// many queues, most of which have nothing when it wakes up.
#[repr(C, align(64))]
pub(super) struct QueueMember {
    rx: Consumer<xdp_desc>,
    /// Nothing was there, nothing is missing, and nothing comes back: a receive has to look at the
    /// ring and no further, so many times.
    idle_skips: u32,
    /// Whether it is known where the payloads of the batch are.
    has_payloads: bool,
    /// See [`Payloads`].
    headers_written: Cell<usize>,
    tx_queue: TxQueue,
    /// Places for the packets of a batch, of which so many are in use.
    batch: Box<[Packet]>,
    len: usize,
    linearizer: Linearizer,
}

const _: () = assert!(std::mem::offset_of!(QueueMember, has_payloads) < 64);

impl QueueMember {
    /// A new member of a pool; the options were checked. None if it has too many.
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
        // Nobody asks before the next `split`, or it is looked for before.
        self.has_payloads = false;
        self.headers_written.set(0);
        let TxQueue { allocator: pool, member: me, cache: purse, .. } = &mut self.tx_queue;
        let (pool, me) = (Arc::as_ref(pool), *me);
        let mut locked = pool.lock();
        // First what was sent: most of it is of this batch, and goes back to the kernel with the
        // rest of it.
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
        // A kernel that does not work without being asked is asked each time.
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

    /// The kernel works in other ways than before: a receive does all that it has to.
    pub(super) fn reset_idle(&mut self) {
        self.idle_skips = 0;
    }

    /// Whether packets wait to be received.
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
        // A quiet member has nothing on its way out; that is known without the cache lines of its
        // send ring.
        if self.idle_skips > 0 || !self.tx_queue.tx.has_unconsumed() {
            return Ok(());
        }
        // What is sent comes back.
        self.idle_skips = 0;
        self.tx_queue.flush(bell).map(drop)
    }

    /// See [`Queue::packet`](super::Queue::packet).
    #[inline]
    pub(super) fn packet(&self, i: usize) -> &[u8] {
        let Packet { start, len, .. } = self.batch[..self.len][i];
        // SAFETY: the packet is in initialised memory that is the batch's alone as long as `self`
        // is borrowed (see `Packet`); mutable slices of it borrow `self` mutably.
        unsafe { std::slice::from_raw_parts(start.cast_const(), len as usize) }
    }

    /// See [`Queue::edit_packets`](super::Queue::edit_packets).
    pub(super) fn edit_packets(&mut self, mut edit: impl FnMut(&mut [u8])) {
        for packet in &self.batch[..self.len] {
            // SAFETY: as in `packet`; and `self` is borrowed mutably, so that there is no other
            // slice of it.
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
        // What is sent comes back.
        self.idle_skips = 0;
        if !self.has_payloads {
            self.find_payloads(|_, _| None);
        }
        let payloads = Payloads::new(&self.batch[..self.len], &self.headers_written);
        (payloads, Sender::new(payloads, &mut self.tx_queue, bell))
    }

    /// Gives back what this member has, which is of no use any more. See [`Queue`](super::Queue)
    /// for what the kernel may still have.
    pub(super) fn leave(&mut self, bell: &dyn RingWakeup) {
        // What was to be sent shall be sent; what cannot be comes back.
        let _ = self.tx_queue.flush(bell);
        self.len = 0;
        let TxQueue { allocator: pool, member: me, tx, .. } = &mut self.tx_queue;
        pool.lock().leave(*me, &mut self.rx, tx, !bell.is_zero_copy());
    }

    pub(super) fn frame_counts(&self) -> FrameCounts {
        self.tx_queue.allocator.frame_counts()
    }

    /// Says where the payload of one packet is.
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

    /// Most packets of a batch.
    #[cfg(test)]
    pub(super) fn batch_max(&self) -> usize {
        self.batch.len()
    }

    /// What is granted to this member and not used, for tests to look at.
    #[cfg(test)]
    pub(super) fn cache(&self) -> (super::frames::MemberId, &super::allocator::FrameCache) {
        (self.tx_queue.member, &self.tx_queue.cache)
    }
}

/// Apart from the loop that would, so that it has its numbers in registers.
#[cold]
#[inline(never)]
fn payload_out_of_range(bytes: usize, at: usize, len: usize) -> ! {
    panic!("a packet of {bytes} bytes has no {len} bytes at {at}")
}
