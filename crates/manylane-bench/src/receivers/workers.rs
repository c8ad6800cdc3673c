//! Receiving threads, and their state that other threads may read.

use std::any::Any;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use manylane_sys::sock::{self, Buffer, Flag};
use manylane_sys::{cpu, measure, xsk};

use super::options::{ReceiverOptions, Work};
use super::running::{RunningReceiver, Snapshot};

/// State that one thread publishes, on two cache lines of its own, because CPUs fetch lines
/// in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct WorkerStats {
    delivered: AtomicU64,
    /// The thread's id, 0 before it runs and after it ended.
    tid: AtomicI32,
    /// CPU time of the thread when it ended.
    final_cpu_ns: AtomicU64,
}

impl WorkerStats {
    /// Publishes the number of datagrams that this thread has received. There is one writer, so
    /// that a plain store without a locked instruction is enough.
    #[inline]
    pub(crate) fn set_delivered(&self, delivered: u64) {
        self.delivered.store(delivered, Ordering::Relaxed);
    }

    /// Makes the calling thread the one that records here. Its CPU time counts from now on.
    pub(crate) fn register_thread(&self) {
        self.tid.store(cpu::thread_id(), Ordering::Relaxed);
    }

    /// The calling thread ends.
    pub(crate) fn unregister_thread(&self) {
        let used = u64::try_from(cpu::thread_cpu_time().as_nanos()).unwrap_or(u64::MAX);
        self.final_cpu_ns.store(used, Ordering::Relaxed);
        self.tid.store(0, Ordering::Release);
    }

    pub(crate) fn delivered(&self) -> u64 {
        self.delivered.load(Ordering::Relaxed)
    }

    pub(crate) fn cpu_time(&self) -> Duration {
        let tid = self.tid.load(Ordering::Acquire);
        let running = if tid == 0 { None } else { measure::thread_cpu_time_of(tid).ok() };
        running.unwrap_or_else(|| Duration::from_nanos(self.final_cpu_ns.load(Ordering::Relaxed)))
    }
}

/// The source of datagrams: its counters, and how it is shut down.
pub(crate) enum Source {
    /// A kernel socket, of one thread or shared by all.
    Socket(Arc<UdpSocket>),
    /// A descriptor of an AF_XDP socket.
    Queue(OwnedFd),
}

impl Source {
    fn dropped(&self) -> u64 {
        match self {
            Self::Socket(socket) => {
                sock::queue_state(socket.as_fd()).map_or(0, |state| u64::from(state.drops))
            }
            Self::Queue(fd) => xsk::statistics(fd.as_fd()).map_or(0, |seen| seen.dropped()),
        }
    }

    /// Wakes threads that wait on it. A wait on a queue is always short.
    fn wake(&self) {
        if let Self::Socket(socket) = self {
            sock::wake(socket.as_fd());
        }
    }
}

/// Threads that run the same loop, each with its own share.
pub(crate) struct Workers {
    addr: SocketAddr,
    sources: Vec<Source>,
    stats: Arc<[WorkerStats]>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<()>>>,
    /// Kept alive as long as the threads run.
    _keep_alive: Box<dyn Any + Send>,
}

/// The context of one thread.
pub(crate) struct WorkerCtx<'a> {
    pub(crate) stats: &'a WorkerStats,
    stop: &'a AtomicBool,
}

