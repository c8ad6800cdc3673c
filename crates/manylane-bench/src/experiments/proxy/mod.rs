//! `bench proxy`: TCP proxies side by side, each on one CPU.
//!
//! | module | has |
//! |---|---|
//! | `plan` | what clients do, and to which proxies |
//! | `bed` | three hosts in a row: clients, the proxy, servers; which CPU does whose work |
//! | `contender` | HAProxy, nginx, and `manylane proxy` with both stacks |
//! | `clients`, `servers` | the peers, on sockets of the kernel, one thread each |
//! | `idle` | the cost of connections without traffic |
//! | [`trial`] | for other experiments: one sample of one proxy |
//! | `library`, `wrk` | a proxy inside of this process; another generator |
//!
//! The cost of a request is the CPU time of the proxy's process and of the kernel threads that
//! receive for its devices, by the number of requests: what its CPU does, without the work of
//! others that may run there.

mod bed;
mod clients;
mod contender;
mod idle;
mod library;
mod plan;
mod servers;
pub mod trial;
mod wrk;

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use self::bed::Bed;
use self::clients::{Clients, Outcome};
pub use self::contender::{Contender, Manylane};
use self::plan::{Config, PORT, RATE_FRACTION, WARM_UP_TIME};
pub use self::plan::{Load, Plan};
use self::servers::Servers;
use crate::schema::{BENCH_PROXY, BenchSettings, Document, ProxyRow, ProxySample};
use crate::{Controller, Options, Setup, check_stop, run_pinned, run_rounds};

/// Runs the benchmark, with root.
///
/// # Errors
/// Fails with one CPU, if a proxy does not start, or if it is stopped.
pub fn run(
    setup: &Setup,
    options: &Options,
    plan: &Plan,
    controller: &mut dyn Controller,
) -> Result<Document<BenchSettings, ProxyRow>> {
    let peers_cpu = setup.sender_cpu().context("bench proxy needs two CPUs")?;
    let proxy_cpu = *setup.receiver_cpus().first().context("bench proxy needs two CPUs")?;
    ensure!(peers_cpu != proxy_cpu, "bench proxy needs two CPUs: one for the proxy alone");
    let bed = Bed::new(proxy_cpu, peers_cpu)?;
    let servers = Servers::start(&bed)?;
    let bench = Bench { bed: &bed, servers: &servers, plan, duration: options.duration };
    let mut settings = options.settings(setup, &options.limits());
    settings.receivers = plan.contenders.iter().map(ToString::to_string).collect();
    settings.setup = "testbed".into();
    settings.device = "veth, one queue, threaded NAPI".into();
    settings.sender = "clients on kernel sockets".into();
    let rate = match plan.rate {
        _ if !plan.loads.contains(&Load::Paced) => 0.0,
        Some(rate) => rate,
        None => {
            controller.progress(0.0, "searching for the highest rate");
            let first = Config { load: Load::KeepAlive, contender: plan.contenders[0] };
            let rate = bench.sample(first, 0.0, 0, controller.stop())?.requests_per_s;
            settings.notes.push(format!("{}: {rate:.0} requests/s at most", first.contender));
            rate * RATE_FRACTION
        }
    };
    let mut rows = Vec::new();
    for &load in &plan.loads {
        bed.set_segmentation(load == Load::BulkOffload)?;
        let is_able = |contender: &Contender| !load.needs_lanes() || *contender == Contender::ProxyXdp;
        let able = plan.contenders.iter().copied().filter(is_able);
        let configs: Vec<Config> = able.map(|contender| Config { load, contender }).collect();
        let samples = run_rounds(options.rounds, &configs, controller, |config, round, stop| {
            bench.sample(*config, rate, round, stop)
        })?;
        for (config, samples) in configs.iter().zip(samples) {
            let rate = (load == Load::Paced).then_some(rate);
            rows.push(ProxyRow::from_samples(
                config.contender.name(),
                load.name(),
                load.connections(),
                rate,
                samples,
            ));
        }
    }
    controller.progress(1.0, "done");
    Ok(Document::new(BENCH_PROXY, settings, rows))
}

struct Bench<'a> {
    bed: &'a Bed,
    servers: &'a Servers,
    plan: &'a Plan,
    duration: Duration,
}

impl Bench<'_> {
    /// One contender under one load.
    fn sample(&self, config: Config, rate: f64, round: usize, stop: &AtomicBool) -> Result<ProxySample> {
        check_stop(stop)?;
        let Bench { bed, servers, plan, duration } = *self;
        if config.load.needs_lanes() {
            return run_pinned(Some(bed.peers_cpu), || idle::sample(bed, plan, config, round, duration));
        }
        let listen = bed.proxy_addr(PORT);
        let running = config.contender.start(bed, &plan.manylane, listen, servers.addr())?;
        let busy = || bed.proxy_cpu_time(running.process());
        let sample = measure(bed, config.load, rate, duration, busy)?;
        Ok(ProxySample { round, ..sample })
    }
}

/// A sample of the proxy that runs; `busy` is the CPU time that it has used so far.
fn measure(
    bed: &Bed,
    load: Load,
    rate: f64,
    duration: Duration,
    busy: impl Fn() -> Duration + Sync,
) -> Result<ProxySample> {
    run_pinned(Some(bed.peers_cpu), || {
        bed.clients().namespace().enter().context("cannot enter a namespace")?;
        let mut clients = Clients::connect(bed.proxy_addr(PORT), load.connections(), load.traffic(rate))?;
        clients.run(WARM_UP_TIME)?;
        let before = busy();
        let outcome = clients.run(duration)?;
        Ok(summarize(&outcome, busy().saturating_sub(before)))
    })
}

fn summarize(outcome: &Outcome, busy: Duration) -> ProxySample {
    let seconds = outcome.elapsed.as_secs_f64().max(1e-9);
    let busy_seconds = busy.as_secs_f64().max(1e-9);
    let at = |share: f64| outcome.latency.value_at_quantile(share) as f64;
    ProxySample {
        round: 0,
        requests: outcome.requests,
        failed: outcome.failed,
        requests_per_s: outcome.requests as f64 / seconds,
        proxy_cpu_ns: busy_seconds * 1e9 / outcome.requests.max(1) as f64,
        proxy_cores: busy_seconds / seconds,
        p50_ns: at(0.5),
        p99_ns: at(0.99),
        bytes_per_s: outcome.bytes as f64 / seconds,
        bytes_per_cpu_s: outcome.bytes as f64 / busy_seconds,
        bytes_per_connection: None,
    }
}
