//! Coalescing: whether a lane that has emptied its queue delays its next receive.
//!
//! Lanes that share a CPU pay for their number with wake-ups: each datagram wakes another thread.
//! Like a network card that moderates its interrupts, such a lane may delay after a batch, so that
//! the next batch is larger. Delays end at common ticks, so that a CPU wakes once for all lanes
//! that share it. The first datagram after silence is handled at once. A datagram right behind it
//! waits, for the delay at most.
//!
//! 1. Now and then a delay is tried. It is kept up while the batches after it are larger than one
//!    message.
//! 2. After a full batch there is no delay, because more is probably queued. If nothing was
//!    (drivers deliver as many frames at a time as a batch has), the delay that is owed follows,
//!    instead of a sleep until the next datagram.
//! 3. There is no delay while another queue of the lane has frames from before: all frames that
//!    arrived during a delay are taken before the next one.
//! 4. A batch that fills more of the receive buffer than is safe halves the delay. A small one
//!    doubles it again.
//!
//! The decision uses the sizes of batches. The clock is read once a delay.
//!
//! # The longest delay follows the load
//!
//! A delay costs latency, and saves CPU time that nothing may need. So unless the user sets it, the
//! longest delay follows how busy their CPUs are ([`cpu_load`](crate::cpu_load)), as
//! adaptive interrupt moderation of a device follows its rate: none while the CPUs are less than
//! [half busy](BUSY_MIN), half as long after each window below that, and twice as long after each
//! window in which they are busier than [`BUSY_MAX`], if that is certain. The delay makes the CPUs
//! less busy, so it settles where they are between the two. There it is halved after each two
//! windows, because it may have grown under a load that is gone, at the start of a server for
//! instance. If the load is still there, it grows again.

use std::os::fd::AsFd;
use std::time::Duration;

use crate::cpu_load::LoadWatch;

/// Batches without a delay after which one is tried.
const PROBE_BATCHES: u32 = 16;
/// Minimum messages of a batch after a delay for the delay to be worth its own wake-up.
const MESSAGES_MIN: usize = 2;
/// The same for the average, where every message costs system calls of its own: two or three then
/// save nothing.
const AVERAGE_MESSAGES_MIN: usize = 3;
/// Fixed-point scale of averages.
const AVERAGE_SCALE: usize = 8;
/// A shorter delay costs more than it saves.
const DELAY_MIN: Duration = Duration::from_micros(25);
/// A delay may let this share of the receive buffer fill; the remainder is for bursts.
const RCVBUF_DIVISOR: usize = 4;

/// Percentages of a busy CPU, between which the longest delay shrinks slowly.
pub const BUSY_MIN: u32 = 50;
/// See [`BUSY_MIN`].
pub const BUSY_MAX: u32 = 75;
/// Windows in a row above or between the two before the longest delay changes, because one alone
/// may be a measuring error.
const WINDOWS_IN_A_ROW: u32 = 2;
/// The largest error: idle time counts in units of a tenth of a window.
const BUSY_ERROR: u32 = 10;
/// This cannot be an error.
const BUSY_SURELY: u32 = BUSY_MAX + BUSY_ERROR;
/// The longest delay starts here, and ends at the second.
const LOAD_DELAY_RANGE: (Duration, Duration) = (Duration::from_micros(50), Duration::from_micros(500));

/// The coalescing decision of one lane.
#[derive(Clone, Copy, Debug)]
pub struct RxCoalesce {
    max_delay: Duration,
    delay: Duration,
    batch: usize,
    /// Messages that may be queued during a delay.
    queued_max: usize,
    /// Messages of full batches since the last delay.
    pending: usize,
    active: bool,
    since_probe: u32,
    /// Average messages of a batch, times [`AVERAGE_SCALE`]; 0 before the first. None: only the
    /// last batch decides.
    average: Option<usize>,
    /// None: the longest delay is fixed.
    load: Option<LoadWatch>,
    /// By the load, the longest delay does not grow beyond this.
    load_max: Duration,
    level: Level,
    /// Windows in a row with that load; between the limits, since the longest delay changed.
    windows: u32,
}

/// How busy the CPUs were in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    /// Less than [`BUSY_MIN`].
    Low,
    Middle,
    /// [`BUSY_MAX`] or more.
    High,
}

