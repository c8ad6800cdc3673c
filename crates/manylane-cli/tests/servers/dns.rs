//! DNS servers: NSD, Knot and Unbound. NSD and Knot open a socket per process or thread themselves
//! (SO_REUSEPORT), and must behave as before. The threads of Unbound share one socket if configured
//! to.

use std::net::SocketAddr;

use manylane_testbed::{Layout, Testbed, skip};

use crate::load::Load;
use crate::sandbox::Sandbox;
use crate::server::{PREFETCH, Report, Server};
use crate::{find, run_ok, words};

const NAMES: usize = 100;

/// A question for an address of a name; every seventh name does not exist.
fn question(n: usize) -> Vec<u8> {
    let id = (n as u16).to_be_bytes();
    let mut bytes = vec![id[0], id[1], 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    let host = if n % 7 == 6 { "nobody".to_owned() } else { format!("host{}", n % NAMES) };
    for label in [host.as_str(), "example", "test", ""] {
        bytes.push(label.len() as u8);
        bytes.extend(label.as_bytes());
    }
    bytes.extend([0, 1, 0, 1]);
    bytes
}

fn zone() -> String {
    let mut text = "$ORIGIN example.test.\n$TTL 3600\n@ SOA ns hostmaster 1 3600 600 86400 3600\n@ NS ns\nns A 192.0.2.1\n".to_owned();
    for name in 0..NAMES {
        text += &format!("host{name} A 192.0.2.{name}\n");
    }
    text
}

/// Questions for dnsperf.
fn questions() -> String {
    (0..NAMES).map(|name| format!("host{name}.example.test A\n")).collect()
}

/// A server's command line that serves the zone at an address.
type Prepare = fn(&Sandbox, SocketAddr) -> Vec<String>;

/// Compares a server under load, once `lanes` receivers have a lane; 0 if they have sockets of
/// their own.
fn serve(
    sandbox: &Sandbox,
    prepare: Prepare,
    lanes: usize,
    with: Option<&[&str]>,
) -> (Vec<Vec<u8>>, Option<Report>, SocketAddr) {
    let addr = sandbox.free_addr();
    let mut server = Server::start(sandbox, &prepare(sandbox, addr), with);
    let first = server.answer(sandbox, addr, &question(0));
    assert!(first.ends_with(&[192, 0, 2, 0]) || first.len() > 60, "{first:?}");
    let mut requests = 1;
    server.wait_lanes(lanes, |_| requests += Load::WARM_UP.request_all(sandbox, addr, question).len() as u64);
    let load = Load::DEFAULT;
    let replies = load.request_all(sandbox, addr, question);
    requests += load.count();
    if find("dnsperf").is_some() {
        requests += dnsperf(sandbox, addr);
    }
    // Before its end, too: a thread that gets no CPU time loses its lane.
    server.wait_lanes(lanes, |_| requests += Load::WARM_UP.request_all(sandbox, addr, question).len() as u64);
    let (status, report) = server.end();
    assert!(status.success(), "{status}");
    if let Some(report) = report.as_ref().filter(|report| report.lanes(addr) > 1) {
        assert_eq!(report.delivered(addr), requests, "{report:?}");
    }
    (replies, report, addr)
}

/// Sends queries with dnsperf, the usual benchmark of DNS servers; returns the number of queries.
fn dnsperf(sandbox: &Sandbox, addr: SocketAddr) -> u64 {
    const LOOPS: usize = 50;
    let questions = sandbox.file("questions", &questions());
    let mut dnsperf = sandbox.command(find("dnsperf").unwrap());
    dnsperf.args([
        "-s",
        "127.0.0.1",
        "-p",
        &addr.port().to_string(),
        "-d",
        &questions,
        "-q",
        "64",
        "-c",
        "16",
    ]);
    let said = run_ok({
        dnsperf.args(["-n", &LOOPS.to_string(), "-t", "100"]);
        dnsperf
    });
    let number = |name: &str| -> u64 {
        let line =
            said.lines().find(|line| line.trim().starts_with(name)).unwrap_or_else(|| panic!("{said}"));
        line.split_whitespace().find_map(|word| word.parse().ok()).unwrap()
    };
    let count = (NAMES * LOOPS) as u64;
    assert_eq!((number("Queries sent:"), number("Queries completed:")), (count, count), "{said}");
    count
}

/// Expects the same replies with lanes and without.
fn compare(test: &str, prepare: Prepare, lanes: usize) -> (Report, SocketAddr) {
    compare_with(test, prepare, lanes, &[])
}

/// The same, with options of `manylane run`.
fn compare_with(test: &str, prepare: Prepare, lanes: usize, options: &[&str]) -> (Report, SocketAddr) {
    let sandbox = Sandbox::new(test);
    let (without, _, _) = serve(&sandbox, prepare, lanes, None);
    let (with, report, addr) = serve(&sandbox, prepare, lanes, Some(options));
    assert!(without == with, "replies differ");
    (report.unwrap(), addr)
}

/// Writes the configuration that the command line names: address and threads.
fn configure(sandbox: &Sandbox, name: &str, text: &str, addr: SocketAddr, named: &[(&str, &str)]) -> String {
    sandbox.file("zone", &zone());
    let (ip, port) = (addr.ip().to_string(), addr.port().to_string());
    let at = [("ADDRESS", ip.as_str()), ("PORT", port.as_str())];
    sandbox.filled(name, text, &[&at[..], named].concat())
}

fn nsd(sandbox: &Sandbox, addr: SocketAddr, reuseport: &str) -> Vec<String> {
    let named = [("THREADS", "2"), ("REUSEPORT", reuseport)];
    let configuration = configure(sandbox, "nsd.conf", include_str!("programs/nsd.conf"), addr, &named);
    words("nsd", &["-d", "-c", &configuration])
}

fn knot(sandbox: &Sandbox, addr: SocketAddr) -> Vec<String> {
    let text = include_str!("programs/knot.conf");
    words("knotd", &["-c", &configure(sandbox, "knot.conf", text, addr, &[("THREADS", "2")])])
}

fn unbound(sandbox: &Sandbox, addr: SocketAddr, reuseport: &str) -> Vec<String> {
    let line = |name| format!(" local-data: \"host{name}.example.test. 3600 A 192.0.2.{name}\"\n");
    let data: String = (0..NAMES).map(line).collect();
    let named = [("THREADS", "4"), ("REUSEPORT", reuseport), ("DATA", &data)];
    let configuration =
        configure(sandbox, "unbound.conf", include_str!("programs/unbound.conf"), addr, &named);
    words("unbound", &["-d", "-c", &configuration])
}

/// Takes 5 s: two starts of NSD, without lanes and with them, of more than two seconds each.
#[test]
fn loopback_nsd() {
    if crate::has("loopback_nsd", "nsd", "nsd") {
        compare("nsd", |sandbox, addr| nsd(sandbox, addr, "yes"), 0);
    }
}

/// Then its processes share one socket. Takes 10 s: four starts of NSD.
#[test]
fn loopback_nsd_with_one_socket() {
    if !crate::has("loopback_nsd_with_one_socket", "nsd", "nsd") {
        return;
    }
    for options in [&[][..], &[PREFETCH]] {
        let (report, addr) = compare_with("nsd-one", |sandbox, addr| nsd(sandbox, addr, "no"), 2, options);
        assert_eq!((report.lanes(addr), report.reasons()), (2, vec![]), "{options:?}: {report:?}");
    }
}

/// Takes 5 s, as that of NSD.
#[test]
fn loopback_knot() {
    if crate::has("loopback_knot", "knotd", "knot") {
        compare("knot", knot, 0);
    }
}

#[test]
fn loopback_unbound() {
    if crate::has("loopback_unbound", "unbound", "unbound") {
        compare("unbound", |sandbox, addr| unbound(sandbox, addr, "yes"), 0);
    }
}

#[test]
fn loopback_unbound_with_one_socket() {
    if !crate::has("loopback_unbound_with_one_socket", "unbound", "unbound") {
        return;
    }
    let (report, addr) = compare("unbound-one", |sandbox, addr| unbound(sandbox, addr, "no"), 4);
    assert_eq!(report.lanes(addr), 4, "{report:?}");
}

/// NSD answers every query of a load that is sent as XDP frames, past the sender's stack. Takes 5
/// s: kxdpgun sends for two seconds, and then waits for replies.
#[test]
fn netns_nsd_and_kxdpgun() {
    const TEST: &str = "netns_nsd_and_kxdpgun";
    if !skip::need_root(TEST)
        || !crate::has(TEST, "nsd", "nsd")
        || !crate::has(TEST, "kxdpgun", "knot-dnsutils")
    {
        return;
    }
    // kxdpgun receives replies on as many queues as it has threads.
    let testbed = Testbed::new(&Layout { queues: 1, ipv6: false, ..Layout::default() }).unwrap();
    let sandbox = Sandbox::at("kxdpgun", testbed.host(1));
    let addr = SocketAddr::from((testbed.host(1).ip4(0), 53));
    let mut server = Server::start(&sandbox, &nsd(&sandbox, addr, "yes"), Some(&[]));
    let questions = sandbox.file("questions", &questions());
    let client = Sandbox::at("kxdpgun-client", testbed.host(0));
    server.answer(&client, addr, &question(0));
    let mut kxdpgun = client.command(find("kxdpgun").unwrap());
    kxdpgun.args(["-t", "2", "-Q", "2000", "-i", &questions, "-I", testbed.host(0).device(0)]);
    let said = run_ok({
        kxdpgun.arg(addr.ip().to_string());
        kxdpgun
    });
    let number = |name: &str| -> u64 {
        let line = said.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{said}"));
        line.split_whitespace().find_map(|word| word.parse().ok()).unwrap()
    };
    assert!(number("total queries:") > 0, "{said}");
    assert_eq!(number("total replies:"), number("total queries:"), "{said}");
    let (status, report) = server.end();
    assert!(status.success(), "{status}");
    assert!(report.unwrap().0["processes"].as_u64() > Some(0));
}
