//! The receivers that lanes are measured against, and the lanes themselves in the same dress.
//!
//! Each is what a good engineer would write by hand for the same job: no needless system call, no
//! shared counter, the same batch, the same receive buffer, the same pinning. All read the first
//! byte of each payload, so that all pay for the memory the datagram is in.

pub(crate) mod lane;
pub(crate) mod recvfrom;
pub(crate) mod recvmmsg;
pub(crate) mod uring;
mod workers;
pub(crate) mod xsk_checked;
pub(crate) mod xsk_raw;

#[cfg(test)]
mod tests;
