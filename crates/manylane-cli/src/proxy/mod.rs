//! `manylane proxy`: connections of clients to servers, on lanes.

mod config;

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use manylane::tcp::{StackConfig, TcpBuilder, TcpLane};
use manylane::{Builder, MetricsPort};
use manylane_measure::Document;
use manylane_proxy::lane::ProxyLane;
use manylane_proxy::{Counters, KernelLane, LaneCounters, Proxy, Shared};
use manylane_sys::{cpu, process};
use serde::Serialize;

use self::config::Config;
use crate::args::{ProxyArgs, ProxyStack};
use crate::{metrics, output, signals};

/// Name of the document.
const SCHEMA: &str = "manylane.proxy.v1";
/// Interval at which signals are checked.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Longest time that a check of a server takes.
const CHECK_TIMEOUT: Duration = Duration::from_secs(1);

/// The lanes of one stack or the other.
enum Lanes {
    Xdp(Vec<TcpLane>),
    Kernel(Vec<KernelLane>),
}

#[derive(Debug, Serialize)]
struct Settings {
    listen: Vec<SocketAddr>,
    stack: &'static str,
    lanes: usize,
    seconds: f64,
}

/// Serves until a signal arrives, and the connections have ended.
pub(crate) fn run(args: &ProxyArgs) -> Result<()> {
    // Before connections are accepted, so that no signal in between is missed.
    let stop = signals::stop_flag()?;
    let metrics_port = args.metrics.map(MetricsPort::bind).transpose()?;
    let hangup = signals::hangup_flag()?;
    let mut config = Config::new(args)?;
    let shared = Shared::new(config.options.clone(), &config.to);
    let lanes = open(&config)?;
    let (listen, stack) = match &lanes {
        Lanes::Xdp(lanes) => (lanes[0].listeners().to_vec(), "xdp"),
        Lanes::Kernel(lanes) => (lanes[0].listeners(), "kernel"),
    };
    let start = Instant::now();
    let (counters, threads) = match lanes {
        Lanes::Xdp(lanes) => start_all(lanes, &shared),
        Lanes::Kernel(lanes) => start_all(lanes, &shared),
    }?;
    for address in &listen {
        output::eprint_line(&format!("listening on {address}"));
    }
    output::eprint_line(&format!("stack {stack}, {} lanes", counters.len()));
    if let Some(port) = metrics_port {
        let (counters, shared) = (counters.clone(), Arc::clone(&shared));
        metrics::keep(port.serve(move || page(&sum(&counters), &shared))?);
    }
    let checks = start_checks(config.check_interval, &shared, &stop);
    let settings = Settings { listen, stack, lanes: counters.len(), seconds: 0.0 };
    while !stop.load(Ordering::Relaxed) && !threads.iter().any(JoinHandle::is_finished) {
        thread::sleep(POLL_INTERVAL);
        if hangup.swap(false, Ordering::Relaxed) {
            reload(args, &mut config, &shared);
        }
    }
    shared.stop();
    let results: Vec<_> = threads.into_iter().map(JoinHandle::join).collect();
    stop.store(true, Ordering::Relaxed);
    if let Some(checks) = checks {
        _ = checks.join();
    }
    for result in results {
        result
            .map_err(|_| anyhow!("a lane panicked"))?
            .map_err(|err| anyhow!(err))
            .context("a lane failed")?;
    }
    let total = sum(&counters);
    if args.json {
        let settings = Settings { seconds: start.elapsed().as_secs_f64(), ..settings };
        let row: serde_json::Map<String, serde_json::Value> =
            total.iter().map(|(name, value)| (name.to_owned(), value.into())).collect();
        output::print_json(&Document::new(SCHEMA, settings, vec![row]))
    } else {
        let lines = total.iter().map(|(name, value)| format!("{:<24}{value}\n", name.replace('_', " ")));
        output::print(&lines.collect::<String>())
    }
}

/// Reads the file again. What is wrong with it is said, and changes nothing.
fn reload(args: &ProxyArgs, config: &mut Config, shared: &Shared) {
    match Config::new(args) {
        Ok(new) => {
            if let Some(what) = config.fixed_difference(&new) {
                output::eprint_line(&format!(
                    "{what} has changed in the file: it stays as it is until a restart"
                ));
            }
            shared.reload(new.options.clone(), &new.to);
            (config.options, config.to) = (new.options, new.to);
            output::eprint_line("reloaded");
        }
        Err(err) => output::eprint_line(&format!("not reloaded: {err:#}")),
    }
}

fn open(config: &Config) -> Result<Lanes> {
    match config.stack {
        ProxyStack::Xdp => open_xdp(config).map(Lanes::Xdp).context("cannot open lanes of stack xdp"),
        ProxyStack::Kernel => open_kernel(config),
        ProxyStack::Auto if config.interface.is_empty() => open_kernel(config),
        ProxyStack::Auto => open_xdp(config).map(Lanes::Xdp).or_else(|err| {
            output::eprint_line(&format!("stack xdp does not work here: {err:#}"));
            open_kernel(config)
        }),
    }
}

