//! Waits for packets that are being steered.

use std::io;

/// `MEMBARRIER_CMD_GLOBAL` of `linux/membarrier.h`, since Linux 4.3.
const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1;

/// Waits until every packet that the kernel was steering when this was called has been queued.
///
/// The kernel picks a socket of a reuseport group and queues the datagram on it within one RCU
/// read-side section. `membarrier(MEMBARRIER_CMD_GLOBAL)` returns after an RCU grace period, so a
/// lane that was taken out of steering before the call gets no more datagrams after it. Takes some
/// milliseconds, up to tens.
///
/// # Errors
/// `ENOSYS` or `EPERM` where the kernel lacks the call or a seccomp filter forbids it, `EINVAL`
/// with `nohz_full`. [`synchronize`] handles these.
pub fn grace_period() -> io::Result<()> {
    // SAFETY: membarrier(2) takes plain integers and touches no memory of ours.
    let ret = unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// `MEMBARRIER_CMD_PRIVATE_EXPEDITED` and its registration, since Linux 4.14.
const PRIVATE_EXPEDITED: libc::c_int = 1 << 3;
const REGISTER_PRIVATE_EXPEDITED: libc::c_int = 1 << 4;

/// Makes [`fence_all_threads`] fast, if the kernel supports it. Costs next to nothing in a process
/// with one thread, and as long as a grace period with several.
pub fn register() {
    // SAFETY: membarrier(2) takes plain integers and touches no memory of ours.
    unsafe { libc::syscall(libc::SYS_membarrier, REGISTER_PRIVATE_EXPEDITED, 0, 0) };
}

/// Makes every thread of the process pass a memory barrier: this thread then sees what others
/// stored before, and they see what it stored before. Takes some microseconds after [`register`],
/// otherwise as long as [`synchronize`].
pub fn fence_all_threads() {
    // SAFETY: as above.
    if unsafe { libc::syscall(libc::SYS_membarrier, PRIVATE_EXPEDITED, 0, 0) } < 0 {
        synchronize();
    }
}

/// Waits for a [`grace_period`], or 50 ms if the call is not available. Softirq work on one packet
/// takes microseconds, so the delay is far longer than any section that it has to outlast.
pub fn synchronize() {
    if grace_period().is_err() {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}
