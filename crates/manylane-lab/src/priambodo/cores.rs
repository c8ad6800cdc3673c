//! Shared against dedicated cores: the same loop on two threads of one core, and on two cores.

use std::hint::black_box;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use manylane_bench as bench;
use manylane_measure::machine;
use manylane_sys::cpu;

use crate::cpu_distance;
use crate::number::format_number;
use crate::paper::Paper;
use crate::row::{self, Row};
use crate::settings::Scale;

/// Name of the table.
pub(super) const CORES: &str = "cores";

const SAME_CORE: &str = "two threads, one core (SMT)";
const TWO_CORES: &str = "two threads, two cores";
pub(super) const ONE_THREAD: &str = "one thread";
const TIME_COLUMN: &str = "ms";
/// Transfer time of a cache line, which shows whether they are two cores.
const LINE_HANDOVER: &str = "line transfer, ns";

/// A sample of each in every round.
pub(super) fn rows(scale: &Scale, stop: &AtomicBool) -> Result<Vec<Row>> {
    let steps = if scale.quick { 5_000_000 } else { 50_000_000 };
    let allowed = machine::allowed_cpus();
    let first = allowed[0];
    let stretches = if scale.quick { 40 } else { 400 };
    let siblings = cpu_distance::thread_siblings(first);
    let sibling = allowed.iter().copied().find(|cpu| *cpu != first && siblings.contains(cpu));
    let other_core = allowed.iter().copied().find(|cpu| !siblings.contains(cpu));
    let handed = |other: Option<usize>| {
        other.map(|other| cpu_distance::measure_handover(first, other, stretches)).transpose()
    };
    let ([apart, shared], [not_apart, not_shared]) =
        pick_cpus((sibling, handed(sibling)?), (other_core, handed(other_core)?));
    let mut rows = Vec::new();
    for _ in 0..scale.rounds {
        bench::check_stop(stop)?;
        rows.push(Row::new(CORES, ONE_THREAD, TIME_COLUMN, "ms", vec![mean_time_ms(&[first], steps)?]));
        for (line, other, why) in [(TWO_CORES, apart, &not_apart), (SAME_CORE, shared, &not_shared)] {
            match other {
                Some(other) => {
                    let ms = mean_time_ms(&[first, other], steps)?;
                    let ns = cpu_distance::measure_handover(first, other, stretches)?;
                    rows.push(Row::new(CORES, line, TIME_COLUMN, "ms", vec![ms]));
                    rows.push(Row::new(CORES, line, LINE_HANDOVER, "ns", vec![ns]));
                }
                None => rows.push(Row::unavailable(CORES, line, TIME_COLUMN, "ms", why)),
            }
        }
    }
    Ok(row::merge(Paper::Priambodo, rows, &[], false))
}

/// A CPU on a second core and one on the same core, or the reason why there is none. The
/// kernel names a sibling and another one. If the other one transfers lines as fast as a thread of
/// the same core, it is one, whatever the hypervisor reports.
fn pick_cpus(
    sibling: (Option<usize>, Option<f64>),
    other_core: (Option<usize>, Option<f64>),
) -> ([Option<usize>; 2], [String; 2]) {
    let near = other_core.1.filter(|ns| cpu_distance::is_same_core(*ns));
    let (apart, shared) =
        if near.is_some() { (None, sibling.0.or(other_core.0)) } else { (other_core.0, sibling.0) };
    let not_apart = match near {
        Some(ns) => format!(
            "the kernel reports two cores, but a cache line takes {} ns between them, as between two threads of one",
            format_number(ns)
        ),
        None => "there is one core".into(),
    };
    let far = other_core.1.map_or_else(String::new, |ns| {
        format!("; a cache line takes {} ns between them, as between two cores", format_number(ns))
    });
    let not_shared = format!("no two CPUs of this machine share a core{far}");
    ([apart, shared], [not_apart, not_shared])
}

/// Mean time in milliseconds of a loop that runs on all of `cpus` at the same time.
fn mean_time_ms(cpus: &[usize], steps: u64) -> Result<f64> {
    let run = |cpu: usize| -> Result<f64> {
        cpu::pin(cpu).with_context(|| format!("cannot pin a thread to CPU {cpu}"))?;
        let start = Instant::now();
        // Parallel chains. A single one would mostly wait for its own results, so that two threads
        // of one core would not disturb each other.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Paper;
    use crate::table::assert_compared;

    #[test]
    fn each_row_has_values_or_a_reason() {
        let scale = Scale { rounds: 2, ..Scale::quick() };
        let rows = rows(&scale, &AtomicBool::new(false)).unwrap();
        for line in [ONE_THREAD, TWO_CORES, SAME_CORE] {
            let at = |column: &str| rows.iter().find(|row| row.line == line && row.column == column);
            let loops = at(TIME_COLUMN).unwrap();
            assert!(loops.value.is_some_and(|ms| ms > 0.0) != loops.why_not.is_some(), "{loops:?}");
            let handed = at(LINE_HANDOVER).and_then(|row| row.value);
            assert_eq!(handed.is_some(), line != ONE_THREAD && loops.value.is_some(), "{line}");
            if handed.is_some() {
                assert_compared(Paper::Priambodo, CORES, &rows);
            }
        }
    }

    #[test]
    fn measured_cpu_distance_overrides_the_kernel_topology() {
        let (places, reasons) = pick_cpus((None, None), (Some(1), Some(50.0)));
        assert_eq!(places, [Some(1), None]);
        assert!(reasons[1].contains("takes 50.0 ns between them, as between two cores"), "{reasons:?}");
        let (places, reasons) = pick_cpus((None, None), (Some(1), Some(8.0)));
        assert_eq!(places, [None, Some(1)]);
        assert!(
            reasons[0].contains("takes 8.00 ns") && reasons[0].contains("two threads of one"),
            "{reasons:?}"
        );
        assert_eq!(pick_cpus((Some(1), Some(9.0)), (Some(2), Some(60.0))).0, [Some(2), Some(1)]);
        let (places, reasons) = pick_cpus((None, None), (None, None));
        assert_eq!((places, reasons[0].as_str()), ([None, None], "there is one core"));
    }
}
