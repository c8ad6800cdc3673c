//! Servers with engine `xdp`: the launcher has the privileges, and leases queues to the server,
//! which runs as an ordinary user. The replies are the same, none lost and none duplicated, and
//! really received and sent as frames.

use std::fs;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use manylane_ipc::report::ReportFile;
use manylane_sys::process;
use manylane_test_support::{kill_on_parent_exit, wait_for};
use manylane_testbed::skip::{self, Forced};
use manylane_testbed::{Layout, Testbed};

use crate::load::Load;
use crate::sandbox::Sandbox;
use crate::server::{Report, Server, report_file};
use crate::{c, run_ok, words};

/// A veth device is used only if it is named.
pub(crate) const OPTIONS: &[&str] = &["--engine", "xdp", "--interface", "link0"];
/// Few enough that the rings, and the buffer of the kernel's socket, can hold all of them.
const LOAD: Load = Load { flows: 16, each: 100 };
/// Number of datagrams after which one of four receivers has received twice, and has its queues.
const WARM_UP_DATAGRAMS: u64 = 5;

/// Max receivers of a server.
const RECEIVERS: u64 = 2;

/// Two hosts: the client and the server.
pub(crate) struct XdpSetup {
    // Fields are dropped in this order.
    pub(crate) client: Sandbox,
    pub(crate) sandbox: Sandbox,
    pub(crate) addr: SocketAddr,
    pub(crate) testbed: Testbed,
}

impl XdpSetup {
    fn new(test: &str) -> Option<Self> {
        Self::with_queues(test, 2)
    }

    pub(crate) fn with_queues(test: &str, queues: u32) -> Option<Self> {
        Self::with_links(test, queues, 1)
    }

    /// The same, with several devices at each host.
    pub(crate) fn with_links(test: &str, queues: u32, links: usize) -> Option<Self> {
        if !skip::need_root(test) || !skip::need_leases(test) {
            return None;
        }
        let links = vec![(0, 1); links];
        let testbed = Testbed::new(&Layout { ipv6: false, queues, links, ..Layout::default() }).unwrap();
        let client_sandbox = Sandbox::at(&format!("{test}-client"), testbed.host(0));
        let sandbox = Sandbox::for_other_users(testbed.host(1));
        let addr = SocketAddr::from((testbed.host(1).ip4(0), 7000));
        Some(Self { client: client_sandbox, sandbox, addr, testbed })
    }

    /// The network namespace of the client, for another process.
    pub(crate) fn client_namespace(&self) -> String {
        self.testbed.host(0).namespace().path()
    }

    /// The command line of a server in C.
    pub(crate) fn server(&self, how: &str, receivers: u32) -> Vec<String> {
        let program = c::build(&self.sandbox);
        let (port, ip) = (self.addr.port().to_string(), self.addr.ip().to_string());
        [&program[..], &port, how, &receivers.to_string(), &ip].map(str::to_owned).to_vec()
    }

    /// Waits until the server is bound. A request in flight while the XDP program is attached to
    /// the device may be lost, as it may be at the start of any server.
    fn wait_for_server(server: &Server) {
        let report = report_file(server.pid());
        wait_for("a bound socket", || report.report().header.sockets.load(Relaxed), |count| *count > 0);
    }

    /// Sends requests one by one until the receivers have their queues.
    pub(crate) fn warm_up(&self, server: &mut Server) {
        Self::wait_for_server(server);
        for _ in 0..WARM_UP_DATAGRAMS {
            assert_eq!(server.answer(&self.client, self.addr, b"first"), b"first!");
        }
    }

    /// Sends requests until replies leave as frames, which is when the launcher knows the next hop.
    /// Returns the number of requests.
    pub(crate) fn request_until_xdp_replies(&self, server: &mut Server) -> u64 {
        let report = report_file(server.pid());
        let mut requests = 0;
        let request = || {
            requests += 1;
            assert_eq!(server.answer(&self.client, self.addr, b"frames"), b"frames!");
            frames(&report)
        };
        wait_for("a reply as a frame (received, sent)", request, |(_, sent)| *sent > 0);
        requests
    }

    pub(crate) fn request_all(&self) {
        let replies = LOAD.request_all(&self.client, self.addr, |n| format!("request {n}").into_bytes());
        let mut expected: Vec<_> = (0..LOAD.count()).map(|n| format!("request {n}!").into_bytes()).collect();
        expected.sort();
        assert!(replies == expected, "replies differ");
    }
}

