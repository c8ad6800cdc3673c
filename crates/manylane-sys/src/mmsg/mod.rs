//! Rings of message headers for `recvmmsg(2)` and `sendmmsg(2)`, built once.
//!
//! A ring owns its headers, addresses, control messages and buffers, all at fixed addresses. A
//! call passes a count. Between calls, only the fields that the kernel overwrote are reset.

mod recv;
mod send;

#[cfg(any(test, feature = "bench"))]
pub use recv::echo::EchoControls;
#[cfg(any(test, feature = "bench"))]
pub use recv::remembered::RememberedRing;
pub use recv::{Message, RecvOptions, RecvRing, Totals, Wait};
pub use send::{SEGMENTS_MAX, SendBatch, SendOptions, SendRing, fits};
