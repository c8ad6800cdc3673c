//! The loop of `serve` allocates nothing: not per datagram, not per batch. The counter counts the whole process,
//! so that here is one test, and what it does itself while it counts allocates nothing either.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::alloc::System;
use std::time::Duration;

use manylane::SteeringBy::{ClassicBpf, Ebpf, Kernel};
use manylane::{Batch, Builder, Outbox};
use manylane_tests::{Client, Serving, backends};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Datagrams that are counted, and such that come before: the first ones fill what is kept for good.
const COUNTED: usize = 10_000;
const BEFORE: usize = 2_000;
const CLIENTS: usize = 8;
/// Datagrams of a client's turn: one, an empty one, and a train.
const TURN: usize = 2 + 14;

/// How often the process has asked for memory so far.
fn allocations() -> usize {
    let stats = ALLOCATOR.stats();
    stats.allocations + stats.reallocations
}

/// Answers in every way.
fn answer<'a>(batch: Batch<'a>, out: &mut Outbox<'a>) {
    for (at, datagram) in batch.enumerate() {
        match at % 4 {
            0 => out.reply(&datagram, datagram.payload()),
            1 => out.reply_borrowed(&datagram, datagram.payload()),
            2 => out.send_to(datagram.peer(), datagram.payload()),
            _ => out.reply_with(&datagram, 10, |space| space.len()),
        }
    }
}

/// Sends `datagrams` in turns of all clients, and takes the answers.
fn talk(clients: &[Client], datagrams: usize, answers: &mut [u8]) {
    for _ in 0..datagrams.div_ceil(CLIENTS * TURN) {
        for client in clients {
            client.send(b"one");
            client.send(b"");
            client.send_train(&[7; TURN * 50], 60);
        }
        for client in clients {
            for _ in 0..TURN {
                client.socket.recv(answers).unwrap();
            }
        }
    }
}

#[test]
fn loopback_the_loop_of_serve_allocates_nothing() {
    let before = allocations();
    drop(std::hint::black_box(Box::new(1)));
    assert_eq!(allocations() - before, 1, "the counter counts");

    let test = "loopback_the_loop_of_serve_allocates_nothing";
    let mut answers = [0; 2048];
    for by in backends(test, &[Ebpf, ClassicBpf, Kernel]) {
        for (gro, batch) in [(true, 64), (false, 64), (false, 3)] {
            // With a pause, every sixteenth batch at the latest is followed by one. A lane that may steal looks for
            // something whenever it is idle.
            for (linger, stealing) in [(0, false), (100, false), (0, true)] {
                let linger = Duration::from_micros(linger);
                let mut builder = Builder::new("127.0.0.1:0").unwrap();
                builder.lanes(3).steering_by(by).gro(gro).batch(batch).linger(linger).stealing(stealing);
                let serving = Serving::start(builder.open().unwrap(), answer);
                let clients: Vec<Client> = (0..CLIENTS).map(|_| Client::to(serving.addr)).collect();
                talk(&clients, BEFORE, &mut answers);
                let before = allocations();
                talk(&clients, COUNTED, &mut answers);
                let allocated = allocations() - before;
                assert_eq!(allocated, 0, "{by}, GRO {gro}, batch {batch}, linger {linger:?}, {stealing}");
                let total = serving.stop().unwrap().total();
                assert!(total.delivered >= (BEFORE + COUNTED) as u64 && total.sent == total.delivered);
            }
        }
    }
}
