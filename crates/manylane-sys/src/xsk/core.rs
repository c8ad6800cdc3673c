//! A member of a queue without its socket: its two rings, its batch, and its way to the pool.
//!
//! Everything a queue does but system calls is here and in the pool, so that tests can be the kernel.

use std::cell::Cell;
use std::io;
use std::sync::Arc;

use libc::xdp_desc;

use super::assembly::{Assembly, Next};
use super::frames::Packet;
use super::outgoing::Outgoing;
use super::pool::Pool;
use super::ring::{Consumer, Producer};
use super::send::{Payloads, Sender};
use super::{Census, QueueOptions};

/// Receives that a quiet member may leave out before it looks at all of its queue again.
const PASSES: u32 = 64;

/// What came of asking the kernel to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kick {
    /// It has sent what it could now.
    Worked,
    /// One packet was dropped (`EBUSY`), which the ring may show only later.
    Dropped,
    /// The device is down (`ENETDOWN`).
    Down,
}

/// The system calls of a queue.
pub(super) trait Bell {
    /// Whether the device sends by itself, once woken: without copying.
    fn is_zero_copy(&self) -> bool;
    /// Whether the device works only while it is asked to.
    fn is_busy_polling(&self) -> bool;
    /// Asks the kernel to send.
    fn send(&self) -> io::Result<Kick>;
    /// Asks the kernel to look at the fill ring and to receive.
    fn receive(&self);
}

/// The rings that each member has.
pub(super) struct MemberRings {
    pub(super) rx: Consumer<xdp_desc>,
    pub(super) tx: Producer<xdp_desc>,
}

/// One member: its rings, and the packets of its current batch.
///
/// It ends with [`leave`](Self::leave); what it had is lost to the others otherwise.
///
/// A look that finds nothing reads the first cache line and the counter of the ring: a lane has many queues, most of which
/// have nothing when it wakes up.
#[repr(C, align(64))]
pub(super) struct Core {
    rx: Consumer<xdp_desc>,
    /// Nothing was there, nothing is missing, and nothing comes back: a receive has to look at the ring and no further, so
    /// many times.
    quiet: u32,
    /// Whether it is known where the payloads of the batch are.
    is_found: bool,
    /// See [`Payloads`].
    written: Cell<usize>,
    out: Outgoing,
    /// Places for the packets of a batch, of which so many are in use.
    batch: Box<[Packet]>,
    len: usize,
    assembly: Assembly,
}

const _: () = assert!(std::mem::offset_of!(Core, is_found) < 64);

impl Core {
    /// A new member of a pool; the options were checked. None if it has too many.
    pub(super) fn join(
        pool: Arc<Pool>,
        rings: MemberRings,
        options: &QueueOptions,
        assembly: Assembly,
        checksums: bool,
    ) -> Option<Self> {
        let MemberRings { rx, tx } = rings;
        let me = pool.lock().join(rx.entries())?;
        Some(Self {
            rx,
            quiet: 0,
            is_found: true,
            written: Cell::new(0),
            out: Outgoing::new(pool, me, tx, options.batch, checksums),
            batch: vec![Packet::NONE; options.batch].into(),
            len: 0,
            assembly,
        })
    }

    /// See [`Queue::offers_checksums`](super::Queue::offers_checksums).
    pub(super) fn offers_checksums(&self) -> bool {
        self.out.checksums
    }

    /// See [`Queue::receive`](super::Queue::receive).
    #[inline]
    pub(super) fn receive(&mut self, bell: &dyn Bell, most: usize) -> usize {
        if self.rests() {
            return 0;
        }
        // Nobody asks before the next `split`, or it is looked for before.
        self.is_found = false;
        self.written.set(0);
        let Outgoing { pool, me, purse, .. } = &mut self.out;
        let (pool, me) = (Arc::as_ref(pool), *me);
        let mut locked = pool.lock();
        // First what was sent: most of it is of this batch, and goes back to the kernel with the rest of it.
        locked.reap();
        locked.end_batch(me, &self.batch[..self.len]);
        self.len = 0;
        self.assembly.clear();
        locked.refill();
        let wake = bell.is_zero_copy() && locked.wants_wakeup() == Some(true)
            || bell.is_busy_polling() && self.rx.is_empty();
        if wake {
            drop(locked);
            bell.receive();
            locked = pool.lock();
        }
        let mut budget = most.min(self.batch.len());
        while budget > 0 {
            if !self.assembly.is_skipping() {
                let room = &mut self.batch[self.len..self.len + budget];
                let held = locked.hold_batch(me, &mut self.rx, room);
                self.len += held;
                budget -= held;
                if budget == 0 {
                    break;
                }
            }
            budget -= 1;
            let Some(desc) = self.rx.take() else { break };
            let packet = if desc.options == 0 && !self.assembly.is_skipping() {
                locked.hold(me, &desc)
            } else {
                match self.assembly.chain(me, desc, &mut self.rx, &mut locked) {
                    Next::Packet(packet) => Some(packet),
                    Next::Nothing => None,
                    Next::Later => break,
                }
            };
            if let Some(packet) = packet {
                self.batch[self.len] = packet;
                self.len += 1;
            }
        }
        self.rx.release();
        locked.restock(me, purse, self.batch.len());
        // A kernel that does not work without being asked is asked each time.
        let is_asked = bell.is_zero_copy() || bell.is_busy_polling();
        let is_quiet = self.len == 0 && !is_asked && locked.is_settled(me, purse);
        drop(locked);
        self.quiet = if is_quiet { PASSES } else { 0 };
        if self.assembly.has_parts() {
            self.assembly.finish(me, pool);
        }
        self.len
    }

