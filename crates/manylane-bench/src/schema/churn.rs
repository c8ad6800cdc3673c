//! The row of `bench churn`.

use serde::{Deserialize, Serialize};

use super::Sample;

/// The one row of `bench churn`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChurnRow {
    /// Name of the receiver.
    pub receiver: String,
    /// Threads, and lanes, at the start.
    pub threads: usize,
    /// Lanes at the start.
    pub lanes: usize,
    /// Payload in bytes.
    pub size: usize,
    /// Datagrams per second that the sender really sent.
    pub offered_pps: f64,
    /// Datagrams per second that reached the application.
    pub delivered_pps: f64,
    /// Share of the sent datagrams that did not.
    pub loss: f64,
    /// Nanoseconds of CPU of the receiving threads per delivered datagram; null, because threads
    /// start and end.
    pub rx_cpu_ns: Option<f64>,
    /// Nanoseconds of CPU of the whole machine per delivered datagram.
    pub total_cpu_ns: f64,
    /// Datagrams sent.
    pub sent: u64,
    /// Datagrams delivered.
    pub delivered: u64,
    /// Sent but not delivered, counted after all traffic has ended.
    pub lost: u64,
    /// Lanes added while traffic ran.
    pub added: u64,
    /// Lanes removed while traffic ran.
    pub removed: u64,
    /// Milliseconds between two changes.
    pub every_ms: u64,
    /// The same figures as raw samples.
    pub samples: Vec<Sample>,
}
