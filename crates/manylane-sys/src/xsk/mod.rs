//! Queues of a device in user space: AF_XDP sockets, their rings and their frames (Linux 5.4).
//!
//! A [`Queue`] owns the memory that a device queue receives into and sends from. It is divided
//! into frames of one size. A frame is in one state at a time: with the kernel to receive into, in
//! the current batch, free, allocated to be filled, or with the kernel to send.
//! [`FrameCounts`] has the number in each state.
//!
//! One round of a lane:
//!
//! 1. [`Queue::receive`] ends the previous batch and begins the next one, of packets that it took
//!    from the RX ring before. If there are too few, it makes a pass over the rings: it reclaims
//!    sent frames, gives the kernel frames to receive into, and takes the received ones.
//! 2. [`Queue::find_payloads`] lets the lane parse packets and set the position of their payloads.
//! 3. [`Queue::split`] borrows the payloads and the send side: replies are written before a
//!    payload, in the frame of the request, or into a frame of their own.
//! 4. [`Sender::flush`] submits them to the kernel.
//!
//! Data that the kernel writes to rings and frames is checked before use, and cannot change
//! afterwards: the kernel writes only to frames that it was given to receive into.
//!
//! # One queue, several members
//!
//! A device queue has one fill and one completion ring in the kernel, but any number of sockets.
//! So threads can share it: [`Queue::open`] makes the queue and its first member, [`Queue::join`]
//! further ones. They share the allocator: the memory, the state of its frames, both rings, the
//! free list, and the number of frames that each member may be sending.
//!
//! | owner | owns | accessed |
//! |---|---|---|
//! | the allocator | fill and completion ring, free frames, counts | with its lock, once a pass |
//! | a member | RX and TX ring, packets of the last pass, cached frames, credits | without a lock |
//! | the kernel | frames that it receives into and sends from | through the rings |
//!
//! A member that holds the lock makes no system call and takes no other lock. So members block
//! each other only for as long as it takes to count a batch, and cannot deadlock. A member that
//! sleeps keeps only the packets of its last pass and the content of its RX ring: see
//! [`Queue::join`] for how many frames that takes.
//!
//! | file | holds |
//! |---|---|
//! | `ring.rs` | one ring: producer, consumer, and why they need no lock |
//! | `frames.rs` | the state of each frame, and which code may change it |
//! | `allocator.rs` | what members share, and all operations that need the lock |
//! | `open.rs` | opening a queue, joining one |
//! | `queue.rs` | the rounds of a queue, without system calls |
//! | `linearize.rs` | packets of several frames, linearized |
//! | `tx_queue.rs`, `send.rs` | the TX ring of a member; the two views of a batch |
//! | `socket.rs` | the system calls |
//! | `options.rs`, `statistics.rs` | options of a queue, the kernel's counters |
//! | `owners.rs` | the processes that have a queue open |
//! | `raw.rs` | a minimal receiver on raw rings, as a baseline |
//! | `lessor.rs`, `leased.rs` | a queue that one process opens and others use: all its state is in shared memory |

// Under the model checker only the rings are built: the checker's atomics cannot be in memory
// shared with the kernel.
#[cfg(not(loom))]
mod allocator;
#[cfg(not(loom))]
mod frames;
#[cfg(not(loom))]
mod leased;
#[cfg(not(loom))]
mod lessor;
#[cfg(not(loom))]
mod linearize;
#[cfg(not(loom))]
mod open;
#[cfg(not(loom))]
mod options;
#[cfg(not(loom))]
mod owners;
#[cfg(not(loom))]
mod queue;
#[cfg(all(not(loom), any(test, feature = "bench")))]
mod raw;
#[cfg_attr(loom, allow(dead_code, reason = "not all that the queue uses is in a model"))]
mod ring;
#[cfg(not(loom))]
mod send;
#[cfg(not(loom))]
mod socket;
#[cfg(not(loom))]
mod statistics;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
#[cfg(not(loom))]
mod tx_metadata;
#[cfg(not(loom))]
mod tx_queue;
#[cfg(not(loom))]
mod wakeup;

#[cfg(not(loom))]
pub use frames::FrameCounts;
#[cfg(not(loom))]
pub use leased::{Holder, LeasedQueue, QueueGuard, QueueParams};
#[cfg(not(loom))]
pub use lessor::{LessorQueue, QUEUE_MEMBERS_MAX};
#[cfg(not(loom))]
pub use open::{OpenError, Step, WeakQueue};
#[cfg(not(loom))]
pub use options::{Mode, QueueOptions};
#[cfg(not(loom))]
pub use owners::owners;
#[cfg(not(loom))]
pub use queue::Queue;
#[cfg(all(not(loom), any(test, feature = "bench")))]
pub use raw::RawXsk;
#[cfg(not(loom))]
pub use send::{PacketRef, PacketsMut, Payloads, Sender, TxFrame};
#[cfg(not(loom))]
pub use statistics::{Statistics, statistics};
