//! `manylane doctor` and `manylane tune` from outside, in network namespaces with faults.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;

use manylane_sys::process::{BlockedOn, parse_blocked_on};
use manylane_sys::{cpu, device, sock};
use manylane_test_support::{set_queues, wait_for};
use manylane_testbed::skip::{self, Forced};
use manylane_testbed::{Host, Layout, Testbed};
use serde_json::Value;

use crate::program::stdout;

const PROGRAM: &str = env!("CARGO_BIN_EXE_manylane");

/// Runs the program inside `host`, with a `/sys` that shows the devices there.
fn run(host: &Host, words: &[&str]) -> Output {
    let mut command = host.command("unshare").unwrap();
    command.args(["--mount", "sh", "-c", "mount -t sysfs sysfs /sys && exec \"$0\" \"$@\"", PROGRAM]);
    command.args(words).stdin(Stdio::null()).env_remove("SSH_CONNECTION").output().unwrap()
}

/// The one document on standard output, and the exit code.
fn json(host: &Host, words: &[&str]) -> (Value, i32) {
    let output = run(host, &[words, &["--json"]].concat());
    let text = stdout(&output);
    let document = serde_json::from_str(&text)
        .unwrap_or_else(|err| panic!("{err} in:\n{text}{}", String::from_utf8_lossy(&output.stderr)));
    (document, output.status.code().unwrap())
}

/// The findings of this id.
fn rows<'a>(document: &'a Value, id: &str) -> Vec<&'a Value> {
    document["rows"].as_array().unwrap().iter().filter(|row| row["id"] == id).collect()
}

fn one_host(queues: u32) -> Testbed {
    Testbed::new(&Layout { queues, ..Layout::default() }).unwrap()
}

/// The file for the state of tune, in a folder of its own.
fn state(test: &str) -> String {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("tune-{test}"));
    let _ = fs::remove_dir_all(&folder);
    folder.join("tune.json").to_str().unwrap().to_owned()
}

/// True if several receive queues can be in use.
fn has_two_cpus(test: &str) -> bool {
    let cpus = manylane_measure::machine::online_cpus().len();
    skip::need_unless_forced(test, cpus > 1, Forced::Cpus, "advice on spreading work needs two")
}

#[test]
fn netns_doctor_names_the_dropping_socket_and_its_count() {
    if !skip::need_root("netns_doctor_names_the_dropping_socket_and_its_count") {
        return;
    }
    let testbed = one_host(4);
    let host = testbed.host(0);
    let (document, code) = json(host, &["doctor"]);
    assert_eq!((rows(&document, "socket-drops").len(), rows(&document, "receive-buffer-full").len()), (0, 0));
    assert_eq!(document["schema"], "manylane.doctor.v1");
    // The softnet drops of this machine are not those of this namespace.
    let bad = document["rows"].as_array().unwrap().iter().any(|row| row["severity"] != "note");
    assert_eq!(code, i32::from(bad));

    const SENT_DATAGRAMS: u64 = 500;
    let socket = host.run(|| UdpSocket::bind((host.ip4(0), 0)).unwrap());
    sock::set_buffer(socket.as_fd(), sock::Buffer::Receive, 2304).unwrap();
    let addr = socket.local_addr().unwrap();
    host.run(|| {
        let sender = UdpSocket::bind("0.0.0.0:0").unwrap();
        for _ in 0..SENT_DATAGRAMS {
            sender.send_to(b"0123456789", addr).unwrap();
        }
    });
    // Each datagram is either received or lost in the end.
    socket.set_nonblocking(true).unwrap();
    let mut received = 0;
    let drain = || {
        while socket.recv(&mut [0; 16]).is_ok() {
            received += 1;
        }
        (received, u64::from(sock::queue_state(socket.as_fd()).unwrap().drops))
    };
    let (_, lost) = wait_for("all datagrams (received, lost)", drain, |(received, lost)| {
        received + lost == SENT_DATAGRAMS
    });
    assert!(lost > 0);

    let port = addr.port().to_string();
    for words in [&["doctor"][..], &["doctor", "--port", &port]] {
        // A child that another test is starting has copies of all descriptors until its exec.
        let is_copied = |document: &Value| {
            let row = rows(document, "socket-drops").first().map(|row| row["seen"].to_string());
            row.is_some_and(|seen| seen.contains(" processes, including "))
        };
        let (document, code) =
            wait_for("the end of copies", || json(host, words), |(document, _)| !is_copied(document));
        let [row] = rows(&document, "socket-drops")[..] else { panic!("{document}") };
        assert_eq!((row["lost"].as_u64(), row["severity"].as_str(), code), (Some(lost), Some("loss"), 1));
        assert_eq!(row["subject"], addr.to_string());
        let seen = row["seen"].as_str().unwrap();
        assert!(seen.contains(&format!("process {} (", std::process::id())), "{seen}");
        // All losses belong to this socket, so that none is left for the host.
        assert!(rows(&document, "receive-buffer-full").is_empty());
        assert_eq!(document["facts"]["losses"]["udp4"]["receive_buffer"].as_u64(), Some(lost));
    }
    let output = run(host, &["doctor"]);
    let text = stdout(&output);
    // A line may end at any byte of it.
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(output.status.code() == Some(1) && words.contains(&format!("lost {lost} datagrams")), "{text}");
    // No more losses: those before are over.
    let (document, _) = json(host, &["doctor", "--duration", "10ms"]);
    assert!(rows(&document, "socket-drops").is_empty());
    // The count of a closed socket stays.
    drop(socket);
    let is_closed = |document: &Value| !rows(document, "receive-buffer-full").is_empty();
    let (document, code) =
        wait_for("the end of copies", || json(host, &["doctor"]), |(document, _)| is_closed(document));
    let [row] = rows(&document, "receive-buffer-full")[..] else { panic!("{document}") };
    assert_eq!((row["lost"].as_u64(), code), (Some(lost), 1));
}

