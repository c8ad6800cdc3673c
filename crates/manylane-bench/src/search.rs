//! The sustained rate: the highest rate that a receiver handles without loss and without a queue
//! that grows. A rate without loss alone would measure how deep the queue is.
//!
//! The search starts from below. In a flood above that rate, the kernel spends its time on
//! datagrams that it then drops, so that trials from above would see a collapsed receiver.

use std::time::Duration;

use anyhow::Result;

use crate::schema::Sample;

/// Result of one trial.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Trial {
    /// Datagrams per second that the sender really sent.
    pub offered_pps: f64,
    /// Share of datagrams that was lost.
    pub loss: f64,
    /// Time that datagrams wait: that in which those queued at the end arrived, or the 99th
    /// percentile of the latency where it is known.
    pub delay: Duration,
}

impl Trial {
    /// That of a sample.
    pub(crate) fn of_sample(sample: &Sample) -> Self {
        Self {
            offered_pps: sample.offered_pps,
            loss: sample.loss,
            delay: queue_delay(sample.queued_at_end, sample.offered_pps),
        }
    }
}

/// Time in which `queued` datagrams arrive at `pps`.
pub(crate) fn queue_delay(queued: u64, pps: f64) -> Duration {
    Duration::try_from_secs_f64(queued as f64 / pps.max(1.0)).unwrap_or(Duration::MAX)
}

/// Limits of the search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// First rate that is tried.
    pub start_pps: f64,
    /// Rate at which the search stops.
    pub max_pps: f64,
    /// Maximum share of lost datagrams.
    pub loss: f64,
    /// Maximum time that datagrams wait.
    pub delay: Duration,
    /// Length of a trial. In one that is shorter than two seconds, a queue hides what is too much:
    /// its result is an estimate.
    pub trial: Duration,
    /// The search ends when pass and failure are this close, as a share of the rate.
    pub precision: f64,
    /// Attempts at a rate, because noise of the machine must not look like a limit of the
    /// receiver.
    pub attempts: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            start_pps: 50_000.0,
            max_pps: 20e6,
            loss: 0.0,
            delay: DELAY_MAX,
            trial: TRIAL_DURATION,
            precision: 0.03,
            attempts: 3,
        }
    }
}

impl Limits {
    /// The limits of quick runs with samples of `duration`: they estimate.
    pub(crate) fn quick(duration: Duration) -> Self {
        Self { trial: duration.min(QUICK_TRIAL_DURATION), precision: 0.1, ..Self::default() }
    }

    /// These limits for a receiver of which only matters whether it sustains less than `lowest`,
    /// the result of an earlier search.
    pub(crate) fn below(self, lowest: f64) -> Self {
        if lowest.is_finite() { Self { start_pps: lowest, max_pps: lowest, ..self } } else { self }
    }
}

/// Length of a trial, and its maximum in quick runs.
const TRIAL_DURATION: Duration = Duration::from_secs(2);
const QUICK_TRIAL_DURATION: Duration = Duration::from_millis(500);
/// Maximum time that datagrams wait at a sustained rate.
const DELAY_MAX: Duration = Duration::from_millis(5);

/// Result of the search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SearchResult {
    /// Highest confirmed rate; 0 if even the lowest tried rate loses datagrams.
    pub pps: f64,
    /// True if the sender could not send faster: the receiver can handle at least this.
    pub sender_limited: bool,
    /// Number of trials.
    pub trials: usize,
}

/// A sender that reaches less than this share of the requested rate is at its own limit.
const SENDER_FRACTION_MIN: f64 = 0.95;
/// Factor by which the rate grows at each step without loss.
const GROWTH_FACTOR: f64 = 1.6;
/// Rates below this say nothing about a receiver: the machine is busy with something else.
const RATE_MIN_PPS: f64 = 1000.0;

/// Searches for the highest rate that passes `trial`, which gets the rate to offer.
///
/// The answer is a rate that was really offered and passed twice.
pub fn sustained_rate(limits: &Limits, mut trial: impl FnMut(f64) -> Result<Trial>) -> Result<SearchResult> {
    let mut search = Search { limits, trial: &mut trial, trials: 0 };
    let mut rate = limits.start_pps.max(RATE_MIN_PPS).min(limits.max_pps);
    let (mut good, mut bad, mut sender_limited) = (0.0_f64, f64::INFINITY, false);

    // Go up until datagrams are lost, or down until none are.
    loop {
        match search.try_rate(rate)? {
            Some(seen) => {
                good = good.max(seen.min(rate));
                sender_limited = seen < rate * SENDER_FRACTION_MIN;
                if sender_limited || bad.is_finite() || rate >= limits.max_pps {
                    break;
                }
                rate = (rate * GROWTH_FACTOR).min(limits.max_pps);
            }
            None => {
                bad = rate;
                if good > 0.0 {
                    break;
                }
                rate /= GROWTH_FACTOR;
                if rate < RATE_MIN_PPS {
                    return Ok(SearchResult { pps: 0.0, sender_limited: false, trials: search.trials });
                }
            }
        }
    }
    // Bisect between the two.
    while bad.is_finite() && bad - good > limits.precision * good {
        let middle = f64::midpoint(good, bad);
        match search.try_rate(middle)? {
            Some(seen) if seen < middle * SENDER_FRACTION_MIN => {
                good = good.max(seen);
                sender_limited = true;
                break;
            }
            Some(seen) => good = good.max(seen.min(middle)),
            None => bad = middle,
        }
    }
    // A rate that passed once may have been lucky: only one that passes again is reported.
    while good >= RATE_MIN_PPS {
        if search.try_rate(good)?.is_some() {
            return Ok(SearchResult { pps: good, sender_limited, trials: search.trials });
        }
        good *= 1.0 - limits.precision;
        sender_limited = false;
    }
    Ok(SearchResult { pps: 0.0, sender_limited: false, trials: search.trials })
}

