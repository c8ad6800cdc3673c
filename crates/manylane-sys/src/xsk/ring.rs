//! The rings that user space and the kernel share: one producer, one consumer, no lock.
//!
//! A ring is an array of slots and two counters that only grow (and wrap at 2^32): entries
//! produced, and entries consumed. Each side writes its own counter and reads the other's. The
//! ordering, for all four rings of a queue and for both directions:
//!
//! 1. *Slots and frames become visible.* The producer writes the slot (and, before it, the bytes
//!    of the frame that the slot names), then stores its counter with `Release`. The consumer
//!    loads that counter with `Acquire`, and so sees the slot and the bytes. The kernel's side is
//!    `smp_store_release` in `__xskq_prod_submit` and `smp_load_acquire` in `__xskq_cons_peek`
//!    (net/xdp/xsk_queue.h).
//! 2. *Slots are not overwritten while they are read.* The consumer reads the slot, then stores
//!    its counter with `Release`; the producer loads that counter with `Acquire` before it writes
//!    the slot again. (As a producer the kernel relies on a control dependency here: its write
//!    cannot happen before the load that allows it.)
//! 3. *Frames are not written while they are read.* Our reads of a frame that we put into the fill
//!    ring come before (1) publishes it, so the kernel writes to it later. The kernel's reads of a
//!    frame in the completion ring come before (1) publishes it, so we write to it later.
//!
//! Both sides keep a copy of the other's counter and load it again only when the copy says "full"
//! or "empty": one load and one store for each ring and batch, however many entries it has.
//!
//! The counter of the other side is not trusted: one that claims more entries than the ring has
//! counts as no progress. A slot is read only once, so that it cannot change between check and
//! use.

use std::ptr::NonNull;
use std::slice;

pub(super) use sync::Slot;
use sync::{AtomicU32, Ordering, fence};

/// Real atomics and slots.
#[cfg(not(loom))]
mod sync {
    use std::cell::UnsafeCell;
    pub(super) use std::sync::atomic::{AtomicU32, Ordering, fence};

    /// An entry of a ring; the interface is that of `loom::cell::UnsafeCell`.
    #[repr(transparent)]
    pub(in super::super) struct Slot<T>(UnsafeCell<T>);

    impl<T> Slot<T> {
        #[cfg(test)]
        pub(super) fn new(value: T) -> Self {
            Self(UnsafeCell::new(value))
        }

        pub(super) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
            read(self.0.get())
        }

        pub(super) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
            write(self.0.get())
        }
    }
}

/// The same, as `loom` models them.
#[cfg(loom)]
mod sync {
    pub(in super::super) use loom::cell::UnsafeCell as Slot;
    pub(super) use loom::sync::atomic::{AtomicU32, Ordering, fence};
}

/// Addresses of the parts of a ring.
pub(super) struct RingMemory<T> {
    producer: NonNull<AtomicU32>,
    consumer: NonNull<AtomicU32>,
    /// Flags from the kernel; missing before Linux 5.4.
    flags: Option<NonNull<AtomicU32>>,
    slots: NonNull<Slot<T>>,
    entries: u32,
}

// Not derived: the pointers can be copied even if `T` cannot.
impl<T> Clone for RingMemory<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for RingMemory<T> {}

impl<T: Copy> RingMemory<T> {
    /// # Safety
    /// The pointers are aligned and point at memory that stays mapped and initialised as long as
    /// the producer or consumer made of this: `slots` at `entries` slots, a power of two. In this
    /// process, only one producer and one consumer touch that memory, and the other side keeps to
    /// the order at the top of this file.
    pub(super) unsafe fn new(
        producer: NonNull<AtomicU32>,
        consumer: NonNull<AtomicU32>,
        flags: Option<NonNull<AtomicU32>>,
        slots: NonNull<Slot<T>>,
        entries: u32,
    ) -> Self {
        assert!(entries.is_power_of_two());
        Self { producer, consumer, flags, slots, entries }
    }

    fn slot(&self, index: u32) -> &Slot<T> {
        let at = (index & (self.entries - 1)) as usize;
        // SAFETY: the masked index is below `entries`, which is the number of slots (contract of
        // `new`).
        unsafe { self.slots.add(at).as_ref() }
    }

