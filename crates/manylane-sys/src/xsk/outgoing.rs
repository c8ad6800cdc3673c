//! What a member sends with: its send ring, and what it may send without asking the pool.

use std::io;
use std::sync::Arc;

use libc::xdp_desc;

use super::core::{Bell, Kick};
use super::frames::{Kind, Member, Packet, Place};
use super::pool::{Pool, Purse};
use super::ring::Producer;

/// Calls that may bring nothing before a flush gives up. The first may free room in the completion ring.
const IDLE_KICKS: u32 = 2;

/// Credits and frames that one turn with the lock brings at most.
const PORTION: u32 = 64;

/// What the kernel is told of a packet, in the bytes before it: `struct xsk_tx_metadata` of linux/if_xdp.h, as it is
/// since Linux 6.14. Of the checksum: it is the sum over all bytes from `start` on, to be written `offset` after that,
/// where the sum of the pseudo header is.
#[repr(C)]
struct Metadata {
    flags: u64,
    start: u16,
    offset: u16,
    unused: u32,
    launch_time: u64,
}

/// Bytes of it.
pub(super) const METADATA: usize = size_of::<Metadata>();
const _: () = assert!(METADATA == 24 && align_of::<Metadata>() <= 8);

/// Where the checksum is that somebody has to finish: from which byte of the packet on, and how far behind that byte
/// it is written.
pub(super) type Checksum = (u16, u16);

/// What sending needs of a member.
pub(super) struct Outgoing {
    pub(super) pool: Arc<Pool>,
    pub(super) me: Member,
    pub(super) tx: Producer<xdp_desc>,
    pub(super) purse: Purse,
    /// Whether the kernel finishes checksums. Then frames have room for [`Metadata`] before what is sent.
    pub(super) checksums: bool,
}

impl Outgoing {
    /// Of a member with batches of so many packets. `checksums` only where frames have room for metadata.
    pub(super) fn new(
        pool: Arc<Pool>,
        me: Member,
        tx: Producer<xdp_desc>,
        batch: usize,
        checksums: bool,
    ) -> Self {
        let supply = Vec::with_capacity(batch.max(PORTION as usize));
        let purse = Purse { supply, ..Purse::default() };
        let checksums = checksums && pool.frames.room() == METADATA;
        Self { pool, me, tx, purse, checksums }
    }

    /// Asks the pool for credits, or for frames that come with theirs.
    #[cold]
    fn ask(&mut self, credits: u32, frames: u32) {
        let mut locked = self.pool.lock();
        locked.reap();
        locked.stock(self.me, &mut self.purse, credits, frames);
        if credits > 0 {
            locked.change(&mut self.purse);
        }
        self.purse.dry = self.purse.credits == 0 && self.purse.supply.is_empty();
    }

    /// Uses a credit; false if there is none to be had.
    #[inline]
    fn pay(&mut self) -> bool {
        if self.purse.credits == 0 && !self.purse.dry {
            self.ask(PORTION, 0);
        }
        let paid = self.purse.credits > 0;
        self.purse.credits -= u32::from(paid);
        paid
    }

    /// Whether the packet of the current batch was sent.
    #[inline]
    pub(super) fn is_sent(&self, packet: &Packet) -> bool {
        matches!(self.pool.frames.place(packet.frame).kind(), Kind::HeldSending | Kind::HeldDone)
    }

    /// Whether the packet of the current batch can be sent from where it is: it came in one frame, and was not sent.
    #[inline]
    pub(super) fn is_held(&self, packet: &Packet) -> bool {
        self.pool.frames.place(packet.frame) == Place::of(Kind::Held, self.me)
    }

    /// Held to held and sending: puts the first `len` bytes of a packet of the batch into the ring. False if it cannot
    /// be sent from where it is, or there is no room.
    #[inline]
    pub(super) fn send_held(&mut self, packet: &Packet, len: u32, checksum: Option<Checksum>) -> bool {
        let held = self.is_held(packet);
        let frames = &self.pool.frames;
        let addr = frames.addr_of(packet.start);
        let before = addr.wrapping_sub(frames.addr(packet.frame)) as usize;
        // The kernel skips an empty descriptor, and one without the room before it, and does not complete it: the
        // frame would be lost.
        if len == 0 || !held || before < frames.room() || !self.can_finish(checksum, addr, len) || !self.pay()
        {
            return false;
        }
        if !self.put(packet.frame, addr, len, checksum) {
            self.purse.credits += 1;
            return false;
        }
        self.pool.frames.put(packet.frame, Place::of(Kind::HeldSending, self.me));
        true
    }

