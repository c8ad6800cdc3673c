//! Invalid options and failures, with their hints and exit codes; man pages and completions.

use std::fs;
use std::net::UdpSocket;
use std::process::Stdio;

use crate::program::{folder, manylane, run, stderr, stdout};

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
        (&["echo", "127.0.0.1:0", "--wait", "spin:2000000"], "at most 1s"),
        (&["echo", "127.0.0.1:0", "--rx-usecs", "20001"], "20000"),
        (&["bench", "rx", "--loopback", "--rx-usecs", "20001"], "20000"),
        (&["bench", "rtt", "--contenders", "socket/recvmmsg+spin:5"], "lanes have all policies"),
        (&["bench", "rtt", "--contenders", "lane/mmsg+nap"], "adaptive"),
        (&["bench", "rtt", "--cpu-layouts", "nowhere"], "rps-server"),
        (&["bench", "rtt", "--arrivals", "never"], "even, poisson"),
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
        (&["send", "127.0.0.1:9", "--expect", "echo", "--gso"], "exclude each other"),
        (&["send", "127.0.0.1:9", "--expect", "none", "--engine", "mmsg"], "exclude each other"),
        (&["send", "127.0.0.1:9", "--rate", "0"], "above 0, such as 1000, 250k or 1.5M, or max"),
        (&["bench", "rx", "--loopback", "--rate", "max"], "above 0, such as 1000, 250k or 1.5M\n"),
        (&["send", "127.0.0.1:9", "--expect", "echo", "--rate", "max"], "needs a number for --rate"),
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