#[test]
fn netns_doctor_counts_threads_that_share_a_socket() {
    if !skip::need_root("netns_doctor_counts_threads_that_share_a_socket") {
        return;
    }
    let testbed = one_host(1);
    let host = testbed.host(0);
    let socket = host.run(|| UdpSocket::bind((host.ip4(0), 0)).unwrap());
    let addr = socket.local_addr().unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
    let port = addr.port().to_string();
    let shared = || {
        let (document, code) = json(host, &["doctor", "--port", &port]);
        (rows(&document, "socket-shared").first().map(|row| row["seen"].as_str().unwrap().to_owned()), code)
    };
    assert_eq!(shared().0, None);
    thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        for _ in 0..3 {
            let (socket, tell) = (&socket, tell.clone());
            scope.spawn(move || {
                tell.send(cpu::thread_id()).unwrap();
                socket.recv(&mut [0; 16]).unwrap();
            });
        }
        for _ in 0..3 {
            wait_until_blocked(told.recv().unwrap(), BlockedOn::Receive(fd));
        }
        let (seen, code) = shared();
        let seen = seen.unwrap();
        assert!(seen.contains("3 threads of 1 process wait") && code == 1, "{seen}");
        // With a process id, too, and with the command that would give it lanes.
        let (document, _) = json(host, &["doctor", "--pid", &std::process::id().to_string()]);
        let found = rows(&document, "socket-shared");
        let row = found.iter().find(|row| row["subject"] == addr.to_string()).unwrap();
        assert!(row["run"][0].as_str().unwrap().contains("manylane run --"), "{row}");
        host.run(|| {
            let sender = UdpSocket::bind("0.0.0.0:0").unwrap();
            for _ in 0..3 {
                sender.send_to(b"x", addr).unwrap();
            }
        });
    });
    assert_eq!(shared().0, None);
}

/// Waits until this process's thread `thread` is blocked on `what`.
#[track_caller]
fn wait_until_blocked(thread: i32, on: BlockedOn) {
    let path = format!("/proc/self/task/{thread}/syscall");
    let read = || parse_blocked_on(&fs::read_to_string(&path).unwrap());
    wait_for("a thread to block", read, |found| *found == Some(on));
}

