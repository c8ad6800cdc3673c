//! Lingering: whether a lane that has emptied its queue pauses before it asks for more.
//!
//! Lanes that share a core pay for their number with wake-ups: each datagram wakes another thread. Like a network
//! card that moderates its interrupts, such a lane may pause after a batch, so that the next one is larger. Lanes
//! pause to a common beat, so that a core wakes once for all that share it. The first datagram after silence is
//! still handled at once; it is what comes right behind it that waits, for the pause at most.
//!
//! 1. Now and then a pause is tried. It is kept up while the batches after it are larger than one message.
//! 2. After a full batch there is no pause: more is waiting. Should it turn out that nothing was (drivers hand over as many
//!    frames at a time as a batch has), the pause that is owed follows, instead of a sleep until the next datagram.
//! 3. Nor is there one while another queue of the lane has something that came before: whatever came during a pause is taken
//!    before the next one.
//! 4. What fills more of the receive buffer than is safe halves the pause; little doubles it again.
//!
//! Decided from the sizes of batches alone; the clock is read once a pause. The library's lanes and those of the preload
//! library decide alike, which is why this is here.

use std::sync::OnceLock;
use std::time::Duration;

use crate::{cpu, tick};

/// A pause is tried after so many batches without one.
const TRY_EVERY: u32 = 16;
/// Messages that a batch after a pause must bring for the pause to be worth its own wake-up.
const WORTH: usize = 2;
/// The same on the average, where every message costs system calls of its own: two or three then save nothing.
const WORTH_ON_AVERAGE: usize = 3;
/// What averages are counted in.
const PARTS: usize = 8;
/// Below this a pause costs more than it saves.
const SHORTEST: Duration = Duration::from_micros(25);
/// A pause may let this share of the receive buffer fill; the rest is for bursts.
const SHARE_OF_ROOM: usize = 4;

/// How long lanes pause where `lanes` share `cores`, if the user does not say: each core wakes about every
/// 100 µs, however many lanes share it, but each lane at least every millisecond.
#[must_use]
pub fn default_pause(lanes: usize, cores: usize) -> Duration {
    match lanes.div_ceil(cores.max(1)) {
        0 | 1 => Duration::ZERO,
        sharing => Duration::from_micros((100 * sharing as u64).min(1000)),
    }
}

/// Lanes of the engine `xdp` pause for so many times what a wake-up costs: it then costs a twentieth of a core at most.
const TIMES_THE_COST: u32 = 20;
/// But at least and at most so long.
const FRAMES_PAUSE: (Duration, Duration) = (Duration::from_micros(50), Duration::from_micros(500));

/// How long lanes of the engine `xdp` pause at least, if the user does not say. To take a frame costs so little that
/// waking up for each would be most of the work, and what a wake-up costs is not the same everywhere: about a
/// microsecond on bare metal, and ten or more in a virtual machine. So it is measured, once a process, in about a
/// millisecond.
#[must_use]
pub fn pause_for_frames() -> Duration {
    static PAUSE: OnceLock<Duration> = OnceLock::new();
    *PAUSE.get_or_init(|| pause_at(cost_of_waking()))
}

fn pause_at(cost: Duration) -> Duration {
    let (shortest, longest) = FRAMES_PAUSE;
    (cost * TIMES_THE_COST).clamp(shortest, longest)
}

/// CPU time of one sleep and the wake-up from it.
fn cost_of_waking() -> Duration {
    const SLEEPS: u32 = 16;
    let before = cpu::thread_time();
    (0..SLEEPS).for_each(|_| tick::sleep(Duration::from_micros(50)));
    cpu::thread_time().saturating_sub(before) / SLEEPS
}

/// The decision of one lane.
#[derive(Clone, Copy, Debug)]
pub struct Linger {
    longest: Duration,
    pause: Duration,
    batch: usize,
    /// Messages that a pause may let queue up.
    most: usize,
    /// Messages of full batches since the last pause.
    gathered: usize,
    on: bool,
    since_tried: u32,
    /// Messages of a batch on the average, in [`PARTS`]; 0 before the first. None: the last batch alone decides.
    average: Option<usize>,
}

impl Linger {
    /// A lane that takes at most `batch` messages at once, pauses for at most `longest` (zero for never), and has
    /// room for `room` messages in its receive buffer.
    #[must_use]
    pub fn new(longest: Duration, batch: usize, room: usize) -> Self {
        let most = (room / SHARE_OF_ROOM).max(WORTH);
        Self { longest, pause: longest, batch, most, gathered: 0, on: false, since_tried: 0, average: None }
    }

