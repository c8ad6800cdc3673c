//! rsyslog: each thread of imudp waits on an epoll instance of its own. It sends no replies, so the
//! test reads the file that it writes.

use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use manylane_test_support::wait_for;

use crate::sandbox::Sandbox;
use crate::server::{Report, Server};
use crate::words;

const CONFIGURATION: &str = include_str!("programs/rsyslog.conf");
const FLOWS: usize = 32;
const MESSAGES_PER_FLOW: usize = 250;

/// The number of lines in the file.
fn lines(path: &str) -> usize {
    fs::read(path).unwrap_or_default().iter().filter(|&&byte| byte == b'\n').count()
}

/// The number of those lines that are not a first message, of which some may be written late.
fn later_lines(path: &str) -> usize {
    let text = fs::read(path).unwrap_or_default();
    let all = text.split_inclusive(|&byte| byte == b'\n');
    all.filter(|line| line.ends_with(b"\n") && !line.ends_with(b"first\n")).count()
}

fn wait_for_lines(server: &mut Server, path: &str, count: usize, lines: fn(&str) -> usize) {
    let written = || {
        server.assert_running();
        lines(path)
    };
    wait_for(&format!("{count} messages in the file"), written, |lines| *lines >= count);
}

fn serve(sandbox: &Sandbox, with: Option<&[&str]>) -> (String, Option<Report>, SocketAddr) {
    let addr = sandbox.free_addr();
    let out = sandbox.path(if with.is_some() { "with.out" } else { "without.out" });
    let port = addr.port().to_string();
    let named = [("THREADS", "4"), ("ADDRESS", "127.0.0.1"), ("PORT", &port), ("OUT", &out)];
    let configuration = sandbox.filled("rsyslog.conf", CONFIGURATION, &named);
    let pid = sandbox.path("rsyslog.pid");
    let arguments = ["-n", "-f", &configuration, "-i", &pid];
    let mut server = Server::start(sandbox, &words("rsyslogd", &arguments), with);
    // The first message arrives once rsyslog listens; those sent before that are lost.
    let first = sandbox.socket();
    first.connect(addr).unwrap();
    let send_first = || {
        server.assert_running();
        let sent = first.send(b"<13>Jan  1 00:00:00 host tag: first");
        thread::sleep(Duration::from_millis(20));
        (sent.err(), lines(&out))
    };
    wait_for("the first message (error, lines)", send_first, |(err, lines)| err.is_none() && *lines > 0);
    let sockets: Vec<_> = (0..FLOWS).map(|_| sandbox.socket()).collect();
    let send_firsts = |server: &mut Server| {
        let base = wait_stable(&out);
        let first = b"<13>Jan  1 00:00:00 host tag: first";
        sockets.iter().for_each(|socket| assert!(socket.send_to(first, addr).is_ok()));
        wait_for_lines(server, &out, base + FLOWS, lines);
    };
    server.wait_lanes(4, send_firsts);
    for at in 0..MESSAGES_PER_FLOW {
        for (flow, socket) in sockets.iter().enumerate() {
            let text = format!("<13>Jan  1 00:00:00 host tag: flow {flow} message {at}");
            socket.send_to(text.as_bytes(), addr).unwrap();
        }
        // Never more messages in flight than every receive buffer can hold.
        wait_for_lines(&mut server, &out, (at + 1) * FLOWS, later_lines);
    }
    // Before its end, too: a thread that gets no CPU time loses its lane.
    server.wait_lanes(4, send_firsts);
    let (status, report) = server.end();
    assert!(status.success(), "{status}");
    (fs::read_to_string(&out).unwrap(), report, addr)
}

/// The lines of the file, once it no longer grows.
fn wait_stable(path: &str) -> usize {
    let (mut count, mut since) = (lines(path), Instant::now());
    while since.elapsed() < Duration::from_millis(100) {
        let now = lines(path);
        if now != count {
            (count, since) = (now, Instant::now());
        }
        thread::sleep(Duration::from_millis(5));
    }
    count
}

/// The number of times that the file has each message.
fn messages(text: &str) -> BTreeMap<&str, usize> {
    let mut all = BTreeMap::new();
    for line in text.lines().filter(|line| !line.ends_with("first")) {
        *all.entry(line).or_default() += 1;
    }
    all
}

#[test]
fn loopback_rsyslog() {
    if !crate::has("loopback_rsyslog", "rsyslogd", "rsyslog") {
        return;
    }
    let sandbox = Sandbox::new("rsyslog");
    let (without, _, _) = serve(&sandbox, None);
    let (with, report, addr) = serve(&sandbox, Some(&[]));
    for text in [&without, &with] {
        let messages = messages(text);
        assert_eq!(messages.len(), FLOWS * MESSAGES_PER_FLOW);
        assert!(messages.values().all(|&count| count == 1), "a message is there twice");
    }
    assert!(messages(&without) == messages(&with), "the files differ");
    let report = report.unwrap();
    assert!(report.delivered(addr) >= (FLOWS * MESSAGES_PER_FLOW) as u64, "{report:?}");
    assert_eq!(report.lanes(addr), 4, "{report:?}");
}
