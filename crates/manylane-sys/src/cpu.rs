//! Affinity, pinning, CPU time and ids of threads.

use std::io;
use std::mem;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::thread::{self, CpuSet, Pid};

/// The CPUs that the calling thread may run on, ascending.
///
/// # Errors
/// Those of `sched_getaffinity(2)`; `EINVAL` on machines with more than 1024 CPUs.
pub fn affinity() -> io::Result<Vec<usize>> {
    let set = thread::sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

/// Parses a CPU set in the kernel's format, such as `0,2,4-7`; surrounding spaces are ignored.
/// None for invalid text, an empty set, and numbers above 65,536.
#[must_use]
pub fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        if first > last || last > 1 << 16 {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// Restricts the calling thread to `cpus`.
///
/// # Errors
/// `EINVAL` if none of them is online or allowed for this process (cpuset, container).
pub fn set_affinity(cpus: &[usize]) -> io::Result<()> {
    set_thread_affinity(None, cpus)
}

/// The same for another thread, or the calling one if none.
fn set_thread_affinity(thread: Option<Pid>, cpus: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        if cpu >= CpuSet::MAX_CPU {
            return Err(Errno::INVAL.into());
        }
        set.set(cpu);
    }
    Ok(thread::sched_setaffinity(thread, &set)?)
}

/// Pins the calling thread to one CPU.
///
/// # Errors
/// `EINVAL` if the CPU is offline or not allowed for this process.
pub fn pin(cpu: usize) -> io::Result<()> {
    set_affinity(&[cpu])
}

/// Pins a thread to one CPU by its id, which may be a kernel thread's.
///
/// # Errors
/// As for [`pin`]; `ESRCH` if there is no such thread, `EPERM` for a thread of another user.
#[cfg(any(test, feature = "bench"))]
pub fn pin_thread(thread: i32, cpu: usize) -> io::Result<()> {
    let thread = Pid::from_raw(thread).ok_or(Errno::SRCH)?;
    set_thread_affinity(Some(thread), &[cpu])
}

/// As in the kernel's `include/uapi/linux/sched/types.h`, first version.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

/// The shortest time slice that the scheduler accepts (`sched_setattr(2)`).
const SLICE_MIN: Duration = Duration::from_micros(100);

/// Sets the calling thread's time slice to the minimum, so that it preempts threads with longer
/// slices when it wakes up. Its share of the CPU does not change. Linux 6.12; no effect
/// before that. Returns true if it is in effect. Threads of other scheduling classes than the
/// default are left alone.
///
/// # Errors
/// Those of `sched_getattr(2)` and `sched_setattr(2)`.
pub fn set_short_slice() -> io::Result<bool> {
    let mut attr = sched_attr()?;
    if attr.policy != libc::SCHED_OTHER as u32 {
        return Ok(false);
    }
    let slice = SLICE_MIN.as_nanos() as u64;
    // The kernel reports slices since they can be set.
    if attr.runtime == 0 || attr.runtime <= slice {
        return Ok(attr.runtime == slice);
    }
    (attr.runtime, attr.deadline, attr.period) = (slice, 0, 0);
    // SAFETY: the kernel reads `size` bytes of `attr`; `sched_attr` has set `size` to its length,
    // and it lives across the call.
    crate::check(unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) } as i32)?;
    Ok(true)
}

fn sched_attr() -> io::Result<SchedAttr> {
    let mut attr = SchedAttr::default();
    let size = size_of::<SchedAttr>() as u32;
    // SAFETY: the kernel writes at most `size` bytes to `attr`, which has that size and lives
    // across the call.
    crate::check(unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) } as i32)?;
    attr.size = size;
    Ok(attr)
}

/// The calling thread's id, as in `/proc/self/task`.
#[must_use]
pub fn thread_id() -> i32 {
    thread::gettid().as_raw_nonzero().get()
}

