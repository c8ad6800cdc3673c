//! Floods of SYNs from random sources to lanes of TCP, beside regular clients.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use manylane::tcp::{Levels, StackConfig};
use manylane_measure::Until;
use manylane_testbed::generator::LiveSender;
use manylane_testbed::{Host, Testbed};

use crate::xdp_support::{ipv4_layout, testbed_of_live_sender};
use crate::xdp_tcp_support::{Lanes, TICK, echo_until};

const PORT: u16 = 4280;
/// SYNs per second. A machine that cannot send as many sends what it can.
const RATE: f64 = 500_000.0;
const THREADS: usize = 8;
const SYNS: u64 = 1_500_000;

/// One connection of a regular client: it is accepted and gets an answer.
fn ask(server: SocketAddr) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&server, Duration::from_secs(20))?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    let mut answer = [0; 4];
    stream.write_all(b"here")?;
    stream.read_exact(&mut answer)?;
    assert_eq!(&answer, b"here");
    Ok(())
}

/// Memory of this process, in bytes.
fn resident() -> usize {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    pages.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// Neighbours of a host that are neither permanent nor known to have none.
fn neighbours(host: &Host) -> usize {
    let shown = host.output("ip", &["neigh", "show", "nud", "all"]).unwrap();
    String::from_utf8_lossy(&shown.stdout).lines().filter(|line| line.contains("10.78.")).count()
}

fn flood(testbed: &Testbed, sources: (Ipv4Addr, u8)) {
    let (linux, host) = (testbed.host(0), testbed.host(1));
    let server = SocketAddrV4::new(host.ip4(0), PORT);
    let highest = Arc::new(Mutex::new(Levels::default()));
    let seen = Arc::clone(&highest);
    let lanes = Lanes::start(
        host,
        |builder| {
            _ = builder.listen(server).unwrap().stack(StackConfig { backlog: 256, ..StackConfig::default() });
        },
        move |lane, end| {
            echo_until(lane, end, |lane| {
                lane.wait(TICK).unwrap();
                let (now, mut seen) = (lane.levels(), seen.lock().unwrap());
                seen.connections = seen.connections.max(now.connections);
                seen.backlog = seen.backlog.max(now.backlog);
                seen.buffers = seen.buffers.max(now.buffers);
            });
        },
    );
    linux.run(|| ask(server.into())).unwrap();
    let mut sender = LiveSender::syn_flood(linux, host, 0, server, sources, Some(RATE)).unwrap();
    let is_over = AtomicBool::new(false);
    let before = resident();
    let (sent, asked, failed) = thread::scope(|scope| {
        let client = || {
            linux.run(|| {
                let (mut asked, mut failed) = (0, 0);
                while !is_over.load(Ordering::Relaxed) {
                    asked += 1;
                    failed += u64::from(ask(server.into()).is_err());
                }
                (asked, failed)
            })
        };
        let clients: Vec<_> = (0..THREADS).map(|_| scope.spawn(client)).collect();
        let sent = sender.send(Until::Count(SYNS)).unwrap();
        eprintln!("neighbours {}", neighbours(host));
        is_over.store(true, Ordering::Relaxed);
        let (mut asked, mut failed) = (0, 0);
        for client in clients {
            let (more, bad) = client.join().unwrap();
            (asked, failed) = (asked + more, failed + bad);
        }
        (sent, asked, failed)
    });
    let grown = resident().saturating_sub(before);
    let levels = *highest.lock().unwrap();
    eprintln!("{:.0} SYNs/s, late {:?}, {} {} {grown} {failed}/{asked}", sent.pps(), sent.late, sent.datagrams, sent.rejected);
    let counters = lanes.stop();
    eprintln!("{levels:?} {counters:#?}");
}

#[test]
fn netns_tcp_lane_survives_a_flood_through_a_gateway() {
    let Some(testbed) =
        testbed_of_live_sender("netns_tcp_lane_survives_a_flood_through_a_gateway", &ipv4_layout(1))
    else {
        return;
    };
    let (linux, host) = (testbed.host(0), testbed.host(1));
    host.ip_batch(&format!("route add default via {}\n", linux.ip4(0))).unwrap();
    flood(&testbed, ([5, 0, 0, 0].into(), 8));
}

#[test]
fn netns_tcp_lane_survives_a_flood_of_neighbours() {
    let Some(testbed) =
        testbed_of_live_sender("netns_tcp_lane_survives_a_flood_of_neighbours", &ipv4_layout(1))
    else {
        return;
    };
    let host = testbed.host(1);
    host.ip_batch(&format!("route add 10.78.0.0/16 dev {}\n", host.device(0))).unwrap();
    flood(&testbed, ([10, 78, 0, 0].into(), 16));
}
