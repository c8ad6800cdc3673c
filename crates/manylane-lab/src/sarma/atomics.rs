//! Table 1: cost of single operations on this CPU.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use manylane_bench::{self as bench, run_pinned};
use manylane_measure::machine;
use manylane_sys::cpu;

use crate::cpu_distance::{self, PaddedWord};
use crate::row::Row;
use crate::settings::Scale;

/// Name of the table.
pub(super) const TABLE_1: &str = "table 1";
/// Its only column.
pub(super) const COST: &str = "ns";

pub(super) const INSTRUCTION: &str = "Instruction";
pub(super) const CYCLE: &str = "Clock Cycle";
pub(super) const L2: &str = "L2 Cache Hit";
pub(super) const INCREMENT: &str = "Atomic Increment";
pub(super) const CMPXCHG: &str = "cmpxchg Atomic Increment";
pub(super) const INCREMENT_TRANSFER: &str = "Atomic Incr. Cache Transfer";
pub(super) const MEMORY: &str = "Main Memory";
pub(super) const LOCK: &str = "CPU-Local Lock";
pub(super) const CMPXCHG_BLIND: &str = "cmpxchg Blind Cache Transfer";
pub(super) const CMPXCHG_INVALIDATE: &str = "cmpxchg Cache Transfer and Invalidate";
/// Not in the paper: shows whether two CPUs are two cores.
pub(super) const LINE_HANDOVER: &str = "Cache Line Transfer";

/// Table 1 (Pentium III, 700 MHz), sorted by cost.
pub(super) const OPERATIONS: [(&str, f64); 10] = [
    (INSTRUCTION, 0.7),
    (CYCLE, 1.4),
    (L2, 12.9),
    (INCREMENT, 58.2),
    (CMPXCHG, 107.3),
    (INCREMENT_TRANSFER, 113.2),
    (MEMORY, 162.4),
    (LOCK, 163.7),
    (CMPXCHG_BLIND, 170.4),
    (CMPXCHG_INVALIDATE, 360.9),
];

/// Words between two steps through memory: a cache line.
const LINE_WORDS: usize = 64 / size_of::<u32>();
/// More than an L1 cache, less than an L2 cache.
const L2_BYTES: usize = 192 << 10;
/// More than a last-level cache.
const MEMORY_BYTES: usize = 256 << 20;
const MEMORY_BYTES_QUICK: usize = 128 << 20;

/// One sample of each line, on one pinned thread, or on two where needed.
pub(super) fn rows(scale: &Scale, stop: &AtomicBool) -> Result<Vec<Row>> {
    let cpus = machine::allowed_cpus();
    let (first, second) = (cpus[0], cpus.get(1).copied());
    let steps = if scale.quick { 50_000 } else { 500_000 };
    let memory = if scale.quick { MEMORY_BYTES_QUICK } else { MEMORY_BYTES };
    let alone = run_pinned(Some(first), || {
        let chain = dependent_chain(steps);
        Ok(vec![
            (INSTRUCTION, independent_chains(steps)),
            (CYCLE, chain),
            (L2, pointer_chase(L2_BYTES, steps)),
            (INCREMENT, increment(steps)),
            (CMPXCHG, cmpxchg(steps)),
            (MEMORY, pointer_chase(memory, steps / 3)),
            (LOCK, lock_unlock(steps)),
        ])
    })?;
    bench::check_stop(stop)?;
    let row = |name: &str, ns: Result<f64>| Row::measured(TABLE_1, name, COST, "ns", ns);
    let mut rows: Vec<Row> = alone.into_iter().map(|(name, ns)| row(name, Ok(ns))).collect();
    let rounds = if scale.quick { 40 } else { 400 };
    let second = || second.context("there is one CPU");
    for (name, how) in [
        (INCREMENT_TRANSFER, TransferOp::Increment),
        (CMPXCHG_BLIND, TransferOp::Blind),
        (CMPXCHG_INVALIDATE, TransferOp::ReadFirst),
    ] {
        rows.push(row(name, second().and_then(|second| line_transfer(first, second, how, rounds))));
    }
    let handover = second().and_then(|second| cpu_distance::measure_handover(first, second, rounds));
    rows.push(row(LINE_HANDOVER, handover));
    // The paper sorts by cost; its order is kept.
    rows.sort_by_key(|row| OPERATIONS.iter().position(|(name, _)| *name == row.line).unwrap_or(usize::MAX));
    Ok(rows)
}