    /// Decides by the average of the last batches from now on: traffic that comes by chance brings a small one now and then.
    #[must_use]
    pub fn on_average(mut self) -> Self {
        self.average = Some(0);
        self
    }

    /// Whether the last batch was full, or another queue has something: the next receive shall not sleep, since a pause may
    /// be due.
    #[inline]
    #[must_use]
    pub fn is_owed(&self) -> bool {
        self.gathered > 0
    }

    /// Whether the next [`after`](Self::after) may be answered by a pause.
    #[inline]
    #[must_use]
    pub fn may_pause(&self) -> bool {
        !self.longest.is_zero() && (self.on || self.since_tried + 1 >= TRY_EVERY)
    }

    /// The longest pause.
    #[must_use]
    pub fn longest(&self) -> Duration {
        self.longest
    }

    /// Another longest pause, which is the next one, too.
    pub fn set_longest(&mut self, longest: Duration) {
        (self.longest, self.pause) = (longest, longest);
    }

    /// A receive brought `messages`, and what came meanwhile to another queue of the lane waits, too: no pause before that is
    /// taken.
    #[inline]
    pub fn go_on(&mut self, messages: usize) {
        if !self.longest.is_zero() {
            self.gathered += messages;
        }
    }

    /// What to do after a receive that brought `messages`: how long to pause, if at all.
    #[inline]
    pub fn after(&mut self, messages: usize) -> Option<Duration> {
        if self.longest.is_zero() {
            return None;
        }
        if messages == self.batch {
            self.gathered += messages;
            return None;
        }
        let queued = std::mem::take(&mut self.gathered) + messages;
        if self.on {
            self.on = self.is_worth_it(queued);
            self.adapt(queued);
        } else {
            self.since_tried += 1;
            if self.since_tried >= TRY_EVERY {
                self.since_tried = 0;
                self.on = queued > 0;
                self.average = self.average.map(|_| 0);
            }
        }
        (self.on && self.pause >= SHORTEST.min(self.longest)).then_some(self.pause)
    }

    fn is_worth_it(&mut self, queued: usize) -> bool {
        let Some(average) = &mut self.average else { return queued >= WORTH };
        let queued = queued.min(self.most);
        *average = if *average == 0 { queued * PARTS } else { *average - *average / 4 + queued * PARTS / 4 };
        *average >= WORTH_ON_AVERAGE * PARTS
    }

