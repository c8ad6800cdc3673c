//! Queues of devices on lease (engine `xdp`).
//!
//! | file | what it does |
//! |---|---|
//! | `queues.rs` | receiving and sending by the queues of a lane |
//! | `frames.rs` | frames from and to the program's buffers |
//!
//! With the library's engine `xdp` this shares the rings (`manylane_sys::xsk`), the headers
//! (`manylane_wire`) and the next hops (`manylane_ipc`). The rest differs because queues have other
//! owners:
//!
//! - A lane of the library owns its queues. It takes a batch, lends the frames to the application,
//!   writes replies into them, and keeps the state of each frame on its heap. Here any thread may
//!   take from a queue, and may die while it does. So a datagram is copied out under a lock in
//!   shared memory, and its frame goes back to the kernel at once.
//! - The library counts batches between two polls of the companion, and takes turns between
//!   queues in the state of the lane. Here a receive is mostly one datagram, and each thread has
//!   only its heartbeat to count by.
//! - The library's companion sends later, with a batch: until then, datagrams to the same peers
//!   have to follow through it. Here it sends at once, so the rings are flushed first.

pub(crate) mod frames;
pub(crate) mod queues;
