//! `bench batch`: cost of receiving a queued datagram, by its size and by the messages of a call.
//! The queue is filled, then drained by one thread, and the CPU time of draining is divided by the
//! number of datagrams. It includes no wake-up, no delay and no idle time, only the cost of calls
//! and of datagrams.
//!
//! Each stage of a sample:
//!
//! 1. The receiver is created, with its buffers and registrations, and receives some datagrams, so
//!    that all pages are mapped.
//! 2. Repeated: a queue is filled, from another CPU if there is one; the CPU clock is read; calls
//!    drain the queue; the clock is read again. Datagrams that do not arrive are counted as lost.

use std::any::Any;
use std::fmt;
use std::hint::black_box;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use manylane::{Builder, Engine, Lane, Placement};
use manylane_measure::Until;
use manylane_measure::named_enum;
use manylane_sys::cpu;
use manylane_sys::kernel_module::{self, Policy};
use manylane_sys::mmsg::{RecvOptions, RecvRing, RememberedRing, Wait};
use manylane_sys::sock::{self, Buffer};
use manylane_sys::uring::{BareMultishot, BareOneshot, BareOptions};
use manylane_sys::xsk::RawXsk;

use crate::receivers::BUF_SIZE_MIN;
use crate::receivers::xsk::{self, Checked, FrameParser, OpenQueues, Unchecked};
use crate::schema::{BENCH_BATCH, BatchRow, BatchSample, BenchSettings, Document};
use crate::{Controller, Limits, Load, Options, Setup, oversubscribed_note, run_pinned, run_rounds};

/// Number of datagrams in a filled queue: at least the maximum of one call.
const FILL_DATAGRAMS: u64 = 2048;
/// Number of empty calls in a row after which the missing datagrams count as lost.
const EMPTY_CALLS_MAX: u32 = 1000;

named_enum! {
    /// Methods of receiving.
    pub enum RecvMethod {
        /// `recvmmsg` on headers that are built once.
        Recvmmsg = "socket/recvmmsg",
        /// Headers that the kernel module remembers.
        Module = "module/remembered",
        /// Single receives by io_uring, submitted again for each message.
        UringSingle = "uring/single",
        /// A multishot receive by io_uring.
        UringPlain = "uring/plain",
        /// A lane of engine `mmsg`.
        LaneMmsg = "lane/mmsg",
        /// A lane of engine `uring`.
        LaneUring = "lane/uring",
        /// The loop of `xsk/raw`. Testbed only, and datagrams that fit a frame.
        XskRaw = "xsk/raw",
        /// The same with the checks of `xsk/checked`.
        XskChecked = "xsk/checked",
        /// A lane of engine `xdp`. Testbed only, and datagrams that fit a frame.
        LaneXdp = "lane/xdp",
    }
}

impl RecvMethod {
    /// True if it receives frames from a device.
    pub const fn needs_device(self) -> bool {
        matches!(self, Self::XskRaw | Self::XskChecked | Self::LaneXdp)
    }

    /// True if it needs io_uring.
    pub const fn needs_uring(self) -> bool {
        matches!(self, Self::UringSingle | Self::UringPlain | Self::LaneUring)
    }

    /// True if it needs the kernel module (`kernel/`).
    pub const fn needs_module(self) -> bool {
        matches!(self, Self::Module)
    }
}

/// Options in addition to the sizes.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The receivers.
    pub methods: Vec<RecvMethod>,
    /// Maximum number of messages of a call.
    pub messages: Vec<usize>,
    /// Number of queues that one sample drains.
    pub fills: usize,
}

/// A method, for datagrams of one size and a number of messages per call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Config<M> {
    pub(super) method: M,
    pub(super) size: usize,
    pub(super) messages: usize,
}

impl<M: fmt::Display> fmt::Display for Config<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} bytes, {} per call", self.method, self.size, self.messages)
    }
}

/// The rows of all methods, sizes and numbers of messages per call.
pub(super) fn compare<M: Copy + fmt::Display>(
    options: &Options,
    methods: &[M],
    messages: &[usize],
    controller: &mut dyn Controller,
    mut sample: impl FnMut(Config<M>, usize) -> Result<BatchSample>,
) -> Result<Vec<BatchRow>> {
    let mut configs = Vec::new();
    for &size in &options.sizes {
        for &messages in messages {
            configs.extend(methods.iter().map(|&method| Config { method, size, messages }));
        }
    }
    let samples =
        run_rounds(options.rounds, &configs, controller, |config, round, _| sample(*config, round))?;
    controller.progress(1.0, "done");
    let row = |(Config { method, size, messages }, samples): (Config<M>, _)| {
        BatchRow::from_samples(&method.to_string(), size, messages, samples)
    };
    Ok(configs.into_iter().zip(samples).map(row).collect())
}

