//! Rings in plain memory: both ends on one thread, on two, and under the model checker.

use std::ptr::NonNull;

use super::sync::AtomicU32;
use super::{Consumer, Producer, RingMemory, Slot};

/// Stores a taken value.
fn store<T>(value: T, place: &mut T) -> bool {
    *place = value;
    true
}

/// A ring in plain memory, with the same two ends as one of the kernel's.
pub(in super::super) struct MockRing<T> {
    producer: AtomicU32,
    consumer: AtomicU32,
    pub(in super::super) flags: AtomicU32,
    slots: Vec<Slot<T>>,
}

impl<T: Copy> MockRing<T> {
    pub(in super::super) fn new(entries: u32, empty: T) -> Self {
        Self {
            producer: AtomicU32::new(0),
            consumer: AtomicU32::new(0),
            flags: AtomicU32::new(0),
            slots: (0..entries).map(|_| Slot::new(empty)).collect(),
        }
    }

    /// Its memory. The caller keeps the ring alive and at its address.
    pub(in super::super) fn memory(&self) -> RingMemory<T> {
        // SAFETY: all of it is memory of this ring, with this number of slots, accessed through
        // atomics and cells only; callers keep the ring (see above).
        unsafe {
            RingMemory::new(
                NonNull::from(&self.producer),
                NonNull::from(&self.consumer),
                Some(NonNull::from(&self.flags)),
                NonNull::from(self.slots.as_slice()).cast(),
                self.slots.len() as u32,
            )
        }
    }

    /// Its counters: produced, consumed.
    #[cfg(not(loom))]
    pub(in super::super) fn counters(&self) -> [&AtomicU32; 2] {
        [&self.producer, &self.consumer]
    }

    /// Its two ends. The caller keeps the ring alive and at its address, and calls this only once.
    pub(in super::super) fn split(&self) -> (Producer<T>, Consumer<T>) {
        let [of_producer, of_consumer] = [(); 2].map(|()| self.memory());
        (Producer::new(of_producer), Consumer::new(of_consumer))
    }
}

#[cfg(not(loom))]
mod plain {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn ring_entries_are_consumed_in_order_once_published() {
        let ring = MockRing::new(4, 0_u64);
        let (mut producer, mut consumer) = ring.split();
        assert!(consumer.is_empty() && consumer.pop().is_none());
        for value in 0..4 {
            assert!(producer.push(value));
        }
        assert!(!producer.push(4), "full");
        assert!(consumer.is_empty(), "not published");
        producer.publish();
        assert_eq!(producer.pending(), 4);
        assert!(!consumer.is_empty());
        assert_eq!((consumer.pop(), consumer.pop()), (Some(0), Some(1)));
        assert!(!producer.push(4), "taken but not released");
        consumer.release();
        assert!(producer.push(4) && producer.push(5) && !producer.push(6));
        assert_eq!((consumer.pop(), consumer.pop(), consumer.pop()), (Some(2), Some(3), None));
        producer.publish();
        assert_eq!((consumer.pop(), consumer.pop(), consumer.pop()), (Some(4), Some(5), None));
        consumer.release();
        assert_eq!(producer.pending(), 0);
    }

    #[test]
    fn batches_are_limited_by_queue_and_capacity() {
        let ring = MockRing::new(4, 0_u64);
        let (mut producer, mut consumer) = ring.split();
        let put = |producer: &mut Producer<u64>, max, values: std::ops::Range<u64>| {
            let values: Vec<u64> = values.take(max).collect();
            producer.push_from(&values, |&value| Some(value))
        };
        assert_eq!(put(&mut producer, 3, 0..9), 3, "as many as were asked for");
        assert_eq!(put(&mut producer, 3, 3..9), 1, "as many as there is room for");
        assert_eq!(put(&mut producer, 0, 0..9), 0);
        assert_eq!(consumer.pop_while(9, |_| true), 0, "not published");
        producer.publish();
        let mut taken = Vec::new();
        let mut take = |consumer: &mut Consumer<u64>, max, last| {
            let count = consumer.pop_while(max, |value| {
                taken.push(value);
                value != last
            });
            (count, std::mem::take(&mut taken))
        };
        assert_eq!(take(&mut consumer, 2, 9), (2, vec![0, 1]));
        assert_eq!(take(&mut consumer, 9, 2), (0, vec![2]), "looked at and left");
        assert_eq!(put(&mut producer, 4, 4..9), 0, "taken but not released");
        consumer.release();
        assert_eq!(put(&mut producer, 4, 4..9), 2);
        producer.publish();
        assert_eq!(take(&mut consumer, 9, 5), (3, vec![2, 3, 4, 5]), "what has come since, too");
        assert_eq!(consumer.pop(), Some(5));
        assert_eq!(take(&mut consumer, 9, 9), (0, vec![]));
        consumer.release();
        assert_eq!(producer.pending(), 0);
    }