    fn adapt(&mut self, queued: usize) {
        if queued > self.most {
            self.pause /= 2;
        } else if queued * 2 <= self.most {
            self.pause = (self.pause.max(SHORTEST) * 2).min(self.longest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Duration = Duration::from_micros(100);
    const ROOM: usize = 10_000;

    fn lingering(room: usize) -> Linger {
        let mut linger = Linger::new(PAUSE, 64, room);
        assert!((1..TRY_EVERY).all(|_| linger.after(1).is_none()));
        assert_eq!(linger.after(1), Some(PAUSE));
        linger
    }

    #[test]
    fn zero_never_pauses() {
        let mut linger = Linger::new(Duration::ZERO, 64, ROOM);
        assert!((0..100).all(|_| linger.after(1).is_none()));
    }

    #[test]
    fn a_pause_is_tried_now_and_then_and_kept_while_it_pays() {
        let mut linger = lingering(ROOM);
        assert_eq!(linger.after(5), Some(PAUSE));
        assert_eq!(linger.after(2), Some(PAUSE));
        assert_eq!(linger.after(1), None);
        assert_eq!(linger.after(5), None);
    }

    #[test]
    fn there_is_no_pause_before_other_queues_had_their_turn_and_all_of_them_count() {
        let mut linger = lingering(ROOM);
        (0..3).for_each(|_| linger.go_on(1));
        assert!(linger.is_owed());
        // Four messages since the last pause, in batches of one.
        assert_eq!(linger.after(1), Some(PAUSE));
        assert!(!linger.is_owed());
        assert_eq!(linger.after(1), None, "one message is not worth a pause");
        let mut never = Linger::new(Duration::ZERO, 64, ROOM);
        never.go_on(1);
        assert!(!never.is_owed(), "who never pauses owes none");
    }

    #[test]
    fn on_average_a_small_batch_ends_nothing_and_silence_does() {
        let mut linger = Linger::new(PAUSE, usize::MAX, ROOM).on_average();
        let mut start = || {
            while linger.after(1).is_none() {}
            linger
        };
        // One at a time is not worth the first pause.
        assert_eq!(start().after(1), None);
        let mut steady = start();
        assert!([5, 1, 4, 0, 6, 3].into_iter().all(|messages| steady.after(messages) == Some(PAUSE)));
        assert!((0..4).any(|_| steady.after(0).is_none()));
        // However large a batch was, silence ends it soon.
        let mut burst = Linger::new(PAUSE, usize::MAX, 400).on_average();
        while burst.after(1).is_none() {}
        burst.after(1_000_000);
        assert!((0..16).any(|_| burst.after(0).is_none()));
    }

    #[test]
    fn a_pause_is_announced() {
        let mut linger = Linger::new(PAUSE, 64, ROOM);
        for messages in [1, 5, 2, 1].into_iter().cycle().take(100) {
            let may = linger.may_pause();
            let pause = linger.after(messages);
            assert!(may || pause.is_none());
        }
        let mut linger = lingering(ROOM);
        assert!(linger.may_pause());
        linger.set_longest(2 * PAUSE);
        assert_eq!(linger.after(2), Some(2 * PAUSE));
        linger.set_longest(Duration::ZERO);
        assert_eq!((linger.may_pause(), linger.after(2)), (false, None));
    }

    #[test]
    fn a_lane_that_is_behind_or_idle_does_not_pause() {
        let mut linger = lingering(ROOM);
        assert_eq!(linger.after(64), None);
        assert_eq!(linger.after(3), Some(PAUSE));
        assert_eq!(linger.after(0), None);
        assert_eq!(linger.after(3), None);
    }

    #[test]
    fn full_batches_behind_which_there_is_nothing_are_followed_by_the_pause_they_are_owed() {
        let mut linger = Linger::new(PAUSE, 64, ROOM);
        let mut after_full = || {
            assert_eq!((linger.after(64), linger.is_owed()), (None, true));
            let pause = linger.after(0);
            assert!(!linger.is_owed());
            pause
        };
        assert!((1..TRY_EVERY).all(|_| after_full().is_none()));
        assert!((0..5).all(|_| after_full() == Some(PAUSE)));
        // Silence ends it.
        assert_eq!(linger.after(0), None);
        let mut never = Linger::new(Duration::ZERO, 64, ROOM);
        assert_eq!((never.after(64), never.is_owed()), (None, false));
    }

    #[test]
    fn a_pause_shrinks_while_too_much_queues_up_and_grows_back() {
        let mut linger = lingering(800);
        assert_eq!(linger.after(64), None);
        assert_eq!(linger.after(64), None);
        assert_eq!(linger.after(63), Some(PAUSE));
        assert_eq!((0..3).find_map(|_| linger.after(64)), None);
        assert_eq!(linger.after(9), Some(PAUSE / 2));
        assert_eq!((0..3).find_map(|_| linger.after(64)), None);
        assert_eq!(linger.after(9), Some(PAUSE / 4));
        assert_eq!((0..3).find_map(|_| linger.after(64)), None);
        assert_eq!(linger.after(9), None);
        assert_eq!(linger.after(30), Some(PAUSE / 2));
        assert_eq!(linger.after(30), Some(PAUSE));
        assert_eq!(linger.after(30), Some(PAUSE));
    }

    #[test]
    fn a_small_receive_buffer_keeps_the_pause_short() {
        let mut linger = lingering(52);
        assert_eq!(linger.after(13), Some(PAUSE));
        assert_eq!(linger.after(14), Some(PAUSE / 2));
    }

    #[test]
    fn lanes_of_frames_pause_by_what_waking_up_costs() {
        let micros = Duration::from_micros;
        for (cost, pause) in [(0, 50), (1, 50), (4, 80), (20, 400), (25, 500), (1000, 500)] {
            assert_eq!(pause_at(micros(cost)), micros(pause));
        }
        let (shortest, longest) = FRAMES_PAUSE;
        assert!((shortest..=longest).contains(&pause_for_frames()));
        assert_eq!(pause_for_frames(), pause_for_frames());
    }

    #[test]
    fn each_core_wakes_about_as_often_however_many_lanes_share_it() {
        assert_eq!(default_pause(4, 4), Duration::ZERO);
        assert_eq!(default_pause(1, 0), Duration::ZERO);
        assert_eq!(default_pause(5, 4), Duration::from_micros(200));
        assert_eq!(default_pause(8, 1), Duration::from_micros(800));
        assert_eq!(default_pause(256, 2), Duration::from_millis(1));
    }
}
