//! The outbox: queued, joined, sent, and what happens when that fails.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::*;

#[test]
fn replies_are_sent_in_order_and_adjacent_ones_joined() {
    let sim = Sim::new(1);
    let mut lane = lane(&sim);
    send(&sim, 0..4, Duration::ZERO);
    let Received { batch, mut out } = lane.recv().unwrap();
    for request in batch {
        out.reply_borrowed(&request, request.payload());
        out.reply(&request, b"to");
        out.reply_with(&request, 10, |space| {
            space[..2].copy_from_slice(b"10");
            2
        });
        out.send_to(peer(99), b"other");
    }
    // The ring is full: one more message flushes it.
    assert_eq!((out.len(), sent(&sim).len()), (16, 0));
    out.send_to(peer(98), b"last");
    assert_eq!((out.len(), sent(&sim).len()), (1, 8));
    // Those that were sent to make room are reported with it.
    assert_eq!(out.flush(), crate::Flushed { sent: 17, lost: 0 });
    assert_eq!((out.flush(), out.is_empty()), (crate::Flushed::default(), true));
    drop(out);
    let network = sim.network();
    let sent: Vec<_> = network.sent.iter().map(|sent| (sent.peer.port(), sent.datagrams)).collect();
    assert_eq!(sent[..4], [(0, 3), (99, 1), (1, 3), (99, 1)]);
    assert_eq!(network.sent[2].payload, b"\x00\x01to10");
    drop(network);
    let total = counters(&lane);
    assert_eq!((total.offered, total.sent, total.gso_messages, total.send_calls), (17, 17, 4, 2));
}

#[test]
fn a_full_send_buffer_is_waited_for_once() {
    let (sim, injector) = sim_with_faults(9);
    let mut lane = lane(&injector);
    injector.faults().send_room = 2;
    injector.faults().send_drains = [(MILLIS, 3), (300 * MILLIS, 1)].into();
    let mut out = lane.sender();
    (0..BATCH as u16).for_each(|number| out.send_to(peer(number), b"."));
    // Two at once, three after 1 ms; the others find no room within the 100 ms of one wait.
    assert_eq!(out.flush(), crate::Flushed { sent: 5, lost: 3 });
    assert_eq!(now(&sim), 101 * MILLIS);
    // No room was made since: no second wait.
    out.send_to(peer(1), b".");
    assert_eq!(out.flush(), crate::Flushed { sent: 0, lost: 1 });
    assert_eq!(now(&sim), 101 * MILLIS);
    // Once one message fits, waits are worthwhile again.
    injector.faults().send_room = 1;
    (0..3).for_each(|number| out.send_to(peer(number), b"."));
    assert_eq!(out.flush(), crate::Flushed { sent: 1, lost: 2 });
    assert_eq!(now(&sim), 201 * MILLIS);
    drop(out);
    let total = close(lane);
    assert_eq!((total.offered, total.sent, total.lost_sndbuf_full), (12, 6, 6));
}

#[test]
fn errors_of_sends_are_retried_or_counted_with_their_reason() {
    let (sim, injector) = sim_with_faults(10);
    let mut lane = lane(&injector);
    refuse_sends(&mut lane, &injector, peer(1));
    assert_eq!(sent(&sim).len(), 2);
}

/// Sends six datagrams with refused sends, of which two are sent in the end.
pub(super) fn refuse_sends(lane: &mut Lane, injector: &FaultInjector, to: SocketAddr) {
    let mut send = |errors: &[i32]| {
        injector.faults().send_errors = errors.iter().copied().collect();
        let mut out = lane.sender();
        out.send_to(to, b".");
        let flushed = out.flush();
        assert!(injector.faults().send_errors.is_empty());
        (flushed.sent, flushed.lost)
    };
    assert_eq!(send(&[errno::ENOBUFS; 10]), (1, 0));
    assert_eq!(send(&[errno::ENOBUFS; 11]), (0, 1));
    // An ICMP error of an earlier datagram is reported once.
    assert_eq!(send(&[errno::EHOSTUNREACH]), (1, 0));
    assert_eq!(send(&[errno::EHOSTUNREACH; 2]), (0, 1));
    assert_eq!(send(&[errno::EACCES; 2]), (0, 1));
    assert_eq!(send(&[errno::ENETDOWN]), (0, 1));
    let total = counters(lane);
    assert_eq!((total.offered, total.sent, injector.faults().refused), (6, 2, 27));
    assert_eq!((total.lost_no_buffers, total.lost_unreachable, total.lost_denied), (1, 2, 1));
}

#[test]
fn a_refused_gso_message_is_sent_datagram_by_datagram() {
    let (sim, injector) = sim_with_faults(11);
    let mut lane = lane(&injector);
    refuse_gso(&mut lane, &injector, peer(1));
    assert_eq!(sent(&sim).len(), 6);
}

/// Sends six datagrams of 1000 bytes one by one, because GSO messages are refused.
pub(super) fn refuse_gso(lane: &mut Lane, injector: &FaultInjector, to: SocketAddr) {
    injector.faults().gso_error = Some(errno::EINVAL);
    for _ in 0..2 {
        let mut out = lane.sender();
        (0..3).for_each(|_| out.send_to(to, &[0; 1000]));
        assert_eq!(out.flush(), crate::Flushed { sent: 3, lost: 0 });
    }
    // The second time, datagrams of this size are not joined.
    let total = counters(lane);
    assert_eq!((total.sent, total.gso_messages, total.gso_fallbacks), (6, 0, 1));
    assert_eq!((total.sent_bytes, injector.faults().refused), (6000, 1));
}

#[test]
fn a_message_that_is_lost_or_late_counts_as_sent() {
    let (sim, injector) = sim_with_faults(17);
    let mut lane = lane(&injector);
    injector.faults().tx.reordering = 300;
    let mut flush = |numbers: std::ops::Range<u16>| {
        let mut out = lane.sender();
        numbers.for_each(|number| out.send_to(peer(number), &number.to_be_bytes()));
        drop(out);
    };
    flush(0..80);
    let mut order: Vec<u16> = sent(&sim).iter().map(|sent| number(&sent.payload)).collect();
    assert!(injector.faults().tx.reordered > 0 && !order.is_sorted());
    order.sort_unstable();
    assert!(order.into_iter().eq(0..80));
    injector.faults().tx.loss = 300;
    flush(0..80);
    let lost = injector.faults().tx.lost;
    assert!(lost > 0);
    assert_eq!(sent(&sim).len() as u64 + lost, 160);
    assert_eq!((counters(&lane).offered, counters(&lane).sent), (160, 160));
}

#[test]
fn replies_of_a_closure_that_panics_are_abandoned() {
    let sim = Sim::new(1);
    let mut lane = lane(&sim);
    send(&sim, 0..3, Duration::ZERO);
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        let Received { batch, mut out } = lane.recv().unwrap();
        batch.for_each(|request| out.reply(&request, b"reply"));
        // No message, and no output of the panic hook.
        std::panic::resume_unwind(Box::new(()));
    }));
    assert!(panicked.is_err());
    let total = close(lane);
    assert_eq!((total.offered, total.abandoned, total.sent), (3, 3, 0));
    assert!(sent(&sim).is_empty());
}
