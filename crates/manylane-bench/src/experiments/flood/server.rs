//! The server of a flood, and the flood.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use manylane::{Builder, Counters, Engine, Limit, Placement, WaitPolicy};
use manylane_measure::{Traffic, Until};
use manylane_sys::{cpu, measure};
use manylane_testbed::Host;
use manylane_testbed::generator::LiveSender;

use super::pauses::PauseHistogram;
use crate::sample::CpuBusyTimer;
use crate::schema::{FloodSample, Sample};

/// The settings of a server.
#[derive(Debug, Clone, Copy)]
pub(super) struct ServerConfig {
    pub(super) link: usize,
    pub(super) cpu: usize,
    pub(super) engine: Engine,
    pub(super) limit: Option<Limit>,
    /// Simulated work of a request.
    pub(super) request_cost: Duration,
    pub(super) wait: WaitPolicy,
    /// Maximum number of datagrams of one call.
    pub(super) batch: usize,
}

/// A server with one lane, and its measurements.
pub(super) struct Server {
    pub(super) addr: SocketAddr,
    handle: manylane::Handle,
    thread: thread::JoinHandle<manylane::Result<Counters>>,
    /// Times between two calls of the closure.
    pub(super) pauses: Arc<PauseHistogram>,
    /// The lane's thread, once it has received a datagram.
    pub(super) tid: Arc<AtomicI32>,
}

impl Server {
    pub(super) fn start(host: &Host, wanted: ServerConfig) -> Result<Self> {
        let addr = (host.ip4(wanted.link), 0);
        let socket = host.run(move || {
            let mut builder = Builder::new(addr)?;
            builder
                .engine(wanted.engine)
                .lanes(1)
                .placement(Placement::List(vec![wanted.cpu]))
                .wait(wanted.wait);
            builder.batch(wanted.batch);
            if let Some(limit) = wanted.limit {
                builder.limit(limit);
            }
            builder.open()
        })?;
        if let Some(why) = socket.fallback() {
            return Err(anyhow!("the flooded server cannot use engine {}: {why}", wanted.engine));
        }
        let (addr, handle) = (socket.local_addr(), socket.handle());
        let (pauses, tid) = (Arc::<PauseHistogram>::default(), Arc::new(AtomicI32::new(0)));
        let (tally, own) = (Arc::clone(&pauses), Arc::clone(&tid));
        let serve = move || {
            let mut before = None::<Instant>;
            socket.serve(move |batch, out| {
                match before {
                    Some(before) => tally.record(before.elapsed()),
                    None => own.store(cpu::thread_id(), Ordering::Relaxed),
                }
                for datagram in batch {
                    let start = Instant::now();
                    while start.elapsed() < wanted.request_cost {}
                    out.reply_borrowed(&datagram, datagram.payload());
                }
                before = Some(Instant::now());
            })
        };
        let thread = host.spawn("flood-server", serve)?;
        Ok(Self { addr, handle, thread, pauses, tid })
    }

    /// Its counters so far.
    pub(super) fn snapshot(&self) -> ServerStats {
        let tid = self.tid.load(Ordering::Relaxed);
        let rx_cpu = if tid == 0 { Ok(Duration::ZERO) } else { measure::thread_cpu_time_of(tid) };
        ServerStats {
            rx_cpu: rx_cpu.unwrap_or_default(),
            ..ServerStats::from_counters(&self.handle.counters())
        }
    }

    /// Stops it and returns its final counters.
    pub(super) fn stop(self) -> Result<ServerStats> {
        // The CPU time of a thread that has ended cannot be read.
        let rx_cpu = self.snapshot().rx_cpu;
        self.handle.stop();
        let ended = self.thread.join().map_err(|_| anyhow!("the flooded server panicked"))?;
        Ok(ServerStats { rx_cpu, ..ServerStats::from_counters(&ended?) })
    }
}

/// Counts of a server at one moment.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ServerStats {
    pub(super) delivered: u64,
    limited: u64,
    xsk_dropped: u64,
    kernel_dropped: u64,
    rx_cpu: Duration,
}

impl ServerStats {
    fn from_counters(counters: &Counters) -> Self {
        let total = counters.total();
        Self {
            delivered: total.delivered,
            limited: counters.filter_drops.limited,
            xsk_dropped: total.xsk_dropped,
            kernel_dropped: total.kernel_dropped,
            rx_cpu: Duration::ZERO,
        }
    }

    /// The sample from `before` to this, with the number of sent datagrams.
    pub(super) fn since(&self, before: &Self, round: usize, sent: u64, clock: &CpuBusyTimer) -> FloodSample {
        let (elapsed, busy) = clock.stop();
        let delivered = self.delivered - before.delivered;
        let cpu = [self.rx_cpu.saturating_sub(before.rx_cpu), busy];
        let dropped = self.kernel_dropped - before.kernel_dropped;
        FloodSample {
            sample: Sample::from_totals(round, sent, delivered, elapsed, cpu, dropped),
            limited: self.limited - before.limited,
            xsk_dropped: self.xsk_dropped - before.xsk_dropped,
            clients: None,
            memory: None,
            pauses: Vec::new(),
        }
    }
}

/// A thread on the sender's CPU that runs until it is stopped.
pub(super) struct SenderThread {
    pub(super) tid: Arc<AtomicI32>,
    stop: Arc<AtomicBool>,
    thread: thread::JoinHandle<Result<u64>>,
}

/// Warm-up time of a flood.
const WARM_UP_TIME: Duration = Duration::from_millis(100);

impl SenderThread {
    /// Generates a flood.
    pub(super) fn flood((from, to): (&Host, &Host), cpu: usize, traffic: &Traffic) -> Result<Self> {
        let mut sender = LiveSender::new(from, to, 0, traffic)?;
        let (stop, tid) = (Arc::new(AtomicBool::new(false)), sender.sender_tid());
        let until = Until::Stop(Arc::clone(&stop));
        Self::start("flood", tid, stop, move || Ok(sender.pin(cpu).send(until)?.datagrams))
    }

    /// Spins in place of the flood generator.
    pub(super) fn spin(cpu: usize) -> Result<Self> {
        let (stop, tid) = (Arc::<AtomicBool>::default(), Arc::<AtomicI32>::default());
        let (over, own) = (Arc::clone(&stop), Arc::clone(&tid));
        Self::start("busy-thread", tid, stop, move || {
            cpu::pin(cpu)?;
            own.store(cpu::thread_id(), Ordering::Relaxed);
            while !over.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
            Ok(0)
        })
    }

    fn start(
        name: &str,
        tid: Arc<AtomicI32>,
        stop: Arc<AtomicBool>,
        work: impl FnOnce() -> Result<u64> + Send + 'static,
    ) -> Result<Self> {
        let thread = thread::Builder::new().name(name.into()).spawn(work)?;
        thread::sleep(WARM_UP_TIME);
        Ok(Self { tid, stop, thread })
    }

    /// Stops the thread; returns the number of sent datagrams.
    pub(super) fn stop(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the sender panicked"))?
    }
}
