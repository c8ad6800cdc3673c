//! Receives and waits.

use std::os::fd::AsRawFd as _;

use super::*;
use crate::DropPolicy;

#[test]
fn each_datagram_is_delivered_or_counted_and_order_is_kept() {
    let (sim, injector) = sim_with_faults(1);
    injector.faults().rx.loss = 100;
    sim.network().queue_max = 20;
    let mut lane = lane(&injector);
    // Bursts of 50, of which the queue holds 20.
    let mut received = Vec::new();
    for burst in 0..20 {
        send(&sim, burst * 50..(burst + 1) * 50, Duration::ZERO);
        received.extend(echo_all(&mut lane, MILLIS));
    }
    let lost = injector.faults().rx.lost;
    assert!(lost > 10, "{lost}");
    assert!(received.is_sorted());
    let total = close(lane);
    assert_eq!((total.delivered + lost, total.xsk_dropped), (400, 600));
    assert_eq!(total.arrived() + lost, 1000);
    let delivered = received.len() as u64;
    assert_eq!(
        (total.messages, total.delivered, total.delivered_bytes),
        (delivered, delivered, 2 * delivered)
    );
    let replies: Vec<u16> = sent(&sim).iter().map(|sent| number(&sent.payload)).collect();
    assert_eq!(replies, received);
    assert_eq!((total.offered, total.sent, total.sent_bytes), (delivered, delivered, 2 * delivered));
}

#[test]
fn reordering_changes_only_the_order_in_a_batch() {
    let (sim, injector) = sim_with_faults(2);
    injector.faults().rx.reordering = 200;
    let mut lane = lane(&injector);
    send(&sim, 0..500, Duration::ZERO);
    let mut received = echo_all(&mut lane, MILLIS);
    assert!(injector.faults().rx.reordered > 50);
    assert!(!received.is_sorted());
    for (index, batch) in received.chunks_mut(BATCH).enumerate() {
        batch.sort_unstable();
        assert_eq!(usize::from(batch[0]), index * BATCH);
    }
    assert!(received.into_iter().eq(0..500));
    assert_eq!(injector.faults().rx.lost, 0);
}

#[test]
fn a_changed_datagram_is_delivered_as_it_came() {
    let (sim, injector) = sim_with_faults(15);
    injector.faults().rx.corruption = 1000;
    let mut lane = lane_with(&injector, |builder| _ = builder.gro(false));
    send(&sim, 0..1, Duration::ZERO);
    let one_bit = lane.recv().unwrap().batch.next().map(|request| number(request.payload())).unwrap();
    assert_eq!(one_bit.count_ones(), 1);
    // A datagram that was shortened in the network does not count as truncated. One byte is left.
    injector.faults().rx.shortening = 1000;
    send(&sim, 1..2, Duration::ZERO);
    let mut batch = lane.recv().unwrap().batch;
    let short = batch.next().unwrap();
    assert_eq!((short.payload(), short.full_len(), short.is_truncated()), (&[0][..], 1, false));
    assert_eq!((short.peer(), batch.len()), (peer(1), 0));
    let rx = injector.faults().rx;
    assert_eq!((rx.corrupted, rx.shortened, rx.lost), (1, 1, 0));
    let total = close(lane);
    assert_eq!((total.delivered, total.delivered_bytes, total.truncated), (2, 3, 0));
}

#[test]
fn the_wait_goes_on_when_all_that_arrived_is_lost() {
    let (sim, injector) = sim_with_faults(16);
    injector.faults().rx.loss = 1000;
    let mut lane = lane(&injector);
    send(&sim, 0..20, MILLIS);
    assert!(lane.recv_timeout(HOUR).unwrap().batch.is_empty());
    assert_eq!((now(&sim), injector.faults().rx.lost), (HOUR, 20));
    send(&sim, 0..20, Duration::ZERO);
    assert!(lane.recv().unwrap().batch.is_empty());
    assert_eq!((injector.faults().rx.lost, lane.io.queued_max(), counters(&lane).arrived()), (40, 0, 0));
}

#[test]
fn a_seed_gives_the_same_run() {
    let run = |seed| {
        let (sim, injector) = sim_with_faults(seed);
        injector.faults().rx.loss = 50;
        injector.faults().rx.reordering = 50;
        let mut lane = lane_with(&injector, |builder| _ = builder.wait(WaitPolicy::Adaptive));
        send(&sim, 0..1000, 20 * MICROS);
        let received = echo_all(&mut lane, 50 * MILLIS);
        let total = close(lane);
        (received, total, now(&sim), sent(&sim))
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7).0, run(8).0);
}

