//! Figure 9: a user program that reads the clock in a loop, on the CPU of a server under a
//! flood. Gaps between two readings are times in which it did not run.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use manylane_bench::{self as bench, run_pinned};
use manylane_measure::Sent;

use super::flood::{FloodResult, RxPath, run_under_flood};
use crate::part::Setups;
use crate::row::Row;

/// Name of the table.
pub(super) const FIGURE_9: &str = "figure 9";

pub(super) const LONGEST_GAP: &str = "longest, ms";
const STALLED_SHARE: &str = "stalled, %";
const LONG_GAPS: &str = "over 10 ms, /s";
const FLOOD_RATE: &str = "flood, /s";

/// Minimum length of a gap between two readings of the clock in which the program did not run.
const GAP_MIN: Duration = Duration::from_micros(50);
/// The requirement: a longer gap is starvation.
const LONG_GAP_MIN: Duration = Duration::from_millis(10);
/// Maximum length of the observation, however long floods are.
const DURATION_MAX: Duration = Duration::from_secs(10);

/// The gaps of the program.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
struct GapStats {
    longest: Duration,
    total: Duration,
    long_gaps: u64,
    elapsed: Duration,
}

impl GapStats {
    fn record(&mut self, gap: Duration) {
        if gap > GAP_MIN {
            self.total += gap;
            self.longest = self.longest.max(gap);
            self.long_gaps += u64::from(gap > LONG_GAP_MIN);
        }
    }
}

/// One flood, as fast as the generator can send.
pub(super) fn rows(places: &mut Setups, path: RxPath, stop: &AtomicBool) -> Vec<Row> {
    let length = (Duration::from_millis(places.scale.flood_ms) / 2).min(DURATION_MAX);
    let got = run_under_flood(places, path, None, |setup, _| {
        let cpu = setup.receiver_cpus().first().copied().context("no CPU")?;
        measure_gaps(cpu, length, stop)
    });
    match got {
        Ok(FloodResult { observed, sent }) => result_rows(path, &observed, &sent),
        Err(err) => vec![Row::measured(FIGURE_9, path.name(), LONGEST_GAP, "ms", Err(err))],
    }
}

fn result_rows(path: RxPath, missed: &GapStats, sent: &Sent) -> Vec<Row> {
    let cell = |column, unit, value| Row::new(FIGURE_9, path.name(), column, unit, vec![value]);
    let seconds = missed.elapsed.as_secs_f64().max(1e-9);
    vec![
        cell(LONGEST_GAP, "ms", missed.longest.as_secs_f64() * 1e3),
        cell(STALLED_SHARE, "%", 100.0 * missed.total.as_secs_f64() / seconds),
        cell(LONG_GAPS, "1/s", missed.long_gaps as f64 / seconds),
        cell(FLOOD_RATE, "1/s", sent.pps()).with_counts(&[("flood", sent.datagrams)]),
    ]
}

fn measure_gaps(cpu: usize, length: Duration, stop: &AtomicBool) -> Result<GapStats> {
    let missed = run_pinned(Some(cpu), || {
        let (start, mut missed) = (Instant::now(), GapStats::default());
        let mut last = start;
        while last - start < length && !stop.load(Ordering::Relaxed) {
            let now = Instant::now();
            missed.record(now - last);
            last = now;
        }
        missed.elapsed = last - start;
        Ok(missed)
    })?;
    bench::check_stop(stop)?;
    Ok(missed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Paper;
    use crate::table::assert_compared;

    #[test]
    fn gaps_are_summed_and_the_longest_is_kept() {
        let mut missed = GapStats::default();
        for micros in [1, 49, 60, 12_000, 400] {
            missed.record(Duration::from_micros(micros));
        }
        let expected = GapStats {
            longest: Duration::from_millis(12),
            total: Duration::from_micros(12_460),
            long_gaps: 1,
            elapsed: Duration::ZERO,
        };
        assert_eq!(missed, expected);
    }

    #[test]
    fn floods_are_compared_with_no_flood() {
        let gaps = GapStats { elapsed: Duration::from_secs(1), ..GapStats::default() };
        let rows = [RxPath::Idle, RxPath::Softirqs].map(|path| result_rows(path, &gaps, &Sent::default()));
        assert_compared(Paper::Sarma, FIGURE_9, &rows.concat());
    }

    #[test]
    fn a_program_alone_gets_nearly_all_of_its_time() {
        let cpu = manylane_measure::machine::allowed_cpus()[0];
        let missed = measure_gaps(cpu, Duration::from_millis(50), &AtomicBool::new(false)).unwrap();
        assert!(missed.elapsed >= Duration::from_millis(50) && missed.total <= missed.elapsed, "{missed:?}");
    }
}