/// Number of frames received and sent so far.
fn frames(file: &ReportFile) -> (u64, u64) {
    file.report().receivers.iter().fold((0, 0), |sum, at| {
        (sum.0 + at.delivered_by_bypass.load(Relaxed), sum.1 + at.sent_by_bypass.load(Relaxed))
    })
}

/// Checks the report of a server that got `requests` requests, of which the kernel delivered
/// `by_kernel`.
fn check(report: &Report, requests: u64, by_kernel: u64) {
    assert_eq!(report.sum("delivered"), requests, "{report:?}");
    // The last reply of a receiver may arrive before it is counted, and then the server ends.
    let sent = report.sum("sent");
    assert!((requests - RECEIVERS..=requests).contains(&sent), "{sent} sent of {requests}: {report:?}");
    let rest = requests - report.sum("delivered_by_bypass");
    assert!((by_kernel..=by_kernel + WARM_UP_DATAGRAMS).contains(&rest), "{rest} by the kernel: {report:?}");
    assert!(report.sum("sent_by_bypass") > 0, "{report:?}");
    assert_eq!(report.reasons(), [""; 0]);
}

/// A server in C with `receivers` receivers of one kind, run as an ordinary user.
fn serve(test: &str, how: &str, receivers: u32) {
    let Some(setup) = XdpSetup::new(test) else { return };
    let user = ["--reuid=65534", "--regid=65534", "--clear-groups"];
    let server = setup.server(how, receivers);
    let words: Vec<String> = words("setpriv", &user).into_iter().chain(server).collect();
    let mut server = Server::start(&setup.sandbox, &words, Some(OPTIONS));
    setup.warm_up(&mut server);
    let more = setup.request_until_xdp_replies(&mut server);
    setup.request_all();
    let (status, report) = server.end();
    assert!(status.success(), "{status}");
    let report = report.unwrap();
    check(&report, WARM_UP_DATAGRAMS + more + LOAD.count(), 0);
    // A quick thread may serve all requests: a thread that never receives gets no lane.
    assert!((1..=receivers as usize).contains(&report.lanes(setup.addr)), "{report:?}");
}

#[test]
fn netns_xdp_one_receiver_that_blocks() {
    serve("netns_xdp_one_receiver_that_blocks", "block", 1);
}

#[test]
fn netns_xdp_one_receiver_with_epoll() {
    serve("netns_xdp_one_receiver_with_epoll", "epoll", 1);
}

#[test]
fn netns_xdp_threads_that_block() {
    serve("netns_xdp_threads_that_block", "block", 2);
}

#[test]
fn netns_xdp_threads_that_poll() {
    serve("netns_xdp_threads_that_poll", "poll", 2);
}

#[test]
fn netns_xdp_threads_that_select() {
    serve("netns_xdp_threads_that_select", "select", 2);
}

#[test]
fn netns_xdp_threads_with_an_epoll_instance_each() {
    serve("netns_xdp_threads_with_an_epoll_instance_each", "epoll", 2);
}

#[test]
fn netns_xdp_children_that_block() {
    serve("netns_xdp_children_that_block", "fork", 2);
}

/// In a user namespace without a mapping, all users of the machine have the overflow uid: a program
/// there cannot know that the launcher is not another user's.
#[test]
fn netns_xdp_unmapped_uids_lease_no_queues() {
    const TEST: &str = "netns_xdp_unmapped_uids_lease_no_queues";
    let Some(setup) = XdpSetup::new(TEST) else { return };
    let works = Command::new("unshare").args(["--user", "true"]).status();
    if !skip::need_unless_forced(
        TEST,
        works.is_ok_and(|status| status.success()),
        Forced::Kernel,
        "no user namespaces",
    ) {
        return;
    }
    let server = words("unshare", &["--user"]).into_iter().chain(setup.server("block", 1));
    let server: Vec<String> = server.collect();
    let mut server = Server::start(&setup.sandbox, &server, Some(OPTIONS));
    setup.warm_up(&mut server);
    setup.request_all();
    let (status, report) = server.end();
    assert!(status.success(), "{status}");
    assert_eq!(report.unwrap().reasons(), ["no-lease"]);
}

