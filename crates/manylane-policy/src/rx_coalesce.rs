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
//! The decision uses the sizes of batches alone. The clock is read once a delay.

use std::sync::OnceLock;
use std::time::Duration;

use manylane_sys::{cpu, tick};

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

/// Default delay if `lanes` share `cpus`: each CPU wakes about every 100 µs, however many lanes
/// share it, but each lane at least every millisecond.
#[must_use]
pub fn default_delay(lanes: usize, cpus: usize) -> Duration {
    match lanes.div_ceil(cpus.max(1)) {
        0 | 1 => Duration::ZERO,
        sharing => Duration::from_micros((100 * sharing as u64).min(1000)),
    }
}

/// The minimum delay of engine `xdp`, in wake-up costs: wake-ups then take at most a twentieth of
/// a CPU.
const WAKEUP_COST_FACTOR: u32 = 20;
/// Range of that minimum.
const XDP_DELAY_RANGE: (Duration, Duration) = (Duration::from_micros(50), Duration::from_micros(500));

/// Default minimum delay of engine `xdp`. Receiving a frame costs so little that a wake-up for
/// each would be most of the work. The cost of a wake-up depends on the machine: about a
/// microsecond on bare metal, and ten or more in a virtual machine. So it is measured once per
/// process, in about a millisecond.
#[must_use]
pub fn xdp_delay() -> Duration {
    static DELAY: OnceLock<Duration> = OnceLock::new();
    *DELAY.get_or_init(|| delay_for_cost(wakeup_cost()))
}

fn delay_for_cost(cost: Duration) -> Duration {
    let (shortest, longest) = XDP_DELAY_RANGE;
    (cost * WAKEUP_COST_FACTOR).clamp(shortest, longest)
}

/// CPU time of a sleep and its wake-up.
fn wakeup_cost() -> Duration {
    const SLEEPS: u32 = 16;
    let before = cpu::thread_cpu_time();
    (0..SLEEPS).for_each(|_| tick::sleep(Duration::from_micros(50)));
    cpu::thread_cpu_time().saturating_sub(before) / SLEEPS
}

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
        }
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
    fn xdp_lanes_delay_by_wakeup_cost() {
        let micros = Duration::from_micros;
        for (cost, delay) in [(0, 50), (1, 50), (4, 80), (20, 400), (25, 500), (1000, 500)] {
            assert_eq!(delay_for_cost(micros(cost)), micros(delay));
        }
        let (shortest, longest) = XDP_DELAY_RANGE;
        assert!((shortest..=longest).contains(&xdp_delay()));
        assert_eq!(xdp_delay(), xdp_delay());
    }

    #[test]
    fn the_wakeup_rate_of_a_cpu_is_independent_of_its_lanes() {
        assert_eq!(default_delay(4, 4), Duration::ZERO);
        assert_eq!(default_delay(1, 0), Duration::ZERO);
        assert_eq!(default_delay(5, 4), Duration::from_micros(200));
        assert_eq!(default_delay(8, 1), Duration::from_micros(800));
        assert_eq!(default_delay(256, 2), Duration::from_millis(1));
    }
}
