//! A queue that another process has opened, used by any thread of any process that has it.
//!
//! All that is known of it is in memory that they share: the kernel's four rings, which hold their
//! own counters, and [`Control`]: the lock, and the frames that are free to send from. Nothing is
//! remembered elsewhere. So it does not matter which thread takes the next packet, or whether the
//! one that took the last still lives.
//!
//! | who | may |
//! |---|---|
//! | anybody | see whether packets wait ([`LeasedQueue::has_received`]), and tell the kernel to send ([`LeasedQueue::kick`]) |
//! | who has the lock ([`QueueGuard`]) | take packets, write one into a free frame, put it into the send ring |
//!
//! The lock names its [`Holder`]. A thread that ends with it is found out by who wants it next, and
//! loses it: threads of the same program know by the token; the lessor, by the lease, which all
//! processes have closed by then. Each step is ordered so that this costs a frame at most: a packet
//! leaves the receive ring before its frame goes to the fill ring, a frame leaves the free ones
//! before it goes into the send ring. A signal handler that meets its own thread's lock finds
//! nothing here.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use libc::xdp_desc;

use super::ring::{Consumer, Producer};
use super::socket::{AllRings, Maps, Socket};
use super::tx_metadata::METADATA_LEN;
use super::wakeup::RingWakeup as _;
use crate::lease::QueueParams;
use crate::shared::{Atomics, SharedMapping};

/// Bytes of a frame; the kernel keeps the first 256 of one that it receives into.
pub(super) const FRAME_SIZE: u32 = 2048;

/// Bytes of a queue's memory.
pub(super) fn memory_size(frames: u32) -> usize {
    frames as usize * FRAME_SIZE as usize + size_of::<Control>()
}

/// Frames of the largest memory.
pub(super) const FRAMES_MAX: usize = 1 << 14;

/// Tries to get the lock, each with the processor given away, before it is looked whether its
/// holder lives.
const LOCK_YIELDS_MAX: u32 = 200;
/// Looks before it is given up: the holder is stopped, or waits for its turn on a busy machine.
const HOLDER_CHECKS_MAX: u32 = 20;

/// Bytes of a frame before what is sent, which the kernel reads as what it is told of the packet
/// (`METADATA_LEN`).
const TX_HEADROOM: usize = 64;
const _: () = assert!(TX_HEADROOM >= METADATA_LEN);

/// A thread that holds a queue's lock: the lease that it has the queue by, and a token by which
/// others of its program know whether it lives. Numbers of processes would not do: those of a
/// zombie are taken, those of another PID namespace mean another process, and they say nothing of
/// threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder(u64);

impl Holder {
    /// Who leases the queues.
    pub(super) const LESSOR: Self = Self(1 << 32);
    const LEASE_SHIFT: u32 = 16;

    /// A thread of a program; bits 16 to 31 of `token` are not kept.
    #[must_use]
    #[inline]
    pub fn new(lease: u16, token: u64) -> Self {
        Self(token & !(0xffff << Self::LEASE_SHIFT) | u64::from(lease) << Self::LEASE_SHIFT)
    }

    /// Number of the lease; 0 for the lessor.
    #[must_use]
    pub fn lease(self) -> u16 {
        (self.0 >> Self::LEASE_SHIFT) as u16
    }

    /// Its token.
    #[must_use]
    pub fn token(self) -> u64 {
        self.0 & !(0xffff << Self::LEASE_SHIFT)
    }
}

/// Behind the frames of a queue's memory.
#[repr(C, align(4096))]
pub(super) struct Control {
    /// The [`Holder`] that uses the queue; 0 if none.
    lock: AtomicU64,
    /// Packets that nobody got: broken ones.
    refused: AtomicU64,
    /// How many of `free` there are.
    free_count: AtomicU32,
    /// Frames that are nowhere else, as numbers.
    free: [AtomicU32; FRAMES_MAX],
}

// SAFETY: atomics and an array of such.
unsafe impl Atomics for Control {}

