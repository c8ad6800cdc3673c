//! Sending: replies of every kind, single and joined to GSO messages, from the smallest to more
//! than the ring can hold.

use std::thread;
use std::time::Duration;

use manylane::{Datagram, Outbox, Received};
use manylane_tests::{
    Client, LaneDriver, TEST_TIMEOUT, Variant, map_ip, on_every_variant, pattern, send_and_wait,
};

/// A reply: to which of the clients, and which bytes of its request.
type Reply = (usize, std::ops::Range<usize>);

/// Method of sending a reply.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ReplyMode {
    Reply,
    Borrowed,
    With,
    SendTo,
}

const REPLY_MODES: [ReplyMode; 4] =
    [ReplyMode::Reply, ReplyMode::Borrowed, ReplyMode::With, ReplyMode::SendTo];

fn send_reply<'a>(
    out: &mut Outbox<'a>,
    request: &Datagram<'a>,
    bytes: std::ops::Range<usize>,
    how: ReplyMode,
) {
    let payload = &request.payload()[bytes];
    match how {
        ReplyMode::Reply => out.reply(request, payload),
        ReplyMode::Borrowed => out.reply_borrowed(request, payload),
        // Reserves more than it then uses, if possible.
        ReplyMode::With => out.reply_with(request, (payload.len() + 9).min(65_507), |space| {
            space[..payload.len()].copy_from_slice(payload);
            payload.len()
        }),
        ReplyMode::SendTo => out.send_to(request.peer(), payload),
    }
}

/// Sends the replies of `script` in one batch of a lane with a ring of `ring` messages, in each
/// way. Each client must get its own, in order. `gso_messages` is the number of messages with more
/// than one datagram that a lane with GSO sends.
fn check_replies(variant: &Variant, ring: usize, request: usize, script: &[Reply], gso_messages: u64) {
    check_replies_with(variant, ring, request, script, |_| gso_messages);
}

fn check_replies_with(
    variant: &Variant,
    ring: usize,
    request: usize,
    script: &[Reply],
    gso_messages: impl Fn(ReplyMode) -> u64,
) {
    let mut sent_gso_messages = 0;
    let clients = script.iter().map(|(client, _)| client + 1).max().unwrap();
    let builder = &mut variant.builder("127.0.0.1:0");
    let mut driver = LaneDriver::new(builder.lanes(1).batch(ring).open().unwrap());
    let clients: Vec<_> = (0..clients).map(|_| Client::to(driver.addr())).collect();
    for (rounds, how) in (1..).zip(REPLY_MODES) {
        send_and_wait(|| {
            clients.iter().enumerate().for_each(|(at, client)| client.send(&pattern(at, request)));
        });
        let lane = &mut driver.lanes[0];
        let Received { batch, mut out } = lane.recv_timeout(TEST_TIMEOUT).unwrap();
        let requests: Vec<_> = batch.collect();
        assert_eq!(requests.len(), clients.len());
        for (client, bytes) in script {
            let request = requests.iter().find(|request| request.peer() == clients[*client].addr());
            send_reply(&mut out, request.unwrap(), bytes.clone(), how);
        }
        drop(out);
        thread::scope(|scope| {
            let receiver = scope.spawn(|| {
                for (client, bytes) in script {
                    clients[*client].expect(&pattern(*client, request)[bytes.clone()]);
                }
            });
            // What a full device has left is sent while the lane waits.
            while !receiver.is_finished() {
                assert!(lane.recv_timeout(Duration::from_millis(1)).unwrap().batch.is_empty());
            }
        });
        assert!(clients.iter().all(Client::is_idle), "{how:?}");
        let total = driver.handle.counters().total();
        let bytes: usize = script.iter().map(|(_, bytes)| bytes.len()).sum();
        let replies = rounds * script.len() as u64;
        assert_eq!((total.offered, total.sent, total.lost()), (replies, replies, 0), "{how:?}");
        assert_eq!(total.sent_bytes, rounds * bytes as u64, "{how:?}");
        sent_gso_messages += if variant.gso { gso_messages(how) } else { 0 };
        // With XDP each is a frame of its own. Which of the first ones leave through the companion
        // is not determined.
        if !variant.is_xdp() {
            assert_eq!(total.gso_messages, sent_gso_messages, "{how:?}");
        }
        assert_eq!(total.gso_fallbacks, 0, "{how:?}");
    }
}

