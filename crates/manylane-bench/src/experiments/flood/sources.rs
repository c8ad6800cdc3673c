//! Part `sources`: a new source for each datagram, compared with the same load from one source,
//! which leaves all tables empty. Measures the growth of memory, and pauses. Two servers, each on
//! its own link, run through all rounds and alternate, so that the tables of one stay full and
//! those of the other stay empty.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use manylane::{Engine, Limit, WaitPolicy};
use manylane_measure::machine;
use manylane_sys::cpu;
use manylane_sys::packet::PacketSocket;
use manylane_wire::ethernet::Mac;
use manylane_wire::frame::UdpFrame;

use super::pauses::{PauseHistogram, StealTime, measure_wakeup_latency};
use super::plan::{FloodTestbed, PAYLOAD_SIZE, SenderLoad, Variant};
use super::server::{Server, ServerConfig};
use crate::check_stop;
use crate::sample::CpuBusyTimer;
use crate::schema::{FloodMemory, FloodSample};

/// Rate of datagrams and of new sources, per second.
pub(super) const RATE_PPS: u32 = 100_000;
/// The limit of the server with new sources: no source is over it, and each has a bucket.
const SERVER_LIMIT: &str = "1000/50";
/// Datagrams of a batch. Their work takes much less than a millisecond, however their replies
/// leave (those to new sources through the companion), so that anything longer is a pause.
const BATCH_SIZE: usize = 8;
/// Warm-up time.
const WARM_UP_TIME: Duration = Duration::from_millis(300);
/// Addresses of new sources: 10.128.0.0/9, and of the one source 10.127.0.1.
const NEW_SOURCES_BASE: u32 = 0x0a80_0000;
const NEW_SOURCES_MASK: u32 = 0x7f_ffff;
const ONE_SOURCE: u32 = 0x0a7f_0001;

/// The two loads: one source without a limit, and new sources with a limit.
pub(super) const VARIANTS: [Variant; 2] = [
    Variant { name: "one-source", engine: Engine::Xdp, limit: false, sender_load: SenderLoad::Flood },
    Variant { name: "new-sources", engine: Engine::Xdp, limit: true, sender_load: SenderLoad::Flood },
];

/// The two servers.
pub(super) struct ServerPair {
    servers: [Server; 2],
    /// New sources so far.
    next_source: AtomicU64,
}

impl ServerPair {
    pub(super) fn start(bed: &FloodTestbed) -> Result<Self> {
        for (prefix, link) in [("10.127.0.0/16", 0), ("10.128.0.0/9", 1)] {
            let (via, device) = (bed.from.ip4(link), bed.to.device(link));
            bed.to.ip_batch(&format!("route add {prefix} via {via} dev {device}"))?;
        }
        let start = |link, limit: Option<Limit>| {
            let wait = WaitPolicy::Spin(Duration::from_millis(5));
            let (cpu, work) = (bed.lane_cpu, Duration::ZERO);
            Server::start(
                &bed.to,
                ServerConfig {
                    link,
                    cpu,
                    engine: Engine::Xdp,
                    limit,
                    request_cost: work,
                    wait,
                    batch: BATCH_SIZE,
                },
            )
        };
        Ok(Self {
            servers: [start(0, None)?, start(1, Some(SERVER_LIMIT.parse()?))?],
            next_source: AtomicU64::new(0),
        })
    }

    pub(super) fn stop(self) -> Result<()> {
        self.servers.into_iter().try_for_each(|server| server.stop().map(|_| ()))
    }

