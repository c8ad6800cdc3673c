//! CPU time of other threads.

use std::io;
use std::time::Duration;

/// CPU time used by thread `tid` of this process.
///
/// Unlike `/proc/self/task/TID/schedstat`, which is up to a tick behind, the thread's clock
/// includes what runs at this moment.
///
/// # Errors
/// `EINVAL` if there is no such thread in this process.
pub fn thread_cpu_time_of(tid: i32) -> io::Result<Duration> {
    /// `CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED`: the clock id that `pthread_getcpuclockid(3)`
    /// builds, part of the kernel's ABI since 2.6.12.
    const PER_THREAD_SCHED: libc::clockid_t = 4 | 2;
    let clock = (!tid << 3) | PER_THREAD_SCHED;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // Not by rustix, which has no clocks of other threads.
    // SAFETY: the kernel writes `time`, which lives across the call, and checks the clock's number.
    crate::check(unsafe { libc::clock_gettime(clock, &raw mut time) })?;
    Ok(Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_of_another_thread_advances_with_its_work() {
        /// The maximum of `kernel.pid_max`.
        const PID_MAX: i32 = 1 << 22;
        let (told, tid) = std::sync::mpsc::channel();
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let seen = stop.clone();
        let worker = std::thread::spawn(move || {
            told.send(crate::cpu::thread_id()).unwrap();
            while !seen.load(std::sync::atomic::Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let tid = tid.recv().unwrap();
        let before = thread_cpu_time_of(tid).unwrap();
        while thread_cpu_time_of(tid).unwrap() < before + Duration::from_millis(1) {
            std::thread::yield_now();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        worker.join().unwrap();
        assert_eq!(thread_cpu_time_of(PID_MAX + 1).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}