/// Number of series that are measured. The median counts, so that interrupted series do not.
const SAMPLE_COUNT: usize = 15;

/// Nanoseconds for each of the `count` steps of `work`.
fn ns_per_step(count: u64, work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_nanos() as f64 / count.max(1) as f64
}

/// The same, as the median of many series.
fn median_ns(count: u64, mut work: impl FnMut()) -> f64 {
    manylane_bench::stats::median((0..SAMPLE_COUNT).map(|_| ns_per_step(count, &mut work)))
}

/// Six dependent instructions of a cycle each.
#[inline(always)]
fn xorshift(mut x: u64) -> u64 {
    x ^= x << 13;
    x ^= x >> 7;
    x ^ (x << 17)
}

fn dependent_chain(steps: u64) -> f64 {
    let mut x = black_box(88_172_645_463_325_252);
    let ns = median_ns(steps * 6, || {
        for _ in 0..steps {
            x = xorshift(x);
        }
    });
    black_box(x);
    ns
}

fn independent_chains(steps: u64) -> f64 {
    let [mut a, mut b, mut c, mut d] = black_box([1_u64, 3, 5, 7]);
    let ns = median_ns(steps * 24, || {
        for _ in 0..steps {
            (a, b, c, d) = (xorshift(a), xorshift(b), xorshift(c), xorshift(d));
        }
    });
    black_box([a, b, c, d]);
    ns
}

/// Follows pointers from line to line of the given memory in a random order, so that each step
/// depends on the last one and cannot be prefetched.
fn pointer_chase(bytes: usize, steps: u64) -> f64 {
    let lines = bytes / 64;
    let mut next = vec![0_u32; lines * LINE_WORDS];
    // Sattolo's shuffle: one cycle through all lines.
    let mut order: Vec<u32> = (0..lines as u32).collect();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for index in (1..lines).rev() {
        state = xorshift(state);
        order.swap(index, (state >> 11) as usize % index);
    }
    for (index, line) in order.iter().enumerate() {
        let to = order[(index + 1) % lines];
        next[*line as usize * LINE_WORDS] = to * LINE_WORDS as u32;
    }
    let mut at = 0_u32;
    // One pass first, so that memory that fits a cache is cached.
    for _ in 0..(lines as u64).min(L2_BYTES as u64) {
        at = next[at as usize];
    }
    let ns = median_ns(steps, || {
        for _ in 0..steps {
            at = next[at as usize];
        }
    });
    black_box(at);
    ns
}

fn increment(steps: u64) -> f64 {
    let word = AtomicU64::new(black_box(0));
    median_ns(steps, || {
        for _ in 0..steps {
            black_box(&word).fetch_add(1, Ordering::SeqCst);
        }
    })
}

fn cmpxchg(steps: u64) -> f64 {
    let word = AtomicU64::new(black_box(0));
    median_ns(steps, || {
        for _ in 0..steps {
            let word = black_box(&word);
            let was = word.load(Ordering::Relaxed);
            let _ = word.compare_exchange(was, was + 1, Ordering::SeqCst, Ordering::Relaxed);
        }
    })
}

/// Acquired and released like the kernel's spinlock: an exchange, then a store.
fn lock_unlock(steps: u64) -> f64 {
    let (held, mut guarded) = (AtomicBool::new(black_box(false)), 0_u64);
    let ns = median_ns(steps, || {
        for _ in 0..steps {
            let held = black_box(&held);
            while held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {}
            guarded += 1;
            held.store(false, Ordering::Release);
        }
    });
    black_box(guarded);
    ns
}

/// Operation that moves a line from the other CPU.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TransferOp {
    /// Atomic increment.
    Increment,
    /// Compare and exchange, with a known value.
    Blind,
    /// Read first, so that the line is shared and has to be moved again for the write.
    ReadFirst,
}

/// Lines that one CPU writes and the other one reads.
const LINE_COUNT: usize = 512;
/// Step from a line to the next one: odd, so that all lines are visited.
const LINE_STRIDE: usize = 167;

