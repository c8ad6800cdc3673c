//! Engines: how a lane talks to the kernel. One file each, with the same few operations.

pub(crate) mod mmsg;
pub(crate) mod xdp;

/// What an engine on this socket can do. Nobody asks which engine it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Messages that one call takes or sends.
    pub batch: usize,
    /// Bytes of the largest datagram that is received whole.
    pub datagram_size: usize,
    /// Trains of datagrams are received as one message.
    pub gro: bool,
    /// Consecutive replies may leave as a train.
    pub gso: bool,
    /// Datagrams carry a time stamp of the kernel.
    pub timestamps: bool,
}

/// What one receive brought.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Taken {
    pub(crate) messages: usize,
    pub(crate) datagrams: usize,
    pub(crate) bytes: usize,
    pub(crate) truncated: usize,
    pub(crate) trains: usize,
}
