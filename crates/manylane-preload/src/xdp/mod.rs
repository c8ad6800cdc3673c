//! Queues of devices on lease (engine `xdp`).
//!
//! | file | what it does |
//! |---|---|
//! | `queues.rs` | receiving and sending by the queues of a lane |
//! | `frames.rs` | frames from and to the program's buffers |

pub(crate) mod frames;
pub(crate) mod queues;
