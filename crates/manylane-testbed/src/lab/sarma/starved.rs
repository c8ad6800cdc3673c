//! Figure 9: a user program that looks at the clock again and again, on the processor of a server under a flood. What it does not
//! see pass is time that it did not get.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use manylane_sys::cpu;

use super::FIGURE_9;
use super::flood::{Path, under_flood};
use crate::bench;
use crate::lab::{Places, Row};

pub(super) const LONGEST: &str = "longest, ms";
const STOOD: &str = "stood still, %";
const OVER: &str = "over 10 ms, /s";
const RATE: &str = "flood, /s";

/// Between two looks at the clock; what is longer is time that somebody else had.
const STEP: Duration = Duration::from_micros(50);
/// What requirement there is: longer than this is starvation.
const LIMIT: Duration = Duration::from_millis(10);
/// No longer than this, however long floods are.
const MOST: Duration = Duration::from_secs(10);

/// What the program missed.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
struct Missed {
    longest: Duration,
    sum: Duration,
    over: u64,
    elapsed: Duration,
}

impl Missed {
    fn step(&mut self, gap: Duration) {
        if gap > STEP {
            self.sum += gap;
            self.longest = self.longest.max(gap);
            self.over += u64::from(gap > LIMIT);
        }
    }
}

/// One stretch, as fast as the generator makes it.
pub(super) fn rows(places: &mut Places, path: Path, stop: &AtomicBool) -> Result<Vec<Row>> {
    let length = (Duration::from_millis(places.scale.flood_ms) / 2).min(MOST);
    let got = under_flood(places, path, None, |setup, _| {
        let cpu = setup.receiver_cpus().first().copied().context("no processor")?;
        look(cpu, length, stop)
    });
    let cell = |column, unit, value| Row::new(FIGURE_9, path.name(), column, unit, vec![value]);
    match got {
        Ok(flooded) => {
            let missed = flooded.seen;
            let seconds = missed.elapsed.as_secs_f64().max(1e-9);
            Ok(vec![
                cell(LONGEST, "ms", missed.longest.as_secs_f64() * 1e3),
                cell(STOOD, "%", 100.0 * missed.sum.as_secs_f64() / seconds),
                cell(OVER, "1/s", missed.over as f64 / seconds),
                cell(RATE, "1/s", flooded.sent.pps()).with(&[("flood", flooded.sent.datagrams)]),
            ])
        }
        Err(err) => {
            bench::go_on(stop)?;
            Ok(vec![Row::cannot(FIGURE_9, path.name(), LONGEST, "ms", &format!("{err:#}"))])
        }
    }
}

fn look(cpu: usize, length: Duration, stop: &AtomicBool) -> Result<Missed> {
    let missed = thread::scope(|scope| {
        let program = scope.spawn(|| -> Result<Missed> {
            cpu::pin(cpu).with_context(|| format!("cannot pin the program to CPU {cpu}"))?;
            let (start, mut missed) = (Instant::now(), Missed::default());
            let mut last = start;
            while last - start < length && !stop.load(Ordering::Relaxed) {
                let now = Instant::now();
                missed.step(now - last);
                last = now;
            }
            missed.elapsed = last - start;
            Ok(missed)
        });
        program.join().map_err(|_| anyhow!("the program panicked"))?
    })?;
    bench::go_on(stop)?;
    Ok(missed)
}

/// What the rules of the conclusion look at: the longest gap, the share of time.
pub(super) fn figures(rows: &crate::lab::Rows<'_>, path: Path) -> Option<(f64, f64)> {
    let at = |column| rows.value(FIGURE_9, path.name(), column);
    Some((at(LONGEST)?, at(STOOD)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_summed_and_the_longest_is_kept() {
        let mut missed = Missed::default();
        for micros in [1, 49, 60, 12_000, 400] {
            missed.step(Duration::from_micros(micros));
        }
        let expected = Missed {
            longest: Duration::from_millis(12),
            sum: Duration::from_micros(12_460),
            over: 1,
            elapsed: Duration::ZERO,
        };
        assert_eq!(missed, expected);
    }

    #[test]
    fn a_program_alone_gets_nearly_all_of_its_time() {
        let cpu = crate::machine::allowed_cpus()[0];
        let missed = look(cpu, Duration::from_millis(50), &AtomicBool::new(false)).unwrap();
        assert!(missed.elapsed >= Duration::from_millis(50) && missed.sum <= missed.elapsed, "{missed:?}");
    }
}
