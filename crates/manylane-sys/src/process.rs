//! A process that runs in place of its child: waits for signals instead of handling them, observes
//! the child, and ends as the child ended.

#[cfg(any(test, feature = "bench"))]
mod isolated;

use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::{self, Pid, WaitOptions};

use crate::check;
#[cfg(any(test, feature = "bench"))]
pub use isolated::run_isolated;

/// A signal that this process received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalInfo {
    /// Number of the signal.
    pub signal: i32,
    /// The process that sent it; `None` if it was the kernel, for example for a terminal.
    pub sender: Option<i32>,
}

/// A state change of a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitStatus {
    /// It exited with this code.
    Exited(i32),
    /// A signal killed it.
    Killed(i32),
    /// A signal stopped it.
    Stopped(i32),
    /// It was continued.
    Continued,
}

/// Signals that stay unblocked: those that cannot be waited for, and those that a fault of this
/// process raises.
const UNBLOCKED_SIGNALS: [i32; 12] = [
    libc::SIGKILL,
    libc::SIGSTOP,
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGABRT,
    libc::SIGSYS,
    libc::SIGPIPE,
    libc::SIGXCPU,
    libc::SIGXFSZ,
];

/// All other signals, blocked and waited for.
#[derive(Debug)]
pub struct Signals {
    blocked: libc::sigset_t,
    previous_mask: libc::sigset_t,
}

impl Signals {
    /// Blocks all signals except those that a fault of this process raises, in the calling thread
    /// and in threads that it starts later. Must be called before other threads exist.
    ///
    /// # Errors
    /// No error is known.
    pub fn block() -> io::Result<Self> {
        // SAFETY: an all-zero sigset_t is an empty set.
        let mut signals: Self = unsafe { std::mem::zeroed() };
        // SAFETY: each call writes one of the two sets, which live across it; the numbers are
        // valid signals.
        unsafe {
            libc::sigfillset(&raw mut signals.blocked);
            for signal in UNBLOCKED_SIGNALS {
                libc::sigdelset(&raw mut signals.blocked, signal);
            }
            let ret = libc::pthread_sigmask(
                libc::SIG_BLOCK,
                &raw const signals.blocked,
                &raw mut signals.previous_mask,
            );
            if ret != 0 {
                return Err(io::Error::from_raw_os_error(ret));
            }
        }
        Ok(signals)
    }

    /// Waits for the next signal, for at most `timeout`.
    ///
    /// # Errors
    /// No error is known.
    pub fn wait(&self, timeout: Duration) -> io::Result<Option<SignalInfo>> {
        let time = libc::timespec {
            tv_sec: timeout.as_secs().min(i32::MAX as u64) as libc::time_t,
            tv_nsec: libc::c_long::from(timeout.subsec_nanos() as i32),
        };
        // SAFETY: a C struct of plain integers, for which all zeros are valid.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel reads the set and the time and writes `info`; all of them live across
        // the call.
        let signal = unsafe { libc::sigtimedwait(&raw const self.blocked, &raw mut info, &raw const time) };
        if signal < 0 {
            let err = io::Error::last_os_error();
            return match err.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => Ok(None),
                _ => Err(err),
            };
        }
        let is_sent = matches!(info.si_code, libc::SI_USER | libc::SI_QUEUE | libc::SI_TKILL);
        // SAFETY: signals of these codes have the pid of the sender.
        let sender = is_sent.then(|| unsafe { info.si_pid() });
        Ok(Some(SignalInfo { signal, sender }))
    }

    /// Makes `command` start with the signal mask that this process was started with, and be
    /// killed when the calling thread ends: killing this process is meant for the child.
    pub fn restore_mask_in(&self, command: &mut Command) {
        let before = self.previous_mask;
        let parent = Some(process::getpid());
        // SAFETY: the closure runs in the child between fork and exec, where only
        // async-signal-safe calls are allowed. It sets a signal mask, a disposition and a process
        // attribute, and allocates nothing. It owns the set.
        unsafe {
            command.pre_exec(move || {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as libc::c_ulong);
                // The parent died before the call above: there will be no signal.
                if process::getppid() != parent {
                    libc::_exit(125);
                }
                libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
                Ok(())
            });
        }
    }

    /// Restores the signal mask from before [`block`](Self::block).
    pub fn unblock(&self) {
        // SAFETY: the call reads the set, which lives across it.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.previous_mask, std::ptr::null_mut())
        };
    }
}

