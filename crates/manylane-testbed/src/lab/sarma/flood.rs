//! Figures 7 and 8: a flood of datagrams from random sources at a server that answers. For every answer the kernel looks for a
//! neighbour that it does not know; what it makes for that it frees later, by RCU. While the flood lasts:
//!
//! ```text
//! generator ─ 100,000/s from 5.0.0.0/8 ─► device ─ softirqs, a thread, or XDP ─► server ─ answers ─► (nobody)
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
use manylane::{Steering, WaitPolicy};
use manylane_sys::barrier;

use super::{FIGURE_7, FIGURE_8, FLOOD};
use crate::bench::rtt::place::Placement;
use crate::bench::{self, RING, Setup};
use crate::host::Host;
use crate::lab::{Places, Row};
use crate::receiver::{Kind, ReceiverOptions, Work};
use crate::stats::Summary;
use crate::toil::Toil;
use crate::traffic::live::LiveSender;
use crate::traffic::{Sent, Traffic, Until};

pub(super) const GRACE_MOST: &str = "grace longest, ms";
const GRACE: &str = "grace, ms";
const SLAB: &str = "slabs before, MiB";
const GROWN: &str = "grown by at most, MiB";
const NEIGHBOURS: &str = "neighbours at most";
const HALF: &str = "answer p50, ms";
const LATE: &str = "answer p99, ms";
const LOST: &str = "unanswered, %";
const RATE: &str = "flood, /s";

/// Datagrams per second, as in the paper.
const PPS: f64 = 100_000.0;
/// Time between two looks at the counters of the kernel.
const LOOK: Duration = Duration::from_millis(20);
/// Time between two requests of the regular client, and how long it waits for an answer.
const PAUSE: Duration = Duration::from_millis(2);
const PATIENCE: Duration = Duration::from_millis(200);
/// Payload of all.
const SIZE: usize = 10;
/// The flood's length is told in so many parts.
const PARTS: usize = 10;
/// The paper's scale of figure 8: 4 jiffies.
const JIFFIES: f64 = 0.004;

/// Who takes the flood, and where the work of the device is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Path {
    /// No flood at all.
    Idle,
    /// The kernel's own, in softirqs on the server's processor.
    Softirqs,
    /// The kernel's own, in a thread on the server's processor.
    Threaded,
    /// Frames taken by XDP, in softirqs where they come in.
    XdpSoftirqs,
    /// Frames taken by XDP, in a thread on the server's processor.
    XdpThreaded,
}

impl Path {
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

    fn placement(self) -> Placement {
        match self {
            Self::Threaded | Self::XdpThreaded => Placement::NapiServer,
            _ => Placement::RpsServer,
        }
    }
}

/// What was seen while something ran at a flooded server.
pub(super) struct Flooded<T> {
    pub(super) seen: T,
    pub(super) sent: Sent,
}

/// Starts a server, floods it from random sources for as long as `watch` takes, and returns what that saw. `watch` gets the
/// server's address and the flag that ends everything.
pub(super) fn under_flood<T>(
    places: &mut Places,
    path: Path,
    pps: Option<f64>,
    watch: impl FnOnce(&Setup, SocketAddr) -> Result<T>,
) -> Result<Flooded<T>> {
    let setup = places.testbed()?;
    let sender_cpu =
        setup.sender_cpu().context("generator and server need a processor each: there is one")?;
    let _held = path.placement().set(setup)?;
    let (from, to) = setup.hosts().context("a testbed has hosts")?;
    let (from, to) = (from.clone(), to.clone());
    to.ip_batch(&format!("route replace 5.0.0.0/8 dev {}\n", to.device(0)))?;
    let options = ReceiverOptions {
        addr: setup.bind_addr(),
        work: Work::Echo,
        toil: Toil::default(),
        threads: 1,
        batch: 64,
        recv_buffer: 1 << 20,
        size: SIZE,
        cpus: setup.receiver_cpus().first().copied().into_iter().collect(),
        linger: Duration::ZERO,
        devices: setup.device_names(),
        ring: RING,
        wait: WaitPolicy::Sleep,
        steering: Steering::Flow,
    };
    let running = setup.start(path.kind(), &options)?;
    let addr = running.addr();
    let traffic = Traffic { pps, ..Traffic::new(addr, SIZE) };
    let mut sender = LiveSender::scattered(&from, &to, 0, &traffic)?;
    sender.pin(sender_cpu);
    let over = Arc::new(AtomicBool::new(path == Path::Idle));
    let done = thread::scope(|scope| {
        let flood = (path != Path::Idle).then(|| {
            let over = Arc::clone(&over);
            scope.spawn(move || sender.send(Until::Stop(over)))
        });
        let seen = watch(setup, addr);
        over.store(true, Ordering::Relaxed);
        let sent = match flood {
            Some(flood) => flood.join().map_err(|_| anyhow!("the generator panicked"))?,
            None => Ok(Sent::default()),
        };
        Ok(Flooded { seen: seen?, sent: sent? })
    });
    running.stop()?;
    done
}

