//! Queues of a device in user space: AF_XDP sockets, their rings and their frames (Linux 5.4).
//!
//! A [`Queue`] owns the memory that a device queue receives into and sends from. It is cut into
//! frames of one size; a frame is in one place at a time: with the kernel to be received into, in
//! the current batch, free, taken to be filled, or with the kernel to be sent.
//! [`Queue::frame_counts`] says how many are where.
//!
//! One round of a lane:
//!
//! 1. [`Queue::receive`] ends the batch before, takes back what was sent, gives the kernel frames
//!    to receive into, and takes what has come.
//! 2. [`Queue::find_payloads`] to parse, and to say where payloads are.
//! 3. [`Queue::split`] leases the payloads and the way out: replies are written before a payload,
//!    in the frame it came in, or into a frame of their own.
//! 4. [`Sender::flush`] hands them to the kernel.
//!
//! What the kernel writes, in rings and in frames, is checked before use and cannot change
//! afterwards: the kernel writes only to frames that it was given to receive into.
//!
//! # One queue, several members
//!
//! A device queue has one fill and one completion ring in the kernel, but any number of sockets. So
//! threads can share it: [`Queue::open`] makes the queue and its first member, [`Queue::join`]
//! further ones. What they have in common is the pool: the memory and the places of its frames,
//! both rings, the free list, and how many frames each member may have on their way out.
//!
//! | who | owns | reached |
//! |---|---|---|
//! | the pool | fill and completion ring, free frames, counts | with its lock, once a batch |
//! | a member | its receive and send ring, its batch, its supply of frames and credits | without a lock |
//! | the kernel | what is being received into and sent from | through the rings |
//!
//! A member that holds the lock makes no system call and takes no other lock, so members cannot
//! block each other for longer than it takes to count a batch, and cannot be in a deadlock. Who
//! sleeps holds nothing that others need but its last batch and what lies in its receive ring: see
//! [`Queue::join`] for how many frames that takes.
//!
//! | file | holds |
//! |---|---|
//! | `ring.rs` | one ring: producer, consumer, and why they need no lock |
//! | `frames.rs` | who has which frame, and who may move it on |
//! | `allocator.rs` | what members share, and all that is done with the lock held |
//! | `member.rs` | the rounds of a member, without system calls |
//! | `linearize.rs` | packets of several frames, put together |
//! | `tx_queue.rs`, `send.rs` | what a member sends with; the two views of a batch |
//! | `socket.rs` | the system calls |
//! | `queue.rs` | all of it together |
//! | `owners.rs` | who has a queue, of all processes |
//! | `lessor.rs`, `leased.rs` | a queue that one process opens and others use: all that is known of it is in shared memory |

// Under the model checker only the rings are built: its atomics cannot lie in memory that the
// kernel shares.
#[cfg(not(loom))]
mod allocator;
#[cfg(test)]
#[cfg(not(loom))]
mod conservation;
#[cfg(not(loom))]
mod frames;
#[cfg(not(loom))]
mod leased;
#[cfg(not(loom))]
mod lessor;
#[cfg(not(loom))]
mod linearize;
#[cfg(not(loom))]
mod member;
#[cfg(test)]
#[cfg(not(loom))]
mod mock;
#[cfg(not(loom))]
mod owners;
#[cfg(not(loom))]
mod queue;
#[cfg(test)]
#[cfg(not(any(loom, miri)))]
mod real_support;
#[cfg(test)]
#[cfg(not(any(loom, miri)))]
mod real_tests;
#[cfg(test)]
#[cfg(not(any(loom, miri)))]
mod real_veth_tests;
#[cfg_attr(loom, allow(dead_code, reason = "not all that the queue uses is in a model"))]
mod ring;
#[cfg(not(loom))]
mod send;
#[cfg(test)]
#[cfg(not(loom))]
mod sharing_tests;
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
pub use leased::{Holder, LeasedQueue, QueueGuard};
#[cfg(not(loom))]
pub use lessor::{LessorQueue, QUEUE_MEMBERS_MAX};
#[cfg(not(loom))]
pub use owners::owners;
#[cfg(not(loom))]
pub use queue::{OpenError, Queue, Step, WeakQueue};
#[cfg(not(loom))]
pub use send::{PacketRef, Payloads, Sender, TxFrame};
#[cfg(not(loom))]
pub use socket::statistics;

