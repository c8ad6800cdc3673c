//! What limits do in a flood, measured over a testbed (root): `flood keep`, `flood sources [SECONDS]`, `flood starve`. One JSON
//! document each, on standard output. `docs/results/` has ours; how to read them is in `docs/flood.md`.
//!
//! The flood is made on CPU 1, where the other end of the link takes it, too; the lane is on CPU 0.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use manylane::{Builder, Counters, Engine, Limit, Placement, WaitPolicy};
use manylane_sys::cpu;
use manylane_sys::packet::PacketSocket;
use manylane_testbed::machine::Machine;
use manylane_testbed::traffic::live::LiveSender;
use manylane_testbed::traffic::{Traffic, Until};
use manylane_testbed::{Host, Layout, Testbed};
use manylane_wire::ethernet::Mac;
use manylane_wire::frame::UdpFrame;
use serde_json::{Value, json};

/// What a request costs the server, in `keep` and `starve`.
const WORK: Duration = Duration::from_micros(10);
/// Rounds, and how long the flood of one lasts.
const ROUNDS: usize = 5;
const FLOOD: Duration = Duration::from_millis(1500);
/// What regular clients ask for, together.
const CLIENTS: usize = 4;
const ASKED: f64 = 1000.0;
/// New sources per second.
const SOURCES: u32 = 100_000;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let testbed = Testbed::new(&Layout { ipv6: false, ..Layout::default() })?;
    let rows = match words.first().map(String::as_str) {
        Some("keep") => keep(&testbed)?,
        Some("sources") => {
            let seconds = words.get(1).map_or(Ok(60), |word| word.parse())?;
            sources(&testbed, seconds)?
        }
        Some("starve") => starve(&testbed)?,
        _ => bail!("flood keep, flood sources [SECONDS] or flood starve"),
    };
    let command = format!("flood {}", words.join(" "));
    let document = json!({
        "schema": "manylane.flood.v1", "machine": Machine::read(), "settings": { "command": command }, "rows": rows,
    });
    println!("{}", serde_json::to_string_pretty(&document)?);
    Ok(())
}

/// A server on one lane, and what its lane saw.
struct Server {
    addr: SocketAddr,
    handle: manylane::Handle,
    thread: thread::JoinHandle<manylane::Result<Counters>>,
    /// Longest time between two calls of the closure since somebody asked, in nanoseconds.
    pause: Arc<AtomicU64>,
}

impl Server {
    fn start(host: &Host, work: Duration, change: impl FnOnce(&mut Builder) + Send) -> Result<Self> {
        let addr = (host.ip4(0), 0);
        let socket = host.run(move || {
            let mut builder = Builder::new(addr)?;
            change(builder.lanes(1).placement(Placement::List(vec![0])));
            builder.open()
        })?;
        let (addr, handle) = (socket.local_addr(), socket.handle());
        let pause = Arc::new(AtomicU64::new(0));
        let longest = Arc::clone(&pause);
        let serve = move || {
            let mut before = None::<Instant>;
            socket.serve(move |batch, out| {
                let now = Instant::now();
                if let Some(before) = before {
                    longest.fetch_max((now - before).as_nanos() as u64, Ordering::Relaxed);
                }
                for datagram in batch {
                    let start = Instant::now();
                    while start.elapsed() < work {}
                    out.reply_borrowed(&datagram, datagram.payload());
                }
                before = Some(Instant::now());
            })
        };
        let thread = host.spawn("flood-server", serve)?;
        Ok(Self { addr, handle, thread, pause })
    }

    fn stop(self) -> Result<Counters> {
        self.handle.stop();
        let ended = self.thread.join().map_err(|_| anyhow::anyhow!("the server panicked"))?;
        Ok(ended?)
    }
}

/// With these limits, or with none.
fn xdp(limit: Option<&str>) -> impl FnOnce(&mut Builder) + Send {
    let limit = limit.map(str::to_owned);
    move |builder| {
        builder.engine(Engine::Xdp);
        if let Some(limit) = limit.and_then(|limit| limit.parse::<Limit>().ok()) {
            builder.limit(limit);
        }
    }
}

