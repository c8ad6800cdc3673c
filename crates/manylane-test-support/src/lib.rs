//! Helpers for tests: of all crates, so that this one depends on none of them. It is a
//! dev-dependency, also of the testbed's feature `skip`, and thus in no program.
//!
//! It has `unsafe` code, which the crates of most tests forbid: what a test does to its own
//! process, thread or child (a filter of system calls, another user, a table of descriptors), and
//! requests to the kernel that no crate of the product makes.

pub mod bpf_link;
pub mod docs;
mod errno;
mod interpret;
mod process;
mod queues;
pub mod seccomp;
mod skip;
mod spawn;
pub mod trace;
mod wait;

pub use interpret::interpret;
pub use process::{become_user, kill_on_parent_exit};
pub use queues::set_queues;
pub use skip::{
    Forced, is_kernel, need, need_kernel, need_leases, need_unless_forced, need_uring, need_whole_gso,
    passes_whole_gso,
};
pub use spawn::{IsolatedChild, StdinGuard, spawn_isolated};
pub use wait::{fence_loopback, wait_for, wait_for_at_most};
