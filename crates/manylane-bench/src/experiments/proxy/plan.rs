//! What clients do, and to which proxies.

use std::fmt;
use std::time::Duration;

use manylane_measure::named_enum;

use super::clients::Traffic;
use super::contender::{Contender, Manylane};

/// Connections of the loads with few and with many.
pub(super) const FEW: usize = 64;
const MANY: usize = 5000;
/// Connections without traffic.
pub(super) const IDLE: usize = 50_000;
/// Connections of the bulk loads.
const STREAMS: usize = 8;
/// Share of the baseline's highest rate at which latency is measured.
pub(super) const RATE_FRACTION: f64 = 0.7;
/// Time before each sample that is not measured.
pub(super) const WARM_UP_TIME: Duration = Duration::from_secs(1);
/// The proxy's port.
pub(super) const PORT: u16 = 8000;

named_enum! {
    /// What clients do.
    pub enum Load {
        /// 64 connections that live on, one request at a time on each.
        KeepAlive = "keep-alive",
        /// 64 clients, a connection for each request.
        Connect = "connect",
        /// 5,000 connections that live on.
        KeepAliveMany = "keep-alive-5000",
        /// 5,000 clients, a connection for each request.
        ConnectMany = "connect-5000",
        /// 64 connections at a fixed rate.
        Paced = "paced",
        /// As keep-alive, with lanes as clients and servers; to compare with the next one.
        Alone = "alone",
        /// The same beside 50,000 connections without traffic.
        AmongIdle = "among-idle",
        /// Bytes from the servers, in frames of the wire's size.
        Bulk = "bulk",
        /// The same, where the devices take longer segments.
        BulkOffload = "bulk-offload",
    }
}

impl Load {
    pub(super) fn connections(self) -> usize {
        match self {
            Self::KeepAlive | Self::Connect | Self::Paced | Self::Alone => FEW,
            Self::KeepAliveMany | Self::ConnectMany => MANY,
            Self::AmongIdle => FEW + IDLE,
            Self::Bulk | Self::BulkOffload => STREAMS,
        }
    }

    /// True if only lanes can have as many connections.
    pub(super) fn needs_lanes(self) -> bool {
        matches!(self, Self::Alone | Self::AmongIdle)
    }

    pub(super) fn traffic(self, rate: f64) -> Traffic {
        match self {
            Self::KeepAlive | Self::KeepAliveMany | Self::Alone | Self::AmongIdle => Traffic::KeepAlive,
            Self::Connect | Self::ConnectMany => Traffic::Connect,
            Self::Paced => Traffic::Paced(rate),
            Self::Bulk | Self::BulkOffload => Traffic::Stream,
        }
    }
}

/// Options of the benchmark.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The proxies.
    pub contenders: Vec<Contender>,
    /// What clients do.
    pub loads: Vec<Load>,
    /// Requests per second of the paced load; by default 0.7 of the first contender's highest rate.
    pub rate: Option<f64>,
    /// What runs the contenders of this project.
    pub manylane: Manylane,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Config {
    pub(super) load: Load,
    pub(super) contender: Contender,
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.contender, self.load)
    }
}
