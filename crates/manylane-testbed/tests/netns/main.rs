//! Namespaces of the testbed and what is sent in them, as root.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail as tests do")]

mod hosts;
mod senders;