    #[test]
    fn runs_wrap_at_the_end_of_the_memory_and_stop_at_their_limit() {
        let ring = MockRing::new(4, 0_u64);
        let (mut producer, mut consumer) = ring.split();
        let start = u32::MAX - 5;
        (producer.next, producer.published, producer.cached_consumer) = (start, start, start);
        (consumer.next, consumer.released, consumer.cached_producer) = (start, start, start);
        ring.producer.store(start, Ordering::Relaxed);
        ring.consumer.store(start, Ordering::Relaxed);
        let mut next = 0;
        // From every slot on, and across the wrap of the counters.
        for _ in 0..12 {
            let values: Vec<u64> = (next..next + 6).collect();
            let max = next + 3;
            assert_eq!(producer.push_from(&values, |&value| (value < max).then_some(value)), 3);
            assert_eq!(producer.push_from(&values[3..], |&value| Some(value)), 1, "no more room");
            assert_eq!(consumer.pop_into(&mut [0; 9], store), 0, "not published");
            producer.publish();
            let mut taken = [0; 9];
            let last = next + 2;
            assert_eq!(consumer.pop_into(&mut taken, |value, place| value != last && store(value, place)), 2);
            assert_eq!((taken[..3].to_vec(), consumer.pop()), (vec![next, next + 1, 0], Some(last)));
            consumer.release();
            assert_eq!(consumer.pop_into(&mut [], store), 0);
            assert_eq!(consumer.pop_into(&mut taken[..1], store), 1);
            assert_eq!((taken[0], consumer.pop_into(&mut taken, store)), (next + 3, 0));
            consumer.release();
            // Not a multiple of the entries: the next round begins elsewhere.
            assert!(producer.push(next + 4));
            producer.publish();
            assert_eq!(consumer.pop(), Some(next + 4));
            consumer.release();
            next += 5;
        }
    }

    #[test]
    fn a_cached_consumer_index_needs_no_load() {
        let ring = MockRing::new(4, 0_u64);
        let (mut producer, mut consumer) = ring.split();
        for value in 0..4 {
            assert!(producer.push(value));
        }
        producer.assume_pending_max(0);
        assert!(!producer.push(4), "an unpublished entry was consumed");
        producer.publish();
        // Taken, but not released in the ring.
        assert_eq!((consumer.pop(), consumer.pop()), (Some(0), Some(1)));
        assert!(!producer.push(4));
        producer.assume_pending_max(2);
        assert!(producer.push(4) && producer.push(5) && !producer.push(6));
        producer.assume_pending_max(4);
        assert!(!producer.push(6), "to know less changes nothing");
        producer.publish();
        // A counter older than the known one.
        ring.consumer.store(1, Ordering::Relaxed);
        assert!(!producer.push(6), "nothing is forgotten");
        consumer.release();
        assert_eq!((2..6).map(|_| consumer.pop()).collect::<Vec<_>>(), [2, 3, 4, 5].map(Some));
        consumer.release();
        assert_eq!(producer.pending(), 0);
    }

    #[test]
    fn counters_wrap() {
        let ring = MockRing::new(2, 0_u64);
        let (mut producer, mut consumer) = ring.split();
        let start = u32::MAX - 2;
        (producer.next, producer.published, producer.cached_consumer) = (start, start, start);
        (consumer.next, consumer.released, consumer.cached_producer) = (start, start, start);
        ring.producer.store(start, Ordering::Relaxed);
        ring.consumer.store(start, Ordering::Relaxed);
        for value in 0..8 {
            assert!(producer.push(value) && producer.push(value + 100) && !producer.push(0));
            producer.publish();
            assert_eq!(
                (consumer.pop(), consumer.pop(), consumer.pop()),
                (Some(value), Some(value + 100), None)
            );
            consumer.release();
        }
        assert_eq!(ring.consumer.load(Ordering::Relaxed), start.wrapping_add(16));
    }