    /// The slots of `count` entries from `index` on (at most all of them): those up to the end of
    /// the memory, and those continued at its beginning.
    #[inline]
    fn slices(&self, index: u32, count: u32) -> [&[Slot<T>]; 2] {
        let (at, count) = (index & (self.entries - 1), count.min(self.entries));
        let straight = count.min(self.entries - at);
        // SAFETY: neither run goes beyond `entries`, which is the number of consecutive slots
        // (contract of `new`). A slot is a cell, so the other side may write to it while the slice
        // exists.
        unsafe {
            [
                slice::from_raw_parts(self.slots.add(at as usize).as_ptr().cast_const(), straight as usize),
                slice::from_raw_parts(self.slots.as_ptr().cast_const(), (count - straight) as usize),
            ]
        }
    }

    fn producer(&self) -> &AtomicU32 {
        // SAFETY: the word stays mapped, and every access to it is atomic (contract of `new`).
        unsafe { self.producer.as_ref() }
    }

    fn consumer(&self) -> &AtomicU32 {
        // SAFETY: as above.
        unsafe { self.consumer.as_ref() }
    }
}

/// The producing side.
pub(super) struct Producer<T> {
    memory: RingMemory<T>,
    /// Entries pushed so far, published or not.
    next: u32,
    /// Our counter in the ring.
    published: u32,
    /// The consumer's counter when it was last loaded.
    cached_consumer: u32,
}

// SAFETY: on our side, the memory is accessed through this value alone (contract of
// `RingMemory::new`), and entries may cross threads.
unsafe impl<T: Send> Send for Producer<T> {}

impl<T: Copy> Producer<T> {
    /// The producer of a new ring, whose counters are zero.
    pub(super) fn new(memory: RingMemory<T>) -> Self {
        Self { memory, next: 0, published: 0, cached_consumer: 0 }
    }

    /// Takes over a ring from an earlier producer of ours, which had published all its entries.
    /// The caller must have exclusive access, ordered after the earlier producer (a lock).
    #[cfg_attr(loom, allow(dead_code, reason = "not in a model"))]
    #[inline]
    pub(super) fn resume(memory: RingMemory<T>) -> Self {
        let next = memory.producer().load(Ordering::Relaxed);
        let consumed = memory.consumer().load(Ordering::Acquire);
        // An invalid counter counts as a full ring.
        let there = next.wrapping_sub(consumed).min(memory.entries);
        Self { memory, next, published: next, cached_consumer: next.wrapping_sub(there) }
    }

    fn is_full(&self) -> bool {
        self.next.wrapping_sub(self.cached_consumer) == self.memory.entries
    }

    /// True if an entry can be pushed.
    #[inline]
    pub(super) fn has_room(&mut self) -> bool {
        if self.is_full() {
            self.refresh();
        }
        !self.is_full()
    }

    /// Pushes an entry, which the consumer sees after [`publish`](Self::publish); false if the
    /// ring is full.
    #[inline]
    pub(super) fn push(&mut self, value: T) -> bool {
        if !self.has_room() {
            return false;
        }
        // SAFETY: the slot is free: the consumer has released it (2), and only we write to slots.
        self.memory.slot(self.next).with_mut(|slot| unsafe { slot.write(value) });
        self.next = self.next.wrapping_add(1);
        true
    }

    /// Pushes the result of `make` for each item, as long as it returns one and there is room;
    /// returns the number pushed.
    #[inline]
    pub(super) fn push_from<I>(&mut self, items: &[I], mut make: impl FnMut(&I) -> Option<T>) -> u32 {
        let room =
            |producer: &Self| producer.memory.entries - producer.next.wrapping_sub(producer.cached_consumer);
        let max = u32::try_from(items.len()).unwrap_or(u32::MAX);
        if room(self) < max {
            self.refresh();
        }
        let (memory, first) = (self.memory, self.next);
        let mut put = 0;
        'all: for run in memory.slices(first, room(self).min(max)) {
            for (slot, item) in run.iter().zip(&items[put as usize..]) {
                let Some(value) = make(item) else { break 'all };
                // SAFETY: as in `push`: the runs have as many slots as there is room for.
                slot.with_mut(|slot| unsafe { slot.write(value) });
                put += 1;
            }
        }
        self.next = first.wrapping_add(put);
        put
    }

    /// Tells the producer that at most `max` entries are pending or unpublished. The caller knows
    /// that from what the consumer has passed on since, which it read with `Acquire`. Saves
    /// reading a counter that another core writes.
    ///
    /// Rule (2), that slots are not overwritten while they are read, still holds: the consumer
    /// takes entries in order, and has read an entry before it passes on what the entry was for,
    /// whether or not it has stored its counter yet.
    #[cfg_attr(loom, allow(dead_code, reason = "not in a model"))]
    #[inline]
    pub(super) fn assume_pending_max(&mut self, max: u32) {
        let max = max.max(self.next.wrapping_sub(self.published));
        if self.next.wrapping_sub(self.cached_consumer) > max {
            self.cached_consumer = self.next.wrapping_sub(max);
        }
    }

