//! A count of all that the process allocates, and traffic that answers in every way and allocates
//! nothing itself.

use std::alloc::System;

use manylane::{Batch, Outbox};
use manylane_tests::{Client, retry_eintr};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Datagrams that are counted, and such that come before: the first ones fill what is kept for
/// good.
pub(crate) const COUNTED: usize = 10_000;
pub(crate) const WARMUP: usize = 2_000;
pub(crate) const CLIENTS: usize = 8;
/// Datagrams of a client's turn: one, an empty one, and a train.
const ROUND_DATAGRAMS: usize = 2 + 14;

/// How often the process has asked for memory so far.
pub(crate) fn allocations() -> usize {
    let stats = ALLOCATOR.stats();
    stats.allocations + stats.reallocations
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

/// Sends `datagrams` in turns of all clients, and takes the answers.
pub(crate) fn exchange(clients: &[Client], datagrams: usize, answers: &mut [u8]) {
    for _ in 0..datagrams.div_ceil(CLIENTS * ROUND_DATAGRAMS) {
        for client in clients {
            client.send(b"one");
            client.send(b"");
            client.send_gso(&[7; ROUND_DATAGRAMS * 50], 60);
        }
        for client in clients {
            for _ in 0..ROUND_DATAGRAMS {
                retry_eintr(|| client.socket.recv(answers)).unwrap();
            }
        }
    }
}
