//! Children: this test program as another process, with another user or with its own limits.
//!
//! A child is an ignored test that does nothing unless it is started from here. Parent and child
//! exchange lines. A child that keeps a resource does so until its standard input ends, which also
//! happens when the parent dies.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, IntoRawFd};
use std::process::Child as Process;
use std::sync::mpsc::Receiver;
use std::time::Duration;
use std::{env, fs};

use manylane_test_support::{IsolatedChild, StdinGuard, spawn_isolated, wait_for_at_most};
use manylane_testbed::Host;
use manylane_tests::TEST_TIMEOUT;
use rustix::process::{Pid, Rlimit, getrlimit, kill_process, setrlimit};
pub(crate) use rustix::process::{Resource, Signal};

/// This program. With this link, a user without access to its folder can run it.
const SELF_EXE: &str = "/proc/self/exe";
const ROLE_VAR: &str = "MANYLANE_TEST_CHILD";
/// A user without any privilege.
pub(crate) const NOBODY: u32 = 65_534;

/// A user without other processes, even if tests run in parallel.
pub(crate) fn unique_uid() -> u32 {
    1_900_000_000 + std::process::id()
}

/// True if this process is the child `name`. Every child checks this first.
pub(crate) fn is_child(name: &str) -> bool {
    env::var_os(ROLE_VAR).is_some_and(|role| role == name)
}

/// In a child: sends a line to the parent.
pub(crate) fn report(line: &str) {
    // The test harness may have printed a part of a line.
    println!("\n> {line}");
}

/// In a child: waits until the parent releases it, or has ended.
pub(crate) fn wait_for_parent() {
    let mut rest = Vec::new();
    std::io::stdin().read_to_end(&mut rest).unwrap();
}

/// In a child: sets a soft limit of this process; none means the hard limit.
///
/// By the system call: a program such as prlimit(1) would inherit the limit, and could not even
/// start under some.
pub(crate) fn set_limit(what: Resource, value: Option<u64>) {
    let maximum = getrlimit(what).maximum;
    setrlimit(what, Rlimit { current: value.or(maximum), maximum }).unwrap();
}

/// A value of `/proc/self/status`, such as `VmSize` (in KiB) or `Uid`.
pub(crate) fn status(name: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

pub(crate) fn is_root() -> bool {
    status("Uid") == 0
}

/// Open descriptors of this process.
pub(crate) fn open_fds() -> usize {
    // One of them is the directory itself.
    fs::read_dir("/proc/self/fd").unwrap().count() - 1
}

/// Uses every free descriptor below the highest open one. The limit applies to numbers, and from
/// here on the number of open descriptors is the next number. They stay open until the process
/// ends.
pub(crate) fn fill_gaps() {
    loop {
        let filler = File::open("/dev/null").unwrap();
        if open_fds() == filler.as_raw_fd() as usize + 1 {
            return;
        }
        let _ = filler.into_raw_fd();
    }
}

/// A running child without descriptors of this process, so that sockets that tests close meanwhile
/// are really closed. It is killed when this value is dropped.
pub(crate) struct Child {
    process: Process,
    lines: Receiver<String>,
    stdin_guard: Option<StdinGuard>,
}

impl Child {
    /// Starts the child `name`: as `user` if given and permitted, else as the current user.
    pub(crate) fn start(name: &str, user: Option<u32>) -> Self {
        Self::start_at(None, name, user)
    }

    /// Starts the child `name` inside `host`.
    pub(crate) fn start_in(host: &Host, name: &str) -> Self {
        Self::start_at(Some(host), name, None)
    }

    fn start_at(host: Option<&Host>, name: &str, user: Option<u32>) -> Self {
        let args = [name, "--ignored", "--nocapture", "--test-threads=1"];
        let user = user.filter(|_| is_root());
        let namespace = host.map(|host| host.namespace().as_fd());
        let apart = spawn_isolated(namespace, SELF_EXE, &args, &[(ROLE_VAR, name)], user);
        let IsolatedChild { process, lines, stdin_guard: keep } = apart.unwrap();
        Self { process, lines, stdin_guard: Some(keep) }
    }

    /// Runs the child `name`, which must succeed.
    pub(crate) fn run(name: &str, user: Option<u32>) {
        Self::start(name, user).finish();
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// The next line of the child.
    pub(crate) fn line(&self) -> String {
        loop {
            let line = self.lines.recv_timeout(TEST_TIMEOUT).expect("the child tells something");
            if let Some(told) = line.strip_prefix("> ") {
                return told.to_owned();
            }
        }
    }

    /// The next line, if it arrives before `timeout`.
    pub(crate) fn line_within(&self, timeout: Duration) -> Option<String> {
        self.lines.recv_timeout(timeout).ok()?.strip_prefix("> ").map(str::to_owned)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    /// Kills the child without a chance to clean up, and waits for its end.
    pub(crate) fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Releases the child, which may still send lines.
    pub(crate) fn release(mut self) -> Self {
        drop(self.stdin_guard.take());
        self
    }

    /// Releases the child, which must succeed.
    pub(crate) fn finish(mut self) {
        drop(self.stdin_guard.take());
        let mut lines = Vec::new();
        let progress = || {
            let ended = self.process.try_wait().unwrap();
            lines.extend(self.lines.try_iter());
            (ended, lines.clone())
        };
        // Longer than a wait of the child, which then says what it waited for.
        let what = "the end of the child (status, output)";
        let (ended, _) = wait_for_at_most(2 * TEST_TIMEOUT, what, progress, |(ended, _)| ended.is_some());
        let ended = ended.unwrap();
        lines.extend(self.lines.try_iter());
        assert!(ended.success(), "the child: {ended}: {}", lines.join("\n"));
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Both fail if it has ended, which is intended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
