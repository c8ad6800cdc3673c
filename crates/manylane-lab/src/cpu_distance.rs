//! Distance of two CPUs. In a virtual machine, the kernel's topology of cores and caches may
//! be invented by the hypervisor. The transfer time of a cache line is real. `sarma` and
//! `priambodo` both use this module, so that they agree.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use manylane_bench::stats::median;
use manylane_sys::cpu;

/// Two threads of one core transfer a line in some 5 to 20 ns, because it stays in their L1 cache.
/// From core to core it takes 40 to more than 200 ns.
const SAME_CORE_NS_MAX: f64 = 25.0;
/// Number of round trips that are timed together.
const HANDOVERS_PER_SAMPLE: u64 = 200;

/// True if two CPUs with this transfer time are threads of one core.
pub(super) fn is_same_core(handover_ns: f64) -> bool {
    handover_ns < SAME_CORE_NS_MAX
}

/// CPUs of the same core according to the kernel, including this one.
pub(super) fn thread_siblings(cpu: usize) -> Vec<usize> {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    let mut list = cpu::parse_list(&fs::read_to_string(path).unwrap_or_default()).unwrap_or_default();
    if !list.contains(&cpu) {
        list.push(cpu);
    }
    list
}

/// A word that is alone on the pair of lines that CPUs fetch.
#[repr(align(128))]
pub(super) struct PaddedWord(pub(super) AtomicU64);

/// Transfer time of a line between two CPUs in nanoseconds, the median of several series:
/// half the round-trip time of a number that one writes, and that the other answers with the next
/// one.
pub(super) fn measure_handover(first: usize, second: usize, stretches: u64) -> Result<f64> {
    let word = PaddedWord(AtomicU64::new(0));
    let handovers = stretches * HANDOVERS_PER_SAMPLE;
    thread::scope(|scope| {
        let answers = scope.spawn(|| -> Result<()> {
            let pinned = cpu::pin(second).with_context(|| format!("cannot pin a thread to CPU {second}"));
            for handover in 0..handovers {
                spin_until(&word.0, 2 * handover + 1);
                word.0.store(2 * handover + 2, Ordering::Release);
            }
            pinned
        });
        let asks = scope.spawn(|| -> Result<f64> {
            // A thread that cannot be pinned continues, because the other one waits for it.
            let pinned = cpu::pin(first).with_context(|| format!("cannot pin a thread to CPU {first}"));
            let mut times = Vec::with_capacity(stretches as usize);
            for stretch in 0..stretches {
                let start = Instant::now();
                for handover in stretch * HANDOVERS_PER_SAMPLE..(stretch + 1) * HANDOVERS_PER_SAMPLE {
                    word.0.store(2 * handover + 1, Ordering::Release);
                    spin_until(&word.0, 2 * handover + 2);
                }
                times.push(start.elapsed().as_nanos() as f64 / (2 * HANDOVERS_PER_SAMPLE) as f64);
            }
            pinned?;
            Ok(median(times))
        });
        answers.join().map_err(|_| anyhow!("a thread panicked"))??;
        asks.join().map_err(|_| anyhow!("a thread panicked"))?
    })
}

/// Waits without pause instructions, which take longer than the transfer.
fn spin_until(word: &AtomicU64, until: u64) {
    let mut polls = 0_u32;
    while word.load(Ordering::Acquire) != until {
        polls += 1;
        // This long only if a CPU was taken away. Then the other thread may need this one.
        if polls.is_multiple_of(1 << 14) {
            thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_line_round_trips_work_on_one_cpu() {
        let cpus = manylane_measure::machine::allowed_cpus();
        let (first, last) = (cpus[0], cpus[cpus.len() - 1]);
        // On one CPU, each step needs the scheduler.
        assert!(measure_handover(first, first, 1).unwrap() > 0.0);
        assert!(measure_handover(first, last, 5).unwrap() > 0.0);
        assert!(measure_handover(first, 5000, 1).unwrap_err().to_string().contains("CPU 5000"));
    }

    #[test]
    fn a_cpu_is_its_own_sibling() {
        assert!(thread_siblings(0).contains(&0));
        assert_eq!(thread_siblings(5000), [5000], "also where the kernel says nothing");
    }

    #[test]
    fn core_distances_are_classified_by_latency() {
        assert!(is_same_core(8.0) && !is_same_core(45.0));
    }
}
