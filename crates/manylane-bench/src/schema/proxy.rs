//! The rows of `bench proxy`.

use manylane_measure::format_number;
use serde::Serialize;

use crate::report::{Figure, Figures, Grid};
use crate::stats::{format_quartiles, format_ratio, median, median_of};

/// One sample: one proxy under one load.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct ProxySample {
    /// The round that it was taken in, from 0.
    pub round: usize,
    /// Requests that were answered.
    pub requests: u64,
    /// Connections that broke.
    pub failed: u64,
    /// Requests per second; 0 in bulk loads, which have none.
    pub requests_per_s: f64,
    /// Nanoseconds of the proxy's CPU per request, the kernel's work included.
    pub proxy_cpu_ns: f64,
    /// Share of the time that the proxy's CPU was busy.
    pub proxy_cores: f64,
    /// Median time of a request in nanoseconds; with a connection for each, from its SYN. 0 if it
    /// is not measured.
    pub p50_ns: f64,
    /// 99th percentile in nanoseconds.
    pub p99_ns: f64,
    /// Bytes per second that clients received.
    pub bytes_per_s: f64,
    /// The same per second of the proxy's CPU.
    pub bytes_per_cpu_s: f64,
    /// Growth of the proxy's resident memory by each connection of a client, if there are many
    /// without traffic.
    pub bytes_per_connection: Option<f64>,
}

/// One row of `bench proxy`: one proxy under one load. Figures are medians over the samples.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProxyRow {
    /// The proxy: `haproxy`, `nginx`, `proxy/kernel`, `proxy/xdp`.
    pub contender: String,
    /// The load: `keep-alive`, `connect`, …
    pub load: String,
    /// Connections of clients.
    pub connections: usize,
    /// Requests per second of a paced load.
    pub rate: Option<f64>,
    /// Connections that broke, in all samples.
    pub failed: u64,
    /// See [`ProxySample`].
    pub requests_per_s: f64,
    /// See [`ProxySample`].
    pub proxy_cpu_ns: f64,
    /// See [`ProxySample`].
    pub proxy_cores: f64,
    /// See [`ProxySample`]; none if it is not measured.
    pub p50_ns: Option<f64>,
    /// See [`ProxySample`].
    pub p99_ns: Option<f64>,
    /// See [`ProxySample`].
    pub bytes_per_s: f64,
    /// See [`ProxySample`].
    pub bytes_per_cpu_s: f64,
    /// See [`ProxySample`].
    pub bytes_per_connection: Option<f64>,
    /// The raw samples.
    pub samples: Vec<ProxySample>,
}

impl ProxyRow {
    /// A row of the medians of `samples`.
    #[must_use]
    pub fn from_samples(
        contender: &str,
        load: &str,
        connections: usize,
        rate: Option<f64>,
        samples: Vec<ProxySample>,
    ) -> Self {
        let middle = |value: fn(&ProxySample) -> f64| median(samples.iter().map(value));
        let middle_of = |value: fn(&ProxySample) -> Option<f64>| {
            median_of(&samples.iter().filter_map(value).collect::<Vec<_>>())
        };
        Self {
            contender: contender.into(),
            load: load.into(),
            connections,
            rate,
            failed: samples.iter().map(|sample| sample.failed).sum(),
            requests_per_s: middle(|sample| sample.requests_per_s),
            proxy_cpu_ns: middle(|sample| sample.proxy_cpu_ns),
            proxy_cores: middle(|sample| sample.proxy_cores),
            p50_ns: middle_of(|sample| Some(sample.p50_ns).filter(|nanos| *nanos > 0.0)),
            p99_ns: middle_of(|sample| Some(sample.p99_ns).filter(|nanos| *nanos > 0.0)),
            bytes_per_s: middle(|sample| sample.bytes_per_s),
            bytes_per_cpu_s: middle(|sample| sample.bytes_per_cpu_s),
            bytes_per_connection: middle_of(|sample| sample.bytes_per_connection),
            samples,
        }
    }

    fn samples_of(&self, value: fn(&ProxySample) -> f64) -> Vec<f64> {
        self.samples.iter().map(value).collect()
    }

    fn has_requests(&self) -> bool {
        self.requests_per_s > 0.0
    }
}

/// The proxy that all are compared with.
const BASELINE: &str = "haproxy";

impl Figures for ProxyRow {
    const COLUMNS: &'static [&'static str] = &[
        "proxy",
        "load",
        "connections",
        "requests/s",
        "CPU µs/request",
        "quartiles",
        "ratio (p)",
        "busy CPUs",
        "p50 µs",
        "p99",
        "p99 ratio (p)",
        "MB/s",
        "MB/CPU s",
        "ratio (p)",
        "bytes/connection",
        "failed",
    ];

    fn cells(&self, all: &[Self]) -> Vec<String> {
        let base = all.iter().find(|row| row.contender == BASELINE && row.load == self.load);
        let base = base.filter(|_| self.contender != BASELINE);
        let ratio = |value: fn(&ProxySample) -> f64| {
            base.map_or_else(String::new, |base| {
                format_ratio(&self.samples_of(value), &base.samples_of(value))
            })
        };
        let micros = |nanos: f64| format!("{:.1}", nanos / 1e3);
        let cpu = self.samples_of(|sample| sample.proxy_cpu_ns / 1e3);
        let megabytes = |bytes: f64| format!("{:.0}", bytes / 1e6);
        let (requests, bulk) = if self.has_requests() {
            let requests = [
                format_number(self.requests_per_s),
                micros(self.proxy_cpu_ns),
                format_quartiles(cpu, 1),
                ratio(|sample| sample.proxy_cpu_ns),
            ];
            (requests, Default::default())
        } else {
            let rates = [
                megabytes(self.bytes_per_s),
                megabytes(self.bytes_per_cpu_s),
                ratio(|sample| sample.bytes_per_cpu_s),
            ];
            (Default::default(), rates)
        };
        let times = match (self.p50_ns, self.p99_ns) {
            (Some(p50), Some(p99)) => [micros(p50), micros(p99), ratio(|sample| sample.p99_ns)],
            _ => Default::default(),
        };
        let load = self
            .rate
            .map_or_else(|| self.load.clone(), |rate| format!("{} {}/s", self.load, format_number(rate)));
        let mut cells = vec![self.contender.clone(), load, self.connections.to_string()];
        cells.extend(requests);
        cells.push(format!("{:.2}", self.proxy_cores));
        cells.extend(times);
        cells.extend(bulk);
        cells.push(self.bytes_per_connection.map_or_else(String::new, |bytes| format!("{bytes:.0}")));
        cells.push(self.failed.to_string());
        cells
    }

    fn section(&self) -> String {
        format!("{}, {} connections", self.load, self.connections)
    }

    fn figures(rows: &[&Self]) -> Vec<Figure> {
        let grid = Grid::new(rows, "load", |row: &Self| (row.contender.clone(), row.load.clone()));
        if rows.iter().any(|row| row.has_requests()) {
            let cost = |row: &Self| (Some(row.proxy_cpu_ns / 1e3), None);
            let p99 = |row: &Self| (row.p99_ns.map(|nanos| nanos / 1e3), None);
            vec![
                grid.bars("Time of the proxy's CPU per request", "Lower is better.", "µs", cost),
                grid.bars("99th percentile of the time of a request", "Lower is better.", "µs", p99),
            ]
        } else {
            let rate = |row: &Self| (Some(row.bytes_per_cpu_s / 1e6), None);
            vec![grid.bars("Bytes per second of the proxy's CPU", "Higher is better.", "MB", rate)]
        }
    }
}
