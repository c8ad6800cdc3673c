//! Any bytes as a frame: no panic, and the same that etherparse sees. What has to agree is in the
//! tests of the crate, which run it on the corpus too.

#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../crates/manylane-wire/tests/unit/agree.rs"]
mod agree;

fuzz_target!(|bytes: &[u8]| agree::check(bytes));
