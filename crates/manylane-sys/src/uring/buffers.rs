//! Buffers that the kernel picks from: a ring of their addresses, and who owns each.
//!
//! There are as many slots as buffers, a power of two, and buffer k is in slot k for good. The
//! kernel picks buffers in the order of the slots, each for one message (`io_ring_buffer_select` in
//! io_uring/kbuf.c), and its completions tell of them in that order. So they also come back in that
//! order: the slots are written once, and to give back a batch is one store.
//!
//! ```text
//!        tail - count        head                   tail
//!  ──────────┼────────────────┼──────────────────────┼──►   buffers, counted on and on
//!            │ the batch's    │ the kernel's         │
//! ```
//!
//! What we read of a buffer comes before the tail, which is stored with `Release` and loaded by the
//! kernel with `smp_load_acquire`: whoever sees the tail finds our last reads of the buffer over.

use std::io;
use std::mem::offset_of;
use std::sync::atomic::{AtomicU16, Ordering};

use super::abi::{Buf, BufReg, RecvmsgOut};
use super::setup::Ring;
use crate::addr::SockAddr;
use crate::map::Mapping;

/// Most buffers of one ring (`io_register_pbuf_ring`).
pub(super) const BUFFERS_MAX: usize = 1 << 15;

/// Where a buffer starts within its first cache line: the payload behind what the kernel says of it
/// ([`MessageHeader`], and with control messages three lines more) then starts a line of its own.
const LEADING_PAD: usize = 16;
/// Large buffers start at odd multiples of a cache line apart, as those of the message ring.
const STAGGER: usize = 192;

/// What the kernel says of a message, before control messages and payload.
#[repr(C)]
pub(super) struct MessageHeader {
    pub(super) out: RecvmsgOut,
    pub(super) peer: SockAddr,
}

/// Parts of a buffer, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BufferLayout {
    pub(super) control: usize,
    pub(super) payload: usize,
}

impl BufferLayout {
    /// Where the payload starts.
    #[inline]
    pub(super) fn payload_offset(self) -> usize {
        size_of::<MessageHeader>() + self.control
    }

    fn len(self) -> usize {
        self.payload_offset() + self.payload
    }

    fn stride(self) -> usize {
        (self.len() + LEADING_PAD).next_multiple_of(64) + if self.payload >= 4096 { STAGGER } else { 0 }
    }
}

/// Whose the buffers are. Counters go on and on, and wrap.
#[derive(Debug)]
struct Ownership {
    mask: u16,
    /// The next one that the kernel fills.
    head: u16,
    /// Given to the kernel so far.
    tail: u16,
}

impl Ownership {
    /// All are the kernel's.
    fn new(count: usize) -> Self {
        Self { mask: (count - 1) as u16, head: 0, tail: count as u16 }
    }

    /// The kernel says that it has filled buffer `id`: false if that cannot be so.
    #[inline]
    fn consume(&mut self, id: u16) -> bool {
        let is_next = id == self.head & self.mask && self.head != self.tail;
        self.head = self.head.wrapping_add(is_next.into());
        is_next
    }

    /// All that were taken are the kernel's again.
    #[inline]
    fn release(&mut self) {
        self.tail = self.head.wrapping_add(self.mask).wrapping_add(1);
    }
}

/// The buffers of one ring.
pub(super) struct Buffers {
    ring: Mapping,
    memory: Mapping,
    layout: BufferLayout,
    stride: usize,
    ownership: Ownership,
}

impl Buffers {
    /// Maps `count` buffers, a power of two, registers them with `ring`, and gives all to the
    /// kernel.
    pub(super) fn new(ring: &Ring, count: usize, shape: BufferLayout) -> io::Result<Self> {
        let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
        if !count.is_power_of_two() || count > BUFFERS_MAX {
            return Err(invalid());
        }
        let stride = shape.stride();
        let memory = Mapping::new(stride.checked_mul(count).ok_or_else(invalid)?)?;
        let map = Mapping::new(count * size_of::<Buf>())?;
        let buffers = Self { ring: map, memory, layout: shape, stride, ownership: Ownership::new(count) };
        for id in 0..count {
            let addr = buffers.ptr_at(id as u16).expose_provenance() as u64;
            // SAFETY: the mapping has so many entries, and nobody reads them yet. The tail, which
            // shares the first, is not touched.
            unsafe {
                let entry = buffers.ring.as_ptr().cast::<Buf>().add(id);
                (&raw mut (*entry).addr).write(addr);
                (&raw mut (*entry).len).write(shape.len() as u32);
                (&raw mut (*entry).bid).write(id as u16);
            }
        }
        ring.register_buffers(&BufReg {
            ring_addr: buffers.ring.as_ptr().expose_provenance() as u64,
            ring_entries: count as u32,
            ..BufReg::default()
        })?;
        store_tail(&buffers.ring, buffers.ownership.tail);
        Ok(buffers)
    }

