//! Represents the program: forwards signals to it, stops and continues with it, and waits for its
//! end. A process that leases queues does not stop: when sockets are closed, it has to take their
//! ports back, also for processes that were not stopped.

use std::fs;
use std::io;
use std::process::Command;
use std::time::{Duration, Instant};

use manylane_sys::process::{self, SignalInfo, Signals, WaitStatus};
use signal_hook::consts::{SIGCHLD, SIGCONT, SIGTSTP, SIGTTIN, SIGTTOU};

use crate::output;

/// Maximum number of generations searched between a process and the program.
const ANCESTORS_MAX: usize = 32;

/// Exit of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Exit {
    /// Exited with this code.
    Code(i32),
    /// Killed by this signal.
    Signal(i32),
}

/// A running program that this process represents.
#[derive(Debug)]
pub(super) struct Running {
    signals: Signals,
    pid: i32,
    /// Also wait for processes that the program leaves behind.
    follow: bool,
    /// Exit of the program itself.
    exit: Option<Exit>,
    /// This process was stopped and continued, and the signal that did so is still pending.
    resumed: bool,
    /// Number of times that the program stopped.
    stops: u32,
    /// This process must not stop.
    leases: bool,
    /// The user was told so.
    has_told: bool,
}

impl Running {
    /// Starts it. `leases` tells whether this process leases queues to it.
    ///
    /// # Errors
    /// Those of `fork(2)` and `execve(2)`.
    pub(super) fn start(
        mut command: Command,
        signals: Signals,
        follow: bool,
        leases: bool,
    ) -> io::Result<Self> {
        if follow {
            process::become_subreaper()?;
        }
        signals.restore_mask_in(&mut command);
        let child = command.spawn().inspect_err(|_| signals.unblock())?;
        // Dropped without a wait: the loop below waits for it, together with its signals.
        let pid = child.id() as i32;
        Ok(Self { signals, pid, follow, exit: None, resumed: false, stops: 0, leases, has_told: false })
    }

    /// PID of the started process.
    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    /// True if the program has ended and the processes that it left behind are followed.
    pub(super) fn is_followed(&self) -> bool {
        self.exit.is_some()
    }

    /// Handles signals and children until `until`. Returns how the program ended, if it has.
    ///
    /// # Errors
    /// None known.
    pub(super) fn wait_until(&mut self, until: Instant) -> io::Result<Option<Exit>> {
        loop {
            if let Some(end) = self.poll_children()? {
                return Ok(Some(end));
            }
            let left = until.saturating_duration_since(Instant::now());
            let Some(arrived) = self.signals.wait(left)? else {
                if left == Duration::ZERO {
                    return Ok(None);
                }
                continue;
            };
            // Of several pending signals, the kernel reports the lowest number first, so that a
            // child may have ended before.
            let stops = self.stops;
            if let Some(end) = self.poll_children()? {
                return Ok(Some(end));
            }
            // A signal that stops the group also stops the program, maybe earlier than this
            // process. A signal from before this process stopped and continued has had its effect.
            // If it were forwarded now, it would stop the program once more.
            let is_past = self.stops != stops && is_job_control(arrived.signal);
            if !is_past {
                self.forward_signal(arrived);
            }
        }
    }

    /// Reaps children, and handles those that stopped.
    fn poll_children(&mut self) -> io::Result<Option<Exit>> {
        loop {
            let change = match process::try_wait(if self.follow { -1 } else { self.pid }) {
                Ok(Some(change)) => change,
                Ok(None) => return Ok(None),
                // No process is left to follow. (This cannot happen before the program has ended.)
                Err(_) if self.exit.is_some() => return Ok(self.exit),
                Err(err) => return Err(err),
            };
            let end = match change {
                (pid, WaitStatus::Stopped(signal @ (SIGTSTP | SIGTTIN | SIGTTOU))) if pid == self.pid => {
                    self.stops += 1;
                    if self.leases {
                        self.stay(signal);
                    } else {
                        self.stop();
                    }
                    continue;
                }
                // SIGSTOP is meant for that process only.
                (_, WaitStatus::Stopped(_) | WaitStatus::Continued) => continue,
                (pid, WaitStatus::Exited(code)) => (pid, Exit::Code(code)),
                (pid, WaitStatus::Killed(signal)) => (pid, Exit::Signal(signal)),
            };
            if !self.follow {
                return Ok(Some(end.1));
            }
            // The program's own failure is reported. If it exited with 0, that of the processes
            // that it left behind is.
            if end.0 == self.pid || matches!(self.exit, Some(Exit::Code(0))) {
                self.exit = Some(end.1);
            }
        }
    }

