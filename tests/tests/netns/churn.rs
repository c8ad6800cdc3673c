//! Lanes that are added and removed under traffic, and servers that are killed.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use crate::faults_support::{Child, is_child, report, wait_for_parent};
use crate::netns_support::{open, sink, wait_until, wait_within};
use manylane::{Builder, Handle, LaneId, Steering, SteeringBackend};
use manylane_measure::{Traffic, Until};
use manylane_testbed::generator::LiveSender;
use manylane_testbed::skip;
use manylane_testbed::{Layout, Testbed};
use manylane_tests::{Client, Serving, TEST_TIMEOUT, need_ebpf, send_and_wait};

/// Datagrams per second, and the number of lanes that are added and removed meanwhile, one after
/// the other. Each waits for a grace period of the kernel, which takes long on a busy machine.
const RATE: f64 = 20_000.0;
const CHANGES: u64 = 40;
/// Minimum number of changes.
const DATAGRAMS: u64 = 20_000;

/// Adds and removes lanes: two to six of them, removing the oldest and the newest in turn.
fn churn(handle: &Handle) {
    let mut grows = true;
    for turn in 0..CHANGES {
        let lanes: Vec<LaneId> = handle.lane_ids();
        grows = if grows { lanes.len() < 6 } else { lanes.len() == 2 };
        if grows {
            handle.add_lane().unwrap();
        } else {
            let leaving = if turn % 2 == 0 { lanes[0] } else { lanes[lanes.len() - 1] };
            handle.remove_lane(leaving).unwrap();
        }
    }
}

/// One at a time: two generators leave the lanes of a small machine no time to keep up.
static LOCK: Mutex<()> = Mutex::new(());

