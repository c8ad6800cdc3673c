//! The rows of `bench batch` and `bench replies`.

use serde::Serialize;

use crate::report::{Figure, Figures, Grid};
use crate::stats::{format_quartiles, median};

/// One sample of `bench batch`: some queues, filled and drained. Or of `bench replies`, where the
/// delivered datagrams are those that the kernel accepted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct BatchSample {
    /// The round that it was taken in, from 0.
    pub round: usize,
    /// Nanoseconds of CPU of the receiving thread per datagram, user and kernel, while it drained
    /// the queues.
    pub rx_cpu_ns: f64,
    /// Datagrams sent.
    pub sent: u64,
    /// Datagrams received.
    pub delivered: u64,
    /// Number of receive calls.
    pub calls: u64,
}

/// One row of `bench batch` or `bench replies`: figures are medians over the samples.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BatchRow {
    /// Name of the receiver: `lane/mmsg`, `socket/recvmmsg`, …
    pub receiver: String,
    /// Threads that receive: one.
    pub threads: usize,
    /// Receive queues: one.
    pub lanes: usize,
    /// Payload in bytes.
    pub size: usize,
    /// Maximum number of messages of a call.
    pub messages: usize,
    /// Average number of messages of a call.
    pub messages_per_call: f64,
    /// Share of the sent datagrams that were not received.
    pub loss: f64,
    /// Nanoseconds of CPU of the receiving thread per datagram.
    pub rx_cpu_ns: f64,
    /// The raw samples.
    pub samples: Vec<BatchSample>,
}

impl BatchRow {
    /// A row of the medians of `samples`.
    pub fn from_samples(receiver: &str, size: usize, messages: usize, samples: Vec<BatchSample>) -> Self {
        let middle = |value: fn(&BatchSample) -> f64| median(samples.iter().map(value));
        Self {
            receiver: receiver.into(),
            threads: 1,
            lanes: 1,
            size,
            messages,
            messages_per_call: middle(|seen| seen.delivered as f64 / seen.calls.max(1) as f64),
            loss: middle(|seen| 1.0 - seen.delivered.min(seen.sent) as f64 / seen.sent.max(1) as f64),
            rx_cpu_ns: middle(|seen| seen.rx_cpu_ns),
            samples,
        }
    }
}

impl Figures for BatchRow {
    const COLUMNS: &'static [&'static str] =
        &["receiver", "bytes", "batch", "messages/call", "loss %", "CPU ns", "quartiles"];

    fn cells(&self, _all: &[Self]) -> Vec<String> {
        vec![
            self.receiver.clone(),
            self.size.to_string(),
            self.messages.to_string(),
            format!("{:.1}", self.messages_per_call),
            format!("{:.3}", self.loss * 100.0),
            format!("{:.0}", self.rx_cpu_ns),
            format_quartiles(self.samples.iter().map(|sample| sample.rx_cpu_ns), 0),
        ]
    }

    fn section(&self) -> String {
        format!("Datagrams of {} bytes", self.size)
    }

    fn figures(rows: &[&Self]) -> Vec<Figure> {
        let key = |row: &Self| (row.receiver.clone(), row.messages.to_string());
        let cost = |row: &Self| row.samples.iter().map(|sample| sample.rx_cpu_ns).collect();
        let by_messages = Grid::new(rows, "maximum number of messages per call", key);
        vec![by_messages.lines("CPU per datagram", "Lower is better.", "ns per datagram", cost)]
    }
}
