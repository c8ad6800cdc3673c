//! What the library wrote down: lanes, and what fell back and why.

use std::sync::atomic::AtomicU64;

use serde::Serialize;

/// Bytes of the file that the library maps.
pub(super) const BYTES: usize = 65536;

/// What was there at one moment.
#[derive(Debug, Default, Clone, PartialEq, Serialize)]
pub(super) struct Report {
    /// Processes that loaded the library.
    pub(super) processes: Vec<u32>,
    /// Lanes, also those that have ended.
    pub(super) lanes: Vec<Lane>,
    /// Why sockets, or what they were asked for, had no lanes.
    pub(super) fallbacks: Vec<Fallback>,
    /// Lanes that the file had no room for.
    pub(super) left_out: u64,
}

/// What one lane did.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Lane {
    /// Address that the socket is bound to.
    pub(super) socket: String,
    /// Number of the lane in its socket; 0 is the original socket.
    pub(super) lane: u32,
    /// Process of the lane.
    pub(super) pid: u32,
    /// Thread that receives on it.
    pub(super) tid: u32,
    /// Datagrams received.
    pub(super) received: u64,
    /// Their bytes.
    pub(super) received_bytes: u64,
    /// Datagrams sent.
    pub(super) sent: u64,
    /// Their bytes.
    pub(super) sent_bytes: u64,
    /// Receiving system calls that brought something.
    pub(super) batches: u64,
    /// Calls that went to the plain socket after all.
    pub(super) fallbacks: u64,
}

/// Something that had no lanes.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Fallback {
    /// In a few words.
    pub(super) reason: String,
    /// How often.
    pub(super) count: u64,
    /// The process in which it happened last.
    pub(super) pid: u32,
    /// The socket to which it happened last.
    pub(super) socket: String,
}

/// Reads the file.
pub(super) fn read(_words: &[AtomicU64]) -> Report {
    Report::default()
}

impl Report {
    /// Datagrams received and sent, of all lanes.
    pub(super) fn total(&self) -> (u64, u64) {
        self.lanes.iter().fold((0, 0), |(received, sent), lane| (received + lane.received, sent + lane.sent))
    }
}