struct Search<'a, T> {
    limits: &'a Limits,
    trial: &'a mut T,
    trials: usize,
}

impl<T: FnMut(f64) -> Result<Trial>> Search<'_, T> {
    /// The rate that was really offered, if `rate` stayed within the limit.
    ///
    /// Losses and a slow sender have the same number of attempts, because the machine may have
    /// caused either. An attempt with a slow sender says nothing about the receiver.
    fn try_rate(&mut self, rate: f64) -> Result<Option<f64>> {
        let tries = self.limits.attempts.max(1);
        let (mut lost, mut behind, mut fastest) = (0, 0, 0.0_f64);
        while lost < tries && behind < tries {
            self.trials += 1;
            let seen = (self.trial)(rate)?;
            let keeps_up = seen.loss <= self.limits.loss && seen.delay <= self.limits.delay;
            if !keeps_up || seen.offered_pps <= 0.0 {
                lost += 1;
            } else if seen.offered_pps >= rate * SENDER_FRACTION_MIN {
                return Ok(Some(seen.offered_pps));
            } else {
                behind += 1;
                fastest = fastest.max(seen.offered_pps);
            }
        }
        Ok((lost < tries).then_some(fastest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A receiver that handles everything up to `knee` and collapses above it, with a sender that
    /// reaches at most `sender`.
    fn receiver(knee: f64, sender: f64) -> impl FnMut(f64) -> Result<Trial> {
        move |rate| {
            let offered_pps = rate.min(sender);
            let loss = if offered_pps <= knee { 0.0 } else { 0.5 };
            Ok(Trial { offered_pps, loss, delay: Duration::ZERO })
        }
    }

    #[test]
    fn finds_a_known_knee_within_the_precision() {
        let limits = Limits::default();
        for knee in [1_500.0, 49_999.0, 50_000.0, 312_345.0, 1_000_000.0, 7_654_321.0] {
            let found = sustained_rate(&limits, receiver(knee, 1e9)).unwrap();
            assert!(found.pps <= knee, "{found:?} is above {knee}");
            assert!(found.pps >= knee * (1.0 - limits.precision), "{found:?} is far below {knee}");
            assert!(!found.sender_limited && found.trials < 60, "{found:?}");
        }
    }

    #[test]
    fn says_when_the_sender_is_the_limit() {
        let found = sustained_rate(&Limits::default(), receiver(5e6, 400_000.0)).unwrap();
        assert_eq!((found.pps, found.sender_limited), (400_000.0, true));
    }

    #[test]
    fn a_sender_that_hesitates_once_is_not_a_limit() {
        let mut inner = receiver(312_345.0, 1e9);
        let mut calls = 0;
        let found = sustained_rate(&Limits::default(), |rate| {
            calls += 1;
            inner(if calls % 3 == 0 { rate / 2.0 } else { rate })
        });
        let found = found.unwrap();
        assert!((300_000.0..=312_345.0).contains(&found.pps) && !found.sender_limited, "{found:?}");
    }

    #[test]
    fn stops_at_the_highest_rate_allowed() {
        let limits = Limits { max_pps: 100_000.0, ..Limits::default() };
        let found = sustained_rate(&limits, receiver(5e6, 1e9)).unwrap();
        assert_eq!((found.pps, found.sender_limited), (100_000.0, false));
    }

    #[test]
    fn a_receiver_that_always_loses_sustains_no_rate() {
        let found = sustained_rate(&Limits::default(), receiver(0.0, 1e9)).unwrap();
        assert_eq!(found.pps, 0.0);
    }

    #[test]
    fn a_single_hiccup_does_not_lower_the_answer() {
        let mut inner = receiver(312_345.0, 1e9);
        let mut calls = 0;
        let found = sustained_rate(&Limits::default(), |rate| {
            calls += 1;
            let mut seen = inner(rate)?;
            if calls % 5 == 0 {
                seen.loss = 0.2;
            }
            Ok(seen)
        });
        let pps = found.unwrap().pps;
        assert!((300_000.0..=312_345.0).contains(&pps), "{pps}");
    }

    #[test]
    fn a_queue_that_grows_is_no_sustained_rate() {
        // It handles 300,000 per second, has room for all of 2 s, and loses nothing.
        let found = sustained_rate(&Limits::default(), |rate| {
            let queued = (rate - 300_000.0).max(0.0) * TRIAL_DURATION.as_secs_f64();
            Ok(Trial { offered_pps: rate, loss: 0.0, delay: Duration::from_secs_f64(queued / rate) })
        });
        let pps = found.unwrap().pps;
        assert!((291_000.0..=300_800.0).contains(&pps), "{pps}");
    }

    #[test]
    fn an_error_of_a_trial_ends_the_search() {
        assert!(sustained_rate(&Limits::default(), |_| anyhow::bail!("no sender")).is_err());
    }
}
