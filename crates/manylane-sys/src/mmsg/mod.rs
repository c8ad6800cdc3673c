//! Rings of message headers for `recvmmsg(2)` and `sendmmsg(2)`, built once.
//!
//! A ring owns its headers, its addresses, its control messages and its buffers, all at fixed
//! addresses. A call passes a count; between calls only the fields that the kernel overwrote are
//! put back.

mod recv;
mod send;

pub use recv::{EchoControls, Message, RecvOptions, RecvRing, Totals, Wait};
pub use send::{SendBatch, SendOptions, SendRing, fits};