/// One flood, and what it did.
pub(super) fn rows(places: &mut Places, path: Path, stop: &AtomicBool) -> Result<Vec<Row>> {
    let length = Duration::from_millis(places.scale.flood_ms);
    let flooded = under_flood(places, path, Some(PPS), |setup, addr| observe(setup, addr, length, stop));
    match flooded {
        Ok(flooded) => Ok(told(path, &flooded, length)),
        Err(err) => {
            bench::go_on(stop)?;
            let why = format!("{err:#}");
            let cells = [(FIGURE_7, "1"), (FIGURE_8, "1"), (FLOOD, GRACE_MOST)];
            Ok(cells.map(|(table, column)| Row::cannot(table, path.name(), column, "", &why)).to_vec())
        }
    }
}

/// What was seen of a flood.
#[derive(Default)]
struct Observed {
    /// When each grace period began, and how long it took, in seconds.
    grace: Vec<(f64, f64)>,
    looks: Vec<Look>,
    /// Milliseconds of each answer; those that did not come are counted.
    answers: Vec<f64>,
    asked: u64,
}

/// The kernel's counters at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Look {
    at: f64,
    softirqs: u64,
    slab_kib: u64,
    neighbours: u64,
}

fn observe(setup: &Setup, addr: SocketAddr, length: Duration, stop: &AtomicBool) -> Result<Observed> {
    let (client, server) = setup.hosts().context("a testbed has hosts")?;
    let start = Instant::now();
    let goes_on = || start.elapsed() < length && !stop.load(Ordering::Relaxed);
    let (grace, looks, client) = thread::scope(|scope| {
        let grace = scope.spawn(|| -> Result<Vec<(f64, f64)>> {
            let mut seen = Vec::new();
            while goes_on() {
                let at = start.elapsed().as_secs_f64();
                barrier::grace_period().context("membarrier(2)")?;
                seen.push((at, start.elapsed().as_secs_f64() - at));
            }
            Ok(seen)
        });
        let looks = scope.spawn(|| server.run(|| looks(start, &goes_on)));
        let client = scope.spawn(|| ask(client, addr, &goes_on));
        (grace.join(), looks.join(), client.join())
    });
    bench::go_on(stop)?;
    let panicked = || anyhow!("a thread panicked");
    let (answers, asked) = client.map_err(|_| panicked())??;
    ensure!(asked > 0, "nobody asked anything");
    Ok(Observed {
        grace: grace.map_err(|_| panicked())??,
        looks: looks.map_err(|_| panicked())?,
        answers,
        asked,
    })
}

fn looks(start: Instant, goes_on: &dyn Fn() -> bool) -> Vec<Look> {
    let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let mut seen = Vec::new();
    loop {
        seen.push(Look {
            at: start.elapsed().as_secs_f64(),
            softirqs: softirqs(&text("/proc/softirqs")),
            slab_kib: field(&text("/proc/meminfo"), "Slab:"),
            // A heading, then a line for each.
            neighbours: (text("/proc/thread-self/net/arp").lines().count() as u64).saturating_sub(1),
        });
        if !goes_on() {
            return seen;
        }
        thread::sleep(LOOK);
    }
}

/// Network softirqs of all processors since boot.
fn softirqs(text: &str) -> u64 {
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix("NET_RX:"));
    line.map_or(0, |counts| counts.split_whitespace().filter_map(|count| count.parse::<u64>().ok()).sum())
}

fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// A regular client, which asks now and then and waits for the answer: milliseconds of each, and how many it asked.
fn ask(host: &Host, addr: SocketAddr, goes_on: &(dyn Fn() -> bool + Sync)) -> Result<(Vec<f64>, u64)> {
    let socket = host.run(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)))?;
    socket.connect(addr)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let (mut answers, mut asked) = (Vec::new(), 0_u64);
    let mut buffer = [0; 64];
    while goes_on() {
        let mut request = [0; SIZE];
        request[..8].copy_from_slice(&asked.to_le_bytes());
        let sent = Instant::now();
        asked += 1;
        if socket.send(&request).is_ok() {
            // One that came too late for its own request is none.
            while let Ok(len) = socket.recv(&mut buffer) {
                if buffer[..len] == request {
                    answers.push(sent.elapsed().as_secs_f64() * 1e3);
                    break;
                }
            }
        }
        thread::sleep(PAUSE);
    }
    Ok((answers, asked))
}

