//! Measures pauses of threads: times in which they were kept from running.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use manylane_measure::machine;
use manylane_sys::{cpu, measure};

use crate::schema::{FloodGap, FloodPauses, PAUSE_BINS};

/// Minimum length of a gap; shorter ones are ticks of the clock.
const GAP_MIN: Duration = Duration::from_micros(200);
/// Interval at which a thread's clocks are read while there are no gaps, because they drift from
/// the wall clock.
const CLOCK_READ_INTERVAL: Duration = Duration::from_millis(10);
/// Sleep time of an observer.
const OBSERVER_INTERVAL: Duration = Duration::from_micros(100);
const NANOS_PER_MILLI: u64 = 1_000_000;

/// A histogram of pauses. One thread adds to it, other threads take its contents.
#[derive(Debug, Default)]
pub(super) struct PauseHistogram {
    bins: [AtomicU64; PAUSE_BINS],
    longest: AtomicU64,
    over_1ms: AtomicU64,
    over_10ms: AtomicU64,
}

impl PauseHistogram {
    pub(super) fn record(&self, pause: Duration) {
        let nanos = pause.as_nanos() as u64;
        let more = |count: &AtomicU64, by: bool| _ = count.fetch_add(u64::from(by), Ordering::Relaxed);
        more(&self.bins[bin_index(nanos / 1000)], true);
        more(&self.over_1ms, nanos > NANOS_PER_MILLI);
        more(&self.over_10ms, nanos > 10 * NANOS_PER_MILLI);
        self.longest.fetch_max(nanos, Ordering::Relaxed);
    }

    /// The pauses since the last call.
    pub(super) fn drain(&self, thread: &str, cpu: usize, seconds: f64, steal: &StealTime) -> FloodPauses {
        let taken = |count: &AtomicU64| count.swap(0, Ordering::Relaxed);
        FloodPauses {
            thread: thread.into(),
            cpu,
            seconds,
            longest_ms: ms(Duration::from_nanos(taken(&self.longest))),
            over_1ms: taken(&self.over_1ms),
            over_10ms: taken(&self.over_10ms),
            steal_ms: steal.stolen_ms(cpu),
            histogram: self.bins.iter().map(taken).collect(),
            ..FloodPauses::default()
        }
    }

    pub(super) fn reset(&self) {
        self.bins.iter().chain([&self.longest, &self.over_1ms, &self.over_10ms]).for_each(|count| {
            count.store(0, Ordering::Relaxed);
        });
    }
}

/// In milliseconds. All values that are compared are computed here, because two computations of
/// the same time may differ in their last digit.
fn ms(time: Duration) -> f64 {
    time.as_nanos() as f64 / NANOS_PER_MILLI as f64
}

fn bin_index(micros: u64) -> usize {
    ((u64::BITS - micros.leading_zeros()) as usize).min(PAUSE_BINS - 1)
}

/// Stolen time of each CPU, since this was created.
pub(super) struct StealTime(Vec<u64>);

impl StealTime {
    pub(super) fn start() -> Self {
        Self(machine::steal_ns())
    }

    fn stolen_ms(&self, cpu: usize) -> f64 {
        let at = |all: &[u64]| all.get(cpu).copied().unwrap_or(0);
        at(&machine::steal_ns()).saturating_sub(at(&self.0)) as f64 / NANOS_PER_MILLI as f64
    }
}