    /// Takes the last entry back, if it was not published.
    pub(super) fn pop_unpublished(&mut self) -> Option<T> {
        if self.next == self.published {
            return None;
        }
        self.next = self.next.wrapping_sub(1);
        // SAFETY: we have written the slot, and only we write to slots; the consumer does not know
        // of it.
        Some(self.memory.slot(self.next).with(|slot| unsafe { slot.read() }))
    }

    /// Loads the consumer's counter. `Acquire`: it no longer reads slots that it has released (2).
    fn refresh(&mut self) {
        let consumed = self.memory.consumer().load(Ordering::Acquire);
        // At most the published entries can have been consumed since.
        if consumed.wrapping_sub(self.cached_consumer) <= self.published.wrapping_sub(self.cached_consumer) {
            self.cached_consumer = consumed;
        }
    }

    /// Makes all pushed entries visible to the consumer.
    #[inline]
    pub(super) fn publish(&mut self) {
        if self.published != self.next {
            // Release: a consumer that sees the counter sees the slots, and the frames they name
            // (1).
            self.memory.producer().store(self.next, Ordering::Release);
            self.published = self.next;
        }
    }

    /// Number of entries ever pushed.
    #[cfg_attr(loom, allow(dead_code, reason = "not in a model"))]
    pub(super) fn produced(&self) -> u32 {
        self.next
    }

    /// True if entries are unconsumed, as far as this side knows. Does not load the consumer's
    /// counter.
    #[cfg_attr(loom, allow(dead_code, reason = "not in a model"))]
    #[inline]
    pub(super) fn has_unconsumed(&self) -> bool {
        self.next != self.cached_consumer
    }

    /// Published entries that the consumer has not consumed yet.
    pub(super) fn pending(&mut self) -> u32 {
        self.refresh();
        self.published.wrapping_sub(self.cached_consumer)
    }

    /// The unpublished entries, oldest first; with `published`, also the published ones that were
    /// not consumed.
    pub(super) fn unconsumed(&mut self, published: bool) -> impl Iterator<Item = T> + '_ {
        self.refresh();
        let first = if published { self.cached_consumer } else { self.published };
        (0..self.next.wrapping_sub(first)).map(move |at| {
            let slot = self.memory.slot(first.wrapping_add(at));
            // SAFETY: we have written the slot, and only we write to slots.
            slot.with(|slot| unsafe { slot.read() })
        })
    }

    /// True if the kernel wants to be notified that the ring has entries; none if it has no such
    /// flag.
    ///
    /// The kernel sets the flag and then stops polling; we publish and then read the flag. If our
    /// load overtook our store, which even x86 allows, both sides could miss each other: we see
    /// the flag still clear, the kernel the ring still empty. The fence prevents that.
    pub(super) fn needs_wakeup(&self) -> Option<bool> {
        let flags = self.memory.flags?;
        fence(Ordering::SeqCst);
        // SAFETY: the word stays mapped, and every access to it is atomic (contract of
        // `RingMemory::new`).
        let flags = unsafe { flags.as_ref() }.load(Ordering::Relaxed);
        Some(flags & libc::XDP_RING_NEED_WAKEUP != 0)
    }
}

/// The consuming side.
pub(super) struct Consumer<T> {
    memory: RingMemory<T>,
    /// Entries popped so far, released or not.
    next: u32,
    /// Our counter in the ring.
    released: u32,
    /// The producer's counter when it was last loaded.
    cached_producer: u32,
}

// SAFETY: as for the producer.
unsafe impl<T: Send> Send for Consumer<T> {}

impl<T: Copy> Consumer<T> {
    /// The consumer of a new ring, whose counters are zero.
    pub(super) fn new(memory: RingMemory<T>) -> Self {
        Self { memory, next: 0, released: 0, cached_producer: 0 }
    }

    /// Takes over a ring from an earlier consumer of ours, which had released all its entries. The
    /// caller must have exclusive access, ordered after the earlier consumer (a lock).
    #[cfg_attr(loom, allow(dead_code, reason = "not in a model"))]
    #[inline]
    pub(super) fn resume(memory: RingMemory<T>) -> Self {
        let next = memory.consumer().load(Ordering::Relaxed);
        Self { memory, next, released: next, cached_producer: next }
    }

    /// Size of the ring in entries.
    pub(super) fn entries(&self) -> u32 {
        self.memory.entries
    }

