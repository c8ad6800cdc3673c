//! Part `clients`: a flood from one address, and regular clients at another. Measures how many of
//! their requests are answered.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use manylane::{Engine, WaitPolicy};

use super::server::{Flood, Server, ServerConfig, ServerStats};
use super::{FloodTestbed, PAYLOAD_SIZE, Plan, REQUEST_COST, SenderLoad, Variant};
use crate::sample::CpuBusyTimer;
use crate::schema::{FloodClients, FloodSample};
use crate::{Limits, Options, Trial, check_stop, no_loss_rate};
use manylane_measure::{Traffic, Until};
use manylane_testbed::Host;
use manylane_testbed::generator::LiveSender;

/// Total rate of the regular clients' requests.
pub(super) const REQUESTS_PER_SEC: f64 = 1000.0;
/// Number of clients, with a socket each.
const CLIENTS: usize = 4;
/// Timeout of replies after the last request.
const REPLY_TIMEOUT: Duration = Duration::from_millis(500);
/// Length of a trial of the search.
const TRIAL_TIME: Duration = Duration::from_millis(300);

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

/// The highest rate at which the server loses at most a thousandth.
pub(super) fn server_no_loss_rate(bed: &FloodTestbed, go_on: &dyn Fn() -> Result<()>) -> Result<f64> {
    let limits = Limits { start_pps: 20_000.0, max_pps: 1e6, precision: 0.1, ..Limits::default() };
    let found = no_loss_rate(&limits, |pps| {
        go_on()?;
        let server = Server::start(&bed.to, bed.server_config(Engine::Xdp, None))?;
        let traffic = Traffic { pps: Some(pps), ..Traffic::new(server.addr, PAYLOAD_SIZE) };
        let mut sender = LiveSender::new(&bed.from, &bed.to, 0, &traffic)?;
        let sent = sender.pin(bed.sender_cpu).send(Until::Duration(TRIAL_TIME))?;
        let delivered = server.stop()?.delivered.min(sent.datagrams);
        Ok(Trial { offered_pps: sent.pps(), loss: 1.0 - delivered as f64 / sent.datagrams.max(1) as f64 })
    })?;
    ensure!(
        found.pps > 0.0,
        "the server loses datagrams at any rate: is the machine busy? (--rate sets that of the flood)"
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
    let pps = if variant.sender_load == SenderLoad::Flood { pps } else { 0.0 };
    let traffic = Traffic { pps: Some(pps), flows: options.flows, ..Traffic::new(server.addr, PAYLOAD_SIZE) };
    let clock = CpuBusyTimer::start();
    let flood = Flood::start((&bed.from, &bed.to), bed.sender_cpu, &traffic)?;
    let asked = run_clients(&bed.from, clients, server.addr, options.duration);
    let sent = flood.map_or(Ok(0), Flood::stop)?;
    let mut times = asked?;
    check_stop(stop)?;
    times.sort_by(f64::total_cmp);
    let asked = request_count(options.duration) * CLIENTS as u64;
    let at = |share: f64| times.get((times.len() as f64 * share) as usize).copied().unwrap_or(0.0);
    let mut seen = server.stop()?.since(&ServerStats::default(), round, sent + asked, &clock);
    seen.clients =
        Some(FloodClients { asked, answered: times.len() as u64, p50_ms: at(0.5), p99_ms: at(0.99) });
    Ok(seen)
}

/// Requests of each client in this time.
fn request_count(time: Duration) -> u64 {
    (time.as_secs_f64() * REQUESTS_PER_SEC / CLIENTS as f64) as u64
}

/// Sends requests at an even rate (an open loop), and returns the round-trip time of each reply,
/// in milliseconds.
fn run_clients(host: &Host, from: Ipv4Addr, server: SocketAddr, time: Duration) -> Result<Vec<f64>> {
    let each = CLIENTS as f64 / REQUESTS_PER_SEC;
    thread::scope(|scope| {
        let client = |client: usize| {
            let socket = host.run(|| -> Result<UdpSocket> {
                let socket = UdpSocket::bind((from, 0))?;
                socket.connect(server)?;
                Ok(socket)
            })?;
            let receiver = socket.try_clone()?;
            receiver.set_read_timeout(Some(REPLY_TIMEOUT))?;
            let start = Instant::now() + Duration::from_secs_f64(each * client as f64 / CLIENTS as f64);
            let recv_replies = scope.spawn(move || {
                let (mut times, mut buffer) = (Vec::new(), [0; 2 * PAYLOAD_SIZE]);
                // The first receive that times out is after the last reply.
                while let Ok(PAYLOAD_SIZE) = receiver.recv(&mut buffer) {
                    let index = u64::from_le_bytes(buffer[..8].try_into().unwrap_or_default());
                    let due = start + Duration::from_secs_f64(each * index as f64);
                    times.push(due.elapsed().as_secs_f64() * 1e3);
                }
                times
            });
            scope.spawn(move || {
                for index in 0..request_count(time) {
                    let due = start + Duration::from_secs_f64(each * index as f64);
                    thread::sleep(due.saturating_duration_since(Instant::now()));
                    let mut question = [b'q'; PAYLOAD_SIZE];
                    question[..8].copy_from_slice(&index.to_le_bytes());
                    // A request without room in the socket is lost like any other.
                    let _ = socket.send(&question);
                }
            });
            Ok(recv_replies)
        };
        let results = (0..CLIENTS).map(client).collect::<Result<Vec<_>>>()?;
        let all = results.into_iter().map(|recv_replies| recv_replies.join().unwrap_or_default());
        Ok(all.flatten().collect())
    })
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
