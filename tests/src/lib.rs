//! What the tests of the functional suite share: the variants that every test runs on, a driver for
//! lanes by hand, a server in a thread, clients.
//!
//! Everything that waits does so for an event, with [`TEST_TIMEOUT`] as the bound against hanging;
//! no test depends on how long something takes.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a helper of tests fails as a test does")]

mod client;
mod lane_driver;
pub mod lifecycle;
mod serving;
mod slow_server;
mod test_env;
mod variant;

pub use client::{Client, pattern, retry_eintr, send_and_wait, send_gso, v4_mapped};
pub use lane_driver::{LaneDriver, ReceivedDatagram};
pub use serving::Serving;
pub use slow_server::SlowServer;
pub use test_env::{bind_peer, map_addr, map_ip, record_counters, unused_addr};
pub use variant::{Variant, backends, need_ebpf, need_ipv6, need_uring};

/// How long a test waits for what has to come before it says that it did not.
pub const TEST_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(120);