    /// True if there is no entry to take.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.cached_producer == self.next && self.load() == self.next
    }

    /// Entries that were pending at the last load of the counter, and were not popped since. Loads
    /// nothing.
    #[inline]
    pub(super) fn cached_pending(&self) -> u32 {
        self.cached_producer.wrapping_sub(self.next)
    }

    /// Pending entries.
    #[cfg_attr(loom, allow(dead_code, reason = "not in a model"))]
    pub(super) fn pending(&self) -> u32 {
        self.load().wrapping_sub(self.next)
    }

    /// Takes the oldest entry; the producer may reuse its slot after [`release`](Self::release).
    #[inline]
    pub(super) fn pop(&mut self) -> Option<T> {
        if self.cached_producer == self.next {
            self.cached_producer = self.load();
            if self.cached_producer == self.next {
                return None;
            }
        }
        // SAFETY: the producer has published the slot (1), and does not write to it before we
        // release it (2). It was written as a `T`, for which any bytes are valid if the writer is
        // the kernel. Volatile: read once, whatever the other side does.
        let value = self.memory.slot(self.next).with(|slot| unsafe { slot.read_volatile() });
        self.next = self.next.wrapping_add(1);
        Some(value)
    }

    /// Takes up to `max` entries for as long as `each` returns true; returns the number popped. An
    /// entry for which it returns false stays.
    #[inline]
    pub(super) fn pop_while(&mut self, max: u32, mut each: impl FnMut(T) -> bool) -> u32 {
        if self.cached_producer.wrapping_sub(self.next) < max {
            self.cached_producer = self.load();
        }
        let there = self.cached_producer.wrapping_sub(self.next).min(max);
        let (memory, first) = (self.memory, self.next);
        let mut popped = 0;
        while popped < there {
            let slot = memory.slot(first.wrapping_add(popped));
            // SAFETY: as in `pop`: the slot is a published one.
            let value = slot.with(|slot| unsafe { slot.read_volatile() });
            if !each(value) {
                break;
            }
            popped += 1;
        }
        self.next = first.wrapping_add(popped);
        popped
    }

    /// Takes an entry for each element of `to`, for as long as there are entries and `fill`
    /// returns true; returns the number popped.
    #[inline]
    pub(super) fn pop_into<P>(&mut self, to: &mut [P], mut fill: impl FnMut(T, &mut P) -> bool) -> u32 {
        let max = u32::try_from(to.len()).unwrap_or(u32::MAX);
        if self.cached_producer.wrapping_sub(self.next) < max {
            self.cached_producer = self.load();
        }
        let (memory, first) = (self.memory, self.next);
        let mut popped = 0;
        'all: for run in memory.slices(first, self.cached_producer.wrapping_sub(first).min(max)) {
            for (slot, place) in run.iter().zip(&mut to[popped as usize..]) {
                // SAFETY: as in `pop`: the slot is a published one.
                let value = slot.with(|slot| unsafe { slot.read_volatile() });
                if !fill(value, place) {
                    break 'all;
                }
                popped += 1;
            }
        }
        self.next = first.wrapping_add(popped);
        popped
    }

    /// Puts the newest `count` popped and unreleased entries back: they are popped and read again.
    pub(super) fn cancel(&mut self, count: u32) {
        let unreleased = self.next.wrapping_sub(self.released);
        self.next = self.next.wrapping_sub(count.min(unreleased));
    }

    /// The producer's counter, or ours if that one is invalid. `Acquire`: the slots, and the bytes
    /// of the frames that they name, are visible with it (1, 3).
    fn load(&self) -> u32 {
        let put = self.memory.producer().load(Ordering::Acquire);
        if put.wrapping_sub(self.released) > self.memory.entries
            || put.wrapping_sub(self.released) < self.next.wrapping_sub(self.released)
        {
            return self.next;
        }
        put
    }

    /// Returns the slots of all popped entries to the producer.
    #[inline]
    pub(super) fn release(&mut self) {
        self.release_all_but(0);
    }

    /// As [`release`](Self::release), but keeps the slots of the newest `count` popped entries. For
    /// the producer, these are still pending.
    #[inline]
    pub(super) fn release_all_but(&mut self, count: u32) {
        let unreleased = self.next.wrapping_sub(self.released);
        if count < unreleased {
            self.released = self.next.wrapping_sub(count);
            // Release: our reads of the slots come before later writes of the producer (2).
            self.memory.consumer().store(self.released, Ordering::Release);
        }
    }
}

#[cfg(test)]
#[path = "tests/ring.rs"]
mod tests;
#[cfg(all(test, not(loom)))]
pub(super) use tests::MockRing;