/// A program that is always runnable, on one CPU: it reads the clock in a loop. The time
/// between two readings is a gap, and the kernel's clocks of the thread show what used it. `maker`
/// is the id of another thread on the same CPU, the flood generator or the lane; its CPU
/// time is its part of the gap.
pub(super) fn run_program(
    cpu: usize,
    maker: Option<&AtomicI32>,
    length: Duration,
    stop: &AtomicBool,
) -> Result<FloodPauses> {
    cpu::pin(cpu).with_context(|| format!("cannot pin the program to CPU {cpu}"))?;
    let (tally, steal, mut clocks) =
        (PauseHistogram::default(), StealTime::start(), ThreadClocks::start(maker)?);
    let (start, used) = (Instant::now(), cpu::thread_cpu_time());
    let (mut apart, mut unstolen, mut others) = (Vec::new(), 0.0_f64, 0.0_f64);
    let mut before = start;
    while before - start < length && !stop.load(Ordering::Relaxed) {
        let now = Instant::now();
        let gap = now - before;
        tally.record(gap);
        before = now;
        if gap >= GAP_MIN {
            let gap = clocks.split_gap(gap);
            unstolen = unstolen.max(gap.ms - gap.stolen_ms);
            others = others.max(gap.ms - gap.stolen_ms - gap.sender_ms);
            if gap.ms > 1.0 {
                apart.push(gap);
            }
            // The time of reading these clocks is not a gap.
            before = Instant::now();
        } else if now - clocks.read_at >= CLOCK_READ_INTERVAL {
            clocks.sample();
            before = Instant::now();
        }
    }
    let (elapsed, used) = (start.elapsed().as_secs_f64(), (cpu::thread_cpu_time() - used).as_secs_f64());
    Ok(FloodPauses {
        longest_unstolen_ms: Some(unstolen),
        longest_apart_ms: maker.map(|_| others),
        share: Some(used / elapsed),
        apart,
        ..tally.drain("program", cpu, elapsed, &steal)
    })
}

/// The clocks of the calling thread. Wall time is the sum of three: the time that it ran (without
/// stolen time, if the kernel knows it), the time that it waited for other threads, and the
/// remainder, which was stolen.
struct ThreadClocks<'a> {
    schedstat: File,
    read_at: Instant,
    run_time: Duration,
    wait_time: Duration,
    /// The CPU clock of the flood generator, with its last reading.
    generator: Option<(&'a AtomicI32, Duration)>,
}

impl<'a> ThreadClocks<'a> {
    fn start(maker: Option<&'a AtomicI32>) -> Result<Self> {
        let stat = File::open("/proc/thread-self/schedstat")
            .context("/proc/thread-self/schedstat: the kernel needs CONFIG_SCHED_INFO")?;
        let (ran, waited) = (Duration::ZERO, Duration::ZERO);
        let maker = maker.map(|tid| (tid, Duration::ZERO));
        let mut clocks = Self {
            schedstat: stat,
            read_at: Instant::now(),
            run_time: ran,
            wait_time: waited,
            generator: maker,
        };
        clocks.sample();
        Ok(clocks)
    }

    /// Times since the last reading: waiting for other threads, stolen, and the generator's part
    /// of the former.
    fn sample(&mut self) -> [Duration; 3] {
        let mut text = [0; 96];
        let len = self.schedstat.read_at(&mut text, 0).unwrap_or(0);
        let words = String::from_utf8_lossy(&text[..len]);
        let waited = words.split_ascii_whitespace().nth(1).and_then(|word| word.parse().ok());
        let waited = waited.map_or(self.wait_time, Duration::from_nanos);
        let (now, ran) = (Instant::now(), cpu::thread_cpu_time());
        let others = waited.saturating_sub(self.wait_time);
        let stolen =
            (now - self.read_at).saturating_sub(ran.saturating_sub(self.run_time)).saturating_sub(others);
        (self.read_at, self.run_time, self.wait_time) = (now, ran, waited);
        let made = self.generator.as_mut().map_or(Duration::ZERO, |(tid, had)| {
            // A thread that has ended has no clock, and has used nothing since.
            let has = match tid.load(Ordering::Relaxed) {
                // It has not started yet.
                0 => *had,
                tid => measure::thread_cpu_time_of(tid).unwrap_or(*had),
            };
            has.saturating_sub(std::mem::replace(had, has))
        });
        [others, stolen, made]
    }

    fn split_gap(&mut self, gap: Duration) -> FloodGap {
        let [others, stolen, made] = self.sample();
        let waited = others.min(gap);
        FloodGap {
            ms: ms(gap),
            waited_ms: ms(waited),
            stolen_ms: ms(stolen.min(gap - waited)),
            sender_ms: ms(made.min(waited)),
            lane_ms: 0.0,
        }
    }
}