/// Nanoseconds of one operation on a line that the other CPU has just written.
fn line_transfer(first: usize, second: usize, how: TransferOp, rounds: u64) -> Result<f64> {
    let words: Vec<PaddedWord> = (0..LINE_COUNT).map(|_| PaddedWord(AtomicU64::new(0))).collect();
    // Even: the other one writes; odd: this one reads.
    let round_word = AtomicU64::new(0);
    thread::scope(|scope| {
        let writer = scope.spawn(|| -> Result<()> {
            cpu::pin(second).context("cannot pin a thread")?;
            for round in 0..rounds {
                spin_until(&round_word, 2 * round);
                words.iter().for_each(|word| word.0.store(round, Ordering::Relaxed));
                round_word.store(2 * round + 1, Ordering::Release);
            }
            Ok(())
        });
        let reader = scope.spawn(|| -> Result<f64> {
            let pinned = cpu::pin(first).context("cannot pin a thread");
            let mut times = Vec::with_capacity(rounds as usize);
            for round in 0..rounds {
                spin_until(&round_word, 2 * round + 1);
                times.push(ns_per_step(LINE_COUNT as u64, || access_lines(&words, how, round)));
                round_word.store(2 * round + 2, Ordering::Release);
            }
            pinned?;
            Ok(manylane_bench::stats::median(times))
        });
        writer.join().map_err(|_| anyhow!("a thread panicked"))??;
        reader.join().map_err(|_| anyhow!("a thread panicked"))?
    })
}

/// Waits with pause instructions, because the other thread may be on the same core.
fn spin_until(round_word: &AtomicU64, until: u64) {
    let mut polls = 0_u32;
    // Exceeded only if a CPU was taken away. Then the other thread may need this one.
    while round_word.load(Ordering::Acquire) < until {
        polls += 1;
        if polls.is_multiple_of(1 << 14) { thread::yield_now() } else { std::hint::spin_loop() }
    }
}

/// Reads each line once. The next line is known only when the last one has arrived. Otherwise
/// CPUs would fetch many in parallel, and a transfer would seem faster than it is.
fn access_lines(words: &[PaddedWord], how: TransferOp, known: u64) {
    let mut index = 0;
    for _ in 0..LINE_COUNT {
        let word = &words[index].0;
        let was = match how {
            TransferOp::Increment => word.fetch_add(1, Ordering::SeqCst),
            TransferOp::Blind => word
                .compare_exchange(known, known + 1, Ordering::SeqCst, Ordering::Relaxed)
                .unwrap_or_else(|other| other),
            TransferOp::ReadFirst => {
                let was = word.load(Ordering::Acquire);
                word.compare_exchange(was, was + 1, Ordering::SeqCst, Ordering::Relaxed)
                    .unwrap_or_else(|other| other)
            }
        };
        // The value is always `known`, but the compiler and the CPU do not know that. The
        // lines are not visited in order, so that the next one is not prefetched.
        index = (index + LINE_STRIDE + was.wrapping_sub(known) as usize) % LINE_COUNT;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Paper;
    use crate::table::assert_compared;

    #[test]
    fn every_line_of_table_1_has_a_figure_or_a_reason() {
        let stop = AtomicBool::new(false);
        let rows = rows(&Scale::quick(), &stop).unwrap();
        assert_eq!(rows.len(), 11);
        for row in &rows {
            assert!(row.value.is_some_and(|ns| ns > 0.0) || row.why_not.is_some(), "{row:?}");
        }
        assert_eq!(
            (rows[0].line.as_str(), rows[9].line.as_str(), rows[10].line.as_str()),
            (INSTRUCTION, CMPXCHG_INVALIDATE, LINE_HANDOVER)
        );
        assert_compared(Paper::Sarma, TABLE_1, &rows);
    }

    #[test]
    fn every_cache_line_is_measured_once() {
        for how in [TransferOp::Increment, TransferOp::Blind, TransferOp::ReadFirst] {
            let words: Vec<PaddedWord> = (0..LINE_COUNT).map(|_| PaddedWord(AtomicU64::new(7))).collect();
            access_lines(&words, how, 7);
            assert!(words.iter().all(|word| word.0.load(Ordering::Relaxed) == 8));
        }
    }
}