/// 1: a flood of ten times what the server can do, from one address; what is left of the others' answers?
fn keep(testbed: &Testbed) -> Result<Vec<Value>> {
    let (a, b) = (testbed.host(0), testbed.host(1));
    let clients_at = regular(a)?;
    let most = no_loss(a, b)?;
    let mut rows = vec![json!({ "variant": "no-loss rate", "pps": most })];
    for round in 0..ROUNDS {
        for (variant, limit, factor) in
            [("no flood", None, 0.0), ("no limit", None, 10.0), ("limit", Some("2000/200"), 10.0)]
        {
            let server = Server::start(b, WORK, xdp(limit))?;
            let flood = Flood::start(a, b, server.addr, factor * most)?;
            let mut times = ask(a, clients_at, server.addr, FLOOD)?;
            let sent = flood.map_or(Ok(0), Flood::stop)?;
            let counters = server.stop()?;
            times.sort_unstable();
            let asked = (ASKED * FLOOD.as_secs_f64()) as usize;
            let at = |share: f64| times.get((times.len() as f64 * share) as usize).copied();
            rows.push(json!({
                "variant": variant, "round": round, "flood": sent, "flood_pps": factor * most,
                "asked": asked, "answered": times.len(), "share": times.len() as f64 / asked as f64,
                "p50_us": at(0.5), "p99_us": at(0.99), "limited": counters.refused.limited,
                "xsk_dropped": counters.total().xsk_dropped, "delivered": counters.total().delivered,
            }));
        }
    }
    Ok(rows)
}

/// Another address of a host, which the flood does not have.
fn regular(a: &Host) -> Result<Ipv4Addr> {
    let [one, two, three, _] = a.ip4(0).octets();
    let other = Ipv4Addr::new(one, two, three, 77);
    a.add_address(0, other.into())?;
    Ok(other)
}

/// The highest rate of which a thousandth is lost at most.
fn no_loss(a: &Host, b: &Host) -> Result<f64> {
    let (mut good, mut pps) = (0.0, 20_000.0);
    while pps < 1e6 {
        let server = Server::start(b, WORK, xdp(None))?;
        let mut sender =
            LiveSender::new(a, b, 0, &Traffic { pps: Some(pps), ..Traffic::new(server.addr, 32) })?;
        let sent = sender.pin(1).send(Until::Duration(Duration::from_millis(500)))?;
        let total = server.stop()?.total();
        if total.delivered * 1000 < sent.datagrams * 999 {
            break;
        }
        (good, pps) = (pps, pps * 1.15);
    }
    ensure!(good > 0.0, "the server loses datagrams at any rate");
    Ok(good)
}

/// A flood that goes on until it is stopped.
struct Flood {
    stop: Arc<AtomicBool>,
    thread: thread::JoinHandle<Result<u64>>,
}

impl Flood {
    fn start(a: &Host, b: &Host, to: SocketAddr, pps: f64) -> Result<Option<Self>> {
        if pps == 0.0 {
            return Ok(None);
        }
        let traffic = Traffic { pps: Some(pps), flows: 64, ..Traffic::new(to, 32) };
        let mut sender = LiveSender::new(a, b, 0, &traffic)?;
        let stop = Arc::new(AtomicBool::new(false));
        let until = Until::Stop(Arc::clone(&stop));
        let send = move || Ok(sender.pin(1).send(until)?.datagrams);
        let thread = thread::spawn(send);
        thread::sleep(Duration::from_millis(100));
        Ok(Some(Self { stop, thread }))
    }

    fn stop(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow::anyhow!("the sender panicked"))?
    }
}

