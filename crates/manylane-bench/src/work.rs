//! Simulated work of an application: a given time for each datagram, without reading a clock.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// Steps of a measurement, and number of measurements. The fastest counts, because other programs
/// can only make one slower.
const CALIBRATION_STEPS: u32 = 1 << 13;
const CALIBRATION_RUNS: usize = 200;

/// Work of a given length, or none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SyntheticWork {
    /// Requested nanoseconds.
    nanos: u64,
    /// Number of steps that takes this time on this machine.
    steps: u32,
}

impl SyntheticWork {
    /// Work of `nanoseconds`, calibrated on this machine now.
    #[must_use]
    pub fn calibrate(nanos: u64) -> Self {
        if nanos == 0 {
            return Self::default();
        }
        let once = || {
            let start = Instant::now();
            run_steps(CALIBRATION_STEPS);
            start.elapsed()
        };
        let fastest = (0..CALIBRATION_RUNS).map(|_| once()).min().unwrap_or(Duration::ZERO);
        let step = fastest.as_nanos().max(1) as f64 / f64::from(CALIBRATION_STEPS);
        // A conversion from floating point saturates.
        Self { nanos, steps: ((nanos as f64 / step) as u32).max(1) }
    }

    /// Requested nanoseconds.
    #[must_use]
    pub fn nanos(self) -> u64 {
        self.nanos
    }

    /// True if there is no work.
    #[inline]
    #[must_use]
    pub fn is_zero(self) -> bool {
        self.steps == 0
    }

    /// Does the work.
    #[inline]
    pub fn run(self) {
        if self.steps > 0 {
            run_steps(self.steps);
        }
    }
}

/// A computation in which each step depends on the one before (xorshift). There is one copy of it,
/// so that it is equally fast for all receivers.
#[inline(never)]
fn run_steps(steps: u32) {
    let mut word = black_box(0x9e37_79b9_7f4a_7c15_u64);
    for _ in 0..steps {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
    }
    black_box(word);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_time_is_proportional_to_its_setting() {
        assert_eq!(SyntheticWork::calibrate(0), SyntheticWork::default());
        assert!(SyntheticWork::calibrate(0).is_zero() && !SyntheticWork::calibrate(1).is_zero());
        let [short, long] = [SyntheticWork::calibrate(1000), SyntheticWork::calibrate(100_000)];
        assert_eq!((short.nanos(), long.nanos()), (1000, 100_000));
        // Both were measured. On a busy machine they may differ, but not by a factor of ten.
        let ratio = f64::from(long.steps) / f64::from(short.steps);
        assert!((10.0..1000.0).contains(&ratio), "{short:?}, {long:?}");
        short.run();
    }
}
