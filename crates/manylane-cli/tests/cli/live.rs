//! `manylane top` and `manylane limit` from outside: what they show of running processes, and what
//! they change there.

use std::io::{BufRead, BufReader, ErrorKind};
use std::net::{SocketAddr, UdpSocket};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::Duration;

use manylane::control::ControlSocket;
use manylane::{Builder, Engine, probe};
use manylane_test_support::wait_for;
use manylane_testbed::skip::Forced;
use manylane_testbed::{Host, Layout, Testbed, skip};
use serde_json::Value;

const PROGRAM: &str = env!("CARGO_BIN_EXE_manylane");
const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// Runs the program inside `host`, or here; again as long as a process has not replied within the
/// 2 s that it has for it, because it had no CPU.
fn run(host: Option<&Host>, words: &[&str]) -> Output {
    let run = || {
        let mut command = host.map_or_else(|| Command::new(PROGRAM), |host| host.command(PROGRAM).unwrap());
        command.args(words).stdin(Stdio::null()).output().unwrap()
    };
    let is_late = |text: &[u8]| String::from_utf8_lossy(text).contains("does not reply in time");
    wait_for("a reply in time", run, |output| !is_late(&output.stdout) && !is_late(&output.stderr))
}

/// The output of a command that succeeds.
fn run_ok(host: Option<&Host>, words: &[&str]) -> String {
    let output = run(host, words);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn document(host: Option<&Host>, words: &[&str]) -> Value {
    serde_json::from_str(&run_ok(host, words)).unwrap()
}

/// The error output of a command that fails with exit code `code`.
fn run_err(host: Option<&Host>, words: &[&str], code: i32) -> String {
    let output = run(host, words);
    assert_eq!(output.status.code(), Some(code), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8(output.stderr).unwrap()
}

/// A running program; killed when the test fails or ends.
struct Running {
    child: Child,
    addr: String,
}

impl Running {
    fn echo(host: Option<&Host>, addr: &str, words: &[&str]) -> Self {
        let mut command = host.map_or_else(|| Command::new(PROGRAM), |host| host.command(PROGRAM).unwrap());
        command.args(["echo", addr, "--lanes", "2", "--interval", "0"]).args(words);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let first = lines.next().unwrap().unwrap();
        // The control socket opens a moment later.
        let addr = first.strip_prefix("listening on ").unwrap_or_else(|| panic!("{first}")).to_owned();
        thread::spawn(move || lines.for_each(drop));
        let running = Self { child, addr };
        let top = ["top", &running.pid(), "--once", "--interval", "50ms"];
        let seen = || run(host, &top);
        wait_for("the address in `top`", seen, |seen| {
            String::from_utf8_lossy(&seen.stdout).contains(&running.addr)
        });
        running
    }

    fn pid(&self) -> String {
        self.child.id().to_string()
    }

    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

fn client(server: &str) -> UdpSocket {
    let server: SocketAddr = server.parse().unwrap();
    let socket =
        UdpSocket::bind(if server.ip().is_loopback() { "127.0.0.1:0" } else { "0.0.0.0:0" }).unwrap();
    socket.connect(server).unwrap();
    socket.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    socket
}

fn ping(socket: &UdpSocket) {
    socket.send(b"ping").unwrap();
    // A wait with a timeout ends when the process was stopped for a moment.
    while let Err(err) = socket.recv(&mut [0; 16]) {
        assert_eq!(err.kind(), ErrorKind::Interrupted);
    }
}

fn sum(document: &Value, field: &str) -> u64 {
    document["rows"].as_array().unwrap().iter().map(|row| row[field].as_u64().unwrap()).sum()
}

#[test]
fn loopback_top_shows_each_lane_and_its_datagrams() {
    check_top_lanes("mmsg");
}

#[test]
fn loopback_top_shows_each_lane_of_engine_uring() {
    let name = "loopback_top_shows_each_lane_of_engine_uring";
    if skip::need_unless_forced(name, probe().uring.is_ok(), Forced::Kernel, "no io_uring") {
        check_top_lanes("uring");
    }
}

fn check_top_lanes(engine: &str) {
    // The engine is explicit, because the default depends on the machine.
    let mut echo = Running::echo(None, "127.0.0.1:0", &["--engine", engine]);
    let pid = echo.pid();
    let socket = client(&echo.addr);
    for _ in 0..100 {
        ping(&socket);
    }
    let top = || document(None, &["top", &pid, "--json", "--interval", "50ms"]);
    // A reply may be here before its lane has counted it.
    let seen = wait_for("100 datagrams sent", top, |seen| sum(seen, "sent") == 100);
    assert_eq!((sum(&seen, "delivered"), sum(&seen, "sent")), (100, 100), "{seen}");
    assert_eq!(seen["schema"], "manylane.top.v1");
    let rows = seen["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for (lane, row) in rows.iter().enumerate() {
        assert_eq!((&row["socket"], &row["lane"]), (&echo.addr.as_str().into(), &lane.to_string().into()));
        assert_eq!(
            (row["pid"].to_string(), &row["engine"], &row["program"]),
            (pid.clone(), &engine.into(), &"manylane".into())
        );
        assert!(row["thread"].as_u64().is_some_and(|tid| tid > 0) && row["cpu"].is_f64(), "{row}");
        assert_eq!((&row["queued_bytes"], &row["lost"]), (&0.into(), &serde_json::json!({})), "{row}");
        assert_eq!((&row["ring_frames"], &row["ring_entries"]), (&Value::Null, &Value::Null), "{row}");
    }
    assert!(!seen["settings"]["cpus"].as_array().unwrap().is_empty());
    let text = run_ok(None, &["top", "--once", "--interval", "50ms"]);
    assert_eq!(text.lines().filter(|line| line.contains(&echo.addr)).count(), 2, "{text}");
    // Without a terminal there is nothing to draw on.
    assert!(run_err(None, &["top"], 2).contains("--once"));
    // Only engine xdp has limits, and `limit` says so.
    assert!(run_err(None, &["limit", &pid, "--limit", "5"], 1).contains("engine xdp"));
    assert_eq!(run(None, &["limit", &pid, "--limit", "sideways"]).status.code(), Some(2));
    echo.end();
    assert!(!run_ok(None, &["top", "--once", "--interval", "50ms"]).contains(&echo.addr));
    assert!(run_err(None, &["limit", &pid], 1).contains("no process"));
}

#[test]
fn loopback_control_socket_rejects_unmapped_uids() {
    // In a user namespace without a mapping, all users have the overflow uid.
    let name = "loopback_control_socket_rejects_unmapped_uids";
    let unshare = |words: &[&str]| {
        let mut command = Command::new("unshare");
        command.arg("--user").args(words).stdin(Stdio::null()).stdout(Stdio::null());
        command
    };
    let works = unshare(&["true"]).stderr(Stdio::null()).status().is_ok_and(|status| status.success());
    if !skip::need_unless_forced(name, works, Forced::Kernel, "no user namespaces") {
        return;
    }
    let mut command = unshare(&[PROGRAM, "echo", "127.0.0.1:0", "--engine", "mmsg", "--interval", "0"]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let addr = lines.next().unwrap().unwrap();
    thread::spawn(move || lines.for_each(drop));
    let running = Running { child, addr };
    let limit = || run_err(None, &["limit", &running.pid()], 1);
    let said = wait_for("a control socket", limit, |said| !said.contains("has no control socket"));
    assert!(said.contains("only root and the user"), "{said}");
}

#[test]
fn netns_top_without_processes_says_so() {
    const TEST: &str = "netns_top_without_processes_says_so";
    if !skip::need_root(TEST) {
        return;
    }
    let testbed = Testbed::new(&Layout::default()).unwrap();
    let text = run_ok(Some(testbed.host(0)), &["top", "--once", "--interval", "50ms"]);
    assert!(text.starts_with("no process with lanes in this"), "{text}");
}

/// Fill level and room of the rings of a lane behind its last batch. The test drives the lane of
/// the library by hand, so that all numbers are known.
#[test]
fn netns_xdp_top_shows_the_rings_of_a_lane_of_the_library() {
    const TEST: &str = "netns_xdp_top_shows_the_rings_of_a_lane_of_the_library";
    const SENT_DATAGRAMS: u64 = 50;
    if !skip::need_root(TEST) {
        return;
    }
    let testbed = Testbed::new(&Layout { ipv6: false, queues: 1, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    let addr = format!("{}:4713", b.ip4(0));
    let (mut lanes, handle, _control) = b.run(|| {
        let mut builder = Builder::new(addr.as_str()).unwrap();
        let socket = builder.engine(Engine::Xdp).lanes(1).batch(8).xdp_ring(64).open().unwrap();
        let (handle, control) = (socket.handle(), ControlSocket::open(&socket.handle()).unwrap());
        (socket.into_lanes(), handle, control)
    });
    let top = || document(Some(b), &["top", "--json", "--interval", "50ms"])["rows"].clone();
    let told = |received: u64, waiting: u64| {
        let rows = top();
        let [row] = rows.as_array().unwrap().as_slice() else { panic!("{rows}") };
        assert_eq!(
            (&row["socket"], &row["engine"], row["pid"].as_u64()),
            (&addr.as_str().into(), &"xdp".into(), Some(std::process::id().into()))
        );
        assert_eq!(
            (row["delivered"].as_u64(), row["ring_frames"].as_u64()),
            (Some(received), Some(waiting)),
            "{row}"
        );
        assert_eq!((row["ring_entries"].as_u64(), &row["lost"]), (Some(64), &serde_json::json!({})), "{row}");
    };
    let [lane] = lanes.as_mut_slice() else { panic!("one lane") };
    let mut take = || lane.recv().unwrap().batch.len();
    let socket = a.run(|| client(&addr));
    (0..SENT_DATAGRAMS).for_each(|_| assert_eq!(socket.send(b"wait").unwrap(), 4));
    let redirected = |all: u64| {
        wait_for(
            "all datagrams redirected",
            || handle.frame_counts(),
            |counts| counts.iter().any(|(_, what, count)| *what == "redirected" && *count == all),
        );
    };
    redirected(SENT_DATAGRAMS);
    // A lane polls its companion now and then, which has nothing queued.
    wait_for("a full batch", &mut take, |len| *len == 8);
    told(8, 42);
    let text = run_ok(Some(b), &["top", "--once", "--interval", "50ms"]);
    assert!(text.lines().any(|line| line.contains(&addr) && line.contains(" 66% ")), "{text}");
    let mut taken = 8;
    let take_more = || {
        taken += take();
        taken
    };
    wait_for("all datagrams", take_more, |taken| *taken == SENT_DATAGRAMS as usize);
    told(SENT_DATAGRAMS, 0);
    let text = run_ok(Some(b), &["top", "--once", "--interval", "50ms"]);
    assert!(text.lines().any(|line| line.contains(&addr) && line.contains(" 0% ")), "{text}");
    // Frames without room are lost, and the ring is full. The last batch returns its frames first.
    assert_eq!(take(), 0);
    (0..100).for_each(|_| assert_eq!(socket.send(b"drop").unwrap(), 4));
    redirected(SENT_DATAGRAMS + 100);
    assert_eq!(handle.counters().total().xsk_dropped, 100 - 64);
    wait_for("a full batch", &mut take, |len| *len == 8);
    let rows = top();
    let row = &rows[0];
    assert_eq!(
        (row["delivered"].as_u64(), row["ring_frames"].as_u64(), &row["lost"]),
        (Some(SENT_DATAGRAMS + 8), Some(56), &serde_json::json!({ "xsk_dropped": 36 })),
        "{rows}"
    );
}

/// Limits from the start, and changed from outside, of a process in another network namespace.
#[test]
fn netns_xdp_limits_of_echo_change_from_outside() {
    const TEST: &str = "netns_xdp_limits_of_echo_change_from_outside";
    if !skip::need_root(TEST) {
        return;
    }
    let testbed = Testbed::new(&Layout { ipv6: false, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    let addr = format!("{}:4711", b.ip4(0));
    let words = ["--engine", "xdp", "--limit", "0.001/5", "--deny", "203.0.113.0/24"];
    let echo = Running::echo(Some(b), &addr, &words);
    let pid = echo.pid();
    let limits = |words: &[&str]| {
        let all = [&["limit", &pid, "--json"], words].concat();
        document(None, &all)["rows"][0].clone()
    };
    let socket = a.run(|| client(&addr));
    for _ in 0..5 {
        ping(&socket);
    }
    for _ in 0..7 {
        socket.send(b"too much").unwrap();
    }
    wait_for("7 limited datagrams", || limits(&[]), |row| row["limited"] == 7);
    let own = format!("{}/32", a.ip4(0));
    let now = limits(&["--allow", &own, "--forget", "203.0.113.0/24"]);
    assert_eq!(
        (&now["limits"], &now["allow"], &now["deny"]),
        (&serde_json::json!(["0.001/5,per=32:64"]), &serde_json::json!([own]), &serde_json::json!([]))
    );
    for _ in 0..20 {
        ping(&socket);
    }
    limits(&["--deny", &own, "--unlimited"]);
    for _ in 0..3 {
        socket.send(b"denied").unwrap();
    }
    wait_for("3 denied datagrams", || limits(&[]), |row| row["denied"] == 3);
    // All of it or nothing is changed.
    let many = ["limit", &pid, "--limit", "1", "--limit", "2", "--limit", "3", "--forget", &own];
    assert!(run_err(None, &many, 1).contains("at most 2"));
    let text = run_ok(None, &["limit", &pid]);
    assert_eq!(text, format!("deny    {own}\ndropped 3 denied, 7 over a limit\n"));
    let seen = document(Some(b), &["top", "--json", "--interval", "50ms"]);
    assert_eq!(
        (sum(&seen, "delivered"), &seen["settings"]["filter_drops"][0]["limited"]),
        (25, &7.into()),
        "{seen}"
    );
    limits(&["--forget", &own]);
    ping(&socket);
}

/// The launcher drops what the program must not be flooded with.
#[test]
fn netns_xdp_limits_of_programs_that_are_run() {
    const TEST: &str = "netns_xdp_limits_of_programs_that_are_run";
    const SERVER: &str = "import socket, sys\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n\
        s.bind((sys.argv[1], 4712))\nprint('up', flush=True)\nwhile True:\n d, a = s.recvfrom(2048)\n s.sendto(d, a)\n";
    let has_python = Command::new("python3").arg("--version").output().is_ok();
    if !skip::need_root(TEST)
        || !skip::need_leases(TEST)
        || !skip::need(TEST, has_python, "there is no python3")
    {
        return;
    }
    let testbed = Testbed::new(&Layout { ipv6: false, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    let addr = format!("{}:4712", b.ip4(0));
    let mut command = b.command(PROGRAM).unwrap();
    command.args([
        "run",
        "--engine",
        "xdp",
        "--interface",
        b.device(0),
        "--quiet",
        "--deny",
        "203.0.113.0/24",
        "--",
        "python3",
        "-c",
        SERVER,
    ]);
    command.arg(b.ip4(0).to_string()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut running = Running { child: command.spawn().unwrap(), addr: addr.clone() };
    let mut lines = BufReader::new(running.child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "up");
    let pid = running.pid();
    let socket = a.run(|| client(&addr));
    let shown = || document(Some(b), &["top", &pid, "--json", "--interval", "50ms"]);
    // The queues are opened once the receiver has received twice.
    let mut asked = 0;
    let ask = || {
        ping(&socket);
        asked += 1;
        (asked, run_ok(Some(b), &["limit", &pid]))
    };
    wait_for("the rule", ask, |(asked, limits)| *asked > 20 && limits.contains("deny    203.0.113.0/24"));
    wait_for("all requests counted", shown, |seen| sum(seen, "delivered") == asked);
    let own = a.ip4(0).to_string();
    run_ok(None, &["limit", &pid, "--deny", &own]);
    for _ in 0..9 {
        socket.send(b"denied").unwrap();
    }
    let limits = || document(None, &["limit", &pid, "--json"]);
    wait_for("9 denied datagrams", limits, |seen| seen["rows"][0]["denied"] == 9);
    assert_eq!(sum(&shown(), "delivered"), asked);
    run_ok(None, &["limit", &pid, "--forget", &own]);
    ping(&socket);
    running.end();
    let wrong = ["run", "--limit", "5", "--", "true"];
    assert!(run_err(None, &wrong, 125).contains("--engine xdp"));
}

/// Without names, no device is attached that another program may need, and a reason is given for
/// each.
#[test]
fn netns_xdp_unlisted_devices_are_not_attached() {
    const TEST: &str = "netns_xdp_unlisted_devices_are_not_attached";
    if !skip::need_root(TEST) || !skip::need_kernel(TEST, (5, 14), "SO_NETNS_COOKIE") {
        return;
    }
    let testbed = Testbed::new(&Layout { ipv6: false, ..Layout::default() }).unwrap();
    let b = testbed.host(1);
    let run = |options: &[&str]| {
        let mut command = b.command(PROGRAM).unwrap();
        command.args(["run", "--engine", "xdp", "--quiet"]).args(options).args(["--", "true"]);
        command.stdin(Stdio::null()).env_remove("SSH_CONNECTION").output().unwrap()
    };
    let refused = |why: &str| {
        let output = run(&[]);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(125), "{text}");
        assert!(text.contains("(--interface)") && text.contains(why), "{text}");
    };
    refused("link0: it is an end of a veth pair");
    let output = run(&["--interface", b.device(0)]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{text}");
    let warning = format!("the program can send any frame through {}, past the firewall", b.device(0));
    assert_eq!(text.matches(&warning).count(), 1, "{text}");
    // Another kind of Ethernet device, if this kernel can easily create one.
    let made =
        b.ip_batch("link add card0 type ifb\nlink set dev card0 up\naddress add 169.254.7.7/16 dev card0\n");
    if !skip::need_unless_forced(
        TEST,
        made.is_ok(),
        Forced::Kernel,
        "this kernel has no ifb devices (CONFIG_IFB)",
    ) {
        return;
    }
    refused("card0: it only has link-local addresses");
    b.set_sysctl("net.ipv4.conf.card0.rp_filter", "1").unwrap();
    b.ip_batch("address add 10.77.0.1/24 dev card0\n").unwrap();
    refused("card0: net.ipv4.conf.card0.rp_filter is 1");
    for conf in ["all", "card0"] {
        b.set_sysctl(&format!("net.ipv4.conf.{conf}.rp_filter"), "0").unwrap();
    }
    b.ip_batch("route add default dev card0\n").unwrap();
    refused(
        "card0: attaching an XDP program may take the link down for a moment, and the default route uses it",
    );
    b.ip_batch("route del default dev card0\n").unwrap();
    refused("card0: its driver accepts no XDP program");
}
