//! How many packets a lane leaves to the kernel although that has to resolve their neighbour first.
//!
//! The kernel has room for about a thousand neighbours by default (`gc_thresh3`), all namespaces
//! together, and keeps one that does not answer for some seconds. Answers to a flood from addresses
//! on the link would fill it, and no regular neighbour could be resolved any more. One that sends
//! to us has resolved our address, so the kernel usually knows it.

use std::time::Duration;

/// Packets at once, and per second, of all lanes of a socket together: those of the time that the
/// kernel keeps a neighbour stay far below its limit.
const BURST: u32 = 128;
const PER_SECOND: u32 = 64;

/// A lane's share of the budget.
#[derive(Debug)]
pub(super) struct ResolveBudget {
    left: u32,
    burst: u32,
    /// Time for one more.
    interval: Duration,
    /// Time up to which it was refilled.
    refilled: Duration,
}

impl ResolveBudget {
    /// That of one of `lanes`.
    pub(super) fn new(lanes: usize) -> Self {
        let lanes = u32::try_from(lanes).unwrap_or(u32::MAX).max(1);
        let burst = (BURST / lanes).max(1);
        Self {
            left: burst,
            burst,
            interval: Duration::from_secs(1) / PER_SECOND * lanes,
            refilled: Duration::ZERO,
        }
    }

    /// Adds what has become free by `now`.
    #[inline]
    pub(super) fn refill(&mut self, now: Duration) {
        if self.left < self.burst && now >= self.refilled + self.interval {
            self.refill_by(now);
        }
    }

    #[cold]
    fn refill_by(&mut self, now: Duration) {
        let intervals = (now - self.refilled).as_nanos() / self.interval.as_nanos().max(1);
        let more = u32::try_from(intervals).unwrap_or(u32::MAX).min(self.burst - self.left);
        self.left += more;
        self.refilled = if self.left < self.burst { self.refilled + self.interval * more } else { now };
    }

    /// Takes one; false if none is left.
    pub(super) fn take(&mut self) -> bool {
        let is_left = self.left > 0;
        self.left -= u32::from(is_left);
        is_left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many are left.
    fn drain(budget: &mut ResolveBudget) -> u32 {
        std::iter::from_fn(|| budget.take().then_some(())).count() as u32
    }

    #[test]
    fn a_budget_is_refilled_up_to_its_burst() {
        let mut budget = ResolveBudget::new(1);
        assert_eq!(drain(&mut budget), BURST);
        budget.refill(Duration::from_millis(500));
        assert_eq!(drain(&mut budget), PER_SECOND / 2);
        // Parts of an interval count.
        for millisecond in 501..=1500 {
            budget.refill(Duration::from_millis(millisecond));
        }
        assert_eq!(drain(&mut budget), PER_SECOND);
        budget.refill(Duration::from_secs(1000));
        assert_eq!(drain(&mut budget), BURST);
        budget.refill(Duration::from_secs(1000));
        assert_eq!(drain(&mut budget), 0);
    }

    #[test]
    fn lanes_share_it() {
        let mut budget = ResolveBudget::new(4);
        assert_eq!(drain(&mut budget), BURST / 4);
        budget.refill(Duration::from_secs(1));
        assert_eq!(drain(&mut budget), PER_SECOND / 4);
        assert_eq!(drain(&mut ResolveBudget::new(usize::MAX)), 1);
    }
}
