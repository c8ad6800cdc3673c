//! Floods of SYNs from random sources to a lane of TCP, beside regular clients. One test, because
//! the memory is that of the process, and the machine is busy with the flood.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "netns/xdp_tcp_support.rs"]
mod xdp_tcp_support;

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use manylane::tcp::{Levels, StackConfig, TcpCounters};
use manylane_measure::Until;
use manylane_testbed::generator::LiveSender;
use manylane_testbed::{Host, Layout, Testbed, skip};
use manylane_tests::TEST_TIMEOUT;

use crate::xdp_tcp_support::{Lanes, TICK, echo_until};

const PORT: u16 = 4280;
/// SYNs per second, and in all. A machine that is too busy drops some, which count as sent.
const RATE: f64 = 500_000.0;
const SYNS: u64 = 1_500_000;
/// Threads of regular clients, one connection after the other each.
const CLIENTS: usize = 8;
const BACKLOG: usize = 256;
/// Growth of the process that is no growth with the flood: a SYN that is kept takes 100 bytes.
const GROWTH_MAX: usize = 16 << 20;
/// What makes the kernel resolve neighbours: at once, and per second.
const RESOLVED_AT_ONCE: u64 = 128;
const RESOLVED_PER_SECOND: u64 = 64;

/// A connection of a regular client: it is accepted, and gets an answer.
fn ask(server: SocketAddr) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&server, TEST_TIMEOUT)?;
    stream.set_read_timeout(Some(TEST_TIMEOUT))?;
    let mut answer = [0; 4];
    stream.write_all(b"here")?;
    stream.read_exact(&mut answer)?;
    assert_eq!(&answer, b"here");
    Ok(())
}

/// Connections until `is_over`, and how many of them failed.
fn ask_until(server: SocketAddr, is_over: &AtomicBool) -> (u64, u64) {
    let (mut asked, mut failed) = (0, 0);
    while !is_over.load(Ordering::Relaxed) {
        asked += 1;
        failed += u64::from(ask(server).is_err());
    }
    (asked, failed)
}

/// Memory of this process, in bytes.
fn resident() -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() * 1024
}

/// Neighbours of a host that are not permanent.
fn neighbours(host: &Host) -> u64 {
    let shown = host.output("ip", &["-4", "neigh", "show", "nud", "all"]).unwrap();
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    text.lines().filter(|line| !line.contains("PERMANENT") && !line.contains("NOARP")).count() as u64
}

/// Floods a lane with SYNs from addresses within a prefix, and checks what holds in any case.
/// Returns its counters, and how many packets may have made the kernel resolve neighbours.
fn flood(testbed: &Testbed, sources: (Ipv4Addr, u8)) -> (TcpCounters, u64) {
    let (linux, host) = (testbed.host(0), testbed.host(1));
    let server = SocketAddrV4::new(host.ip4(0), PORT);
    let highest = Arc::new(Mutex::new(Levels::default()));
    let seen = Arc::clone(&highest);
    let config = StackConfig { backlog: BACKLOG, ..StackConfig::default() };
    let opened = Instant::now();
    let lanes = Lanes::start(
        host,
        |builder| _ = builder.listen(server).unwrap().stack(config),
        move |lane, end| {
            echo_until(lane, end, |lane| {
                lane.wait(TICK).unwrap();
                let (now, mut seen) = (lane.levels(), seen.lock().unwrap());
                seen.backlog = seen.backlog.max(now.backlog);
            });
        },
    );
    linux.run(|| ask(server.into())).unwrap();
    let mut sender = LiveSender::syn_flood(linux, host, 0, server, sources, Some(RATE)).unwrap();
    let (is_over, before) = (AtomicBool::new(false), resident());
    let client = || linux.run(|| ask_until(server.into(), &is_over));
    let (sent, asked, failed) = thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS).map(|_| scope.spawn(client)).collect();
        let sent = sender.send(Until::Count(SYNS));
        is_over.store(true, Ordering::Relaxed);
        let results = clients.into_iter().map(|client| client.join().unwrap());
        let (asked, failed) = results.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        (sent.unwrap(), asked, failed)
    });
    let grown = resident().saturating_sub(before);
    let resolved = neighbours(host);
    let counters = lanes.stop().remove(0);
    let may_resolve = RESOLVED_AT_ONCE + RESOLVED_PER_SECOND * (opened.elapsed().as_secs() + 1);
    let seen = format!(
        "{:.0} SYNs per second, {} delivered; {failed} of {asked} connections failed; \
         {resolved} neighbours, {grown} bytes more: {counters:#?}",
        sent.pps(),
        sent.datagrams
    );
    println!("{seen}");
    assert!(failed * 100 <= asked && asked >= CLIENTS as u64, "{seen}");
    assert_eq!(highest.lock().unwrap().backlog, BACKLOG, "{seen}");
    assert!(counters.stack.cookies_sent > SYNS / 100, "{seen}");
    assert!(grown < GROWTH_MAX, "{seen}");
    assert!(resolved <= may_resolve, "{seen}");
    (counters, may_resolve)
}

#[test]
fn netns_tcp_lane_survives_floods_of_syns() {
    if !skip::need_live_sender("netns_tcp_lane_survives_floods_of_syns") {
        return;
    }
    let testbed = Testbed::new(&Layout { queues: 1, ipv6: false, ..Layout::default() }).unwrap();
    let (linux, host) = (testbed.host(0), testbed.host(1));
    // Behind a gateway, which is known: none is left to the kernel, but before routes are known.
    host.ip_batch(&format!("route add default via {}\n", linux.ip4(0))).unwrap();
    let (counters, _) = flood(&testbed, ([5, 0, 0, 0].into(), 8));
    assert!(counters.sent_by_kernel <= 100 && counters.unresolved == 0, "{counters:#?}");
    // On the link: no host has these addresses.
    host.ip_batch(&format!("route add 10.78.0.0/16 dev {}\n", host.device(0))).unwrap();
    let (counters, may_resolve) = flood(&testbed, ([10, 78, 0, 0].into(), 16));
    assert!(counters.sent_by_kernel + counters.unsent <= 100 + may_resolve, "{counters:#?}");
    assert!(counters.unresolved > SYNS / 100, "{counters:#?}");
}
