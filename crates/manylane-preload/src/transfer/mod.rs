//! Receiving and sending.
//!
//! | file | what it does |
//! |---|---|
//! | `receive.rs` | the receiving calls |
//! | `recv_dispatch.rs` | one receive: which lanes, in which order |
//! | `recv_wait.rs` | its waits |
//! | `recv_call.rs` | its attempts |
//! | `backoff.rs` | waits that end too early |
//! | `send.rs` | the sending calls |
//! | `detached.rs` | all calls after the library detached |

mod backoff;
pub(crate) mod detached;
pub(crate) mod receive;
mod recv_call;
pub(crate) mod recv_dispatch;
mod recv_wait;
pub(crate) mod send;
