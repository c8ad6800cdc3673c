//! io_uring for one lane: buffers are registered once, and completions replace calls.
//!
//! A *multishot* receive is submitted once. The kernel then posts a completion for each message,
//! which it writes into a buffer that it picks from a ring of them. The stages:
//!
//! | stage | file | owner of the buffer | when it is full or missing |
//! |---|---|---|---|
//! | the ring is made, buffers are registered | `setup.rs`, `buffers.rs` | - | the ring is not available: the caller goes on without it |
//! | buffers are given | `buffers.rs` | the kernel, until a completion names it | no buffer left: the receive ends (`ENOBUFS`), is counted and armed again; queued messages stay in the socket |
//! | the receive is armed | `recv.rs` | - | it ends, for any reason: armed again before the call returns |
//! | completions are read | `recv.rs` | the batch, as checked views | there is room for one per buffer and a few more: it cannot overflow |
//! | the batch ends | `buffers.rs` | the kernel again, all at once | - |
//!
//! The kernel takes messages out of the socket only within calls of the thread that owns the ring
//! (`DEFER_TASKRUN`). Between them, datagrams wait in the socket's queue, where they are counted
//! and where other readers may take them.
//!
//! Only the buffers are registered. The ring's own descriptor is not, because its registration
//! belongs to a thread and would keep the ring and the port open if another thread dropped the
//! lane. The socket is not, because the ring would hold it until the kernel has torn the ring
//! down, some time after it was closed.

#[cfg_attr(not(feature = "bench"), allow(dead_code, reason = "some of it is for the bare rings only"))]
mod abi;
#[cfg(any(test, feature = "bench"))]
mod bare;
#[cfg(any(test, feature = "bench"))]
mod bare_send;
mod buffers;
#[cfg(any(test, feature = "bench"))]
mod lookup;
mod recv;
mod setup;

#[cfg(all(test, not(miri)))]
mod tests;

#[cfg(any(test, feature = "bench"))]
pub use bare::{BareMultishot, BareOneshot, BareOptions};
#[cfg(any(test, feature = "bench"))]
pub use bare_send::BareSender;
#[cfg(any(test, feature = "bench"))]
pub use lookup::{Lookup, LookupRing};
pub use recv::{UringOptions, UringRecv};