    #[test]
    fn an_invalid_counter_is_no_progress() {
        let ring = MockRing::new(4, 0_u64);
        let (mut producer, mut consumer) = ring.split();
        assert!(producer.push(1) && producer.push(2));
        producer.publish();
        assert_eq!(consumer.pop(), Some(1));
        for claim in [7, u32::MAX, 1 << 31] {
            ring.producer.store(claim, Ordering::Relaxed);
            let mut again = ring.split().1;
            assert!(again.is_empty() && again.pop().is_none(), "{claim} entries in a ring of 4");
        }
        // Less than was taken already.
        assert_eq!(consumer.pop(), Some(2));
        ring.producer.store(1, Ordering::Relaxed);
        assert!(consumer.is_empty() && consumer.pop().is_none());
        // More taken than was published.
        ring.consumer.store(3, Ordering::Relaxed);
        assert_eq!(producer.pending(), 2);
        ring.consumer.store(2, Ordering::Relaxed);
        assert_eq!(producer.pending(), 0);
        ring.consumer.store(1, Ordering::Relaxed);
        assert_eq!(producer.pending(), 0, "taken back");
    }

    #[test]
    fn the_kernel_asks_to_be_woken() {
        let ring = MockRing::new(1, 0_u64);
        let (mut producer, _consumer) = ring.split();
        assert_eq!(producer.needs_wakeup(), Some(false));
        ring.flags.store(1, Ordering::Relaxed);
        assert_eq!(producer.needs_wakeup(), Some(true));
        producer.memory.flags = None;
        assert_eq!(producer.needs_wakeup(), None);
    }

    #[test]
    fn two_threads_pass_everything_on() {
        let count = if cfg!(miri) { 100 } else { 100_000 };
        let ring = MockRing::new(8, [0_u64; 2]);
        let (mut producer, mut consumer) = ring.split();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for value in 0..count {
                    while !producer.push([value, !value]) {
                        producer.publish();
                        std::thread::yield_now();
                    }
                    if value % 3 == 0 {
                        producer.publish();
                    }
                }
                producer.publish();
            });
            for value in 0..count {
                let got = loop {
                    if let Some(got) = consumer.pop() {
                        break got;
                    }
                    consumer.release();
                    std::thread::yield_now();
                };
                assert_eq!(got, [value, !value]);
            }
        });
    }
}

