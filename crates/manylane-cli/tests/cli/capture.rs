//! `manylane capture` from outside: the content of its files, when it ends, and which process it
//! captures. In a testbed, except for the last test.

use std::fs;
use std::io::{BufRead, BufReader, Lines, Read};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Output, Stdio};

use manylane_test_support::wait_for;
use manylane_testbed::skip;
use manylane_testbed::{Host, Layout, Testbed};
use pcap_parser::Block;

use crate::blocks;
use crate::program::stderr;

const PROGRAM: &str = env!("CARGO_BIN_EXE_manylane");

/// Runs the program inside `host`, or here.
fn run(host: Option<&Host>, words: &[&str]) -> Output {
    let mut command = host.map_or_else(|| Command::new(PROGRAM), |host| host.command(PROGRAM).unwrap());
    command.args(words).stdin(Stdio::null()).output().unwrap()
}

/// A running program, and its first output; killed when the test fails.
#[derive(Debug)]
struct Running {
    child: Child,
    lines: Lines<BufReader<ChildStderr>>,
    first: String,
}

impl Running {
    fn start(command: Command, words: &[&str], says: &str) -> Self {
        Self::try_start(command, words, says).unwrap()
    }

    /// Starts a capture; again, as long as the process has not replied in time.
    fn capture(command: impl Fn() -> Command, words: &[&str]) -> Self {
        let words = [&["capture"], words].concat();
        let start = || Self::try_start(command(), &words, "capturing process ");
        let is_late = |line: &String| line.contains("no reply");
        wait_for("a capture", start, |started| !started.as_ref().is_err_and(is_late)).unwrap()
    }

    /// The error is the first line if it is another one.
    fn try_start(mut command: Command, words: &[&str], says: &str) -> Result<Self, String> {
        command.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let first = lines.next().unwrap().unwrap();
        // From here on it is killed on drop.
        let mut running = Self { child, lines, first };
        running.first = running.first.strip_prefix(says).ok_or(&running.first)?.to_owned();
        Ok(running)
    }

    fn pid(&self) -> String {
        self.child.id().to_string()
    }

    /// Waits until it ends; returns the exit code, standard output, and the rest of standard error.
    fn end(mut self) -> (Option<i32>, Vec<u8>, String) {
        let mut out = Vec::new();
        self.child.stdout.take().unwrap().read_to_end(&mut out).unwrap();
        let said: Vec<String> = self.lines.by_ref().map_while(Result::ok).collect();
        (self.child.wait().unwrap().code(), out, said.join("\n"))
    }

