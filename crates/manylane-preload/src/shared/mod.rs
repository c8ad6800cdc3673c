//! State in mappings: of a socket, its members, the threads. A fork shares what is marked so.
//!
//! | file | what it does |
//! |---|---|
//! | `memory.rs` | mappings of atomics |
//! | `sock/` | a socket as this process sees it, and what all processes share of it |
//! | `lease.rs`, `leftovers.rs` | its queues on lease; its datagrams that are left after the library detached |
//! | `processes.rs`, `thread.rs` | the number of the calling process; the calling thread, and its cached members |
//! | `liveness.rs` | which threads are alive |
//! | `lock.rs`, `failpoint.rs` | the lock of changes; what tests control |
//! | `report.rs` | counters for the launcher |

pub(crate) mod failpoint;
pub(crate) mod lease;
pub(crate) mod leftovers;
pub(crate) mod liveness;
pub(crate) mod lock;
pub(crate) mod memory;
pub(crate) mod processes;
pub(crate) mod report;
pub(crate) mod sock;
pub(crate) mod thread;
