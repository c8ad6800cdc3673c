//! Failures and missing resources: limits, privileges, ports of other processes. Such a test runs
//! a part of itself in a process of its own.
//!
//! They are no part of `loopback`, because `make sanitize` runs that under sanitizers, which abort
//! a child that runs out of memory.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail as tests do")]

#[path = "../faults_support/mod.rs"]
mod faults_support;

mod limits;
mod port;
mod privilege;
mod quota;
mod traffic;
