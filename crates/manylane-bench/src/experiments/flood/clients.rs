//! Part `clients`: a flood from one address, and regular clients at another. Measures how many of
//! their requests are answered.

use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Result, ensure};
use manylane::{Engine, WaitPolicy};
use manylane_measure::client::{self, Expect, Outcome, Plan as Requests};
use manylane_measure::{Traffic, Until};
use manylane_testbed::generator::LiveSender;

use super::plan::{FloodTestbed, PAYLOAD_SIZE, Plan, REQUEST_COST, SenderLoad, Variant};
use super::server::{SenderThread, Server, ServerConfig, ServerStats};
use crate::sample::CpuBusyTimer;
use crate::schema::{FloodClients, FloodSample};
use crate::search::{Limits, Trial, queue_delay, sustained_rate};
use crate::{Options, check_stop};

/// Total rate of the regular clients' requests.
pub(super) const REQUESTS_PER_SEC: f64 = 1000.0;
/// Number of clients, with a socket each.
const CLIENTS: usize = 4;
/// Timeout of replies after the last request.
const REPLY_TIMEOUT: Duration = Duration::from_millis(500);

pub(super) const VARIANTS: [Variant; 3] = [
    Variant { name: "no-flood", engine: Engine::Xdp, limit: false, sender_load: SenderLoad::Idle },
    Variant { name: "no-limit", engine: Engine::Xdp, limit: false, sender_load: SenderLoad::Flood },
    Variant { name: "limit", engine: Engine::Xdp, limit: true, sender_load: SenderLoad::Flood },
];

/// Adds an address to the sending host that the flood does not use.
pub(super) fn add_client_address(bed: &FloodTestbed) -> Result<Ipv4Addr> {
    let [one, two, three, _] = bed.from.ip4(0).octets();
    let other = Ipv4Addr::new(one, two, three, 77);
    bed.from.add_address(0, other.into())?;
    Ok(other)
}

/// The server's sustained rate.
pub(super) fn server_sustained_rate(
    bed: &FloodTestbed,
    limits: &Limits,
    go_on: &dyn Fn() -> Result<()>,
) -> Result<f64> {
    let limits = Limits { start_pps: 20_000.0, max_pps: 1e6, precision: 0.1, ..*limits };
    let found = sustained_rate(&limits, |pps| {
        go_on()?;
        let server = Server::start(&bed.to, bed.server_config(Engine::Xdp, None))?;
        let traffic = Traffic { pps: Some(pps), ..Traffic::new(server.addr, PAYLOAD_SIZE) };
        let mut sender = LiveSender::new(&bed.from, &bed.to, 0, &traffic)?;
        let sent = sender.pin(bed.sender_cpu).send(Until::Duration(limits.trial))?;
        let at_end = server.snapshot().delivered;
        // The server drains its queue before it stops.
        let delivered = server.stop()?.delivered.min(sent.datagrams);
        let loss = 1.0 - delivered as f64 / sent.datagrams.max(1) as f64;
        let delay = queue_delay(delivered.saturating_sub(at_end), sent.pps());
        Ok(Trial { offered_pps: sent.pps(), loss, delay })
    })?;
    ensure!(
        found.pps > 0.0,
        "the server loses datagrams at every rate: wait until the machine is idle, or set --rate for the flood"
    );
    Ok(found.pps)
}

pub(super) fn sample(
    bed: &FloodTestbed,
    (options, plan): (&Options, &Plan),
    (variant, clients, pps): (&Variant, Ipv4Addr, f64),
    round: usize,
    stop: &std::sync::atomic::AtomicBool,
) -> Result<FloodSample> {
    let server =
        Server::start(&bed.to, bed.server_config(variant.engine, variant.limit.then_some(plan.limit)))?;
    let traffic = Traffic { pps: Some(pps), flows: options.flows, ..Traffic::new(server.addr, PAYLOAD_SIZE) };
    let clock = CpuBusyTimer::start();
    let flood = variant.sender_load.start(bed, &traffic)?;
    let requests = Requests {
        to: server.addr,
        from: Some(clients.into()),
        rate: REQUESTS_PER_SEC,
        count: Some((options.duration.as_secs_f64() * REQUESTS_PER_SEC) as u64),
        duration: None,
        size: PAYLOAD_SIZE,
        flows: CLIENTS,
        payload: None,
        expect: Expect::Echo,
        timeout: REPLY_TIMEOUT,
        busy_poll: false,
    };
    let asked = bed.from.run(|| client::run(&requests, stop, |_| ()));
    let sent = flood.map_or(Ok(0), SenderThread::stop)?;
    check_stop(stop)?;
    let Outcome { counts, latency, .. } = asked?;
    let mut seen = server.stop()?.since(&ServerStats::default(), round, sent + counts.asked, &clock);
    let at = |share: f64| latency.value_at_quantile(share) as f64 / 1e6;
    let (asked, answered) = (counts.asked, counts.answered);
    seen.clients = Some(FloodClients { asked, answered, p50_ms: at(0.5), p99_ms: at(0.99) });
    Ok(seen)
}

impl FloodTestbed {
    /// A server that works on each request, on the first link.
    pub(super) fn server_config(&self, engine: Engine, limit: Option<manylane::Limit>) -> ServerConfig {
        ServerConfig {
            link: 0,
            cpu: self.lane_cpu,
            engine,
            limit,
            request_cost: REQUEST_COST,
            wait: WaitPolicy::Sleep,
            batch: self.batch,
        }
    }
}