/// The last state change of the child `pid`, or of any child if that is -1, without waiting: the
/// child, and the change.
///
/// # Errors
/// `ECHILD` if there is none.
pub fn try_wait(pid: i32) -> io::Result<Option<(i32, WaitStatus)>> {
    let options = WaitOptions::NOHANG | WaitOptions::UNTRACED | WaitOptions::CONTINUED;
    let Some((pid, status)) = process::waitpid(Pid::from_raw(pid.max(0)), options)? else { return Ok(None) };
    let change = if let Some(code) = status.exit_status() {
        WaitStatus::Exited(code)
    } else if let Some(signal) = status.terminating_signal() {
        WaitStatus::Killed(signal)
    } else if let Some(signal) = status.stopping_signal() {
        WaitStatus::Stopped(signal)
    } else {
        WaitStatus::Continued
    };
    Ok(Some((pid.as_raw_nonzero().get(), change)))
}

/// Sends a signal to a process; 0 only checks whether that is possible.
///
/// # Errors
/// `ESRCH` if there is no such process, `EPERM` without permission.
pub fn send_signal(pid: i32, signal: i32) -> io::Result<()> {
    // Not by rustix, which has no real-time signals, no check (0) and no groups in one call.
    // SAFETY: takes no pointer.
    check(unsafe { libc::kill(pid, signal) }).map(drop)
}

/// True if the process exists, whichever user it belongs to, including a zombie. `/proc` cannot
/// tell: it may hide processes of other users (`hidepid`).
#[must_use]
pub fn exists(pid: u32) -> bool {
    let Ok(pid @ 1..) = i32::try_from(pid) else { return false };
    send_signal(pid, 0).err().is_none_or(|err| err.raw_os_error() != Some(libc::ESRCH))
}

/// Number of a process's group; 0 if the group has no number in this PID namespace.
///
/// # Errors
/// `ESRCH` if there is no such process.
fn group(pid: i32) -> io::Result<i32> {
    // SAFETY: takes no pointer. Not by rustix, which has no group 0.
    check(unsafe { libc::getpgid(pid) })
}

/// True if a process is in this process's group: then signals of a terminal reach it, too.
#[must_use]
pub fn is_in_own_group(pid: i32) -> bool {
    group(pid).is_ok_and(|number| group(0).is_ok_and(|own| own == number))
}

/// Sends a signal to all processes of a process's group.
///
/// # Errors
/// As for [`send_signal`].
pub fn signal_group(pid: i32, signal: i32) -> io::Result<()> {
    let (own, number) = (group(0)?, group(pid)?);
    let target = match number {
        // To kill(2), 0 is the caller's own group.
        _ if number == own => 0,
        // It has no number for such a group: -1 is all processes.
        0 | 1 => pid,
        _ => -number,
    };
    send_signal(target, signal)
}

/// Stops this process until it is continued, as Ctrl-Z does. Has no effect if there is no shell to
/// continue it (the kernel does not stop such a process group that way).
pub fn stop() {
    // SAFETY: an all-zero sigset_t is an empty set; each call reads and writes sets that live
    // across it. The signal has its default action while it is unblocked, which is only here.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut set, libc::SIGTSTP);
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::raise(libc::SIGTSTP);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, &raw mut before);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
    }
}

/// Makes this process the parent of the orphans of its children (Linux 3.4).
///
/// # Errors
/// No error is known.
pub fn become_subreaper() -> io::Result<()> {
    // Any process id turns it on.
    Ok(process::set_child_subreaper(Some(process::getpid()))?)
}