impl WorkerCtx<'_> {
    /// True if the thread has to stop. Checked when a receive returned nothing, so that it costs
    /// nothing under load, or per batch.
    pub(crate) fn should_stop(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

impl Workers {
    /// Starts a thread that runs `work` for each of `shares`.
    pub(crate) fn start<S, F>(
        options: &ReceiverOptions,
        (addr, sources): (SocketAddr, Vec<Source>),
        shares: Vec<S>,
        held: Box<dyn Any + Send>,
        work: F,
    ) -> Result<Box<dyn RunningReceiver>>
    where
        S: Send + 'static,
        F: Fn(&WorkerCtx<'_>, S) -> Result<()> + Clone + Send + 'static,
    {
        let all_stats = shares.iter().map(|_| WorkerStats::default()).collect();
        let mut workers = Self {
            addr,
            sources,
            stats: all_stats,
            stop: Arc::default(),
            threads: Vec::new(),
            _keep_alive: held,
        };
        for (index, share) in shares.into_iter().enumerate() {
            let (all_stats, stop, work) = (workers.stats.clone(), workers.stop.clone(), work.clone());
            let cpu = options.cpus.get(index % options.cpus.len().max(1)).copied();
            let body = move || {
                if let Some(cpu) = cpu {
                    cpu::pin(cpu).with_context(|| format!("cannot pin a receiver to CPU {cpu}"))?;
                }
                let stats = &all_stats[index];
                stats.register_thread();
                let done = work(&WorkerCtx { stats, stop: &stop }, share);
                stats.unregister_thread();
                done
            };
            let thread =
                thread::Builder::new().name(format!("receiver-{index}")).spawn(body).with_context(|| {
                    format!("cannot start receiver {index}: raise the limit of threads (ulimit -u)")
                })?;
            workers.threads.push(thread);
        }
        Ok(Box::new(workers))
    }

    /// Starts threads on kernel sockets: thread k on socket k, or all on the only one.
    pub(crate) fn start_on_sockets<F>(
        options: &ReceiverOptions,
        sockets: Vec<UdpSocket>,
        work: F,
    ) -> Result<Box<dyn RunningReceiver>>
    where
        F: Fn(&WorkerCtx<'_>, &UdpSocket) -> Result<()> + Clone + Send + 'static,
    {
        let addr = sockets.first().context("a receiver needs a socket")?.local_addr()?;
        let sockets: Vec<Arc<UdpSocket>> = sockets.into_iter().map(Arc::new).collect();
        let shares = sockets.iter().cloned().cycle().take(options.threads).collect();
        let sources = sockets.into_iter().map(Source::Socket).collect();
        Self::start(options, (addr, sources), shares, Box::new(()), move |worker, socket: Arc<UdpSocket>| {
            work(worker, &socket)
        })
    }

    fn shutdown(&mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.sources.iter().for_each(Source::wake);
        self.threads
            .drain(..)
            .try_for_each(|thread| thread.join().map_err(|_| anyhow!("a receiver's thread panicked"))?)
    }
}

impl RunningReceiver for Workers {
    fn addr(&self) -> SocketAddr {
        self.addr
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot {
            delivered: self.stats.iter().map(WorkerStats::delivered).sum(),
            kernel_dropped: self.sources.iter().map(Source::dropped).sum(),
            rx_cpu: self.stats.iter().map(WorkerStats::cpu_time).sum(),
        }
    }

    fn stop(mut self: Box<Self>) -> Result<Snapshot> {
        self.shutdown()?;
        Ok(self.snapshot())
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        // `stop` reports a failed thread.
        let _ = self.shutdown();
    }
}

/// True if the receive has to return the destination address, so that the reply has it as source.
pub(crate) fn needs_local_address(options: &ReceiverOptions) -> bool {
    options.work == Work::Echo && options.addr.ip().is_unspecified()
}

/// The flags of a socket whose receives return it.
pub(crate) fn pktinfo_flags(options: &ReceiverOptions) -> &'static [Flag] {
    match needs_local_address(options) {
        false => &[],
        true if options.addr.is_ipv4() => &[Flag::PktInfoV4],
        true => &[Flag::PktInfoV6],
    }
}

/// Binds `count` sockets to one address, several as one reuseport group.
pub(crate) fn bind(options: &ReceiverOptions, count: usize, flags: &[Flag]) -> Result<Vec<UdpSocket>> {
    let mut addr = options.addr;
    let mut sockets = Vec::with_capacity(count);
    for _ in 0..count {
        let fd = sock::open(&addr).context("cannot open a socket")?;
        if count > 1 {
            sock::set_flag(fd.as_fd(), Flag::ReusePort, true).context("SO_REUSEPORT")?;
        }
        for &flag in flags {
            let why = || format!("cannot set {flag:?}: see KERNELS.md for the kernel that it needs");
            sock::set_flag(fd.as_fd(), flag, true).with_context(why)?;
        }
        if options.recv_buffer > 0 {
            sock::set_buffer(fd.as_fd(), Buffer::Receive, options.recv_buffer).context("SO_RCVBUF")?;
        }
        bind_with_retry(&fd, &addr).with_context(|| format!("cannot bind {addr}"))?;
        addr = sock::local_addr(fd.as_fd())?;
        sockets.push(UdpSocket::from(fd));
    }
    Ok(sockets)
}

/// Binds, and retries for a moment if the address is in use: a child process that is being started
/// has copies of closed sockets of an earlier receiver until it calls exec.
fn bind_with_retry(fd: &OwnedFd, addr: &SocketAddr) -> io::Result<()> {
    const BIND_TIMEOUT: Duration = Duration::from_secs(1);
    let start = Instant::now();
    loop {
        match sock::bind(fd.as_fd(), addr) {
            Err(err) if err.kind() == io::ErrorKind::AddrInUse && start.elapsed() < BIND_TIMEOUT => {
                thread::sleep(Duration::from_millis(5));
            }
            done => return done,
        }
    }
}
