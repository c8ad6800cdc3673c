//! The common part of traffic benchmarks: a sample, and the medians of several.

use std::time::Duration;

use serde::Serialize;

use crate::stats::median;

/// One sample: one receiver, one time span of traffic. In `bench echo`, the datagrams sent are
/// requests, and those delivered are the replies that reached the sending host.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Sample {
    /// The round that it was taken in, from 0.
    pub round: usize,
    /// Datagrams per second that the sender really sent.
    pub offered_pps: f64,
    /// Datagrams per second that reached the application.
    pub delivered_pps: f64,
    /// Share of the sent datagrams that did not reach it.
    pub loss: f64,
    /// Nanoseconds of CPU of the receiving threads per delivered datagram.
    pub rx_cpu_ns: f64,
    /// Nanoseconds of CPU of the whole machine, sender and softirqs included, per delivered
    /// datagram.
    pub total_cpu_ns: f64,
    /// Datagrams sent.
    pub sent: u64,
    /// Datagrams delivered.
    pub delivered: u64,
    /// Datagrams that the kernel counted as dropped at the receiver's sockets.
    pub kernel_dropped: u64,
    /// Datagrams that were neither delivered nor dropped when the sender ended.
    pub queued_at_end: u64,
    /// Requests that reached the application, answered or not; in `bench echo` only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub received: Option<u64>,
}

impl Sample {
    /// A sample of `elapsed`, with the CPU time of the receiving threads and of the machine.
    #[must_use]
    pub fn from_totals(
        round: usize,
        sent: u64,
        delivered: u64,
        elapsed: Duration,
        [rx_cpu, busy]: [Duration; 2],
        kernel_dropped: u64,
    ) -> Self {
        let per_second = |count: u64| count as f64 / elapsed.as_secs_f64().max(1e-9);
        let per_datagram = |time: Duration| time.as_nanos() as f64 / delivered.max(1) as f64;
        Self {
            round,
            offered_pps: per_second(sent),
            delivered_pps: per_second(delivered),
            loss: sent.saturating_sub(delivered) as f64 / sent.max(1) as f64,
            rx_cpu_ns: per_datagram(rx_cpu),
            total_cpu_ns: per_datagram(busy),
            sent,
            delivered,
            kernel_dropped,
            queued_at_end: 0,
            received: None,
        }
    }
}

/// Common fields of the rows of traffic benchmarks: the receiver, its parameters, and the medians
/// of its samples.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Metrics {
    /// Name of the receiver: `lane/mmsg`, `socket/recvfrom`, …
    pub receiver: String,
    /// Threads that receive.
    pub threads: usize,
    /// Receive queues: sockets for the baselines, lanes for ours.
    pub lanes: usize,
    /// Payload in bytes.
    pub size: usize,
    /// See [`Sample`].
    pub offered_pps: f64,
    /// See [`Sample`].
    pub delivered_pps: f64,
    /// See [`Sample`].
    pub loss: f64,
    /// See [`Sample`].
    pub rx_cpu_ns: f64,
    /// See [`Sample`].
    pub total_cpu_ns: f64,
}

impl Metrics {
    /// The medians of `samples`.
    pub fn from_samples<'a>(
        receiver: &str,
        threads: usize,
        lanes: usize,
        size: usize,
        samples: impl Iterator<Item = &'a Sample>,
    ) -> Self {
        let samples: Vec<_> = samples.collect();
        let middle = |value: fn(&Sample) -> f64| median(samples.iter().map(|sample| value(sample)));
        Self {
            receiver: receiver.into(),
            threads,
            lanes,
            size,
            offered_pps: middle(|sample| sample.offered_pps),
            delivered_pps: middle(|sample| sample.delivered_pps),
            loss: middle(|sample| sample.loss),
            rx_cpu_ns: middle(|sample| sample.rx_cpu_ns),
            total_cpu_ns: middle(|sample| sample.total_cpu_ns),
        }
    }
}
