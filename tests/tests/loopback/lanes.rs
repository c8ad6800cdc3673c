//! Lanes that are added and removed: no datagram is lost, flows that need not move stay, ids and
//! counters outlive the lane.

use std::collections::{BTreeSet, HashMap};
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use manylane::SteeringBackend::{ClassicBpf, Ebpf, Kernel};
use manylane::{Builder, Engine, ErrorKind, Handle, Lane, LaneId, Steering, SteeringBackend};
use manylane_sys::errno::ENOMEM;
use manylane_test_support::seccomp::{self, Syscall};
use manylane_test_support::wait_for;
use manylane_tests::{
    Client, LaneDriver, Serving, Variant, backends, on_every_engine, pattern, send_and_wait,
};

fn builder(variant: &Variant, lanes: usize, steering: Steering, by: SteeringBackend) -> Builder {
    let mut builder = variant.builder("127.0.0.1:0");
    builder.lanes(lanes).steering(steering).steering_backend(by);
    builder
}

/// The lane of each of the clients' flows.
fn lanes_of(driver: &mut LaneDriver, clients: &[Client]) -> Vec<LaneId> {
    let lane_of = |client: &Client| {
        client.send(b"which");
        driver.recv_lane_id()
    };
    clients.iter().map(lane_of).collect()
}

/// Sends and receives eight datagrams at a time until stopped. Returns the number of replies,
/// which must be complete.
fn talk(server: SocketAddr, handle: &Handle, end: &AtomicBool) -> u64 {
    let client = Client::to(server);
    let mut sent = 0;
    while !end.load(Ordering::Relaxed) {
        let window: Vec<_> = (0..8).map(|at| pattern(sent as usize + at, 40)).collect();
        window.iter().for_each(|payload| client.send(payload));
        let mut back: Vec<_> =
            window.iter().map(|_| client.try_recv()).collect::<Option<_>>().unwrap_or_else(|| {
                panic!("no answer after {sent} datagrams: {:?}", handle.counters());
            });
        // Lanes have no order among each other.
        let mut due = window;
        due.sort();
        back.sort();
        assert!(due == back);
        sent += 8;
    }
    assert!(client.is_idle());
    sent
}

/// Down to one lane, which is not the first one, up to five, and so on.
fn churn(handle: &Handle) {
    for round in 0..2 {
        let added: Vec<_> = (0..3).map(|_| handle.add_lane().unwrap()).collect();
        assert!(added.iter().all(|id| handle.lane_ids().contains(id)));
        let mut leaving = handle.lane_ids();
        assert_eq!(leaving.len(), if round == 0 { 5 } else { 4 });
        leaving.rotate_left(round);
        for id in &leaving[1..] {
            handle.remove_lane(*id).unwrap();
        }
        assert_eq!(handle.lane_ids(), leaving[..1]);
    }
}

/// Drains a lane, and returns the number of datagrams.
fn drain(lane: &mut Lane, each: &mut impl FnMut(SocketAddr, &[u8])) -> usize {
    let mut received = 0;
    loop {
        let batch = lane.recv().unwrap().batch;
        if batch.is_empty() {
            return received;
        }
        received += batch.len();
        batch.for_each(|datagram| each(datagram.peer(), datagram.payload()));
    }
}

/// From one lane, without a group, to more, back to one that was not the first, and again.
///
/// Not with engine xdp: the queues stay with the lanes that were there when the socket was opened.
#[test]
fn loopback_a_single_lane_becomes_a_group() {
    let variant = Variant::new("loopback_a_single_lane_becomes_a_group", Engine::Mmsg, 0);
    for by in backends("loopback_a_single_lane_becomes_a_group", &[Ebpf, ClassicBpf]) {
        let mut driver = LaneDriver::new(builder(&variant, 1, Steering::Flow, by).open().unwrap());
        let clients: Vec<_> = (0..40).map(|_| Client::to(driver.addr())).collect();
        let mut ids = BTreeSet::new();
        let mut seen = 0;
        for _ in 0..5 {
            let alone = driver.lanes[0].id();
            assert!(lanes_of(&mut driver, &clients).iter().all(|lane| *lane == alone), "{by}");
            let added_id = driver.open();
            let lanes: BTreeSet<_> = lanes_of(&mut driver, &clients).into_iter().collect();
            assert_eq!(lanes, BTreeSet::from([alone, added_id]), "{by}");
            seen += 80;
            assert_eq!(driver.handle.counters().total().delivered, seen);
            assert!(ids.insert(alone) && !ids.contains(&added_id), "an id was used again");
            assert!(added_id > alone);
            driver.lanes.remove(0);
        }
        let counters = driver.handle.counters();
        assert_eq!(
            (counters.closed.delivered + counters.lanes[0].1.delivered, counters.lanes.len()),
            (400, 1)
        );
        assert_eq!((counters.total().arrived(), counters.total().kernel_dropped), (400, 0), "{by}");
    }
}