    /// One stretch of the load of [`VARIANTS`]`[which]`.
    pub(super) fn sample(
        &self,
        bed: &FloodTestbed,
        which: usize,
        (round, length): (usize, Duration),
        stop: &AtomicBool,
    ) -> Result<FloodSample> {
        let server = &self.servers[which];
        let over = AtomicBool::new(false);
        let (late, away) = (PauseHistogram::default(), PauseHistogram::default());
        let sent = AtomicU64::new(0);
        let first = self.next_source.load(Ordering::Relaxed);
        let sample = thread::scope(|scope| {
            let sender = scope.spawn(|| self.send(bed, which, server.addr, (&sent, &away), &over));
            let observer = scope.spawn(|| measure_wakeup_latency(bed.lane_cpu, &late, &over));
            thread::sleep(WARM_UP_TIME);
            for tally in [&*server.pauses, &late, &away] {
                tally.reset();
            }
            let (before, sent_before) = (server.snapshot(), sent.load(Ordering::Relaxed));
            let (clock, steal, start) = (CpuBusyTimer::start(), StealTime::start(), Instant::now());
            let mut memory = FloodMemory::default();
            while start.elapsed() < length && !stop.load(Ordering::Relaxed) && !sender.is_finished() {
                let left = length.saturating_sub(start.elapsed());
                thread::sleep(left.min(Duration::from_secs(1)));
                memory.rss_kib.push(machine::read_kib("/proc/self/status", "VmRSS"));
                memory.slab_kib.push(machine::read_kib("/proc/meminfo", "Slab"));
            }
            let seconds = start.elapsed().as_secs_f64();
            let sent = sent.load(Ordering::Relaxed) - sent_before;
            let mut sample = server.snapshot().since(&before, round, sent, &clock);
            sample.pauses = vec![
                server.pauses.drain("lane", bed.lane_cpu, seconds, &steal),
                late.drain("observer", bed.lane_cpu, seconds, &steal),
                away.drain("sender", bed.sender_cpu, seconds, &steal),
            ];
            over.store(true, Ordering::Relaxed);
            let panicked = || anyhow!("a thread of the flood panicked");
            sender.join().map_err(|_| panicked())??;
            observer.join().map_err(|_| panicked())??;
            memory.new_sources = self.next_source.load(Ordering::Relaxed) - first;
            sample.memory = Some(memory);
            anyhow::Ok(sample)
        })?;
        check_stop(stop)?;
        Ok(sample)
    }

    /// Sends one datagram of each source, in bursts of some microseconds, until it is stopped.
    fn send(
        &self,
        bed: &FloodTestbed,
        link: usize,
        to: SocketAddr,
        (count, away): (&AtomicU64, &PauseHistogram),
        over: &AtomicBool,
    ) -> Result<()> {
        cpu::pin(bed.sender_cpu)?;
        let index = bed.from.device_index(link)?;
        let socket = bed.from.run(|| PacketSocket::open(index).context("opening the sender"))?;
        let (from, onto) = (Mac(bed.from.mac(link)), Mac(bed.to.mac(link)));
        let (mut done, mut bytes, start) = (0_u64, Vec::new(), Instant::now());
        let mut looked = start;
        while !over.load(Ordering::Relaxed) {
            let now = Instant::now();
            away.record(now - looked);
            looked = now;
            let due = ((now - start).as_secs_f64() * f64::from(RATE_PPS)) as u64;
            // Datagrams that were missed while the machine was busy are not sent later: that would
            // be another flood.
            let least = due.saturating_sub(u64::from(RATE_PPS) / 100);
            let mut taken = 0;
            for _ in done.max(least)..due {
                // All of 10.128.0.0/9 in a scattered order: an odd factor visits each address
                // once.
                let source = match VARIANTS[link].limit {
                    true => {
                        let number = self.next_source.fetch_add(1, Ordering::Relaxed) as u32;
                        NEW_SOURCES_BASE | (number.wrapping_mul(0x9e37_79b1) & NEW_SOURCES_MASK)
                    }
                    false => ONE_SOURCE,
                };
                let source: IpAddr = Ipv4Addr::from_bits(source).into();
                let plan = UdpFrame {
                    payload: &[b'?'; PAYLOAD_SIZE],
                    ..UdpFrame::new(from, onto, SocketAddr::new(source, 5353), to)
                };
                bytes.resize(plan.len(), 0);
                plan.write(&mut bytes).map_err(|err| anyhow!("{err}"))?;
                // A full device drops it.
                taken += u64::from(socket.send(&bytes).is_ok());
            }
            count.fetch_add(taken, Ordering::Relaxed);
            done = due;
            std::hint::spin_loop();
        }
        Ok(())
    }
}
