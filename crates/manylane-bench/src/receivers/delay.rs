//! The fixed delay of receivers that are compared with each other: the same for lanes, whose own
//! would follow the load, and for hand-written receivers.

use std::sync::OnceLock;
use std::time::Duration;

use manylane_sys::{cpu, tick};

/// The delay if `threads` receive on `cpus`: each CPU wakes about every 100 µs, however many
/// threads share it, but each thread at least every millisecond. Receivers of `frames` delay by
/// twenty times the cost of a wake-up at least, which is measured once per process.
#[must_use]
pub fn fixed_delay(frames: bool, threads: usize, cpus: usize) -> Duration {
    let shared = match threads.div_ceil(cpus.max(1)) {
        0 | 1 => Duration::ZERO,
        sharing => Duration::from_micros((100 * sharing as u64).min(1000)),
    };
    static BY_COST: OnceLock<Duration> = OnceLock::new();
    if frames { shared.max(*BY_COST.get_or_init(|| delay_for_cost(wakeup_cost()))) } else { shared }
}

/// With this delay, wake-ups take at most a twentieth of a CPU.
fn delay_for_cost(cost: Duration) -> Duration {
    (cost * 20).clamp(Duration::from_micros(50), Duration::from_micros(500))
}

/// CPU time of a sleep and its wake-up.
fn wakeup_cost() -> Duration {
    const SLEEPS: u32 = 16;
    let before = cpu::thread_cpu_time();
    (0..SLEEPS).for_each(|_| tick::sleep(Duration::from_micros(50)));
    cpu::thread_cpu_time().saturating_sub(before) / SLEEPS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wakeup_rate_of_a_cpu_is_independent_of_its_threads() {
        let delay = |threads, cpus| fixed_delay(false, threads, cpus).as_micros();
        assert_eq!(
            [delay(4, 4), delay(1, 0), delay(5, 4), delay(8, 1), delay(256, 2)],
            [0, 0, 200, 800, 1000]
        );
    }

    #[test]
    fn receivers_of_frames_delay_by_wakeup_cost() {
        let micros = Duration::from_micros;
        for (cost, delay) in [(0, 50), (1, 50), (4, 80), (20, 400), (25, 500), (1000, 500)] {
            assert_eq!(delay_for_cost(micros(cost)), micros(delay));
        }
        assert!((micros(50)..=micros(500)).contains(&fixed_delay(true, 1, 1)));
    }
}
