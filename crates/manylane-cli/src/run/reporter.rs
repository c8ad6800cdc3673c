//! Prints the report of lanes and fallbacks: a line per interval while the program runs, a table
//! or a document at its end.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets};
use manylane::{FilterDrops, FilterHandle, MetricsPage};
use manylane_measure::{Machine, format_number};
use serde::Serialize;

use super::backlog::Backlog;
use super::launch::{Exit, process_state};
use super::report::{Fallback, Receiver, Report, SharedReport};
use crate::args::RunArgs;
use crate::output;

/// Name of the document.
const SCHEMA: &str = "manylane.run.v1";

/// Reads the report and prints it.
pub(super) struct Reporter {
    shared: SharedReport,
    settings: Settings,
    filter: Option<FilterHandle>,
    quiet: bool,
    start: Instant,
    last: RefCell<(Instant, Report)>,
}

/// The settings of the run.
#[derive(Debug, Clone, Serialize)]
struct Settings {
    command: String,
    program: String,
    engine: Option<String>,
    steering: Option<String>,
    lanes: Option<usize>,
    ports: Option<String>,
    rx_usecs: Option<u64>,
    seconds: f64,
    exit_code: Option<i32>,
    signal: Option<i32>,
}

/// `manylane.run.v1`.
#[derive(Debug, Serialize)]
struct Document {
    schema: &'static str,
    machine: Machine,
    settings: Settings,
    lanes: usize,
    rows: Vec<Receiver>,
    fallbacks: Vec<Fallback>,
    processes: u32,
    sockets: u32,
    left_out: u32,
    /// Datagrams that the XDP program dropped: from denied prefixes, and over a limit.
    denied: u64,
    limited: u64,
}

impl Reporter {
    pub(super) fn new(
        shared: SharedReport,
        file: &Path,
        args: &RunArgs,
        filter: Option<FilterHandle>,
    ) -> Self {
        let settings = Settings {
            command: output::command_line(),
            program: file.display().to_string(),
            engine: args.common.engine.map(|engine| engine.to_string()),
            steering: args.common.steering.map(|steering| steering.to_string()),
            lanes: args.common.lanes,
            ports: args.ports.as_ref().map(ToString::to_string),
            rx_usecs: args.common.rx_usecs,
            seconds: 0.0,
            exit_code: None,
            signal: None,
        };
        let start = Instant::now();
        let last = RefCell::new((start, Report::default()));
        Self { shared, settings, filter, quiet: args.quiet, start, last }
    }

    /// The current report.
    pub(super) fn report(&self) -> Report {
        self.shared.read()
    }

    /// Prints one line of progress.
    pub(super) fn print_progress(&self) {
        let (now, report) = (Instant::now(), self.report());
        let (then, before) = self.last.replace((now, report.clone()));
        output::eprint_line(&format!("manylane: {}", line(&report, &before, (now - then).as_secs_f64())));
    }

    /// Prints the final report.
    ///
    /// # Errors
    /// If the document cannot be written.
    pub(super) fn finish(self, end: Exit, json: Option<Box<dyn Write>>) -> Result<()> {
        let report = self.report();
        let FilterDrops { denied, limited, .. } = filter_drops(self.filter.as_ref());
        if !self.quiet {
            output::eprint_line(&text(&report));
            if denied + limited > 0 {
                output::eprint_line(&format!(
                    "dropped by the XDP program: {denied} denied, {limited} over a limit"
                ));
            }
        }
        let alive: Vec<u32> = report.pids().into_iter().filter(|&pid| is_alive(pid)).collect();
        if !alive.is_empty() {
            let pids: Vec<String> = alive.iter().map(ToString::to_string).collect();
            output::eprint_line(&format!(
                "manylane: processes of the program still run on lanes: {} (--follow waits for them)",
                pids.join(" ")
            ));
        }
        let Some(mut out) = json else {
            return Ok(());
        };
        let (exit_code, signal) = match end {
            Exit::Code(code) => (Some(code), None),
            Exit::Signal(signal) => (None, Some(signal)),
        };
        let document = Document {
            schema: SCHEMA,
            machine: Machine::read(),
            settings: Settings {
                seconds: self.start.elapsed().as_secs_f64(),
                exit_code,
                signal,
                ..self.settings
            },
            lanes: report.lanes(),
            rows: report.receivers,
            fallbacks: report.fallbacks,
            processes: report.processes,
            sockets: report.sockets,
            left_out: report.left_out,
            denied,
            limited,
        };
        let written = out.write_all(output::json(&document)?.as_bytes()).and_then(|()| out.flush());
        match written {
            // The reader has closed the pipe.
            Err(err) if err.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
            other => other.context("cannot write the report"),
        }
    }
}

