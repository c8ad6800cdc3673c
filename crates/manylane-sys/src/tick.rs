//! Sleeping until a common tick, the time of the last tick of the kernel, and the slack of timers.
//!
//! Clocks are read by libc, which has found the vDSO when the process started. rustix would search
//! it again, in programs of users too.

use std::num::NonZeroU64;
use std::time::Duration;

use rustix::thread::{self, ClockId, Timespec};

/// Sleeps until the monotonic clock is next at a multiple of `period`; a signal ends it early.
///
/// Threads that sleep this way for the same period wake together: a CPU shared by several of them
/// needs one timer interrupt for all, and leaves its idle state once. The kernel's timer slack (50
/// µs unless the process changed it) is added equally for all.
pub fn sleep(period: Duration) {
    let (now, left) = time_to_tick(period);
    let next = now.saturating_add(left);
    let at = Timespec { tv_sec: next / NANOS_PER_SEC, tv_nsec: next % NANOS_PER_SEC };
    _ = thread::clock_nanosleep_absolute(ClockId::Monotonic, &at);
}

/// The time that [`sleep`] would sleep, for callers that sleep by other means.
#[must_use]
pub fn remaining(period: Duration) -> Duration {
    Duration::from_nanos(time_to_tick(period).1.unsigned_abs())
}

/// Milliseconds of the coarse monotonic clock, which costs no system call and is the same in all
/// processes; never 0.
#[must_use]
pub fn coarse_ms() -> u32 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes `time`, which lives across the call; it stays zero if the clock
    // does not exist.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut time) };
    (time.tv_sec as u32).wrapping_mul(1000).wrapping_add((time.tv_nsec / 1_000_000) as u32).max(1)
}

/// Reduces the calling thread's timer slack from 50 µs to 1 µs.
pub fn reduce_timer_slack() {
    _ = thread::set_current_timer_slack(NonZeroU64::new(1000));
}

/// The current time, and the time until the next multiple of `period`, in nanoseconds.
fn time_to_tick(period: Duration) -> (i64, i64) {
    let period = i64::try_from(period.as_nanos()).unwrap_or(i64::MAX).max(1);
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes `now`, which lives across the call; this clock exists on every
    // Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    let elapsed = now.tv_sec.saturating_mul(NANOS_PER_SEC).saturating_add(now.tv_nsec);
    (elapsed, period - elapsed % period)
}

const NANOS_PER_SEC: i64 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn the_remaining_time_is_within_a_period() {
        let period = Duration::from_micros(10);
        for _ in 0..1000 {
            let left = remaining(period);
            assert!(!left.is_zero() && left <= period, "{left:?}");
        }
        assert_eq!(remaining(Duration::ZERO), Duration::from_nanos(1));
    }

    #[test]
    fn sleeps_to_a_multiple_of_the_period() {
        let period = Duration::from_millis(2);
        sleep(period);
        let start = Instant::now();
        // From one tick to the third after it is at least two whole periods.
        for _ in 0..3 {
            sleep(period);
        }
        assert!(start.elapsed() >= 2 * period);
        sleep(Duration::ZERO);
    }
}
