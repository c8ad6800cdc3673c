//! `manylane echo`: returns every datagram to its sender.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use manylane::control::ControlSocket;
use manylane::{
    Batch, Builder, Counters, Engine, FilterDrops, Handle, LaneCounters, MetricsPort, Outbox, Socket,
};
use manylane_measure::{Document, format_number};
use serde::Serialize;

use crate::args::EchoArgs;
use crate::metrics;
use crate::output;
use crate::progress::Progress;
use crate::signals;

/// Name of the document.
const SCHEMA: &str = "manylane.echo.v1";

/// Default interval of statistics.
const DEFAULT_INTERVAL: Duration = Duration::from_secs(5);
/// Interval at which signals are checked.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Serves until a signal arrives.
pub(crate) fn run(args: &EchoArgs) -> Result<()> {
    // Before the socket is opened, so that no signal in between is missed.
    let stop = signals::stop_flag()?;
    // Also before: engine xdp takes frames from devices as soon as the socket is open.
    let metrics_port = args.common.metrics.map(MetricsPort::bind).transpose()?;
    let socket = open(args)?;
    let settings = Settings::new(args, &socket);
    output::eprint_line(&format!("listening on {}", settings.addr));
    output::eprint_line(&settings.describe());
    if let Some(port) = metrics_port {
        let handle = socket.handle();
        let page = move || {
            let mut text = String::new();
            // Writing to a string does not fail.
            _ = handle.write_metrics(&mut text);
            text
        };
        metrics::keep(port.serve(page)?);
    }
    // Without it only `top` and `limit` do not work.
    let _control = ControlSocket::open(&socket.handle())
        .map_err(|err| log::warn!("'manylane top' and 'limit' cannot reach this process: {err}"));
    let handle = socket.handle();
    let interval = args.common.interval.unwrap_or(DEFAULT_INTERVAL);
    let served = AtomicBool::new(false);
    let start = Instant::now();
    let counters = thread::scope(|scope| {
        scope.spawn(|| monitor(&handle, &stop, &served, interval));
        let counters = socket.serve(|batch: Batch<'_>, out: &mut Outbox<'_>| {
            for datagram in batch {
                out.reply_borrowed(&datagram, datagram.payload());
            }
        });
        served.store(true, Ordering::Relaxed);
        counters
    })?;
    let document = Document::new(
        SCHEMA,
        Settings { seconds: start.elapsed().as_secs_f64(), ..settings },
        rows(&counters),
    );
    if args.json { output::print_json(&document) } else { output::print(&text(&counters)) }
}

fn open(args: &EchoArgs) -> Result<Socket> {
    let mut builder = Builder::new(args.addr.as_str())?;
    builder
        .engine(args.common.engine.unwrap_or_default())
        .steering(args.common.steering.unwrap_or_default())
        .steering_backend(args.steering_backend)
        .placement(args.placement.clone())
        .batch(args.batch)
        .gso(args.gso.is_on())
        .drop_policy(args.drop)
        .ecn(args.ecn)
        .only_v6(args.only_v6)
        .reuse_port(args.reuse_port)
        .xdp_generic(args.xdp_generic)
        .wait(args.wait);
    for limit in &args.common.filter.limit {
        builder.limit(*limit);
    }
    for prefix in &args.common.filter.allow {
        builder.allow(*prefix);
    }
    for prefix in &args.common.filter.deny {
        builder.deny(*prefix);
    }
    for vlan in &args.xdp_vlan {
        builder.xdp_vlan(*vlan);
    }
    if !args.common.interface.is_empty() {
        builder.xdp_devices(args.common.interface.clone());
    }
    if let Some(micros) = args.common.rx_usecs {
        builder.rx_coalesce(Duration::from_micros(micros));
    }
    if let Some(gro) = args.gro {
        builder.gro(gro.is_on());
    }
    if let Some(lanes) = args.common.lanes {
        builder.lanes(lanes);
    }
    if let Some(bytes) = args.recv_buffer {
        builder.recv_buffer(bytes);
    }
    if let Some(bytes) = args.datagram_size {
        builder.datagram_size(bytes);
    }
    builder.open().with_context(|| format!("cannot serve {}", args.addr))
}