/// Sends `signal` to thread `tid` of this process (see [`thread_id`]), which interrupts a long
/// system call. A handler must be installed, or the process ends.
///
/// # Errors
/// `ESRCH` if there is no such thread, `EINVAL` if there is no such signal.
#[cfg(any(test, feature = "bench"))]
pub fn interrupt_thread(tid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: takes no pointer; the kernel checks both numbers, and that the thread is one of ours.
    let done = unsafe { libc::syscall(libc::SYS_tgkill, std::process::id(), tid, signal) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Words of a CPU mask: 1024 CPUs.
pub const MASK_WORDS: usize = 16;
/// One bit per CPU.
pub type CpuMask = [u64; MASK_WORDS];

/// The CPUs that a thread, which may belong to another process, may run on, as a mask. Does not
/// use the heap.
///
/// # Errors
/// Those of `sched_getaffinity(2)`; `EINVAL` on machines with more than 1024 CPUs, `ESRCH` if
/// there is no such thread.
pub fn affinity_mask(thread: i32) -> io::Result<CpuMask> {
    let mut words: CpuMask = [0; MASK_WORDS];
    let mask = words.as_mut_ptr().cast::<libc::cpu_set_t>();
    // SAFETY: the kernel writes at most the given size into `words`, which lives across the call.
    crate::check(unsafe { libc::sched_getaffinity(thread, size_of_val(&words), mask) })?;
    Ok(words)
}

/// Resource usage of a thread.
#[derive(Clone, Copy, Debug)]
pub struct ThreadUsage {
    /// Voluntary context switches: how often it gave up its CPU to wait.
    pub voluntary_switches: u64,
    /// Microseconds of CPU time, user and system.
    pub cpu_micros: u64,
}

/// Sleeps and CPU time of the calling thread, by one system call.
#[must_use]
pub fn thread_usage() -> ThreadUsage {
    // SAFETY: rusage is a C struct of integers, for which all zeros are valid.
    let mut usage: libc::rusage = unsafe { mem::zeroed() };
    // SAFETY: the kernel writes `usage`, which lives across the call; it cannot fail with these
    // arguments.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    let micros = |time: libc::timeval| time.tv_sec.unsigned_abs() * 1_000_000 + time.tv_usec.unsigned_abs();
    ThreadUsage {
        voluntary_switches: usage.ru_nvcsw.unsigned_abs(),
        cpu_micros: micros(usage.ru_utime) + micros(usage.ru_stime),
    }
}

/// CPU time that the calling thread has used, user and system.
#[must_use]
pub fn thread_cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // By libc, as in `tick`.
    // SAFETY: the kernel writes `time`, which lives across the call; this clock exists on every
    // Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Opens `/proc/stat`: times of CPUs (proc_stat(5)).
///
/// # Errors
/// Those of `open(2)`, such as `ENOENT` in a chroot without `/proc`.
pub fn open_stat() -> io::Result<OwnedFd> {
    Ok(rustix::fs::open("/proc/stat", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Reads the next bytes of what [`open_stat`] opened. Returns their number; 0 at the end.
///
/// # Errors
/// Those of `read(2)`.
pub fn read_stat(stat: impl AsFd, to: &mut [u8]) -> io::Result<usize> {
    Ok(rustix::io::read(stat, to)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_parse_as_the_kernel_writes_them() {
        assert_eq!(parse_list("0-3,6\n"), Some(vec![0, 1, 2, 3, 6]));
        assert_eq!(parse_list("5"), Some(vec![5]));
        for text in ["", ",", "0-", "3-1", "a", "-1", "0,,1", "0-18446744073709551615"] {
            assert_eq!(parse_list(text), None, "{text:?}");
        }
    }

    #[test]
    fn only_threads_of_this_process_can_be_interrupted() {
        // Signal 0 only checks.
        assert!(interrupt_thread(thread_id(), 0).is_ok());
        assert_eq!(interrupt_thread(1, 0).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        assert_eq!(interrupt_thread(thread_id(), 999).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn a_short_slice_keeps_the_thread_weight() {
        std::thread::spawn(|| {
            let before = sched_attr().unwrap();
            if before.runtime == 0 {
                println!("skipped: this kernel has no slices to choose (Linux 6.12)");
                assert!(!set_short_slice().unwrap());
                return;
            }
            assert!(before.runtime > 100_000, "{before:?}");
            assert!(set_short_slice().unwrap() && set_short_slice().unwrap());
            let after = sched_attr().unwrap();
            assert_eq!((after.policy, after.nice, after.runtime), (before.policy, before.nice, 100_000));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn pinning_shows_in_the_affinity() {
        std::thread::spawn(|| {
            let all = affinity().unwrap();
            let last = *all.last().unwrap();
            pin(last).unwrap();
            assert_eq!(affinity().unwrap(), [last]);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn an_absent_cpu_is_refused() {
        assert_eq!(pin(5000).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn a_mask_has_the_bits_of_the_affinity() {
        let bits = affinity_mask(0).unwrap();
        let all = (0..64 * MASK_WORDS).filter(|cpu| bits[cpu / 64] & 1 << (cpu % 64) != 0);
        assert_eq!(all.collect::<Vec<_>>(), affinity().unwrap());
        assert!(affinity_mask(i32::MAX).is_err());
    }

    #[test]
    fn thread_usage_counts_sleeps_and_time() {
        let before = thread_usage();
        std::thread::sleep(Duration::from_millis(1));
        let slept = thread_usage();
        assert!(slept.voluntary_switches > before.voluntary_switches);
        while thread_usage().cpu_micros < slept.cpu_micros + 1000 {
            std::hint::spin_loop();
        }
    }

    #[test]
    fn thread_time_advances_with_work() {
        let before = thread_cpu_time();
        while thread_cpu_time() == before {
            std::hint::spin_loop();
        }
        assert!(thread_cpu_time() > before);
    }
}