impl RxCoalesce {
    /// A lane that receives at most `batch` messages at a time, delays for at most `longest` (zero
    /// for never), and has room for `room` messages in its receive buffer.
    #[must_use]
    pub fn new(longest: Duration, batch: usize, room: usize) -> Self {
        let messages_max = (room / RCVBUF_DIVISOR).max(MESSAGES_MIN);
        Self {
            max_delay: longest,
            delay: longest,
            batch,
            queued_max: messages_max,
            pending: 0,
            active: false,
            since_probe: 0,
            average: None,
            load: None,
            load_max: LOAD_DELAY_RANGE.1,
            level: Level::Low,
            windows: 0,
        }
    }

    /// The longest delay follows the load: see [`follow_load`](Self::follow_load).
    #[must_use]
    pub fn by_load(mut self) -> Self {
        self.load = Some(LoadWatch::default());
        self.set_max_delay(Duration::ZERO);
        self
    }

    /// By the load, the longest delay grows up to this, and not to 500 µs. Clients that wait for
    /// answers send less while they are delayed: for them, a long delay bounds the rate.
    #[must_use]
    pub fn up_to(mut self, longest: Duration) -> Self {
        self.load_max = longest;
        self
    }

    /// Decides by the average of the last batches: random traffic has small ones now and then.
    #[must_use]
    pub fn with_average(mut self) -> Self {
        self.average = Some(0);
        self
    }

