//! TCP of a lane against the kernel's, over a link that loses, duplicates and reorders frames.
//! Every byte arrives once and in order.

use std::fs;
use std::net::{IpAddr, TcpListener};

use manylane_tcp::congestion::Algorithm;
use manylane_tcp::congestion::NewController;
use manylane_tcp::{Config, Counters};
use manylane_testbed::{Host, Layout, Testbed};
use manylane_tests::tcp_peer::{echo, pattern};

use crate::tcp_support::{Faults, StackHost, Use, kernel_clients};
use crate::xdp_support::testbed;

/// Two hosts: Linux on the first one, a stack on the second one.
fn hosts(name: &str) -> Option<Testbed> {
    let testbed = testbed(name, &Layout { queues: 1, ..Layout::default() })?;
    // As over a wire: one frame for each segment, with its checksum.
    testbed.host(0).set_checksums(0, false).unwrap();
    testbed.host(1).set_gro(0, false).unwrap();
    Some(testbed)
}

/// Runs clients of the kernel against an echo server of the stack. Returns its counters, and the
/// number of segments that the clients have sent again.
fn serve(
    name: &str,
    ipv6: bool,
    faults: Faults,
    controller: NewController,
    (threads, each, length): (usize, usize, usize),
) -> Option<(Counters, u64)> {
    let testbed = hosts(name)?;
    let (linux, host) = (testbed.host(0), testbed.host(1));
    let config = Config { controller, ..Config::default() };
    let stack = StackHost::start(linux, host, ipv6, config, faults, Use::Echo);
    kernel_clients(linux, stack.address, threads, each, length);
    let (counters, levels) = stack.stop();
    let connections = (threads * each) as u64;
    assert_eq!(counters.accepted, connections, "{counters:?}");
    assert_eq!(levels.connections, 0, "{levels:?}");
    Some((counters, sent_again(linux)))
}

/// Segments that the kernel of `host` has sent again.
fn sent_again(host: &Host) -> u64 {
    let text = host.run(|| fs::read_to_string("/proc/thread-self/net/snmp")).unwrap();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let named = names.split(' ').zip(values.split(' ')).find(|(name, _)| *name == "RetransSegs");
    named.unwrap().1.parse().unwrap()
}

fn cubic(mss: u16) -> Box<dyn manylane_tcp::congestion::Controller> {
    Algorithm::Cubic.controller(mss)
}

fn bbr(mss: u16) -> Box<dyn manylane_tcp::congestion::Controller> {
    Algorithm::Bbr.controller(mss)
}

fn new_reno(mss: u16) -> Box<dyn manylane_tcp::congestion::Controller> {
    Algorithm::NewReno.controller(mss)
}

#[test]
fn netns_tcp_serves_a_thousand_connections_of_linux() {
    let name = "netns_tcp_serves_a_thousand_connections_of_linux";
    let result = serve(name, false, Faults::none(), cubic, (20, 50, 2000));
    let Some((counters, sent_again)) = result else { return };
    // If one side was held up, what was sent again, or the answer to it, may come when the
    // connection is over.
    assert!(counters.resets_sent <= counters.retransmitted + sent_again, "{sent_again} {counters:?}");
    assert_eq!(counters.dropped_checksum, 0, "{counters:?}");
}

#[test]
fn netns_tcp_serves_linux_over_ipv6() {
    serve("netns_tcp_serves_linux_over_ipv6", true, Faults::none(), cubic, (4, 1, 2_000_000));
}

#[test]
fn netns_tcp_survives_little_loss() {
    serve("netns_tcp_survives_little_loss", false, Faults::permille(1), cubic, (20, 1, 300_000));
}

#[test]
fn netns_tcp_survives_loss() {
    serve("netns_tcp_survives_loss", true, Faults::permille(10), new_reno, (20, 1, 200_000));
}

#[test]
fn netns_tcp_serves_a_thousand_connections_in_spite_of_loss() {
    let name = "netns_tcp_serves_a_thousand_connections_in_spite_of_loss";
    serve(name, false, Faults::permille(10), cubic, (40, 25, 2000));
}

#[test]
fn netns_tcp_survives_much_loss() {
    serve("netns_tcp_survives_much_loss", false, Faults::permille(50), bbr, (20, 2, 30_000));
}

/// The stack connects, and the kernel answers.
fn connect(name: &str, ipv6: bool, faults: Faults, connections: usize, length: usize) {
    let Some(testbed) = hosts(name) else { return };
    let (linux, host) = (testbed.host(0), testbed.host(1));
    let ip: IpAddr = linux.ip(0, ipv6);
    let listener = linux.run(|| TcpListener::bind((ip, 0)).unwrap());
    let server = listener.local_addr().unwrap();
    let echo = echo(listener, connections);
    let data = (0..connections).map(|connection| pattern(connection, length)).collect();
    let stack = StackHost::start(linux, host, ipv6, Config::default(), faults, Use::Ask { server, data });
    let (counters, levels) = stack.wait();
    echo.join().unwrap();
    assert_eq!((counters.connected, levels.connections), (connections as u64, 0), "{counters:?} {levels:?}");
    // It has closed first.
    assert_eq!(levels.time_wait, connections, "{levels:?}");
}

#[test]
fn netns_tcp_connects_to_linux() {
    connect("netns_tcp_connects_to_linux", false, Faults::none(), 100, 50_000);
}

#[test]
fn netns_tcp_connects_to_linux_in_spite_of_loss() {
    connect("netns_tcp_connects_to_linux_in_spite_of_loss", true, Faults::permille(50), 20, 30_000);
}
