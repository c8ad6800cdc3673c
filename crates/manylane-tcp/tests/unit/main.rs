//! Parts of the stack on their own, and the stack against scripts of segments, with a fake clock.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail as tests do")]

mod allocations;
mod buffers;
mod congestion;
mod events;
mod flood;
mod forward;
mod hostile;
mod hostile_any;
mod output;
mod peer;
mod script;
mod settings;
mod stream;
mod wheel;
