//! A queue opened by another process, and used by any thread of any process that has it.
//!
//! All its state is in memory that they share: the kernel's four rings with their counters, and
//! [`Control`]: the lock, and the free frames for sending. There is no other state. So any thread
//! can take the next packet, even if the one that took the last has ended.
//!
//! | operation | allowed |
//! |---|---|
//! | check for packets ([`LeasedQueue::has_received`]), notify the kernel to send ([`LeasedQueue::kick`]) | always |
//! | take packets, write one into a free frame, put it into the TX ring | with the lock ([`QueueGuard`]) |
//!
//! The lock names its [`Holder`]. If a thread ends with the lock, the next thread that wants it
//! detects that and takes it: threads of the same program by the token, the lessor by the lease,
//! which all processes have closed by then. Each step is ordered so that this loses at most a
//! frame: a packet leaves the RX ring before its frame goes to the fill ring, and a frame leaves
//! the free ones before it goes into the TX ring. A signal handler that interrupts the holder of
//! the lock gets no packets here.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use libc::xdp_desc;

use super::ring::{Consumer, Producer};
use super::socket::{AllRings, Maps, Socket};
use super::statistics::{Statistics, statistics};
use super::tx_metadata::METADATA_LEN;
use super::tx_queue::kick;
use super::wakeup::RingWakeup as _;
use crate::map::Mapping;
use crate::shared;

/// Size of a frame; the kernel reserves the first 256 bytes of one that it receives into.
pub(super) const FRAME_SIZE: u32 = 2048;

/// Size of a queue's memory in bytes.
pub(super) fn memory_size(frames: u32) -> usize {
    frames as usize * FRAME_SIZE as usize + size_of::<Control>()
}

/// Maximum number of frames.
pub(super) const FRAMES_MAX: usize = 1 << 14;

/// Maximum number of invalid packets that one [`QueueGuard`] removes: another process may write to
/// the ring, and could add them faster than they are removed.
const REFUSED_MAX: u32 = 256;

/// Attempts to get the lock, with a yield each, between two checks that its holder lives.
const LOCK_YIELDS_MAX: u32 = 200;
/// Checks before giving up: the holder is stopped, or waits for a CPU on a busy machine.
const HOLDER_CHECKS_MAX: u32 = 20;

/// Bytes of a frame before a packet to be sent, which the kernel reads as TX metadata
/// (`METADATA_LEN`).
const TX_HEADROOM: usize = 64;
const _: () = assert!(TX_HEADROOM >= METADATA_LEN);

/// The thread that holds a queue's lock: the lease of the queue, and a token by which other
/// threads of its program can tell whether it lives. Process ids are not suitable: that of a
/// zombie is in use, that of another PID namespace means another process, and they do not identify
/// threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder(u64);

impl Holder {
    /// The lessor.
    pub(super) const LESSOR: Self = Self(1 << 32);
    const LEASE_SHIFT: u32 = 16;

    /// A thread of a program; bits 16 to 31 of `token` are dropped.
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

crate::atomics! {
    /// Control data, behind the frames of a queue's memory.
    #[repr(align(4096))]
    pub(super) struct Control {
        /// The [`Holder`] of the queue; 0 if none.
        lock: AtomicU64,
        /// Number of entries of `free`.
        free_count: AtomicU32,
        /// Free frames, by number.
        free: [AtomicU32; FRAMES_MAX],
    }
}

/// Parameters of a leased queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueParams {
    /// Index of the device.
    pub ifindex: u32,
    /// Number of the queue.
    pub queue: u32,
    /// Frames in its memory.
    pub frames: u32,
    /// Entries of the fill and of the completion ring.
    pub umem_ring_size: u32,
    /// Entries of the RX and of the TX ring.
    pub ring_size: u32,
    /// Frames may have partial checksums, because the device is a veth.
    pub is_veth: bool,
    /// Number of the lease, unique while it lasts; never 0.
    pub lease_id: u16,
}

/// A leased queue of another process.
pub struct LeasedQueue {
    terms: QueueParams,
    socket: Socket,
    rings: AllRings,
    memory: Mapping,
    #[expect(dead_code, reason = "kept for their drop, after the rings")]
    maps: [Maps; 2],
}

