//! Frames for another process to look at: rings in memory that two processes share.
//!
//! A lane writes copies of frames into a [`Producer`]; a process that captures takes them from the
//! [`Consumer`] of the same ring. Neither waits for the other, neither makes a system call for the
//! other, and neither trusts the other:
//!
//! | what one side could do | why the other one lives |
//! |---|---|
//! | the capturing process dies, or never takes anything | the ring is full: the lane counts what has no place and goes on |
//! | it writes nonsense into its counter | a counter that cannot be is no progress (`ring.rs`) |
//! | it writes to the frames | it cannot: its mapping of them is read-only, sealed so by the kernel |
//! | it makes the memory shorter | it cannot: sealed, too |
//! | the process of the lane dies | the memory stays until the last mapping is gone |
//! | that process writes nonsense into the ring | sizes and lengths are checked; the bytes are copied before use |
//!
//! | file | holds |
//! |---|---|
//! | `ring.rs` | the ring: producer, consumer, layout, and why they need no lock; nothing unsafe |
//! | `memory.rs` | the memory: files without a name, their seals, their mappings (Linux 5.1) |

// Under the model checker only the ring is built: its atomics cannot lie in memory that processes
// share.
#[cfg(not(loom))]
mod memory;
mod ring;

#[cfg(not(loom))]
pub use memory::{Region, create, open};
pub use ring::{Consumer, CorruptRing, Direction, DropCounts, Producer, RecordHeader, SNAPLEN_MAX};
