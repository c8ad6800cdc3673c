//! Any bytes as what peers, routers and an application do to the stack of TCP: no panic, only valid
//! packets, no limit exceeded. What is checked is in the tests of the crate, which run it on the
//! corpus too.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/manylane-tcp/tests/unit/hostile.rs"]
mod hostile;

fuzz_target!(|bytes: &[u8]| hostile::check(bytes));