    /// The kernel has filled buffer `id`, the caller's until [`release`](Self::release); false if
    /// that cannot be.
    #[inline]
    pub(super) fn consume(&mut self, id: u16) -> bool {
        self.ownership.consume(id)
    }

    /// Gives all that were taken to the kernel.
    #[inline]
    pub(super) fn release(&mut self) {
        self.ownership.release();
        store_tail(&self.ring, self.ownership.tail);
    }

    #[inline]
    pub(super) fn layout(&self) -> BufferLayout {
        self.layout
    }

    /// Where buffer `id` is, of so many: always inside the mapping.
    #[inline]
    fn ptr_at(&self, id: u16) -> *mut u8 {
        let start = usize::from(id & self.ownership.mask) * self.stride + LEADING_PAD;
        self.memory.as_ptr().wrapping_add(start)
    }

    /// What the kernel says of the message in buffer `id`, which was taken.
    #[inline]
    pub(super) fn header(&self, id: u16) -> &MessageHeader {
        // SAFETY: the buffer lies inside the mapping, which started zeroed, at a multiple of 16;
        // all values of its bytes are a head. The kernel writes to it only while it owns it: from
        // `release`, which takes what this borrows, to the completion by which it was taken.
        unsafe { &*self.ptr_at(id).cast() }
    }

    /// Whether the message in buffer `id`, which was taken, was cut off at its end.
    #[inline]
    pub(super) fn is_truncated(&self, id: u16) -> bool {
        self.header(id).out.flags & libc::MSG_TRUNC as u32 != 0
    }

    /// `len` bytes of the control messages in buffer `id`, which was taken, or as many as fit.
    #[inline]
    pub(super) fn control(&self, id: u16, len: usize) -> &[u8] {
        let start = self.ptr_at(id).wrapping_add(size_of::<MessageHeader>());
        // SAFETY: as for the head; the length is cut at the end of this part.
        unsafe { std::slice::from_raw_parts(start, len.min(self.layout.control)) }
    }

    /// The same of the payload.
    #[inline]
    pub(super) fn payload(&self, id: u16, len: usize) -> &[u8] {
        let start = self.ptr_at(id).wrapping_add(self.layout.payload_offset());
        // SAFETY: as for the control messages.
        unsafe { std::slice::from_raw_parts(start, len.min(self.layout.payload)) }
    }
}

/// Tells the kernel how many entries `ring` was given.
#[inline]
pub(super) fn store_tail(ring: &Mapping, given: u16) {
    // SAFETY: the word lies inside the first entry of the mapping and is aligned; the kernel only
    // loads it.
    let tail = unsafe { AtomicU16::from_ptr(ring.as_ptr().add(offset_of!(Buf, tail)).cast()) };
    tail.store(given, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever completions claim: a buffer has one owner, and none is lost or there twice.
        #[test]
        fn each_buffer_has_one_owner(
            rounds in 0_usize..5000,
            steps in prop::collection::vec(prop::option::of(0_u16..20), 0..200),
        ) {
            let mut turns = Ownership::new(16);
            // The counters have any value.
            for round in 0..rounds {
                prop_assert!(turns.consume((round % 16) as u16));
                turns.release();
            }
            let (mut next, mut ours) = (rounds % 16, 0);
            for step in steps {
                if let Some(id) = step {
                    let can_be = usize::from(id) == next && ours < 16;
                    prop_assert_eq!(turns.consume(id), can_be);
                    if can_be {
                        (next, ours) = ((next + 1) % 16, ours + 1);
                    }
                } else {
                    turns.release();
                    ours = 0;
                }
                let kernels = turns.tail.wrapping_sub(turns.head);
                prop_assert_eq!(usize::from(kernels), 16 - ours);
            }
        }
    }

    #[test]
    fn all_of_them_can_be_the_batchs() {
        let mut turns = Ownership::new(BUFFERS_MAX);
        for round in 0..5 {
            (0..BUFFERS_MAX).for_each(|id| assert!(turns.consume(id as u16), "{round}: {id}"));
            assert!(!turns.consume(0));
            turns.release();
        }
    }
}
