//! Lingering: whether a lane that has emptied its queue pauses before it asks for more.
//!
//! Lanes that share a core pay for their number with wake-ups: each datagram wakes another thread. Like a network
//! card that moderates its interrupts, such a lane may pause after a batch, so that the next one is larger. The
//! first datagram after silence is still handled at once; it is what comes right behind it that waits, for the
//! pause at most. Decided from the sizes of batches alone: no clock is read.

use std::time::Duration;

/// A pause is tried after so many batches without one.
const TRY_EVERY: u32 = 16;
/// Messages that a batch after a pause must bring for the pause to be worth its own wake-up.
const WORTH: usize = 2;

/// The decision of one lane.
#[derive(Debug)]
pub(crate) struct Linger {
    pause: Duration,
    batch: usize,
    on: bool,
    since_tried: u32,
}

impl Linger {
    /// A lane that takes at most `batch` messages at once, and pauses for `pause`; zero for never.
    pub(crate) fn new(pause: Duration, batch: usize) -> Self {
        Self { pause, batch, on: false, since_tried: 0 }
    }

    /// What to do after a receive that brought `messages`: how long to pause, if at all.
    #[inline]
    pub(crate) fn after(&mut self, messages: usize) -> Option<Duration> {
        if self.pause.is_zero() {
            return None;
        }
        if self.on {
            self.on = messages >= WORTH;
        } else {
            self.since_tried += 1;
            if self.since_tried >= TRY_EVERY {
                self.since_tried = 0;
                self.on = messages > 0;
            }
        }
        // Half a batch: more is waiting, and a pause would only let the queue grow.
        (self.on && messages * 2 < self.batch).then_some(self.pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Duration = Duration::from_micros(100);

    #[test]
    fn zero_never_pauses() {
        let mut linger = Linger::new(Duration::ZERO, 64);
        assert!((0..100).all(|_| linger.after(1).is_none()));
    }

    #[test]
    fn a_pause_is_tried_now_and_then_and_kept_while_it_pays() {
        let mut linger = Linger::new(PAUSE, 64);
        assert!((1..TRY_EVERY).all(|_| linger.after(1).is_none()));
        assert_eq!(linger.after(1), Some(PAUSE));
        assert_eq!(linger.after(5), Some(PAUSE));
        assert_eq!(linger.after(2), Some(PAUSE));
        assert_eq!(linger.after(1), None);
        assert_eq!(linger.after(5), None);
    }

    #[test]
    fn a_lane_that_is_behind_or_idle_does_not_pause() {
        let mut linger = Linger::new(PAUSE, 64);
        for _ in 0..TRY_EVERY {
            linger.after(40);
        }
        assert_eq!(linger.after(40), None);
        assert_eq!(linger.after(3), Some(PAUSE));
        assert_eq!(linger.after(0), None);
        assert_eq!(linger.after(3), None);
    }
}
