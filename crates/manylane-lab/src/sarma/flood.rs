//! Figures 7 and 8: a flood of datagrams from random sources at a server that answers. For every
//! reply the kernel resolves an unknown neighbour, and frees the entry later by RCU. While the
//! flood lasts:
//!
//! ```text
//! generator ─ 100,000/s from 5.0.0.0/8 ─► device ─ softirqs, a thread, or XDP ─► server ─ replies ─► (no host)
//! regular client ─ every 2 ms ──────────► the same                               └──────────────────► client: latency
//! one thread: RCU grace periods, one after the other      one thread: softirqs, slabs, neighbours
//! ```

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use manylane_bench::experiments::rtt::cpu_layout::CpuLayout;
use manylane_bench::receivers::{Kind, ReceiverOptions, Work};
use manylane_bench::{self as bench, Setup};
use manylane_measure::machine;
use manylane_measure::{Sent, Traffic, Until};
use manylane_sys::barrier;
use manylane_testbed::Host;
use manylane_testbed::generator::LiveSender;

use crate::part::Setups;
use crate::row::Row;

// Names of the tables.
pub(super) const FIGURE_7: &str = "figure 7";
pub(super) const FIGURE_8: &str = "figure 8";
pub(super) const FLOOD: &str = "flood";

pub(super) const GRACE_PERIOD_MAX: &str = "longest grace period, ms";
const GRACE_PERIOD: &str = "grace, ms";
const SLAB_BEFORE: &str = "slabs before, MiB";
const SLAB_GROWTH_MAX: &str = "slab growth, max MiB";
const NEIGHBOURS_MAX: &str = "neighbours, max";
const LATENCY_P50: &str = "reply p50, ms";
const LATENCY_P99: &str = "reply p99, ms";
const UNANSWERED: &str = "unanswered, %";
const FLOOD_RATE: &str = "flood, /s";

/// Datagrams per second, as in the paper.
const FLOOD_PPS: f64 = 100_000.0;
/// Interval at which the kernel's counters are read.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);
/// Interval of the regular client's requests, and its timeout.
const REQUEST_INTERVAL: Duration = Duration::from_millis(2);
const REPLY_TIMEOUT: Duration = Duration::from_millis(200);
/// Bytes of payload of all datagrams.
const PAYLOAD_SIZE: usize = 10;
/// Number of parts in which progress of the flood is reported.
const PART_COUNT: usize = 10;
/// The paper's scale of figure 8: 4 jiffies.
const JIFFIES_SECS: f64 = 0.004;

/// Receive path of a flood, and the context of the device's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RxPath {
    /// No flood at all.
    Idle,
    /// The kernel's own, in softirqs on the server's CPU.
    Softirqs,
    /// The kernel's own, in a thread on the server's CPU.
    Threaded,
    /// Frames received by XDP, in softirqs where they arrive.
    XdpSoftirqs,
    /// Frames received by XDP, in a thread on the server's CPU.
    XdpThreaded,
}

impl RxPath {
    pub(super) const ALL: [Self; 5] =
        [Self::Idle, Self::Softirqs, Self::Threaded, Self::XdpSoftirqs, Self::XdpThreaded];

    /// The name in parts.
    pub(super) const fn id(self) -> &'static str {
        match self {
            Self::Idle => "none",
            Self::Softirqs => "softirqs",
            Self::Threaded => "threaded",
            Self::XdpSoftirqs => "xdp-softirqs",
            Self::XdpThreaded => "xdp-threaded",
        }
    }

    /// The line of the tables.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Idle => "no flood",
            Self::Softirqs => "softirqs, socket/recvfrom",
            Self::Threaded => "threaded NAPI, socket/recvfrom",
            Self::XdpSoftirqs => "softirqs, lane/xdp",
            Self::XdpThreaded => "threaded NAPI, lane/xdp",
        }
    }

    fn kind(self) -> Kind {
        match self {
            Self::XdpSoftirqs | Self::XdpThreaded => Kind::LaneXdp,
            _ => Kind::SocketRecvfrom,
        }
    }

    fn cpu_layout(self) -> CpuLayout {
        match self {
            Self::Threaded | Self::XdpThreaded => CpuLayout::NapiServer,
            _ => CpuLayout::RpsServer,
        }
    }
}

/// Result of an observation of a flooded server.
pub(super) struct FloodResult<T> {
    pub(super) observed: T,
    pub(super) sent: Sent,
}

