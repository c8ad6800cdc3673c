//! Standing for the program: what is sent to us is sent to it, we stop and go on as it does, and
//! learn how it ends.

use std::fs;
use std::io;
use std::process::Command;
use std::time::{Duration, Instant};

use manylane_sys::process::{self, SignalInfo, Signals, WaitStatus};
use signal_hook::consts::{SIGCHLD, SIGCONT, SIGTSTP, SIGTTIN, SIGTTOU};

/// Generations between a process and the program that are looked through, at most.
const ANCESTORS_MAX: usize = 32;

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Exit {
    /// With this exit code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

/// A program that runs, with this process standing for it.
#[derive(Debug)]
pub(super) struct Running {
    signals: Signals,
    pid: i32,
    /// Stay until those that the program leaves behind have ended, too.
    follow: bool,
    /// How the program itself ended.
    exit: Option<Exit>,
    /// We were stopped and continued, and the signal that did so is still to come.
    resumed: bool,
    /// Times that we have stopped with the program.
    stops: u32,
}

impl Running {
    /// Starts it.
    ///
    /// # Errors
    /// What `fork(2)` and `execve(2)` report.
    pub(super) fn start(mut command: Command, follow: bool) -> io::Result<Self> {
        if follow {
            process::become_subreaper()?;
        }
        let signals = Signals::block()?;
        signals.restore_mask_in(&mut command);
        let child = command.spawn().inspect_err(|_| signals.unblock())?;
        // Dropped without being waited for: that is done below, together with its signals.
        let pid = child.id() as i32;
        Ok(Self { signals, pid, follow, exit: None, resumed: false, stops: 0 })
    }

    /// Number of the process that was started.
    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    /// Whether the program itself has ended, and those that it left behind are followed.
    pub(super) fn is_followed(&self) -> bool {
        self.exit.is_some()
    }

    /// Does what there is to do until `until`; how it ended if it has.
    ///
    /// # Errors
    /// None that is known.
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
            // Of signals that wait together the one of the lowest number is told first: a child may
            // have ended before.
            let stops = self.stops;
            if let Some(end) = self.poll_children()? {
                return Ok(Some(end));
            }
            // Whoever stops the group stops the program too, which may be sooner than we are. What
            // was sent before we stopped and went on has had its effect: passed on now, it would
            // stop the program once more.
            let is_past = self.stops != stops && is_job_control(arrived.signal);
            if !is_past {
                self.forward_signal(arrived);
            }
        }
    }

    /// Looks at what became of the children.
    fn poll_children(&mut self) -> io::Result<Option<Exit>> {
        loop {
            let change = match process::try_wait(if self.follow { -1 } else { self.pid }) {
                Ok(Some(change)) => change,
                Ok(None) => return Ok(None),
                // Nobody is left to be followed. (There is no such thing before the program has
                // ended.)
                Err(_) if self.exit.is_some() => return Ok(self.exit),
                Err(err) => return Err(err),
            };
            let end = match change {
                (pid, WaitStatus::Stopped(SIGTSTP | SIGTTIN | SIGTTOU)) if pid == self.pid => {
                    self.stop();
                    continue;
                }
                // Whoever stops a process with SIGSTOP means that one.
                (_, WaitStatus::Stopped(_) | WaitStatus::Continued) => continue,
                (pid, WaitStatus::Exited(code)) => (pid, Exit::Code(code)),
                (pid, WaitStatus::Killed(signal)) => (pid, Exit::Signal(signal)),
            };
            if !self.follow {
                return Ok(Some(end.1));
            }
            // The program's own failure counts; that of what it left behind, if it meant to leave
            // it behind.
            if end.0 == self.pid || matches!(self.exit, Some(Exit::Code(0))) {
                self.exit = Some(end.1);
            }
        }
    }

    /// Stops with the program, so that the shell notices, and goes on with it.
    fn stop(&mut self) {
        process::stop();
        self.stops += 1;
        self.resumed = true;
        // A shell continues the whole group. Whoever continues us alone means the program.
        if !matches!(process::try_wait(self.pid), Ok(Some((_, WaitStatus::Continued)))) {
            self.send_signal(SIGCONT);
        }
    }

    fn forward_signal(&mut self, arrived: SignalInfo) {
        let is_ours = match arrived.signal {
            SIGCHLD => true,
            // A program that is stopped is meant by it, whatever has resumed us.
            SIGCONT => std::mem::take(&mut self.resumed) && process_state(self.pid) != Some('T'),
            _ => false,
        };
        let has_it = match arrived.sender {
            // The terminal sends to the whole group.
            None => process::is_in_own_group(self.pid),
            // A program that signals its group has done so already.
            Some(sender) => sender == std::process::id() as i32 || is_descendant(sender, self.pid),
        };
        if !is_ours && !has_it {
            self.send_signal(arrived.signal);
        }
    }

    fn send_signal(&self, signal: i32) {
        if self.exit.is_none() {
            // It may have ended just now.
            let _ = process::send_signal(self.pid, signal);
            return;
        }
        for pid in children() {
            let _ = process::send_signal(pid, signal);
        }
    }
}

/// Whether a signal stops processes or lets them go on: the kernel forgets those that wait, too,
/// when one of the other kind comes.
fn is_job_control(signal: i32) -> bool {
    matches!(signal, SIGTSTP | SIGTTIN | SIGTTOU | SIGCONT)
}

/// Whether the process `pid` is `ancestor`, or was started by it or by one that was.
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

/// The kernel's letter for what it does; T if it is stopped.
fn process_state(pid: i32) -> Option<char> {
    read_stat(pid)?.trim_start().chars().next()
}

/// What the kernel says of a process, from its state on.
fn read_stat(pid: i32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before it is in parentheses and may have anything in it.
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
    fn descent_is_known() {
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
