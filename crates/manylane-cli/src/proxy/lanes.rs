//! Lanes that serve, of one protocol or the other.

use std::net::SocketAddr;
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result};
use manylane::control::ControlSocket;
use manylane_sys::cpu;
use serde::Serialize;

/// Counters of all lanes, by name.
pub(super) type Counts = Vec<(&'static str, u64)>;
pub(super) type LaneThread = JoinHandle<manylane_proxy::lane::Result<()>>;

/// Lanes that serve.
pub(super) struct Started {
    pub(super) listen: Vec<SocketAddr>,
    /// What is under the lanes: a stack of TCP, or an engine of UDP.
    pub(super) settings: Settings,
    /// The same for people, in one line.
    pub(super) line: String,
    pub(super) threads: Vec<LaneThread>,
    pub(super) counts: Box<dyn Fn() -> Counts + Send + Sync>,
    /// Metrics of the lanes themselves.
    pub(super) lane_metrics: Box<dyn Fn() -> String + Send + Sync>,
    /// An object of the document for each lane.
    pub(super) lane_rows: Box<dyn Fn() -> Vec<serde_json::Value>>,
    /// For `manylane top`, as long as the lanes serve.
    pub(super) control: Vec<ControlSocket>,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Settings {
    pub(super) listen: Vec<SocketAddr>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) stack: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) engine: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) key: Option<String>,
    pub(super) lanes: usize,
    pub(super) seconds: f64,
}

/// Starts a thread for each lane, each on a CPU of its own as far as there are enough.
pub(super) fn start_threads<P: Send + 'static>(
    proxies: Vec<P>,
    run: fn(&mut P) -> manylane_proxy::lane::Result<()>,
) -> Result<Vec<LaneThread>> {
    let cpus = cpu::affinity().unwrap_or_default();
    let start = |(at, mut proxy): (usize, P)| {
        let cpu = cpus.get(at % cpus.len().max(1)).copied();
        let body = move || {
            if let Some(err) = cpu.and_then(|cpu| cpu::pin(cpu).err()) {
                log::warn!("a lane is not pinned to its CPU: {err}");
            }
            run(&mut proxy)
        };
        thread::Builder::new().name(format!("lane-{at}")).spawn(body)
    };
    let started: std::io::Result<_> = proxies.into_iter().enumerate().map(start).collect();
    started.context("cannot start a thread for a lane")
}
