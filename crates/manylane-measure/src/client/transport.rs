//! How the requests of a client leave, and how replies arrive.

use std::time::Duration;

use anyhow::Result;

/// Takes a reply: the number of its flow, and the payload.
pub type OnReply<'a> = &'a mut dyn FnMut(usize, &[u8]);

/// Flows that a client can send from, numbered from 0.
pub trait Transport {
    /// Sends a request from a flow. False: it was not accepted, and counts as unsent.
    ///
    /// # Errors
    /// Fails on an error that no later request will be without.
    fn send(&mut self, flow: usize, request: &[u8]) -> Result<bool>;

    /// Waits at most `wait` for replies, and passes some or all of those that arrived to
    /// `on_reply`. Returns 0 only if there was none.
    ///
    /// # Errors
    /// Fails if it cannot wait.
    fn recv(&mut self, wait: Duration, on_reply: OnReply<'_>) -> Result<usize>;

    /// Number of ECONNREFUSED errors: no socket listens there.
    fn refused(&self) -> u64;
}