/// A queue of somebody else's.
pub struct LeasedQueue {
    terms: QueueParams,
    socket: Socket,
    rings: AllRings,
    memory: SharedMapping,
    #[expect(dead_code, reason = "kept for their drop, after the rings")]
    maps: [Maps; 2],
}

// SAFETY: the memory of the rings is touched by who has the lock, which is in memory that all
// share, but for the counter that `has_received` loads, an atomic; the socket's cell is written by
// nobody.
unsafe impl Send for LeasedQueue {}
// SAFETY: as above.
unsafe impl Sync for LeasedQueue {}

impl LeasedQueue {
    /// Maps a queue that came in a [`Queue`](crate::lease::Message::Queue). The heap is not used.
    ///
    /// # Errors
    /// `InvalidData` for terms that do not fit the memory; what `mmap(2)` reports.
    pub fn open(terms: QueueParams, socket: OwnedFd, memory: BorrowedFd<'_>) -> io::Result<Self> {
        let sizes = [terms.ring_size, terms.umem_ring_size];
        let fits = sizes.iter().all(|size| size.is_power_of_two() && *size <= 1 << 16);
        if !fits || terms.frames as usize > FRAMES_MAX {
            return Err(io::Error::from_raw_os_error(libc::EPROTO));
        }
        let memory = SharedMapping::map(memory, memory_size(terms.frames))?;
        let socket = Socket::from_fd(socket);
        let (rings, maps) = socket.all_rings(terms.umem_ring_size, terms.ring_size, terms.ring_size)?;
        Ok(Self { terms, socket, rings, memory, maps })
    }

    /// What it is like.
    #[must_use]
    pub fn terms(&self) -> &QueueParams {
        &self.terms
    }

    pub(super) fn control(&self) -> &Control {
        // SAFETY: the memory is as long as `memory_size` says, which is that of all frames, a
        // multiple of a page, and of one Control behind them; it stays mapped as long as `self`,
        // and a Control is made of atomics.
        unsafe {
            &*self.memory.as_ptr().add(self.terms.frames as usize * FRAME_SIZE as usize).cast::<Control>()
        }
    }

    /// Whether packets wait to be taken.
    #[must_use]
    #[inline]
    pub fn has_received(&self) -> bool {
        !Consumer::resume(self.rings.rx).is_empty()
    }

    /// Packets that wait to be taken; for a look from outside, wrong for a moment only.
    #[must_use]
    pub fn rx_pending(&self) -> u32 {
        // Who takes meanwhile may have moved one counter between the loads of both.
        Consumer::resume(self.rings.rx).pending().min(self.terms.ring_size)
    }

    /// What the kernel counted of it.
    ///
    /// # Errors
    /// What the kernel reports.
    pub fn statistics(&self) -> io::Result<super::Statistics> {
        super::statistics(self.socket.as_fd())
    }

