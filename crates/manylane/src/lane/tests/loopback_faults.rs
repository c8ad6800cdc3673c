//! Engines on kernel sockets with faults, on 127.0.0.1: each datagram is received, lost by a fault
//! that is counted, or counted by the lane.

use std::time::Instant;

use super::sim_replies::{refuse_gso, refuse_sends};
use super::*;
use crate::io::faults::Direction;

/// Far longer than any step takes on a machine that is busy with other tests.
const TEST_TIMEOUT: Duration = Duration::from_secs(120);
/// Number of datagrams that fit into the queue of any socket.
const BURST: u16 = 50;
const BURSTS: u16 = 10;
/// Number of datagrams of a test.
const TOTAL: u16 = BURSTS * BURST;
const PAYLOAD_LEN: usize = 16;

fn some_of_each() -> Direction {
    Direction { loss: 200, shortening: 200, corruption: 200, reordering: 200, ..Direction::default() }
}

/// The payload of datagram `number`: the number, repeated.
fn payload(number: u16) -> Vec<u8> {
    number.to_be_bytes().repeat(PAYLOAD_LEN / 2)
}

/// Number of payloads that are shorter than they were sent, and of those with a changed bit.
fn changed(payloads: &[Vec<u8>]) -> (u64, u64) {
    let (short, whole): (Vec<_>, Vec<_>) = payloads.iter().partition(|bytes| bytes.len() < PAYLOAD_LEN);
    let is_corrupted = |bytes: &&&Vec<u8>| bytes.chunks(2).any(|pair| *pair != bytes[..2]);
    (short.len() as u64, whole.iter().filter(is_corrupted).count() as u64)
}

/// Sends bursts to the lane, which echoes them; returns what the lane received and what came back.
fn echo_bursts(
    lane: &mut Lane,
    injector: &FaultInjector,
    client: &UdpSocket,
) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let (mut received, mut returned) = (Vec::new(), Vec::new());
    let start = Instant::now();
    for first in (0..BURSTS).map(|burst| burst * BURST) {
        for number in first..first + BURST {
            client.send(&payload(number)).unwrap();
        }
        while received.len() as u64 + injector.faults().rx.lost < u64::from(first + BURST) {
            let missing = u64::from(first + BURST) - received.len() as u64;
            assert!(start.elapsed() < TEST_TIMEOUT, "{missing} of {BURST}: {:?}", counters(lane));
            let Received { batch, mut out } = lane.recv_timeout(10 * MILLIS).unwrap();
            for request in batch {
                received.push(request.payload().to_vec());
                out.reply_borrowed(&request, request.payload());
            }
        }
        let left = counters(lane).sent - injector.faults().tx.lost;
        while (returned.len() as u64) < left {
            returned.push(recv_from_lane(client));
        }
    }
    assert!(is_silent(client));
    (received, returned)
}

#[test]
fn loopback_each_datagram_is_received_or_lost_by_a_fault() {
    for engine in kernel_engines("loopback_each_datagram_is_received_or_lost_by_a_fault") {
        let (mut lane, injector, client) = loopback_lane(engine, 1);
        injector.faults().rx = some_of_each();
        let (received, returned) = echo_bursts(&mut lane, &injector, &client);
        let rx = injector.faults().rx;
        assert!(rx.lost > 0 && rx.reordered > 0, "{engine}: {rx:?}");
        assert_eq!(received.len() as u64 + rx.lost, u64::from(TOTAL), "{engine}");
        assert_eq!(changed(&received), (rx.shortened, rx.corrupted), "{engine}");
        assert_eq!(returned, received, "{engine}");
        let total = close(lane);
        let (datagrams, bytes) = (received.len() as u64, received.concat().len() as u64);
        assert_eq!((total.delivered, total.delivered_bytes, total.truncated), (datagrams, bytes, 0));
        assert_eq!((total.arrived(), total.offered, total.sent), (datagrams, datagrams, datagrams));
        assert_eq!((total.sent_bytes, total.lost()), (bytes, 0));
    }
}