/// The report as metrics. Threads that have ended stay in it, so that sums never decrease.
pub(super) fn metrics_page(report: &Report, waiting: &Backlog, filter: Option<&FilterHandle>) -> String {
    let mut page = MetricsPage::default();
    let help = "Processes that loaded the library, or were forked by one that had.";
    page.add("manylane_run_processes_total", "counter", help, &[], report.processes.into());
    let help = "UDP sockets bound to a port that the library handles.";
    page.add("manylane_run_sockets_total", "counter", help, &[], report.sockets.into());
    page.add("manylane_run_lanes", "gauge", "Open lanes.", &[], report.lanes() as u64);
    let mut queues = waiting.queues.clone();
    for one in
        report.receivers.iter().filter(|one| one.open).chain(report.receivers.iter().filter(|one| !one.open))
    {
        let [lane, pid, tid] = [one.lane.map(u64::from), Some(one.pid.into()), Some(one.tid.into())]
            .map(|number| number.map_or(String::new(), |number: u64| number.to_string()));
        let labels = [("socket", one.socket.as_str()), ("lane", &lane), ("pid", &pid), ("tid", &tid)];
        for counter in Receiver::COUNTERS {
            page.add(counter.metric, "counter", counter.help(), &labels, (counter.value)(one));
        }
        // A queue that several receivers share is reported once.
        let Some(queue) = queues.remove(&one.inode).filter(|_| one.open) else { continue };
        let help = "Memory queued in the kernel socket that the thread has now.";
        page.add("manylane_run_queued_bytes", "gauge", help, &labels, queue.bytes);
        if let Some(limit) = queue.limit {
            let help = "Memory at which the kernel socket drops.";
            page.add("manylane_run_queue_limit_bytes", "gauge", help, &labels, limit);
        }
        let help = "Datagrams that the kernel dropped at the kernel socket.";
        page.add("manylane_run_kernel_dropped_total", "counter", help, &labels, queue.drops);
    }
    for ring in &waiting.rings {
        let (socket, queue) = (ring.socket.to_string(), ring.queue.to_string());
        let labels = [("socket", socket.as_str()), ("device", ring.device.as_str()), ("queue", &queue)];
        add_ring(&mut page, &labels, [ring.waiting.into(), ring.entries.into(), ring.dropped]);
    }
    for fallback in &report.fallbacks {
        let labels = [("reason", fallback.reason)];
        page.add(
            "manylane_run_fallbacks_total",
            "counter",
            "Sockets that fell back.",
            &labels,
            fallback.count,
        );
    }
    let FilterDrops { denied, limited, .. } = filter_drops(filter);
    for (reason, count) in [("denied", denied), ("limited", limited)] {
        let help = "Datagrams that the filter dropped.";
        page.add("manylane_run_filter_dropped_total", "counter", help, &[("reason", reason)], count);
    }
    page.to_string()
}

fn add_ring(page: &mut MetricsPage, labels: &[(&str, &str); 3], [frames, entries, dropped]: [u64; 3]) {
    let help = "Frames in the receive ring of a leased queue.";
    page.add("manylane_run_ring_frames", "gauge", help, labels, frames);
    let help = "Entries of the receive ring of a leased queue.";
    page.add("manylane_run_ring_entries", "gauge", help, labels, entries);
    let help = "Frames that found no room in the receive ring of a leased queue.";
    page.add("manylane_run_ring_dropped_total", "counter", help, labels, dropped);
}

fn filter_drops(filter: Option<&FilterHandle>) -> FilterDrops {
    filter.map(FilterHandle::drops).unwrap_or_default()
}

