//! Queues of a device in user space: AF_XDP sockets, their rings and their frames (Linux 5.4).
//!
//! A [`Queue`] owns the memory that a device queue receives into and sends from. It is divided
//! into frames of one size. A frame is in one state at a time: with the kernel to receive into, in
//! the current batch, free, allocated to be filled, or with the kernel to send.
//! [`FrameCounts`] has the number in each state.
//!
//! One round of a lane:
//!
//! 1. [`Queue::receive`] ends the previous batch, reclaims sent frames, gives the kernel frames to
//!    receive into, and takes the received ones.
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
//! | the allocator | fill and completion ring, free frames, counts | with its lock, once a batch |
//! | a member | its RX and TX ring, its batch, its cache of frames and credits | without a lock |
//! | the kernel | frames that it receives into and sends from | through the rings |
//!
//! A member that holds the lock makes no system call and takes no other lock. So members block
//! each other only for as long as it takes to count a batch, and cannot deadlock. A member that
//! sleeps keeps only its last batch and the content of its RX ring: see [`Queue::join`] for how
//! many frames that takes.
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
pub use leased::{Holder, LeasedQueue, QueueGuard, QueueParams};
#[cfg(not(loom))]
pub use lessor::{LessorQueue, QUEUE_MEMBERS_MAX};
#[cfg(not(loom))]
pub use open::{OpenError, Step, WeakQueue};
#[cfg(not(loom))]
pub use owners::owners;
#[cfg(not(loom))]
pub use queue::Queue;
#[cfg(all(not(loom), any(test, feature = "bench")))]
pub use raw::RawXsk;
#[cfg(not(loom))]
pub use send::{PacketRef, Payloads, Sender, TxFrame};
#[cfg(not(loom))]
pub use socket::statistics;

/// Sizes of a [`Queue`], and what it binds to. For a queue that joins others see [`Queue::join`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueOptions {
    /// Index of the device.
    pub ifindex: u32,
    /// Queue of the device.
    pub queue: u32,
    /// Number of frames. As many as `ring`, but at most half, are kept for receiving; the others
    /// are for the batch and for sending. Twice `ring` suits most uses.
    pub frames: u32,
    /// Size of a frame: 2048 or 4096 bytes, and at most a page. The kernel reserves the first 256
    /// of a frame that it receives into.
    pub frame_size: u32,
    /// Entries of the RX and the fill ring, a power of two.
    pub ring: u32,
    /// Entries of the TX and the completion ring, a power of two.
    pub tx_ring: u32,
    /// Maximum packets of one receive.
    pub batch: usize,
    /// Transfer of packets from the device into the frames.
    pub mode: Mode,
    /// True to accept packets that are longer than a frame (Linux 6.6, `XDP_USE_SG`).
    /// [`Queue::has_multi_buffer`] tells if that is in force. Costs 1 MiB of address space for
    /// each member; with [`Mode::Auto`], packets are copied if the driver supports zero copy only
    /// for packets of one frame. If the device makes fragments, the XDP program has to be loaded
    /// for them (`BPF_F_XDP_HAS_FRAGS`).
    pub multi_buffer: bool,
}

/// Transfer of packets between the device and the frames.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Zero copy if the driver supports it, else copied.
    #[default]
    Auto,
    /// Copied: works on every device, also with generic XDP.
    Copy,
    /// Zero copy: the device writes into the frames. Binding fails if the driver does not support
    /// it.
    ZeroCopy,
}

/// The kernel's counters of a socket since it was opened (`XDP_STATISTICS`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statistics {
    /// Packets dropped: too long for a frame, or no frame in the fill ring. Before Linux 5.9 also
    /// those dropped because the RX ring was full.
    pub rx_dropped: u64,
    /// Invalid entries of the fill ring.
    pub rx_invalid_descs: u64,
    /// Descriptors of the TX ring that the kernel refused.
    pub tx_invalid_descs: u64,
    /// Packets dropped because the RX ring was full (Linux 5.9, as all below; 0 before).
    pub rx_ring_full: u64,
    /// Times that the kernel found the fill ring empty. In copy mode each is a packet, which
    /// `rx_dropped` includes. With zero copy, the device waits or drops, and counts that itself.
    pub rx_fill_ring_empty_descs: u64,
    /// Times that the kernel found the TX ring empty.
    pub tx_ring_empty_descs: u64,
}

impl Statistics {
    /// Packets redirected to the socket that did not reach its RX ring.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.rx_dropped + self.rx_ring_full
    }
}

/// Numbers of frames of a queue by state, over all members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FrameCounts {
    /// On the free list, or in a member's cache.
    pub free: u32,
    /// With the kernel to receive into, or received and still in an RX ring.
    pub filling: u32,
    /// In the current batch of a member and not being sent.
    pub held: u32,
    /// Allocated by [`Sender::alloc`], and neither sent nor freed yet.
    pub allocated: u32,
    /// With the kernel to send, or sent and not reclaimed yet; includes those of current batches.
    pub sending: u32,
    /// Not frames: invalid entries from the kernel, which named no frame of its own, or too many
    /// bytes of one.
    pub invalid: u64,
}

impl FrameCounts {
    /// The number of all frames: always that with which the queue was opened.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.free + self.filling + self.held + self.allocated + self.sending
    }
}