/// Prints statistics, and stops the server on a signal.
fn monitor(handle: &Handle, stop: &AtomicBool, served: &AtomicBool, interval: Duration) {
    let progress = Progress::live();
    let mut last = (Instant::now(), Counters::default());
    while !served.load(Ordering::Relaxed) {
        thread::sleep(POLL_INTERVAL);
        if stop.load(Ordering::Relaxed) {
            handle.stop();
            return;
        }
        if !interval.is_zero() && last.0.elapsed() >= interval {
            let now = handle.counters();
            progress.line(&interval_line(&last.1, &now, last.0.elapsed()));
            last = (Instant::now(), now);
        }
    }
}

/// Datagrams to the socket that were not delivered, by reason. With the delivered ones, they are
/// those that arrived.
fn undelivered(counters: &Counters) -> [(&'static str, u64); 8] {
    let (total, refused) = (counters.total(), counters.filter_drops);
    [
        ("denied", refused.denied),
        ("over a limit", refused.limited),
        ("dropped by the kernel", total.kernel_dropped),
        ("dropped at queues", total.xsk_dropped),
        ("wrong checksums", total.bad_checksum),
        ("malformed", total.malformed),
        ("dropped as stale", total.dropped_stale),
        ("discarded", total.discarded),
    ]
}

/// One line: the changes since `before`.
fn interval_line(before: &Counters, now: &Counters, elapsed: Duration) -> String {
    let (was, total) = (before.total(), now.total());
    let rate = |now: u64, before: u64| format_number((now - before) as f64 / elapsed.as_secs_f64());
    let messages = (total.messages - was.messages).max(1);
    let batches = (total.batches - was.batches).max(1);
    let mut line = format!(
        "{}/s in, {}/s out, {} lanes, {:.1} per call",
        rate(total.delivered, was.delivered),
        rate(total.sent, was.sent),
        now.lanes.len(),
        messages as f64 / batches as f64,
    );
    let reasons = undelivered(now).into_iter().zip(undelivered(before));
    let reasons = reasons.map(|((name, now), (_, before))| (name, now.saturating_sub(before)));
    let others =
        [("replies lost", total.lost() - was.lost()), ("truncated", total.truncated - was.truncated)];
    for (name, lost) in reasons.chain(others) {
        if lost > 0 {
            let _ = write!(line, ", {lost} {name}");
        }
    }
    line
}

fn text(counters: &Counters) -> String {
    let total = counters.total();
    let mut text = String::new();
    let mut entry = |name: &str, value: u64| {
        let _ = writeln!(text, "{name:<24}{value}");
    };
    entry("arrived", total.arrived() + counters.filter_drops.denied + counters.filter_drops.limited);
    entry("  delivered", total.delivered);
    for (name, lost) in undelivered(counters) {
        entry(&format!("  {name}"), lost);
    }
    entry("replies", total.offered);
    entry("  sent", total.sent);
    entry("  lost", total.lost());
    entry("truncated", total.truncated);
    entry("batches", total.batches);
    entry("messages", total.messages);
    text
}

/// The settings of the run.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Settings {
    command: String,
    addr: String,
    lanes: usize,
    engine: String,
    /// The preferred engine, if another one is in use.
    #[serde(skip)]
    requested: &'static str,
    /// The reason why the preferred engine is not in use.
    engine_why: Option<String>,
    /// Queues of devices that feed lanes past the kernel's stack, as `device:queue`.
    device_queues: Vec<String>,
    steering: String,
    steering_backend: String,
    steering_why: Option<String>,
    placement: String,
    batch: usize,
    gro: bool,
    gso: bool,
    drop: String,
    /// The wait policy, and why it is not the requested one.
    wait: String,
    wait_why: Option<String>,
    recv_buffer: Option<usize>,
    /// Limits and prefixes at the start.
    limits: Vec<String>,
    allow: Vec<String>,
    deny: Vec<String>,
    seconds: f64,
}