    /// Stops with the program, so that the shell notices, and continues with it.
    fn stop(&mut self) {
        process::stop();
        self.resumed = true;
        // A shell continues the whole group. SIGCONT to this process alone is meant for the
        // program.
        if !matches!(process::try_wait(self.pid), Ok(Some((_, WaitStatus::Continued)))) {
            self.send_signal(SIGCONT);
        }
    }

    /// Runs on although the program was stopped. The shell does not notice the stop, and would not
    /// continue a program that Ctrl-Z has stopped, so this does. After SIGTTIN or SIGTTOU, the
    /// program would only stop again.
    fn stay(&mut self, signal: i32) {
        if signal == SIGTSTP {
            // The program may have ended just now.
            let _ = process::signal_group(self.pid, SIGCONT);
        }
        if !std::mem::replace(&mut self.has_told, true) {
            output::eprint_line(&format!(
                "manylane: engine xdp: the launcher keeps running while process {} is stopped; Ctrl-Z has no effect (docs/run.md)",
                self.pid
            ));
        }
    }

    fn forward_signal(&mut self, arrived: SignalInfo) {
        let is_ours = match arrived.signal {
            SIGCHLD => true,
            // SIGCONT is meant for a stopped program, whatever resumed this process.
            SIGCONT => std::mem::take(&mut self.resumed) && process_state(self.pid) != Some('T'),
            _ => false,
        };
        let has_it = match arrived.sender {
            // The terminal signals the whole group.
            None => process::is_in_own_group(self.pid),
            // A program that signals its group has already received the signal.
            Some(sender) => sender == std::process::id() as i32 || is_descendant(sender, self.pid),
        };
        if !is_ours && !has_it {
            self.send_signal(arrived.signal);
        }
    }

    fn send_signal(&self, signal: i32) {
        if self.exit.is_none() {
            // The program may have ended just now.
            let _ = process::send_signal(self.pid, signal);
            return;
        }
        for pid in children() {
            let _ = process::send_signal(pid, signal);
        }
    }
}

/// True if the signal stops or continues processes. A signal of one kind also discards pending
/// signals of the other kind.
fn is_job_control(signal: i32) -> bool {
    matches!(signal, SIGTSTP | SIGTTIN | SIGTTOU | SIGCONT)
}

/// True if the process `pid` is `ancestor` or descends from it.
fn is_descendant(mut pid: i32, ancestor: i32) -> bool {
    for _ in 0..ANCESTORS_MAX {
        if pid == ancestor {
            return true;
        }
        match parent_pid(pid) {
            Some(parent) if parent > 1 => pid = parent,
            _ => return false,
        }
    }
    false
}

fn parent_pid(pid: i32) -> Option<i32> {
    read_stat(pid)?.split_whitespace().nth(1)?.parse().ok()
}

/// The state letter of the process; T if it is stopped.
pub(super) fn process_state(pid: i32) -> Option<char> {
    read_stat(pid)?.trim_start().chars().next()
}

/// `/proc/PID/stat` from the state on.
fn read_stat(pid: i32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before it is in parentheses and may contain any character.
    stat.rsplit_once(')').map(|(_, behind)| behind.to_owned())
}

/// Our children.
fn children() -> Vec<i32> {
    let us = std::process::id() as i32;
    let Ok(folder) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let pids = folder.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|&pid| parent_pid(pid) == Some(us)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ancestor_processes_are_found() {
        let us = std::process::id() as i32;
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        assert!(is_descendant(pid, us) && is_descendant(us, us) && !is_descendant(us, pid));
        assert!(children().contains(&pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_descendant(pid, us));
    }
}
