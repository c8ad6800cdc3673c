//! Buffers for the kernel to select: a ring of their addresses, and the owner of each.
//!
//! There are as many slots as buffers, a power of two, and buffer k is always in slot k. The
//! kernel selects buffers in the order of the slots, each for one message (`io_ring_buffer_select`
//! in io_uring/kbuf.c), and its completions name them in that order. So they are also returned in
//! that order: the slots are written once, and returning a batch is one store.
//!
//! ```text
//!        tail - count        head                   tail
//!  ──────────┼────────────────┼──────────────────────┼──►   buffers, counted on and on
//!            │ the batch's    │ the kernel's         │
//! ```
//!
//! Our reads of a buffer come before the store of the tail, with `Release`, which the kernel loads
//! with `smp_load_acquire`. So our last reads of a buffer are over when the kernel sees the tail.

use std::io;
use std::mem::offset_of;
use std::sync::atomic::{AtomicU16, Ordering};

use super::abi::{Buf, BufReg, RecvmsgOut};
use super::setup::Ring;
use crate::addr::SockAddr;
use crate::map::Mapping;

/// Maximum number of buffers of a ring (`io_register_pbuf_ring`).
pub(super) const BUFFERS_MAX: usize = 1 << 15;

/// Offset of a buffer in its first cache line. The payload, behind the kernel's header
/// ([`MessageHeader`], and three more lines with control messages), then starts at a line.
const LEADING_PAD: usize = 16;
/// Distance of large buffers, in bytes: odd multiples of a cache line, as in the message ring.
const STAGGER_BYTES: usize = 192;

/// The kernel's header of a message, before the control messages and the payload.
#[repr(C)]
pub(super) struct MessageHeader {
    pub(super) out: RecvmsgOut,
    pub(super) peer: SockAddr,
}

/// Sizes of the parts of a buffer, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BufferLayout {
    pub(super) control: usize,
    pub(super) payload: usize,
}

impl BufferLayout {
    /// Offset of the payload.
    #[inline]
    pub(super) fn payload_offset(self) -> usize {
        size_of::<MessageHeader>() + self.control
    }

    fn len(self) -> usize {
        self.payload_offset() + self.payload
    }

    fn stride(self) -> usize {
        (self.len() + LEADING_PAD).next_multiple_of(64) + if self.payload >= 4096 { STAGGER_BYTES } else { 0 }
    }
}

/// Owners of the buffers. The counters wrap.
#[derive(Debug)]
struct Ownership {
    mask: u16,
    /// The next buffer that the kernel fills.
    head: u16,
    /// Number of buffers given to the kernel so far.
    tail: u16,
}

impl Ownership {
    /// The kernel owns all buffers.
    fn new(count: usize) -> Self {
        Self { mask: (count - 1) as u16, head: 0, tail: count as u16 }
    }

    /// Records that the kernel has filled buffer `id`; false if it is not the next one.
    #[inline]
    fn consume(&mut self, id: u16) -> bool {
        let is_next = id == self.head & self.mask && self.head != self.tail;
        self.head = self.head.wrapping_add(is_next.into());
        is_next
    }