    /// See [`Queue::rests`](super::Queue::rests).
    #[inline]
    pub(super) fn rests(&mut self) -> bool {
        let rests = self.quiet > 0 && self.rx.is_empty();
        self.quiet -= u32::from(rests);
        rests
    }

    /// The kernel works in other ways than before: a receive does all that it has to.
    pub(super) fn stir(&mut self) {
        self.quiet = 0;
    }

    /// Whether packets wait to be received.
    #[inline]
    pub(super) fn has_received(&self) -> bool {
        !self.rx.is_empty()
    }

    /// See [`Queue::backlog`](super::Queue::backlog).
    pub(super) fn backlog(&self) -> (u32, u32) {
        (self.rx.waiting(), self.rx.entries())
    }

    /// See [`Queue::known_backlog`](super::Queue::known_backlog).
    #[inline]
    pub(super) fn known_backlog(&self) -> u32 {
        self.rx.known()
    }

    #[cfg(test)]
    pub(super) fn is_quiet(&self) -> bool {
        self.quiet > 0
    }

    /// See [`Queue::flush_rest`](super::Queue::flush_rest).
    #[inline]
    pub(super) fn flush_rest(&mut self, bell: &dyn Bell) -> io::Result<()> {
        // A quiet member has nothing on its way out; that is known without the cache lines of its send ring.
        if self.quiet > 0 || !self.out.tx.is_ahead() {
            return Ok(());
        }
        // What is sent comes back.
        self.quiet = 0;
        self.out.flush(bell).map(drop)
    }

    /// See [`Queue::packet`](super::Queue::packet).
    #[inline]
    pub(super) fn packet(&self, i: usize) -> &[u8] {
        let Packet { start, len, .. } = self.batch[..self.len][i];
        // SAFETY: the packet is in initialised memory that is the batch's alone as long as `self` is borrowed (see
        // `Packet`); mutable slices of it borrow `self` mutably.
        unsafe { std::slice::from_raw_parts(start.cast_const(), len as usize) }
    }

    /// See [`Queue::edit_packets`](super::Queue::edit_packets).
    pub(super) fn edit_packets(&mut self, mut edit: impl FnMut(&mut [u8])) {
        for packet in &self.batch[..self.len] {
            // SAFETY: as in `packet`; and `self` is borrowed mutably, so that there is no other slice of it.
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
                no_such_payload(bytes.len(), at, len);
            }
            (packet.at, packet.payload) = (at as u32, len as u32);
        }
        self.is_found = true;
    }

    /// See [`Queue::split`](super::Queue::split).
    #[inline]
    pub(super) fn split<'a>(&'a mut self, bell: &'a dyn Bell) -> (Payloads<'a>, Sender<'a>) {
        // What is sent comes back.
        self.quiet = 0;
        if !self.is_found {
            self.find_payloads(|_, _| None);
        }
        let payloads = Payloads::new(&self.batch[..self.len], &self.written);
        (payloads, Sender::new(payloads, &mut self.out, bell))
    }

    /// Gives back what this member has, which is of no use any more. See [`Queue`](super::Queue) for what the
    /// kernel may still have.
    pub(super) fn leave(&mut self, bell: &dyn Bell) {
        // What was to be sent shall be sent; what cannot be comes back.
        let _ = self.out.flush(bell);
        self.len = 0;
        let Outgoing { pool, me, tx, .. } = &mut self.out;
        pool.lock().leave(*me, &mut self.rx, tx, !bell.is_zero_copy());
    }

    pub(super) fn census(&self) -> Census {
        self.out.pool.census()
    }

    /// Says where the payload of one packet is.
    #[cfg(test)]
    pub(super) fn set_payload(&mut self, i: usize, at: usize, len: usize) {
        assert!(i < self.len);
        if !self.is_found {
            self.find_payloads(|_, _| None);
        }
        let found = |packet: &Packet| (packet.at as usize, packet.payload as usize);
        let mut all: Vec<_> = self.batch[..self.len].iter().map(found).collect();
        all[i] = (at, len);
        self.find_payloads(|i, _| Some(all[i]));
    }

    /// Most packets of a batch.
    #[cfg(test)]
    pub(super) fn most(&self) -> usize {
        self.batch.len()
    }

    /// What is granted to this member and not used, for tests to look at.
    #[cfg(test)]
    pub(super) fn purse(&self) -> (super::frames::Member, &super::pool::Purse) {
        (self.out.me, &self.out.purse)
    }
}

/// Apart from the loop that would, so that it has its numbers in registers.
#[cold]
#[inline(never)]
fn no_such_payload(bytes: usize, at: usize, len: usize) -> ! {
    panic!("a packet of {bytes} bytes has no {len} bytes at {at}")
}