/// Starts a server, floods it from random sources for as long as `watch` takes, and returns the
/// result of `watch`. `watch` gets the server's address and the flag that ends everything.
pub(super) fn run_under_flood<T>(
    places: &mut Setups,
    path: RxPath,
    pps: Option<f64>,
    watch: impl FnOnce(&Setup, SocketAddr) -> Result<T>,
) -> Result<FloodResult<T>> {
    let setup = places.testbed()?;
    let sender_cpu =
        setup.sender_cpu().context("needs two CPUs: one for the generator, another one for the server")?;
    let _held = path.cpu_layout().apply(setup)?;
    let (from, to) = setup.hosts().context("a testbed has hosts")?;
    let (from, to) = (from.clone(), to.clone());
    to.ip_batch(&format!("route replace 5.0.0.0/8 dev {}\n", to.device(0)))?;
    let options = ReceiverOptions {
        work: Work::Echo,
        recv_buffer: 1 << 20,
        cpus: setup.receiver_cpus().first().copied().into_iter().collect(),
        ..setup.receiver(1, PAYLOAD_SIZE)
    };
    let running = setup.start(path.kind(), &options)?;
    let addr = running.addr();
    let traffic = Traffic { pps, ..Traffic::new(addr, PAYLOAD_SIZE) };
    let mut sender = LiveSender::with_random_sources(&from, &to, 0, &traffic)?;
    sender.pin(sender_cpu);
    let over = Arc::new(AtomicBool::new(path == RxPath::Idle));
    let done = thread::scope(|scope| {
        let flood = (path != RxPath::Idle).then(|| {
            let over = Arc::clone(&over);
            scope.spawn(move || sender.send(Until::Stop(over)))
        });
        let seen = watch(setup, addr);
        over.store(true, Ordering::Relaxed);
        let sent = match flood {
            Some(flood) => flood.join().map_err(|_| anyhow!("the generator panicked"))?,
            None => Ok(Sent::default()),
        };
        Ok(FloodResult { observed: seen?, sent: sent? })
    });
    // The server may be in a send that waits for room, which the replies to unknown neighbours
    // occupy until their resolution times out: for 6 s.
    let device = to.device(0);
    to.ip_batch(&format!("route delete 5.0.0.0/8 dev {device}\nneighbour flush dev {device}\n"))?;
    running.stop()?;
    done
}

/// One flood, and its effects.
pub(super) fn rows(places: &mut Setups, path: RxPath, stop: &AtomicBool) -> Vec<Row> {
    let length = Duration::from_millis(places.scale.flood_ms);
    let flooded =
        run_under_flood(places, path, Some(FLOOD_PPS), |setup, addr| observe(setup, addr, length, stop));
    match flooded {
        Ok(flooded) => result_rows(path, &flooded, length),
        Err(err) => {
            let why = format!("{err:#}");
            let cells = [(FIGURE_7, "1"), (FIGURE_8, "1"), (FLOOD, GRACE_PERIOD_MAX)];
            cells.map(|(table, column)| Row::unavailable(table, path.name(), column, "", &why)).to_vec()
        }
    }
}

/// Observations of a flood.
#[derive(Default)]
struct Observations {
    /// Start and length of each grace period, in seconds.
    grace_periods: Vec<(f64, f64)>,
    samples: Vec<KernelSample>,
    /// Round-trip time of each reply in milliseconds, and the number of missing ones.
    latencies_ms: Vec<f64>,
    requests: u64,
}

/// The kernel's counters at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct KernelSample {
    at: f64,
    softirqs: u64,
    slab_kib: u64,
    neighbours: u64,
}

