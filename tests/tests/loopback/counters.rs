//! The sums close: every datagram to a socket is delivered, dropped by the kernel, or discarded,
//! and counted once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use manylane::{DeviceQueue, LaneCounters, NamedCounters, SteeringBackend};
use manylane_test_support::wait_for;
use manylane_tests::{Client, LaneDriver, Serving, on_every_variant, pattern, send_and_wait};

/// Every counter of a lane, to compare two moments, except that of empty polls.
fn counts(counters: &LaneCounters) -> NamedCounters {
    let idle = ["sleeps", "empty_polls", "recv_no_buffers", "engine_fallbacks"];
    counters.named().into_iter().filter(|(name, _)| !idle.contains(name)).collect()
}

on_every_variant! {
    /// Lanes that do not receive, with small queues (or rings): the kernel drops most.
    fn counters_add_up_when_the_kernel_drops(variant) {
        let mut builder = variant.builder("127.0.0.1:0");
        let mut driver = LaneDriver::new(builder.lanes(3).recv_buffer(8192).xdp_ring(64).open().unwrap());
        let clients: Vec<_> = (0..12).map(|_| Client::to(driver.addr())).collect();
        for round in 1..=3 {
            send_and_wait(|| clients.iter().for_each(|client| (0..100).for_each(|at| client.send(&pattern(at, 200)))));
            // Datagrams that do not fit into the queues are counted before any is received.
            let before = driver.handle.counters().total();
            let dropped = before.kernel_dropped + before.xsk_dropped;
            assert!(dropped > (round - 1) * 900, "{dropped}");
            let drained = driver.drain() as u64;
            let counters = driver.handle.counters();
            let total = counters.total();
            assert_eq!(total.kernel_dropped + total.xsk_dropped, dropped);
            assert_eq!(total.delivered + dropped, round * 1200);
            assert_eq!((variant.is_xdp(), total.kernel_dropped), (total.xsk_dropped > 0, before.kernel_dropped));
            assert!(!variant.is_xdp() || total.kernel_dropped == 0, "rings are full, not the companion's queue");
            // By queue and reason, the same.
            let queues = driver.handle.device_queues();
            let by_queue = |of: fn(&DeviceQueue) -> u64| queues.iter().map(of).sum::<u64>();
            assert_eq!(by_queue(|queue| queue.ring_full + queue.dropped), total.xsk_dropped, "{queues:?}");
            assert_eq!(by_queue(|queue| queue.invalid_descriptors), 0, "{queues:?}");
            // A lane that does not receive gives no frames to the fill ring.
            assert_eq!(by_queue(|queue| queue.fill_ring_empty), total.xsk_dropped, "{queues:?}");
            assert_eq!((total.arrived(), total.discarded), (round * 1200, 0));
            assert!(drained > 0 && total.delivered_bytes == total.delivered * 200);
            for (id, lane) in &counters.lanes {
                let steered = variant.steered(lane).map(|messages| messages + lane.kernel_dropped);
                assert_eq!(lane.steered, steered, "lane {id}");
            }
        }
    }

    /// A dropped message counts once on a lane with GRO, as documented; without GRO each datagram
    /// counts.
    fn dropped_gro_messages_are_counted(variant) {
        let mut builder = variant.builder("127.0.0.1:0");
        let mut driver = LaneDriver::new(builder.lanes(2).recv_buffer(8192).xdp_ring(64).open().unwrap());
        let client = Client::to(driver.addr());
        // All have the same checksum. With generic XDP, one in 65,535 goes to the companion: that
        // which looks like the sum of a pseudo-header alone.
        send_and_wait(|| (0..50).for_each(|_| client.send_gso(&[7; 2000], 100)));
        let received = driver.drain() as u64;
        let total = driver.handle.counters().total();
        assert!(received > 0 && total.delivered == received);
        if variant.is_xdp() {
            // A device with an XDP program accepts no GSO messages: the sender segments them, and
            // each frame is one datagram.
            assert!(total.xsk_dropped > 0 && total.delivered_by_bypass == received, "{received}: {total:?}");
            assert_eq!((total.arrived(), total.gro_messages, total.kernel_dropped), (1000, 0, 0), "{total:?}");
            return;
        }
        assert!(total.kernel_dropped > 0);
        let joined = variant.gets_gro_messages();
        let sent = if joined { total.delivered / 20 + total.kernel_dropped } else { total.arrived() };
        assert_eq!(sent, if joined { 50 } else { 1000 }, "{total:?}");
        // The kernel selects the lane for the whole message, even if it segments it for a lane
        // without GRO.
        assert_eq!(total.steered, (variant.by == SteeringBackend::Ebpf).then_some(50));
    }

    /// Datagrams that are queued on a lane that is closed without draining are discarded, each
    /// counted.
    fn counters_add_up_when_lanes_are_dropped(variant) {
        let mut driver = LaneDriver::new(variant.builder("127.0.0.1:0").lanes(3).open().unwrap());
        let clients: Vec<_> = (0..12).map(|_| Client::to(driver.addr())).collect();
        send_and_wait(|| clients.iter().for_each(|client| {
            (0..4).for_each(|at| client.send(&pattern(at, 30)));
            client.send_gso(&pattern(9, 170), 20);
        }));
        let sent = 12 * (4 + 9);
        // One batch of one lane is received, the other datagrams stay queued.
        let received = driver.lanes.iter_mut().map(|lane| lane.recv().unwrap().batch.len()).find(|drained| *drained > 0);
        let received = received.unwrap() as u64;
        let handle = driver.handle.clone();
        drop(driver);
        let counters = handle.counters();
        let total = counters.total();
        assert!(counters.lanes.is_empty() && total == counters.closed);
        assert_eq!((total.delivered, total.discarded, total.kernel_dropped), (received, sent - received, 0));
        assert_eq!(total.arrived(), sent);
        // Without datagrams from rings, and without the messages that were segmented for them.
        if !variant.is_xdp() {
            assert_eq!(total.steered, (variant.by == SteeringBackend::Ebpf).then_some(12 * 5));
        }
    }

    /// Another thread reads the counters while lanes work: no counter decreases, and in the end
    /// they agree.
    fn counters_only_grow_while_lanes_run(variant) {
        let serving = Serving::echo(variant.builder("127.0.0.1:0").open().unwrap());
        let (stop, has_read) = (AtomicBool::new(false), AtomicBool::new(false));
        let (reads, last) = thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let (mut reads, mut last) = (0_u64, LaneCounters::default());
                loop {
                    let ending = stop.load(Ordering::Relaxed);
                    let now = serving.handle.counters().total();
                    let grew = counts(&last).iter().zip(counts(&now)).all(|(then, now)| *then <= now);
                    assert!(grew, "{last:?} then {now:?}");
                    (reads, last) = (reads + 1, now);
                    has_read.store(true, Ordering::Relaxed);
                    if ending {
                        return (reads, last);
                    }
                }
            });
            // It may be long until its thread gets a CPU.
            wait_for("the first read", || has_read.load(Ordering::Relaxed), |has_read| *has_read);
            let clients: Vec<_> = (0..4).map(|_| Client::to(serving.addr)).collect();
            for round in 0..200 {
                clients.iter().for_each(|client| client.send(&pattern(round, 90)));
                clients.iter().for_each(|client| client.expect(&pattern(round, 90)));
            }
            stop.store(true, Ordering::Relaxed);
            reader.join().unwrap()
        });
        let total = serving.stop().unwrap().total();
        // With the ping at the start.
        assert_eq!((total.delivered, total.sent, total.offered, total.lost()), (801, 801, 801, 0));
        assert_eq!((total.delivered_bytes, total.sent_bytes), (72_004, 72_004));
        assert!(reads > 1 && last.delivered == 801);
        assert!(total.batches <= total.messages && total.messages == 801);
    }
}
