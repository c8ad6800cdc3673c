//! The functional suite over loopback, which needs no privileges.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail as tests do")]

mod alloc;
mod counters;
mod ebpf_ceilings;
mod errors;
mod gro;
mod lanes;
mod overload;
mod property;
mod proxy;
mod receive;
mod send;
mod serve;
mod steering;
mod steering_key;
mod stop;
mod udp_proxy;
mod uring;
mod waiting;