#[test]
fn a_sleep_ends_with_a_datagram_or_with_the_timeout() {
    let sim = Sim::new(1);
    let mut lane = lane(&sim);
    sim.network().send(datagram(1), HOUR);
    assert!(lane.recv_timeout(HOUR / 2).unwrap().batch.is_empty());
    assert_eq!(now(&sim), HOUR / 2);
    assert_eq!(lane.recv_timeout(HOUR).unwrap().batch.len(), 1);
    assert_eq!(now(&sim), HOUR);
    assert_eq!(counters(&lane).sleeps, 2);
    // Nothing waits for a datagram that is queued, or without a timeout.
    send(&sim, 0..1, Duration::ZERO);
    assert_eq!(lane.recv_timeout(HOUR).unwrap().batch.len(), 1);
    assert!(lane.recv_timeout(Duration::ZERO).unwrap().batch.is_empty());
    assert!(lane.recv().unwrap().batch.is_empty());
    assert_eq!((now(&sim), counters(&lane).sleeps), (HOUR, 3));
}

#[test]
fn a_spinning_lane_polls_for_its_time_and_then_sleeps() {
    let sim = Sim::new(1);
    let mut lane = lane_with(&sim, |builder| _ = builder.wait(WaitPolicy::Spin(10 * MICROS)));
    assert!(lane.recv_timeout(MILLIS).unwrap().batch.is_empty());
    // The clock is read at every eighth poll, the first time after 10 µs at poll 104.
    let total = counters(&lane);
    assert_eq!((total.empty_polls, total.sleeps), (104, 1));
    assert_eq!(now(&sim), 104 * POLL_TIME + MILLIS - 10 * MICROS);
    // A datagram while it polls ends the wait at once.
    sim.network().send(datagram(1), 20 * POLL_TIME);
    let start = now(&sim);
    assert_eq!(lane.recv_timeout(MILLIS).unwrap().batch.len(), 1);
    let total = counters(&lane);
    assert_eq!((total.empty_polls, total.sleeps), (104 + 19, 1));
    assert_eq!(now(&sim) - start, 20 * POLL_TIME);
}

#[test]
fn an_adaptive_lane_meets_regular_datagrams_by_polls() {
    let sim = Sim::new(1);
    let mut lane = lane_with(&sim, |builder| _ = builder.wait(WaitPolicy::Adaptive));
    // Far apart: sleeps until shortly before each, once the gaps are known.
    send(&sim, 0..100, 500 * MICROS);
    assert_eq!(echo_all(&mut lane, MILLIS).len(), 100);
    let learned = counters(&lane);
    assert!(learned.empty_polls > 0);
    // A sleep and a few microseconds of polling for each, and it is received when it arrives.
    assert!(learned.sleeps <= 105 && learned.empty_polls <= 100 * 100, "{learned:?}");
    let sent = sent(&sim);
    let late = |at: usize| sent[at].at - 500 * MICROS * at as u32;
    assert!((20..100).all(|at| late(at) <= POLL_TIME), "{sent:?}");
}

#[test]
fn delays_make_batches_larger() {
    let sim = Sim::new(1);
    let delay = 100 * MICROS;
    let mut lane = lane_with(&sim, |builder| _ = builder.rx_coalesce(delay).batch(64));
    send(&sim, 0..1000, 10 * MICROS);
    lane.start_coalescing();
    let mut sizes = Vec::new();
    while sizes.iter().sum::<usize>() < 1000 {
        let summary = lane.recv_serving(HOUR).unwrap();
        sizes.push(summary.messages);
        lane.delay_after(summary.messages);
    }
    // One at a time, until a delay is tried after the sixteenth.
    assert!(sizes[..16].iter().all(|size| *size == 1), "{sizes:?}");
    assert_eq!(sizes[17], 10, "{sizes:?}");
    let total = counters(&lane);
    assert_eq!((total.delivered, total.batches), (1000, sizes.len() as u64));
    assert!(sizes.len() < 120, "{sizes:?}");
}

#[test]
fn a_delay_waits_for_the_end_of_a_round_of_queues() {
    let sim = Sim::new(1);
    let delay = 100 * MICROS;
    let mut lane = lane_with(&sim, |builder| _ = builder.rx_coalesce(delay).batch(64));
    lane.start_coalescing();
    let serve = |lane: &mut Lane, batches| {
        for _ in 0..batches {
            send(&sim, 0..1, Duration::ZERO);
            let summary = lane.recv_serving(HOUR).unwrap();
            lane.delay_after(summary.messages);
        }
        now(&sim)
    };
    assert_eq!(serve(&mut lane, 15), Duration::ZERO);
    // A delay is due after the sixteenth batch, but two other queues have frames.
    sim.network().round = 2;
    assert_eq!(serve(&mut lane, 2), Duration::ZERO);
    // The lane does not sleep while the delay is due.
    assert_eq!(lane.recv_serving(HOUR).unwrap().messages, 0);
    assert_eq!((now(&sim), counters(&lane).sleeps), (Duration::ZERO, 16));
    assert_eq!(serve(&mut lane, 1), delay);
}