// SAFETY: only the holder of the lock, which is in memory that all share, touches the memory of
// the rings, except for the counter that `has_received` loads, which is an atomic; the socket's
// cell is never written.
unsafe impl Send for LeasedQueue {}
// SAFETY: as above.
unsafe impl Sync for LeasedQueue {}

impl LeasedQueue {
    /// Maps a queue whose parameters and descriptors its lessor has sent. Does not use the heap.
    ///
    /// # Errors
    /// `InvalidData` for terms that do not fit the memory; errors of `mmap(2)`.
    pub fn open(terms: QueueParams, socket: OwnedFd, memory: BorrowedFd<'_>) -> io::Result<Self> {
        let sizes = [terms.ring_size, terms.umem_ring_size];
        let fits = sizes.iter().all(|size| size.is_power_of_two() && *size <= 1 << 16);
        if !fits || terms.frames as usize > FRAMES_MAX {
            return Err(io::Error::from_raw_os_error(libc::EPROTO));
        }
        let memory = shared::map_sealed(memory, memory_size(terms.frames))?;
        let socket = Socket::from_fd(socket);
        let (rings, maps) = socket.all_rings(terms.umem_ring_size, terms.ring_size, terms.ring_size)?;
        Ok(Self { terms, socket, rings, memory, maps })
    }

    /// Its parameters.
    #[must_use]
    pub fn terms(&self) -> &QueueParams {
        &self.terms
    }

    pub(super) fn control(&self) -> &Control {
        // SAFETY: the memory has the length of `memory_size`: all frames, a multiple of a page,
        // and one Control behind them. It stays mapped as long as `self`, and a Control is made of
        // atomics.
        unsafe {
            &*self.memory.as_ptr().add(self.terms.frames as usize * FRAME_SIZE as usize).cast::<Control>()
        }
    }

    /// True if packets are pending.
    #[must_use]
    #[inline]
    pub fn has_received(&self) -> bool {
        !Consumer::resume(self.rings.rx).is_empty()
    }

    /// Number of pending packets. For statistics: without the lock, it may be wrong for a moment.
    #[must_use]
    pub fn rx_pending(&self) -> u32 {
        // Another thread may have moved one counter between the loads of both.
        Consumer::resume(self.rings.rx).pending().min(self.terms.ring_size)
    }

    /// The kernel's counters.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn statistics(&self) -> io::Result<Statistics> {
        statistics(self.socket.as_fd())
    }

    /// True if packets are waiting to be sent, and the kernel may not have been notified.
    #[must_use]
    pub fn has_unsent(&self) -> bool {
        // Both counters are atomics, and wrong for a moment at most.
        Producer::resume(self.rings.tx).pending() > 0
    }

    /// A number that changes when a packet is sent.
    #[must_use]
    pub fn tx_produced(&self) -> u32 {
        Producer::resume(self.rings.tx).produced()
    }

    /// Locks the queue for the caller, `own`. `is_gone` tells whether a holder has ended for good.
    /// None if another thread holds the lock for long, or if the caller's own thread does already.
    #[inline]
    pub fn lock(&self, own: Holder, is_gone: impl Fn(Holder) -> bool) -> Option<QueueGuard<'_>> {
        let lock = &self.control().lock;
        match lock.compare_exchange(0, own.0, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Some(QueueGuard::new(self)),
            Err(holder) if holder == own.0 => None,
            Err(_) => self.wait_for_lock(own, is_gone),
        }
    }

    /// As [`lock`](Self::lock), without waiting: none if a holder that is not gone has it.
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

    /// Makes the kernel send the packets in the TX ring. An error means that the device, and the
    /// queue with it, is gone.
    pub fn kick(&self) {
        // As many as their budgets need, and some for packets that are dropped, one in each. What a
        // full device leaves goes with the next packet, or with a poll of the lessor.
        let mut tx = Producer::resume(self.rings.tx);
        let kicks_max = tx.pending() / self.socket.tx_budget() + 4;
        _ = kick(&mut tx, &self.socket, kicks_max, || false);
    }

    /// The frame that contains an address, if there is one.
    #[inline]
    fn frame_of(&self, addr: u64) -> Option<u32> {
        let frame = addr / u64::from(FRAME_SIZE);
        (frame < u64::from(self.terms.frames)).then_some(frame as u32)
    }

    /// Makes all frames free to receive into or to send from; once, before any other thread uses
    /// the queue.
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