    /// True if the last batch was full, or another queue has frames: the next receive must not
    /// sleep, because a delay may be due.
    #[inline]
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.pending > 0
    }

    /// True if the next [`next_delay`](Self::next_delay) may return a delay.
    #[inline]
    #[must_use]
    pub fn can_delay(&self) -> bool {
        !self.max_delay.is_zero() && (self.active || self.since_probe + 1 >= PROBE_BATCHES)
    }

    /// The longest delay.
    #[must_use]
    pub fn max_delay(&self) -> Duration {
        self.max_delay
    }

    /// Sets the longest delay, and the next one to the same.
    pub fn set_max_delay(&mut self, longest: Duration) {
        (self.max_delay, self.delay) = (longest, longest);
        if longest.is_zero() {
            (self.active, self.pending) = (false, 0);
        }
    }

    /// Adapts the longest delay at the end of a window, unless that is fixed. `open` opens
    /// `/proc/stat`.
    #[inline]
    pub fn follow_load<F: AsFd>(&mut self, open: impl FnOnce() -> Option<F>) {
        if let Some(percent) = self.load.as_mut().and_then(|load| load.next_window(open)) {
            self.set_busy(percent);
        }
    }

    fn set_busy(&mut self, percent: u32) {
        let (min, max) = (LOAD_DELAY_RANGE.0, self.load_max);
        let level = match percent {
            BUSY_MAX.. => Level::High,
            BUSY_MIN.. => Level::Middle,
            _ => Level::Low,
        };
        self.windows = if level == self.level { self.windows.saturating_add(1) } else { 1 };
        self.level = level;
        let is_settled = self.windows >= WINDOWS_IN_A_ROW || percent >= BUSY_SURELY;
        let longest = match level {
            Level::High | Level::Middle if !is_settled => return,
            Level::High => (self.max_delay * 2).clamp(min, max),
            _ if self.max_delay <= min => Duration::ZERO,
            _ => self.max_delay / 2,
        };
        if level == Level::Middle {
            self.windows = 0;
        }
        if longest != self.max_delay {
            self.set_max_delay(longest);
        }
    }

    /// Records a receive of `messages` while another queue of the lane has frames from before: no
    /// delay until they are received.
    #[inline]
    pub fn accumulate(&mut self, messages: usize) {
        if !self.max_delay.is_zero() {
            self.pending += messages;
        }
    }

    /// Records a receive of `messages`, and returns the delay to make, if any.
    #[inline]
    pub fn next_delay(&mut self, messages: usize) -> Option<Duration> {
        if self.max_delay.is_zero() {
            return None;
        }
        if messages == self.batch {
            self.pending += messages;
            return None;
        }
        let queued = std::mem::take(&mut self.pending) + messages;
        if self.active {
            self.active = self.is_worthwhile(queued);
            self.adapt(queued);
        } else {
            self.since_probe += 1;
            if self.since_probe >= PROBE_BATCHES {
                self.since_probe = 0;
                self.active = queued > 0;
                self.average = self.average.map(|_| 0);
            }
        }
        (self.active && self.delay >= DELAY_MIN.min(self.max_delay)).then_some(self.delay)
    }

    fn is_worthwhile(&mut self, queued: usize) -> bool {
        let Some(average) = &mut self.average else { return queued >= MESSAGES_MIN };
        let queued = queued.min(self.queued_max);
        *average = if *average == 0 {
            queued * AVERAGE_SCALE
        } else {
            *average - *average / 4 + queued * AVERAGE_SCALE / 4
        };
        *average >= AVERAGE_MESSAGES_MIN * AVERAGE_SCALE
    }

    fn adapt(&mut self, queued: usize) {
        if queued > self.queued_max {
            self.delay /= 2;
        } else if queued * 2 <= self.queued_max {
            self.delay = (self.delay.max(DELAY_MIN) * 2).min(self.max_delay);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DELAY: Duration = Duration::from_micros(100);
    const ROOM: usize = 10_000;

    fn coalescing(room: usize) -> RxCoalesce {
        let mut coalesce = RxCoalesce::new(DELAY, 64, room);
        assert!((1..PROBE_BATCHES).all(|_| coalesce.next_delay(1).is_none()));
        assert_eq!(coalesce.next_delay(1), Some(DELAY));
        coalesce
    }

    #[test]
    fn zero_never_pauses() {
        let mut coalesce = RxCoalesce::new(Duration::ZERO, 64, ROOM);
        assert!((0..100).all(|_| coalesce.next_delay(1).is_none()));
    }

    #[test]
    fn a_delay_is_probed_and_kept_while_it_pays() {
        let mut coalesce = coalescing(ROOM);
        assert_eq!(coalesce.next_delay(5), Some(DELAY));
        assert_eq!(coalesce.next_delay(2), Some(DELAY));
        assert_eq!(coalesce.next_delay(1), None);
        assert_eq!(coalesce.next_delay(5), None);
    }

    #[test]
    fn messages_of_all_queues_count_towards_one_delay() {
        let mut coalesce = coalescing(ROOM);
        (0..3).for_each(|_| coalesce.accumulate(1));
        assert!(coalesce.is_pending());
        // Four messages since the last delay, in batches of one.
        assert_eq!(coalesce.next_delay(1), Some(DELAY));
        assert!(!coalesce.is_pending());
        assert_eq!(coalesce.next_delay(1), None, "one message is not worth a delay");
        let mut never = RxCoalesce::new(Duration::ZERO, 64, ROOM);
        never.accumulate(1);
        assert!(!never.is_pending(), "without delays, none is pending");
    }

    #[test]
    fn average_batches_keep_the_delay_and_idleness_ends_it() {
        let mut coalesce = RxCoalesce::new(DELAY, usize::MAX, ROOM).with_average();
        let mut start = || {
            while coalesce.next_delay(1).is_none() {}
            coalesce
        };
        // One message at a time is not worth the first delay.
        assert_eq!(start().next_delay(1), None);
        let mut steady = start();
        assert!([5, 1, 4, 0, 6, 3].into_iter().all(|messages| steady.next_delay(messages) == Some(DELAY)));
        assert!((0..4).any(|_| steady.next_delay(0).is_none()));
        // However large a batch was, idle traffic ends the delays soon.
        let mut burst = RxCoalesce::new(DELAY, usize::MAX, 400).with_average();
        while burst.next_delay(1).is_none() {}
        burst.next_delay(1_000_000);
        assert!((0..16).any(|_| burst.next_delay(0).is_none()));
    }

    #[test]
    fn a_delay_is_announced() {
        let mut coalesce = RxCoalesce::new(DELAY, 64, ROOM);
        for messages in [1, 5, 2, 1].into_iter().cycle().take(100) {
            let may = coalesce.can_delay();
            let delay = coalesce.next_delay(messages);
            assert!(may || delay.is_none());
        }
        let mut coalesce = coalescing(ROOM);
        assert!(coalesce.can_delay());
        coalesce.set_max_delay(2 * DELAY);
        assert_eq!(coalesce.next_delay(2), Some(2 * DELAY));
        coalesce.set_max_delay(Duration::ZERO);
        assert_eq!((coalesce.can_delay(), coalesce.next_delay(2)), (false, None));
    }

    #[test]
    fn a_fixed_delay_opens_no_file() {
        let open = || -> Option<std::fs::File> { panic!("the load is of no interest") };
        coalescing(ROOM).follow_load(open);
    }

    #[test]
    fn a_backlogged_or_idle_lane_does_not_delay() {
        let mut coalesce = coalescing(ROOM);
        assert_eq!(coalesce.next_delay(64), None);
        assert_eq!(coalesce.next_delay(3), Some(DELAY));
        assert_eq!(coalesce.next_delay(0), None);
        assert_eq!(coalesce.next_delay(3), None);
    }

    #[test]
    fn a_full_batch_that_empties_the_queue_is_followed_by_a_delay() {
        let mut coalesce = RxCoalesce::new(DELAY, 64, ROOM);
        let mut after_full = || {
            assert_eq!((coalesce.next_delay(64), coalesce.is_pending()), (None, true));
            let delay = coalesce.next_delay(0);
            assert!(!coalesce.is_pending());
            delay
        };
        assert!((1..PROBE_BATCHES).all(|_| after_full().is_none()));
        assert!((0..5).all(|_| after_full() == Some(DELAY)));
        // Idle traffic ends the delays.
        assert_eq!(coalesce.next_delay(0), None);
        let mut never = RxCoalesce::new(Duration::ZERO, 64, ROOM);
        assert_eq!((never.next_delay(64), never.is_pending()), (None, false));
    }

    #[test]
    fn a_delay_shrinks_under_backlog_and_grows_back() {
        let mut coalesce = coalescing(800);
        assert_eq!(coalesce.next_delay(64), None);
        assert_eq!(coalesce.next_delay(64), None);
        assert_eq!(coalesce.next_delay(63), Some(DELAY));
        assert_eq!((0..3).find_map(|_| coalesce.next_delay(64)), None);
        assert_eq!(coalesce.next_delay(9), Some(DELAY / 2));
        assert_eq!((0..3).find_map(|_| coalesce.next_delay(64)), None);
        assert_eq!(coalesce.next_delay(9), Some(DELAY / 4));
        assert_eq!((0..3).find_map(|_| coalesce.next_delay(64)), None);
        assert_eq!(coalesce.next_delay(9), None);
        assert_eq!(coalesce.next_delay(30), Some(DELAY / 2));
        assert_eq!(coalesce.next_delay(30), Some(DELAY));
        assert_eq!(coalesce.next_delay(30), Some(DELAY));
    }

    #[test]
    fn a_small_receive_buffer_bounds_the_delay() {
        let mut coalesce = coalescing(52);
        assert_eq!(coalesce.next_delay(13), Some(DELAY));
        assert_eq!(coalesce.next_delay(14), Some(DELAY / 2));
    }

    #[test]
    fn the_longest_delay_follows_the_load() {
        let mut coalesce = RxCoalesce::new(Duration::ZERO, 64, ROOM);
        let mut after = |busy| {
            coalesce.set_busy(busy);
            coalesce.max_delay().as_micros()
        };
        assert_eq!([49, 50, 74, 75, 60, 84, 49].map(&mut after), [0; 7]);
        assert_eq!([75, 84, 75, 60].map(&mut after), [0, 50, 100, 100]);
        assert_eq!([85, 100, 100, 100].map(&mut after), [200, 400, 500, 500]);
        assert_eq!([50, 49, 0, 0, 0, 0].map(&mut after), [500, 250, 125, 62, 31, 0]);
        assert_eq!([85, 75, 75, 84].map(&mut after), [50, 100, 200, 400]);
        assert_eq!([50, 74, 60, 75, 60].map(&mut after), [400, 200, 200, 200, 200]);
        assert_eq!([60, 60, 60, 60, 60, 60].map(&mut after), [100, 100, 50, 50, 0, 0]);
        coalesce = coalesce.up_to(DELAY);
        coalesce.set_busy(100);
        let longest = [100, 100, 100].map(|busy| {
            coalesce.set_busy(busy);
            coalesce.max_delay()
        });
        assert_eq!(longest, [DELAY; 3]);
    }

    #[test]
    fn a_lane_without_a_delay_has_none_pending() {
        let mut coalesce = coalescing(ROOM);
        coalesce.accumulate(1);
        assert!(coalesce.is_pending());
        (0..4).for_each(|_| coalesce.set_busy(0));
        assert!(!coalesce.is_pending() && coalesce.next_delay(5).is_none());
    }
}