/// Datagrams that XDP does not take: fragments, and those from the machine itself.
#[test]
fn netns_xdp_companion_socket_traffic_is_received() {
    const DATAGRAMS_EACH: u64 = 20;
    let Some(setup) = XdpSetup::new("netns_xdp_companion_socket_traffic_is_received") else { return };
    let mut server = Server::start(&setup.sandbox, &setup.server("block", 1), Some(OPTIONS));
    setup.warm_up(&mut server);
    let more = setup.request_until_xdp_replies(&mut server);
    let long = [vec![b'x'; 1800], b"!".to_vec()].concat();
    for _ in 0..DATAGRAMS_EACH {
        assert_eq!(server.answer(&setup.client, setup.addr, &long[..1800]), long);
        assert_eq!(server.answer(&setup.sandbox, setup.addr, b"from here"), b"from here!");
        assert_eq!(server.answer(&setup.client, setup.addr, b"a frame"), b"a frame!");
    }
    let (status, report) = server.end();
    assert!(status.success(), "{status}");
    check(&report.unwrap(), WARM_UP_DATAGRAMS + more + 3 * DATAGRAMS_EACH, 2 * DATAGRAMS_EACH);
}

/// Without its launcher, a program loses its queues and continues. (The launcher kills the program
/// that it started, but not that program's children.)
#[test]
fn netns_xdp_killing_the_launcher_keeps_the_program_running() {
    let Some(setup) = XdpSetup::new("netns_xdp_killing_the_launcher_keeps_the_program_running") else {
        return;
    };
    let mut server = Server::start(&setup.sandbox, &setup.server("fork", 2), Some(OPTIONS));
    setup.warm_up(&mut server);
    setup.request_until_xdp_replies(&mut server);
    process::send_signal(server.pid() as i32, 9).unwrap();
    server.wait();
    setup.request_all();
}

/// A program that is killed leaves its port to the next one, which gets queues, too.
#[test]
fn netns_xdp_a_killed_server_frees_its_port_and_queues() {
    let Some(setup) = XdpSetup::new("netns_xdp_a_killed_server_frees_its_port_and_queues") else { return };
    let line = setup.server("block", 1).join(" ");
    let pid = setup.sandbox.path("pid");
    // Its process id is there before its replies are.
    let script = format!("sh -c 'echo $$ >{pid}; exec {line}'; exec {line}");
    let script = ["/bin/sh", "-c", &script].map(str::to_owned);
    let mut server = Server::start(&setup.sandbox, &script, Some(OPTIONS));
    setup.warm_up(&mut server);
    setup.request_until_xdp_replies(&mut server);
    let first: i32 = fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
    process::send_signal(first, 9).unwrap();
    wait_for("the end of the first server", || process::send_signal(first, 0), Result::is_err).unwrap_err();
    // Datagrams that arrive while no server is bound are lost, as without queues.
    let client_sandbox = setup.client.socket_at("0.0.0.0:0");
    client_sandbox.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let mut buffer = [0; 64];
    let ask = || {
        _ = client_sandbox.send_to(b"there?", setup.addr);
        client_sandbox.recv_from(&mut buffer)
    };
    wait_for("the second server", ask, Result::is_ok).unwrap();
    drop(client_sandbox);
    let report = report_file(server.pid());
    let before = frames(&report).0;
    setup.request_all();
    let ask = || {
        assert_eq!(server.answer(&setup.client, setup.addr, b"again"), b"again!");
        frames(&report)
    };
    wait_for("frames to the second server (received, sent)", ask, |(received, _)| *received > before);
    let (status, report) = server.end();
    assert!(status.success(), "{status}");
    assert_eq!(report.unwrap().reasons(), [""; 0]);
}

