//! Lanes of TCP: a stack of their own, or the kernel's.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use manylane::control::ControlSocket;
use manylane::tcp::congestion::Algorithm;
use manylane::tcp::{StackConfig, TcpBuilder, TcpLane};
use manylane::{Builder, FilterHandle};
use manylane_proxy::lane::ProxyLane;
use manylane_proxy::{KernelLane, LaneCounters, Proxy, Shared};
use manylane_sys::process;

use super::config::Config;
use super::lanes::{LaneThread, Settings, Started, start_threads};
use super::memory;
use super::tcp_stats::{LaneStats, TcpStats};
use crate::args::ProxyStack;
use crate::output;

/// The lanes of one stack or the other.
enum Lanes {
    Xdp(Vec<TcpLane>),
    Kernel(Vec<KernelLane>),
}

/// Opens the lanes, and starts their threads.
pub(super) fn start(config: &Config, shared: &Arc<Shared>) -> Result<Started> {
    let lanes = open(config)?;
    let (listen, stack) = match &lanes {
        Lanes::Xdp(lanes) => (lanes[0].listeners().collect(), "xdp"),
        Lanes::Kernel(lanes) => (lanes[0].listeners(), "kernel"),
    };
    let filter = match &lanes {
        Lanes::Xdp(lanes) => lanes[0].filter(),
        Lanes::Kernel(_) => None,
    };
    let (lanes, threads) = match lanes {
        Lanes::Xdp(lanes) => start_all(lanes, shared),
        Lanes::Kernel(lanes) => start_all(lanes, shared),
    }?;
    let stats = Arc::new(TcpStats::new(&listen, stack, lanes, filter.clone()));
    let (totals, pages, rows) = (Arc::clone(&stats), Arc::clone(&stats), Arc::clone(&stats));
    Ok(Started {
        listen,
        settings: Settings { stack: Some(stack), lanes: threads.len(), ..Settings::default() },
        line: format!("stack {stack}, {} lanes", threads.len()),
        threads,
        counts: Box::new(move || totals.total().iter().collect()),
        lane_metrics: Box::new(move || pages.page()),
        lane_rows: Box::new(move || rows.json()),
        control: open_control(stats, filter).into_iter().collect(),
    })
}

/// Without it only `top` and `limit` do not work.
fn open_control(stats: Arc<TcpStats>, filter: Option<FilterHandle>) -> Option<ControlSocket> {
    ControlSocket::with_page(move || stats.page(), filter)
        .map_err(|err| log::warn!("'manylane top' and 'limit' cannot reach this process: {err}"))
        .ok()
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
    let controller = |algorithm: Option<Algorithm>| algorithm.unwrap_or_default().new_controller();
    for address in &config.listen {
        builder.listen_with(address, controller(config.client_congestion))?;
    }
    builder.source_ports(config.source_ports.clone());
    // A session has two connections, and any lane may get most of them.
    let connections = usize::try_from(config.options.connections_max).unwrap_or(usize::MAX).saturating_mul(2);
    let stack = StackConfig::default();
    let connections_max = connections.clamp(stack.connections_max, 1 << 24);
    let controller = controller(config.server_congestion);
    builder.stack(StackConfig { connections_max, controller, ..stack });
    builder.buffer_memory(config.memory_max.unwrap_or_else(memory::default_max));
    if let Some(lanes) = config.lanes {
        builder.lanes(lanes);
    }
    if let Some(micros) = config.rx_usecs {
        builder.rx_coalesce(Duration::from_micros(micros));
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
    let memory = config.memory_max.unwrap_or_else(memory::default_max) / opened.len();
    for lane in &mut opened {
        lane.limit_memory(memory);
        lane.set_congestion(config.client_congestion, config.server_congestion)
            .context("cannot set the congestion control (net.ipv4.tcp_available_congestion_control)")?;
    }
    Ok(Lanes::Kernel(opened))
}

fn start_all<L: ProxyLane + Send + 'static>(
    lanes: Vec<L>,
    shared: &Arc<Shared>,
) -> Result<(Vec<LaneStats>, Vec<LaneThread>)> {
    let (proxies, stats) = lanes
        .into_iter()
        .map(|lane| {
            let counters: Arc<LaneCounters> = Arc::default();
            let proxy = Proxy::new(lane, Arc::clone(shared), Arc::clone(&counters));
            let stack = proxy.stack_stats();
            (proxy, LaneStats { counters, stack })
        })
        .unzip();
    Ok((stats, start_threads(proxies, Proxy::run)?))
}