#[test]
fn netns_doctor_sees_the_queues_of_a_device() {
    let name = "netns_doctor_sees_the_queues_of_a_device";
    if !skip::need_root(name) || !skip::need_kernel(name, (5, 13), "veth devices that tell their queues") {
        return;
    }
    let testbed = one_host(4);
    let host = testbed.host(0);
    let (document, _) = json(host, &["doctor"]);
    let devices = document["facts"]["devices"].as_array().unwrap();
    let link = devices.iter().find(|device| device["name"] == "link0").unwrap();
    assert_eq!((&link["kind"], &link["driver"]), (&"veth".into(), &"veth".into()));
    assert_eq!((link["rx_queues"].as_u64(), link["channels"]["rx_max"].as_u64()), (Some(4), Some(4)));
    assert_eq!(
        (&link["gro"], &link["up"], &link["xdp_attached"]),
        (&true.into(), &true.into(), &Value::Null)
    );
    assert_eq!(link["rps"].as_array().unwrap().len(), 4);
    assert!(rows(&document, "queues-unused").is_empty() && rows(&document, "gro-off").is_empty());

    host.set_gro(0, false).unwrap();
    let (document, _) = json(host, &["doctor"]);
    let [row] = rows(&document, "gro-off")[..] else { panic!("{document}") };
    assert_eq!((row["subject"].as_str(), row["severity"].as_str()), (Some("link0"), Some("note")));
    if !has_two_cpus("netns_doctor_sees_the_queues_of_a_device") {
        return;
    }
    host.run(|| set_queues("link0", 1, 1)).unwrap();
    let (document, _) = json(host, &["doctor"]);
    let [row] = rows(&document, "queues-unused")[..] else { panic!("{document}") };
    assert!(row["seen"].as_str().unwrap().contains("1 of 4 receive queues"), "{row}");
}

#[test]
fn netns_doctor_reports_unknown_facts_without_sysfs() {
    if !skip::need_root("netns_doctor_reports_unknown_facts_without_sysfs") {
        return;
    }
    let testbed = one_host(1);
    // With the /sys of this machine.
    let output = testbed.host(0).command(PROGRAM).unwrap().args(["doctor", "--json"]).output().unwrap();
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(document["facts"]["gaps"]["sysfs"].as_str().unwrap().contains("another network namespace"));
    let link =
        document["facts"]["devices"].as_array().unwrap().iter().find(|d| d["name"] == "link0").unwrap();
    assert!(link["rps"].is_null() && link["rx_queues"] == 1);
}

