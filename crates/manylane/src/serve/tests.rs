//! The loop of `serve` on simulated lanes. Each lane has its own clock, so its course does not
//! depend on other threads.

use std::panic::resume_unwind;

use manylane_sys::errno::EIO;

use super::*;
use crate::io::faults::FaultInjector;
use crate::io::sim::Sim;
use crate::lane::tests::{
    BATCH, MILLIS, datagram, is_silent, kernel_engines, lanes_with, loopback_lane, recv_from_lane,
};

fn socket(lanes: Vec<Lane>) -> Socket {
    Socket { shared: lanes[0].shared(), server: Arc::default(), lanes }
}

fn echo<'a>(batch: Batch<'a>, out: &mut Outbox<'a>) {
    batch.for_each(|request| out.reply(&request, request.payload()));
}

#[test]
fn a_lane_serves_and_drains_its_queue_after_a_stop() {
    let sim = Sim::new(1);
    let socket = socket(lanes_with(&sim, 1, |builder| _ = builder.rx_coalesce(Duration::ZERO)));
    let handle = socket.handle();
    {
        let mut network = sim.network();
        (0..20).for_each(|number| network.send(datagram(number), MILLIS * number.into()));
        (20..40).for_each(|number| network.send(datagram(number), 60 * MILLIS));
        network.call(60 * MILLIS, move || handle.stop());
        (40..43).for_each(|number| network.send(datagram(number), 61 * MILLIS));
    }
    let mut sizes = Vec::new();
    let mut counters = None;
    thread::scope(|scope| {
        let (record, recorded) = mpsc::channel();
        let served = scope.spawn(move || {
            socket.serve(move |batch, out| {
                record.send(batch.len()).unwrap();
                echo(batch, out);
            })
        });
        sizes.extend(recorded);
        counters = Some(served.join().unwrap().unwrap());
    });
    assert_eq!(sizes, [vec![1; 20], vec![BATCH, BATCH, 4]].concat());
    let total = counters.unwrap().closed;
    assert_eq!((total.delivered, total.offered, total.sent, total.discarded), (40, 40, 40, 0));
    // One sleep for each of the first 20 datagrams; two that end at 39 and 59 ms, to check for a
    // stop; and one that the stop ends.
    assert_eq!((total.sleeps, total.batches), (20 + 3, 23));
    let network = sim.network();
    let sent_at = |number: u32| MILLIS * if number < 20 { number } else { 60 };
    assert!(network.sent.iter().map(|sent| sent.at).eq((0..40).map(sent_at)));
    assert_eq!((network.lost, network.now), (3, 60 * MILLIS));
}

#[test]
fn a_stop_wakes_a_sleeping_lane() {
    let sim = Sim::new(1);
    let socket = socket(lanes_with(&sim, 1, |builder| _ = builder.rx_coalesce(Duration::ZERO)));
    let handle = socket.handle();
    sim.network().call(5 * MILLIS, move || handle.stop());
    let total = socket.serve(echo).unwrap().total();
    assert_eq!((total.sleeps, total.batches, total.arrived()), (1, 0, 0));
    assert_eq!(sim.network().now, 5 * MILLIS);
}

#[test]
fn a_lane_delays_after_batches() {
    let sim = Sim::new(1);
    let delay = Duration::from_micros(100);
    let lanes = lanes_with(&sim, 1, |builder| _ = builder.batch(64).rx_coalesce(delay));
    let socket = socket(lanes);
    let handle = socket.handle();
    let gap = delay / 10;
    (0..1000).for_each(|number| sim.network().send(datagram(number), gap * number.into()));
    sim.network().call(gap * 1000, move || handle.stop());
    let total = socket.serve(echo).unwrap().closed;
    assert_eq!((total.delivered, total.sent), (1000, 1000));
    assert!(total.batches < 120, "{total:?}");
}

#[test]
fn a_lane_survives_occasional_receive_errors() {
    let sim = Sim::new(1);
    let injector = FaultInjector::new(sim.clone(), 1, 1);
    let socket = socket(lanes_with(&injector, 1, |builder| _ = builder.rx_coalesce(Duration::ZERO)));
    let handle = socket.handle();
    {
        let mut network = sim.network();
        (0..3).for_each(|number| network.send(datagram(number), Duration::ZERO));
        network.call(MILLIS, move || handle.stop());
    }
    injector.faults().recv_errors = vec![EIO; ERRORS_MAX as usize].into();
    let total = socket.serve(echo).unwrap().closed;
    assert_eq!((total.recv_errors, total.delivered, total.sent), (u64::from(ERRORS_MAX), 3, 3));
}

