//! Table 1: datagrams per second that reach the application when as many are sent as the generator can make.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use manylane::{Steering, WaitPolicy};
use manylane_sys::{cpu, numa};

use super::TABLE_1;
use crate::bench::{self, Load, RING, Setup};
use crate::lab::nodes::{self, Choice, Node};
use crate::lab::{Places, Row};
use crate::receiver::{Kind, ReceiverOptions, Running, Work};
use crate::toil::Toil;

pub(super) const DEFAULT: &str = "default";
pub(super) const NUMA: &str = "NUMA";
/// Not of the paper: what it costs to be bound to the wrong node.
pub(super) const FAR: &str = "NUMA, other node";
pub(super) const ADDRESSES: &str = "multiple IP";
pub(super) const THREADS: &str = "multiple thread";
pub(super) const BOUND: &str = "binding port";

/// Payload of the paper's kind of test program.
const SIZE: usize = 10;
/// Sources: enough for two sockets to get some each.
const FLOWS: u16 = 64;

/// A method: its column, the receiver, threads, addresses that are received on by a socket each.
type Method = (&'static str, Kind, usize, usize);

const METHODS: [Method; 7] = [
    (DEFAULT, Kind::SocketRecvfrom, 1, 1),
    (ADDRESSES, Kind::SocketRecvfrom, 1, 2),
    (THREADS, Kind::SocketRecvfrom, 2, 1),
    (BOUND, Kind::ReuseportRecvmmsg, 2, 1),
    ("lane/mmsg", Kind::LaneMmsg, 2, 1),
    ("lane/uring", Kind::LaneUring, 2, 1),
    ("lane/xdp", Kind::LaneXdp, 2, 1),
];

/// Columns of what is ours.
pub(super) const LANES: [&str; 3] = ["lane/mmsg", "lane/uring", "lane/xdp"];

/// A cell of a run: its column, the method, and for NUMA which node it is bound to.
type Cell = (&'static str, Method, Option<fn(Choice) -> Result<Node, String>>);

/// All cells of a run, in the paper's order.
fn cells() -> Vec<Cell> {
    let mut cells: Vec<Cell> = METHODS.map(|method| (method.0, method, None)).to_vec();
    let nodes: [Cell; 2] = [
        (NUMA, METHODS[0], Some(|choice: Choice| choice.near)),
        (FAR, METHODS[0], Some(|choice: Choice| choice.far)),
    ];
    cells.splice(1..1, nodes);
    cells
}

/// One run of all methods. Each run begins with another one, so that none is always the first or behind the same one.
pub(super) fn rows(places: &mut Places, run: &str, stop: &AtomicBool) -> Result<Vec<Row>> {
    let stretch = Duration::from_millis(places.scale.stretch_ms);
    let cells = cells();
    let mut rows = Vec::new();
    for index in order(run, cells.len()) {
        bench::go_on(stop)?;
        let (column, method, node) = cells[index];
        let setup = if method.3 > 1 { places.two_links() } else { places.testbed() };
        let got = setup.and_then(|setup| {
            let node = node.map(|pick| pick(choice(setup)).map_err(|why| anyhow!(why))).transpose()?;
            rate(setup, method, node.as_ref(), stretch)
        });
        rows.push((index, row(run, column, got)));
    }
    rows.sort_by_key(|(index, _)| *index);
    Ok(rows.into_iter().map(|(_, row)| row).collect())
}

/// The order of so many cells in a run: from its own number on, and around.
fn order(run: &str, count: usize) -> impl Iterator<Item = usize> {
    let first = run.parse::<usize>().unwrap_or(1).saturating_sub(1);
    (0..count).map(move |place| (first + place) % count)
}

fn row(run: &str, column: &str, got: Result<Rate>) -> Row {
    match got {
        Ok(got) => {
            let counts = [("sent", got.sent), ("delivered", got.delivered), ("dropped", got.dropped)];
            Row::new(TABLE_1, run, column, "1/s", vec![got.pps]).with(&counts)
        }
        Err(err) => Row::cannot(TABLE_1, run, column, "1/s", &format!("{err:#}")),
    }
}

/// The nodes that the default is bound to.
fn choice(setup: &Setup) -> Choice {
    let nodes = nodes::read(Path::new(nodes::FOLDER));
    let device_cpu = setup.sender_cpu().or(setup.receiver_cpus().first().copied()).unwrap_or_default();
    nodes::choose(&nodes, device_cpu, setup.receiver_cpus())
}

/// Starts a receiver, bound to a node as `numactl --membind --cpunodebind` does: what its threads touch first is memory of the node, and
/// they run on any of its processors.
fn bound(setup: &Setup, kind: Kind, options: &ReceiverOptions, node: &Node) -> Result<Box<dyn Running>> {
    // Threads have both from the one that starts them.
    thread::scope(|scope| {
        let starter = scope.spawn(|| {
            cpu::restrict(&node.cpus)
                .with_context(|| format!("cannot run on the processors of node {}", node.number))?;
            numa::bind_memory(&[node.number])
                .with_context(|| format!("cannot bind memory to node {} (set_mempolicy)", node.number))?;
            let inherited = setup.inside(|| (numa::bound_memory(), cpu::affinity()));
            ensure!(
                inherited.0? == [node.number] && inherited.1? == node.cpus,
                "threads of the receiver are not bound to node {}",
                node.number
            );
            setup.start(kind, &ReceiverOptions { cpus: Vec::new(), ..options.clone() })
        });
        starter.join().map_err(|_| anyhow!("the receiver's start panicked"))?
    })
}

#[derive(Debug, Clone, Copy)]
struct Rate {
    pps: f64,
    sent: u64,
    delivered: u64,
    dropped: u64,
}

fn rate(
    setup: &mut Setup,
    (_, kind, threads, addresses): Method,
    node: Option<&Node>,
    stretch: Duration,
) -> Result<Rate> {
    let port = setup.bind_addr().port();
    let mut running: Vec<Box<dyn Running>> = Vec::new();
    for address in 0..addresses {
        let addr: SocketAddr = match (addresses, setup.hosts()) {
            (2.., Some((_, host))) => (host.ip4(address), port).into(),
            _ => setup.bind_addr(),
        };
        let cpus = setup.receiver_cpus().to_vec();
        let options = ReceiverOptions {
            addr,
            work: Work::Count,
            toil: Toil::default(),
            threads,
            batch: 64,
            recv_buffer: bench::usual_recv_buffer(),
            size: SIZE,
            linger: manylane::Builder::default_linger(threads, cpus.len().max(1)),
            cpus,
            devices: setup.device_names(),
            ring: RING,
            wait: WaitPolicy::Sleep,
            steering: Steering::Flow,
        };
        running.push(match node {
            Some(node) => bound(setup, kind, &options, node)?,
            None => setup.start(kind, &options)?,
        });
    }
    let to = running[0].addr();
    let load = Load { pps: None, duration: stretch, size: SIZE, flows: FLOWS, segment: false };
    let warm = setup.send(to, &Load { duration: stretch / 5, ..load })?;
    let (sent, pps) = thread::scope(|scope| {
        let sender = scope.spawn(|| setup.send(to, &load));
        let pps = rate_inside(&running, stretch);
        (sender.join(), pps)
    });
    let sent = sent.map_err(|_| anyhow!("the sender panicked"))??;
    rest(&running);
    let (mut delivered, mut dropped) = (0, 0);
    for receiver in running {
        let end = receiver.stop()?;
        delivered += end.delivered;
        dropped += end.kernel_dropped;
    }
    Ok(Rate { pps, sent: sent.datagrams + warm.datagrams, delivered, dropped })
}

fn delivered(running: &[Box<dyn Running>]) -> u64 {
    running.iter().map(|receiver| receiver.snapshot().delivered).sum()
}

/// In the middle of the stretch: neither its first moments count nor the queue that is emptied after its end.
fn rate_inside(running: &[Box<dyn Running>], stretch: Duration) -> f64 {
    thread::sleep(stretch.mul_f64(0.3));
    let (start, before) = (Instant::now(), delivered(running));
    thread::sleep(stretch.mul_f64(0.6));
    (delivered(running) - before) as f64 / start.elapsed().as_secs_f64().max(1e-9)
}

/// Until nothing comes any more.
fn rest(running: &[Box<dyn Running>]) {
    const QUIET: Duration = Duration::from_millis(50);
    let mut last = (delivered(running), Instant::now());
    while last.1.elapsed() < QUIET {
        thread::sleep(Duration::from_millis(2));
        let now = delivered(running);
        if now != last.0 {
            last = (now, Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_begin_with_different_methods_and_have_all() {
        let columns: Vec<&str> = cells().iter().map(|cell| cell.0).collect();
        assert_eq!(columns[..4], [DEFAULT, NUMA, FAR, ADDRESSES]);
        assert_eq!(columns[4..], [THREADS, BOUND, "lane/mmsg", "lane/uring", "lane/xdp"]);
        assert_eq!(order("1", 4).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(order("4", 4).collect::<Vec<_>>(), [3, 0, 1, 2]);
        assert_eq!(order("9", 4).collect::<Vec<_>>(), [0, 1, 2, 3]);
    }

    #[test]
    fn loopback_a_receiver_that_is_bound_to_a_node_takes_what_comes() {
        let mut setup = Setup::loopback(None).unwrap();
        let Ok(node) = choice(&setup).near else {
            eprintln!("skipped: no NUMA node here has a processor for receivers");
            return;
        };
        if let Err(err) = thread::spawn(|| numa::bind_memory(&[0])).join().unwrap() {
            eprintln!("skipped: no memory can be bound here ({err})");
            return;
        }
        let got = rate(&mut setup, METHODS[0], Some(&node), Duration::from_millis(100)).unwrap();
        assert!(got.delivered > 0 && got.delivered + got.dropped <= got.sent, "{got:?}");
        // Only those that the receiver started are bound.
        assert_eq!(numa::bound_memory().unwrap(), Vec::<usize>::new());
        let nowhere = Node { number: 1000, cpus: node.cpus };
        let why = rate(&mut setup, METHODS[0], Some(&nowhere), Duration::from_millis(10)).unwrap_err();
        assert!(why.to_string().contains("cannot bind memory to node 1000"), "{why:#}");
    }
}
