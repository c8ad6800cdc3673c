//! As `loopback_udp_proxy_alloc`, with engine `xdp`, once the next hops of clients are known.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[allow(dead_code, reason = "some is for other programs")]
mod serve_alloc_support;
mod udp_proxy_alloc_support;

use manylane::Engine;
use manylane_tests::Variant;
use serve_alloc_support::assert_counts;
use udp_proxy_alloc_support::check;

#[test]
fn netns_xdp_udp_proxy_allocates_nothing_for_a_datagram() {
    assert_counts();
    Variant::new("netns_xdp_udp_proxy_allocates_nothing_for_a_datagram", Engine::Xdp, 1).run(check);
}