#[test]
fn loopback_each_reply_returns_or_is_lost_by_a_fault() {
    for engine in kernel_engines("loopback_each_reply_returns_or_is_lost_by_a_fault") {
        let (mut lane, injector, client) = loopback_lane(engine, 2);
        injector.faults().tx = some_of_each();
        let (received, returned) = echo_bursts(&mut lane, &injector, &client);
        let tx = injector.faults().tx;
        assert!(tx.lost > 0 && tx.lost < u64::from(TOTAL), "{engine}: {tx:?}");
        assert!(received.into_iter().eq((0..TOTAL).map(payload)), "{engine}");
        assert_eq!(returned.len() as u64 + tx.lost, u64::from(TOTAL), "{engine}");
        assert_eq!(changed(&returned), (tx.shortened, tx.corrupted), "{engine}: {tx:?}");
        let (total, all) = (close(lane), u64::from(TOTAL));
        assert_eq!((total.delivered, total.offered, total.sent, total.lost()), (all, all, all, 0));
    }
}

#[test]
fn loopback_refused_sends_are_retried_or_counted_by_reason() {
    for engine in kernel_engines("loopback_refused_sends_are_retried_or_counted_by_reason") {
        let (mut lane, injector, client) = loopback_lane(engine, 3);
        let to = client.local_addr().unwrap();
        refuse_sends(&mut lane, &injector, to);
        assert_eq!([recv_from_lane(&client), recv_from_lane(&client)], [b".", b"."]);
        assert!(is_silent(&client));
    }
}

#[test]
fn loopback_a_refused_gso_message_is_sent_datagram_by_datagram() {
    for engine in kernel_engines("loopback_a_refused_gso_message_is_sent_datagram_by_datagram") {
        let (mut lane, injector, client) = loopback_lane(engine, 4);
        refuse_gso(&mut lane, &injector, client.local_addr().unwrap());
        assert!((0..6).all(|_| recv_from_lane(&client) == [0; 1000]));
        assert!(is_silent(&client));
    }
}

#[test]
fn loopback_a_full_send_queue_is_waited_for_once() {
    for engine in kernel_engines("loopback_a_full_send_queue_is_waited_for_once") {
        let (mut lane, injector, client) = loopback_lane(engine, 5);
        let to = client.local_addr().unwrap();
        injector.faults().send_room = 2;
        injector.faults().send_drains = [(MILLIS, 3)].into();
        let mut out = lane.sender();
        // None is joined with the one before it, because each is longer.
        (1..=BATCH).for_each(|len| out.send_to(to, &vec![0; len]));
        assert_eq!(out.flush(), crate::Flushed { sent: 5, lost: 3 });
        out.send_to(to, b".");
        assert_eq!(out.flush(), crate::Flushed { sent: 0, lost: 1 });
        injector.faults().send_room = usize::MAX;
        out.send_to(to, &[0; 6]);
        assert_eq!(out.flush(), crate::Flushed { sent: 1, lost: 0 });
        drop(out);
        assert!((1..=6).all(|len| recv_from_lane(&client).len() == len), "{engine}");
        assert!(is_silent(&client));
        let total = close(lane);
        assert_eq!((total.offered, total.sent, total.lost_sndbuf_full), (10, 6, 4), "{engine}");
    }
}

#[test]
fn loopback_a_failed_receive_loses_nothing() {
    for engine in kernel_engines("loopback_a_failed_receive_loses_nothing") {
        let (mut lane, injector, client) = loopback_lane(engine, 6);
        (0..3).for_each(|number| assert_eq!(client.send(&payload(number)).unwrap(), PAYLOAD_LEN));
        injector.faults().recv_errors = [errno::ENOBUFS, errno::EIO].into();
        assert!(lane.recv().is_err());
        assert!(lane.recv_timeout(TEST_TIMEOUT).is_err());
        let mut received = Vec::new();
        while received.len() < 3 {
            let batch = lane.recv_timeout(TEST_TIMEOUT).unwrap().batch;
            assert!(!batch.is_empty());
            received.extend(batch.map(|request| request.payload().to_vec()));
        }
        assert!(received.into_iter().eq((0..3).map(payload)));
        let total = close(lane);
        assert_eq!((total.recv_errors, total.delivered, total.arrived()), (2, 3, 3), "{engine}");
        assert_eq!((total.engine_fallbacks, total.discarded), (0, 0), "{engine}");
    }
}
