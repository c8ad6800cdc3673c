//! Shared memory and messages between processes of Manylane.
//!
//! | module | shared | layout |
//! |---|---|---|
//! | [`report`] | counters of an unmodified program: the preload library writes, `manylane run` reads | `abi/manylane_report.h` |
//! | [`lease`] | queues of devices: messages between the preload library and its lessor | `abi/manylane_lease.h` |
//! | [`next_hops`] | next hops of peers: the lessor writes, the preload library reads | `abi/manylane_next_hops.h` |
//! | [`capture`] | copies of frames: lanes of engine `xdp` write, `manylane capture` reads | `abi/manylane_capture.h`; requests are text ([`capture::messages`]) |
//! | [`ports`] | ports whose sockets may have lanes: `manylane run` writes, the preload library reads | text in the environment |
//!
//! A layout is in its header once. Both sides assert it: the header when it is compiled
//! (`scripts/check-tree.sh`), the module by constants and tests. C programs of tests include the
//! headers. [`LANES_MAX`] and [`RX_USECS_MAX`] are limits of settings in the environment, which
//! `manylane run` checks and passes on to the preload library.
//!
//! The processes may have different versions of this crate, and do not trust each other. A report,
//! each message and each ring begins with a magic number or a version, and sizes are checked before
//! they are used. What is in shared memory can change at any time, to any value. System calls and
//! mappings are those of `manylane-sys`: there is no unsafe code here.

// Lengths and numbers here come from other processes: no cast may change them silently.
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_possible_wrap)
)]

pub mod capture;
#[cfg(not(loom))]
pub mod lease;
#[cfg(not(loom))]
pub mod next_hops;
#[cfg(not(loom))]
pub mod ports;
#[cfg(not(loom))]
pub mod report;

/// Maximum number of lanes of a socket: one bit each in a word.
pub const LANES_MAX: usize = 64;
/// The longest delay before a receive, in microseconds.
pub const RX_USECS_MAX: u64 = 20_000;
