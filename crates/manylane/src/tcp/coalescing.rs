//! Delays of a lane before it sleeps, so that one wake-up serves more packets: see
//! [`rx_coalesce`](manylane_policy::rx_coalesce).

use std::time::Duration;

use manylane_policy::rx_coalesce::RxCoalesce;
use manylane_sys::{cpu, tick};

/// Waits per read of the coarse clock, for the load.
const WAITS_PER_CLOCK_READ: u32 = 16;
/// Longest delay, unless the user sets one. Near saturation of closed loops, a longer one makes
/// rates lower and saves nothing.
const DELAY_MAX: Duration = Duration::from_micros(100);

/// The delays of a lane, and what it has received since the last one.
pub(super) struct Coalescing {
    rx: RxCoalesce,
    waits: u32,
    received: usize,
}

impl Coalescing {
    /// Delays for at most `longest`; none: as the load requires. `room`: packets that the rings of
    /// the lane take.
    pub(super) fn new(longest: Option<Duration>, room: usize) -> Coalescing {
        let rx = RxCoalesce::new(longest.unwrap_or_default(), usize::MAX, room);
        let rx = if longest.is_none() { rx.by_load().up_to(DELAY_MAX) } else { rx };
        Coalescing { rx, waits: 0, received: 0 }
    }

    /// Notes what was received.
    pub(super) fn note(&mut self, received: usize) {
        self.received += received;
    }

    /// Delays before a sleep, if that pays and ends within `max`.
    pub(super) fn delay(&mut self, max: Duration) {
        self.waits = self.waits.wrapping_add(1);
        if self.waits.is_multiple_of(WAITS_PER_CLOCK_READ) {
            self.rx.follow_load(|| cpu::open_stat().ok());
        }
        if let Some(delay) = self.next_delay().filter(|delay| *delay <= max) {
            tick::sleep(delay);
        }
    }

    fn next_delay(&mut self) -> Option<Duration> {
        self.rx.next_delay(std::mem::take(&mut self.received))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DELAY: Duration = Duration::from_micros(100);

    #[test]
    fn a_delay_follows_what_was_received_since_the_last_one() {
        let mut coalescing = Coalescing::new(Some(DELAY), 4096);
        let mut next = |received: &[usize]| {
            received.iter().for_each(|received| coalescing.note(*received));
            coalescing.next_delay()
        };
        while next(&[2]).is_none() {}
        assert_eq!(next(&[2]), Some(DELAY));
        assert_eq!(next(&[1, 1]), Some(DELAY), "two packets, in two waits");
        assert_eq!(next(&[1]), None, "one packet is not worth a delay");
    }

    #[test]
    fn without_a_delay_or_a_load_there_is_none() {
        for longest in [Some(Duration::ZERO), None] {
            let mut coalescing = Coalescing::new(longest, 4096);
            for _ in 0..100 {
                coalescing.note(8);
                assert_eq!(coalescing.next_delay(), None);
            }
        }
    }
}
