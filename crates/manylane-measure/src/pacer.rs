//! Sending at a rate: computes how many datagrams are due from the time since the start. It reads
//! no clock.
//!
//! The schedule is absolute: a delay does not lower the rate. Datagrams are sent in bursts,
//! because one wake-up per datagram would cost more than the datagram.

use std::time::Duration;

/// The time span of one burst, unless it would be less than one datagram.
const BURST_SECS: f64 = 100e-6;

/// A rate, absolute from the start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Pacer {
    /// Datagrams per second; `None` means no limit.
    pps: Option<f64>,
    /// Datagrams of one burst.
    burst: u64,
}

/// Next step of the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// Send this number of datagrams, which were due `late` ago.
    Now {
        /// Datagrams, at least one.
        count: u64,
        /// Delay of the first of them behind the schedule.
        late: Duration,
    },
    /// Wait for this time.
    In(Duration),
}

impl Pacer {
    /// `pps` datagrams per second (no limit if `None`), in bursts of at most `burst_max`.
    #[must_use]
    pub(crate) fn new(pps: Option<f64>, burst_max: u64) -> Pacer {
        let burst_max = burst_max.max(1);
        let burst = pps.map_or(burst_max, |pps| ((pps * BURST_SECS) as u64).clamp(1, burst_max));
        Pacer { pps, burst }
    }

    /// Datagrams of one burst.
    #[must_use]
    pub(crate) fn burst(&self) -> u64 {
        self.burst
    }

    /// The next step, `elapsed` after the start and after `sent` datagrams.
    #[must_use]
    pub(crate) fn due(&self, sent: u64, elapsed: Duration) -> Due {
        let Some(pps) = self.pps else { return Due::Now { count: self.burst, late: Duration::ZERO } };
        // Datagram number `sent` is due at sent / pps. A burst is due with its first datagram.
        let at = seconds(sent as f64 / pps);
        if elapsed < at {
            return Due::In(at - elapsed);
        }
        Due::Now { count: self.burst, late: elapsed - at }
    }
}

/// As `Duration::from_secs_f64`, but a rate near zero means a long wait and not a panic.
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::from_secs(3600))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Follows the pace on a clock that jumps by `step` at each reading.
    fn follow(pace: Pacer, step: Duration, until: Duration) -> (u64, Duration) {
        let (mut sent, mut now, mut worst) = (0, Duration::ZERO, Duration::ZERO);
        while now < until {
            match pace.due(sent, now) {
                Due::Now { count, late } => {
                    sent += count;
                    worst = worst.max(late);
                }
                Due::In(wait) => now += wait.max(step),
            }
        }
        (sent, worst)
    }

    #[test]
    fn the_rate_is_kept() {
        for pps in [10.0, 999.0, 50_000.0, 500_000.0, 3_000_000.0] {
            let pace = Pacer::new(Some(pps), 64);
            let (sent, _) = follow(pace, Duration::from_nanos(1), Duration::from_secs(10));
            let off = (sent as f64 - pps * 10.0).abs();
            assert!(off <= pace.burst() as f64 + 1.0, "{pps}: {sent}");
        }
    }

    #[test]
    fn a_sender_that_oversleeps_catches_up() {
        let pace = Pacer::new(Some(100_000.0), 64);
        let (sent, worst) = follow(pace, Duration::from_millis(5), Duration::from_secs(2));
        assert!((199_000..=200_064).contains(&sent), "{sent}");
        assert!(worst > Duration::from_millis(4) && worst < Duration::from_millis(6), "{worst:?}");
    }

    #[test]
    fn without_a_rate_everything_is_due() {
        let pace = Pacer::new(None, 32);
        assert_eq!(pace.due(1 << 40, Duration::ZERO), Due::Now { count: 32, late: Duration::ZERO });
    }

    #[test]
    fn odd_rates_do_not_panic() {
        for pps in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-300] {
            let _ = Pacer::new(Some(pps), 64).due(1, Duration::from_secs(1));
        }
    }

    #[test]
    fn slow_rates_send_single_datagrams() {
        assert_eq!(Pacer::new(Some(9_000.0), 64).burst(), 1);
        assert_eq!(Pacer::new(Some(500_000.0), 64).burst(), 50);
        assert_eq!(Pacer::new(Some(5e6), 64).burst(), 64);
    }
}