#[test]
fn gro_messages_are_split_and_long_datagrams_are_flagged() {
    let sim = Sim::new(1);
    let mut lane = lane_with(&sim, |builder| _ = builder.ecn(true));
    let gro = Packet { peer: peer(1), payload: (0..250).collect(), segment_size: 100, tos: 3 };
    sim.network().send(gro, Duration::ZERO);
    sim.network().send(datagram(2), Duration::ZERO);
    let Received { batch, out } = lane.recv().unwrap();
    assert_eq!((batch.messages(), batch.len()), (2, 4));
    let about = |datagram: crate::Datagram<'_>| (datagram.payload()[0], datagram.full_len(), datagram.ecn());
    let ce = Some(crate::Ecn::Ce);
    assert_eq!(
        batch.map(about).collect::<Vec<_>>(),
        [(0, 100, ce), (100, 100, ce), (200, 50, ce), (0, 2, None)]
    );
    drop(out);
    assert_eq!((counters(&lane).delivered, counters(&lane).gro_messages), (4, 1));

    let mut lane = lane_with(&sim, |builder| _ = builder.gro(false));
    sim.network().send(Packet { payload: vec![0; 2001], ..datagram(1) }, Duration::ZERO);
    let mut batch = lane.recv().unwrap().batch;
    let long = batch.next().unwrap();
    assert_eq!((long.payload().len(), long.full_len(), long.is_truncated()), (2000, 2001, true));
    assert_eq!((long.peer(), long.local()), (peer(1), "192.0.2.1:53".parse().unwrap()));
    assert_eq!(counters(&lane).truncated, 1);
}

#[test]
fn a_closing_lane_counts_its_undelivered_datagrams() {
    let sim = Sim::new(1);
    let mut lane = lane(&sim);
    let descriptor = lane.as_fd().as_raw_fd();
    send(&sim, 0..20, Duration::ZERO);
    send(&sim, 20..23, MILLIS);
    sim.network().advance(MILLIS / 2);
    assert_eq!(lane.recv().unwrap().batch.len(), BATCH);
    assert_eq!(lane.as_fd().as_raw_fd(), descriptor);
    // The one at 0 ms has arrived, those at 1 and 2 ms have not.
    assert_eq!(lane.io.queued_max(), 21 - BATCH);
    assert_eq!(lane.retire().unwrap_err().kind(), crate::ErrorKind::LastLane);
    let total = close(lane);
    assert_eq!((total.delivered, total.discarded, losses(&sim).0), (8, 13, 2));
    assert_eq!(total.arrived(), 21);
    send(&sim, 0..1, Duration::ZERO);
    assert_eq!(losses(&sim).0, 3);
}

#[test]
fn a_failed_receive_loses_nothing() {
    let (sim, injector) = sim_with_faults(14);
    let mut lane = lane(&injector);
    send(&sim, 0..3, Duration::ZERO);
    injector.faults().recv_errors = [errno::ENOBUFS].into();
    assert!(lane.recv().is_err());
    assert_eq!(lane.recv().unwrap().batch.len(), 3);
    assert_eq!((counters(&lane).recv_errors, counters(&lane).delivered), (1, 3));
}

#[test]
fn a_queue_above_half_is_dropped_except_its_tail() {
    let sim = Sim::new(1);
    sim.network().queue_max = 40;
    let mut lane = lane_with(&sim, |builder| _ = builder.drop_policy(DropPolicy::Head));
    // After the first batch 20 datagrams are queued, which is half of the limit; then 22.
    send(&sim, 0..28, Duration::ZERO);
    assert_eq!(echo_all(&mut lane, MILLIS), (0..28).collect::<Vec<_>>());
    send(&sim, 0..30, Duration::ZERO);
    assert_eq!(echo_all(&mut lane, MILLIS), (24..30).collect::<Vec<_>>());
    let total = close(lane);
    assert_eq!((total.delivered, total.dropped_stale, total.arrived()), (34, 24, 58));
}

#[test]
fn a_retired_lane_refuses_later_datagrams() {
    let sim = Sim::new(2);
    let [mut first, second]: [Lane; 2] = lanes_with(&sim, 2, |_| ()).try_into().ok().unwrap();
    send(&sim, 0..2, Duration::ZERO);
    send(&sim, 2..5, MILLIS);
    first.retire().unwrap();
    assert_eq!(echo_all(&mut first, 10 * MILLIS), [0, 1, 2]);
    assert_eq!(losses(&sim), (2, 0));
    let shared = first.shared();
    drop(first);
    assert_eq!((shared.counters().lanes.len(), shared.counters().closed.delivered), (1, 3));
    drop(second);
    assert_eq!(shared.counters().closed.arrived(), 3);
}