    /// Packets that nobody got, of all who share the queue: broken ones.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.control().refused.load(Ordering::Relaxed)
    }

    /// Whether packets wait to be sent, and the kernel may not have been told.
    #[must_use]
    pub fn has_unsent(&self) -> bool {
        // Both counters are atomics, and wrong for a moment only.
        Producer::resume(self.rings.tx).pending() > 0
    }

    /// A number that changes when something is sent.
    #[must_use]
    pub fn tx_produced(&self) -> u32 {
        Producer::resume(self.rings.tx).produced()
    }

    /// The queue for the caller alone, which is `own`; `is_gone` says of a holder whether it will
    /// never come back. None if somebody else keeps it for long, or the caller's own thread has it
    /// already.
    #[inline]
    pub fn lock(&self, own: Holder, is_gone: impl Fn(Holder) -> bool) -> Option<QueueGuard<'_>> {
        let lock = &self.control().lock;
        match lock.compare_exchange(0, own.0, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Some(QueueGuard::new(self)),
            Err(holder) if holder == own.0 => None,
            Err(_) => self.wait_for_lock(own, is_gone),
        }
    }

    /// As [`lock`](Self::lock), without waiting: none if somebody has it who may come back.
    pub(super) fn try_lock(&self, own: Holder, is_gone: impl Fn(Holder) -> bool) -> Option<QueueGuard<'_>> {
        let lock = &self.control().lock;
        let take = |from| lock.compare_exchange(from, own.0, Ordering::Acquire, Ordering::Relaxed);
        let taken = match take(0) {
            Err(holder) if is_gone(Holder(holder)) => take(holder),
            taken => taken,
        };
        taken.is_ok().then(|| QueueGuard::new(self))
    }

    #[cold]
    fn wait_for_lock(&self, own: Holder, is_gone: impl Fn(Holder) -> bool) -> Option<QueueGuard<'_>> {
        let lock = &self.control().lock;
        for _ in 0..HOLDER_CHECKS_MAX {
            for _ in 0..LOCK_YIELDS_MAX {
                if lock.compare_exchange(0, own.0, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                    return Some(QueueGuard::new(self));
                }
                std::thread::yield_now();
            }
            let holder = lock.load(Ordering::Relaxed);
            if holder != 0
                && is_gone(Holder(holder))
                && lock.compare_exchange(holder, own.0, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return Some(QueueGuard::new(self));
            }
        }
        None
    }

    /// Has the kernel send what is in the send ring. An error means that the device is gone, and
    /// all that there is with it.
    pub fn kick(&self) {
        let mut tx = Producer::resume(self.rings.tx);
        // Each call sends what it has a budget for; what a full device leaves goes with the next
        // packet, or with a look of the lessor's.
        let mut before = tx.pending();
        for _ in 0..4 {
            if before == 0 || self.socket.send().is_err() {
                return;
            }
            let left = tx.pending();
            if left >= before {
                return;
            }
            before = left;
        }
    }

    /// All frames are free to be received into or sent from; once, before anybody else has the
    /// queue.
    pub(super) fn init_frames(&self, filled: u32) {
        let control = self.control();
        let mut fill = Producer::resume(self.rings.fill);
        for frame in 0..self.terms.frames {
            if frame < filled && fill.push(u64::from(frame) * u64::from(FRAME_SIZE)) {
                continue;
            }
            let count = control.free_count.load(Ordering::Relaxed);
            control.free[count as usize].store(frame, Ordering::Relaxed);
            control.free_count.store(count + 1, Ordering::Relaxed);
        }
        fill.publish();
    }
}

impl AsFd for LeasedQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A queue that the caller has for itself, for some hundred nanoseconds: no system call is made
/// with it.
pub struct QueueGuard<'a> {
    queue: &'a LeasedQueue,
    rx: Consumer<xdp_desc>,
}

impl<'a> QueueGuard<'a> {
    #[inline]
    fn new(queue: &'a LeasedQueue) -> Self {
        Self { queue, rx: Consumer::resume(queue.rings.rx) }
    }

    /// The packet that has waited longest; it stays where it is.
    #[inline]
    pub fn peek(&mut self) -> Option<&[u8]> {
        loop {
            let desc = self.rx.pop()?;
            let (addr, len) = (desc.addr as usize, desc.len as usize);
            let room = FRAME_SIZE as usize - addr % FRAME_SIZE as usize;
            let frames = self.queue.terms.frames as usize * FRAME_SIZE as usize;
            if addr < frames && len <= room && desc.options == 0 {
                self.rx.cancel(1);
                // SAFETY: the bytes are within one frame of the memory (just checked), which stays
                // mapped as long as the queue is borrowed. The kernel has written them before it
                // put the descriptor in, and writes to the frame again only after `pop` has given
                // it back, which needs this slice to be gone. Any bytes are values.
                return Some(unsafe {
                    std::slice::from_raw_parts(self.queue.memory.as_ptr().add(addr), len)
                });
            }
            // No frame of ours, or one of several pieces, which were not asked for.
            self.rx.release();
            self.queue.control().refused.fetch_add(1, Ordering::Relaxed);
            if addr < frames {
                self.return_frame(addr);
            }
        }
    }