/// The threads start with the queues of their socket; the program drops its privileges as usual.
#[test]
fn netns_xdp_memcached() {
    const TEST: &str = "netns_xdp_memcached";
    if !crate::has(TEST, "memcached", "memcached") {
        return;
    }
    let Some(setup) = XdpSetup::new(TEST) else { return };
    let (port, ip) = (setup.addr.port().to_string(), setup.addr.ip().to_string());
    let line = words("memcached", &["-U", &port, "-p", "0", "-l", &ip, "-t", "4", "-u", "nobody"]);
    let frame =
        |n: usize, text: &str| [&[(n >> 8) as u8, n as u8, 0, 0, 0, 1, 0, 0], text.as_bytes()].concat();
    let request = |n: usize| match n % 10 {
        0 => frame(n, &format!("set n{n} 0 0 4\r\n{n:04}\r\n")),
        1 => frame(n, "get nothing\r\n"),
        _ => frame(n, "get key\r\n"),
    };
    let mut all = Vec::new();
    for with in [None, Some(OPTIONS)] {
        let mut server = Server::start(&setup.sandbox, &line, with);
        if with.is_some() {
            XdpSetup::wait_for_server(&server);
        }
        for _ in 0..WARM_UP_DATAGRAMS {
            let set = frame(1, "set key 7 0 5\r\nvalue\r\n");
            assert_eq!(server.answer(&setup.client, setup.addr, &set), frame(1, "STORED\r\n"));
        }
        all.push(LOAD.request_all(&setup.client, setup.addr, request));
        let (status, report) = server.end();
        assert!(status.success(), "{status}");
        if let Some(report) = report {
            assert_eq!(report.sum("delivered"), WARM_UP_DATAGRAMS + LOAD.count(), "{report:?}");
            let rest = WARM_UP_DATAGRAMS + LOAD.count() - report.sum("delivered_by_bypass");
            assert!(rest <= 2 * WARM_UP_DATAGRAMS, "{rest} by the kernel: {report:?}");
            assert_eq!(report.reasons(), [""; 0]);
        }
    }
    assert!(all[0] == all[1], "replies differ");
}

impl Report {
    pub(crate) fn sum(&self, name: &str) -> u64 {
        self.0["rows"].as_array().unwrap().iter().map(|row| row[name].as_u64().unwrap()).sum()
    }

    /// Number of frames that were received at a port.
    fn by_xdp(&self, port: u16) -> u64 {
        self.sum_of_port(port, "delivered_by_bypass")
    }

    fn sum_of_port(&self, port: u16, name: &str) -> u64 {
        let rows = self.0["rows"].as_array().unwrap().iter();
        let of_port = rows.filter(|row| row["socket"].as_str().unwrap().ends_with(&format!(":{port}")));
        of_port.map(|row| row[name].as_u64().unwrap()).sum()
    }
}

/// Compares what the program `calls.c` prints alone and with queues. `reasons` are the reasons that
/// the report must name, `frames` the minimum number of frames for each port.
fn calls(test: &str, what: &str, reasons: &[&str], frames: &[(u16, u64)]) -> Option<Report> {
    calls_with(test, what, reasons, frames, &[])
}

/// As [`calls`], with environment variables for the library.
fn calls_with(
    test: &str,
    what: &str,
    reasons: &[&str],
    frames: &[(u16, u64)],
    vars: &[(&str, &str)],
) -> Option<Report> {
    if !skip::need_root(test) || !skip::need_leases(test) {
        return None;
    }
    // With one queue, datagrams arrive in the order in which they were sent.
    let testbed = Testbed::new(&Layout { queues: 1, ..Layout::default() }).unwrap();
    let sandbox = Sandbox::at(test, testbed.host(1));
    let program =
        sandbox.compile("calls", &["calls.c", "call_results.c", "epoll_entries.c", "socket_lifetime.c"]);
    let (host, report) = (testbed.host(1), sandbox.path("report.json"));
    let (ip4, ip6) = (host.ip4(0).to_string(), host.ip6(0).to_string());
    let clients = testbed.host(0).namespace().path();
    let arguments = [&clients[..], &ip4, &ip6, what];
    let mut alone = sandbox.command(&program);
    alone.args(arguments);
    kill_on_parent_exit(&mut alone);
    let mut with = sandbox.command(env!("CARGO_BIN_EXE_manylane"));
    with.args(["run", "--json-file", &report]).args(OPTIONS).arg("--").arg(&program).args(arguments);
    with.envs(vars.iter().copied());
    kill_on_parent_exit(&mut with);
    let (alone, with) = (run_ok(alone), run_ok(with));
    assert!(alone == with, "alone:\n{alone}\nwith queues:\n{with}");
    assert!(!alone.contains(": no\n"), "{alone}");
    let report = Report(serde_json::from_str(&fs::read_to_string(report).unwrap()).unwrap());
    let mut found = report.reasons();
    found.sort_unstable();
    assert_eq!(found, reasons, "{report:?}");
    for (port, least) in frames {
        let by_xdp = report.by_xdp(*port);
        assert!(by_xdp >= *least, "{by_xdp} of port {port}: {report:?}");
    }
    Some(report)
}

