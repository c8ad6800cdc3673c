//! A running receiver, and its counters.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use manylane::Handle;

/// Counters of a receiver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Datagrams that reached the application since the start.
    pub delivered: u64,
    /// Datagrams that the kernel dropped at the receiver's sockets since the start.
    pub kernel_dropped: u64,
    /// CPU time of the receiving threads since their start.
    pub rx_cpu: Duration,
}

/// A running receiver. It stops when it is dropped.
pub trait RunningReceiver: Send {
    /// The address it listens on.
    fn addr(&self) -> SocketAddr;

    /// Its counters, read without disturbing the receiving threads.
    fn snapshot(&self) -> Snapshot;

    /// The handle of the lanes, for receivers with lanes.
    fn lanes(&self) -> Option<Handle> {
        None
    }

    /// Stops it and returns its final counters.
    fn stop(self: Box<Self>) -> Result<Snapshot>;
}
