//! The lanes of a socket as a group: which thread owns which, what is steered to, how it ends.
//!
//! Every change is made under the lock and recorded before its first step (`recovery.rs`), in an
//! order that lets another thread finish it from any step.
//!
//! | file | what it does |
//! |---|---|
//! | `change.rs` | the record of a change |
//! | `active_set.rs`, `sampling.rs` | steering to no more lanes than there are CPUs; the samples that decide it |
//! | `owners.rs` | which thread owns which lane, and which lanes are steered to |
//! | `leasing.rs` | queues on lease: requested, opened, closed, given back |
//! | `plain.rs` | the steps by which a socket becomes plain |
//! | `recovery.rs` | the lock; finishes what a dead thread has begun |
//! | `coverage.rs` | which lanes other threads must poll: why each datagram is received |
//! | `socket_end.rs` | the end of a socket |

pub(crate) mod active_set;
pub(crate) mod change;
pub(crate) mod coverage;
pub(crate) mod leasing;
pub(crate) mod owners;
pub(crate) mod plain;
pub(crate) mod recovery;
pub(crate) mod sampling;
pub(crate) mod socket_end;
