//! Interrupting a thread that is in a long system call.

use std::io;

/// Sends `signal` to the thread `tid` of this process, as [`crate::cpu::thread_id`] gives it.
/// Whoever calls it has a handler installed, or the process ends.
///
/// # Errors
/// `ESRCH` when there is no such thread any more, `EINVAL` when there is no such signal.
pub fn interrupt_thread(tid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: takes no pointer; the kernel checks both numbers, and that the thread is one of ours.
    let done = unsafe { libc::syscall(libc::SYS_tgkill, std::process::id(), tid, signal) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_threads_of_this_process_can_be_interrupted() {
        // Signal 0 only asks.
        assert!(interrupt_thread(crate::cpu::thread_id(), 0).is_ok());
        assert_eq!(interrupt_thread(1, 0).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        assert_eq!(
            interrupt_thread(crate::cpu::thread_id(), 999).unwrap_err().raw_os_error(),
            Some(libc::EINVAL)
        );
    }
}