fn observe(setup: &Setup, addr: SocketAddr, length: Duration, stop: &AtomicBool) -> Result<Observations> {
    let (client, server) = setup.hosts().context("a testbed has hosts")?;
    let start = Instant::now();
    let goes_on = || start.elapsed() < length && !stop.load(Ordering::Relaxed);
    let (grace, samples, client) = thread::scope(|scope| {
        let grace = scope.spawn(|| -> Result<Vec<(f64, f64)>> {
            let mut seen = Vec::new();
            while goes_on() {
                let at = start.elapsed().as_secs_f64();
                barrier::grace_period().context("membarrier(2)")?;
                seen.push((at, start.elapsed().as_secs_f64() - at));
            }
            Ok(seen)
        });
        let sampler = scope.spawn(|| server.run(|| sample_kernel(start, &goes_on)));
        let client = scope.spawn(|| run_client(client, addr, &goes_on));
        (grace.join(), sampler.join(), client.join())
    });
    bench::check_stop(stop)?;
    let panicked = || anyhow!("a thread panicked");
    let (replies, asked) = client.map_err(|_| panicked())??;
    ensure!(asked > 0, "no request was sent");
    Ok(Observations {
        grace_periods: grace.map_err(|_| panicked())??,
        samples: samples.map_err(|_| panicked())?,
        latencies_ms: replies,
        requests: asked,
    })
}

fn sample_kernel(start: Instant, goes_on: &dyn Fn() -> bool) -> Vec<KernelSample> {
    let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let mut seen = Vec::new();
    loop {
        seen.push(KernelSample {
            at: start.elapsed().as_secs_f64(),
            softirqs: parse_softirqs(&text("/proc/softirqs")),
            slab_kib: machine::read_kib("/proc/meminfo", "Slab"),
            // A heading, then a line for each counter.
            neighbours: (text("/proc/thread-self/net/arp").lines().count() as u64).saturating_sub(1),
        });
        if !goes_on() {
            return seen;
        }
        thread::sleep(SAMPLE_INTERVAL);
    }
}

/// Network softirqs of all CPUs since boot.
fn parse_softirqs(text: &str) -> u64 {
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix("NET_RX:"));
    line.map_or(0, |counts| counts.split_whitespace().filter_map(|count| count.parse::<u64>().ok()).sum())
}

/// A regular client, which sends a request now and then and waits for the reply. Returns the time
/// of each reply in milliseconds, and the number of requests.
fn run_client(host: &Host, addr: SocketAddr, goes_on: &(dyn Fn() -> bool + Sync)) -> Result<(Vec<f64>, u64)> {
    let socket = host.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)))?;
    socket.connect(addr)?;
    socket.set_read_timeout(Some(REPLY_TIMEOUT))?;
    let (mut replies, mut asked) = (Vec::new(), 0_u64);
    let mut buffer = [0; 64];
    while goes_on() {
        let mut request = [0; PAYLOAD_SIZE];
        request[..8].copy_from_slice(&asked.to_le_bytes());
        let sent = Instant::now();
        asked += 1;
        if socket.send(&request).is_ok() {
            // A reply that is too late for its own request is ignored.
            while let Ok(len) = socket.recv(&mut buffer) {
                if buffer[..len] == request {
                    replies.push(sent.elapsed().as_secs_f64() * 1e3);
                    break;
                }
            }
        }
        thread::sleep(REQUEST_INTERVAL);
    }
    Ok((replies, asked))
}

