//! The loop of `serve` does not allocate with engine xdp either, nor does the thread that follows
//! the kernel's routes, once the peers are known and the kernel's tables do not change. One test,
//! as in `loopback_serve_alloc`.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod serve_alloc_support;

use manylane::Engine;
use manylane_tests::{Client, Serving, Variant};
use serve_alloc_support::{CLIENTS, COUNTED, WARMUP, allocations, assert_counts, exchange, reply_all_ways};

/// Times that the allocations of [`COUNTED`] datagrams are counted until there are none.
const ATTEMPTS_MAX: usize = 3;

fn check(variant: &Variant) {
    let mut replies = [0; 2048];
    for batch in [64, 3] {
        let serving =
            Serving::start(variant.builder("127.0.0.1:0").batch(batch).open().unwrap(), reply_all_ways);
        let clients: Vec<Client> = (0..CLIENTS).map(|_| Client::to(serving.addr)).collect();
        exchange(&clients, WARMUP, &mut replies);
        // An address of the testbed that is ready only now is an event, which may allocate.
        let counts: Vec<usize> = (0..ATTEMPTS_MAX)
            .map(|_| {
                let before = allocations();
                exchange(&clients, COUNTED, &mut replies);
                allocations() - before
            })
            .take_while(|count| *count != 0)
            .collect();
        assert!(counts.len() < ATTEMPTS_MAX, "batch {batch}: allocations, each time: {counts:?}");
        let total = serving.stop().unwrap().total();
        assert!(total.delivered >= (WARMUP + COUNTED) as u64 && total.sent == total.delivered);
        assert_eq!(total.delivered_by_bypass, total.delivered);
        assert!(total.sent_by_bypass >= COUNTED as u64, "{total:#?}");
    }
}

#[test]
fn netns_xdp_serve_loop_allocates_nothing() {
    assert_counts();
    Variant::new("netns_xdp_serve_loop_allocates_nothing", Engine::Xdp, 4).run(check);
}
