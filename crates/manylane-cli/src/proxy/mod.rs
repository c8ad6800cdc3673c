//! `manylane proxy`: connections or datagrams of clients to servers, on lanes.

mod config;
mod lanes;
mod memory;
mod tcp;
mod tcp_stats;
mod udp;

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use manylane::MetricsPort;
use manylane_measure::Document;
use manylane_proxy::Shared;

use self::config::Config;
use self::lanes::{Counts, Settings, Started};
use crate::args::ProxyArgs;
use crate::{metrics, output, signals};

/// Name of the document.
const SCHEMA: &str = "manylane.proxy.v1";
/// Interval at which signals are checked.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Longest time that a check of a server takes.
const CHECK_TIMEOUT: Duration = Duration::from_secs(1);

/// Serves until a signal arrives, and the connections have ended.
pub(crate) fn run(args: &ProxyArgs) -> Result<()> {
    // Before connections are accepted, so that no signal in between is missed.
    let stop = signals::stop_flag()?;
    let metrics_port = args.metrics.map(MetricsPort::bind).transpose()?;
    let hangup = signals::hangup_flag()?;
    let mut config = Config::new(args)?;
    let shared = Shared::new(config.options.clone(), &config.to);
    let start = Instant::now();
    let started = if config.udp { udp::start(&config, &shared) } else { tcp::start(&config, &shared) }?;
    let Started { listen, settings, line, threads, counts, lane_metrics, lane_rows, control } = started;
    for address in &listen {
        output::eprint_line(&format!("listening on {address}"));
    }
    output::eprint_line(&line);
    let counts: Arc<dyn Fn() -> Counts + Send + Sync> = counts.into();
    if let Some(port) = metrics_port {
        let (counts, shared) = (Arc::clone(&counts), Arc::clone(&shared));
        let prefix = if config.udp { "manylane_proxy_udp" } else { "manylane_proxy" };
        metrics::keep(port.serve(move || page(prefix, &counts(), &shared) + &lane_metrics())?);
    }
    let checks = start_checks(&config, &shared, &stop);
    while !stop.load(Ordering::Relaxed) && !threads.iter().any(JoinHandle::is_finished) {
        thread::sleep(POLL_INTERVAL);
        if hangup.swap(false, Ordering::Relaxed) {
            reload(args, &mut config, &shared);
        }
    }
    shared.stop();
    let results: Vec<_> = threads.into_iter().map(JoinHandle::join).collect();
    drop(control);
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
    let total = counts();
    if args.json {
        let settings = Settings { listen, seconds: start.elapsed().as_secs_f64(), ..settings };
        let mut row: serde_json::Map<String, serde_json::Value> =
            total.iter().map(|(name, value)| ((*name).to_owned(), (*value).into())).collect();
        let lanes = lane_rows();
        if !lanes.is_empty() {
            row.insert("lanes".into(), lanes.into());
        }
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

/// Starts the thread that checks the servers.
fn start_checks(config: &Config, shared: &Arc<Shared>, stop: &Arc<AtomicBool>) -> Option<JoinHandle<()>> {
    let (interval, udp) = (config.check_interval, config.udp);
    if interval.is_zero() {
        return None;
    }
    let (shared, stop) = (Arc::clone(shared), Arc::clone(stop));
    let check = move || {
        while !stop.load(Ordering::Relaxed) {
            let settings = shared.settings();
            if udp {
                settings.servers.readmit();
            } else {
                settings.servers.check(CHECK_TIMEOUT);
            }
            let checked = Instant::now();
            while checked.elapsed() < interval && !stop.load(Ordering::Relaxed) {
                thread::sleep(POLL_INTERVAL.min(interval));
            }
        }
    };
    let started = thread::Builder::new().name("checks".into()).spawn(check);
    started.map_err(|err| log::warn!("servers are not checked: {err}")).ok()
}

/// The counters in the text format of Prometheus.
fn page(prefix: &str, total: &Counts, shared: &Shared) -> String {
    let settings = shared.settings();
    let mut text = String::new();
    for (name, value) in total {
        let (suffix, kind) = if *name == "open" { ("", "gauge") } else { ("_total", "counter") };
        // Writing to a string does not fail.
        _ = writeln!(text, "# TYPE {prefix}_{name}{suffix} {kind}");
        _ = writeln!(text, "{prefix}_{name}{suffix} {value}");
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
