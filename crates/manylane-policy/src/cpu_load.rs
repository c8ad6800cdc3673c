//! How busy CPUs are, by their idle time in `/proc/stat` (proc_stat(5)).
//!
//! Softirqs and other programs count as well: the CPU time of the threads themselves would miss the
//! kernel's part of the work, which is the larger one near saturation. Windows last 100 ms. The
//! first thread that notices the end of one reads the file, once for all threads of the process;
//! the others read the coarse clock only. Without the file, as in a chroot without `/proc`, no load
//! is known.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use manylane_sys::cpu::{self, CpuMask, MASK_WORDS};
use manylane_sys::tick;

/// Length of a window, in milliseconds. Idle time counts in units of 10 ms.
const WINDOW_MS: u32 = 100;
const CPUS_MAX: usize = 64 * MASK_WORDS;
/// Milliseconds of a unit of time in the file (`USER_HZ` is 100 on all architectures but alpha).
const TICK_MS: u32 = 10;
/// Longer than a line of a CPU.
const BUFFER_SIZE: usize = 1024;

struct Cpu {
    idle_ticks: AtomicU32,
    busy_percent: AtomicU8,
}

static CPUS: [Cpu; CPUS_MAX] =
    [const { Cpu { idle_ticks: AtomicU32::new(0), busy_percent: AtomicU8::new(0) } }; CPUS_MAX];
/// Start of the current window, from `tick::coarse_ms`; 0 before the first.
static WINDOW_START_MS: AtomicU32 = AtomicU32::new(0);
/// Windows so far whose load is known.
static WINDOWS: AtomicU32 = AtomicU32::new(0);

/// A thread's view of the load.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadWatch {
    window: u32,
}

impl LoadWatch {
    /// How busy the CPUs that the calling thread may run on were in the last window, in percent;
    /// once for each window, otherwise none. `open` opens the file: see
    /// [`open_stat`](manylane_sys::cpu::open_stat).
    #[inline]
    pub fn next_window<F: AsFd>(&mut self, open: impl FnOnce() -> Option<F>) -> Option<u32> {
        let (now, start) = (tick::coarse_ms(), WINDOW_START_MS.load(Ordering::Relaxed));
        if now.wrapping_sub(start) >= WINDOW_MS {
            end_window(now, start, open);
        }
        let window = WINDOWS.load(Ordering::Acquire);
        if window == self.window {
            return None;
        }
        self.window = window;
        busy_percent(&cpu::affinity_mask(0).ok()?)
    }
}

#[cold]
fn end_window<F: AsFd>(now: u32, start: u32, open: impl FnOnce() -> Option<F>) {
    let mine = WINDOW_START_MS.compare_exchange(start, now, Ordering::AcqRel, Ordering::Relaxed);
    if mine.is_err() {
        return;
    }
    let Some(stat) = open() else { return };
    let elapsed = now.wrapping_sub(start);
    let read = |to: &mut [u8]| cpu::read_stat(&stat, to).ok();
    // Before the first window, there is nothing to subtract.
    if read_idle(read, |cpu, idle| CPUS[cpu].update(idle, elapsed)).is_some() && start != 0 {
        WINDOWS.fetch_add(1, Ordering::Release);
    }
}

impl Cpu {
    /// Records the idle time at the end of a window of `elapsed` milliseconds.
    fn update(&self, idle_ticks: u32, elapsed: u32) {
        let ticks = idle_ticks.wrapping_sub(self.idle_ticks.swap(idle_ticks, Ordering::Relaxed));
        let busy_ms = u64::from(elapsed.saturating_sub(ticks.saturating_mul(TICK_MS)));
        let percent = busy_ms * 100 / u64::from(elapsed.max(1));
        self.busy_percent.store(percent as u8, Ordering::Relaxed);
    }
}

/// Calls `each` with the number of each CPU, less than [`CPUS_MAX`], and its idle ticks. None if
/// the file cannot be read. `read` returns a number of bytes; 0 at the end.
fn read_idle(
    mut read: impl FnMut(&mut [u8]) -> Option<usize>,
    mut each: impl FnMut(usize, u32),
) -> Option<()> {
    let mut buffer = [0_u8; BUFFER_SIZE];
    let mut filled = 0;
    loop {
        let got = read(&mut buffer[filled..])?;
        filled += got;
        let mut start = 0;
        while let Some(len) = buffer[start..filled].iter().position(|byte| *byte == b'\n') {
            let line = &buffer[start..start + len];
            if !line.starts_with(b"cpu") {
                return Some(());
            }
            if let Some((cpu, idle)) = parse_line(line).filter(|(cpu, _)| *cpu < CPUS_MAX) {
                each(cpu, idle);
            }
            start += len + 1;
        }
        if got == 0 || start == 0 && filled == BUFFER_SIZE {
            return Some(());
        }
        buffer.copy_within(start..filled, 0);
        filled -= start;
    }
}

