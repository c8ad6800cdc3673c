//! A short run of the measured load (`scripts/bench-run.py`): each of its servers, alone and under
//! `manylane run`, at a rate at which every receive buffer can hold all requests. Each request is
//! answered once and correctly, and the document is complete.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use manylane_test_support::wait_for;
use serde_json::Value;

use crate::sandbox::Sandbox;
use crate::{find, has};

/// Servers of the script, their programs, and the packages that have them.
const SERVERS: [(&str, &str, &str); 15] = [
    ("memcached", "memcached", "memcached"),
    ("rsyslog", "rsyslogd", "rsyslog"),
    ("kamailio", "kamailio", "kamailio"),
    ("nsd", "nsd", "nsd"),
    ("nsd-shared", "nsd", "nsd"),
    ("knot", "knotd", "knot"),
    ("unbound", "unbound", "unbound"),
    ("unbound-shared", "unbound", "unbound"),
    ("python-threading", "python3", "python3"),
    ("python-asyncio", "python3", "python3"),
    ("node", "node", "nodejs"),
    ("c-block", "cc", "gcc"),
    ("c-poll", "cc", "gcc"),
    ("c-select", "cc", "gcc"),
    ("c-epoll", "cc", "gcc"),
];
const RATE: u64 = 300;
const METRICS: [&str; 15] = [
    "offered_pps",
    "delivered_pps",
    "loss",
    "rx_cpu_ns",
    "total_cpu_ns",
    "waits",
    "preemptions",
    "p50_ns",
    "p99_ns",
    "rx_cpu_ns_min",
    "rx_cpu_ns_max",
    "of_alone",
    "lanes",
    "rate",
    "threads",
];

fn scripts() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts"))
}

fn python(sandbox: &Sandbox, words: &[&str]) -> Command {
    let mut python = sandbox.command(find("python3").unwrap());
    python.args(words);
    python
}

/// The document of one round of two samples, each a tenth of a second long.
fn measure(sandbox: &Sandbox, servers: &[&str], options: &[&str]) -> Value {
    let (script, rate) = (scripts().join("bench-run.py"), RATE.to_string());
    let mut bench =
        python(sandbox, &[script.to_str().unwrap(), "--manylane", env!("CARGO_BIN_EXE_manylane")]);
    bench.args(["--rounds", "1", "--samples", "2", "--seconds", "0.1", "--warm-up", "0.1", "--flows", "16"]);
    // Long enough even if other processes keep the CPUs busy.
    bench.args(["--rate", &rate, "--timeout", "60s"]);
    bench.args(servers.iter().flat_map(|server| ["--server", server])).args(options);
    let Output { status, stdout, stderr } = bench.output().unwrap();
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    serde_json::from_slice(&stdout).unwrap()
}

/// Measures the servers that are installed.
fn check_all_answered(test: &str, are_meant: fn(&str) -> bool) {
    if !has(test, "python3", "python3") {
        return;
    }
    let is_there =
        |&&(name, program, package): &&(&str, &str, &str)| are_meant(name) && has(test, program, package);
    let servers: Vec<&str> = SERVERS.iter().filter(is_there).map(|(name, ..)| *name).collect();
    if servers.is_empty() {
        return;
    }
    let document = measure(&Sandbox::new(test), &servers, &[]);
    assert_eq!(document["schema"], "manylane.bench.run.v1");
    assert!(document["machine"].is_object() && document["settings"].is_object(), "{document}");
    let rows = document["rows"].as_array().unwrap();
    let names: Vec<_> = rows.iter().map(|row| row["receiver"].as_str().unwrap()).collect();
    let expected =
        servers.iter().flat_map(|name| [format!("{name} alone"), format!("{name} run --engine mmsg")]);
    assert_eq!(names, expected.collect::<Vec<_>>());
    for row in rows {
        check_row(row);
    }
}

fn check_row(row: &Value) {
    for figure in METRICS {
        assert!(row.get(figure).is_some(), "{figure} is missing: {row}");
    }
    let asked = RATE / 10 * 2;
    let counts = ["sent", "delivered", "wrong", "twice"].map(|name| row[name].as_u64().unwrap());
    assert_eq!(counts, [asked, asked, 0, 0], "{row}");
    assert_eq!(row["loss"], 0.0, "{row}");
    assert!(row["rx_cpu_ns"].as_f64() > Some(0.0), "{row}");
    // Servers that send no replies have no latency.
    assert_eq!(row["p99_ns"].is_u64() || row["p99_ns"].is_f64(), row["server"] != "rsyslog", "{row}");
    let samples = row["samples"].as_array().unwrap();
    assert_eq!(samples.len(), 2, "{row}");
    assert!(samples.iter().all(|sample| sample["sent"] == asked / 2), "{row}");
}

