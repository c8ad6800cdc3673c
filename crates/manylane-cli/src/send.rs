//! `manylane send`: the load generator, with or without replies.

#[cfg(feature = "bench")]
mod testbed;

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use manylane_measure::client::{self, Expect, Plan, RequestCounts};
use manylane_measure::{Document, Sent, Traffic, Until, format_number, sockets};
use serde::Serialize;

use crate::args::SendArgs;
use crate::output::{self, UsageError};
use crate::parse::Rate;
use crate::progress::Progress;
use crate::signals;

/// Name of the document.
const SCHEMA: &str = "manylane.send.v1";
/// Default duration.
const DEFAULT_DURATION: Duration = Duration::from_secs(10);

/// Sends, and prints the result.
pub(crate) fn run(args: &SendArgs) -> Result<()> {
    let settings = Settings::new(args);
    let document = Document::new(SCHEMA, settings, vec![send(args)?]);
    let row = &document.rows[0];
    if args.json { output::print_json(&document) } else { output::print(&row.text()) }?;
    ensure!(
        !row.is_port_closed(),
        "no socket listens on {} (ECONNREFUSED), and no reply arrived: start the server, or check ADDR",
        args.addr.as_deref().unwrap_or_default()
    );
    Ok(())
}

fn send(args: &SendArgs) -> Result<Row> {
    #[cfg(feature = "bench")]
    if args.testbed {
        return testbed::send(args);
    }
    let to = resolve(args.addr.as_deref().unwrap_or_default())?;
    match args.expect {
        Expect::Nothing => generate(args, to),
        _ => send_requests(args, to),
    }
}

fn resolve(addr: &str) -> Result<SocketAddr> {
    let mut found =
        addr.to_socket_addrs().with_context(|| format!("cannot resolve {addr}: expected HOST:PORT"))?;
    found.next().with_context(|| format!("{addr} resolves to no address: expected HOST:PORT"))
}

/// The given duration, or the default; none if a count is given.
fn send_duration(args: &SendArgs) -> Option<Duration> {
    args.duration.or_else(|| args.count.is_none().then_some(DEFAULT_DURATION))
}

/// Sends requests by schedule, and checks the replies.
fn send_requests(args: &SendArgs, to: SocketAddr) -> Result<Row> {
    if args.gso {
        bail!(UsageError(
            "--gso and --expect exclude each other: replies to one GSO message cannot be timed".into()
        ));
    }
    let Rate::Pps(rate) = args.rate else {
        bail!(UsageError("--expect needs a number for --rate: requests are sent on schedule".into()));
    };
    let stop = signals::stop_flag()?;
    let plan = Plan {
        to,
        from: None,
        rate,
        count: args.count,
        duration: send_duration(args),
        size: args.size,
        flows: usize::from(args.flows),
        payload: args.payload.clone(),
        expect: args.expect.clone(),
        timeout: args.timeout,
    };
    let total = args.count.map_or_else(
        || rate * send_duration(args).unwrap_or(DEFAULT_DURATION).as_secs_f64(),
        |count| count as f64,
    );
    let mut progress = Progress::bar();
    let outcome = client::run(&plan, &stop, |tally: &RequestCounts| {
        progress
            .show(tally.asked as f64 / total, &format!("{} asked, {} answered", tally.asked, tally.answered));
    })?;
    drop(progress);
    let tally = outcome.counts;
    Ok(Row {
        sent: tally.asked,
        rejected: outcome.unsent,
        seconds: outcome.send_duration.as_secs_f64(),
        offered_pps: tally.asked as f64 / outcome.send_duration.as_secs_f64().max(1e-9),
        replies: Some(tally),
        refused: outcome.refused,
        loss: Some((tally.asked - tally.answered) as f64 / tally.asked.max(1) as f64),
        latency_ns: Some(Quantiles::from_histogram(&outcome.latency)),
        behind_ns: Some(Quantiles::from_histogram(&outcome.send_lag)),
        delivered: None,
    })
}

