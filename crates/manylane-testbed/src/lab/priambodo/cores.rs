//! Shared against dedicated cores: the same loop on two threads of one core, and on two cores.

use std::fs;
use std::hint::black_box;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use manylane_sys::cpu;

use super::CORES;
use crate::lab::{Row, Scale};
use crate::{bench, machine};

const SHARED: &str = "two threads, one core (SMT)";
const APART: &str = "two threads, two cores";
const ALONE: &str = "one thread";
const COLUMN: &str = "ms";

/// A sample of each in every round.
pub(super) fn rows(scale: &Scale, stop: &AtomicBool) -> Result<Vec<Row>> {
    let steps = if scale.quick { 5_000_000 } else { 50_000_000 };
    let allowed = machine::allowed_cpus();
    let first = allowed[0];
    let siblings = siblings(first);
    let shared = allowed.iter().copied().find(|cpu| *cpu != first && siblings.contains(cpu));
    let apart = allowed.iter().copied().find(|cpu| !siblings.contains(cpu));
    let mut rows = Vec::new();
    for _ in 0..scale.rounds {
        bench::go_on(stop)?;
        rows.push(Row::new(CORES, ALONE, COLUMN, "ms", vec![together(&[first], steps)?]));
        for (line, other, why) in [
            (APART, apart, "there is one core"),
            (
                SHARED,
                shared,
                "no two processors of this machine share a core (no SMT, or the hypervisor hides it)",
            ),
        ] {
            rows.push(match other {
                Some(other) => Row::new(CORES, line, COLUMN, "ms", vec![together(&[first, other], steps)?]),
                None => Row::cannot(CORES, line, COLUMN, "ms", why),
            });
        }
    }
    Ok(super::super::merge(crate::lab::Paper::Priambodo, rows, &[], false))
}

/// Processors of the same core, that one among them.
fn siblings(cpu: usize) -> Vec<usize> {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    let mut list = machine::parse_cpu_list(fs::read_to_string(path).unwrap_or_default().trim());
    if !list.contains(&cpu) {
        list.push(cpu);
    }
    list
}

/// Milliseconds until a loop is done on all of `cpus` at one time, on the average.
fn together(cpus: &[usize], steps: u64) -> Result<f64> {
    let run = |cpu: usize| -> Result<f64> {
        cpu::pin(cpu).with_context(|| format!("cannot pin a thread to CPU {cpu}"))?;
        let start = Instant::now();
        // Chains side by side: one alone would wait for itself most of the time, and two threads of one core would not notice
        // each other.
        let mut x = black_box([1_u64, 2, 3, 4, 5, 6, 7, 8]);
        for _ in 0..steps {
            for x in &mut x {
                *x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            }
        }
        black_box(x);
        Ok(start.elapsed().as_secs_f64() * 1e3)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = cpus.iter().map(|&cpu| scope.spawn(move || run(cpu))).collect();
        let mut sum = 0.0;
        for thread in threads {
            sum += thread.join().map_err(|_| anyhow!("a thread panicked"))??;
        }
        Ok(sum / cpus.len() as f64)
    })
}

/// How much longer a loop takes when another one runs on the same core, and on another one.
pub(super) fn slower(rows: &crate::lab::Rows<'_>) -> (Option<f64>, Option<f64>) {
    let at = |line: &str| rows.value(CORES, line, COLUMN);
    let ratio = |line: &str| Some(at(line)? / at(ALONE)?);
    (ratio(SHARED), ratio(APART))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_has_a_figure_or_a_reason() {
        let scale = Scale { rounds: 2, ..Scale::quick() };
        let rows = rows(&scale, &AtomicBool::new(false)).unwrap();
        assert_eq!(rows.len(), 3);
        for row in rows {
            assert!(row.value.is_some_and(|ms| ms > 0.0) != row.why_not.is_some(), "{row:?}");
        }
        assert!(siblings(0).contains(&0));
    }
}
