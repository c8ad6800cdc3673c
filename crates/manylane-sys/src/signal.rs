//! Interrupts a thread in a long system call.

use std::io;

/// Sends `signal` to thread `tid` of this process (see [`crate::cpu::thread_id`]). A handler must
/// be installed, or the process ends.
///
/// # Errors
/// `ESRCH` if there is no such thread, `EINVAL` if there is no such signal.
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
        // Signal 0 only checks.
        assert!(interrupt_thread(crate::cpu::thread_id(), 0).is_ok());
        assert_eq!(interrupt_thread(1, 0).unwrap_err().raw_os_error(), Some(libc::ESRCH));
        assert_eq!(
            interrupt_thread(crate::cpu::thread_id(), 999).unwrap_err().raw_os_error(),
            Some(libc::EINVAL)
        );
    }
}
