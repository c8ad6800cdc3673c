//! Queries on their way from a lane to the thread that asks the kernel.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use manylane_ipc::next_hops::RouteKey;

/// Length of a lane's query queue.
pub(super) const QUEUE_LEN: usize = 64;

/// On a cache line of its own (two, because CPUs fetch them in pairs).
#[derive(Debug, Default)]
#[repr(align(128))]
struct CachePadded(AtomicUsize);

/// A queue with one writer, the lane, and one reader, the background thread.
///
/// Only the reader writes `head`, and only the writer writes `tail`. Both always increase. The
/// queries between them are pending.
#[derive(Debug)]
pub(super) struct QueryQueue {
    tail: CachePadded,
    head: CachePadded,
    slots: [[AtomicU64; 4]; QUEUE_LEN],
}

impl QueryQueue {
    pub(super) fn new() -> Self {
        let slots = std::array::from_fn(|_| Default::default());
        Self { tail: CachePadded::default(), head: CachePadded::default(), slots }
    }

    /// Appends a query; false if the queue is full. Only the lane calls this.
    pub(super) fn push(&self, pair: &RouteKey) -> bool {
        let put = self.tail.0.load(Ordering::Relaxed);
        // Acquire: the reader has finished reading the slots before `head`.
        if put.wrapping_sub(self.head.0.load(Ordering::Acquire)) >= QUEUE_LEN {
            return false;
        }
        for (slot, word) in self.slots[put % QUEUE_LEN].iter().zip(pair.0) {
            slot.store(word, Ordering::Relaxed);
        }
        // Release: a reader that sees the count sees the words.
        self.tail.0.store(put.wrapping_add(1), Ordering::Release);
        true
    }

    /// Removes and returns the oldest query. Only the background thread calls this.
    pub(super) fn pop(&self) -> Option<RouteKey> {
        let taken = self.head.0.load(Ordering::Relaxed);
        if taken == self.tail.0.load(Ordering::Acquire) {
            return None;
        }
        let slot = &self.slots[taken % QUEUE_LEN];
        let pair = RouteKey(std::array::from_fn(|word| slot[word].load(Ordering::Relaxed)));
        // Release: the words were read before the lane may overwrite them.
        self.head.0.store(taken.wrapping_add(1), Ordering::Release);
        Some(pair)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tail.0.load(Ordering::Acquire) == self.head.0.load(Ordering::Acquire)
    }
}

/// Recent queries of a lane, so that it does not repeat one for every datagram.
///
/// Two pairs with the same slot evict each other; they are queried more often than needed.
#[derive(Debug)]
pub(super) struct RecentQueries(Box<[u64]>);

const RECENT_SLOTS: usize = 4096;

impl RecentQueries {
    pub(super) fn new() -> Self {
        Self(vec![0; RECENT_SLOTS].into())
    }

    /// Calls `ask` unless this hash was queried since the stamp changed; `ask` returns whether it
    /// succeeded. True if it was queried by this call.
    #[inline]
    pub(super) fn query_once(&mut self, hash: u64, stamp: u32, ask: impl FnOnce() -> bool) -> bool {
        let place = &mut self.0[(hash >> 32) as usize % RECENT_SLOTS];
        // The slot uses the upper bits of the hash, and the mark the lower ones, which select the
        // set in the table: together they distinguish more pairs.
        let mark = hash << 32 | u64::from(stamp);
        if *place == mark || !ask() {
            return false;
        }
        *place = mark;
        true
    }

    /// Lets a hash be queried again.
    pub(super) fn forget(&mut self, hash: u64) {
        // No stamp is 0.
        self.0[(hash >> 32) as usize % RECENT_SLOTS] = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(n: u64) -> RouteKey {
        RouteKey([n, n + 1, n + 2, n + 3])
    }

    #[test]
    fn a_queue_is_bounded_and_in_order() {
        let queue = QueryQueue::new();
        for round in 0..3 {
            assert!(queue.is_empty());
            assert_eq!(queue.pop(), None);
            for n in 0..QUEUE_LEN as u64 {
                assert!(queue.push(&pair(round * 1000 + n)));
            }
            assert!(!queue.push(&pair(0)));
            for n in 0..QUEUE_LEN as u64 {
                assert_eq!(queue.pop(), Some(pair(round * 1000 + n)));
            }
        }
    }

    #[test]
    fn a_query_queue_passes_whole_queries_between_threads() {
        let queue = QueryQueue::new();
        let questions = if cfg!(miri) { 200 } else { 100_000 };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in 0..questions {
                    while !queue.push(&pair(n)) {
                        std::thread::yield_now();
                    }
                }
            });
            for n in 0..questions {
                let taken = loop {
                    match queue.pop() {
                        Some(taken) => break taken,
                        None => std::thread::yield_now(),
                    }
                };
                assert_eq!(taken, pair(n));
            }
        });
    }

    #[test]
    fn a_pair_is_queried_once_per_epoch() {
        let mut recent = RecentQueries::new();
        let hash = 0x1234_5678_9abc_def0;
        assert!(!recent.query_once(hash, 1, || false), "the queue is full");
        assert!(recent.query_once(hash, 1, || true));
        assert!(!recent.query_once(hash, 1, || panic!("asked again")));
        assert!(recent.query_once(hash, 2, || true));
        assert!(recent.query_once(hash ^ 1 << 20, 2, || true), "another pair in the same place");
        assert!(recent.query_once(hash, 2, || true));
    }
}