/// Sleeps for short times until `stop`, and counts how late it wakes up.
pub(super) fn measure_wakeup_latency(cpu: usize, tally: &PauseHistogram, stop: &AtomicBool) -> Result<()> {
    cpu::pin(cpu).with_context(|| format!("cannot pin the observer to CPU {cpu}"))?;
    while !stop.load(Ordering::Relaxed) {
        let due = Instant::now() + OBSERVER_INTERVAL;
        thread::sleep(OBSERVER_INTERVAL);
        tally.record(Instant::now().saturating_duration_since(due));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::server::SenderThread;
    use super::*;

    #[test]
    fn pauses_are_counted_by_length_and_read_once() {
        let (tally, steal) = (PauseHistogram::default(), StealTime::start());
        for micros in [0, 1, 3, 1000, 1001, 10_001, 100_000_000] {
            tally.record(Duration::from_micros(micros));
        }
        let seen = tally.drain("lane", 0, 2.0, &steal);
        assert_eq!((seen.over_1ms, seen.over_10ms, seen.longest_ms), (3, 2, 100_000.0));
        assert_eq!((seen.histogram.iter().sum::<u64>(), seen.over_1ms_per_second()), (7, 1.5));
        let at = |micros: u64| seen.histogram[bin_index(micros)];
        assert_eq!((at(0), at(1), at(3), at(1001), at(u64::MAX)), (1, 1, 1, 2, 1));
        assert_eq!(tally.drain("lane", 0, 1.0, &steal).histogram, [0; PAUSE_BINS]);
        tally.record(Duration::from_secs(1));
        tally.reset();
        assert_eq!(tally.drain("lane", 0, 1.0, &steal).longest_ms, 0.0);
    }

    #[test]
    fn gap_parts_add_up_to_its_length() {
        let (tally, steal, mut clocks) =
            (PauseHistogram::default(), StealTime::start(), ThreadClocks::start(None).unwrap());
        for nanos in (1..1000).map(|at| at * 40_729) {
            let gap = Duration::from_nanos(nanos);
            tally.record(gap);
            assert_eq!(
                clocks.split_gap(gap).ms,
                tally.drain("program", 0, 1.0, &steal).longest_ms,
                "{nanos}"
            );
        }
    }

    #[test]
    fn cpu_time_of_other_threads_is_waiting_and_not_steal() {
        let Some(&cpu) = machine::allowed_cpus().first() else { return };
        let busy = SenderThread::spin(cpu).unwrap();
        let sum = |seen: &FloodPauses, part: fn(&FloodGap) -> f64| seen.apart.iter().map(part).sum::<f64>();
        // Some time slices of the scheduler; repeated, in case other threads got those of the busy
        // thread.
        let run_once =
            || run_program(cpu, Some(&busy.tid), Duration::from_millis(300), &AtomicBool::new(false));
        let mut seen = run_once().unwrap();
        for _ in 0..50 {
            if sum(&seen, |gap| gap.sender_ms) > 0.0 {
                break;
            }
            seen = run_once().unwrap();
        }
        busy.stop().unwrap();
        let parts = |part| sum(&seen, part);
        // A waiting thread does not run, so that the sum of both is at most the elapsed time, up
        // to the difference of two clocks.
        let waited = parts(|gap| gap.waited_ms) / 1e3;
        assert!(waited > 0.0 && seen.share.unwrap() < 1.01 - waited / seen.seconds, "{seen:?}");
        assert!(
            parts(|gap| gap.sender_ms) > 0.0,
            "what the thread in the maker's place had is its own: {seen:?}"
        );
        for gap in &seen.apart {
            assert!(
                gap.waited_ms + gap.stolen_ms <= gap.ms + 1e-6 && gap.ms <= seen.longest_ms + 1e-6,
                "{gap:?}"
            );
            assert!(gap.sender_ms <= gap.waited_ms + 1e-6, "{gap:?}");
        }
        let unstolen = seen.longest_unstolen_ms.unwrap();
        assert!(unstolen <= seen.longest_ms && seen.longest_apart_ms.unwrap() <= unstolen, "{seen:?}");
    }

    #[test]
    fn a_program_stops_on_request() {
        let cpu = machine::allowed_cpus()[0];
        let seen = run_program(cpu, None, Duration::from_secs(600), &AtomicBool::new(true)).unwrap();
        assert!(seen.seconds < 60.0 && seen.longest_apart_ms.is_none());
    }
}
