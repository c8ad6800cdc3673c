//! What the peer has received beyond the bytes that it acknowledges (SACK, RFC 2018), so that only
//! what is missing is sent again (RFC 6675).

use crate::sequence::{is_before, later};

/// Ranges at most. With more holes than that, some segments are sent again that have arrived.
const RANGES_MAX: usize = 128;

/// Ranges of numbers that have arrived, in order, with gaps between them.
#[derive(Debug, Default)]
pub(crate) struct Scoreboard {
    /// The first number of each, and the one behind it. Allocated when the first one comes.
    ranges: Vec<(u32, u32)>,
}

impl Scoreboard {
    /// True if there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Forgets them: the peer may have thrown them away (RFC 2018, section 8).
    pub(crate) fn clear(&mut self) {
        self.ranges = Vec::new();
    }

    /// Takes a block of an ACK, if it lies within what is in flight.
    pub(crate) fn add(&mut self, (first, end): (u32, u32), unacknowledged: u32, send_next: u32) {
        let is_within =
            is_before(unacknowledged, first) && is_before(first, end) && !is_before(send_next, end);
        if !is_within {
            return;
        }
        // Those that it touches become one with it.
        let from = self.ranges.partition_point(|(_, behind)| is_before(*behind, first));
        let to = from + self.ranges[from..].partition_point(|(begin, _)| !is_before(end, *begin));
        if from == to {
            if self.ranges.len() < RANGES_MAX {
                self.ranges.insert(from, (first, end));
            }
            return;
        }
        let begin = self.ranges[from].0;
        let begin = if is_before(first, begin) { first } else { begin };
        self.ranges[from] = (begin, later(end, self.ranges[to - 1].1));
        self.ranges.drain(from + 1..to);
    }

    /// Forgets what is acknowledged now.
    pub(crate) fn acknowledge(&mut self, unacknowledged: u32) {
        let done = self.ranges.partition_point(|(_, end)| !is_before(unacknowledged, *end));
        if done == self.ranges.len() {
            // Idle connections keep no memory.
            return self.clear();
        }
        self.ranges.drain(..done);
        if let Some(range) = self.ranges.first_mut() {
            range.0 = later(range.0, unacknowledged);
        }
    }

    /// The number behind the last one that has arrived.
    pub(crate) fn end(&self) -> Option<u32> {
        self.ranges.last().map(|(_, end)| *end)
    }

    /// True if all numbers from `first` up to `end` have arrived.
    pub(crate) fn covers(&self, first: u32, end: u32) -> bool {
        let at = self.ranges.partition_point(|(_, behind)| !is_before(first, *behind));
        self.ranges
            .get(at)
            .is_some_and(|(begin, behind)| !is_before(first, *begin) && !is_before(*behind, end))
    }

    /// How many numbers have arrived.
    pub(crate) fn count(&self) -> u32 {
        self.ranges.iter().map(|(begin, behind)| behind.wrapping_sub(*begin)).sum()
    }

    /// How many numbers below `end` have arrived.
    pub(crate) fn count_below(&self, end: u32) -> u32 {
        let ranges = self.ranges.iter().take_while(|(begin, _)| is_before(*begin, end));
        ranges
            .map(|(begin, behind)| if is_before(end, *behind) { end } else { *behind }.wrapping_sub(*begin))
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn board(blocks: &[(u32, u32)]) -> Scoreboard {
        let mut board = Scoreboard::default();
        blocks.iter().for_each(|block| board.add(*block, 10, 1000));
        board
    }

    #[test]
    fn blocks_join_and_leave() {
        let mut board = board(&[(30, 40), (60, 70), (40, 50), (20, 35)]);
        assert_eq!(board.ranges, [(20, 50), (60, 70)]);
        assert_eq!((board.end(), board.count_below(65)), (Some(70), 35));
        assert!(board.covers(20, 50) && board.covers(61, 69));
        assert!(!board.covers(19, 21) && !board.covers(45, 61) && !board.covers(70, 71));
        board.acknowledge(45);
        assert_eq!(board.ranges, [(45, 50), (60, 70)]);
        board.acknowledge(70);
        assert!(board.is_empty());
    }

    #[test]
    fn blocks_outside_of_what_is_in_flight_do_not_count() {
        assert!(board(&[(5, 9), (10, 20), (30, 30), (40, 30), (990, 1001)]).is_empty());
        assert_eq!(board(&[(990, 1000)]).ranges, [(990, 1000)]);
    }

    proptest! {
        /// As a set of numbers, with numbers that wrap.
        #[test]
        fn ranges_are_a_set(
            blocks in prop::collection::vec((1_u32..200, 1_u32..40), 0..40),
            acknowledged in 1_u32..200,
            asked in (0_u32..220, 1_u32..30),
        ) {
            const ZERO: u32 = u32::MAX - 100;
            let at = |number: u32| ZERO.wrapping_add(number);
            let mut board = Scoreboard::default();
            let mut set = [false; 300];
            for (first, length) in blocks {
                board.add((at(first), at(first + length)), at(0), at(240));
                set[first as usize..(first + length) as usize].fill(true);
            }
            board.acknowledge(at(acknowledged));
            set[..acknowledged as usize].fill(false);
            let (first, end) = (asked.0, asked.0 + asked.1);
            prop_assert_eq!(
                board.covers(at(first), at(end)),
                set[first as usize..end as usize].iter().all(|is_in| *is_in)
            );
            let count = set[..end as usize].iter().filter(|is_in| **is_in).count();
            prop_assert_eq!(board.count_below(at(end)) as usize, count);
            prop_assert!(board.ranges.windows(2).all(|pair| is_before(pair[0].1, pair[1].0)));
        }
    }
}