fn check_no_loss(steering: Steering, by: SteeringBackend) {
    let _one = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let testbed = Testbed::new(&Layout { ipv6: false, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    let socket =
        open(b, b.ip4(0).into(), |builder| _ = builder.lanes(3).steering(steering).steering_backend(by));
    assert_eq!(socket.steering().backend, by);
    let serving = sink(b, socket);
    let traffic = Traffic { flows: 97, pps: Some(RATE), ..Traffic::new(serving.addr, 16) };
    let mut sender = LiveSender::new(a, b, 0, &traffic).unwrap();
    let before = b.device_counters(0).unwrap().rx_packets;
    let delivered = || serving.handle.counters().total().delivered;

    let stop = Arc::new(AtomicBool::new(false));
    let sent = thread::scope(|scope| {
        let sending = scope.spawn(|| sender.send(Until::Stop(Arc::clone(&stop))).unwrap());
        // The server runs when it has received a datagram.
        wait_until("the first datagram", &serving.handle, || delivered() > 0);
        // Lanes are opened by the calling thread, which has to be inside the host.
        b.run(|| churn(&serving.handle));
        wait_until(&format!("more than {DATAGRAMS} datagrams"), &serving.handle, || delivered() > DATAGRAMS);
        stop.store(true, Ordering::Relaxed);
        sending.join().unwrap()
    });
    // Apart from what a link rejects, whose other end has no time to poll it.
    let arrived = b.device_counters(0).unwrap().rx_packets - before;
    assert_eq!(arrived, sent.datagrams);
    // The device has counted the last of them a moment before its lane has it.
    let stopped = || serving.handle.counters().total().arrived() >= arrived;
    let all = wait_within(TEST_TIMEOUT, stopped);
    let counters = serving.stop().unwrap();
    let total = counters.total();
    assert_eq!(
        (total.delivered, total.arrived(), all),
        (arrived, arrived, true),
        "{steering} {by}: {total:?} {}",
        b.run(|| fs::read_to_string("/proc/thread-self/net/snmp")).unwrap()
    );
    assert_eq!((total.kernel_dropped, total.discarded, total.recv_errors), (0, 0, 0), "{by}");
    if by == SteeringBackend::Ebpf {
        assert_eq!(counters.steered_by_kernel, 0);
        assert_eq!(total.steered, Some(total.messages));
    }
}

/// Takes 8 s: each removal of a lane waits for a grace period of the kernel.
#[test]
fn netns_lane_churn_by_ebpf_loses_nothing() {
    if skip::need_live_sender("netns_lane_churn_by_ebpf_loses_nothing") {
        for steering in [Steering::Flow, Steering::RoundRobin, Steering::LeastLoaded, Steering::Cpu] {
            check_no_loss(steering, SteeringBackend::Ebpf);
        }
    }
}

#[test]
fn netns_lane_churn_by_classic_bpf_loses_nothing() {
    if skip::need_live_sender("netns_lane_churn_by_classic_bpf_loses_nothing") {
        for steering in [Steering::Flow, Steering::Random, Steering::Key { offset: 0, len: 4 }] {
            check_no_loss(steering, SteeringBackend::ClassicBpf);
        }
    }
}

/// The child that serves until it is killed, on a given port or a new one.
#[test]
#[ignore = "started by netns_killing_a_server_leaves_nothing"]
fn child_serves_until_killed() {
    if !is_child("child_serves_until_killed") {
        return;
    }
    let mut builder = Builder::new("127.0.0.1:0").unwrap();
    let socket = builder
        .lanes(4)
        .steering(Steering::RoundRobin)
        .steering_backend(SteeringBackend::Ebpf)
        .open()
        .unwrap();
    let serving = Serving::echo(socket);
    report(&serving.addr.to_string());
    wait_for_parent();
}

/// The eBPF programs and maps that a process holds, as the kernel numbers them.
fn ebpf_of(pid: u32) -> BTreeSet<(String, u32)> {
    let files = fs::read_dir(format!("/proc/{pid}/fdinfo")).unwrap();
    let mut found = BTreeSet::new();
    for file in files.flatten() {
        let text = fs::read_to_string(file.path()).unwrap_or_default();
        for kind in ["prog_id", "map_id"] {
            let number =
                text.lines().find_map(|line| line.strip_prefix(kind)?.strip_prefix(':')?.trim().parse().ok());
            found.extend(number.map(|number| (kind.to_owned(), number)));
        }
    }
    found
}

#[test]
fn netns_killing_a_server_leaves_nothing() {
    let name = "netns_killing_a_server_leaves_nothing";
    if !skip::need_root(name) || !need_ebpf(name) {
        return;
    }
    for _ in 0..3 {
        let child = Child::start("child_serves_until_killed", None);
        let served: SocketAddr = child.line().parse().unwrap();
        Client::to(served).ping();
        let held = ebpf_of(child.pid());
        assert!(held.len() > 4, "{held:?}");
        // In the middle of traffic.
        let client = Client::to(served);
        send_and_wait(|| (0..1000).for_each(|_| client.send(b"unanswered")));
        child.kill();

        // The port is free at once, for one socket and for a group, and steering is exact again.
        let mut builder = Builder::new(served).unwrap();
        drop(builder.lanes(1).open().unwrap());
        let socket = builder
            .lanes(3)
            .steering(Steering::RoundRobin)
            .steering_backend(SteeringBackend::Ebpf)
            .open()
            .unwrap();
        let mut driver = manylane_tests::LaneDriver::new(socket);
        let client = Client::to(served);
        send_and_wait(|| (0..300).for_each(|_| client.send(b"anew")));
        driver.recv_all(300);
        let counters = driver.handle.counters();
        assert!(counters.lanes.iter().all(|(_, lane)| lane.delivered == 100), "{counters:?}");
        // Programs and maps are freed a moment after the last use of them.
        wait_until("programs and maps to be freed", &driver.handle, || {
            !held.iter().any(|(kind, number)| is_loaded(kind, *number))
        });
    }
}

/// True if the kernel still has a program or map with this id. Those of other processes may be
/// freed between the kernel's listing of their ids and the question what they are.
fn is_loaded(kind: &str, number: u32) -> bool {
    if kind == "prog_id" {
        aya::programs::loaded_programs().filter_map(Result::ok).any(|program| program.id() == number)
    } else {
        aya::maps::loaded_maps().filter_map(Result::ok).any(|map| map.id() == number)
    }
}
