//! Queues of devices on lease (engine `xdp`).
//!
//! | file | what it does |
//! |---|---|
//! | `queues.rs` | receiving and sending by the queues of a lane |
//! | `frames.rs` | frames from and to the program's buffers |
//!
//! This module shares the rings and the calls to send (`manylane_sys::xsk`), the socket addresses
//! (`manylane_sys::addr`), the headers (`manylane_wire`) and the slot of a next hop
//! (`manylane_ipc`) with the library's engine `xdp`. The tables of next hops are two, because this
//! process can write to its own (`manylane_ipc::next_hops`). The rest differs, because here no lane
//! owns a queue:
//!
//! - A lane of the library owns its queues. It receives a batch, passes the frames to the
//!   application, writes replies into them, and keeps the state of each frame on its heap. Here any
//!   thread may receive from a queue, and may be killed meanwhile. So a datagram is copied under a
//!   lock in shared memory, and its frame goes back to the kernel at once.
//! - A lane of the library has state to count batches between two polls of the companion, and to
//!   serve its queues in rotation. Here most receives return one datagram, and each thread counts
//!   by its heartbeat.
//! - The library's companion sends later, with a batch. Until then, other datagrams to the same
//!   peers must go through it, too. Here the companion sends at once, so the rings are flushed
//!   first.

pub(crate) mod frames;
pub(crate) mod queues;