#[test]
fn netns_xdp_receive_calls() {
    let frames: Vec<_> = [7011].into_iter().chain(7013..=7018).map(|port| (port, 101)).collect();
    const RUNS_MAX: usize = 4;
    for run in 1..=RUNS_MAX {
        let Some(report) = calls("netns_xdp_receive_calls", "calls", &[], &frames) else { return };
        // A frame with a wrong checksum, one that is too long, a hundred between valid frames, and
        // one after the last.
        assert_eq!((report.sum_of_port(7013, "bad_frames"), report.sum("bad_frames")), (103, 103));
        // Valid sends use the queue. Otherwise the invalid ones would not have been tested on it.
        // The launcher may be held up until they are over, before it knows the next hop.
        let sent = report.sum_of_port(7019, "sent_by_bypass");
        if sent >= 20 {
            return;
        }
        assert!(run < RUNS_MAX, "{sent} sent: {report:?}");
    }
}

#[test]
fn netns_xdp_fallback_calls() {
    let frames: Vec<_> = (7001..=7007).map(|port| (port, 101)).collect();
    let reasons = ["connect", "control", "error-queue", "multicast", "option"];
    calls("netns_xdp_fallback_calls", "fallbacks", &reasons, &frames);
}

#[test]
fn netns_xdp_close_calls() {
    let report = calls("netns_xdp_close_calls", "closes", &["full"], &[(7021, 101)]);
    let Some(report) = report else { return };
    // The kernel delivers the first two datagrams. By then the receiver has received twice, and
    // gets its queues before the third one is sent. From port 7022 on, too few descriptors are
    // spare for queues.
    let few = (7022..=7032).map(|port| (port, 0));
    for (port, frames) in few.chain([(7033, 101), (7034, 10), (7035, 10)]) {
        assert_eq!(report.by_xdp(port), frames, "port {port}: {report:?}");
    }
}

#[test]
fn netns_xdp_sockets_after_the_last_lease_leave_nothing_open() {
    calls("netns_xdp_sockets_after_the_last_lease_leave_nothing_open", "reopened", &["full"], &[(7071, 64)]);
}

/// The process is killed with the queue's lock (in builds with debug assertions), and waits to be
/// reaped.
#[test]
fn netns_xdp_a_zombie_loses_no_frames() {
    let vars = [("MANYLANE_TEST_DIE_AT", "peeked")];
    let frames = [(7082, 1000), (7083, 1000)];
    calls_with("netns_xdp_a_zombie_loses_no_frames", "killed", &[], &frames, &vars);
}

/// The thread ends with the queue's lock (in builds with debug assertions), and its process lives
/// on.
#[test]
fn netns_xdp_thread_exit_inside_a_queue_does_not_stop_it() {
    let vars = [("MANYLANE_TEST_END_AT", "peeked")];
    let frames = [(7091, 100)];
    calls_with("netns_xdp_thread_exit_inside_a_queue_does_not_stop_it", "ended", &[], &frames, &vars);
}

#[test]
fn netns_xdp_fallback_beside_waiting_threads() {
    let frames = [(7061, 12), (7062, 12), (7063, 12)];
    let reasons = ["control", "error-queue", "option"];
    calls("netns_xdp_fallback_beside_waiting_threads", "threads", &reasons, &frames);
}

#[test]
fn netns_xdp_interrupted_calls() {
    calls("netns_xdp_interrupted_calls", "interrupted", &[], &[(7041, 2)]);
}

#[test]
fn netns_xdp_restarted_calls() {
    calls("netns_xdp_restarted_calls", "restarted", &["signals"], &[(7051, 101)]);
}

#[test]
fn netns_xdp_epoll_entries() {
    let frames = [(7111, 3), (7112, 0), (7113, 100)];
    calls("netns_xdp_epoll_entries", "epoll", &["error-queue"], &frames);
}

#[test]
fn netns_xdp_queues_are_leased_after_a_small_stack_handler() {
    calls("netns_xdp_queues_are_leased_after_a_small_stack_handler", "small", &[], &[(7101, 100)]);
}