/// Asks at an even pace, whatever comes back (an open loop), and returns how long each answer took, in microseconds. What
/// has not come half a second after the last question is lost.
fn ask(a: &Host, from: Ipv4Addr, server: SocketAddr, time: Duration) -> Result<Vec<u64>> {
    let each = CLIENTS as f64 / ASKED;
    thread::scope(|scope| {
        let client = |number: usize| {
            let socket = a.run(|| -> Result<UdpSocket> {
                let socket = UdpSocket::bind((from, 0))?;
                socket.connect(server)?;
                Ok(socket)
            })?;
            let receiver = socket.try_clone()?;
            receiver.set_read_timeout(Some(Duration::from_millis(500)))?;
            let start = Instant::now() + Duration::from_secs_f64(each * number as f64 / CLIENTS as f64);
            let hear = scope.spawn(move || {
                let (mut times, mut buffer) = (Vec::new(), [0; 64]);
                while let Ok(32) = receiver.recv(&mut buffer) {
                    let index = u64::from_le_bytes(buffer[..8].try_into().unwrap_or_default());
                    let due = start + Duration::from_secs_f64(each * index as f64);
                    times.push(due.elapsed().as_micros() as u64);
                }
                times
            });
            scope.spawn(move || {
                for index in 0..(time.as_secs_f64() / each) as u64 {
                    let due = start + Duration::from_secs_f64(each * index as f64);
                    thread::sleep(due.saturating_duration_since(Instant::now()));
                    let mut question = [b'q'; 32];
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

/// 2: new sources, and the same load of one source: what grows, and how long does the lane pause?
fn sources(testbed: &Testbed, seconds: u64) -> Result<Vec<Value>> {
    let (a, b) = (testbed.host(0), testbed.host(1));
    let device = b.device(0).to_owned();
    b.ip_batch(&format!("route add 10.128.0.0/9 via {} dev {device}", a.ip4(0)))?;
    let mut rows = Vec::new();
    for (variant, limit, is_new) in
        [("one source, no limit", None, false), ("new sources, limit", Some("1000/50"), true)]
    {
        let spin = move |builder: &mut Builder| {
            xdp(limit)(builder);
            builder.wait(WaitPolicy::Spin(Duration::from_millis(5)));
        };
        let server = Server::start(b, Duration::ZERO, spin)?;
        let stop = AtomicBool::new(false);
        let samples = thread::scope(|scope| {
            let sender = scope.spawn(|| new_sources(a, b, server.addr, is_new, &stop));
            // What is made once is made: frames, routes.
            thread::sleep(Duration::from_secs(1));
            server.pause.store(0, Ordering::Relaxed);
            let mut samples = Vec::new();
            for second in 0..seconds {
                thread::sleep(Duration::from_secs(1));
                let counters = server.handle.counters();
                let total = counters.total();
                samples.push(json!({
                    "second": second, "rss_kib": rss(), "longest_pause_us": server.pause.swap(0, Ordering::Relaxed) / 1000,
                    "delivered": total.delivered, "limited": counters.refused.limited, "xsk_dropped": total.xsk_dropped,
                    "sent": total.sent, "sent_by_xdp": total.sent_by_xdp, "lost": total.lost(),
                }));
            }
            stop.store(true, Ordering::Relaxed);
            let sent = sender.join().map_err(|_| anyhow::anyhow!("the sender panicked"))??;
            anyhow::Ok((samples, sent))
        })?;
        server.stop()?;
        let number = |name: &str| samples.0.iter().filter_map(|one| one[name].as_u64()).collect::<Vec<_>>();
        let (rss, pauses) = (number("rss_kib"), number("longest_pause_us"));
        rows.push(json!({
            "variant": variant, "sent": samples.1, "samples": samples.0,
            "rss_kib_first": rss.first(), "rss_kib_most": rss.iter().max(), "longest_pause_us": pauses.iter().max(),
        }));
    }
    Ok(rows)
}

/// Kibibytes that this process has in memory.
fn rss() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_ascii_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Sends one datagram of each source, ten at a time, until it is stopped; returns how many.
fn new_sources(a: &Host, b: &Host, to: SocketAddr, is_new: bool, stop: &AtomicBool) -> Result<u64> {
    cpu::pin(1)?;
    let socket = a.run(|| PacketSocket::open(a.device_index(0)?).context("opening the sender"))?;
    let (from, onto) = (Mac(a.mac(0)), Mac(b.mac(0)));
    let (mut sent, mut bytes, start) = (0_u64, Vec::new(), Instant::now());
    while !stop.load(Ordering::Relaxed) {
        let due = (start.elapsed().as_secs_f64() * f64::from(SOURCES)) as u64;
        // What was missed while the machine did something else is not made up for: that would be another flood.
        let least = due.saturating_sub(u64::from(SOURCES) / 100);
        for number in sent.max(least)..due {
            // All of 10.128.0.0/9 in an order that looks like none: an odd factor visits each once.
            let at = if is_new { (number as u32).wrapping_mul(0x9e37_79b1) & 0x7f_ffff } else { 1 };
            let source: IpAddr = Ipv4Addr::from_bits(0x0a80_0000 | at).into();
            let plan = UdpFrame {
                payload: &[b'?'; 32],
                ..UdpFrame::new(from, onto, SocketAddr::new(source, 5353), to)
            };
            bytes.resize(plan.len(), 0);
            plan.write(&mut bytes).map_err(|err| anyhow::anyhow!("{err}"))?;
            // A device that is full loses it.
            let _ = socket.send(&bytes);
        }
        sent = due;
        std::hint::spin_loop();
    }
    Ok(sent)
}

/// 3: how long is a program that only wants to run kept from it, on each CPU, in a flood of a million per second?
fn starve(testbed: &Testbed) -> Result<Vec<Value>> {
    let (a, b) = (testbed.host(0), testbed.host(1));
    let mut rows = Vec::new();
    for round in 0..ROUNDS {
        for (variant, engine, limit, pps) in [
            ("no flood", Engine::Xdp, None, 0.0),
            ("kernel sockets", Engine::Mmsg, None, 1e6),
            ("no limit", Engine::Xdp, None, 1e6),
            ("limit", Engine::Xdp, Some("2000/200"), 1e6),
        ] {
            let with = move |builder: &mut Builder| {
                if engine == Engine::Xdp { xdp(limit)(builder) } else { _ = builder.engine(engine) }
            };
            let server = Server::start(b, WORK, with)?;
            let flood = Flood::start(a, b, server.addr, pps)?;
            let gaps = thread::scope(|scope| {
                [0, 1].map(|cpu| scope.spawn(move || longest_gap(cpu, FLOOD))).map(|spinner| spinner.join())
            });
            let sent = flood.map_or(Ok(0), Flood::stop)?;
            let counters = server.stop()?;
            let [lane, sender] = gaps.map(|gap| gap.unwrap_or((0, 0)));
            rows.push(json!({
                "variant": variant, "round": round, "flood": sent, "limited": counters.refused.limited,
                "delivered": counters.total().delivered,
                "longest_gap_us": { "cpu0_lane": lane.0, "cpu1_softirq_and_sender": sender.0 },
                "share": { "cpu0_lane": lane.1, "cpu1_softirq_and_sender": sender.1 },
            }));
        }
    }
    Ok(rows)
}

/// Spins on a CPU: the longest time between two looks at the clock, in microseconds, and the share of the time that the
/// thread had, in percent.
fn longest_gap(cpu: usize, time: Duration) -> (u64, u64) {
    if cpu::pin(cpu).is_err() {
        return (0, 0);
    }
    let (start, used) = (Instant::now(), cpu::thread_time());
    let (mut before, mut longest) = (start, Duration::ZERO);
    while before - start < time {
        let now = Instant::now();
        longest = longest.max(now - before);
        before = now;
    }
    let share = (cpu::thread_time() - used).as_secs_f64() / start.elapsed().as_secs_f64();
    (longest.as_micros() as u64, (share * 100.0) as u64)
}