impl Settings {
    fn new(args: &EchoArgs, socket: &Socket) -> Self {
        let steering = socket.steering();
        let (caps, waiting) = (socket.capabilities(), socket.waiting());
        Self {
            command: output::command_line(),
            addr: socket.local_addr().to_string(),
            lanes: socket.lane_count(),
            engine: socket.engine().to_string(),
            requested: if args.common.engine == Some(Engine::Uring) { "uring" } else { "xdp" },
            engine_why: socket.fallback().map(str::to_owned),
            device_queues: socket
                .device_queues()
                .iter()
                .map(|at| format!("{}:{}", at.device, at.queue))
                .collect(),
            steering: steering.policy.to_string(),
            steering_backend: steering.backend.to_string(),
            steering_why: steering.reason,
            placement: args.placement.to_string(),
            batch: args.batch,
            gro: caps.gro,
            gso: caps.gso,
            drop: args.drop.to_string(),
            wait: waiting.policy.to_string(),
            wait_why: waiting.reason,
            recv_buffer: args.recv_buffer,
            limits: args.common.filter.limit.iter().map(ToString::to_string).collect(),
            allow: args.common.filter.allow.iter().map(ToString::to_string).collect(),
            deny: args.common.filter.deny.iter().map(ToString::to_string).collect(),
            seconds: 0.0,
        }
    }

    fn describe(&self) -> String {
        let because = |why: &Option<String>| why.as_ref().map_or_else(String::new, |why| format!(" ({why})"));
        let engine = match &self.engine_why {
            Some(why) => format!(" (not {}: {why})", self.requested),
            None if self.device_queues.is_empty() => String::new(),
            None => format!(" (queues {})", self.device_queues.join(" ")),
        };
        format!(
            "{} lanes, engine {}{engine}, steering {} by {}{}, placement {}, wait {}{}",
            self.lanes,
            self.engine,
            self.steering,
            self.steering_backend,
            because(&self.steering_why),
            self.placement,
            self.wait,
            because(&self.wait_why)
        )
    }
}

/// The counters of one lane, of the lanes that were closed (`closed`), or of the socket (`total`):
/// only the last has `denied` and `limited`, because datagrams that the filter drops reach no lane.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Row {
    lane: String,
    denied: u64,
    limited: u64,
    #[serde(flatten)]
    counters: BTreeMap<&'static str, Option<u64>>,
}

impl Row {
    fn new(lane: String, counters: &LaneCounters) -> Self {
        Self { lane, denied: 0, limited: 0, counters: counters.named().into_iter().collect() }
    }
}

fn rows(counters: &Counters) -> Vec<Row> {
    let mut rows: Vec<Row> = counters.lanes.iter().map(|(id, lane)| Row::new(id.to_string(), lane)).collect();
    if counters.closed != LaneCounters::default() {
        rows.push(Row::new("closed".into(), &counters.closed));
    }
    let FilterDrops { denied, limited, .. } = counters.filter_drops;
    let all = counters.total();
    let mut total = Row { denied, limited, ..Row::new("total".into(), &all) };
    total.counters.insert("arrived", Some(all.arrived() + denied + limited));
    rows.push(total);
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delivered_and_dropped_add_up_to_received() {
        let mut counters = Counters::default();
        let closed = &mut counters.closed;
        closed.delivered = 1;
        closed.kernel_dropped = 1 << 1;
        closed.dropped_stale = 1 << 2;
        closed.discarded = 1 << 3;
        closed.bad_checksum = 1 << 4;
        closed.malformed = 1 << 5;
        closed.xsk_dropped = 1 << 6;
        counters.filter_drops.denied = 1 << 7;
        counters.filter_drops.limited = 1 << 8;
        let text = text(&counters);
        let value = |line: &str| line.split_whitespace().last().unwrap().parse::<u64>().unwrap();
        let mut lines = text.lines();
        assert_eq!(lines.next().map(value), Some((1 << 9) - 1), "{text}");
        assert_eq!(
            lines.take_while(|line| line.starts_with(' ')).map(value).sum::<u64>(),
            (1 << 9) - 1,
            "{text}"
        );
        let line = interval_line(&Counters::default(), &counters, Duration::from_secs(1));
        for (name, lost) in undelivered(&counters) {
            assert!(lost > 0 && line.contains(&format!(", {lost} {name}")), "{name}: {line}");
        }
        assert!(!interval_line(&counters, &counters, Duration::from_secs(1)).contains("dropped"));
    }
}
