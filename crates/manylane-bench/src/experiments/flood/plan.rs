//! The plan of the benchmark: its parts, the variants of a part, and the place of their servers.

use std::fmt;
use std::time::Duration;

use anyhow::Result;
use manylane::{Engine, Limit};
use manylane_measure::{Traffic, named_enum};
use manylane_testbed::Host;

use super::server::SenderThread;

/// Bytes of payload of every datagram.
pub(super) const PAYLOAD_SIZE: usize = 32;
/// Simulated work of a request, in parts `clients` and `program`.
pub(super) const REQUEST_COST: Duration = Duration::from_micros(10);

named_enum! {
    /// A part of the benchmark.
    pub enum Part {
        /// Regular clients beside a flood.
        Clients = "clients",
        /// A new source for each datagram.
        Sources = "sources",
        /// A program beside a flood.
        Program = "program",
    }
}

/// Options in addition to those of all benchmarks.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The parts, in their order.
    pub parts: Vec<Part>,
    /// The limit of the server in variants with a limit, in `clients` and `program`.
    pub limit: Limit,
    /// Total time with new sources, over all rounds. The load of one source takes as long.
    pub sources: Duration,
}

/// A variant: how a server is flooded.
pub(super) struct Variant {
    pub(super) name: &'static str,
    pub(super) engine: Engine,
    pub(super) limit: bool,
    pub(super) sender_load: SenderLoad,
}

/// The load on the sender's CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SenderLoad {
    /// Nothing.
    Idle,
    /// The flood generator.
    Flood,
    /// A thread that only spins, as the generator does between two frames. Its effect on other
    /// threads there is not an effect of the flood.
    BusyThread,
}

impl SenderLoad {
    /// Starts the thread of this load, if it has one.
    pub(super) fn start(self, bed: &FloodTestbed, traffic: &Traffic) -> Result<Option<SenderThread>> {
        match self {
            Self::Idle => Ok(None),
            Self::Flood => SenderThread::flood((&bed.from, &bed.to), bed.sender_cpu, traffic).map(Some),
            Self::BusyThread => SenderThread::spin(bed.sender_cpu).map(Some),
        }
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl Variant {
    pub(super) fn receiver_name(&self) -> &'static str {
        if self.engine == Engine::Xdp { "lane/xdp" } else { "lane/mmsg" }
    }
}

/// The place of a server.
pub(super) struct FloodTestbed {
    pub(super) from: Host,
    pub(super) to: Host,
    pub(super) lane_cpu: usize,
    pub(super) sender_cpu: usize,
    /// Maximum number of datagrams of one call of a server.
    pub(super) batch: usize,
}