    fn signal(&self, signal: &str) {
        assert!(Command::new("kill").args(["-s", signal, &self.pid()]).status().unwrap().success());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn echo(host: &Host, port: u16) -> Running {
    let addr = format!("{}:{port}", host.ip4(0));
    let words = ["echo", &addr, "--engine", "xdp", "--lanes", "2", "--interval", "0"];
    let echo = Running::start(host.command(PROGRAM).unwrap(), &words, "listening on ");
    assert_eq!(echo.first, addr);
    echo
}

/// Sends `count` requests, and expects a reply to each.
fn ask(host: &Host, server: &str, count: u64) {
    let count = count.to_string();
    let words = ["send", server, "--expect", "echo", "--count", &count, "--rate", "2k", "--timeout", "120s"];
    let output = run(Some(host), &words);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

/// Content of a capture file: names of its interfaces, received and sent packets, and blocks of
/// statistics.
#[derive(Debug, Default, PartialEq, Eq)]
struct Found {
    interfaces: Vec<String>,
    received: usize,
    sent: usize,
    statistics: usize,
}

fn read(file: &[u8]) -> Found {
    let mut found = Found::default();
    blocks::for_each(file, |block| match block {
        Block::InterfaceDescription(block) => {
            let name = block.options.iter().find(|option| option.code.0 == 2).unwrap();
            let name = &name.value[..usize::from(name.len)];
            found.interfaces.push(String::from_utf8(name.to_vec()).unwrap());
        }
        Block::EnhancedPacket(block) => {
            let flags = block.options.iter().find(|option| option.code.0 == 2).unwrap();
            match flags.value[0] & 3 {
                1 => found.received += 1,
                2 => found.sent += 1,
                other => panic!("direction {other}"),
            }
        }
        Block::InterfaceStatistics(_) => found.statistics += 1,
        _ => {}
    });
    found
}

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name)
}

#[test]
fn netns_capture_writes_complete_files() {
    if !skip::need_root("netns_capture_writes_complete_files") {
        return;
    }
    let testbed = Testbed::new(&Layout { queues: 2, ipv6: false, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    let device = b.device(0).to_owned();
    let server = echo(b, 4242);
    let addr = server.first.clone();
    let within = |host: &Host, words: &[&str]| Running::capture(|| host.command(PROGRAM).unwrap(), words);
    // The first replies leave through the kernel. From here on, they leave past the stack.
    ask(a, &addr, 200);

    // By process id, from outside, until Ctrl-C. The capture has all requests and replies.
    let path = file("capture-ctrl-c.pcapng");
    let captured = || {
        let pid = server.pid();
        let words = [&*pid, "-w", path.to_str().unwrap()];
        let capture = Running::capture(|| Command::new(PROGRAM), &words);
        assert!(capture.first.contains(&addr) && capture.first.contains(&device), "{}", capture.first);
        ask(a, &addr, 300);
        capture.signal("INT");
        capture.end()
    };
    // Again, as long as the thread that follows routes had no CPU, so that a reply left through the
    // kernel.
    let (code, out, said) = wait_for("600 frames", captured, |(_, _, said)| {
        said.contains("600 frames captured: 300 received, 300 sent")
    });
    assert_eq!((code, out.len()), (Some(0), 0), "{said}");
    let all = Found { interfaces: vec![device.clone()], received: 300, sent: 300, statistics: 1 };
    assert_eq!(read(&fs::read(&path).unwrap()), all);

    // The only process, to a pipe, for a number of frames.
    let capture = within(b, &["--count", "21", "--snaplen", "60"]);
    ask(a, &addr, 50);
    let (code, out, said) = capture.end();
    assert_eq!(code, Some(0), "{said}");
    let found = read(&out);
    assert_eq!((found.received + found.sent, found.statistics), (21, 1));

    // By address, for a duration.
    let capture = within(b, &[&addr, "--duration", "50ms", "-w", "-"]);
    let (code, out, said) = capture.end();
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(read(&out), Found { interfaces: vec![device.clone()], statistics: 1, ..Found::default() });

    // The captured process ends first.
    let capture = within(b, &[]);
    ask(a, &addr, 10);
    server.signal("TERM");
    assert_eq!(server.end().0, Some(0));
    let (code, out, said) = capture.end();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("has closed its socket"), "{said}");
    assert_eq!(read(&out), Found { interfaces: vec![device], received: 10, sent: 10, statistics: 1 });

    // A reader that closes the pipe is no failure.
    let server = echo(b, 4242);
    let mut capture = within(b, &[]);
    drop(capture.child.stdout.take());
    let end = || {
        ask(a, &addr, 10);
        capture.child.try_wait().unwrap()
    };
    let status = wait_for("the end of a capture without a reader", end, Option::is_some);
    assert_eq!(status.unwrap().code(), Some(0));
    drop(server);
}

#[test]
fn netns_capture_lists_the_sockets_if_there_are_several() {
    if !skip::need_root("netns_capture_lists_the_sockets_if_there_are_several") {
        return;
    }
    let layout =
        Layout { hosts: 3, links: vec![(0, 1), (1, 2)], queues: 1, ipv6: false, ..Layout::default() };
    let testbed = Testbed::new(&layout).unwrap();
    let b = testbed.host(1);
    let first = echo(b, 4242);
    let addr = format!("{}:4343", b.ip4(1));
    let words = ["echo", &addr, "--engine", "xdp", "--lanes", "1", "--interval", "0"];
    let second = Running::start(b.command(PROGRAM).unwrap(), &words, "listening on ");
    // Again, as long as one of them has not replied in time.
    let capture = || run(Some(b), &["capture", "--duration", "10ms", "-w", "/dev/null"]);
    let output = wait_for("both sockets", capture, |output| output.status.code() == Some(2));
    for known in [&first.pid(), &first.first, &second.pid(), &addr] {
        assert!(stderr(&output).contains(known), "{known} is not in {}", stderr(&output));
    }
    let capture = || run(Some(b), &["capture", &addr, "--duration", "10ms"]);
    let output = wait_for("a reply in time", capture, |output| !stderr(output).contains("no reply"));
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert_eq!(read(&output.stdout).interfaces, [b.device(1)]);
    // Host 0 has no socket with engine xdp.
    let output = run(Some(testbed.host(0)), &["capture", "-w", "/dev/null"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("engine xdp"), "{}", stderr(&output));
}

#[test]
fn capture_reports_why_it_cannot_start() {
    for (words, code, hint) in [
        (&["capture", "here", "-w", "/dev/null"][..], 2, "192.0.2.1:53"),
        (&["capture", "--snaplen", "0"], 2, "65535"),
        (&["capture", "--count", "0"], 2, "above 0"),
        (&["capture", "999999999", "-w", "/dev/null"], 1, "no process 999999999"),
        (&["capture", "192.0.2.7:53", "-w", "/dev/null"], 1, "192.0.2.7:53"),
    ] {
        let output = run(None, words);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(hint), "{words:?} does not hint at {hint}: {}", stderr(&output));
    }
}
