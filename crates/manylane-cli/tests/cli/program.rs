//! The program from outside: what it prints, where, and with which exit code. Over loopback, but
//! for what needs links that go down.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::UdpSocket;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use manylane_sys::test_support::wait_for;
use manylane_testbed::skip;
use serde_json::Value;

fn manylane(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_manylane"));
    command.args(words).stdin(Stdio::null());
    command
}

fn run(words: &[&str]) -> Output {
    manylane(words).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// The one document on standard output, and nothing else.
fn document(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|err| panic!("{err} in:\n{text}"))
}

fn folder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    folder
}

/// `manylane echo` on a port of its own; killed when the test fails.
struct Echo {
    child: Child,
    addr: String,
    /// How it serves, in a line.
    how: String,
}

impl Echo {
    fn start(words: &[&str]) -> Self {
        let child = manylane(&[&["echo", "127.0.0.1:0", "--json"], words].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // From here on it is killed, whatever it says.
        let mut echo = Self { child, addr: String::new(), how: String::new() };
        let mut lines = BufReader::new(echo.child.stderr.take().unwrap()).lines();
        let first = lines.next().unwrap().unwrap();
        first.strip_prefix("listening on ").unwrap_or_else(|| panic!("{first}")).clone_into(&mut echo.addr);
        echo.how = lines.next().unwrap().unwrap();
        // Somebody has to read on, or the program would wait for the pipe.
        thread::spawn(move || lines.for_each(drop));
        echo
    }

    /// Sends a signal and waits: the final statistics.
    fn end(mut self, signal: &str) -> Value {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", signal, &pid]).status().unwrap().success());
        let deadline = Instant::now() + Duration::from_secs(20);
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() > deadline => panic!("still running after SIG{signal}"),
                None => thread::sleep(Duration::from_millis(5)),
            }
        };
        assert_eq!(status.code(), Some(0), "exit code after SIG{signal}");
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
        let output = run(&[&words[..], &["--size", size, "--flows", "3", "--timeout", "10s"]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let sent = document(&stdout(&output));
        assert_eq!(sent["schema"], "manylane.send.v1");
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
        let output = run(&words);
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
    let echo = Echo::start(&[&words[..], &["--xdp-vlan", "100.5"]].concat());
    assert!(echo.how.starts_with("2 lanes, engine ") && echo.how.contains(" (not xdp: "), "{}", echo.how);
    assert!(echo.how.contains("there is no device nosuch0"), "{}", echo.how);
    let words =
        ["send", &echo.addr, "--expect", "echo", "--count", "500", "--rate", "2k", "--timeout", "10s"];
    let output = run(&words);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let served = echo.end("TERM");
    assert_eq!((&total(&served)["delivered"], &total(&served)["sent"]), (&500.into(), &500.into()));
    let settings = &served["settings"];
    assert!(settings["engine"] != "xdp" && settings["wait"] == "spin:200", "{settings}");
    assert!(settings["engine_why"].as_str().unwrap().contains("nosuch0"), "{settings}");
    // Without a device nothing else was asked for.
    let echo = Echo::start(&[]);
    assert!(echo.how.contains("engine mmsg, "), "{}", echo.how);
    assert_eq!(echo.end("TERM")["settings"]["engine_why"], Value::Null);
}

#[test]
fn usage_errors_suggest_the_right_option() {
    for (words, hint) in [
        (&["ecko"][..], "echo"),
        (&["echo", "127.0.0.1:0", "--lane", "2"], "--lanes"),
        (&["echo", "127.0.0.1:0", "--steering", "sideways"], "round-robin"),
        (&["echo"], "<ADDR>"),
        (&["echo", "127.0.0.1:0", "--xdp-vlan", "4095"], "1 to 4094"),
        (&["echo", "127.0.0.1:0", "--xdp-vlan", "5.x"], "100.5"),
        (&["echo", "127.0.0.1:0", "--wait", "nap"], "spin:MICROSECONDS"),
        (&["echo", "127.0.0.1:0", "--wait", "spin:2000000"], "more than 1s"),
        (&["bench", "rtt", "--contenders", "socket/recvmmsg+spin:5"], "lanes have all policies"),
        (&["bench", "rtt", "--contenders", "lane/mmsg+nap"], "adaptive"),
        (&["bench", "rtt", "--placements", "nowhere"], "rps-server"),
        (&["bench", "rtt", "--arrivals", "never"], "even, chance"),
        (&["bench", "rtt", "--rate", "max"], "250k"),
        (&["bench", "rtt", "--loopback", "--size", "7"], "8 bytes"),
        (&["send", "127.0.0.1:9", "--rate", "quick"], "250k"),
        (&["send", "127.0.0.1:9", "--expect", "pong"], "text:"),
        (&["bench", "rx", "--receivers", "lane/none"], "lane/mmsg"),
        (&["bench", "rx", "--testbed", "--loopback"], "--loopback"),
        (&["bench", "chrun"], "churn"),
        (&["bench", "flap", "--events", "lunch"], "sender-link"),
        (&["bench", "echo", "--links", "0"], "1..=16"),
        (&["bench", "rx", "--links", "2", "--loopback"], "--loopback"),
        (&["bench", "rx", "--queues", "2", "--loopback"], "--loopback"),
        (&["bench", "echo", "--queues", "0"], "1..=64"),
        (&["bench", "rx", "--loopback", "--receiver-cpus", "4095"], "may not run on CPU 4095"),
        (&["capture", "--buffer", "1K", "-w", "never-written"], "64K to 64M"),
        (&["send", "127.0.0.1:9", "--expect", "echo", "--gso"], "leave out --gso"),
        (&["send", "127.0.0.1:9", "--expect", "echo", "--rate", "max"], "give --rate a number"),
    ] {
        if words[0] == "bench" && !cfg!(feature = "bench") {
            continue;
        }
        let output = run(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(hint), "{words:?} does not hint at {hint}: {}", stderr(&output));
        assert!(output.stdout.is_empty(), "{words:?}");
    }
}

/// Also before the report's folder, which is made just before the testbed.
#[cfg(feature = "bench")]
#[test]
fn benchmarks_check_their_options_before_they_make_a_testbed() {
    for (words, hint) in [
        (&["rx", "--testbed", "--batch", "16,64"][..], "bench replies"),
        (&["echo", "--testbed", "--batch", "16,64"], "bench replies"),
        (&["gso", "--batch", "16,64"], "bench replies"),
        (&["churn", "--testbed", "--batch", "16,64"], "bench replies"),
        (&["rtt", "--testbed", "--batch", "16,64"], "bench replies"),
        (&["rtt", "--testbed", "--size", "7"], "8 bytes"),
        (&["flap", "--batch", "16,64"], "bench replies"),
        (&["flood", "--batch", "16,64"], "bench replies"),
        (&["flood", "--size", "64"], "32 bytes"),
        (&["flap", "--receiver-cpus", "4095"], "CPU 4095"),
    ] {
        let out = folder("bench-unchecked");
        let mut command = manylane(&[&["bench"], words, &["--out", out.to_str().unwrap()]].concat());
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(hint), "{words:?} does not hint at {hint}: {}", stderr(&output));
        assert!(output.stdout.is_empty() && !out.exists(), "{words:?}");
    }
}

/// What does not depend on privileges: loopback has no device.
#[cfg(feature = "bench")]
#[test]
fn benchmarks_do_not_start_with_receivers_that_cannot_run() {
    for (words, hint) in [
        (
            &["rx", "--loopback", "--receivers", "lane/mmsg,lane/xdp"][..],
            "lane/xdp takes frames from a device",
        ),
        (&["gso", "--receivers", "xsk/raw"], "xsk/raw takes frames from a device"),
        (&["batch", "--loopback", "--receivers", "lane/xdp"], "lane/xdp takes frames from a device"),
        (&["rtt", "--loopback", "--contenders", "lane/xdp+spin:50"], "takes frames from a device"),
        (&["rtt", "--loopback", "--placements", "rps-server"], "needs a testbed"),
    ] {
        let out = folder("bench-unavailable");
        let output = run(&[&["bench"], words, &["--out", out.to_str().unwrap()]].concat());
        assert_eq!(output.status.code(), Some(1), "{words:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(hint), "{words:?} does not hint at {hint}: {}", stderr(&output));
        assert!(output.stdout.is_empty() && !out.exists(), "{words:?}");
    }
    let file = folder("bench-out-is-a-file");
    fs::write(&file, "").unwrap();
    let output = run(&["bench", "rx", "--loopback", "--out", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("--out names another"), "{}", stderr(&output));
}

#[test]
fn failures_name_their_reason_and_exit_with_1() {
    let taken = UdpSocket::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    let output = run(&["echo", &addr]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).starts_with("manylane: ") && stderr(&output).contains(&addr),
        "{}",
        stderr(&output)
    );
    let output = run(&["send", "no-port"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("HOST:PORT"), "{}", stderr(&output));
}

#[test]
fn a_closed_pipe_is_no_error() {
    let pages = folder("closed-pipe-man");
    let out = pages.to_str().unwrap();
    for words in [
        &["--help"][..],
        &["echo", "--help"],
        &["completions", "bash"],
        &["man", "--out", out],
        &["send", "127.0.0.1:9", "--count", "1", "--json"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = manylane(words)
            .stdout(writer)
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
            .wait_with_output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{words:?}: {}", stderr(&output));
        assert_eq!(stderr(&output), "", "{words:?}");
    }
}

#[cfg(feature = "bench")]
#[test]
fn loopback_bench_rx_writes_one_document_and_a_report() {
    let out = folder("bench-rx");
    let words =
        ["bench", "rx", "--loopback", "--quick", "--json", "--rate", "5k", "--out", out.to_str().unwrap()];
    let more = ["--threads", "1,2", "--rounds", "2", "--duration", "30ms", "--size", "10,100"];
    let output = run(&[&words[..], &more].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let document = document(&stdout(&output));
    assert_eq!(document["schema"], "manylane.bench.rx.v1");
    let rows = document["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 5 * 2 * 2);
    for row in rows {
        assert_eq!(row["samples"].as_array().unwrap().len(), 2);
        assert!(row["delivered_pps"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["rx_cpu_ns"].as_f64().unwrap() > 0.0, "{row}");
    }
    let kept = fs::read_to_string(out.join("bench-rx.json")).unwrap();
    assert_eq!(self::document(&kept), document);
    let page = fs::read_to_string(out.join("bench-rx.html")).unwrap();
    assert!(page.contains("<svg") && page.contains("lane/mmsg"));
}

#[cfg(feature = "bench")]
#[test]
fn loopback_bench_replies_counts_every_reply() {
    let out = folder("bench-echo");
    let words =
        ["bench", "echo", "--loopback", "--quick", "--json", "--rate", "2k", "--out", out.to_str().unwrap()];
    let more = ["--threads", "2", "--rounds", "2", "--duration", "50ms", "--recv-buffer", "4M"];
    let output = run(&[&words[..], &more].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let document = document(&stdout(&output));
    assert_eq!(document["schema"], "manylane.bench.echo.v1");
    let rows = document["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 5);
    for sample in rows.iter().flat_map(|row| row["samples"].as_array().unwrap()) {
        assert!(sample["sent"].as_u64().unwrap() > 0, "{sample}");
        assert_eq!((&sample["delivered"], &sample["taken"]), (&sample["sent"], &sample["sent"]), "{sample}");
    }
    let page = fs::read_to_string(out.join("bench-echo.html")).unwrap();
    assert!(page.contains("per answered request") && !page.contains("per datagram"));
}

#[cfg(feature = "bench")]
#[test]
fn netns_bench_flap_writes_one_document() {
    if !skip::need_root("netns_bench_flap_writes_one_document") {
        return;
    }
    let out = folder("bench-flap");
    let words = ["bench", "flap", "--rate", "2k", "--rounds", "2", "--duration", "50ms", "--out"];
    let more = ["--events", "nothing,sender-link", "--receivers", "lane/mmsg", "--json"];
    let output = run(&[&words[..], &[out.to_str().unwrap()], &more].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let document = document(&stdout(&output));
    assert_eq!(document["schema"], "manylane.bench.flap.v1");
    let rows = document["rows"].as_array().unwrap();
    let events: Vec<&str> = rows.iter().map(|row| row["event"].as_str().unwrap()).collect();
    assert_eq!(events, ["nothing", "sender-link"]);
    assert_eq!(rows[0]["lost_most"], 0, "{}", rows[0]);
    assert!(rows[1]["refused"].as_f64().unwrap() > 0.0, "{}", rows[1]);
    let kept = fs::read_to_string(out.join("bench-flap.json")).unwrap();
    assert_eq!(self::document(&kept), document);
    let page = fs::read_to_string(out.join("bench-flap.html")).unwrap();
    assert!(page.contains("<svg") && page.contains("<td>sender-link"));
}

#[cfg(feature = "bench")]
#[test]
fn loopback_added_and_removed_lanes_lose_no_datagrams() {
    let out = folder("bench-churn");
    let words = ["bench", "churn", "--loopback", "--json", "--rate", "2k", "--out", out.to_str().unwrap()];
    let output = run(&[&words[..], &["--duration", "1s", "--change-interval", "50ms"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let row = &document(&stdout(&output))["rows"][0];
    assert_eq!(row["lost"], 0, "{row}");
    assert!(row["added"].as_u64().unwrap() > 0 && row["sent"].as_u64().unwrap() > 0, "{row}");
    let page = fs::read_to_string(out.join("bench-churn.html")).unwrap();
    assert!(page.contains("<svg") && page.contains("<th>lost"));
}

#[test]
fn manual_and_completions_are_complete() {
    let out = folder("man");
    let output = run(&["man", "--out", out.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    for page in [
        "manylane",
        "manylane-echo",
        "manylane-send",
        "manylane-capture",
        "manylane-bench",
        "manylane-bench-echo",
    ] {
        if page.contains("-bench") && !cfg!(feature = "bench") {
            continue;
        }
        let text = fs::read_to_string(out.join(format!("{page}.1"))).unwrap();
        assert!(text.contains(".TH") && text.contains(".SH NAME"), "{page}");
    }
    assert!(fs::read_to_string(out.join("manylane-echo.1")).unwrap().contains("steering"));
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = run(&["completions", shell]);
        assert_eq!(output.status.code(), Some(0));
        assert!(stdout(&output).contains("manylane") && stdout(&output).contains("steering"), "{shell}");
    }
}

/// What a client of the metrics gets.
fn scrape(at: &str) -> String {
    use std::io::Write;
    let mut stream = std::net::TcpStream::connect(at).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
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
    client.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    for _ in 0..100 {
        client.send_to(b"x", &addr).unwrap();
        // A wait with a timeout ends when the process was stopped for a moment.
        while client.recv(&mut [0; 16]).is_err_and(|err| err.kind() == std::io::ErrorKind::Interrupted) {}
    }
    // A reply may be here before its lane has counted it.
    wait_for("100 datagrams sent", || sum("manylane_lane_sent_total{"), |sent| *sent >= 100);
    assert_eq!((sum("manylane_lane_delivered_total{"), sum("manylane_lane_sent_total{")), (100, 100));
    // A port that is taken is a failure, and says so.
    let output = run(&["echo", "127.0.0.1:0", "--metrics", at]);
    assert!(output.status.code() == Some(1) && stderr(&output).contains(at), "{}", stderr(&output));
    child.kill().unwrap();
    child.wait().unwrap();
}

#[cfg(feature = "bench")]
#[test]
fn loopback_bench_rtt_has_a_row_for_each_contender_and_load() {
    let out = folder("bench-rtt");
    let words =
        ["bench", "rtt", "--loopback", "--quick", "--json", "--rate", "2k", "--out", out.to_str().unwrap()];
    let more = ["--rounds", "2", "--duration", "20ms", "--size", "20", "--recv-buffer", "4M", "--contenders"];
    let contenders =
        ["socket/recvfrom", "socket/recvfrom+spin:1000", "lane/mmsg+spin:50", "lane/mmsg+adaptive"];
    let output = run(&[&words[..], &more, &[&contenders.join(",")]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let document = document(&stdout(&output));
    assert_eq!(document["schema"], "manylane.bench.rtt.v1");
    let rows = document["rows"].as_array().unwrap();
    // A ping-pong, a rate, and nothing.
    assert_eq!(rows.len(), contenders.len() * 3);
    for row in rows {
        assert_eq!(row["samples"].as_array().unwrap().len(), 2);
        let times = ["p50_ns", "p90_ns", "p99_ns", "p999_ns"].map(|name| row[name].as_f64().unwrap());
        let is_idle = row["mode"] == "idle";
        assert!(times.is_sorted() && (times[0] > 0.0) != is_idle, "{row}");
        if row["mode"] == "open" {
            assert_eq!((&row["rate"], &row["arrivals"]), (&2000.0.into(), &"even".into()));
            assert!(row["samples"][0]["sent"] == 40 && row["samples"][0]["delivered"] == 40, "{row}");
        }
    }
    let kept = fs::read_to_string(out.join("bench-rtt.json")).unwrap();
    assert_eq!(self::document(&kept), document);
    let page = fs::read_to_string(out.join("bench-rtt.html")).unwrap();
    assert!(page.contains("<svg") && page.contains("lane/mmsg+adaptive"));
}

#[test]
fn loopback_echo_uses_and_reports_the_wait_policy() {
    for wait in ["sleep", "spin:200", "adaptive"] {
        let echo = Echo::start(&["--lanes", "1", "--wait", wait]);
        assert!(echo.how.ends_with(&format!(", wait {wait}")), "{}", echo.how);
        let words =
            ["send", &echo.addr, "--expect", "echo", "--count", "200", "--rate", "2k", "--timeout", "10s"];
        let output = run(&words);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let served = echo.end("TERM");
        assert_eq!((&total(&served)["delivered"], &served["settings"]["wait"]), (&200.into(), &wait.into()));
        assert!(total(&served)["sleeps"].as_u64().unwrap() > 0);
        let empty_polls = total(&served)["empty_polls"].as_u64().unwrap();
        // What pays, the machine decides.
        assert!(
            wait == "adaptive" || (empty_polls > 0) == wait.starts_with("spin"),
            "{wait}: {empty_polls} empty polls"
        );
    }
}

/// In a container, lanes are as many as the quota of its cgroup lets run. A tree of cgroups of
/// version 2 as a container sees it, made of files: machines whose CPU controller is in the
/// hierarchies of version 1 have no other.
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
        // One process all the time: each replaces the one before.
        let ended = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
        assert!(ended.success());
        let mut text = String::new();
        child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        assert!(child.wait().unwrap().success(), "{quota}");
        assert_eq!(document(&text)["settings"]["lanes"], lanes, "{quota}");
    }
}
