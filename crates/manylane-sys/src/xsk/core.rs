//! The queue without its socket: four rings and the frames between them.
//!
//! Everything a queue does but system calls is here, so that tests can be the kernel.

use std::io;

use libc::xdp_desc;

use super::frames::{Frames, Packet};
use super::ring::{Consumer, Producer};
use super::send::{Payloads, Sender};
use super::{Census, QueueOptions};
use crate::map::Mapping;

/// Calls that may bring nothing before a flush gives up. The first may free room in the completion ring.
const IDLE_KICKS: u32 = 2;

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

/// Asks for the cache line at `at`.
#[inline]
fn prefetch(at: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a hint, which reads nothing that the program could see, and never faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}

/// The four rings.
pub(super) struct Rings {
    pub(super) fill: Producer<u64>,
    pub(super) rx: Consumer<xdp_desc>,
    pub(super) tx: Producer<xdp_desc>,
    pub(super) completion: Consumer<u64>,
}

/// What sending needs of a queue.
pub(super) struct Outgoing {
    pub(super) tx: Producer<xdp_desc>,
    completion: Consumer<u64>,
    pub(super) frames: Frames,
}

impl Outgoing {
    /// Takes back the frames that the kernel has sent.
    #[inline]
    pub(super) fn reap(&mut self) -> u32 {
        let mut reaped = 0;
        while let Some(addr) = self.completion.take() {
            self.frames.complete(addr);
            reaped += 1;
            // A kernel that fills the ring as fast as we empty it shall not keep us.
            if reaped == self.completion.entries() {
                break;
            }
        }
        self.completion.release();
        reaped
    }

    /// Whether one more frame may be sent, also after taking back those that were.
    #[inline]
    pub(super) fn has_room(&mut self) -> bool {
        self.frames.may_send() || (self.reap() > 0 && self.frames.may_send())
    }

    /// See [`Sender::flush`].
    pub(super) fn flush(&mut self, bell: &dyn Bell) -> io::Result<usize> {
        self.tx.publish();
        let mut left = self.tx.waiting();
        if left == 0 {
            return Ok(0);
        }
        if bell.is_zero_copy() {
            if bell.is_busy_polling() || self.tx.wants_wakeup().unwrap_or(true) {
                bell.send()?;
            }
            return Ok(self.tx.waiting() as usize);
        }
        // Each call takes descriptors, drops one, or does nothing, which it may do only so often.
        let mut idle = 0;
        for _ in 0..left + IDLE_KICKS {
            let kick = bell.send()?;
            let before = std::mem::replace(&mut left, self.tx.waiting());
            match kick {
                Kick::Worked if left == before => {
                    // A completion ring that is full holds the kernel up.
                    self.reap();
                    idle += 1;
                }
                Kick::Worked | Kick::Dropped => {}
                Kick::Down => break,
            }
            if left == 0 || idle == IDLE_KICKS {
                break;
            }
        }
        Ok(left as usize)
    }
}

/// Rings, frames, and the packets of the current batch.
pub(super) struct Core {
    fill: Producer<u64>,
    rx: Consumer<xdp_desc>,
    out: Outgoing,
    batch: Vec<Packet>,
    /// Most packets of a batch.
    most: usize,
    /// Frames that the kernel has to receive into, whenever there are enough.
    receiving: u32,
}

impl Core {
    /// A queue whose fill ring is filled. `memory` has room for all frames; the options were checked.
    pub(super) fn new(rings: Rings, memory: Mapping, options: &QueueOptions) -> Self {
        let receiving = options.ring.min(options.frames / 2);
        let frames = Frames::new(memory, options.frames, options.frame_size, receiving);
        let Rings { fill, rx, tx, completion } = rings;
        let mut core = Self {
            fill,
            rx,
            out: Outgoing { tx, completion, frames },
            batch: Vec::with_capacity(options.batch),
            most: options.batch,
            receiving,
        };
        core.refill();
        core
    }

    /// Gives the kernel what it lacks to receive into.
    #[inline]
    fn refill(&mut self) {
        let lacking = self.receiving.saturating_sub(self.out.frames.filling());
        for _ in 0..lacking {
            let Some(addr) = self.out.frames.fill() else { break };
            if !self.fill.put(addr) {
                self.out.frames.unfill(addr);
                break;
            }
        }
        self.fill.publish();
    }

    /// See [`Queue::receive`](super::Queue::receive).
    #[inline]
    pub(super) fn receive(&mut self, bell: &dyn Bell, most: usize) -> usize {
        for packet in &self.batch {
            self.out.frames.end_hold(packet);
        }
        self.batch.clear();
        self.out.reap();
        self.refill();
        if bell.is_zero_copy() && self.fill.wants_wakeup() == Some(true)
            || bell.is_busy_polling() && self.rx.is_empty()
        {
            bell.receive();
        }
        for _ in 0..most.min(self.most) {
            let Some(desc) = self.rx.take() else { break };
            if let Some(packet) = self.out.frames.hold(desc) {
                // Another core has written it: all lines of a batch are on their way before the first is looked at.
                prefetch(self.out.frames.base().wrapping_add(packet.addr as usize));
                self.batch.push(packet);
            }
        }
        self.rx.release();
        self.batch.len()
    }

    /// Whether packets wait to be received.
    #[inline]
    pub(super) fn has_received(&self) -> bool {
        !self.rx.is_empty()
    }

    /// See [`Queue::packet`](super::Queue::packet).
    #[inline]
    pub(super) fn packet(&self, i: usize) -> &[u8] {
        let Packet { addr, len, .. } = self.batch[i];
        // SAFETY: the packet lies in the memory of the frames, which is initialised (see `Packet`), in a frame that
        // stays in the batch as long as `self` is borrowed; mutable slices of it borrow `self` mutably.
        unsafe {
            let start = self.out.frames.base().add(addr as usize);
            std::slice::from_raw_parts(start.cast_const(), len as usize)
        }
    }

    /// See [`Queue::set_payload`](super::Queue::set_payload).
    #[inline]
    pub(super) fn set_payload(&mut self, i: usize, at: usize, len: usize) {
        let packet = &mut self.batch[i];
        let fits = at.checked_add(len).is_some_and(|end| end <= packet.len as usize);
        assert!(fits, "packet {i} has no {len} bytes at {at}");
        (packet.at, packet.payload) = (at as u32, len as u32);
    }

    /// See [`Queue::split`](super::Queue::split).
    #[inline]
    pub(super) fn split<'a>(&'a mut self, bell: &'a dyn Bell) -> (Payloads<'a>, Sender<'a>) {
        let payloads = Payloads::new(self.out.frames.base(), &self.batch);
        (payloads, Sender::new(payloads, &mut self.out, bell))
    }

    pub(super) fn census(&self) -> Census {
        self.out.frames.census()
    }

    /// Most packets of a batch.
    #[cfg(test)]
    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// The frames, for tests to look at.
    #[cfg(test)]
    pub(super) fn frames(&self) -> &Frames {
        &self.out.frames
    }
}
