//! Parts of the stack on their own, with a fake clock.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail as tests do")]

mod congestion;
mod hostile;
mod hostile_any;
mod wheel;
