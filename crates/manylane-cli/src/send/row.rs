//! The result of a run, and its text.

use manylane_measure::client::RequestCounts;
use manylane_measure::{Sent, format_number};
use serde::Serialize;

/// The result.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct Row {
    /// Datagrams that left.
    pub(super) sent: u64,
    /// Datagrams that the kernel did not accept.
    pub(super) rejected: u64,
    /// Duration of sending.
    pub(super) seconds: f64,
    pub(super) offered_pps: f64,
    /// Outcome of the requests, with --expect.
    #[serde(flatten)]
    pub(super) replies: Option<RequestCounts>,
    /// Number of ECONNREFUSED errors: no socket listens there.
    pub(super) refused: u64,
    /// Fraction of datagrams that were lost, if known.
    pub(super) loss: Option<f64>,
    /// Time from when a request was due to its reply.
    pub(super) latency_ns: Option<Quantiles>,
    /// Delay of the sender behind its schedule.
    pub(super) behind_ns: Option<Quantiles>,
    /// Datagrams that the receiver in the testbed counted, with --testbed.
    pub(super) delivered: Option<u64>,
}

/// Quantiles of a histogram, in its unit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Quantiles {
    count: u64,
    min: u64,
    p50: u64,
    p90: u64,
    p99: u64,
    #[serde(rename = "p99.9")]
    p999: u64,
    max: u64,
}

impl Quantiles {
    pub(super) fn from_histogram(histogram: &hdrhistogram::Histogram<u64>) -> Self {
        Self {
            count: histogram.len(),
            min: if histogram.is_empty() { 0 } else { histogram.min() },
            p50: histogram.value_at_quantile(0.5),
            p90: histogram.value_at_quantile(0.9),
            p99: histogram.value_at_quantile(0.99),
            p999: histogram.value_at_quantile(0.999),
            max: histogram.max(),
        }
    }

    fn text(&self) -> String {
        let times = [self.p50, self.p90, self.p99, self.p999, self.max].map(format_nanos);
        format!("p50 {}  p90 {}  p99 {}  p99.9 {}  max {}", times[0], times[1], times[2], times[3], times[4])
    }
}

fn format_nanos(ns: u64) -> String {
    match ns as f64 {
        ns if ns >= 1e9 => format!("{:.2} s", ns / 1e9),
        ns if ns >= 1e6 => format!("{:.2} ms", ns / 1e6),
        ns if ns >= 1e3 => format!("{:.1} µs", ns / 1e3),
        ns => format!("{ns} ns"),
    }
}

impl Row {
    pub(super) fn from_sent(sent: &Sent) -> Self {
        Self {
            sent: sent.datagrams,
            rejected: sent.rejected,
            seconds: sent.elapsed.as_secs_f64(),
            offered_pps: sent.pps(),
            ..Self::default()
        }
    }

    /// True if requests were refused, and no reply of any kind came.
    pub(super) fn is_port_closed(&self) -> bool {
        let is_silent = |replies: RequestCounts| replies.lost == replies.asked && replies.unexpected == 0;
        self.refused > 0 && self.replies.is_some_and(is_silent)
    }

    pub(super) fn text(&self) -> String {
        let mut lines = vec![format!(
            "{} sent in {:.2} s, {}/s{}",
            self.sent,
            self.seconds,
            format_number(self.offered_pps),
            if self.rejected > 0 {
                format!(", {} rejected by the kernel", self.rejected)
            } else {
                String::new()
            }
        )];
        if let Some(delivered) = self.delivered {
            lines.push(format!("{delivered} delivered"));
        }
        if let Some(replies) = &self.replies {
            lines.push(format!(
                "{} answered, {} late, {} wrong, {} lost, {} duplicates, {} unexpected",
                replies.answered,
                replies.late,
                replies.wrong,
                replies.lost,
                replies.duplicates,
                replies.unexpected
            ));
        }
        if let Some(loss) = self.loss {
            lines.push(format!("loss     {:.4} %", loss * 100.0));
        }
        if self.refused > 0 {
            lines.push(format!(
                "refused  {} times (ECONNREFUSED): no socket listened on the port",
                self.refused
            ));
        }
        if let Some(latency) = self.latency_ns.filter(|latency| latency.count > 0) {
            lines.push(format!("latency  {}", latency.text()));
        }
        if let Some(behind) = self.behind_ns.filter(|behind| behind.p99 > 1_000_000) {
            lines.push(format!(
                "behind   {}: requests were sent late by this time, which the latency includes",
                behind.text()
            ));
        }
        lines.join("\n") + "\n"
    }
}