fn open_xdp(config: &Config) -> Result<Vec<TcpLane>> {
    let mut builder = TcpBuilder::new();
    for address in &config.listen {
        builder.listen(address)?;
    }
    builder.source_ports(config.source_ports.clone());
    // A session has two connections, and any lane may get most of them.
    let connections = usize::try_from(config.options.connections_max).unwrap_or(usize::MAX).saturating_mul(2);
    let stack = StackConfig::default();
    let connections_max = connections.clamp(stack.connections_max, 1 << 24);
    builder.stack(StackConfig { connections_max, ..stack });
    if let Some(lanes) = config.lanes {
        builder.lanes(lanes);
    }
    builder.xdp(|xdp: &mut Builder| {
        xdp.xdp_generic(config.xdp_generic);
        if !config.interface.is_empty() {
            xdp.xdp_devices(config.interface.clone());
        }
        config.limit.iter().for_each(|limit| _ = xdp.limit(*limit));
        config.allow.iter().for_each(|prefix| _ = xdp.allow(*prefix));
        config.deny.iter().for_each(|prefix| _ = xdp.deny(*prefix));
    });
    Ok(builder.open()?)
}

fn open_kernel(config: &Config) -> Result<Lanes> {
    // A session takes two descriptors.
    let descriptors = process::raise_descriptor_limit();
    if descriptors / 2 < config.options.connections_max {
        log::info!(
            "{descriptors} descriptors for {} connections (ulimit -Hn)",
            config.options.connections_max
        );
    }
    let lanes = config.lanes.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from));
    let mut opened = vec![KernelLane::open(&config.listen).context("cannot listen")?];
    // Of the ports that the kernel has picked.
    let addresses = opened[0].listeners();
    for _ in 1..lanes {
        opened.push(KernelLane::open(&addresses).context("cannot listen")?);
    }
    Ok(Lanes::Kernel(opened))
}

type Started = (Vec<Arc<LaneCounters>>, Vec<JoinHandle<manylane_proxy::lane::Result<()>>>);

/// Starts a thread for each lane, each on a CPU of its own as far as there are enough.
fn start_all<L: ProxyLane + Send + 'static>(lanes: Vec<L>, shared: &Arc<Shared>) -> Result<Started> {
    let cpus = cpu::affinity().unwrap_or_default();
    let (mut all, mut threads) = (Vec::new(), Vec::new());
    for (at, lane) in lanes.into_iter().enumerate() {
        let counters = Arc::new(LaneCounters::default());
        let mut proxy = Proxy::new(lane, Arc::clone(shared), Arc::clone(&counters));
        let cpu = cpus.get(at % cpus.len().max(1)).copied();
        let run = move || {
            if let Some(err) = cpu.and_then(|cpu| cpu::pin(cpu).err()) {
                log::warn!("a lane is not pinned to its CPU: {err}");
            }
            proxy.run()
        };
        let thread = thread::Builder::new().name(format!("lane-{at}")).spawn(run);
        threads.push(thread.context("cannot start a thread for a lane")?);
        all.push(counters);
    }
    Ok((all, threads))
}

/// Starts the thread that checks the servers.
fn start_checks(interval: Duration, shared: &Arc<Shared>, stop: &Arc<AtomicBool>) -> Option<JoinHandle<()>> {
    if interval.is_zero() {
        return None;
    }
    let (shared, stop) = (Arc::clone(shared), Arc::clone(stop));
    let check = move || {
        while !stop.load(Ordering::Relaxed) {
            shared.settings().servers.check(CHECK_TIMEOUT);
            let checked = Instant::now();
            while checked.elapsed() < interval && !stop.load(Ordering::Relaxed) {
                thread::sleep(POLL_INTERVAL.min(interval));
            }
        }
    };
    let started = thread::Builder::new().name("checks".into()).spawn(check);
    started.map_err(|err| log::warn!("servers are not checked: {err}")).ok()
}

fn sum(lanes: &[Arc<LaneCounters>]) -> Counters {
    let mut total = Counters::default();
    lanes.iter().for_each(|lane| total.add(&lane.snapshot()));
    total
}

/// The counters in the text format of Prometheus.
fn page(total: &Counters, shared: &Shared) -> String {
    let settings = shared.settings();
    let mut text = String::new();
    for (name, value) in total.iter() {
        let (suffix, kind) = if name == "open" { ("", "gauge") } else { ("_total", "counter") };
        // Writing to a string does not fail.
        _ = writeln!(text, "# TYPE manylane_proxy_{name}{suffix} {kind}");
        _ = writeln!(text, "manylane_proxy_{name}{suffix} {value}");
    }
    text.push_str("# TYPE manylane_proxy_server_up gauge\n");
    for server in settings.servers.all() {
        let is_up = u8::from(server.is_up());
        _ = writeln!(text, "manylane_proxy_server_up{{server=\"{}\"}} {is_up}", server.address);
    }
    text.push_str("# TYPE manylane_proxy_server_connections gauge\n");
    for server in settings.servers.all() {
        let (address, connections) = (server.address, server.connections());
        _ = writeln!(text, "manylane_proxy_server_connections{{server=\"{address}\"}} {connections}");
    }
    text
}
