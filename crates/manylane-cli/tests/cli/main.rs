//! The program `manylane`, as its users start it.

#![allow(clippy::unwrap_used, reason = "also outside the test functions, all here is a test")]

mod blocks;
mod program;
mod proxy;

#[cfg(feature = "bench")]
mod bench;
mod capture;
mod doctor;
mod echo;
mod echo_xdp;
#[cfg(feature = "bench")]
mod lab;
#[cfg(feature = "bench")]
mod lab_rows;
mod live;
mod run;
mod usage;