#[test]
fn loopback_bench_of_servers_with_threads_or_children() {
    let are_meant = |name: &str| ["memcached", "rsyslog", "kamailio"].contains(&name);
    check_all_answered("loopback_bench_of_servers_with_threads_or_children", are_meant);
}

/// Takes 5 s: five servers, each started alone and under `manylane run`.
#[test]
fn loopback_bench_of_name_servers() {
    let are_meant = |name: &str| ["nsd", "knot", "unbound"].iter().any(|server| name.starts_with(server));
    check_all_answered("loopback_bench_of_name_servers", are_meant);
}

#[test]
fn loopback_bench_of_scripts() {
    let are_meant = |name: &str| name.starts_with("python") || name == "node";
    check_all_answered("loopback_bench_of_scripts", are_meant);
}

#[test]
fn loopback_bench_of_servers_in_c() {
    check_all_answered("loopback_bench_of_servers_in_c", |name| name.starts_with("c-"));
}

/// The earlier build is a script that takes only `run --json FILE`.
#[test]
fn loopback_bench_of_a_build_with_the_earlier_option() {
    const TEST: &str = "loopback_bench_of_a_build_with_the_earlier_option";
    if !has(TEST, "python3", "python3") {
        return;
    }
    let sandbox = Sandbox::new(TEST);
    let before = sandbox.folder().join("before");
    let program = env!("CARGO_BIN_EXE_manylane");
    let script = format!(
        r#"#!/bin/sh
[ "$*" = "run --help" ] && exec echo "      --json <FILE>"
[ "$1 $2 $3" = "run --quiet --json" ] || exit 2
report=$4
shift 4
exec {program} run --quiet --json-file "$report" "$@"
"#
    );
    fs::write(&before, script).unwrap();
    fs::set_permissions(&before, fs::Permissions::from_mode(0o755)).unwrap();
    let options = ["--before", before.to_str().unwrap()];
    let document = measure(&sandbox, &["python-asyncio"], &options);
    let rows = document["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    for row in rows {
        check_row(row);
    }
}

/// Neither the server nor its files outlive the script, however the script ends.
#[test]
fn loopback_bench_that_is_killed_leaves_nothing_behind() {
    const TEST: &str = "loopback_bench_that_is_killed_leaves_nothing_behind";
    if !has(TEST, "python3", "python3") || !has(TEST, "cc", "gcc") {
        return;
    }
    let sandbox = Sandbox::new(TEST);
    let script = scripts().join("bench-run.py");
    for signal in ["TERM", "KILL"] {
        let folder = tempfile::TempDir::new().unwrap();
        let name = folder.path().to_str().unwrap();
        let mut bench =
            python(&sandbox, &[script.to_str().unwrap(), "--manylane", env!("CARGO_BIN_EXE_manylane")]);
        bench.args(["--server", "c-block=100", "--rounds", "1", "--seconds", "600"]).env("TMPDIR", name);
        let mut child = bench.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // The path of the server's program contains the folder. Once alone, and once under
        // `manylane run`.
        wait_for("both servers", || processes_with(&[name, "block"]), |count| *count >= 2);
        let pid = child.id().to_string();
        assert!(Command::new("kill").args(["-s", signal, &pid]).status().unwrap().success());
        child.wait().unwrap();
        wait_for(
            &format!("the end of all processes after SIG{signal}"),
            || processes_with(&[name]),
            |count| *count == 0,
        );
        let first_file = || fs::read_dir(folder.path()).unwrap().next();
        wait_for(&format!("an empty folder after SIG{signal}"), first_file, Option::is_none);
    }
}

/// Number of processes with all of `words` in their command lines.
fn processes_with(words: &[&str]) -> usize {
    let command_line = |entry: fs::DirEntry| fs::read(entry.path().join("cmdline")).unwrap_or_default();
    let all = fs::read_dir("/proc").unwrap().map(|entry| command_line(entry.unwrap()));
    let has_all = |line: &Vec<u8>| words.iter().all(|word| String::from_utf8_lossy(line).contains(word));
    all.filter(has_all).count()
}

#[test]
fn loopback_bench_knows_all_servers_and_their_packages() {
    const TEST: &str = "loopback_bench_knows_all_servers_and_their_packages";
    if !has(TEST, "python3", "python3") {
        return;
    }
    let sandbox = Sandbox::new(TEST);
    let list =
        "import servers; print(' '.join(servers.SERVERS)); servers.find('no-such-server', 'its-package')";
    let mut python = python(&sandbox, &["-B", "-c", list]);
    let Output { status, stdout, stderr } = python.current_dir(scripts()).output().unwrap();
    let names = SERVERS.map(|(name, ..)| name).join(" ");
    assert_eq!(String::from_utf8(stdout).unwrap().trim(), names);
    assert!(!status.success());
    let said = String::from_utf8(stderr).unwrap();
    assert_eq!(said.trim(), "bench-run: no-such-server is missing: apt-get install its-package");
}
