//! io_uring for one lane: everything registered once, then completions instead of calls.
//!
//! A *multishot* receive is submitted once and then brings a completion for each message, which the
//! kernel writes into a buffer that it picks from a ring of them. The stages, and who owns a buffer
//! in each:
//!
//! | stage | file | who owns the buffer | when it is full or missing |
//! |---|---|---|---|
//! | memory and files are registered | `setup.rs`, `buffers.rs` | - | the ring cannot be had: the caller goes on without |
//! | buffers are given | `buffers.rs` | the kernel, until a completion names it | none left: the receive ends (`ENOBUFS`), is counted and armed anew; what has arrived stays in the socket |
//! | the receive is armed | `recv.rs` | - | it ends for whatever reason: armed anew before the call returns |
//! | completions are taken | `recv.rs` | the batch, as checked views | room for one per buffer and a few more: it cannot overflow |
//! | the batch is over | `buffers.rs` | the kernel again, all at once | - |
//!
//! Nothing is taken out of the socket but in calls of the thread that owns the ring
//! (`DEFER_TASKRUN`): between them, datagrams wait in the socket's queue, where they are counted
//! and where others may take them.

mod abi;
mod bare;
mod bare_send;
mod buffers;
mod lookup;
mod recv;
mod setup;

#[cfg(all(test, not(miri)))]
mod tests;

pub use bare::{BareMultishot, BareOneshot, BareOptions};
pub use bare_send::BareSender;
pub use lookup::{Lookup, Lookups};
pub use recv::{UringOptions, UringRecv};
