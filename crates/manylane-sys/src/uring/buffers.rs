//! Buffers that the kernel picks from: a ring of their addresses, and who owns each.
//!
//! The ring has a slot for each buffer, so that it is never full. The kernel takes addresses at its head, in order; we add
//! at its tail. What we write (the entry) comes before the tail, which is stored with `Release` and loaded by the kernel with
//! `smp_load_acquire` (`io_ring_buffer_select` in io_uring/kbuf.c): whoever sees the tail sees the entries, and our last
//! reads of the buffer are over.

use std::io;
use std::mem::offset_of;
use std::sync::atomic::{AtomicU16, Ordering};

use super::abi::{Buf, BufReg};
use super::setup::Ring;
use crate::map::Mapping;

/// Most buffers of one ring (`io_register_pbuf_ring`).
pub(super) const MOST: usize = 1 << 15;

/// Who owns each buffer: the kernel, or the batch.
#[derive(Debug)]
pub(super) struct Owners {
    is_ours: Box<[bool]>,
}

impl Owners {
    /// All are the batch's, to be given.
    pub(super) fn new(buffers: usize) -> Self {
        Self { is_ours: vec![true; buffers].into_boxed_slice() }
    }

    /// The kernel says that it has filled `id`: false if it cannot be so.
    #[inline]
    pub(super) fn take(&mut self, id: u16) -> bool {
        match self.is_ours.get_mut(usize::from(id)) {
            Some(is_ours) if !*is_ours => {
                *is_ours = true;
                true
            }
            _ => false,
        }
    }

    /// `id` is the kernel's from now on: false if it was already.
    #[inline]
    pub(super) fn give(&mut self, id: u16) -> bool {
        match self.is_ours.get_mut(usize::from(id)) {
            Some(is_ours) if *is_ours => {
                *is_ours = false;
                true
            }
            _ => false,
        }
    }
}

/// A buffer that is the batch's: as long as this is there, the kernel does not write to it.
#[derive(Debug)]
pub(super) struct Held(u16);

/// Where a buffer starts within its first cache line: the payload behind what the kernel says of it (48 bytes, and with
/// control messages three lines more) then starts a line of its own.
pub(super) const LEAD: usize = 16;

/// The buffers of one ring.
pub(super) struct Buffers {
    ring: Mapping,
    memory: Mapping,
    stride: usize,
    len: usize,
    mask: u16,
    /// Buffers given so far; the ring is told by [`publish`](Self::publish).
    tail: u16,
    owners: Owners,
}

impl Buffers {
    /// Maps `count` buffers of `len` bytes, `stride` apart (with room for [`LEAD`] bytes more), registers them with `ring`, and gives all to the kernel.
    pub(super) fn new(ring: &Ring, count: usize, len: usize, stride: usize) -> io::Result<Self> {
        let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
        if !(1..=MOST).contains(&count) || len + LEAD > stride {
            return Err(invalid());
        }
        let entries = count.next_power_of_two();
        let memory = Mapping::new(stride.checked_mul(count).ok_or_else(invalid)?)?;
        let map = Mapping::new(entries * size_of::<Buf>())?;
        ring.register_buffers(&BufReg {
            ring_addr: map.as_ptr().expose_provenance() as u64,
            ring_entries: entries as u32,
            ..BufReg::default()
        })?;
        let owners = Owners::new(count);
        let mut buffers =
            Self { ring: map, memory, stride, len, mask: (entries - 1) as u16, tail: 0, owners };
        (0..count).for_each(|id| buffers.give(Held(id as u16)));
        buffers.publish();
        Ok(buffers)
    }

    /// The kernel has filled buffer `id`; none if that cannot be.
    #[inline]
    pub(super) fn take(&mut self, id: u16) -> Option<Held> {
        self.owners.take(id).then_some(Held(id))
    }

    /// Gives a buffer to the kernel, as soon as it is told.
    #[inline]
    pub(super) fn give(&mut self, Held(id): Held) {
        if !self.owners.give(id) {
            return;
        }
        let slot = usize::from(self.tail & self.mask);
        let addr = self.at(id).expose_provenance() as u64;
        // SAFETY: the masked index is below the number of entries, which the mapping has. The kernel reads an entry only
        // once the tail has passed it; the entry there before was consumed: there are no more entries than buffers, and this
        // buffer is not in the ring (its owner was the batch). The tail, which shares the first entry, is not touched.
        unsafe {
            let entry = self.ring.as_ptr().cast::<Buf>().add(slot);
            (&raw mut (*entry).addr).write(addr);
            (&raw mut (*entry).len).write(self.len as u32);
            (&raw mut (*entry).bid).write(id);
        }
        self.tail = self.tail.wrapping_add(1);
    }

    /// Tells the kernel of all that it was given.
    #[inline]
    pub(super) fn publish(&self) {
        store_tail(&self.ring, self.tail);
    }

    fn at(&self, id: u16) -> *mut u8 {
        self.memory.as_ptr().wrapping_add(usize::from(id) * self.stride + LEAD)
    }

    /// The bytes of a buffer.
    ///
    /// # Panics
    /// If it is of a ring with more buffers.
    #[inline]
    pub(super) fn bytes(&self, held: &Held) -> &[u8] {
        assert!(usize::from(held.0) < self.owners.is_ours.len());
        // SAFETY: checked above to lie inside the mapping, which started zeroed. The kernel writes to the buffer only while it
        // owns it: from `give`, which takes what this borrows, to the completion that `take` made it from.
        unsafe { std::slice::from_raw_parts(self.at(held.0), self.len) }
    }
}

/// Tells the kernel how many entries `ring` was given.
#[inline]
pub(super) fn store_tail(ring: &Mapping, given: u16) {
    // SAFETY: the word lies inside the first entry of the mapping and is aligned; the kernel only loads it.
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
        fn each_buffer_has_one_owner(steps in prop::collection::vec((any::<bool>(), 0_u16..20), 0..200)) {
            let mut owners = Owners::new(16);
            let mut model = [true; 16];
            for (takes, id) in steps {
                let is_ours = model.get(usize::from(id)).copied();
                let done = if takes { owners.take(id) } else { owners.give(id) };
                prop_assert_eq!(done, is_ours == Some(!takes));
                if done {
                    model[usize::from(id)] = takes;
                }
                prop_assert_eq!(&*owners.is_ours, &model[..]);
            }
        }
    }
}