fn told(path: Path, flooded: &Flooded<Observed>, length: Duration) -> Vec<Row> {
    let (name, seen) = (path.name(), &flooded.seen);
    let seconds = length.as_secs_f64();
    let mut rows = Vec::new();
    for part in 0..PARTS {
        let column = (part + 1).to_string();
        let (from, to) = (part as f64 * seconds / PARTS as f64, (part + 1) as f64 * seconds / PARTS as f64);
        let inside = |at: f64| at >= from && (at < to || part + 1 == PARTS);
        let longest = seen.grace.iter().filter(|(at, _)| inside(*at)).map(|(_, took)| took * 1e3);
        rows.push(match longest.reduce(f64::max) {
            Some(longest) => Row::new(FIGURE_7, name, &column, "ms", vec![longest]),
            None => Row::cannot(
                FIGURE_7,
                name,
                &column,
                "ms",
                "no grace period began then: one before took longer",
            ),
        });
        let looks: Vec<&Look> = seen.looks.iter().filter(|look| inside(look.at)).collect();
        rows.push(match (looks.first(), looks.last()) {
            (Some(first), Some(last)) if last.at > first.at => {
                let rate = (last.softirqs - first.softirqs) as f64 / (last.at - first.at);
                Row::new(FIGURE_8, name, &column, "softirqs per 4 ms", vec![rate * JIFFIES])
            }
            _ => Row::cannot(FIGURE_8, name, &column, "", "too few looks: whoever looks was starved, too"),
        });
    }
    let cell = |column: &str, unit: &str, samples: Vec<f64>| match samples.is_empty() {
        true => Row::cannot(FLOOD, name, column, unit, "none came"),
        false => Row::new(FLOOD, name, column, unit, samples),
    };
    let grace: Vec<f64> = seen.grace.iter().map(|(_, took)| took * 1e3).collect();
    let longest = grace.iter().copied().reduce(f64::max).into_iter().collect();
    let first = seen.looks.first().copied().unwrap_or_default();
    let most = |value: fn(&Look) -> u64| seen.looks.iter().map(value).max().unwrap_or(0);
    let grown = most(|look| look.slab_kib).saturating_sub(first.slab_kib);
    let late = late(&seen.answers).into_iter().collect();
    let counts =
        [("asked", seen.asked), ("answered", seen.answers.len() as u64), ("flood", flooded.sent.datagrams)];
    let lost = 100.0 * (1.0 - seen.answers.len() as f64 / seen.asked.max(1) as f64);
    rows.extend([
        cell(RATE, "1/s", vec![flooded.sent.pps()]),
        cell(GRACE, "ms", grace),
        cell(GRACE_MOST, "ms", longest),
        cell(SLAB, "MiB", vec![first.slab_kib as f64 / 1024.0]),
        cell(GROWN, "MiB", vec![grown as f64 / 1024.0]),
        cell(NEIGHBOURS, "", vec![most(|look| look.neighbours) as f64]),
        cell(HALF, "ms", seen.answers.clone()),
        cell(LATE, "ms", late),
        cell(LOST, "%", vec![lost]).with(&counts),
    ]);
    rows
}

/// The value that 99 % of the samples do not exceed.
fn late(samples: &[f64]) -> Option<f64> {
    let most = Summary::of(samples.iter().copied())?.max;
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    Some(sorted.get(samples.len() * 99 / 100).copied().unwrap_or(most))
}

/// What the rules of the conclusion look at: longest grace period, growth, neighbours, p99, per cent without an answer.
pub(super) fn figures(rows: &crate::lab::Rows<'_>, path: Path) -> Option<[f64; 5]> {
    let at = |column| rows.value(FLOOD, path.name(), column);
    Some([at(GRACE_MOST)?, at(GROWN)?, at(NEIGHBOURS)?, at(LATE)?, at(LOST)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_files_are_read() {
        let text = "                    CPU0       CPU1\n      NET_TX:          1          2\n      NET_RX:     100    20\n";
        assert_eq!(softirqs(text), 120);
        assert_eq!((field("MemTotal: 5 kB\nSlab:      42 kB\n", "Slab:"), field("", "Slab:")), (42, 0));
        assert_eq!((late(&[]), late(&[1.0]), late(&[3.0, 1.0, 2.0])), (None, Some(1.0), Some(3.0)));
    }

    #[test]
    fn a_flood_has_ten_parts_in_two_figures_and_nine_figures_beside() {
        let looks = (0..100).map(|n| Look {
            at: f64::from(n) / 50.0,
            softirqs: 10 * n as u64,
            slab_kib: 1000 + n as u64,
            neighbours: n as u64,
        });
        let seen = Observed {
            grace: (0..50).map(|n| (f64::from(n) / 25.0, 0.01)).collect(),
            looks: looks.collect(),
            answers: vec![0.5; 99],
            asked: 100,
        };
        let flooded = Flooded { seen, sent: Sent::default() };
        let rows = told(Path::Softirqs, &flooded, Duration::from_secs(2));
        let count = |table: &str| rows.iter().filter(|row| row.table == table && row.value.is_some()).count();
        assert_eq!((count(FIGURE_7), count(FIGURE_8), count(FLOOD)), (10, 10, 9));
        let at = |table: &str, column: &str| {
            rows.iter().find(|row| row.table == table && row.column == column).unwrap().value.unwrap()
        };
        assert!((at(FIGURE_8, "3") - 500.0 * JIFFIES).abs() < 1e-9);
        assert!((at(FLOOD, LOST) - 1.0).abs() < 1e-9);
        assert_eq!((at(FLOOD, NEIGHBOURS), at(FIGURE_7, "1")), (99.0, 10.0));
        let figures =
            figures(&crate::lab::Rows::of(crate::lab::Paper::Rivera, &rows), Path::Softirqs).unwrap();
        assert_eq!(figures, [10.0, 99.0 / 1024.0, 99.0, 0.5, at(FLOOD, LOST)]);
    }
}