#[test]
fn the_error_of_a_failed_lane_is_returned_and_stops_the_others() {
    let sim = Sim::new(2);
    let injector = FaultInjector::new(sim.clone(), 1, 2);
    let socket = socket(lanes_with(&injector, 2, |builder| _ = builder.rx_coalesce(Duration::ZERO)));
    let handle = socket.handle();
    (0..3).for_each(|number| sim.of_lane(0).send(datagram(number), Duration::ZERO));
    (0..20).for_each(|number| sim.of_lane(1).send(datagram(number), Duration::ZERO));
    injector.of_lane(0).recv_errors = vec![EIO; ERRORS_MAX as usize + 1].into();
    let err = socket.serve(echo).unwrap_err();
    assert_eq!((err.kind(), err.to_string().as_str()), (ErrorKind::Io, "receiving"));
    let counters = handle.counters();
    assert!(counters.lanes.is_empty());
    let total = counters.closed;
    assert_eq!((total.recv_errors, total.discarded), (u64::from(ERRORS_MAX) + 1, 3));
    assert_eq!((total.delivered, total.sent, total.arrived()), (20, 20, 23));
    assert_eq!((sim.of_lane(0).sent.len(), sim.of_lane(1).sent.len()), (0, 20));
}

#[test]
fn the_panic_of_a_closure_is_returned_and_stops_other_lanes() {
    let sim = Sim::new(2);
    let socket = socket(lanes_with(&sim, 2, |builder| _ = builder.rx_coalesce(Duration::ZERO)));
    let handle = socket.handle();
    (0..10).for_each(|number| sim.of_lane(0).send(datagram(number), Duration::ZERO));
    (0..20).for_each(|number| sim.of_lane(1).send(datagram(number), Duration::ZERO));
    let served = socket.serve_with(|info| {
        move |mut batch: Batch<'_>, out: &mut Outbox<'_>| {
            if info.id == LaneId(0) {
                batch.next().iter().for_each(|request| out.reply(request, b"first"));
                // No output of the panic hook.
                resume_unwind(Box::new("had enough"));
            }
            batch.for_each(|request| out.reply(&request, b"reply"));
        }
    });
    let err = served.unwrap_err();
    assert_eq!(err.kind(), ErrorKind::Panicked);
    assert_eq!(err.to_string(), "the closure of lane 0 panicked: had enough");
    let total = handle.counters().closed;
    assert_eq!((total.delivered, total.discarded, total.arrived()), (BATCH as u64 + 20, 2, 30));
    assert_eq!((total.offered, total.sent, total.abandoned), (21, 20, 1));
}

#[test]
fn loopback_a_lane_ends_only_if_its_receives_keep_failing() {
    for engine in kernel_engines("loopback_a_lane_ends_only_if_its_receives_keep_failing") {
        for failures in [ERRORS_MAX, ERRORS_MAX + 1] {
            let (lane, injector, client) = loopback_lane(engine, 1);
            injector.faults().recv_errors = vec![EIO; failures as usize].into();
            (0..3).for_each(|number| assert_eq!(client.send(&[number]).unwrap(), 1));
            let socket = socket(vec![lane]);
            let (handle, stopper, mut left) = (socket.handle(), socket.handle(), 3);
            let served = socket.serve(move |batch, out| {
                left -= batch.len();
                echo(batch, out);
                if left == 0 {
                    stopper.stop();
                }
            });
            let total = handle.counters().closed;
            assert_eq!((total.recv_errors, total.arrived()), (failures.into(), 3), "{engine}");
            if failures == ERRORS_MAX {
                assert_eq!((served.unwrap().closed.delivered, total.sent), (3, 3), "{engine}");
                assert!((0..3).all(|number| recv_from_lane(&client) == [number]), "{engine}");
            } else {
                assert_eq!(served.unwrap_err().kind(), ErrorKind::Io, "{engine}");
                assert_eq!((total.delivered, total.discarded, total.sent), (0, 3, 0), "{engine}");
            }
            assert!(is_silent(&client));
        }
    }
}