    /// The packet that has waited longest is done with: its frame may be received into again.
    #[inline]
    pub fn pop(&mut self) {
        let Some(desc) = self.rx.pop() else { return };
        self.rx.release();
        self.return_frame(desc.addr as usize);
    }

    /// As [`pop`](Self::pop), for a packet that nobody gets, which is counted.
    pub fn refuse(&mut self) {
        self.queue.control().refused.fetch_add(1, Ordering::Relaxed);
        self.pop();
    }

    /// Gives the frame that `addr` lies in to the kernel, or to the free ones where the fill ring
    /// is full.
    fn return_frame(&mut self, addr: usize) {
        let frame = addr / FRAME_SIZE as usize;
        let mut fill = Producer::resume(self.queue.rings.fill);
        if fill.push((frame * FRAME_SIZE as usize) as u64) {
            fill.publish();
        } else {
            self.free_frame(frame as u32);
        }
    }

    fn free_frame(&mut self, frame: u32) {
        let control = self.queue.control();
        let count = control.free_count.load(Ordering::Relaxed);
        if let Some(place) = control.free.get(count as usize) {
            place.store(frame, Ordering::Relaxed);
            control.free_count.store(count + 1, Ordering::Relaxed);
        }
    }

    /// Has `write` fill a free frame and say how long it became, and puts it into the send ring.
    /// False, and nothing is sent, if it says nothing, or if there is no frame or no room. The
    /// kernel has to be [told](LeasedQueue::kick).
    #[inline]
    pub fn send(&mut self, write: impl FnOnce(&mut [u8]) -> Option<usize>) -> bool {
        let Some(frame) = self.alloc_frame() else { return false };
        let addr = frame as usize * FRAME_SIZE as usize + TX_HEADROOM;
        // SAFETY: a free frame is in no ring, and who has the lock is the only one with a way to
        // it: the slice is the only one, and ends before the frame goes anywhere. `alloc_frame` has
        // checked that it lies in the memory.
        let room = unsafe {
            std::slice::from_raw_parts_mut(
                self.queue.memory.as_ptr().add(addr),
                FRAME_SIZE as usize - TX_HEADROOM,
            )
        };
        let len = write(room).filter(|len| (1..=FRAME_SIZE as usize - TX_HEADROOM).contains(len));
        let mut tx = Producer::resume(self.queue.rings.tx);
        if let Some(len) = len
            && tx.push(xdp_desc { addr: addr as u64, len: len as u32, options: 0 })
        {
            tx.publish();
            return true;
        }
        self.free_frame(frame);
        false
    }

    /// A frame that is free, of those that were sent if there is no other.
    fn alloc_frame(&mut self) -> Option<u32> {
        let control = self.queue.control();
        let few = control.free_count.load(Ordering::Relaxed) == 0;
        if few {
            let mut sent = Consumer::resume(self.queue.rings.completion);
            let mut back = 0;
            while back < self.queue.terms.umem_ring_size
                && let Some(addr) = sent.pop()
            {
                back += 1;
                // Released first: a frame that is forgotten does no harm, one that is twice there
                // does.
                sent.release();
                let frame = (addr / u64::from(FRAME_SIZE)) as u32;
                if frame < self.queue.terms.frames {
                    self.free_frame(frame);
                }
            }
        }
        let count = control.free_count.load(Ordering::Relaxed).checked_sub(1)?;
        let frame = control.free.get(count as usize)?.load(Ordering::Relaxed);
        control.free_count.store(count, Ordering::Relaxed);
        (frame < self.queue.terms.frames).then_some(frame)
    }
}

impl Drop for QueueGuard<'_> {
    fn drop(&mut self) {
        self.queue.control().lock.store(0, Ordering::Release);
    }
}