    /// Whether the kernel will take a packet with such a checksum: one that it refuses would block the ring.
    #[inline]
    fn can_finish(&self, checksum: Option<Checksum>, addr: u64, len: u32) -> bool {
        checksum.is_none_or(|(start, offset)| {
            let end = u32::from(start) + u32::from(offset) + 2;
            self.checksums && end <= len && addr.is_multiple_of(align_of::<Metadata>() as u64)
        })
    }

    /// Puts a packet into the ring. It is in a frame that this member holds or has taken, behind the room of the frame,
    /// and [`can_finish`](Self::can_finish) is true of its checksum.
    #[inline]
    fn put(&mut self, frame: u32, addr: u64, len: u32, checksum: Option<Checksum>) -> bool {
        let mut options = 0;
        if let Some((start, offset)) = checksum {
            let flags = u64::from(libc::XDP_TXMD_FLAGS_CHECKSUM);
            let metadata = Metadata { flags, start, offset, unused: 0, launch_time: 0 };
            let frames = &self.pool.frames;
            debug_assert!(addr >= frames.addr(frame) + METADATA as u64);
            // SAFETY: the bytes are of the same frame as the packet, aligned, and in the memory of all frames (checked
            // by the callers). The frame is ours, no ring names it yet, and of the bytes before a packet nobody has a
            // slice.
            unsafe { frames.base().add(addr as usize - METADATA).cast::<Metadata>().write(metadata) };
            options = libc::XDP_TX_METADATA;
        }
        self.tx.put(xdp_desc { addr, len, options })
    }

    /// Supply to taken.
    #[inline]
    pub(super) fn take(&mut self) -> Option<u32> {
        if self.purse.supply.is_empty() && !self.purse.dry {
            self.ask(0, PORTION);
        }
        let frame = self.purse.supply.pop()?;
        self.purse.taken += 1;
        self.pool.frames.put(frame, Place::of(Kind::Taken, self.me));
        Some(frame)
    }

    /// Whether this member has taken the frame.
    #[inline]
    pub(super) fn is_taken(&self, frame: u32) -> bool {
        self.pool.frames.place(frame) == Place::of(Kind::Taken, self.me)
    }

    /// Taken to supply.
    pub(super) fn give_back(&mut self, frame: u32) {
        if !self.is_taken(frame) {
            return;
        }
        if self.purse.supply.len() == self.purse.supply.capacity() {
            self.pool.lock().take_in(&mut self.purse);
        }
        self.pool.frames.put(frame, Place::of(Kind::Supply, self.me));
        self.purse.supply.push(frame);
    }

    /// Bytes that a taken frame has room for, and where they begin in the memory of all frames.
    #[inline]
    pub(super) fn room_of(&self, frame: u32) -> (u64, usize) {
        let frames = &self.pool.frames;
        (frames.addr(frame) + frames.room() as u64, frames.size() - frames.room())
    }

    /// Taken to sending: puts the first `len` bytes of a frame into the ring. False if there is no room, or they
    /// cannot be sent.
    #[inline]
    pub(super) fn send_taken(&mut self, frame: u32, len: usize, checksum: Option<Checksum>) -> bool {
        let (addr, most) = self.room_of(frame);
        let fits = len > 0 && len <= most && self.is_taken(frame);
        if !fits
            || !self.can_finish(checksum, addr, len as u32)
            || !self.put(frame, addr, len as u32, checksum)
        {
            return false;
        }
        self.pool.frames.put(frame, Place::of(Kind::Sending, self.me));
        true
    }

    /// Takes back what was put into the ring since the last flush.
    pub(super) fn abandon(&mut self) {
        while let Some(desc) = self.tx.unput() {
            let Some(frame) = self.pool.frames.frame_of(desc.addr) else { continue };
            if self.pool.frames.place(frame) == Place::of(Kind::HeldSending, self.me) {
                self.pool.frames.put(frame, Place::of(Kind::Held, self.me));
                self.purse.credits += 1;
            } else {
                self.pool.frames.put(frame, Place::of(Kind::Taken, self.me));
                self.give_back(frame);
            }
        }
    }

    /// See [`Sender::flush`](super::Sender::flush).
    pub(super) fn flush(&mut self, bell: &dyn Bell) -> io::Result<usize> {
        self.purse.dry = false;
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
                    // A completion ring that is full holds the kernel up, whoever's completions are in it.
                    self.pool.lock().reap();
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