/// Runs the benchmark. It uses the sizes, rounds, flows and receive buffer of `options`.
pub fn run(
    setup: &mut Setup,
    options: &Options,
    plan: &Plan,
    controller: &mut dyn Controller,
) -> Result<Document<BenchSettings, BatchRow>> {
    let mut settings = options.settings(setup, &Limits::default());
    settings.notes.extend(oversubscribed_note(setup));
    settings.notes.push(format!("each sample drains {} queues of {FILL_DATAGRAMS} datagrams", plan.fills));
    settings.receivers = plan.methods.iter().map(ToString::to_string).collect();
    let rows = compare(options, &plan.methods, &plan.messages, controller, |config, round| {
        let receiver = setup.run_at_receiver(|| BatchReceiver::new(setup, options, config))?;
        let cpu = setup.receiver_cpus().first().copied();
        run_pinned(cpu, || measure(setup, receiver, (plan.fills, options.flows), config, round))
    })?;
    Ok(Document::new(BENCH_BATCH, settings, rows))
}

fn measure(
    setup: &mut Setup,
    mut receiver: BatchReceiver,
    (fills, flows): (usize, u16),
    config: Config<RecvMethod>,
    round: usize,
) -> Result<BatchSample> {
    // Several flows, in turn, because the kernel would join one flow to GRO messages on a device.
    let load = Load { pps: None, duration: Duration::ZERO, size: config.size, flows, gso: false };
    let mut sum = BatchSample { round, ..BatchSample::default() };
    // A multishot receive is armed by the first call.
    receiver.recv()?;
    let mut time = Duration::ZERO;
    for fill in 0..=fills {
        let sent = setup.send_until(receiver.addr, &load, Until::Count(FILL_DATAGRAMS))?.datagrams;
        let before = cpu::thread_cpu_time();
        let (got, calls) = drain(&mut receiver, sent)?;
        let spent = cpu::thread_cpu_time().saturating_sub(before);
        // The first one warms up.
        if fill > 0 {
            time += spent;
            sum.sent += sent;
            sum.delivered += got;
            sum.calls += calls;
        }
    }
    ensure!(sum.delivered > 0, "nothing arrived");
    sum.rx_cpu_ns = time.as_nanos() as f64 / sum.delivered as f64;
    Ok(sum)
}

/// Receives `sent` datagrams, or as many as arrive, and returns the number of calls.
fn drain(receiver: &mut BatchReceiver, sent: u64) -> Result<(u64, u64)> {
    let (mut got, mut calls, mut in_vain) = (0, 0, 0);
    while got < sent && in_vain < EMPTY_CALLS_MAX {
        let some = receiver.recv()?;
        got += some as u64;
        calls += 1;
        in_vain = if some == 0 { in_vain + 1 } else { 0 };
    }
    Ok((got, calls))
}

/// One receiver.
struct BatchReceiver {
    addr: SocketAddr,
    backend: Backend,
}

enum Backend {
    Recvmmsg(UdpSocket, RecvRing),
    Module(RememberedRing),
    UringSingle(UdpSocket, Box<Option<BareOneshot>>, BareOptions),
    UringPlain(UdpSocket, Box<Option<BareMultishot>>, BareOptions),
    Lane(Box<Lane>),
    Xsk(XskPoller),
}

/// The bare loop over the queues of a device, in turn.
struct XskPoller {
    poll: fn(&mut RawXsk, u32) -> u32,
    queues: Vec<RawXsk>,
    /// Maximum number of frames of one poll.
    batch: u32,
    /// The queue to poll next.
    next: usize,
    /// The program that redirects frames into the queues.
    _programs: Box<dyn Any + Send>,
}

impl XskPoller {
    fn new<R: FrameParser>(setup: &Setup, batch: usize) -> Result<Self> {
        let addr = setup.bind_addr();
        let OpenQueues { queues, programs } =
            xsk::open_queues(R::NAME, &setup.device_names(), addr.port(), crate::RING_SIZE, false)?;
        let queues = queues.into_iter().map(|(_, _, queue)| queue).collect();
        let poll_ring = |queue: &mut RawXsk, batch| xsk::poll_queue::<R>(queue, batch, || ()).datagrams;
        Ok(Self { poll: poll_ring, queues, batch: batch as u32, next: 0, _programs: programs })
    }

    /// A batch of the first queue that has frames.
    fn recv(&mut self) -> usize {
        for _ in 0..self.queues.len() {
            let Some(queue) = self.queues.get_mut(self.next) else { break };
            let taken = (self.poll)(queue, self.batch);
            // It stays with a queue that has frames, because only that one has traffic.
            if taken > 0 {
                return taken as usize;
            }
            self.next = (self.next + 1) % self.queues.len();
        }
        0
    }
}