/// A locked queue. Held for some hundred nanoseconds: no system call is made with it.
pub struct QueueGuard<'a> {
    queue: &'a LeasedQueue,
    rx: Consumer<xdp_desc>,
    refused: u32,
}

impl<'a> QueueGuard<'a> {
    #[inline]
    fn new(queue: &'a LeasedQueue) -> Self {
        Self { queue, rx: Consumer::resume(queue.rings.rx), refused: 0 }
    }

    /// Number of invalid packets that this guard has removed.
    #[must_use]
    #[inline]
    pub fn refused(&self) -> u32 {
        self.refused
    }

    /// The oldest pending packet that `parse` accepts, which stays in the ring, and what `parse`
    /// returned. Removes and counts the packets before it. None if there is none, and after
    /// `REFUSED_MAX` removed packets.
    #[inline]
    pub fn peek<T>(&mut self, parse: impl Fn(&[u8]) -> Option<T>) -> Option<(T, &[u8])> {
        while self.refused < REFUSED_MAX {
            let desc = self.rx.pop()?;
            let (addr, len) = (desc.addr as usize, desc.len as usize);
            let room = FRAME_SIZE as usize - addr % FRAME_SIZE as usize;
            // Otherwise no frame of ours, or one of several fragments, which were not requested.
            if self.queue.frame_of(desc.addr).is_some() && len <= room && desc.options == 0 {
                // SAFETY: the bytes are within one frame of the memory (just checked), which stays
                // mapped as long as the queue is borrowed. The kernel has written them before it
                // produced the descriptor, and writes to the frame again only after it was
                // returned: below, where `parse` no longer has the slice, or by `pop`, which needs
                // `&mut self` and so ends the returned borrow. Any bytes are valid.
                let packet = unsafe { std::slice::from_raw_parts(self.queue.memory.as_ptr().add(addr), len) };
                if let Some(found) = parse(packet) {
                    self.rx.cancel(1);
                    return Some((found, packet));
                }
            }
            self.discard(desc.addr);
            self.refused += 1;
        }
        None
    }

    /// Removes the pending packets, valid or not: at most as many as the ring has entries.
    pub(super) fn clear(&mut self) {
        for _ in 0..self.queue.terms.ring_size {
            let Some(desc) = self.rx.pop() else { break };
            self.discard(desc.addr);
        }
    }

    /// Removes the oldest pending packet; its frame can be received into again.
    #[inline]
    pub fn pop(&mut self) {
        if let Some(desc) = self.rx.pop() {
            self.discard(desc.addr);
        }
    }

    /// Releases the entry that was taken. Gives the frame with `addr`, if there is one, to the
    /// kernel, or to the free ones if the fill ring is full.
    fn discard(&mut self, addr: u64) {
        self.rx.release();
        let Some(frame) = self.queue.frame_of(addr) else { return };
        let mut fill = Producer::resume(self.queue.rings.fill);
        if fill.push(u64::from(frame) * u64::from(FRAME_SIZE)) {
            fill.publish();
        } else {
            self.free_frame(frame);
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

    /// Lets `write` fill a free frame and return its length, and puts it into the TX ring. False,
    /// with nothing sent, if it returns none, or if there is no frame or no room. The kernel has
    /// to be [notified](LeasedQueue::kick).
    #[inline]
    pub fn send(&mut self, write: impl FnOnce(&mut [u8]) -> Option<usize>) -> bool {
        let Some(frame) = self.alloc_frame() else { return false };
        let addr = frame as usize * FRAME_SIZE as usize + TX_HEADROOM;
        // SAFETY: a free frame is in no ring, and only the holder of the lock can reach it: this
        // slice is the only one, and ends before the frame goes anywhere. `alloc_frame` has
        // checked that it is within the memory.
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

    /// Allocates a free frame, or one that was sent if there is no other.
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
                // Released first: a lost frame does no harm, a duplicate does.
                sent.release();
                if let Some(frame) = self.queue.frame_of(addr) {
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

#[cfg(test)]
#[path = "tests/leased.rs"]
mod tests;
