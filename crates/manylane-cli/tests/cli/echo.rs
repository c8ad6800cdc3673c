//! `manylane echo`, its metrics, and `manylane send` as its client.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use manylane_test_support::wait_for;
use manylane_testbed::skip;
use serde_json::Value;

use crate::program::{document, manylane, run, stderr, stdout};

/// `manylane echo` on a port of its own; killed when the test fails.
struct Echo {
    child: Child,
    addr: String,
    /// The line that says how it serves.
    how: String,
    /// The lines after that.
    log: Arc<Mutex<Vec<String>>>,
}

impl Echo {
    fn start(words: &[&str]) -> Self {
        let child = manylane(&[&["echo", "127.0.0.1:0", "--json"], words].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // From here on it is killed on drop, whatever it prints.
        let mut echo = Self { child, addr: String::new(), how: String::new(), log: Arc::default() };
        let mut lines = BufReader::new(echo.child.stderr.take().unwrap()).lines();
        let first = lines.next().unwrap().unwrap();
        first.strip_prefix("listening on ").unwrap_or_else(|| panic!("{first}")).clone_into(&mut echo.addr);
        echo.how = lines.next().unwrap().unwrap();
        // Read on, because the program would block on a full pipe.
        let log = Arc::clone(&echo.log);
        thread::spawn(move || lines.map_while(Result::ok).for_each(|line| log.lock().unwrap().push(line)));
        echo
    }

    /// Sends a signal and waits; returns the final statistics.
    fn end(mut self, signal: &str) -> Value {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", signal, &pid]).status().unwrap().success());
        let end = || (self.child.try_wait().unwrap(), &self.log);
        let (status, _) = wait_for("the end of echo (status, log)", end, |(status, _)| status.is_some());
        assert_eq!(status.unwrap().code(), Some(0), "exit code after SIG{signal}");
        let mut text = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        document(&text)
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn total(document: &Value) -> &Value {
    document["rows"].as_array().unwrap().iter().find(|row| row["lane"] == "total").unwrap()
}

#[test]
fn loopback_echo_answers_every_request() {
    for (size, lanes, count) in [("32", "2", 3000), ("8", "3", 2000), ("0", "1", 500)] {
        let echo = Echo::start(&["--lanes", lanes, "--recv-buffer", "4M"]);
        let asked = count.to_string();
        let words = ["send", &echo.addr, "--expect", "echo", "--count", &asked, "--rate", "5k", "--json"];
        let by_lanes: &[&str] = if size == "8" { &["--engine", "mmsg"] } else { &[] };
        let words = [&words[..], &["--size", size, "--flows", "3", "--timeout", "120s"], by_lanes].concat();
        let output = run(&words);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let sent = document(&stdout(&output));
        assert_eq!(sent["schema"], "manylane.send.v1");
        assert_eq!(sent["settings"]["engine"].as_str(), by_lanes.get(1).copied());
        let row = &sent["rows"][0];
        for (name, value) in
            [("asked", count), ("answered", count), ("lost", 0), ("duplicates", 0), ("unexpected", 0)]
        {
            assert_eq!(row[name], value, "{name} of {row}");
        }
        assert_eq!(row["latency_ns"]["count"], count);
        assert!(row["latency_ns"]["p50"].as_u64().unwrap() > 0);
        let served = echo.end("TERM");
        assert_eq!(served["schema"], "manylane.echo.v1");
        for name in ["arrived", "delivered", "offered", "sent"] {
            assert_eq!(total(&served)[name], count, "{name}");
        }
        assert!(served["machine"]["kernel"].as_str().unwrap().contains('.'));
    }
}

#[test]
fn loopback_signals_shut_down_cleanly() {
    for signal in ["INT", "TERM"] {
        let echo = Echo::start(&[]);
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.send_to(b"hello", &echo.addr).unwrap();
        let mut buffer = [0; 16];
        assert_eq!(client.recv(&mut buffer).unwrap(), 5);
        let served = echo.end(signal);
        assert_eq!(total(&served)["delivered"], 1);
    }
}

#[test]
fn loopback_fixed_replies_and_their_absence() {
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    let addr = server.local_addr().unwrap().to_string();
    thread::spawn(move || {
        let mut buffer = [0; 64];
        while let Ok((len, peer)) = server.recv_from(&mut buffer) {
            let reply: &[u8] = if &buffer[..len] == b"ping" { b"pong" } else { b"what?" };
            server.send_to(reply, peer).unwrap();
        }
    });
    let ask = |payload: &str| {
        let words = ["send", &addr, "--payload", payload, "--expect", "text:pong", "--count", "20", "--json"];
        let output = run(&[&words[..], &["--timeout", "120s"]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        document(&stdout(&output))["rows"][0].clone()
    };
    let row = ask("hex:70 69 6e 67");
    assert_eq!((row["answered"].as_u64(), row["wrong"].as_u64()), (Some(20), Some(0)));
    let row = ask("text:pang");
    assert_eq!((row["answered"].as_u64(), row["wrong"].as_u64()), (Some(0), Some(20)));
}

#[test]
fn loopback_send_to_a_closed_port_fails_with_a_result() {
    // A socket that keeps the port. It is connected, so it accepts only datagrams of its peer.
    let keeper = UdpSocket::bind("127.0.0.1:0").unwrap();
    keeper.connect(keeper.local_addr().unwrap()).unwrap();
    let addr = keeper.local_addr().unwrap().to_string();
    let words = ["send", &addr, "--count", "20", "--timeout", "100ms", "--json", "--expect"];
    let output = run(&[&words[..], &["echo"]].concat());
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    for hint in [&addr, "ECONNREFUSED", "start the server"] {
        assert!(stderr(&output).contains(hint), "{hint} is not in {}", stderr(&output));
    }
    let row = &document(&stdout(&output))["rows"][0];
    assert_eq!(row["answered"], 0);
    assert!(row["refused"].as_u64().unwrap() > 0, "{row}");
    // Without replies to expect, the port does not matter.
    assert_eq!(run(&[&words[..], &["none"]].concat()).status.code(), Some(0));
}

#[test]
fn loopback_the_generator_sends_the_exact_count() {
    let echo = Echo::start(&["--lanes", "1", "--recv-buffer", "4M"]);
    for gso in [&[][..], &["--gso"]] {
        let words = ["send", &echo.addr, "--count", "1500", "--rate", "20k", "--json"];
        let output = run(&[&words[..], gso].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        assert_eq!(document(&stdout(&output))["rows"][0]["sent"], 1500);
    }
    // The queue is drained before the end.
    assert_eq!(total(&echo.end("TERM"))["arrived"], 3000);
}

#[test]
fn loopback_busy_poll_and_an_unavailable_engine() {
    let words = ["--lanes", "2", "--wait", "spin:200", "--interface", "nosuch0", "--xdp-vlan", "5"];
    let more = ["--xdp-vlan", "100.5", "--recv-buffer", "4M"];
    let echo = Echo::start(&[&words[..], &more].concat());
    assert!(echo.how.starts_with("2 lanes, engine ") && echo.how.contains(" (not xdp: "), "{}", echo.how);
    assert!(echo.how.contains("there is no device nosuch0"), "{}", echo.how);
    let words =
        ["send", &echo.addr, "--expect", "echo", "--count", "500", "--rate", "2k", "--timeout", "120s"];
    let output = run(&words);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let served = echo.end("TERM");
    assert_eq!((&total(&served)["delivered"], &total(&served)["sent"]), (&500.into(), &500.into()));
    let settings = &served["settings"];
    assert!(settings["engine"] != "xdp" && settings["wait"] == "spin:200", "{settings}");
    assert!(settings["engine_why"].as_str().unwrap().contains("nosuch0"), "{settings}");
    // Without a device, no other engine was requested.
    let echo = Echo::start(&[]);
    assert!(echo.how.contains("engine mmsg, "), "{}", echo.how);
    assert_eq!(echo.end("TERM")["settings"]["engine_why"], Value::Null);
}

#[test]
fn loopback_echo_uses_and_reports_the_wait_policy() {
    for wait in ["sleep", "spin:200", "adaptive"] {
        let echo = Echo::start(&["--lanes", "1", "--wait", wait]);
        assert!(echo.how.ends_with(&format!(", wait {wait}")), "{}", echo.how);
        let words =
            ["send", &echo.addr, "--expect", "echo", "--count", "200", "--rate", "2k", "--timeout", "120s"];
        let output = run(&words);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let served = echo.end("TERM");
        assert_eq!((&total(&served)["delivered"], &served["settings"]["wait"]), (&200.into(), &wait.into()));
        assert!(total(&served)["sleeps"].as_u64().unwrap() > 0);
        let empty_polls = total(&served)["empty_polls"].as_u64().unwrap();
        // Whether spinning pays depends on the machine.
        assert!(
            wait == "adaptive" || (empty_polls > 0) == wait.starts_with("spin"),
            "{wait}: {empty_polls} empty polls"
        );
    }
}

/// The page that a client of the metrics gets.
fn scrape(at: &str) -> String {
    let ask = || {
        let mut stream = TcpStream::connect(at).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).map(|_| answer).map_err(|err| err.kind())
    };
    // The server waits 2 s for a client, which may have no CPU for so long.
    let answer = wait_for("an answer", ask, |answer| answer.as_ref().is_ok_and(|text| !text.is_empty()));
    let answer = answer.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    answer
}

#[test]
fn loopback_metrics_are_the_counters_of_the_lanes() {
    let mut child = manylane(&["echo", "127.0.0.1:0", "--lanes", "2", "--interval", "0", "--metrics", "0"])
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut said = |prefix: &str| {
        let line = lines.by_ref().map(Result::unwrap).find(|line| line.starts_with(prefix)).unwrap();
        line[prefix.len()..].to_owned()
    };
    let (addr, at) = (said("listening on "), said("metrics at http://"));
    let at = at.strip_suffix("/metrics").unwrap();
    let sum = |metric: &str| -> u64 {
        let page = scrape(at);
        let of = |line: &str| {
            line.starts_with(metric).then(|| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap())
        };
        page.lines().filter_map(of).sum()
    };
    assert_eq!((sum("manylane_lanes{"), sum("manylane_lane_delivered_total{")), (2, 0));
    let client = UdpSocket::bind("127.0.0.1:0").unwrap();
    client.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    for _ in 0..100 {
        client.send_to(b"x", &addr).unwrap();
        // A wait with a timeout ends when the process was stopped for a moment.
        while client.recv(&mut [0; 16]).is_err_and(|err| err.kind() == std::io::ErrorKind::Interrupted) {}
    }
    // A reply may be here before its lane has counted it.
    wait_for("100 datagrams sent", || sum("manylane_lane_sent_total{"), |sent| *sent >= 100);
    assert_eq!((sum("manylane_lane_delivered_total{"), sum("manylane_lane_sent_total{")), (100, 100));
    // A port in use is a failure that names the address.
    let output = run(&["echo", "127.0.0.1:0", "--metrics", at]);
    assert!(output.status.code() == Some(1) && stderr(&output).contains(at), "{}", stderr(&output));
    child.kill().unwrap();
    child.wait().unwrap();
}

/// In a container, the default number of lanes follows the quota of its cgroup. The tree of cgroup
/// v2 files as a container sees it is made of plain files, because a machine whose CPU controller
/// is in a cgroup v1 hierarchy has no other.
#[test]
fn netns_default_lanes_follow_a_cgroup_v2_cpu_quota() {
    const TREE: &str = "mount -t tmpfs none /sys/fs/cgroup && mkdir -p /sys/fs/cgroup/box/inner && \
        : > /sys/fs/cgroup/box/inner/cgroup.controllers && echo \"$1\" > /sys/fs/cgroup/box/cpu.max && \
        echo 'max 100000' > /sys/fs/cgroup/box/inner/cpu.max && echo 0::/box/inner > /sys/fs/cgroup/own && \
        mount --bind /sys/fs/cgroup/own /proc/$$/cgroup && exec \"$2\" echo 127.0.0.1:0 --engine mmsg --json";
    let test = "netns_default_lanes_follow_a_cgroup_v2_cpu_quota";
    let cpus = thread::available_parallelism().unwrap().get();
    let forced = skip::Forced::Cpus;
    if !skip::need_root(test)
        || !skip::need_unless_forced(test, cpus > 1, forced, "one CPU has one lane anyway")
    {
        return;
    }
    for (quota, lanes) in
        [("max 100000", cpus), ("50000 100000", 1), ("100000 100000", 1), ("150000 100000", 1)]
    {
        let mut child = Command::new("unshare")
            .args(["-m", "sh", "-c", TREE, "sh", quota, env!("CARGO_BIN_EXE_manylane")])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(child.stderr.take().unwrap()).lines();
        let how = said.find(|line| line.as_ref().unwrap().contains(", engine "));
        assert!(how.is_some(), "{quota}: it did not start");
        // The same process throughout: each program replaces the one before.
        let ended = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
        assert!(ended.success());
        let mut text = String::new();
        child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        assert!(child.wait().unwrap().success(), "{quota}");
        assert_eq!(document(&text)["settings"]["lanes"], lanes, "{quota}");
    }
}
