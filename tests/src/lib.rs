//! What the tests of the functional suite share: the variants that every test runs on, a driver for lanes by
//! hand, a server in a thread, clients.
//!
//! Everything that waits does so for an event, with [`PATIENCE`] as the bound against hanging; no test depends on
//! how long something takes.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a helper of tests fails as a test does")]

mod client;
mod hands;
pub mod held;
mod place;
mod serving;
mod slow;
mod variant;

pub use client::{Client, mapped, pattern, send_train, settled, uninterrupted};
pub use hands::{Got, Hands};
pub use place::{at, at_ip, done_with, nobody, peer};
pub use serving::Serving;
pub use slow::Slow;
pub use variant::{Variant, backends, need_ebpf, need_ipv6, need_uring};

/// How long a test waits for what has to come before it says that it did not.
pub const PATIENCE: std::time::Duration = std::time::Duration::from_secs(120);
