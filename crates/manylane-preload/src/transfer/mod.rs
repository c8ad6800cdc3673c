//! Receiving and sending.
//!
//! | file | what it does |
//! |---|---|
//! | `receive.rs` | the receiving calls |
//! | `recv_call.rs` | one receive: which lanes, in which order, and the wait |
//! | `send.rs` | the sending calls |
//! | `detached.rs` | all calls after the library detached |

pub(crate) mod detached;
pub(crate) mod receive;
pub(crate) mod recv_call;
pub(crate) mod send;
