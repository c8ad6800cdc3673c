//! Children: this test program again, as another process, with another user or with limits of its
//! own.
//!
//! A child is an ignored test that does nothing unless it is started from here. Parent and child
//! talk in lines; a child that was told to hold something does so until its standard input ends,
//! which it also does when the parent dies.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::process::{Child as Process, ExitStatus};
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::{Duration, Instant};
use std::{env, fs};

use manylane_sys::process::{IsolatedChild, StdinGuard, spawn_isolated};
use manylane_testbed::Host;
use manylane_tests::TEST_TIMEOUT;
use rustix::process::{Pid, Rlimit, getrlimit, kill_process, setrlimit};
pub(crate) use rustix::process::{Resource, Signal};

/// This program. By this link a user who may not see the folder of the program can run it all the
/// same.
const SELF_EXE: &str = "/proc/self/exe";
const ROLE_VAR: &str = "MANYLANE_TEST_CHILD";
/// A user without any privilege.
pub(crate) const NOBODY: u32 = 65_534;

/// A user that has no other process, also where tests run beside other tests.
pub(crate) fn unique_uid() -> u32 {
    1_900_000_000 + std::process::id()
}

/// Whether this process is the child `name`. Every child asks this first.
pub(crate) fn is_child(name: &str) -> bool {
    env::var_os(ROLE_VAR).is_some_and(|role| role == name)
}

/// In a child: tells the parent a line.
pub(crate) fn report(line: &str) {
    // The harness may stand in the middle of a line.
    println!("\n> {line}");
}

/// In a child: waits until the parent lets go of it, or is gone.
pub(crate) fn wait_for_parent() {
    let mut rest = Vec::new();
    std::io::stdin().read_to_end(&mut rest).unwrap();
}

/// In a child: sets a soft limit of this process; none for as much as the hard one allows.
///
/// By the system call: a program such as prlimit(1) would inherit the limit, and could not even
/// start under some.
pub(crate) fn set_limit(what: Resource, value: Option<u64>) {
    let maximum = getrlimit(what).maximum;
    setrlimit(what, Rlimit { current: value.or(maximum), maximum }).unwrap();
}

/// A number of `/proc/self/status`, such as `VmSize` (in KiB) or `Uid`.
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
    // One of them is the directory that is being read.
    fs::read_dir("/proc/self/fd").unwrap().count() - 1
}

/// Takes every free descriptor below the highest that is open: the limit is one of numbers, and
/// from here on their count is the next number. They stay open until the process ends.
pub(crate) fn fill_gaps() {
    loop {
        let filler = File::open("/dev/null").unwrap();
        if open_fds() == filler.as_raw_fd() as usize + 1 {
            return;
        }
        let _ = filler.into_raw_fd();
    }
}

/// A child that runs, with none of the descriptors of this process: sockets that tests close
/// meanwhile are closed. It is killed when this value goes, should it still run.
pub(crate) struct Child {
    process: Process,
    lines: Receiver<String>,
    stdin_guard: Option<StdinGuard>,
}

impl Child {
    /// Starts the child `name`: as `user` if there is one and this process may, else as its own.
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
        let apart = spawn_isolated(host.map(Host::namespace), SELF_EXE, &args, &[(ROLE_VAR, name)], user);
        let IsolatedChild { process, lines, stdin_guard: keep } = apart.unwrap();
        Self { process, lines, stdin_guard: Some(keep) }
    }

    /// Runs the child `name` to its end, which has to be a good one.
    pub(crate) fn run(name: &str, user: Option<u32>) {
        Self::start(name, user).finish();
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// The next line that the child tells.
    pub(crate) fn line(&self) -> String {
        loop {
            let line = self.lines.recv_timeout(TEST_TIMEOUT).expect("the child tells something");
            if let Some(told) = line.strip_prefix("> ") {
                return told.to_owned();
            }
        }
    }

    /// The next line, if there is one within `patience`.
    pub(crate) fn line_within(&self, patience: Duration) -> Option<String> {
        self.lines.recv_timeout(patience).ok()?.strip_prefix("> ").map(str::to_owned)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    /// Kills the child without a chance to clean up, and waits until it is gone.
    pub(crate) fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Lets go of the child, which may still tell something.
    pub(crate) fn release(mut self) -> Self {
        drop(self.stdin_guard.take());
        self
    }

    /// Lets go of the child and waits for its end, which has to be a good one.
    pub(crate) fn finish(mut self) {
        drop(self.stdin_guard.take());
        let ended = self.wait();
        assert!(
            ended.success(),
            "the child: {ended}: {}",
            self.lines.try_iter().collect::<Vec<_>>().join("\n")
        );
    }

    fn wait(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < 2 * TEST_TIMEOUT, "the child does not end");
            thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Both fail for one that has ended, which is what is wanted.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
