//! Threads that receive, and what others may see of them.

use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use manylane_sys::sock::{self, Buffer, Flag};
use manylane_sys::{cpu, measure};

use crate::receiver::{ReceiverOptions, Running, Snapshot};

/// What one thread shows to others, on cache lines of its own: two, for processors fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Seat {
    delivered: AtomicU64,
    /// The thread's id, 0 before it runs and after it ended.
    tid: AtomicI32,
    /// CPU time when it ended.
    final_cpu_ns: AtomicU64,
}

impl Seat {
    /// Says how many datagrams this thread has taken. One writer: a plain store, no locked instruction.
    #[inline]
    pub(crate) fn show(&self, delivered: u64) {
        self.delivered.store(delivered, Ordering::Relaxed);
    }

    /// The calling thread takes the seat: its CPU time counts from now on.
    pub(crate) fn take(&self) {
        self.tid.store(cpu::thread_id(), Ordering::Relaxed);
    }

    /// The calling thread ends.
    pub(crate) fn leave(&self) {
        let used = u64::try_from(cpu::thread_time().as_nanos()).unwrap_or(u64::MAX);
        self.final_cpu_ns.store(used, Ordering::Relaxed);
        self.tid.store(0, Ordering::Release);
    }

    pub(crate) fn delivered(&self) -> u64 {
        self.delivered.load(Ordering::Relaxed)
    }

    pub(crate) fn cpu(&self) -> Duration {
        let tid = self.tid.load(Ordering::Acquire);
        let running = if tid == 0 { None } else { measure::thread_time_of(tid).ok() };
        running.unwrap_or_else(|| Duration::from_nanos(self.final_cpu_ns.load(Ordering::Relaxed)))
    }
}

/// Threads that run the same loop, each on its socket or all on one.
pub(crate) struct Crew {
    addr: SocketAddr,
    /// One for each thread, or one for all.
    sockets: Vec<Arc<UdpSocket>>,
    seats: Arc<[Seat]>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<()>>>,
}

/// What a thread of the crew works with.
pub(crate) struct Post<'a> {
    pub(crate) socket: &'a UdpSocket,
    pub(crate) seat: &'a Seat,
    stop: &'a AtomicBool,
}

impl Post<'_> {
    /// Whether to stop. Only asked when a receive came back empty, so it costs nothing under load.
    pub(crate) fn is_over(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

impl Crew {
    /// Starts the threads; thread k receives on socket k, or all on the only one.
    pub(crate) fn start<F>(
        options: &ReceiverOptions,
        sockets: Vec<UdpSocket>,
        work: F,
    ) -> Result<Box<dyn Running>>
    where
        F: Fn(&Post<'_>) -> Result<()> + Clone + Send + 'static,
    {
        let addr = sockets.first().context("a receiver needs a socket")?.local_addr()?;
        let sockets: Vec<Arc<UdpSocket>> = sockets.into_iter().map(Arc::new).collect();
        let mut crew = Self {
            addr,
            seats: (0..options.threads).map(|_| Seat::default()).collect(),
            stop: Arc::default(),
            threads: Vec::new(),
            sockets,
        };
        for index in 0..options.threads {
            let socket = crew.sockets[index % crew.sockets.len()].clone();
            let (seats, stop, work) = (crew.seats.clone(), crew.stop.clone(), work.clone());
            let cpu = options.cpus.get(index % options.cpus.len().max(1)).copied();
            let body = move || {
                if let Some(cpu) = cpu {
                    cpu::pin(cpu).with_context(|| format!("cannot pin a receiver to CPU {cpu}"))?;
                }
                let seat = &seats[index];
                seat.take();
                let done = work(&Post { socket: &socket, seat, stop: &stop });
                seat.leave();
                done
            };
            let thread = thread::Builder::new()
                .name(format!("receiver-{index}"))
                .spawn(body)
                .with_context(|| format!("cannot start receiver {index}: see `ulimit -u`"))?;
            crew.threads.push(thread);
        }
        Ok(Box::new(crew))
    }

    fn end(&mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        for socket in &self.sockets {
            sock::wake(socket.as_fd());
        }
        self.threads
            .drain(..)
            .try_for_each(|thread| thread.join().map_err(|_| anyhow!("a receiver's thread panicked"))?)
    }
}

impl Running for Crew {
    fn addr(&self) -> SocketAddr {
        self.addr
    }

    fn snapshot(&self) -> Snapshot {
        let drops =
            |socket: &Arc<UdpSocket>| sock::queue_state(socket.as_fd()).map_or(0, |state| state.drops);
        Snapshot {
            delivered: self.seats.iter().map(Seat::delivered).sum(),
            kernel_dropped: self.sockets.iter().map(|socket| u64::from(drops(socket))).sum(),
            rx_cpu: self.seats.iter().map(Seat::cpu).sum(),
        }
    }

    fn stop(mut self: Box<Self>) -> Result<Snapshot> {
        self.end()?;
        Ok(self.snapshot())
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        // Whoever cares about a failed thread calls `stop`.
        let _ = self.end();
    }
}

/// Binds `count` sockets to one address: as one reuseport group when there are several.
pub(crate) fn bind(options: &ReceiverOptions, count: usize, gro: bool) -> Result<Vec<UdpSocket>> {
    let mut addr = options.addr;
    let mut sockets = Vec::with_capacity(count);
    for _ in 0..count {
        let fd = sock::open(&addr).context("cannot open a socket")?;
        if count > 1 {
            sock::set_flag(fd.as_fd(), Flag::ReusePort, true).context("SO_REUSEPORT")?;
        }
        if gro {
            sock::set_flag(fd.as_fd(), Flag::Gro, true).context("UDP_GRO needs Linux 5.0")?;
        }
        if options.recv_buffer > 0 {
            sock::set_buffer(fd.as_fd(), Buffer::Receive, options.recv_buffer).context("SO_RCVBUF")?;
        }
        sock::bind(fd.as_fd(), &addr).with_context(|| format!("cannot bind {addr}"))?;
        addr = sock::local_addr(fd.as_fd())?;
        sockets.push(UdpSocket::from(fd));
    }
    Ok(sockets)
}
