//! Programs in C over loopback, with the library preloaded and natively.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests fail as tests do")]

mod support;

mod active_set;
mod close_range;
mod crash_recovery;
mod fallback_reasons;
mod fallback_wakeup;
mod fd_reuse;
mod fork;
mod fork_closes;
mod high_lanes;
mod nested_epoll;
mod options_during_waits;
mod prefetch;
mod receiver_churn;
mod receiver_death;
mod reply_batching;
mod rlimit_nofile;
mod rx_coalesce;
mod seccomp;
mod secure_execution;
mod server_patterns;
mod shared_lines;
mod signal_race;
mod socket_semantics;
mod sole_receiver;
mod spurious_wakeup;
mod stale_reply_flush;
mod vfork_exec;
mod wait_args;
mod wait_starvation;