    /// Returns all consumed buffers to the kernel.
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
            // SAFETY: the mapping has `count` entries, and the kernel does not read them yet. The
            // tail, which is part of the first entry, is not written.
            unsafe {
                let entry = buffers.ring.as_ptr().cast::<Buf>().add(id);
                (&raw mut (*entry).addr).write(addr);
                (&raw mut (*entry).len).write(shape.len() as u32);
                (&raw mut (*entry).bid).write(id as u16);
            }
        }
        let what = BufReg {
            ring_addr: buffers.ring.as_ptr().expose_provenance() as u64,
            ring_entries: count as u32,
            ..BufReg::default()
        };
        // SAFETY: `buffers` keeps both mappings. It is dropped together with `ring`, and the kernel
        // fills buffers only in calls on that.
        unsafe { ring.register_buffers(&what) }?;
        store_tail(&buffers.ring, buffers.ownership.tail);
        Ok(buffers)
    }

    /// Takes buffer `id`, which the kernel has filled, for the caller until
    /// [`release`](Self::release); false if it is not the next one.
    #[inline]
    pub(super) fn consume(&mut self, id: u16) -> bool {
        self.ownership.consume(id)
    }

    /// Returns all consumed buffers to the kernel.
    #[inline]
    pub(super) fn release(&mut self) {
        self.ownership.release();
        store_tail(&self.ring, self.ownership.tail);
    }

    #[inline]
    pub(super) fn layout(&self) -> BufferLayout {
        self.layout
    }

    /// Address of buffer `id`, masked: always inside the mapping.
    #[inline]
    fn ptr_at(&self, id: u16) -> *mut u8 {
        let start = usize::from(id & self.ownership.mask) * self.stride + LEADING_PAD;
        self.memory.as_ptr().wrapping_add(start)
    }

    /// The kernel's header of the message in the consumed buffer `id`.
    #[inline]
    pub(super) fn header(&self, id: u16) -> &MessageHeader {
        // SAFETY: the buffer is inside the mapping, which started zeroed, at a multiple of 16; any
        // bytes are a valid header. The kernel writes to the buffer only while it owns it: from
        // `release`, which needs `&mut self` and so ends this borrow, to the completion by which
        // it was consumed.
        unsafe { &*self.ptr_at(id).cast() }
    }

    /// True if the message in the consumed buffer `id` was truncated.
    #[inline]
    pub(super) fn is_truncated(&self, id: u16) -> bool {
        self.header(id).out.flags & libc::MSG_TRUNC as u32 != 0
    }

    /// The control messages in the consumed buffer `id`: `len` bytes, or as many as fit.
    #[inline]
    pub(super) fn control(&self, id: u16, len: usize) -> &[u8] {
        let start = self.ptr_at(id).wrapping_add(size_of::<MessageHeader>());
        // SAFETY: as for the header; the length is limited to this part of the buffer.
        unsafe { std::slice::from_raw_parts(start, len.min(self.layout.control)) }
    }

    /// The payload, likewise.
    #[inline]
    pub(super) fn payload(&self, id: u16, len: usize) -> &[u8] {
        let start = self.ptr_at(id).wrapping_add(self.layout.payload_offset());
        // SAFETY: as for the control messages.
        unsafe { std::slice::from_raw_parts(start, len.min(self.layout.payload)) }
    }
}

/// Publishes the number of entries given to the kernel.
#[inline]
fn store_tail(ring: &Mapping, given: u16) {
    // SAFETY: the word is inside the first entry of the mapping and aligned; the kernel only loads
    // it.
    let tail = unsafe { AtomicU16::from_ptr(ring.as_ptr().add(offset_of!(Buf, tail)).cast()) };
    tail.store(given, Ordering::Release);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// For any completions: a buffer has one owner, and none is lost or duplicated.
        #[test]
        fn each_buffer_has_one_owner(
            rounds in 0_usize..5000,
            steps in prop::collection::vec(prop::option::of(0_u16..20), 0..200),
        ) {
            let mut buffer_ownership = Ownership::new(16);
            // Start from any value of the counters.
            for round in 0..rounds {
                prop_assert!(buffer_ownership.consume((round % 16) as u16));
                buffer_ownership.release();
            }
            let (mut next, mut ours) = (rounds % 16, 0);
            for step in steps {
                if let Some(id) = step {
                    let can_be = usize::from(id) == next && ours < 16;
                    prop_assert_eq!(buffer_ownership.consume(id), can_be);
                    if can_be {
                        (next, ours) = ((next + 1) % 16, ours + 1);
                    }
                } else {
                    buffer_ownership.release();
                    ours = 0;
                }
                let kernels = buffer_ownership.tail.wrapping_sub(buffer_ownership.head);
                prop_assert_eq!(usize::from(kernels), 16 - ours);
            }
        }
    }

    #[test]
    fn all_buffers_can_be_in_the_batch() {
        let mut buffer_ownership = Ownership::new(BUFFERS_MAX);
        for round in 0..5 {
            (0..BUFFERS_MAX).for_each(|id| assert!(buffer_ownership.consume(id as u16), "{round}: {id}"));
            assert!(!buffer_ownership.consume(0));
            buffer_ownership.release();
        }
    }
}