on_every_variant! {
    fn equal_sizes_to_one_peer_are_sent_by_gso(variant) {
        // One datagram is not joined; a GSO message has at most 64.
        for (replies, gso_messages) in [(1, 0), (2, 1), (63, 1), (64, 1), (65, 1), (66, 2), (128, 2), (130, 3)] {
            let script: Vec<Reply> = (0..replies).map(|at| (0, at * 10..at * 10 + 10)).collect();
            check_replies(variant, 256, 1400, &script, gso_messages);
        }
    }

    fn the_last_gso_segment_may_be_shorter(variant) {
        // Four of 100, one of 30 that closes the message; then 100 starts a new one, which a
        // longer one does not join.
        let sizes = [100, 100, 100, 100, 30, 100, 100, 101, 101, 7];
        let script: Vec<Reply> = sizes.iter().map(|size| (0, 200..200 + size)).collect();
        check_replies(variant, 64, 500, &script, 3);
    }

    fn alternating_peers_and_sizes_are_sent_without_gso(variant, 1 queue) {
        let script: Vec<Reply> = (0..40).map(|at| (at % 3, at..at + 50)).collect();
        check_replies(variant, 64, 300, &script, 0);
        let growing: Vec<Reply> = (1..40).map(|size| (0, 0..size)).collect();
        check_replies(variant, 64, 300, &growing, 0);
        // A shorter one closes the message: pairs.
        let pairs: Vec<Reply> = (0..40).map(|at| (0, 0..if at % 2 == 0 { 20 } else { 10 })).collect();
        check_replies(variant, 64, 300, &pairs, 20);
    }

    fn empty_replies_are_sent_without_gso(variant) {
        let sizes = [0, 0, 10, 10, 0, 10, 10, 10, 0, 0];
        let script: Vec<Reply> = sizes.iter().map(|size| (0, 5..5 + size)).collect();
        check_replies(variant, 64, 100, &script, 2);
    }

    fn more_replies_than_the_ring_holds(variant, 1 queue) {
        // 1 message or 4 are soon full: with one size, with many, and with alternating peers.
        let one: Vec<Reply> = (0..150).map(|at| (0, at..at + 8)).collect();
        check_replies(variant, 1, 300, &one, 3);
        check_replies(variant, 4, 300, &one, 3);
        let sizes: Vec<Reply> = (0..150).map(|at| (0, at..at + at % 7)).collect();
        let alternating: Vec<Reply> = (0..300).map(|at| (at % 3, at..at + 8)).collect();
        let runs: Vec<Reply> = (0..1100).map(|at| (at / 220, at % 90..at % 90 + 8)).collect();
        check_replies(variant, 4, 400, &alternating, 0);
        // Growing from 0 to 6, again and again: none joins the one before.
        check_replies(variant, 4, 400, &sizes, 0);
        // 220 is 64 + 64 + 64 + 28. Borrowed payloads are not contiguous in memory. The ring can
        // hold 1024 of them, which ends in the middle of a message.
        check_replies_with(variant, 64, 400, &runs, |how| if how == ReplyMode::Borrowed { 21 } else { 20 });
    }

    fn replies_larger_than_a_frame_are_sent_without_gso(variant, no traffic) {
        for size in [1473, 9000, 30_000, 65_507] {
            let script: Vec<Reply> = (0..2).map(|_| (0, 0..size)).collect();
            check_replies(variant, 64, 65_507, &script, 0);
        }
        // 1472 is the largest that is joined; 44 of them are the maximum of a message.
        let full: Vec<Reply> = (0..45).map(|at| (0, at..at + 1472)).collect();
        check_replies(variant, 64, 1600, &full, 1);
        // More than the space for copies.
        let copies: Vec<Reply> = (0..6).map(|at| (at % 3, 0..60_000)).collect();
        check_replies(variant, 64, 60_000, &copies, 0);
    }

    fn flush_returns_sent_and_lost(variant, no traffic) {
        let mut driver = LaneDriver::new(variant.builder("127.0.0.1:0").lanes(1).open().unwrap());
        let clients = [Client::to(driver.addr()), Client::to(driver.addr())];
        let mut out = driver.lanes[0].sender();
        assert_eq!((out.len(), out.is_empty()), (0, true));
        assert_eq!(out.flush(), manylane::Flushed::default());
        for round in 0..3 {
            for client in &clients {
                out.send_to(client.addr(), &pattern(round, 25));
                out.send_to(client.addr(), &pattern(round + 1, 25));
            }
            assert_eq!((out.len(), out.is_empty()), (4, false));
            let flushed = out.flush();
            assert_eq!((flushed.sent, flushed.lost, out.len()), (4, 0, 0));
        }
        drop(out);
        for client in &clients {
            let mut got: Vec<_> = (0..6).map(|_| client.recv()).collect();
            let mut due: Vec<_> = [0, 1, 1, 2, 2, 3].map(|round| pattern(round, 25)).into();
            if variant.is_xdp() {
                // A device with several queues may send what comes by XDP before what came before
                // it through the companion.
                got.sort();
                due.sort();
            }
            assert_eq!(got, due);
            assert!(client.is_idle());
        }
        let total = driver.handle.counters().total();
        assert_eq!((total.offered, total.sent), (12, 12));
        // Sending by XDP makes no send system call.
        if !variant.is_xdp() {
            assert_eq!(total.send_calls, 3);
        }
    }

    fn a_dual_stack_lane_sends_to_both_families(variant, no traffic) {
        if !manylane_tests::need_ipv6(variant.test) {
            return;
        }
        let mut driver = LaneDriver::new(variant.builder("[::]:0").open().unwrap());
        let at = |ip: &str| map_ip(ip, driver.addr().port());
        let clients = [Client::to(at("127.0.0.1")), Client::to(at("::1"))];
        for lane in &mut driver.lanes {
            let mut out = lane.sender();
            for client in &clients {
                (0..10).for_each(|number| out.send_to(client.addr(), &pattern(number, 30)));
            }
            drop(out);
            for client in &clients {
                (0..10).for_each(|number| client.expect(&pattern(number, 30)));
            }
        }
        let total = driver.handle.counters().total();
        assert_eq!((total.sent, total.lost()), (40, 0));
        if !variant.is_xdp() {
            assert_eq!(total.gso_messages, if variant.gso { 4 } else { 0 });
        }
    }
}