/// Number and idle ticks of the CPU that `line` is about: waiting for disks is idle, too.
fn parse_line(line: &[u8]) -> Option<(usize, u32)> {
    let text = std::str::from_utf8(line).ok()?.strip_prefix("cpu")?;
    let (cpu, times) = text.split_once(' ')?;
    // The line of all CPUs has no number.
    let cpu = cpu.parse().ok()?;
    let fields = times.split_ascii_whitespace();
    let mut ticks = fields.skip(3).map(|field| field.parse::<u64>().unwrap_or(0));
    Some((cpu, ticks.next()?.wrapping_add(ticks.next().unwrap_or(0)) as u32))
}

/// The average over the CPUs of `mask`.
fn busy_percent(mask: &CpuMask) -> Option<u32> {
    let allowed = |cpu: usize| mask[cpu / 64] & 1 << (cpu % 64) != 0;
    let busy = CPUS.iter().enumerate().filter(|(cpu, _)| allowed(*cpu));
    let (sum, count) = busy.fold((0, 0), |(sum, count), (_, cpu)| {
        (sum + u32::from(cpu.busy_percent.load(Ordering::Relaxed)), count + 1)
    });
    (count > 0).then(|| sum / count)
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "cpu  30 0 50 900 100 0 7 0 0 0
cpu0 10 0 20 400 60 0 3 0 0 0
cpu1 20 0 30 500 40 0 4 0 0 0
cpu9999 1 1 1 1 1 1 1
cpu2 1 2 3
cpux 1 2 3 4 5
intr 12345 0 0 0
cpu3 0 0 0 1 1
";

    /// What is found in `text` if each read returns at most `chunk` bytes.
    fn idle(text: &str, chunk: usize) -> Vec<(usize, u32)> {
        let (mut rest, mut found) = (text.as_bytes(), Vec::new());
        let read = |to: &mut [u8]| {
            let len = chunk.min(to.len()).min(rest.len());
            to[..len].copy_from_slice(&rest[..len]);
            rest = &rest[len..];
            Some(len)
        };
        assert!(read_idle(read, |cpu, ticks| found.push((cpu, ticks))).is_some());
        found
    }

    #[test]
    fn lines_of_cpus_parse_however_they_are_read() {
        for chunk in 1..=STAT.len() {
            assert_eq!(idle(STAT, chunk), [(0, 460), (1, 540)], "{chunk}");
        }
    }

    #[test]
    fn a_file_of_another_form_has_no_cpus() {
        assert!(idle("", 10).is_empty());
        assert!(idle(&"cpu".repeat(BUFFER_SIZE), BUFFER_SIZE).is_empty(), "a line without an end");
        assert!(read_idle(|_| None, |_, _| {}).is_none());
        assert_eq!(
            idle("cpu5 0 0 0 18446744073709551615 1\n", 99),
            [(5, 0)],
            "counters wrap instead of failing"
        );
    }

    #[test]
    fn load_is_what_the_idle_time_leaves_of_a_window() {
        let cpu = Cpu { idle_ticks: AtomicU32::new(u32::MAX), busy_percent: AtomicU8::new(0) };
        let busy_after = |ticks, elapsed| {
            cpu.update(ticks, elapsed);
            cpu.busy_percent.load(Ordering::Relaxed)
        };
        assert_eq!(busy_after(6, 100), 30, "the counter wraps");
        assert_eq!(busy_after(6, 200), 100);
        assert_eq!(busy_after(26, 100), 0, "ticks end a little outside of the window");
        assert_eq!(busy_after(26, 0), 0);
    }

    #[test]
    fn this_machine_has_a_load() {
        let mut watch = LoadWatch::default();
        let open = || cpu::open_stat().ok();
        let first = std::time::Instant::now();
        let percent = loop {
            if let Some(percent) = watch.next_window(open) {
                break percent;
            }
            std::hint::spin_loop();
            assert!(first.elapsed().as_secs() < 60);
        };
        assert!(percent <= 100);
        let mut never = LoadWatch::default();
        assert_eq!(never.next_window(|| None::<std::fs::File>), Some(percent), "another thread has read it");
        assert_eq!(never.next_window(|| None::<std::fs::File>), None, "once");
    }
}
