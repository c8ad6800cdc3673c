//! A running server, with lanes or without, which ends with the test however the test ends.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ExitStatus, Stdio};
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

use manylane_ipc::report::{NO_LANE, OPEN, ReportFile};
use manylane_sys::process;
use manylane_test_support::{kill_on_parent_exit, wait_for};
use serde_json::Value;

use crate::sandbox::Sandbox;

/// Makes a library with debug assertions prefetch even while all lanes are active.
pub(crate) const PREFETCH: &str = "MANYLANE_TEST_PREFETCH=1";
/// Timeout of everything.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// A server. On drop, it is killed with its whole process group.
pub(crate) struct Server {
    child: Child,
    report: Option<String>,
    log: String,
}

/// Repeats `receive` while it is interrupted, as a receive with a timeout is if its process was
/// stopped or frozen for a moment.
pub(crate) fn retry_interrupted<T>(mut receive: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match receive() {
            Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// A process group, printed as its threads and what each is waiting for.
struct Group(u32);

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&describe_group(self.0))
    }
}

fn describe_group(group: u32) -> String {
    let mut text = String::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let path = entry.path();
        let stat = fs::read_to_string(path.join("stat")).unwrap_or_default();
        let Some((name, rest)) = stat.rsplit_once(')') else { continue };
        if rest.split_whitespace().nth(2) != Some(&group.to_string()) {
            continue;
        }
        text += &format!("{name}){}\n", &rest[..rest.len().min(20)]);
        for thread in fs::read_dir(path.join("task")).into_iter().flatten().flatten() {
            let read = |file: &str| fs::read_to_string(thread.path().join(file)).unwrap_or_default();
            let signals: Vec<String> = read("status")
                .lines()
                .filter(|line| {
                    ["State", "SigPnd", "ShdPnd", "SigBlk"].iter().any(|key| line.starts_with(key))
                })
                .map(str::to_owned)
                .collect();
            text += &format!("  {} in {} {}\n", signals.join(" "), read("wchan"), read("syscall").trim_end());
            text += &read("stack");
        }
    }
    text
}

/// The report file of a server; `launcher` is the process id of its launcher.
pub(crate) fn report_file(launcher: u32) -> ReportFile {
    let find = || {
        let child = fs::read_dir("/proc").unwrap().flatten().find_map(|entry| {
            let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
            let parent: u32 = stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?;
            if parent != launcher {
                return None;
            }
            let environment = fs::read(entry.path().join("environ")).ok()?;
            let text = String::from_utf8_lossy(&environment).into_owned();
            text.split('\0').find_map(|word| word.strip_prefix("MANYLANE_REPORT=").map(PathBuf::from))
        });
        child.filter(|path| ReportFile::open(path).is_ok())
    };
    ReportFile::open(&wait_for("the report of a server", find, Option::is_some).unwrap()).unwrap()
}

impl Server {
    /// Starts a command line, under `manylane run` if `with` has options for it. Options that begin
    /// with `MANYLANE_` are environment variables.
    pub(crate) fn start(sandbox: &Sandbox, words: &[String], with: Option<&[&str]>) -> Self {
        let name = if with.is_some() { "with" } else { "without" };
        let (report, log) = (sandbox.path(&format!("{name}.json")), sandbox.path(&format!("{name}.log")));
        let mut command = match with {
            None => sandbox.command(&words[0]),
            Some(options) => {
                let mut command = sandbox.command(env!("CARGO_BIN_EXE_manylane"));
                let (vars, options): (Vec<&str>, Vec<&str>) =
                    options.iter().partition(|option| option.starts_with("MANYLANE_"));
                command.envs(vars.iter().filter_map(|var| var.split_once('=')));
                command.args(["run", "--json-file", &report]).args(options).arg("--").arg(&words[0]);
                command
            }
        };
        let out = File::create(&log).unwrap();
        command.args(&words[1..]).current_dir(sandbox.folder()).process_group(0);
        command.stdin(Stdio::null()).stdout(out.try_clone().unwrap()).stderr(out);
        kill_on_parent_exit(&mut command);
        let child = command.spawn().unwrap();
        Self { child, report: with.map(|_| report), log }
    }