#[test]
fn loopback_doctor_has_exit_codes() {
    let code = |words: &[&str]| {
        let output = Command::new(PROGRAM).args(words).stdin(Stdio::null()).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(code(&["doctor", "--pid", "x"]).0, 2);
    assert_eq!(code(&["doctor", "--duration", "-1"]).0, 2);
    // More than the kernel's limit, and a process that has ended.
    let mut ended = Command::new("true").spawn().unwrap();
    ended.wait().unwrap();
    for pid in ["4194304".to_owned(), u32::MAX.to_string(), ended.id().to_string()] {
        for words in
            [&["doctor", "--pid", &pid][..], &["limit", &pid], &["top", "--once", &pid], &["capture", &pid]]
        {
            let (failed, said) = code(words);
            assert!(
                failed == 1 && said == format!("manylane: there is no process {pid}\n"),
                "{words:?}: {said}"
            );
        }
    }
    let (failed, said) = code(&["tune", "no-such-finding"]);
    assert!(failed == 2 && said.contains("rmem-max-small"), "{said}");
    assert_eq!(code(&["tune", "--all", "gro-off"]).0, 2);
    let (failed, said) = code(&["tune", "--undo", "--state", "/proc/nowhere/tune.json"]);
    assert!(failed == 1 && said.contains("--state"), "{said}");
    let output = Command::new(PROGRAM).args(["doctor", "--list"]).output().unwrap();
    assert!(output.status.success() && stdout(&output).contains("\nsocket-shared (78)\n"));
}

fn gro(host: &Host) -> bool {
    let (document, _) = json(host, &["doctor"]);
    let devices = document["facts"]["devices"].as_array().unwrap();
    devices.iter().find(|device| device["name"] == "link0").unwrap()["gro"].as_bool().unwrap()
}

#[test]
fn netns_tune_applies_and_reverts() {
    if !skip::need_root("netns_tune_applies_and_reverts") {
        return;
    }
    let testbed = one_host(4);
    let host = testbed.host(0);
    host.set_gro(0, false).unwrap();
    let state = state("applies");
    let tune = |words: &[&str]| {
        let output = run(host, &[&["tune", "--state", &state], words].concat());
        (stdout(&output), output.status.code().unwrap())
    };
    // Only shown, not applied.
    for words in [&["--dry-run", "gro-off"][..], &["--dry-run", "--all"], &[]] {
        let (said, code) = tune(words);
        assert!(said.contains("gro-off:link0: rx-gro of link0: off -> on") && code == 0, "{said}");
        assert!(!gro(host) && !fs::exists(&state).unwrap());
    }
    let (said, code) = tune(&["gro-off:link0"]);
    assert!(said.contains("off -> on") && said.contains("--undo") && code == 0, "{said}");
    assert!(gro(host));
    // A second time there is nothing to change.
    let (said, code) = tune(&["gro-off"]);
    assert!(said.contains("nothing to do") && code == 0 && gro(host), "{said}");
    let (said, _) = tune(&[]);
    assert!(said.contains("changed earlier: gro-off:link0: rx-gro of link0: off -> on"), "{said}");
    // From another host, the device is left alone.
    let (document, code) = json(testbed.host(1), &["tune", "--undo", "--state", &state]);
    assert_eq!((&document["rows"][0]["outcome"], code), (&"elsewhere".into(), 1));
    assert!(gro(host));
    let (said, code) = tune(&["--undo", "--dry-run"]);
    assert!(said.contains("on -> off") && code == 0 && gro(host), "{said}");
    let (document, code) = json(host, &["tune", "--undo", "--state", &state]);
    assert_eq!((&document["rows"][0]["outcome"], code), (&"done".into(), 0));
    assert!(!gro(host));
    let (said, code) = tune(&["--undo"]);
    assert!(said.contains("nothing to revert") && code == 0 && !gro(host), "{said}");
}

#[test]
fn netns_tune_reverts_after_a_crash() {
    if !skip::need_root("netns_tune_reverts_after_a_crash") {
        return;
    }
    let testbed = one_host(4);
    let host = testbed.host(0);
    let state = state("crash");
    for changed in [true, false] {
        host.set_gro(0, false).unwrap();
        let output = run(host, &["tune", "--state", &state, "gro-off"]);
        assert_eq!(output.status.code(), Some(0));
        // The journal on disk, before it is known whether the change was made.
        let text = fs::read_to_string(&state).unwrap();
        let mut journal: Value = serde_json::from_str(&text).unwrap();
        journal["entries"][0]["intent"] = journal["entries"][0]["after"].take();
        fs::write(&state, journal.to_string()).unwrap();
        host.set_gro(0, changed).unwrap();
        let (document, code) = json(host, &["tune", "--undo", "--state", &state]);
        let expected = if changed { "done" } else { "already" };
        assert_eq!((&document["rows"][0]["outcome"], code), (&expected.into(), 0));
        assert!(!gro(host));
        assert_eq!(json(host, &["tune", "--undo", "--state", &state]).0["rows"], Value::Array(Vec::new()));
    }
}

#[test]
fn netns_tune_keeps_settings_that_others_changed() {
    const TEST: &str = "netns_tune_keeps_settings_that_others_changed";
    if !skip::need_root(TEST) || !has_two_cpus(TEST) {
        return;
    }
    let testbed = one_host(1);
    let host = testbed.host(0);
    let state = state("foreign");
    let rps = || {
        let (document, _) = json(host, &["doctor"]);
        let devices = document["facts"]["devices"].as_array().unwrap();
        devices.iter().find(|device| device["name"] == "link0").unwrap()["rps"][0].clone()
    };
    let write = |mask: &str| {
        let mut command = host.command("unshare").unwrap();
        let script =
            format!("mount -t sysfs sysfs /sys && echo {mask} > /sys/class/net/link0/queues/rx-0/rps_cpus");
        assert!(command.args(["--mount", "sh", "-c", &script]).status().unwrap().success());
    };
    let tune = |words: &[&str]| json(host, &[&["tune", "--state", &state], words].concat());
    let (document, code) = tune(&["one-queue:link0"]);
    assert_eq!((&document["rows"][0]["outcome"], code), (&"done".into(), 0));
    assert!(rps().as_array().unwrap().len() >= 2);
    write("2");
    let (document, code) = tune(&["--undo"]);
    assert_eq!((&document["rows"][0]["outcome"], code), (&"foreign".into(), 1));
    assert!(document["rows"][0]["why"].as_str().unwrap().contains("left alone"));
    assert_eq!(rps(), serde_json::json!([1]));
    assert_eq!(tune(&["--undo"]).1, 0);
    // If no one else changed the setting, undo restores it.
    write("0");
    assert_eq!(tune(&["one-queue:link0"]).1, 0);
    assert_eq!(tune(&["--undo"]).1, 0);
    assert_eq!(rps(), serde_json::json!([]));
}

fn can_change_queues(test: &str) -> bool {
    skip::need_kernel(test, (5, 15), "veth devices that use fewer queues than they have")
}

#[test]
fn netns_tune_keeps_remote_sessions() {
    const TEST: &str = "netns_tune_keeps_remote_sessions";
    if !skip::need_root(TEST) || !can_change_queues(TEST) || !has_two_cpus(TEST) {
        return;
    }
    let testbed = one_host(4);
    let host = testbed.host(0);
    let state = state("guard");
    let queues = || host.run(|| device::queues("link0")).unwrap().receive;
    let tune = |words: &[&str]| json(host, &[&["tune", "--state", &state], words].concat());
    host.run(|| set_queues("link0", 1, 1)).unwrap();
    host.ip_batch(&format!("route add default via {}\n", testbed.host(1).ip4(0))).unwrap();
    for words in [&["queues-unused"][..], &["queues-unused", "--dry-run"], &["--all", "--dry-run"]] {
        let (document, code) = tune(words);
        let rows = document["rows"].as_array().unwrap();
        let row = rows.iter().find(|row| row["finding"] == "queues-unused:link0").unwrap();
        assert_eq!((&row["outcome"], code, queues()), (&"refused".into(), 1, 1));
        assert!(row["why"].as_str().unwrap().contains("default route"), "{row}");
    }
    let (document, code) = tune(&["queues-unused", "--allow-link-reset"]);
    assert_eq!((&document["rows"][0]["outcome"], code), (&"done".into(), 0));
    let max = manylane_measure::machine::online_cpus().len().min(4) as u32;
    assert_eq!(queues(), max);
    // Undoing is a change like any other.
    let (document, code) = tune(&["--undo", "queues-unused"]);
    assert_eq!((&document["rows"][0]["outcome"], code, queues()), (&"refused".into(), 1, max));
    host.ip_batch("route del default\n").unwrap();
    assert_eq!((tune(&["--undo", "queues-unused"]).1, queues()), (0, 1));
}

#[test]
fn netns_tune_names_the_session_at_risk() {
    const TEST: &str = "netns_tune_names_the_session_at_risk";
    if !skip::need_root(TEST) || !can_change_queues(TEST) || !has_two_cpus(TEST) {
        return;
    }
    let testbed = one_host(4);
    let host = testbed.host(0);
    host.run(|| set_queues("link0", 1, 1)).unwrap();
    // A session with the ssh port of this host.
    let listener = host.run(|| std::net::TcpListener::bind((host.ip4(0), 22)).unwrap());
    let addr: SocketAddr = listener.local_addr().unwrap();
    let client = testbed.host(1).run(|| std::net::TcpStream::connect(addr).unwrap());
    let (_server, peer) = listener.accept().unwrap();
    let (document, code) = json(host, &["tune", "queues-unused", "--state", &state("ssh")]);
    let why = document["rows"][0]["why"].as_str().unwrap();
    assert!(code == 1 && why.contains("ssh session") && why.contains(&peer.ip().to_string()), "{why}");
    assert_eq!(host.run(|| device::queues("link0")).unwrap().receive, 1);
    drop(client);
}

#[test]
fn netns_tune_reports_settings_without_permission() {
    if !skip::need_root("netns_tune_reports_settings_without_permission") {
        return;
    }
    let testbed = one_host(1);
    let host = testbed.host(0);
    // A socket with the default buffer, which was too small: that is a setting of the machine, not
    // of a namespace.
    let socket = host.run(|| UdpSocket::bind((host.ip4(0), 0)).unwrap());
    let addr = socket.local_addr().unwrap();
    host.run(|| {
        let sender = UdpSocket::bind("0.0.0.0:0").unwrap();
        let send = || {
            (0..16).for_each(|_| _ = sender.send_to(&[0; 1000], addr).unwrap());
            sock::queue_state(socket.as_fd()).unwrap()
        };
        wait_for("a dropped datagram", send, |queue| queue.drops > 0);
    });
    let (document, _) = json(host, &["doctor"]);
    let [row] = rows(&document, "socket-drops")[..] else { panic!("{document}") };
    let changes = row["changes"].as_array().unwrap();
    let is_visible = document["facts"]["sysctls"]["net.core.rmem_default"].is_u64();
    if !skip::need_unless_forced(
        "netns_tune_reports_settings_without_permission",
        is_visible && !changes.is_empty(),
        Forced::Kernel,
        "net.core.rmem_default is not visible in a namespace, or large already",
    ) {
        return;
    }
    let state = state("refused");
    let (document, code) = json(host, &["tune", "socket-drops", "--state", &state]);
    assert_eq!((&document["rows"][0]["outcome"], code), (&"failed".into(), 1));
    assert!(document["rows"][0]["why"].as_str().unwrap().contains("net.core.rmem_default"));
    assert_eq!(json(host, &["tune", "--undo", "--state", &state]).0["rows"], Value::Array(Vec::new()));
}

#[test]
fn loopback_doctor_reports_programs_that_cannot_be_preloaded() {
    const SOURCE: &str = "#include <arpa/inet.h>\n#include <stdio.h>\n#include <unistd.h>\n\
        int main(void) {\n\
        struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr = { htonl(INADDR_LOOPBACK) } };\n\
        int fd = socket(AF_INET, SOCK_DGRAM, 0);\n\
        if (bind(fd, (struct sockaddr *)&at, sizeof(at)))\n\treturn 1;\n\
        puts(\"bound\");\n\tfflush(stdout);\n\treturn read(0, &at, 1) < 0;\n}\n";
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("doctor-beyond");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    fs::write(folder.join("server.c"), SOURCE).unwrap();
    for (name, flags, is_beyond) in [("fixed", &["-static"][..], true), ("plain", &[], false)] {
        let program = folder.join(name);
        let mut cc = Command::new("cc");
        assert!(
            cc.arg("-o").arg(&program).arg(folder.join("server.c")).args(flags).status().unwrap().success()
        );
        let mut child = Command::new(&program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "bound\n");
        let pid = child.id().to_string();
        let output = Command::new(PROGRAM).args(["doctor", "--json", "--pid", &pid]).output().unwrap();
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        let found = rows(&document, "beyond-reach");
        assert_eq!(found.len(), usize::from(is_beyond), "{document}");
        assert!(found.iter().all(|row| row["seen"].as_str().unwrap().contains("statically linked")));
        // One thread of one process: no socket is shared.
        assert!(rows(&document, "socket-shared").is_empty());
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
    }
}

/// The server is killed on drop.
struct Server(std::process::Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn netns_doctor_sees_where_lanes_run_and_how_they_wait() {
    if !skip::need_root("netns_doctor_sees_where_lanes_run_and_how_they_wait") {
        return;
    }
    let testbed = one_host(1);
    let host = testbed.host(0);
    let cpu = manylane_measure::machine::allowed_cpus().first().copied().unwrap();
    let mut command = host.command(PROGRAM).unwrap();
    command.args([
        "echo",
        "127.0.0.1:0",
        "--wait",
        "adaptive",
        "--lanes",
        "1",
        "--placement",
        &cpu.to_string(),
    ]);
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let server = Server(child);
    let (document, _) = wait_for(
        "the CPU of the lane",
        || json(host, &["doctor"]),
        |(document, _)| document["facts"]["lanes"][0]["cpus"] == serde_json::json!([cpu]),
    );
    let lane = &document["facts"]["lanes"][0];
    assert_eq!((lane["pid"].as_u64(), &lane["wait"]), (Some(server.0.id().into()), &"adaptive".into()));
    // Whether its CPU wakes up late depends on the machine. If it does, the finding concerns that
    // CPU alone, and tune changes it only when named.
    let limit = || document["facts"]["cpu"]["idle"][cpu.to_string()]["limit"].as_str();
    let late = rows(&document, "idle-leaves-late");
    if skip::need_unless_forced(
        "netns_doctor_sees_where_lanes_run_and_how_they_wait",
        !late.is_empty(),
        Forced::Kernel,
        "idle CPUs of this machine are woken soon enough",
    ) {
        let row = late[0];
        assert_eq!((&row["severity"], &row["only_named"]), (&"wrong".into(), &true.into()), "{row}");
        let changes = row["changes"].as_array().unwrap();
        assert!(changes.len() == 1 && changes[0]["target"]["cpu"] == cpu, "{row}");
        let state = state("idle");
        let (document, code) = json(host, &["tune", "--dry-run", "idle-leaves-late", "--state", &state]);
        let row = &document["rows"][0];
        assert_eq!((&row["outcome"], row["before"].as_str(), code), (&"would".into(), limit(), 0), "{row}");
        let (document, _) = json(host, &["tune", "--dry-run", "--all", "--state", &state]);
        assert!(document["rows"].as_array().unwrap().iter().all(|row| row["finding"] != "idle-leaves-late"));
    }
    drop(server);
    let (document, _) = json(host, &["doctor"]);
    assert_eq!(document["facts"]["lanes"], Value::Array(Vec::new()));
}