impl BatchReceiver {
    fn new(setup: &Setup, options: &Options, config: Config<RecvMethod>) -> Result<Self> {
        let Config { method: by, size, messages } = config;
        let addr = setup.bind_addr();
        let engine = match by {
            RecvMethod::LaneMmsg => Engine::Mmsg,
            RecvMethod::LaneUring => Engine::Uring,
            RecvMethod::LaneXdp => Engine::Xdp,
            RecvMethod::XskRaw => {
                return Ok(Self {
                    addr,
                    backend: Backend::Xsk(XskPoller::new::<Unchecked>(setup, messages)?),
                });
            }
            RecvMethod::XskChecked => {
                return Ok(Self { addr, backend: Backend::Xsk(XskPoller::new::<Checked>(setup, messages)?) });
            }
            RecvMethod::Recvmmsg | RecvMethod::Module | RecvMethod::UringSingle | RecvMethod::UringPlain => {
                let socket = UdpSocket::bind(addr).with_context(|| format!("cannot bind {addr}"))?;
                sock::set_buffer(socket.as_fd(), Buffer::Receive, options.recv_buffer)
                    .context("SO_RCVBUF")?;
                let addr = socket.local_addr()?;
                let bare = BareOptions { batch: messages, buffer: size.max(BUF_SIZE_MIN), control: false };
                let ring = RecvOptions { batch: messages, buffer: size.max(BUF_SIZE_MIN), control: false };
                let way = match by {
                    RecvMethod::Module => {
                        kernel_module::attach(socket.as_fd(), Policy::RoundRobin)
                            .context("the kernel module is not available: insmod kernel/manylane.ko")?;
                        Backend::Module(RememberedRing::new(socket, ring).context("cannot register headers")?)
                    }
                    RecvMethod::UringSingle => Backend::UringSingle(socket, Box::new(None), bare),
                    RecvMethod::UringPlain => Backend::UringPlain(socket, Box::new(None), bare),
                    _ => Backend::Recvmmsg(socket, RecvRing::new(ring).context("cannot allocate buffers")?),
                };
                return Ok(Self { addr, backend: way });
            }
        };
        let mut builder = Builder::new(addr)?;
        builder.engine(engine).lanes(1).batch(messages).placement(Placement::None);
        builder.xdp_ring(crate::RING_SIZE).recv_buffer(options.recv_buffer);
        let socket = builder.open()?;
        ensure!(socket.fallback().is_none(), "engine {engine}: {}", socket.fallback().unwrap_or_default());
        let addr = socket.local_addr();
        let lane = socket.into_lanes().pop().context("a socket has a lane")?;
        Ok(Self { addr, backend: Backend::Lane(Box::new(lane)) })
    }

    /// Receives with one call, reads the datagrams, and returns their number.
    #[inline]
    fn recv(&mut self) -> Result<usize> {
        Ok(match &mut self.backend {
            Backend::Recvmmsg(socket, ring) => {
                let count = ring.recv(socket.as_fd(), Wait::Never)?;
                (0..count).for_each(|index| _ = black_box(ring.message(index).data.first().copied()));
                count
            }
            Backend::Module(ring) => {
                let count = ring.recv(Wait::Never)?;
                (0..count).for_each(|index| _ = black_box(ring.data(index).first().copied()));
                count
            }
            Backend::UringSingle(socket, shots, options) => {
                let shots = get_or_init(shots, || BareOneshot::new(socket.as_fd(), *options))?;
                let count = shots.recv()?;
                (0..count).for_each(|index| _ = black_box(shots.message(index).data.first().copied()));
                count
            }
            Backend::UringPlain(socket, ring, options) => {
                let ring = get_or_init(ring, || BareMultishot::new(socket.as_fd(), *options))?;
                let count = ring.recv(None)?;
                (0..count).for_each(|index| _ = black_box(ring.message(index).data.first().copied()));
                count
            }
            Backend::Xsk(bare) => bare.recv(),
            Backend::Lane(lane) => {
                let batch = lane.recv()?.batch;
                let count = batch.len();
                batch.for_each(|datagram| _ = black_box(datagram.payload().first().copied()));
                count
            }
        })
    }
}

/// State of the receiving thread is created there.
fn get_or_init<T>(place: &mut Option<T>, make: impl FnOnce() -> std::io::Result<T>) -> Result<&mut T> {
    if place.is_none() {
        *place =
            Some(make().context("io_uring is not available (Linux 6.0, sysctl kernel.io_uring_disabled)")?);
    }
    place.as_mut().context("it was just made")
}