/// Gives the calling thread a copy of the process's descriptor table as its own. Descriptors that
/// it opens and closes later are invisible to other threads, except those that it starts, which
/// share the table. For measuring the cost of sharing.
///
/// Descriptors of the copy that belong to values of other threads stay open until the calling
/// thread ends.
///
/// # Errors
/// `ENOMEM`.
#[cfg(any(test, feature = "bench"))]
pub fn unshare_fd_table() -> io::Result<()> {
    // SAFETY: descriptors keep their numbers and files, so that every value of this thread that
    // owns one still owns it.
    Ok(unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FILES) }?)
}

/// Raises the number of descriptors that this process may have (`RLIMIT_NOFILE`) as far as that
/// needs no privilege; returns it. Not for programs that use select(2), which has no descriptor
/// above 1023.
pub fn raise_descriptor_limit() -> u64 {
    let limit = process::getrlimit(process::Resource::Nofile);
    // It fails for invalid values only. Without a maximum, the kernel's own bound holds.
    _ = process::setrlimit(
        process::Resource::Nofile,
        process::Rlimit { current: limit.maximum, maximum: limit.maximum },
    );
    limit.maximum.unwrap_or(u64::MAX)
}

/// The number of descriptors that this process may have (`RLIMIT_NOFILE`).
#[must_use]
pub fn descriptors_max() -> usize {
    let limit = process::getrlimit(process::Resource::Nofile);
    limit.current.map_or(usize::MAX, |current| current as usize)
}

/// Ends this process by `signal`, without a core file, so that its parent sees how the child
/// ended. Returns if the signal does not end processes.
pub fn exit_by_signal(signal: i32) {
    _ = process::setrlimit(process::Resource::Core, process::Rlimit { current: Some(0), maximum: Some(0) });
    // SAFETY: an all-zero sigset_t is an empty set. Each call reads values that live across it.
    // Changing the disposition affects no other code, because nothing runs after the signal unless
    // it is ignored.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&raw mut set, signal);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const set, std::ptr::null_mut());
        libc::raise(signal);
    }
}

/// The descriptor that a thread waits for in a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockedOn {
    /// It receives from or reads this descriptor.
    Receive(i32),
    /// It waits on this epoll instance.
    Epoll(i32),
}

/// Parses `/proc/PID/task/TID/syscall` of a program for this machine: number of the call, then its
/// arguments in hexadecimal. `None` while the thread runs, or waits for anything else.
#[must_use]
pub fn parse_blocked_on(syscall: &str) -> Option<BlockedOn> {
    const RECEIVE_SYSCALLS: [libc::c_long; 4] =
        [libc::SYS_recvfrom, libc::SYS_recvmsg, libc::SYS_recvmmsg, libc::SYS_read];
    const EPOLL_SYSCALLS: [libc::c_long; 2] = [libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2];
    let mut words = syscall.split_whitespace();
    let number: libc::c_long = words.next()?.parse().ok()?;
    let first = u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
    // Only the lower half of the register holds the descriptor.
    let fd = first as u32 as i32;
    #[cfg(target_arch = "x86_64")]
    if number == libc::SYS_epoll_wait {
        return Some(BlockedOn::Epoll(fd));
    }
    if RECEIVE_SYSCALLS.contains(&number) {
        Some(BlockedOn::Receive(fd))
    } else if EPOLL_SYSCALLS.contains(&number) {
        Some(BlockedOn::Epoll(fd))
    } else {
        None
    }
}

/// True if a file has capabilities (`setcap(8)`).
#[must_use]
pub fn has_capabilities(path: &Path) -> bool {
    rustix::fs::getxattr(path, c"security.capability", &mut [0_u8; 0]).is_ok_and(|len| len > 0)
}

