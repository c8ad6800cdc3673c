//! The UDP proxy does not allocate for a datagram, once its sessions are established. One test,
//! because the counter is that of the process.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[allow(dead_code, reason = "some is for other programs")]
mod serve_alloc_support;
mod udp_proxy_alloc_support;

use manylane::Engine;
use manylane_tests::Variant;
use serve_alloc_support::assert_counts;
use udp_proxy_alloc_support::check;

#[test]
fn loopback_udp_proxy_allocates_nothing_for_a_datagram() {
    assert_counts();
    for engine in [Engine::Mmsg, Engine::Uring] {
        Variant::new("loopback_udp_proxy_allocates_nothing_for_a_datagram", engine, 0).run(check);
    }
}