fn is_alive(pid: u32) -> bool {
    // A zombie is not alive.
    process_state(pid as i32).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// The change since `before`.
fn line(report: &Report, before: &Report, seconds: f64) -> String {
    let rate = |now: u64, then: u64| now.saturating_sub(then) as f64 / seconds.max(1e-3);
    let (now, then) = (report.total(), before.total());
    let mut text = format!(
        "{}, {}/s delivered, {}/s sent",
        format_lanes(report.lanes()),
        format_number(rate(now.0, then.0)),
        format_number(rate(now.1, then.1))
    );
    let open: Vec<(usize, &Receiver)> =
        report.receivers.iter().enumerate().filter(|(_, one)| one.open && one.lane.is_some()).collect();
    if open.len() > 1 {
        text += "; each:";
        for (at, one) in open {
            // The slot may have had another owner before.
            let then = before.receivers.get(at).filter(|then| then.tid == one.tid);
            // Writing to a string does not fail.
            _ = write!(
                text,
                " {}",
                format_number(rate(one.delivered, then.map_or(0, |then| then.delivered)))
            );
        }
    }
    let fallbacks = report.fallbacks.iter().map(|fallback| fallback.count).fold(0, u64::saturating_add);
    if fallbacks > 0 {
        _ = write!(text, "; {fallbacks} fallbacks");
    }
    text
}

fn format_lanes(count: usize) -> String {
    match count {
        0 => "no lanes".into(),
        1 => "1 lane".into(),
        count => format!("{count} lanes"),
    }
}

/// The table, and what fell back.
fn text(report: &Report) -> String {
    if report.processes == 0 {
        return "manylane: no lanes: the library was not loaded into any process".into();
    }
    let mut text = match report.receivers.len() {
        0 => "manylane: no thread received on a UDP socket".to_owned(),
        _ => format!("manylane: {}\n{}", format_lanes(report.lanes()), table(&report.receivers)),
    };
    if report.receivers.len() > ROWS_MAX {
        _ = write!(
            text,
            "\nand {} more threads that received less (--json-file lists them)",
            report.receivers.len() - ROWS_MAX
        );
    }
    let by_bypass = (report.sum(|one| one.delivered_by_bypass), report.sum(|one| one.sent_by_bypass));
    if by_bypass != (0, 0) {
        _ = write!(
            text,
            "\npast the kernel's stack (engine xdp): {} delivered, {} sent",
            by_bypass.0, by_bypass.1
        );
    }
    let bad = report.sum(|one| one.bad_frames);
    if bad > 0 {
        _ = write!(text, "\ndropped by lanes: {bad} malformed frames or frames with a wrong checksum");
    }
    if report.left_out > 0 {
        _ = write!(text, "\n{} more threads did not fit into the report", report.left_out);
    }
    for fallback in &report.fallbacks {
        let times = if fallback.count == 1 { String::new() } else { format!(", {} times", fallback.count) };
        let socket = if fallback.socket.is_empty() { "a socket" } else { &fallback.socket };
        // Without queues, a socket has its lanes as with engine mmsg.
        let what = match fallback.reason {
            queues if QUEUE_REASONS.contains(&queues) => "no queues",
            "reply-failed" => "replies one by one",
            _ => "no lanes",
        };
        _ = write!(text, "\n{what}{times}: {} ({socket}, process {})", fallback.why, fallback.pid);
    }
    text
}

/// Reasons that are only about the queues of engine xdp.
const QUEUE_REASONS: [&str; 3] = ["no-queue", "control", "no-lease"];

/// Maximum number of rows: a server may have had thousands of sockets, one after the other.
const ROWS_MAX: usize = 40;

/// The receivers with the most datagrams, in the order of their appearance.
fn table(receivers: &[Receiver]) -> Table {
    let mut rows: Vec<(usize, &Receiver)> = receivers.iter().enumerate().collect();
    rows.sort_by_key(|(at, one)| (std::cmp::Reverse(one.delivered), *at));
    rows.truncate(ROWS_MAX);
    rows.sort_by_key(|(at, _)| *at);
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header([
        "socket",
        "lane",
        "process",
        "thread",
        "delivered",
        "per call",
        "of other lanes",
        "sent",
    ]);
    for (_, one) in rows {
        let per_call = if one.batches > 0 { one.delivered as f64 / one.batches as f64 } else { 0.0 };
        table.add_row([
            one.socket.clone(),
            one.lane.map_or_else(|| "-".into(), |lane| lane.to_string()),
            one.pid.to_string(),
            one.tid.to_string(),
            one.delivered.to_string(),
            format!("{per_call:.1}"),
            one.delivered_from_other_lanes.to_string(),
            one.sent.to_string(),
        ]);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

#[cfg(test)]
mod tests {
    use manylane_test_support::docs::{check_table, metrics_rows};

    use super::super::backlog::Queue;
    use super::*;

    fn report(delivered: [u64; 2]) -> Report {
        let receiver = |at: usize| Receiver {
            socket: "127.0.0.1:53".into(),
            lane: Some(at as u32),
            pid: 7,
            tid: 8 + at as u32,
            open: true,
            delivered: delivered[at],
            sent: delivered[at],
            batches: 10,
            bad_frames: at as u64 * 5,
            ..Receiver::default()
        };
        let fallback = Fallback { why: "connected", count: 3, pid: 7, ..Fallback::default() };
        let single =
            Fallback { reason: "reply-failed", why: "failed", count: 1, pid: 7, ..Fallback::default() };
        let receivers = vec![receiver(0), receiver(1)];
        Report { processes: 1, receivers, fallbacks: vec![fallback, single], ..Report::default() }
    }

    #[test]
    fn the_line_has_rates_and_the_table_has_sums() {
        let line = line(&report([300, 100]), &report([100, 100]), 2.0);
        assert!(
            line.starts_with("2 lanes, 100/s delivered") && line.ends_with("each: 100 0; 4 fallbacks"),
            "{line}"
        );
        let text = text(&report([300, 100]));
        for hint in [
            "2 lanes",
            "127.0.0.1:53",
            "300",
            "30.0",
            "no lanes, 3 times: connected (a socket, process 7)",
            "replies one by one: failed (a socket, process 7)",
            "dropped by lanes: 5 malformed frames",
        ] {
            assert!(text.contains(hint), "{hint} is not in\n{text}");
        }
    }

    #[test]
    fn metrics_are_the_report_and_operating_docs_list_them() {
        let mut report = report([300, 100]);
        // The second receiver shares the queue of the first.
        report.receivers.iter_mut().for_each(|one| one.inode = 77);
        let queue = Queue { bytes: 500, limit: Some(2000), drops: 3 };
        let waiting = Backlog { queues: [(77, queue), (78, queue)].into(), ..Backlog::default() };
        let page = metrics_page(&report, &waiting, None);
        for once in ["queued_bytes", "queue_limit_bytes", "kernel_dropped_total"] {
            assert_eq!(page.matches(&format!("manylane_run_{once}{{")).count(), 1, "{once} in\n{page}");
        }
        for line in [
            "manylane_run_processes_total 1",
            "manylane_run_lanes 2",
            "manylane_run_delivered_total{socket=\"127.0.0.1:53\",lane=\"0\",pid=\"7\",tid=\"8\"} 300",
            "manylane_run_delivered_total{socket=\"127.0.0.1:53\",lane=\"1\",pid=\"7\",tid=\"9\"} 100",
            "manylane_run_bad_frames_total{socket=\"127.0.0.1:53\",lane=\"1\",pid=\"7\",tid=\"9\"} 5",
            "manylane_run_queued_bytes{socket=\"127.0.0.1:53\",lane=\"0\",pid=\"7\",tid=\"8\"} 500",
            "manylane_run_queue_limit_bytes{socket=\"127.0.0.1:53\",lane=\"0\",pid=\"7\",tid=\"8\"} 2000",
            "manylane_run_kernel_dropped_total{socket=\"127.0.0.1:53\",lane=\"0\",pid=\"7\",tid=\"8\"} 3",
            "manylane_run_fallbacks_total{reason=\"\"} 3",
            "# HELP manylane_run_delivered_total Datagrams returned to the program.",
        ] {
            assert!(page.lines().any(|there| there == line), "{line} is not in\n{page}");
        }
        // Labels are not counters.
        assert!(!page.contains("pid_total") && !page.contains("lane_total"), "{page}");
        let mut rings = MetricsPage::default();
        add_ring(&mut rings, &[("socket", ""), ("device", ""), ("queue", "")], [0; 3]);
        let rows = metrics_rows(&(page + &rings.to_string()));
        check_table("operating.md", "metrics of run", ["family", "value", "labels"], rows);
    }

    #[test]
    fn no_traffic_is_reported_in_text() {
        assert!(text(&Report::default()).contains("was not loaded"));
        assert!(text(&Report { processes: 1, ..Report::default() }).contains("no thread received"));
    }
}
