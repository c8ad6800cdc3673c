//! Rings of captured frames in memory shared by two processes.
//!
//! A lane writes copies of frames into a [`Producer`]; a process that captures reads them from the
//! [`Consumer`] of the same ring. Neither waits for the other, makes a system call for the other,
//! or trusts the other:
//!
//! | what one side could do | why the other side is safe |
//! |---|---|
//! | the capturing process dies, or never reads anything | the ring is full: the lane counts frames without room and goes on |
//! | it writes garbage into its counter | an invalid counter counts as no progress (`ring.rs`) |
//! | it writes to the frames | it cannot: its mapping of them is read-only, sealed by the kernel |
//! | it shrinks the memory | it cannot: also sealed |
//! | the process of the lane dies | the memory stays until the last mapping is gone |
//! | that process writes garbage into the ring | sizes and lengths are checked; the bytes are copied before use |
//!
//! | file | holds |
//! |---|---|
//! | `ring.rs` | the ring: producer, consumer, layout, and why they need no lock |
//! | [`messages`] | how a capture is started, and rings are passed on |
//! | `memory.rs` | the memory: unnamed files, their seals, their mappings (Linux 5.1) |

// Under the model checker only the ring is built: the checker's atomics cannot be in shared
// memory.
#[cfg(not(loom))]
mod memory;
#[cfg(not(loom))]
pub mod messages;
#[cfg_attr(loom, allow(unreachable_pub, reason = "what exports it needs shared memory"))]
mod ring;

#[cfg(not(loom))]
pub use memory::{Consumer, Producer, create, open};
pub use ring::{CorruptRing, Direction, DropCounts, RecordHeader, SNAPLEN_MAX};
