//! Whose turn it is of the queues that one lane serves.

/// Full batches that a lane takes from one queue before it looks at the others.
const STAY: u32 = 4;

/// The turns. Queues have theirs one after the other; one that brings full batches has a few in a row.
///
/// They go in rounds. In one each queue has its turn, so that all of what came while the lane paused is taken before it
/// pauses again; and no more than that, or a lane whose queues are never all empty at once would never pause.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// The queue whose turn it is, and how many full batches in a row it has brought.
    next: usize,
    full: u32,
    /// Turns of this round that are over.
    over: usize,
}

impl Turns {
    /// The queue whose turn it is, of so many; the next turn is that of the one behind it.
    #[inline]
    pub(super) fn take(&mut self, queues: usize) -> usize {
        let at = self.next;
        self.next = if at + 1 < queues { at + 1 } else { 0 };
        self.over += 1;
        at
    }

    /// The queue at `at`, which had the last turn, brought a batch. Behind a full one there is more, most of the time: then its
    /// turn is not over yet.
    #[inline]
    pub(super) fn brought(&mut self, at: usize, is_full: bool) {
        self.full = if is_full && self.full < STAY { self.full + 1 } else { 0 };
        if self.full > 0 {
            self.next = at;
            self.over -= 1;
        }
    }

    /// The queues, of so many, that have yet to have a turn in this round, beginning with the next one; none in a round that has
    /// not begun.
    #[inline]
    pub(super) fn left(&self, queues: usize) -> impl Iterator<Item = usize> + use<> {
        let (next, count) = (self.next, if self.over > 0 { queues.saturating_sub(self.over) } else { 0 });
        (0..count)
            .map(move |behind| if next + behind < queues { next + behind } else { next + behind - queues })
    }

    /// The round is over.
    #[inline]
    pub(super) fn end_round(&mut self) {
        self.over = 0;
    }

    /// The queues are others than before.
    pub(super) fn restart(&mut self) {
        (self.next, self.over) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(turns: &Turns, queues: usize) -> Vec<usize> {
        turns.left(queues).collect()
    }

    #[test]
    fn each_queue_has_one_turn_in_a_round() {
        let mut turns = Turns::default();
        assert_eq!(left(&turns, 3), [], "a round begins with a turn");
        for round in 0..3 {
            assert_eq!(turns.take(3), 0, "round {round}");
            turns.brought(0, false);
            assert_eq!(left(&turns, 3), [1, 2]);
            assert_eq!(turns.take(3), 1);
            assert_eq!(left(&turns, 3), [2]);
            assert_eq!(turns.take(3), 2);
            assert_eq!(left(&turns, 3), []);
            turns.end_round();
        }
    }

    #[test]
    fn a_round_that_ends_early_is_gone_on_with_by_the_next_queue() {
        let mut turns = Turns::default();
        assert_eq!(turns.take(3), 0);
        turns.end_round();
        assert_eq!(turns.take(3), 1);
        assert_eq!(left(&turns, 3), [2, 0]);
    }

    #[test]
    fn a_queue_that_brings_full_batches_stays_for_a_few() {
        let mut turns = Turns::default();
        assert_eq!(turns.take(2), 0);
        turns.brought(0, false);
        for _ in 0..STAY {
            assert_eq!(turns.take(2), 1);
            turns.brought(1, true);
            assert_eq!(left(&turns, 2), [1], "its turn goes on");
        }
        assert_eq!(turns.take(2), 1);
        turns.brought(1, true);
        assert_eq!(left(&turns, 2), [], "the last one of its turn");
        assert_eq!(turns.take(2), 0);
    }

    #[test]
    fn fewer_queues_than_before_leave_nothing_that_is_none() {
        let mut turns = Turns::default();
        (0..3).for_each(|_| _ = turns.take(8));
        turns.restart();
        assert_eq!((turns.take(2), left(&turns, 2)), (0, vec![1]));
        // Empty queues, all of them looked at again and again.
        (0..9).for_each(|_| _ = turns.take(2));
        assert_eq!(left(&turns, 2), []);
    }
}
