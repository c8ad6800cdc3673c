//! Round-robin order of the queues that one lane serves.

/// Full batches that a lane takes from one queue in a row.
const FULL_BATCHES_MAX: u32 = 4;

/// The order. Queues are served one after the other. A queue with full batches is served a few
/// times in a row.
///
/// Service goes in rounds: each queue is served once in a round. A lane that delays may do so at
/// the end of a round: all frames that arrived during the last delay are then received. It does not
/// wait for all queues to be empty at once, which might never happen.
#[derive(Debug, Default)]
pub(super) struct RoundRobin {
    /// The next queue, and the number of full batches in a row that it returned.
    next: usize,
    full_batches: u32,
    /// Queues served in this round.
    served: usize,
}

impl RoundRobin {
    /// The queue to serve, of `queues` queues; advances to the one after it.
    #[inline]
    pub(super) fn advance(&mut self, queues: usize) -> usize {
        let at = self.next;
        self.next = if at + 1 < queues { at + 1 } else { 0 };
        self.served += 1;
        at
    }

    /// The queue at `at`, which was served last, returned a batch. A full one is mostly followed
    /// by more, so the queue is served again.
    #[inline]
    pub(super) fn record_batch(&mut self, at: usize, is_full: bool) {
        self.full_batches =
            if is_full && self.full_batches < FULL_BATCHES_MAX { self.full_batches + 1 } else { 0 };
        if self.full_batches > 0 {
            self.next = at;
            self.served -= 1;
        }
    }

    /// The queues, of `queues` queues, that were not served in this round, starting with the next
    /// one. Empty before a round has begun.
    #[inline]
    pub(super) fn remaining(&self, queues: usize) -> impl Iterator<Item = usize> + use<> {
        let (next, count) = (self.next, if self.served > 0 { queues.saturating_sub(self.served) } else { 0 });
        (0..count)
            .map(move |behind| if next + behind < queues { next + behind } else { next + behind - queues })
    }

    /// Ends the round.
    #[inline]
    pub(super) fn end_round(&mut self) {
        self.served = 0;
    }

    /// The set of queues has changed.
    pub(super) fn restart(&mut self) {
        (self.next, self.served) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remaining(round_robin: &RoundRobin, queues: usize) -> Vec<usize> {
        round_robin.remaining(queues).collect()
    }

    #[test]
    fn each_queue_is_served_once_in_a_round() {
        let mut round_robin = RoundRobin::default();
        assert_eq!(remaining(&round_robin, 3), [], "a round begins with the first queue");
        for round in 0..3 {
            assert_eq!(round_robin.advance(3), 0, "round {round}");
            round_robin.record_batch(0, false);
            assert_eq!(remaining(&round_robin, 3), [1, 2]);
            assert_eq!(round_robin.advance(3), 1);
            assert_eq!(remaining(&round_robin, 3), [2]);
            assert_eq!(round_robin.advance(3), 2);
            assert_eq!(remaining(&round_robin, 3), []);
            round_robin.end_round();
        }
    }

    #[test]
    fn an_unfinished_round_continues_at_the_next_queue() {
        let mut round_robin = RoundRobin::default();
        assert_eq!(round_robin.advance(3), 0);
        round_robin.end_round();
        assert_eq!(round_robin.advance(3), 1);
        assert_eq!(remaining(&round_robin, 3), [2, 0]);
    }

    #[test]
    fn a_queue_with_full_batches_is_served_again() {
        let mut round_robin = RoundRobin::default();
        assert_eq!(round_robin.advance(2), 0);
        round_robin.record_batch(0, false);
        for _ in 0..FULL_BATCHES_MAX {
            assert_eq!(round_robin.advance(2), 1);
            round_robin.record_batch(1, true);
            assert_eq!(remaining(&round_robin, 2), [1], "it is served again");
        }
        assert_eq!(round_robin.advance(2), 1);
        round_robin.record_batch(1, true);
        assert_eq!(remaining(&round_robin, 2), [], "the last batch in a row");
        assert_eq!(round_robin.advance(2), 0);
    }

    #[test]
    fn shrinking_the_queues_leaves_no_invalid_queue() {
        let mut round_robin = RoundRobin::default();
        (0..3).for_each(|_| _ = round_robin.advance(8));
        round_robin.restart();
        assert_eq!((round_robin.advance(2), remaining(&round_robin, 2)), (0, vec![1]));
        // Empty queues, polled repeatedly.
        (0..9).for_each(|_| _ = round_robin.advance(2));
        assert_eq!(remaining(&round_robin, 2), []);
    }
}