/// All interleavings, and all values that the memory model allows a load to see. A race on a slot
/// fails the model like a wrong value.
#[cfg(loom)]
mod model {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicBool, Ordering, fence};
    use loom::thread;

    use super::*;

    /// The ring stays alive with both ends.
    struct Shared {
        ring: MockRing<u32>,
        /// Represents the bytes of the frames that the entries name.
        frames: Vec<UnsafeCell<u32>>,
    }

    // SAFETY: the model checks that no two threads access a cell at a time.
    unsafe impl Sync for Shared {}

    fn shared(entries: u32, frames: u32) -> Arc<Shared> {
        let frames = (0..frames).map(|_| UnsafeCell::new(0)).collect();
        Arc::new(Shared { ring: MockRing::new(entries, 0), frames })
    }

    /// More entries than the ring has slots: slots and frames are written, read, and written again.
    #[test]
    fn slots_and_frames_are_passed_on_without_a_race() {
        loom::model(|| {
            let shared = shared(2, 3);
            let (mut producer, mut consumer) = shared.ring.split();
            let there = Arc::clone(&shared);
            let other = thread::spawn(move || {
                for frame in 0..3_u32 {
                    // SAFETY: the model fails if the other thread accesses the cell meanwhile.
                    there.frames[frame as usize].with_mut(|bytes| unsafe { *bytes = frame + 10 });
                    while !producer.push(frame) {
                        thread::yield_now();
                    }
                    producer.publish();
                }
            });
            for expected in 0..3_u32 {
                let frame = loop {
                    if let Some(frame) = consumer.pop() {
                        break frame;
                    }
                    thread::yield_now();
                };
                assert_eq!(frame, expected);
                // SAFETY: the model fails if the other thread writes to the cell meanwhile.
                let bytes = shared.frames[frame as usize].with(|bytes| unsafe { *bytes });
                assert_eq!(bytes, expected + 10);
                consumer.release();
            }
            assert!(other.join().is_ok());
        });
    }

    /// Batches: several entries per publication, several per release; one by one, or all at once.
    #[test]
    fn batches_are_passed_on_without_a_race() {
        for at_once in [false, true] {
            loom::model(move || pass_on(at_once));
        }
    }

    fn pass_on(at_once: bool) {
        let shared = shared(2, 0);
        let (mut producer, mut consumer) = shared.ring.split();
        let there = Arc::clone(&shared);
        let other = thread::spawn(move || {
            let mut next = 0;
            while next < 4 {
                if at_once {
                    let both = [next, next + 1];
                    let rest = &both[..2.min(4 - next as usize)];
                    next += producer.push_from(rest, |&value| Some(value));
                } else {
                    while next < 4 && producer.push(next) {
                        next += 1;
                    }
                }
                producer.publish();
                thread::yield_now();
            }
            drop(there);
        });
        let mut next = 0;
        while next < 4 {
            if at_once {
                let mut both = [0; 2];
                let taken = consumer.pop_into(&mut both, store) as usize;
                for value in &both[..taken] {
                    assert_eq!(*value, next);
                    next += 1;
                }
            } else {
                while let Some(value) = consumer.pop() {
                    assert_eq!(value, next);
                    next += 1;
                }
            }
            consumer.release();
            thread::yield_now();
        }
        assert!(other.join().is_ok());
    }

    /// A frame goes out by one ring and returns by another: two threads never write to it at a
    /// time.
    #[test]
    fn a_returned_frame_is_writable() {
        loom::model(|| {
            let (fill, rx) = (shared(1, 1), shared(1, 0));
            let (mut to_fill, mut from_fill) = fill.ring.split();
            let (mut to_rx, mut from_rx) = rx.ring.split();
            let (fill_there, rx_there) = (Arc::clone(&fill), Arc::clone(&rx));
            let kernel = thread::spawn(move || {
                for packet in 0..2 {
                    let frame = loop {
                        if let Some(frame) = from_fill.pop() {
                            break frame;
                        }
                        thread::yield_now();
                    };
                    from_fill.release();
                    // SAFETY: the model fails if the other thread accesses the cell meanwhile.
                    fill_there.frames[frame as usize].with_mut(|bytes| unsafe { *bytes = packet + 1 });
                    assert!(to_rx.push(frame), "a ring of one, and one frame");
                    to_rx.publish();
                }
                drop(rx_there);
            });
            for packet in 0..2 {
                assert!(to_fill.push(0), "a ring of one, and one frame");
                to_fill.publish();
                let frame = loop {
                    if let Some(frame) = from_rx.pop() {
                        break frame;
                    }
                    thread::yield_now();
                };
                from_rx.release();
                // SAFETY: the model fails if the other thread accesses the cell meanwhile.
                let bytes = fill.frames[frame as usize].with(|bytes| unsafe { *bytes });
                assert_eq!(bytes, packet + 1);
            }
            assert!(kernel.join().is_ok());
        });
    }

    /// Either we see that the kernel wants a wakeup, or the kernel sees the entry.
    #[test]
    fn no_wakeup_is_lost() {
        loom::model(|| {
            let shared = shared(1, 0);
            let (mut producer, consumer) = shared.ring.split();
            let there = Arc::clone(&shared);
            let seen = Arc::new(AtomicBool::new(false));
            let seen_there = Arc::clone(&seen);
            let kernel = thread::spawn(move || {
                there.ring.flags.store(libc::XDP_RING_NEED_WAKEUP, Ordering::Relaxed);
                fence(Ordering::SeqCst);
                seen_there.store(!consumer.is_empty(), Ordering::Relaxed);
            });
            assert!(producer.push(7));
            producer.publish();
            let woken = producer.needs_wakeup() == Some(true);
            assert!(kernel.join().is_ok());
            assert!(woken || seen.load(Ordering::Relaxed), "the kernel sleeps and is not woken");
        });
    }
}
