//! Lanes of engine `xdp` share no cache line that one of them writes, and a datagram costs the same
//! number of instructions with any number of lanes and peers. As `loopback_shared_lines`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod trace_support;

use std::collections::HashMap;
use std::mem;

use manylane::{Engine, LaneId, SteeringBackend};
use manylane_testbed::skip;
use manylane_tests::{Client, LaneDriver, Variant, need_ebpf, retry_eintr, send_and_wait};
use trace_support::{BATCH, BATCHES, answer_batches, check, is_traced, trace_lanes};

const TEST: &str = "netns_xdp_lanes_share_no_written_line";

/// Lanes, each with a queue of its own, and peers of each lane.
const SIZES: [(u32, usize); 2] = [(1, 4), (16, 4)];

#[test]
fn netns_xdp_lanes_share_no_written_line() {
    // Not in the traced process, because the probe would take most of the trace.
    let can_run = is_traced() || skip::need_root(TEST) && need_ebpf(TEST);
    if !can_run {
        return;
    }
    let run = || SIZES.into_iter().for_each(|(lanes, _)| variant(lanes).run(answer_peers));
    if let Some(phases) = trace_lanes(TEST, run) {
        check(Engine::Xdp, &SIZES.map(|(lanes, _)| lanes as usize), &phases);
    }
}

fn variant(queues: u32) -> Variant {
    // Companions without eBPF, whose loading would take most of the trace.
    Variant { by: SteeringBackend::Kernel, ..Variant::new(TEST, Engine::Xdp, queues) }
}

/// Lets all lanes of a socket answer datagrams of their peers.
fn answer_peers(variant: &Variant) {
    let (lanes, peers) = SIZES.into_iter().find(|(lanes, _)| *lanes == variant.queues).unwrap();
    let mut builder = variant.builder("127.0.0.1:0");
    builder.lanes(lanes as usize).batch(BATCH).xdp_ring(64);
    let mut driver = LaneDriver::new(builder.open().unwrap());
    let clients = clients_by_lane(&mut driver, lanes as usize, peers);
    send_and_wait(|| {
        for clients in clients.values() {
            clients.iter().cycle().take(BATCHES * BATCH).for_each(|client| client.send(b"some request"));
        }
    });
    let before = driver.handle.counters().total();
    answer_batches(mem::take(&mut driver.lanes));
    let after = driver.handle.counters().total();
    let count = (BATCHES * BATCH) as u64 * u64::from(lanes);
    let by_xdp = [
        after.delivered_by_bypass - before.delivered_by_bypass,
        after.sent_by_bypass - before.sent_by_bypass,
    ];
    assert_eq!(by_xdp, [count; 2], "{after:#?}");
}

/// Clients until each lane has `peers`: the kernel selects the queue of each flow. Replies of all
/// lanes leave by XDP then.
fn clients_by_lane(driver: &mut LaneDriver, lanes: usize, peers: usize) -> HashMap<LaneId, Vec<Client>> {
    let mut clients: HashMap<LaneId, Vec<Client>> = HashMap::new();
    let addr = driver.addr();
    while clients.len() < lanes || clients.values().any(|clients| clients.len() < peers) {
        let client = Client::to(addr);
        client.send(b"whose");
        let lane = driver.recv_lane_id();
        let is_first = !clients.contains_key(&lane);
        // The first replies leave through the companion, until the next hop is known.
        let before = is_first.then(|| sent_by_xdp(driver));
        while before.is_some_and(|before| sent_by_xdp(driver) == before) {
            client.send(b"request");
            driver.echo(1);
            retry_eintr(|| client.socket.recv(&mut [0; 16])).unwrap();
        }
        let clients = clients.entry(lane).or_default();
        if clients.len() < peers {
            clients.push(client);
        }
    }
    clients
}

fn sent_by_xdp(driver: &LaneDriver) -> u64 {
    driver.handle.counters().total().sent_by_bypass
}
