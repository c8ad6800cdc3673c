//! Programs in C with the library in front of them and without, over loopback.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail as tests do")]

mod support;

mod alone;
mod batches;
mod confined;
mod early;
mod fallen;
mod gaps;
mod heirs;
mod high_lanes;
mod joins;
mod looks;
mod lowered;
mod nested;
mod options_during_waits;
mod patterns;
mod pauses;
mod replies;
mod rest;
mod restless;
mod semantics;
mod starved;
mod survivors;
mod turns;
mod unseen;
mod waits;