/// Sizes of a [`Queue`], and what it is bound to. For one that joins others see [`Queue::join`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueOptions {
    /// Index of the device.
    pub ifindex: u32,
    /// Queue of the device.
    pub queue: u32,
    /// Frames in all. As many as `ring`, but at most half, are kept for receiving; the others are
    /// for the batch and for sending. Twice `ring` suits most.
    pub frames: u32,
    /// Bytes of a frame: 2048 or 4096, and not more than a page. The kernel keeps the first 256 of
    /// a frame that it receives into.
    pub frame_size: u32,
    /// Entries of the receive and the fill ring, a power of two.
    pub ring: u32,
    /// Entries of the send and the completion ring, a power of two.
    pub tx_ring: u32,
    /// Most packets of one receive.
    pub batch: usize,
    /// How packets get from the device into the frames.
    pub mode: Mode,
    /// Whether packets that are longer than a frame are taken, too (Linux 6.6, `XDP_USE_SG`): see
    /// [`Queue::has_multi_buffer`] for whether they are. Costs 1 MiB of address space for each
    /// member, and with [`Mode::Auto`] copying where a driver copies nothing but only packets of
    /// one frame. The XDP program has to be loaded for packets in fragments (`BPF_F_XDP_HAS_FRAGS`)
    /// where the device makes such.
    pub multi_buffer: bool,
}

/// How packets get from the device into the frames, and back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Without copying if the driver can, else copied.
    #[default]
    Auto,
    /// Copied: works on every device, also with generic XDP.
    Copy,
    /// The device writes into the frames; binding fails where the driver cannot.
    ZeroCopy,
}

/// What the kernel counts of a socket since it was opened (`XDP_STATISTICS`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statistics {
    /// Packets dropped: too long for a frame, or no frame in the fill ring. Before Linux 5.9 also
    /// those that found the receive ring full.
    pub rx_dropped: u64,
    /// Entries of the fill ring that were no frames.
    pub rx_invalid_descs: u64,
    /// Descriptors of the send ring that the kernel refused.
    pub tx_invalid_descs: u64,
    /// Packets dropped because the receive ring was full (Linux 5.9, as all below; before, 0).
    pub rx_ring_full: u64,
    /// Times that the kernel found no frame in the fill ring. With copying each is a packet, which
    /// `rx_dropped` has too; without, a device waits or drops, and counts that itself.
    pub rx_fill_ring_empty_descs: u64,
    /// Times that the kernel found the send ring empty.
    pub tx_ring_empty_descs: u64,
}

impl Statistics {
    /// Packets redirected to the socket that did not get into its receive ring.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.rx_dropped + self.rx_ring_full
    }
}

/// How many frames of a queue are where, those of all members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FrameCounts {
    /// On the free list, or in the supply of a member.
    pub free: u32,
    /// With the kernel to be received into, or received and not taken yet.
    pub filling: u32,
    /// In the current batch of a member and not on their way out.
    pub held: u32,
    /// Handed out by [`Sender::alloc`], neither sent nor given back yet.
    pub allocated: u32,
    /// With the kernel to be sent, or sent and not taken back yet; those of current batches too.
    pub sending: u32,
    /// Not frames: entries of the kernel's that named no frame of its, or more of one than there
    /// is.
    pub invalid: u64,
}

impl FrameCounts {
    /// All frames: always what the queue was opened with.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.free + self.filling + self.held + self.allocated + self.sending
    }
}