fn result_rows(path: RxPath, flooded: &FloodResult<Observations>, length: Duration) -> Vec<Row> {
    let (name, seen) = (path.name(), &flooded.observed);
    let seconds = length.as_secs_f64();
    let mut rows = Vec::new();
    for part in 0..PART_COUNT {
        let column = (part + 1).to_string();
        let (from, to) =
            (part as f64 * seconds / PART_COUNT as f64, (part + 1) as f64 * seconds / PART_COUNT as f64);
        let inside = |at: f64| at >= from && (at < to || part + 1 == PART_COUNT);
        let longest = seen.grace_periods.iter().filter(|(at, _)| inside(*at)).map(|(_, took)| took * 1e3);
        rows.push(match longest.reduce(f64::max) {
            Some(longest) => Row::new(FIGURE_7, name, &column, "ms", vec![longest]),
            None => Row::unavailable(
                FIGURE_7,
                name,
                &column,
                "ms",
                "no grace period began in this time: the one before took longer",
            ),
        });
        let samples: Vec<&KernelSample> = seen.samples.iter().filter(|sample| inside(sample.at)).collect();
        rows.push(match (samples.first(), samples.last()) {
            (Some(first), Some(last)) if last.at > first.at => {
                let rate = (last.softirqs - first.softirqs) as f64 / (last.at - first.at);
                Row::new(FIGURE_8, name, &column, "softirqs per 4 ms", vec![rate * JIFFIES_SECS])
            }
            _ => Row::unavailable(
                FIGURE_8,
                name,
                &column,
                "",
                "too few samples: the sampling thread was starved, too",
            ),
        });
    }
    let cell = |column: &str, unit: &str, samples: Vec<f64>| match samples.is_empty() {
        true => Row::unavailable(FLOOD, name, column, unit, "none came"),
        false => Row::new(FLOOD, name, column, unit, samples),
    };
    let grace: Vec<f64> = seen.grace_periods.iter().map(|(_, took)| took * 1e3).collect();
    let longest = grace.iter().copied().reduce(f64::max).into_iter().collect();
    let first = seen.samples.first().copied().unwrap_or_default();
    let max_of = |value: fn(&KernelSample) -> u64| seen.samples.iter().map(value).max().unwrap_or(0);
    let grown = max_of(|sample| sample.slab_kib).saturating_sub(first.slab_kib);
    let late = p99(&seen.latencies_ms).into_iter().collect();
    let counts = [
        ("asked", seen.requests),
        ("answered", seen.latencies_ms.len() as u64),
        ("flood", flooded.sent.datagrams),
    ];
    let lost = 100.0 * (1.0 - seen.latencies_ms.len() as f64 / seen.requests.max(1) as f64);
    rows.extend([
        cell(FLOOD_RATE, "1/s", vec![flooded.sent.pps()]),
        cell(GRACE_PERIOD, "ms", grace),
        cell(GRACE_PERIOD_MAX, "ms", longest),
        cell(SLAB_BEFORE, "MiB", vec![first.slab_kib as f64 / 1024.0]),
        cell(SLAB_GROWTH_MAX, "MiB", vec![grown as f64 / 1024.0]),
        cell(NEIGHBOURS_MAX, "", vec![max_of(|sample| sample.neighbours) as f64]),
        cell(LATENCY_P50, "ms", seen.latencies_ms.clone()),
        cell(LATENCY_P99, "ms", late),
        cell(UNANSWERED, "%", vec![lost]).with_counts(&counts),
    ]);
    rows
}

/// The value that 99 % of the samples do not exceed.
fn p99(samples: &[f64]) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(samples.len() * 99 / 100).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Paper;
    use crate::table::assert_compared;

    #[test]
    fn the_kernels_files_are_read() {
        let text = "                    CPU0       CPU1\n      NET_TX:          1          2\n      NET_RX:     100    20\n";
        assert_eq!(parse_softirqs(text), 120);
        assert_eq!((p99(&[]), p99(&[1.0]), p99(&[3.0, 1.0, 2.0])), (None, Some(1.0), Some(3.0)));
    }

    #[test]
    fn a_flood_has_all_parts_and_figures() {
        let samples = (0..100).map(|n| KernelSample {
            at: f64::from(n) / 50.0,
            softirqs: 10 * n as u64,
            slab_kib: 1000 + n as u64,
            neighbours: n as u64,
        });
        let seen = Observations {
            grace_periods: (0..50).map(|n| (f64::from(n) / 25.0, 0.01)).collect(),
            samples: samples.collect(),
            latencies_ms: vec![0.5; 99],
            requests: 100,
        };
        let flooded = FloodResult { observed: seen, sent: Sent::default() };
        let rows = result_rows(RxPath::Softirqs, &flooded, Duration::from_secs(2));
        let count = |table: &str| rows.iter().filter(|row| row.table == table && row.value.is_some()).count();
        assert_eq!((count(FIGURE_7), count(FIGURE_8), count(FLOOD)), (10, 10, 9));
        let at = |table: &str, column: &str| {
            rows.iter().find(|row| row.table == table && row.column == column).unwrap().value.unwrap()
        };
        assert!((at(FIGURE_8, "3") - 500.0 * JIFFIES_SECS).abs() < 1e-9);
        assert!((at(FLOOD, UNANSWERED) - 1.0).abs() < 1e-9);
        assert_eq!((at(FLOOD, NEIGHBOURS_MAX), at(FIGURE_7, "1")), (99.0, 10.0));
        assert_eq!((at(FLOOD, GRACE_PERIOD_MAX), at(FLOOD, LATENCY_P99)), (10.0, 0.5));
        assert_eq!(at(FLOOD, SLAB_GROWTH_MAX), 99.0 / 1024.0);
        let idle = result_rows(RxPath::Idle, &flooded, Duration::from_secs(2));
        assert_compared(Paper::Sarma, FLOOD, &[rows, idle].concat());
    }
}
