//! The loop of `serve` does not allocate, neither per datagram nor per batch. The counter counts
//! the whole process, so that this program has one test only, which does not allocate while it
//! counts.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod serve_alloc_support;

use std::time::Duration;

use manylane::Builder;
use manylane::SteeringBackend::{ClassicBpf, Ebpf, Kernel};
use manylane_tests::{Client, Serving, backends};
use serve_alloc_support::{CLIENTS, COUNTED, WARMUP, allocations, assert_counts, exchange, reply_all_ways};

#[test]
fn loopback_serve_loop_allocates_nothing() {
    assert_counts();

    let test = "loopback_serve_loop_allocates_nothing";
    let mut replies = [0; 2048];
    for by in backends(test, &[Ebpf, ClassicBpf, Kernel]) {
        for (gro, batch) in [(true, 64), (false, 64), (false, 3)] {
            // With coalescing, there is a delay after every sixteenth batch at the latest.
            for rx_usecs in [0, 100].map(Duration::from_micros) {
                let mut builder = Builder::new("127.0.0.1:0").unwrap();
                builder.lanes(3).steering_backend(by).gro(gro).batch(batch).rx_coalesce(rx_usecs);
                let serving = Serving::start(builder.open().unwrap(), reply_all_ways);
                let clients: Vec<Client> = (0..CLIENTS).map(|_| Client::to(serving.addr)).collect();
                exchange(&clients, WARMUP, &mut replies);
                let before = allocations();
                exchange(&clients, COUNTED, &mut replies);
                let allocated = allocations() - before;
                assert_eq!(allocated, 0, "{by}, GRO {gro}, batch {batch}, rx_usecs {rx_usecs:?}");
                let total = serving.stop().unwrap().total();
                assert!(total.delivered >= (WARMUP + COUNTED) as u64 && total.sent == total.delivered);
            }
        }
    }
}
