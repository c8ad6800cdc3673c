//! Lanes of engine `xdp` share no cache line that one of them writes, and a datagram costs the same
//! number of instructions with any number of lanes and peers. As `loopback_shared_lines`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod trace_support;

use std::collections::HashMap;
use std::thread;

use manylane::{Engine, LaneId, SteeringBackend};
use manylane_testbed::skip;
use manylane_tests::{Client, LaneDriver, Variant, retry_eintr, send_and_wait};
use trace_support::{BATCH, BATCHES, answer_batches, check, is_traced, trace_lanes};

const TEST: &str = "netns_xdp_lanes_share_no_written_line";

/// Peers of each lane.
const PEERS: usize = 4;

/// Lanes of a socket, each with a queue of its own. 64 take some minutes more: only where there are
/// CPUs for some of them.
fn sizes() -> [u32; 2] {
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    [1, if cpus < 8 { 16 } else { 64 }]
}

#[test]
fn netns_xdp_lanes_share_no_written_line() {
    // Not in the traced process, because the probe would take most of the trace.
    let can_run = is_traced() || skip::need_root(TEST);
    if !can_run {
        return;
    }
    let run = || sizes().into_iter().for_each(|lanes| variant(lanes).run(answer_peers));
    if let Some(phases) = trace_lanes(TEST, run) {
        check(Engine::Xdp, &sizes().map(|lanes| lanes as usize), &phases);
    }
}

fn variant(queues: u32) -> Variant {
    // Companions without eBPF, whose loading would take most of the trace.
    Variant { by: SteeringBackend::Kernel, ..Variant::new(TEST, Engine::Xdp, queues) }
}

/// Lets one lane of a socket after the other answer datagrams of its peers.
fn answer_peers(variant: &Variant) {
    let lanes = variant.queues as usize;
    let mut builder = variant.builder("127.0.0.1:0");
    builder.lanes(lanes).batch(BATCH).xdp_ring(64);
    let mut driver = LaneDriver::new(builder.open().unwrap());
    let clients = clients_by_lane(&mut driver, lanes);
    for number in 0..lanes {
        let peers = &clients[&driver.lanes[0].id()];
        // A next hop is forgotten some seconds after its last use. On a slow machine the lanes
        // before this one took longer.
        request_until_xdp_replies(&mut driver, &peers[0]);
        send_and_wait(|| {
            peers.iter().cycle().take(BATCHES * BATCH).for_each(|client| client.send(b"some request"));
        });
        let before = driver.handle.counters().total();
        answer_batches(number, driver.lanes.remove(0));
        let after = driver.handle.counters().total();
        let by_xdp = [
            after.delivered_by_bypass - before.delivered_by_bypass,
            after.sent_by_bypass - before.sent_by_bypass,
        ];
        assert_eq!(by_xdp, [(BATCHES * BATCH) as u64; 2], "{after:#?}");
    }
}

/// Clients until each lane has [`PEERS`]: the kernel selects the queue of each flow.
fn clients_by_lane(driver: &mut LaneDriver, lanes: usize) -> HashMap<LaneId, Vec<Client>> {
    let mut clients: HashMap<LaneId, Vec<Client>> = HashMap::new();
    let addr = driver.addr();
    while clients.len() < lanes || clients.values().any(|clients| clients.len() < PEERS) {
        let client = Client::to(addr);
        client.send(b"whose");
        let clients = clients.entry(driver.recv_lane_id()).or_default();
        if clients.len() < PEERS {
            clients.push(client);
        }
    }
    clients
}

/// The first replies leave through the companion, until the next hop is known.
fn request_until_xdp_replies(driver: &mut LaneDriver, client: &Client) {
    let sent = |driver: &LaneDriver| driver.handle.counters().total().sent_by_bypass;
    let before = sent(driver);
    while sent(driver) == before {
        client.send(b"request");
        driver.echo(1);
        retry_eintr(|| client.socket.recv(&mut [0; 16])).unwrap();
    }
}