/// Sends datagrams with the sender on sockets, without replies.
fn generate(args: &SendArgs, to: SocketAddr) -> Result<Row> {
    let traffic = Traffic {
        pps: args.rate.pps(),
        flows: args.flows,
        gso: args.gso,
        payload: args.payload.as_ref().map(|payload| payload.bytes().to_vec()),
        ..Traffic::new(to, args.size)
    };
    let sent = match (args.count, send_duration(args)) {
        (Some(count), _) => sockets::send(&traffic, Until::CountOrStop(count, signals::stop_flag()?))?,
        (None, time) => send_for(time.unwrap_or(DEFAULT_DURATION), |until| sockets::send(&traffic, until))?,
    };
    Ok(Row::from_sent(&sent))
}

/// Sends for a time, or until a signal.
fn send_for(time: Duration, send: impl FnOnce(Until) -> Result<Sent>) -> Result<Sent> {
    let signal = signals::stop_flag()?;
    let stop = Arc::new(AtomicBool::new(false));
    let start = Instant::now();
    thread::scope(|scope| {
        let told = stop.clone();
        scope.spawn(move || {
            while start.elapsed() < time && !signal.load(Ordering::Relaxed) && !told.load(Ordering::Relaxed) {
                thread::sleep(time.saturating_sub(start.elapsed()).min(Duration::from_millis(20)));
            }
            told.store(true, Ordering::Relaxed);
        });
        let sent = send(Until::Stop(stop.clone()));
        // Even if the sender failed, the other thread must end.
        stop.store(true, Ordering::Relaxed);
        sent
    })
}

/// The settings of the run.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Settings {
    command: String,
    to: Option<String>,
    sender: &'static str,
    rate_pps: Option<f64>,
    count: Option<u64>,
    duration_seconds: Option<f64>,
    size: usize,
    flows: u16,
    expect: String,
    timeout_seconds: f64,
}

impl Settings {
    fn new(args: &SendArgs) -> Self {
        Self {
            command: output::command_line(),
            to: args.addr.clone(),
            sender: match (&args.expect, args.gso) {
                #[cfg(feature = "bench")]
                _ if args.testbed => "XDP live frames in a testbed",
                (Expect::Nothing, false) => "sockets (sendmmsg)",
                (Expect::Nothing, true) => "sockets (sendmmsg, UDP GSO)",
                _ => "sockets, open loop",
            },
            rate_pps: args.rate.pps(),
            count: args.count,
            duration_seconds: send_duration(args).map(|time| time.as_secs_f64()),
            size: args.payload.as_ref().map_or(args.size, |payload| payload.bytes().len()),
            flows: args.flows,
            expect: args.expect.to_string(),
            timeout_seconds: args.timeout.as_secs_f64(),
        }
    }
}

/// The result.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
struct Row {
    /// Datagrams that left.
    sent: u64,
    /// Datagrams that the kernel did not accept.
    rejected: u64,
    /// Duration of sending.
    seconds: f64,
    offered_pps: f64,
    /// Outcome of the requests, with --expect.
    #[serde(flatten)]
    replies: Option<RequestCounts>,
    /// Number of ECONNREFUSED errors: no socket listens there.
    refused: u64,
    /// Fraction of datagrams that were lost, if known.
    loss: Option<f64>,
    /// Time from when a request was due to its reply.
    latency_ns: Option<Quantiles>,
    /// Delay of the sender behind its schedule.
    behind_ns: Option<Quantiles>,
    /// Datagrams that the receiver in the testbed counted, with --testbed.
    delivered: Option<u64>,
}

/// Quantiles of a histogram, in its unit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
struct Quantiles {
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
    fn from_histogram(histogram: &hdrhistogram::Histogram<u64>) -> Self {
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
    fn from_sent(sent: &Sent) -> Self {
        Self {
            sent: sent.datagrams,
            rejected: sent.rejected,
            seconds: sent.elapsed.as_secs_f64(),
            offered_pps: sent.pps(),
            ..Self::default()
        }
    }

    /// True if requests were refused, and no reply of any kind came.
    fn is_port_closed(&self) -> bool {
        let is_silent = |replies: RequestCounts| replies.lost == replies.asked && replies.unexpected == 0;
        self.refused > 0 && self.replies.is_some_and(is_silent)
    }

    fn text(&self) -> String {
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
