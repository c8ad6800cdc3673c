//! Parsers and builders of frames: written and read again, against etherparse, and on the corpus of
//! the fuzz target.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail as tests do")]

mod agree;
mod corpus;
mod differential;
mod roundtrip;
