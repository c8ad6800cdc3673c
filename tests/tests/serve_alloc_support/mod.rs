//! A counter of the process's allocations, and traffic with all kinds of replies that does not
//! allocate itself.

use std::alloc::System;

use manylane::{Batch, Outbox};
use manylane_tests::{Client, retry_eintr};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Number of measured datagrams, and of earlier ones, which fill buffers that are kept.
pub(crate) const COUNTED: usize = 10_000;
pub(crate) const WARMUP: usize = 2_000;
pub(crate) const CLIENTS: usize = 8;
/// Datagrams of one series of a client: one, an empty one, and a GSO message.
const ROUND_DATAGRAMS: usize = 2 + 14;

/// Number of allocations of the process so far.
pub(crate) fn allocations() -> usize {
    let stats = ALLOCATOR.stats();
    stats.allocations + stats.reallocations
}

/// One allocation counts as one. The test's runner may allocate on its own thread in that moment,
/// so it is tried again.
pub(crate) fn assert_counts() {
    const TRIES_MAX: usize = 100;
    let count = || {
        let before = allocations();
        drop(std::hint::black_box(Box::new(1)));
        allocations() - before
    };
    let counts: Vec<usize> = (0..TRIES_MAX).map(|_| count()).collect();
    assert!(counts.iter().all(|count| *count >= 1) && counts.contains(&1), "{counts:?}");
}

/// Answers in every way.
pub(crate) fn reply_all_ways<'a>(batch: Batch<'a>, out: &mut Outbox<'a>) {
    for (at, datagram) in batch.enumerate() {
        match at % 4 {
            0 => out.reply(&datagram, datagram.payload()),
            1 => out.reply_borrowed(&datagram, datagram.payload()),
            2 => out.send_to(datagram.peer(), datagram.payload()),
            _ => out.reply_with(&datagram, 10, |space| space.len()),
        }
    }
}

/// Sends `datagrams` by all clients in turn, and receives the replies.
pub(crate) fn exchange(clients: &[Client], datagrams: usize, replies: &mut [u8]) {
    for _ in 0..datagrams.div_ceil(CLIENTS * ROUND_DATAGRAMS) {
        for client in clients {
            client.send(b"one");
            client.send(b"");
            client.send_gso(&[7; ROUND_DATAGRAMS * 50], 60);
        }
        for client in clients {
            for _ in 0..ROUND_DATAGRAMS {
                retry_eintr(|| client.socket.recv(replies)).unwrap();
            }
        }
    }
}
