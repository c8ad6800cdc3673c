//! The parts of TCP that need no peer.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail as tests do")]

mod hostile;
mod hostile_any;
mod wheel;