    /// Id of the started process: with lanes, that of the launcher.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Repeats `ask` until that many receivers have lanes, because the kernel may wake a thread
    /// late and seldom. Without lanes, does not call it.
    pub(crate) fn wait_lanes(&mut self, lanes: usize, mut ask: impl FnMut(&mut Self)) {
        if self.report.is_none() || lanes == 0 {
            return;
        }
        let file = report_file(self.pid());
        let receivers = || {
            ask(self);
            let open = file.report().receivers.iter().filter(|at| at.state.load(Relaxed) == OPEN);
            open.map(|at| (at.lane.load(Relaxed), at.delivered.load(Relaxed))).collect::<Vec<_>>()
        };
        wait_for("lanes of all receivers (lane, received)", receivers, |all| {
            all.iter().filter(|(lane, _)| *lane != NO_LANE).count() >= lanes
        });
    }

    /// Waits until the started process has ended.
    pub(crate) fn wait(&mut self) {
        self.wait_status();
    }

    fn wait_status(&mut self) -> ExitStatus {
        let group = self.child.id();
        let end = || (self.child.try_wait().unwrap(), Group(group));
        let (status, _) = wait_for("the end of the server (status, threads)", end, |(end, _)| end.is_some());
        status.unwrap()
    }

    /// The output so far.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until the server answers `request` at `addr`, and returns the answer. The server
    /// receives the request once.
    pub(crate) fn answer(&mut self, sandbox: &Sandbox, addr: SocketAddr, request: &[u8]) -> Vec<u8> {
        let socket = sandbox.socket_at(if addr.ip().is_loopback() { "127.0.0.1:0" } else { "0.0.0.0:0" });
        // A connected socket is told if no socket listens at the address yet.
        socket.connect(addr).unwrap();
        socket.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        self.first(&socket, request)
    }

    fn first(&mut self, socket: &UdpSocket, request: &[u8]) -> Vec<u8> {
        let mut buffer = [0; 4096];
        // Between hosts, the kernel sends six ICMP errors at once, and then one per second
        // (net.ipv4.icmp_ratelimit). A request in between is lost without an error.
        let is_far = socket.peer_addr().is_ok_and(|peer| !peer.ip().is_loopback());
        let mut tries = 0;
        let ask = || {
            if is_far && tries > 4 {
                thread::sleep(Duration::from_millis(1200));
            }
            tries += 1;
            let asked = socket.send(request).and_then(|_| retry_interrupted(|| socket.recv(&mut buffer)));
            self.assert_running();
            asked.map(|len| buffer[..len].to_vec())
        };
        let is_refused = |err: &io::Error| err.kind() == io::ErrorKind::ConnectionRefused;
        wait_for("a server that listens", ask, |answer| !answer.as_ref().is_err_and(is_refused)).unwrap()
    }

    /// Fails if the server has ended.
    pub(crate) fn assert_running(&mut self) {
        let ended = self.child.try_wait().unwrap();
        assert_eq!(ended, None, "the server has ended: {}", self.log());
    }

    /// Ends the server; returns its exit status, and the report if it had lanes.
    pub(crate) fn end(mut self) -> (ExitStatus, Option<Report>) {
        process::send_signal(self.child.id() as i32, 15).unwrap();
        let status = self.wait_status();
        let read = |path: &String| serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        (status, self.report.as_ref().map(|path| Report(read(path))))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("{}", self.log());
        }
        // Also the children of a process that was killed.
        let _ = process::send_signal(-(self.child.id() as i32), 9);
        let _ = self.child.wait();
    }
}

/// The document of `manylane run`.
#[derive(Debug)]
pub(crate) struct Report(pub(crate) Value);

impl Report {
    fn rows(&self, addr: SocketAddr) -> impl Iterator<Item = &Value> {
        let addr = addr.to_string();
        self.0["rows"].as_array().unwrap().iter().filter(move |row| row["socket"] == addr.as_str())
    }

    /// Lanes of the socket that is bound to `addr`.
    pub(crate) fn lanes(&self, addr: SocketAddr) -> usize {
        self.rows(addr).filter_map(|row| row["lane"].as_u64()).collect::<BTreeSet<_>>().len()
    }

    /// Datagrams that were received there.
    pub(crate) fn delivered(&self, addr: SocketAddr) -> u64 {
        self.rows(addr).map(|row| row["delivered"].as_u64().unwrap()).sum()
    }

    /// Reasons of fallbacks.
    pub(crate) fn reasons(&self) -> Vec<&str> {
        let all = self.0["fallbacks"].as_array().unwrap();
        all.iter().map(|fallback| fallback["reason"].as_str().unwrap()).collect()
    }
}
