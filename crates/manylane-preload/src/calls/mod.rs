//! Calls that change what a descriptor means, the exports, and the start.
//!
//! | file | what it does |
//! |---|---|
//! | `exports.rs` | the exported functions |
//! | `descriptors.rs`, `new_fds.rs` | calls that open, copy and close; calls that hand out other descriptors |
//! | `close_range.rs` | calls that close a range of descriptors |
//! | `options.rs` | options of a socket |
//! | `process.rs`, `handlers.rs` | forks, exec, privileges, the end; signal handlers |
//! | `seccomp.rs` | detaching before a seccomp filter |
//! | `start.rs` | start-up in phases |

pub(crate) mod close_range;
pub(crate) mod descriptors;
pub(crate) mod exports;
pub(crate) mod handlers;
pub(crate) mod new_fds;
pub(crate) mod options;
pub(crate) mod process;
pub(crate) mod seccomp;
pub(crate) mod start;
