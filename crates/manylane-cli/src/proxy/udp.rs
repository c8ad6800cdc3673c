//! Lanes of UDP, on any engine.

use std::sync::Arc;

use anyhow::{Context, Result, anyhow};
use manylane::control::ControlSocket;
use manylane::{Builder, ErrorKind, Handle, Lane, Socket, Steering, write_all_metrics};
use manylane_proxy::Shared;
use manylane_proxy::udp::{UdpCounters, UdpLaneCounters, UdpProxy};
use manylane_sys::process;

use super::config::Config;
use super::lanes::{Settings, Started, start_threads};

/// Opens a socket for each address, and starts a thread for each lane.
pub(super) fn start(config: &Config, shared: &Arc<Shared>) -> Result<Started> {
    // A session takes one descriptor, and a port.
    let descriptors = process::raise_descriptor_limit();
    if descriptors < config.options.connections_max {
        log::info!("{descriptors} descriptors for {} sessions (ulimit -Hn)", config.options.connections_max);
    }
    let sockets = config
        .listen
        .iter()
        .map(|address| {
            open(config, &address.to_string()).with_context(|| format!("cannot listen at {address}"))
        })
        .collect::<Result<Vec<Socket>>>()?;
    let engine = sockets[0].engine();
    let fallback = sockets[0].fallback().map_or_else(String::new, |why| format!(" ({why})"));
    let steering = sockets[0].steering();
    let listen = sockets.iter().map(Socket::local_addr).collect();
    let handles: Vec<Handle> = sockets.iter().map(Socket::handle).collect();
    let control = handles.iter().filter_map(open_control).collect();
    let threads = by_thread(sockets);
    let counters: Vec<Arc<UdpLaneCounters>> = threads.iter().map(|_| Arc::default()).collect();
    let proxies = threads
        .into_iter()
        .zip(&counters)
        .map(|(lanes, counters)| {
            UdpProxy::new(lanes, Arc::clone(shared), Arc::clone(counters), config.key)
                .map_err(|err| anyhow!(err))
        })
        .collect::<Result<Vec<_>>>()?;
    let threads = start_threads(proxies, UdpProxy::run)?;
    Ok(Started {
        listen,
        settings: Settings {
            engine: Some(engine.to_string()),
            key: config.key.map(|key| key.to_string()),
            lanes: counters.len(),
            ..Settings::default()
        },
        line: format!("udp, engine {engine}{fallback}, {} lanes, steering {steering}", counters.len()),
        threads,
        counts: Box::new(move || {
            let mut total = UdpCounters::default();
            counters.iter().for_each(|lane| total.add(&lane.snapshot()));
            total.iter().collect()
        }),
        lane_metrics: Box::new(move || {
            let mut text = String::new();
            // Writing to a string does not fail.
            _ = write_all_metrics(&handles, &mut text);
            text
        }),
        lane_rows: Box::new(Vec::new),
        control,
    })
}

fn open(config: &Config, address: &str) -> Result<Socket> {
    let mut builder = Builder::new(address)?;
    builder.engine(config.engine).xdp_generic(config.xdp_generic);
    builder.xdp_sockets(u32::try_from(config.listen.len()).unwrap_or(u32::MAX));
    if let Some(lanes) = config.lanes {
        builder.lanes(lanes);
    }
    if !config.interface.is_empty() {
        builder.xdp_devices(config.interface.clone());
    }
    config.limit.iter().for_each(|limit| _ = builder.limit(*limit));
    config.allow.iter().for_each(|prefix| _ = builder.allow(*prefix));
    config.deny.iter().for_each(|prefix| _ = builder.deny(*prefix));
    // A single lane gets all datagrams with a key anyway.
    let steering = config.key.filter(|_| config.lanes != Some(1)).map(|key| key.steering());
    builder.steering(steering.unwrap_or(Steering::Flow));
    let socket = builder.open().map_err(|err| {
        let is_of_key = steering.is_some() && err.kind() == ErrorKind::Config;
        let err = anyhow::Error::from(err);
        if is_of_key { err.context("--key needs --lanes 1 here") } else { err }
    })?;
    let in_force = socket.steering();
    if steering.is_some_and(|asked| asked != in_force.policy) && socket.lane_count() > 1 {
        return Err(anyhow!(
            "--key needs steering by BPF, which is not available here ({in_force}), or --lanes 1"
        ));
    }
    Ok(socket)
}

/// Without it only `top` and `limit` do not work.
fn open_control(handle: &Handle) -> Option<ControlSocket> {
    ControlSocket::open(handle)
        .map_err(|err| log::warn!("'manylane top' and 'limit' cannot reach this process: {err}"))
        .ok()
}

/// The lanes of each thread: one of each socket.
fn by_thread(sockets: Vec<Socket>) -> Vec<Vec<Lane>> {
    let count = sockets.iter().map(Socket::lane_count).max().unwrap_or(0);
    let mut threads: Vec<Vec<Lane>> = (0..count).map(|_| Vec::new()).collect();
    for socket in sockets {
        for (thread, lane) in threads.iter_mut().zip(socket.into_lanes()) {
            thread.push(lane);
        }
    }
    threads
}