/// The user and the group that started this process: the real ones.
#[must_use]
pub fn real_user() -> (u32, u32) {
    (process::getuid().as_raw(), process::getgid().as_raw())
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::Stdio;
    use std::thread;

    use manylane_test_support::wait_for;

    use super::*;

    /// Waits for the next state change of a child.
    fn next_status(signals: &Signals, pid: i32) -> WaitStatus {
        for _ in 0..2400 {
            if let Some((_, change)) = try_wait(pid).unwrap() {
                return change;
            }
            signals.wait(Duration::from_millis(50)).unwrap();
        }
        panic!("nothing happened to the child");
    }

    #[test]
    fn children_stop_go_on_and_end() {
        // On a thread of its own: the mask of this one belongs to the test harness.
        thread::spawn(|| {
            let signals = Signals::block().unwrap();
            let mut command = Command::new("sleep");
            command.arg("600");
            signals.restore_mask_in(&mut command);
            let pid = command.spawn().unwrap().id() as i32;
            assert!(is_in_own_group(pid));
            send_signal(pid, libc::SIGSTOP).unwrap();
            assert_eq!(next_status(&signals, pid), WaitStatus::Stopped(libc::SIGSTOP));
            send_signal(pid, libc::SIGCONT).unwrap();
            assert_eq!(next_status(&signals, pid), WaitStatus::Continued);
            send_signal(pid, libc::SIGTERM).unwrap();
            assert_eq!(next_status(&signals, pid), WaitStatus::Killed(libc::SIGTERM));
            let mut command = Command::new("sh");
            command.args(["-c", "exit 7"]);
            signals.restore_mask_in(&mut command);
            let pid = command.spawn().unwrap().id() as i32;
            assert_eq!(next_status(&signals, pid), WaitStatus::Exited(7));
            assert_eq!(try_wait(pid).unwrap_err().raw_os_error(), Some(libc::ECHILD));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_signal_to_a_group_reaches_all_its_processes() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 600 & wait"]).process_group(0).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut output = child.stdout.take().unwrap();
        let pid = child.id() as i32;
        assert!(!is_in_own_group(pid) && is_in_own_group(0));
        signal_group(pid, libc::SIGKILL).unwrap();
        // Both have it open until they end.
        assert_eq!(output.read(&mut [0]).unwrap(), 0);
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
        // Init waits for the orphan a moment later.
        let ask = || signal_group(pid, 0).map_err(|err| err.raw_os_error());
        _ = wait_for("the end of the group", ask, |asked| *asked == Err(Some(libc::ESRCH)));
    }

    #[test]
    fn the_sender_of_a_signal_is_reported() {
        thread::spawn(|| {
            let signals = Signals::block().unwrap();
            crate::cpu::interrupt_thread(crate::cpu::thread_id(), libc::SIGUSR1).unwrap();
            let arrived = signals.wait(Duration::from_secs(30)).unwrap();
            let us = std::process::id() as i32;
            assert_eq!(arrived, Some(SignalInfo { signal: libc::SIGUSR1, sender: Some(us) }));
            signals.unblock();
        })
        .join()
        .unwrap();
    }

    #[test]
    fn the_syscall_of_a_blocked_thread_is_read() {
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
        thread::scope(|scope| {
            let (tell, told) = std::sync::mpsc::channel();
            let socket = &socket;
            scope.spawn(move || {
                tell.send(crate::cpu::thread_id()).unwrap();
                socket.recv(&mut [0]).unwrap();
            });
            let tid = told.recv().unwrap();
            let path = format!("/proc/self/task/{tid}/syscall");
            let read = || parse_blocked_on(&std::fs::read_to_string(&path).unwrap());
            wait_for("the thread to block", read, |on| *on == Some(BlockedOn::Receive(fd)));
            socket.send_to(b"x", socket.local_addr().unwrap()).unwrap();
        });
        for line in ["", "running", "-1 0x0 0x0", "x 0x3", "999999 0x3 0x0"] {
            assert_eq!(parse_blocked_on(line), None, "{line}");
        }
        let line = format!("{} 0xffffffff00000004 0x0", libc::SYS_epoll_pwait);
        assert_eq!(parse_blocked_on(&line), Some(BlockedOn::Epoll(4)));
    }

    #[test]
    fn ordinary_files_have_no_capabilities() {
        assert!(!has_capabilities(Path::new("/bin/sh")) && !has_capabilities(Path::new("/nowhere")));
    }
}
