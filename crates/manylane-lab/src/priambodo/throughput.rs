//! Table 1: datagrams per second that reach the application when the generator sends as fast as it
//! can.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use manylane_bench::receivers::{Kind, ReceiverOptions, RunningReceiver, fixed_delay};
use manylane_bench::{self as bench, Load, Setup};
use manylane_sys::{cpu, numa};

use crate::numa_nodes::{self, NodeChoice, NumaNode};
use crate::part::Setups;
use crate::row::Row;

/// Name of the table.
pub(super) const TABLE_1: &str = "table 1";

pub(super) const DEFAULT: &str = "default";
pub(super) const NUMA: &str = "NUMA";
/// Not in the paper: the cost of being bound to the wrong node.
pub(super) const NUMA_REMOTE: &str = "NUMA, other node";
pub(super) const ADDRESSES: &str = "multiple IP";
pub(super) const THREADS: &str = "multiple thread";
pub(super) const PORT_BINDING: &str = "binding port";

/// Bytes of payload, as in the paper's kind of test program.
const PAYLOAD_SIZE: usize = 10;
/// Number of flows: enough for two sockets to get some each.
const FLOWS: u16 = 64;

/// A method: its column, the receiver, threads, and the addresses with a socket each.
type Method = (&'static str, Kind, usize, usize);

const METHODS: [Method; 7] = [
    (DEFAULT, Kind::SocketRecvfrom, 1, 1),
    (ADDRESSES, Kind::SocketRecvfrom, 1, 2),
    (THREADS, Kind::SocketRecvfrom, 2, 1),
    (PORT_BINDING, Kind::ReuseportRecvmmsg, 2, 1),
    ("lane/mmsg", Kind::LaneMmsg, 2, 1),
    ("lane/uring", Kind::LaneUring, 2, 1),
    ("lane/xdp", Kind::LaneXdp, 2, 1),
];

/// A cell of a run: its column, the method, and for NUMA the node.
type Cell = (&'static str, Method, Option<fn(NodeChoice) -> Result<NumaNode, String>>);

/// All cells of a run, in the paper's order.
fn cells() -> Vec<Cell> {
    let mut cells: Vec<Cell> = METHODS.map(|method| (method.0, method, None)).to_vec();
    let nodes: [Cell; 2] = [
        (NUMA, METHODS[0], Some(|choice: NodeChoice| choice.local)),
        (NUMA_REMOTE, METHODS[0], Some(|choice: NodeChoice| choice.remote)),
    ];
    cells.splice(1..1, nodes);
    cells
}

/// One run of all methods. Each run starts with another method, so that none is always first or
/// after the same one.
pub(super) fn rows(places: &mut Setups, run: &str, stop: &AtomicBool) -> Result<Vec<Row>> {
    let duration = Duration::from_millis(places.scale.sample_ms);
    let cells = cells();
    let mut rows = Vec::new();
    for index in cell_order(run, cells.len()) {
        bench::check_stop(stop)?;
        let (column, method, node) = cells[index];
        let setup = if method.3 > 1 { places.two_links() } else { places.testbed() };
        let got = setup.and_then(|setup| {
            let node = node.map(|pick| pick(node_choice(setup)).map_err(|why| anyhow!(why))).transpose()?;
            measure_rate(setup, method, node.as_ref(), duration)
        });
        rows.push((index, row(run, column, got)));
    }
    rows.sort_by_key(|(index, _)| *index);
    Ok(rows.into_iter().map(|(_, row)| row).collect())
}

/// The order of cells in a run: rotated by its number.
fn cell_order(run: &str, count: usize) -> impl Iterator<Item = usize> {
    let first = run.parse::<usize>().unwrap_or(1).saturating_sub(1);
    (0..count).map(move |place| (first + place) % count)
}

fn row(run: &str, column: &str, got: Result<RateSample>) -> Row {
    let counts = got.as_ref().map_or_else(
        |_| Vec::new(),
        |got| vec![("sent", got.sent), ("delivered", got.delivered), ("dropped", got.dropped)],
    );
    Row::measured(TABLE_1, run, column, "1/s", got.map(|got| got.pps)).with_counts(&counts)
}

/// The nodes that the default is bound to.
fn node_choice(setup: &Setup) -> NodeChoice {
    let nodes = numa_nodes::read_nodes(Path::new(numa_nodes::SYSFS_DIR));
    let device_cpu = setup.sender_cpu().or(setup.receiver_cpus().first().copied()).unwrap_or_default();
    numa_nodes::choose_nodes(&nodes, device_cpu, setup.receiver_cpus())
}

/// Starts a receiver, bound to a node as by `numactl --membind --cpunodebind`: memory that its
/// threads touch first is of the node, and they run on any of its CPUs.
fn start_on_node(
    setup: &Setup,
    kind: Kind,
    options: &ReceiverOptions,
    node: &NumaNode,
) -> Result<Box<dyn RunningReceiver>> {
    // Threads inherit both.
    thread::scope(|scope| {
        let starter = scope.spawn(|| {
            cpu::set_affinity(&node.cpus)
                .with_context(|| format!("cannot run on the CPUs of node {}", node.id))?;
            numa::bind_memory(&[node.id])
                .with_context(|| format!("cannot bind memory to node {} (set_mempolicy)", node.id))?;
            let inherited = setup.run_at_receiver(|| (numa::bound_nodes(), cpu::affinity()));
            ensure!(
                inherited.0? == [node.id] && inherited.1? == node.cpus,
                "threads of the receiver are not bound to node {}",
                node.id
            );
            setup.start(kind, &ReceiverOptions { cpus: Vec::new(), ..options.clone() })
        });
        starter.join().map_err(|_| anyhow!("the receiver's start panicked"))?
    })
}

#[derive(Debug, Clone, Copy)]
struct RateSample {
    pps: f64,
    sent: u64,
    delivered: u64,
    dropped: u64,
}

fn measure_rate(
    setup: &mut Setup,
    (_, kind, threads, addresses): Method,
    node: Option<&NumaNode>,
    duration: Duration,
) -> Result<RateSample> {
    let port = setup.bind_addr().port();
    let mut running: Vec<Box<dyn RunningReceiver>> = Vec::new();
    for address in 0..addresses {
        let addr: SocketAddr = match (addresses, setup.hosts()) {
            (2.., Some((_, host))) => (host.ip4(address), port).into(),
            _ => setup.bind_addr(),
        };
        let cpus = setup.receiver_cpus().len().max(1);
        let rx_coalesce = Some(fixed_delay(false, threads, cpus));
        let options = ReceiverOptions { addr, rx_coalesce, ..setup.receiver(threads, PAYLOAD_SIZE) };
        running.push(match node {
            Some(node) => start_on_node(setup, kind, &options, node)?,
            None => setup.start(kind, &options)?,
        });
    }
    let to = running[0].addr();
    let load = Load { pps: None, duration, size: PAYLOAD_SIZE, flows: FLOWS, gso: false };
    let warm = setup.send(to, &Load { duration: duration / 5, ..load })?;
    let (sent, pps) = thread::scope(|scope| {
        let sender = scope.spawn(|| setup.send(to, &load));
        let pps = steady_rate(&running, duration);
        (sender.join(), pps)
    });
    let sent = sent.map_err(|_| anyhow!("the sender panicked"))??;
    wait_drained(&running);
    let (mut delivered, mut dropped) = (0, 0);
    for receiver in running {
        let end = receiver.stop()?;
        delivered += end.delivered;
        dropped += end.kernel_dropped;
    }
    Ok(RateSample { pps, sent: sent.datagrams + warm.datagrams, delivered, dropped })
}

fn total_delivered(running: &[Box<dyn RunningReceiver>]) -> u64 {
    running.iter().map(|receiver| receiver.snapshot().delivered).sum()
}

/// Measured in the middle of the traffic, without its first moments and without the queue that is
/// drained after its end.
fn steady_rate(running: &[Box<dyn RunningReceiver>], duration: Duration) -> f64 {
    thread::sleep(duration.mul_f64(0.3));
    let (start, before) = (Instant::now(), total_delivered(running));
    thread::sleep(duration.mul_f64(0.6));
    (total_delivered(running) - before) as f64 / start.elapsed().as_secs_f64().max(1e-9)
}

/// Until no more datagrams arrive.
fn wait_drained(running: &[Box<dyn RunningReceiver>]) {
    const IDLE_TIMEOUT: Duration = Duration::from_millis(50);
    let mut last = (total_delivered(running), Instant::now());
    while last.1.elapsed() < IDLE_TIMEOUT {
        thread::sleep(Duration::from_millis(2));
        let now = total_delivered(running);
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
        assert_eq!(columns[..4], [DEFAULT, NUMA, NUMA_REMOTE, ADDRESSES]);
        assert_eq!(columns[4..], [THREADS, PORT_BINDING, "lane/mmsg", "lane/uring", "lane/xdp"]);
        assert_eq!(cell_order("1", 4).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert_eq!(cell_order("4", 4).collect::<Vec<_>>(), [3, 0, 1, 2]);
        assert_eq!(cell_order("9", 4).collect::<Vec<_>>(), [0, 1, 2, 3]);
    }

    #[test]
    fn loopback_a_numa_bound_receiver_receives_all() {
        let mut setup = Setup::loopback(None);
        let Ok(node) = node_choice(&setup).local else {
            eprintln!("skipped: no NUMA node here has a CPU for receivers");
            return;
        };
        if let Err(err) = thread::spawn(|| numa::bind_memory(&[0])).join().unwrap() {
            eprintln!("skipped: cannot bind memory ({err})");
            return;
        }
        let mut measure =
            || measure_rate(&mut setup, METHODS[0], Some(&node), Duration::from_millis(100)).unwrap();
        // Again, as long as the receiver had no CPU.
        let got =
            (0..10).map(|_| measure()).find(|got| got.delivered > 0).expect("a datagram in ten samples");
        assert!(got.delivered > 0 && got.delivered + got.dropped <= got.sent, "{got:?}");
        // Only the receiver's threads are bound.
        assert_eq!(numa::bound_nodes().unwrap(), Vec::<usize>::new());
        let nowhere = NumaNode { id: 1000, cpus: node.cpus };
        let why =
            measure_rate(&mut setup, METHODS[0], Some(&nowhere), Duration::from_millis(10)).unwrap_err();
        assert!(why.to_string().contains("cannot bind memory to node 1000"), "{why:#}");
    }
}
