//! `lane/mmsg`, `lane/uring`, `lane/xdp`: the library, through its public interface only.

use std::hint::black_box;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow};
use manylane::{Batch, Builder, Counters, Engine, Handle, LaneInfo, Outbox, Placement};

use super::options::{ReceiverOptions, Work};
use super::running::{RunningReceiver, Snapshot};
use super::workers::WorkerStats;

/// The lanes and the thread that serves them.
struct Lanes {
    addr: SocketAddr,
    handle: Handle,
    /// Statistics of each lane, including removed ones, because lanes are added and removed while
    /// it runs. Locked when a lane starts and when counters are read, never per batch.
    stats: Arc<Mutex<Vec<Arc<WorkerStats>>>>,
    thread: Option<JoinHandle<manylane::Result<Counters>>>,
}

pub(crate) fn start(options: &ReceiverOptions, engine: Engine) -> Result<Box<dyn RunningReceiver>> {
    let mut builder = Builder::new(options.addr)?;
    builder
        .engine(engine)
        .xdp_ring(options.ring)
        .lanes(options.threads)
        .batch(options.batch)
        .steering(options.steering)
        .wait(options.wait);
    if let Some(delay) = options.rx_coalesce {
        builder.rx_coalesce(delay);
    }
    if options.recv_buffer > 0 {
        builder.recv_buffer(options.recv_buffer);
    }
    builder.placement(if options.cpus.is_empty() {
        Placement::None
    } else {
        Placement::List(options.cpus.clone())
    });
    let socket = builder.open()?;
    if let Some(why) = socket.fallback() {
        return Err(anyhow!("engine {engine}: {why}"));
    }
    if let Some(why) = socket.waiting().reason {
        return Err(anyhow!("wait {}: {why}", options.wait));
    }
    let (addr, handle) = (socket.local_addr(), socket.handle());
    let workers: Arc<Mutex<Vec<Arc<WorkerStats>>>> = Arc::default();
    let known = workers.clone();
    let (work, app_work) = (options.work, options.synthetic_work);
    let serve = move || match work {
        // Without simulated work, the check is not in the loop.
        Work::Count if app_work.is_zero() => socket.serve_with(move |_lane: LaneInfo| {
            let stats = StatsGuard::new(&known);
            move |batch: Batch<'_>, _out: &mut Outbox<'_>| {
                stats.register_once();
                for datagram in batch {
                    black_box(datagram.payload().first().copied());
                }
            }
        }),
        Work::Count => socket.serve_with(move |_lane: LaneInfo| {
            let stats = StatsGuard::new(&known);
            move |batch: Batch<'_>, _out: &mut Outbox<'_>| {
                stats.register_once();
                for datagram in batch {
                    black_box(datagram.payload().first().copied());
                    app_work.run();
                }
            }
        }),
        Work::Echo => socket.serve_with(move |_lane: LaneInfo| {
            let stats = StatsGuard::new(&known);
            move |batch: Batch<'_>, out: &mut Outbox<'_>| {
                stats.register_once();
                for datagram in batch {
                    black_box(datagram.payload().first().copied());
                    app_work.run();
                    out.reply_borrowed(&datagram, datagram.payload());
                }
            }
        }),
    };
    let thread =
        std::thread::Builder::new().name("serve".into()).spawn(serve).context("cannot start a thread")?;
    Ok(Box::new(Lanes { addr, handle, stats: workers, thread: Some(thread) }))
}

/// The statistics of one lane's thread. They register the thread at its first batch, and unregister
/// it when the closure is dropped.
struct StatsGuard {
    stats: Arc<WorkerStats>,
    registered: AtomicBool,
}

impl StatsGuard {
    fn new(workers: &Mutex<Vec<Arc<WorkerStats>>>) -> Self {
        let stats = Arc::new(WorkerStats::default());
        workers.lock().unwrap_or_else(PoisonError::into_inner).push(stats.clone());
        Self { stats, registered: AtomicBool::new(false) }
    }

    fn register_once(&self) {
        if !self.registered.load(Ordering::Relaxed) {
            self.registered.store(true, Ordering::Relaxed);
            self.stats.register_thread();
        }
    }
}

impl Drop for StatsGuard {
    fn drop(&mut self) {
        if *self.registered.get_mut() {
            self.stats.unregister_thread();
        }
    }
}

impl Lanes {
    fn shutdown(&mut self) -> Result<()> {
        self.handle.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().map_err(|_| anyhow!("the thread that serves lanes panicked"))??;
        }
        Ok(())
    }
}

impl RunningReceiver for Lanes {
    fn addr(&self) -> SocketAddr {
        self.addr
    }

    fn snapshot(&self) -> Snapshot {
        let total = self.handle.counters().total();
        let workers = self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        Snapshot {
            delivered: total.delivered,
            kernel_dropped: total.kernel_dropped + total.xsk_dropped,
            rx_cpu: workers.iter().map(|stats| stats.cpu_time()).sum(),
        }
    }

    fn lanes(&self) -> Option<Handle> {
        Some(self.handle.clone())
    }

    fn stop(mut self: Box<Self>) -> Result<Snapshot> {
        self.shutdown()?;
        Ok(self.snapshot())
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        // `stop` reports a failed lane.
        let _ = self.shutdown();
    }
}
