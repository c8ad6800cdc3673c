//! Questions on their way from a lane to the thread that asks the kernel.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::table::Pair;

/// Questions that may wait at one lane.
pub(super) const QUEUE: usize = 64;

/// On a cache line of its own (two, because processors fetch them in pairs).
#[derive(Debug, Default)]
#[repr(align(128))]
struct Alone(AtomicUsize);

/// A queue with one writer, the lane, and one reader, the background thread.
///
/// `taken` is written by the reader only and `put` by the writer only; both count up for ever. Between them lie
/// the questions that wait.
#[derive(Debug)]
pub(super) struct Queue {
    put: Alone,
    taken: Alone,
    slots: [[AtomicU64; 4]; QUEUE],
}

impl Queue {
    pub(super) fn new() -> Self {
        let slots = std::array::from_fn(|_| Default::default());
        Self { put: Alone::default(), taken: Alone::default(), slots }
    }

    /// Leaves a question; false if the queue is full. Only the lane calls this.
    pub(super) fn put(&self, pair: &Pair) -> bool {
        let put = self.put.0.load(Ordering::Relaxed);
        // Acquire: the reader is done with the slots that it says it has taken.
        if put.wrapping_sub(self.taken.0.load(Ordering::Acquire)) >= QUEUE {
            return false;
        }
        for (slot, word) in self.slots[put % QUEUE].iter().zip(pair.0) {
            slot.store(word, Ordering::Relaxed);
        }
        // Release: who sees the count sees the words.
        self.put.0.store(put.wrapping_add(1), Ordering::Release);
        true
    }

    /// Takes the question that has waited longest. Only the background thread calls this.
    pub(super) fn take(&self) -> Option<Pair> {
        let taken = self.taken.0.load(Ordering::Relaxed);
        if taken == self.put.0.load(Ordering::Acquire) {
            return None;
        }
        let slot = &self.slots[taken % QUEUE];
        let pair = Pair(std::array::from_fn(|word| slot[word].load(Ordering::Relaxed)));
        // Release: the words were read before the lane may write others in their place.
        self.taken.0.store(taken.wrapping_add(1), Ordering::Release);
        Some(pair)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.put.0.load(Ordering::Acquire) == self.taken.0.load(Ordering::Acquire)
    }
}

/// What a lane asked a short while ago, so that it does not ask again for every datagram.
///
/// Two pairs that share a place take it from each other; they are then asked for more often than needed.
#[derive(Debug)]
pub(super) struct Recent(Box<[u64]>);

const REMEMBERED: usize = 4096;

impl Recent {
    pub(super) fn new() -> Self {
        Self(vec![0; REMEMBERED].into())
    }

    /// Whether this hash was asked for since the stamp became what it is; if not, `ask` does it and says
    /// whether it could. True if it was asked now.
    #[inline]
    pub(super) fn once(&mut self, hash: u64, stamp: u32, ask: impl FnOnce() -> bool) -> bool {
        let place = &mut self.0[(hash >> 32) as usize % REMEMBERED];
        // The lower bits choose the set in the table, not the place here: together they tell more pairs apart.
        let mark = hash << 32 | u64::from(stamp);
        if *place == mark || !ask() {
            return false;
        }
        *place = mark;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(n: u64) -> Pair {
        Pair([n, n + 1, n + 2, n + 3])
    }

    #[test]
    fn a_queue_is_bounded_and_in_order() {
        let queue = Queue::new();
        for round in 0..3 {
            assert!(queue.is_empty());
            assert_eq!(queue.take(), None);
            for n in 0..QUEUE as u64 {
                assert!(queue.put(&pair(round * 1000 + n)));
            }
            assert!(!queue.put(&pair(0)));
            for n in 0..QUEUE as u64 {
                assert_eq!(queue.take(), Some(pair(round * 1000 + n)));
            }
        }
    }

    #[test]
    fn a_queue_carries_whole_questions_between_threads() {
        let queue = Queue::new();
        let questions = if cfg!(miri) { 200 } else { 100_000 };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0..questions {
                    while !queue.put(&pair(n)) {
                        std::thread::yield_now();
                    }
                }
            });
            for n in 0..questions {
                let taken = loop {
                    match queue.take() {
                        Some(taken) => break taken,
                        None => std::thread::yield_now(),
                    }
                };
                assert_eq!(taken, pair(n));
            }
        });
    }

    #[test]
    fn a_pair_is_asked_for_once_per_stamp() {
        let mut recent = Recent::new();
        let hash = 0x1234_5678_9abc_def0;
        assert!(!recent.once(hash, 1, || false), "the queue is full");
        assert!(recent.once(hash, 1, || true));
        assert!(!recent.once(hash, 1, || panic!("asked again")));
        assert!(recent.once(hash, 2, || true));
        assert!(recent.once(hash ^ 1 << 20, 2, || true), "another pair in the same place");
        assert!(recent.once(hash, 2, || true));
    }
}