on_every_engine! {
    /// Lanes are added and removed under traffic: every datagram is answered once, and counted.
    fn added_and_removed_lanes_lose_nothing(variant) {
        let test = variant.test;
        for by in backends(test, &[Ebpf, ClassicBpf]) {
            let other = match by {
                // The device selects the queue, so that there is no steering by the payload.
                _ if variant.is_xdp() => Steering::Cpu,
                Ebpf => Steering::RoundRobin,
                _ => Steering::Key { offset: 0, len: 8 },
            };
            for steering in [Steering::Flow, other] {
                let serving = Serving::echo(builder(variant, 2, steering, by).open().unwrap());
                let (handle, end) = (&serving.handle, AtomicBool::new(false));
                let sent: u64 = thread::scope(|scope| {
                    let clients: Vec<_> =
                        (0..2).map(|_| scope.spawn(|| talk(serving.addr, handle, &end))).collect();
                    churn(handle);
                    end.store(true, Ordering::Relaxed);
                    clients.into_iter().map(|client| client.join().unwrap()).sum()
                });
                let counters = serving.stop().unwrap();
                let total = counters.total();
                // With the ping at the start.
                assert_eq!((total.delivered, total.sent), (sent + 1, sent + 1), "{steering} by {by}");
                assert_eq!((total.arrived(), total.kernel_dropped, total.discarded), (sent + 1, 0, 0));
                assert_eq!(total.steered, (by == Ebpf).then_some(total.messages - total.delivered_by_bypass), "{steering} by {by}");
                assert_eq!(counters.steered_by_kernel, 0, "{steering} by {by}");
            }
        }
    }

    fn invalid_lane_changes_are_refused(variant) {
        for by in backends(variant.test, &[Ebpf, ClassicBpf, Kernel]) {
            let socket = builder(variant, 2, Steering::Flow, by).open().unwrap();
            let handle = socket.handle();
            assert_eq!(handle.add_lane().unwrap_err().kind(), ErrorKind::State, "does not serve");
            let serving = Serving::echo(socket);
            let [one, two] = handle.lane_ids()[..] else { panic!("two lanes") };
            let three = handle.add_lane().unwrap();
            assert_eq!(handle.lane_ids(), [one, two, three]);
            handle.remove_lane(two).unwrap();
            assert_eq!(handle.remove_lane(two).unwrap_err().kind(), ErrorKind::State, "is gone");
            handle.remove_lane(one).unwrap();
            assert_eq!(handle.remove_lane(three).unwrap_err().kind(), ErrorKind::LastLane);
            Client::to(serving.addr).ping();
            assert_eq!(serving.stop().unwrap().total().delivered, 2, "{by}");
            assert_eq!(handle.remove_lane(three).unwrap_err().kind(), ErrorKind::State, "has ended");
            assert_eq!(handle.add_lane().unwrap_err().kind(), ErrorKind::State, "has ended");
            assert!(handle.lane_ids().is_empty());
        }
    }

    /// By hand: a lane that is out of steering gets no more datagrams, and loses none of the
    /// queued ones.
    fn a_retired_lane_drains_and_loses_nothing(variant) {
        for by in backends(variant.test, &[Ebpf, ClassicBpf]) {
            let mut driver = LaneDriver::new(builder(variant, 3, Steering::Flow, by).open().unwrap());
            let clients: Vec<_> = (0..60).map(|_| Client::to(driver.addr())).collect();
            let before = lanes_of(&mut driver, &clients);
            send_and_wait(|| clients.iter().for_each(|client| client.send(b"queued")));
            let mut leaving = driver.lanes.remove(1);
            leaving.retire().unwrap();
            leaving.retire().unwrap();
            assert_eq!(driver.handle.lane_ids().len(), 2);
            send_and_wait(|| clients.iter().for_each(|client| client.send(b"later")));
            let queued = before.iter().filter(|lane| **lane == leaving.id()).count();
            assert!(queued > 0, "60 flows on 3 lanes leave none empty");
            let mut drained = Vec::new();
            loop {
                let batch = leaving.recv().unwrap().batch;
                if batch.is_empty() {
                    break;
                }
                drained.extend(batch.map(|datagram| datagram.payload().to_vec()));
            }
            // With XDP the queues move to the other lanes with all frames in them.
            let left = if variant.is_xdp() { 0 } else { queued };
            assert_eq!(drained, vec![b"queued".to_vec(); left], "{by}");
            let id = leaving.id();
            drop(leaving);
            driver.receive(120 - left, |lane, _, _| assert_ne!(lane, id));
            let counters = driver.handle.counters();
            assert_eq!((counters.closed.delivered, counters.closed.discarded), ((queued + left) as u64, 0));
            assert_eq!((counters.total().arrived(), counters.total().kernel_dropped), (180, 0));
            // The last lane cannot be removed.
            drop(driver.lanes.pop());
            assert_eq!(driver.lanes[0].retire().unwrap_err().kind(), ErrorKind::LastLane);
            assert_eq!(lanes_of(&mut driver, &clients[..5]), [driver.lanes[0].id(); 5]);
        }
    }

    /// Flows move only if they must: from a lane that is removed, and to a lane that is added.
    fn flows_keep_their_lane_while_others_change(variant) {
        for by in backends(variant.test, &[Ebpf, ClassicBpf]) {
            // Engine xdp has no steering by key.
            let key = Some(Steering::Key { offset: 1000, len: 4 }).filter(|_| !variant.is_xdp());
            for steering in [Steering::Flow].into_iter().chain(key) {
                let mut driver = LaneDriver::new(builder(variant, 4, steering, by).open().unwrap());
                let clients: Vec<_> = (0..100).map(|_| Client::to(driver.addr())).collect();
                let mut now = lanes_of(&mut driver, &clients);
                for step in 0..10 {
                    let was = now;
                    if step % 3 == 2 || driver.lanes.len() == 1 {
                        let added_id = driver.open();
                        now = lanes_of(&mut driver, &clients);
                        let stayed = |(then, now): (&LaneId, &LaneId)| then == now || *now == added_id;
                        assert!(was.iter().zip(&now).all(stayed), "{by} step {step}");
                        assert!(now.contains(&added_id), "a lane that comes takes its share");
                    } else {
                        let gone = driver.lanes.remove(step % driver.lanes.len()).id();
                        now = lanes_of(&mut driver, &clients);
                        let stayed = |(then, now): (&LaneId, &LaneId)| then == now || *then == gone;
                        assert!(was.iter().zip(&now).all(stayed), "{by} step {step}");
                        assert!(!now.contains(&gone));
                    }
                }
                assert!(driver.is_idle());
            }
        }
    }

    /// Order within a flow while lanes are added and removed, for all flows that do not move.
    fn unmoved_flows_keep_their_order(variant) {
        for by in backends(variant.test, &[Ebpf, ClassicBpf]) {
            let mut driver = LaneDriver::new(builder(variant, 3, Steering::Flow, by).open().unwrap());
            let clients: Vec<_> = (0..50).map(|_| Client::to(driver.addr())).collect();
            let mut next: HashMap<SocketAddr, u32> = HashMap::new();
            for step in 0..6 {
                // Some datagrams are queued while a lane is added or removed.
                let number = step * 2_u32;
                send_and_wait(|| clients.iter().for_each(|client| client.send(&number.to_be_bytes())));
                let mut gone = None;
                if step % 2 == 0 {
                    driver.open();
                } else {
                    let mut lane = driver.lanes.remove(1);
                    lane.retire().unwrap();
                    gone = Some(lane);
                }
                send_and_wait(|| clients.iter().for_each(|client| client.send(&(number + 1).to_be_bytes())));
                let mut left = 100;
                let mut in_order = |peer, payload: &[u8]| {
                    let next = next.entry(peer).or_insert(0);
                    assert_eq!(payload, next.to_be_bytes(), "{by} step {step}");
                    *next += 1;
                };
                // Datagrams on a removed lane are older than those of its flows on other lanes.
                if let Some(mut lane) = gone {
                    left -= drain(&mut lane, &mut in_order);
                }
                // Datagrams on the first lanes are older than those on an added lane.
                for lane in &mut driver.lanes {
                    left -= drain(lane, &mut in_order);
                }
                assert_eq!(left, 0);
            }
        }
    }

    /// The port is free and stays free when all lanes are closed, even if a handle still exists.
    fn removing_all_lanes_frees_the_port(variant) {
        for by in backends(variant.test, &[Ebpf, ClassicBpf, Kernel]) {
            let mut driver = LaneDriver::new(builder(variant, 3, Steering::Flow, by).open().unwrap());
            let addr = driver.addr();
            Client::to(addr).send(b"once");
            driver.echo(1);
            driver.lanes.remove(1);
            driver.open();
            driver.lanes.clear();
            drop(UdpSocket::bind(addr).expect("the port is free"));
            assert_eq!(driver.handle.open_lane().err().unwrap().kind(), ErrorKind::State, "{by}");
            drop(UdpSocket::bind(addr).expect("the port is free"));
        }
    }

    /// A socket with one lane has no group. Its port is also free afterwards, whether the lane
    /// served or was used by hand.
    fn removing_the_only_lane_frees_the_port(variant) {
        for by in backends(variant.test, &[Ebpf, ClassicBpf, Kernel]) {
            // On loopback, another test may get the port as soon as it is free, but not each time.
            let by_hand = || {
                let mut driver = LaneDriver::new(builder(variant, 1, Steering::Flow, by).open().unwrap());
                let addr = driver.addr();
                Client::to(addr).send(b"once");
                driver.echo(1);
                driver.lanes.clear();
                UdpSocket::bind(addr).is_ok()
            };
            assert!(by_hand() || by_hand() || by_hand(), "by hand, {by}: the port is free");
            let served = || {
                let serving = Serving::echo(builder(variant, 1, Steering::Flow, by).open().unwrap());
                let (_handle, addr) = (serving.handle.clone(), serving.addr);
                serving.stop().unwrap();
                UdpSocket::bind(addr).is_ok()
            };
            assert!(served() || served() || served(), "served, {by}: the port is free");
        }
    }
}

/// If the kernel refuses the program for a later change, it selects by its own hash among all
/// sockets of the group. No lane reads parked sockets, so they have to be closed by then.
#[test]
fn loopback_parked_sockets_get_nothing_without_steering() {
    const SO_ATTACH_REUSEPORT_CBPF: u32 = 51;
    let mut builder = Builder::new("127.0.0.1:0").unwrap();
    builder.lanes(4).steering_backend(ClassicBpf);
    let mut driver = LaneDriver::new(builder.open().unwrap());
    drop(driver.lanes.pop());
    let mut leaving = driver.lanes.pop().unwrap();
    let retire = move || {
        seccomp::forbid_with_errno(Syscall::SetSocketOption(SO_ATTACH_REUSEPORT_CBPF), ENOMEM).unwrap();
        leaving.retire().unwrap();
    };
    // The filter ends with its thread.
    thread::spawn(retire).join().unwrap();
    let clients: Vec<_> = (0..200).map(|_| Client::to(driver.addr())).collect();
    send_and_wait(|| clients.iter().for_each(|client| client.send(b"to a lane")));
    let mut received = 0;
    let receive = || {
        received += driver.drain();
        received
    };
    wait_for("all datagrams", receive, |received| *received == 200);
}
