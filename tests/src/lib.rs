//! Common code of the functional suite: the variants that every test runs on, a driver for lanes
//! by hand, a server in a thread, clients.
//!
//! All waits are for an event, with [`TEST_TIMEOUT`] as a limit. No test depends on durations.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a helper of tests fails as a test does")]

mod client;
mod lane_driver;
pub mod lifecycle;
mod proxy_bed;
pub mod proxy_suite;
mod serving;
mod slow_server;
pub mod tcp_peer;
mod test_env;
mod udp_proxy_bed;
pub mod udp_proxy_suite;
mod variant;

pub use client::{Client, pattern, retry_eintr, send_and_wait, send_gso, v4_mapped};
pub use lane_driver::{LaneDriver, ReceivedDatagram};
pub use serving::Serving;
pub use slow_server::SlowServer;
pub use test_env::{TEST_TIMEOUT, bind_peer, map_addr, map_ip, record_counters, unused_addr};
pub use variant::{Variant, backends, need_ebpf, need_ipv6, need_uring};
