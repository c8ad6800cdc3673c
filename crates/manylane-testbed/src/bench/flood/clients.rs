//! Part `clients`: a flood from one address, and regular clients at another. How many of their requests are answered?

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use manylane::{Engine, WaitPolicy};

use super::server::{Flood, Seen, Server, Wanted};
use super::{Bed, Flooding, Plan, SIZE, Variant, WORK};
use crate::bench::sample::Busy;
use crate::bench::{Limits, Options, Trial, go_on, no_loss_rate};
use crate::host::Host;
use crate::schema::{FloodClients, FloodSample};
use crate::traffic::live::LiveSender;
use crate::traffic::{Traffic, Until};

/// What regular clients ask for, together.
pub(super) const ASKED: f64 = 1000.0;
/// Clients, with a socket each.
const CLIENTS: usize = 4;
/// An answer that has not come so long after the last request does not come.
const PATIENCE: Duration = Duration::from_millis(500);
/// Length of a trial of the search.
const TRIAL: Duration = Duration::from_millis(300);

pub(super) const VARIANTS: [Variant; 3] = [
    Variant { name: "no-flood", engine: Engine::Xdp, limit: false, flood: Flooding::No },
    Variant { name: "no-limit", engine: Engine::Xdp, limit: false, flood: Flooding::Yes },
    Variant { name: "limit", engine: Engine::Xdp, limit: true, flood: Flooding::Yes },
];

/// Gives the sending host another address, which the flood does not have.
pub(super) fn regular(bed: &Bed) -> Result<Ipv4Addr> {
    let [one, two, three, _] = bed.from.ip4(0).octets();
    let other = Ipv4Addr::new(one, two, three, 77);
    bed.from.add_address(0, other.into())?;
    Ok(other)
}

/// The highest rate at which the server loses a thousandth at most.
pub(super) fn no_loss(bed: &Bed, go_on: &dyn Fn() -> Result<()>) -> Result<f64> {
    let limits = Limits { start_pps: 20_000.0, max_pps: 1e6, precision: 0.1, ..Limits::default() };
    let found = no_loss_rate(&limits, |pps| {
        go_on()?;
        let server = Server::start(&bed.to, bed.server(Engine::Xdp, None))?;
        let traffic = Traffic { pps: Some(pps), ..Traffic::new(server.addr, SIZE) };
        let mut sender = LiveSender::new(&bed.from, &bed.to, 0, &traffic)?;
        let sent = sender.pin(bed.sender_cpu).send(Until::Duration(TRIAL))?;
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
    bed: &Bed,
    (options, plan): (&Options, &Plan),
    (variant, clients, pps): (&Variant, Ipv4Addr, f64),
    round: usize,
    stop: &std::sync::atomic::AtomicBool,
) -> Result<FloodSample> {
    let server = Server::start(&bed.to, bed.server(variant.engine, variant.limit.then_some(plan.limit)))?;
    let pps = if variant.flood == Flooding::Yes { pps } else { 0.0 };
    let traffic = Traffic { pps: Some(pps), flows: options.flows, ..Traffic::new(server.addr, SIZE) };
    let clock = Busy::start();
    let flood = Flood::start((&bed.from, &bed.to), bed.sender_cpu, &traffic)?;
    let asked = ask(&bed.from, clients, server.addr, options.duration);
    let sent = flood.map_or(Ok(0), Flood::stop)?;
    let mut times = asked?;
    go_on(stop)?;
    times.sort_by(f64::total_cmp);
    let asked = number(options.duration) * CLIENTS as u64;
    let at = |share: f64| times.get((times.len() as f64 * share) as usize).copied().unwrap_or(0.0);
    let mut seen = server.stop()?.since(&Seen::default(), round, sent + asked, &clock);
    seen.clients =
        Some(FloodClients { asked, answered: times.len() as u64, p50_ms: at(0.5), p99_ms: at(0.99) });
    Ok(seen)
}

/// Requests of each client in so long a time.
fn number(time: Duration) -> u64 {
    (time.as_secs_f64() * ASKED / CLIENTS as f64) as u64
}

/// Asks at an even pace, whatever comes back (an open loop), and returns how long each answer took, in milliseconds.
fn ask(host: &Host, from: Ipv4Addr, server: SocketAddr, time: Duration) -> Result<Vec<f64>> {
    let each = CLIENTS as f64 / ASKED;
    thread::scope(|scope| {
        let client = |client: usize| {
            let socket = host.run(|| -> Result<UdpSocket> {
                let socket = UdpSocket::bind((from, 0))?;
                socket.connect(server)?;
                Ok(socket)
            })?;
            let receiver = socket.try_clone()?;
            receiver.set_read_timeout(Some(PATIENCE))?;
            let start = Instant::now() + Duration::from_secs_f64(each * client as f64 / CLIENTS as f64);
            let hear = scope.spawn(move || {
                let (mut times, mut buffer) = (Vec::new(), [0; 2 * SIZE]);
                // The first receive without anything for so long is behind the last answer.
                while let Ok(SIZE) = receiver.recv(&mut buffer) {
                    let index = u64::from_le_bytes(buffer[..8].try_into().unwrap_or_default());
                    let due = start + Duration::from_secs_f64(each * index as f64);
                    times.push(due.elapsed().as_secs_f64() * 1e3);
                }
                times
            });
            scope.spawn(move || {
                for index in 0..number(time) {
                    let due = start + Duration::from_secs_f64(each * index as f64);
                    thread::sleep(due.saturating_duration_since(Instant::now()));
                    let mut question = [b'q'; SIZE];
                    question[..8].copy_from_slice(&index.to_le_bytes());
                    // One that has no room is lost like any other.
                    let _ = socket.send(&question);
                }
            });
            Ok(hear)
        };
        let heard = (0..CLIENTS).map(client).collect::<Result<Vec<_>>>()?;
        let all = heard.into_iter().map(|hear| hear.join().unwrap_or_default());
        Ok(all.flatten().collect())
    })
}

impl Bed {
    /// A server that works on each request, on the first link.
    pub(super) fn server(&self, engine: Engine, limit: Option<manylane::Limit>) -> Wanted {
        Wanted {
            link: 0,
            cpu: self.lane_cpu,
            engine,
            limit,
            work: WORK,
            wait: WaitPolicy::Sleep,
            batch: self.batch,
        }
    }
}
