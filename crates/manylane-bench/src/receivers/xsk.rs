//! `xsk/raw` and `xsk/checked`: a minimal loop over raw AF_XDP rings, with a minimal XDP program.
//!
//! Replies are sent in the frame of their request: both addresses and both ports are swapped,
//! which does not change the checksums. The two differ in how they read a frame ([`frame`]).

mod frame;

use std::any::Any;
use std::hint::black_box;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use aya::maps::XskMap;
use aya::programs::{Xdp, XdpMode};
use aya::{Ebpf, EbpfLoader};
use manylane_sys::epoll::Epoll;
use manylane_sys::xsk::RawXsk;
use manylane_sys::{device, netns, tick};

pub(crate) use self::frame::{Checked, FrameParser, Unchecked};
use super::options::{ReceiverOptions, Work};
use super::running::RunningReceiver;
use super::workers::{Source, WorkerCtx, Workers};
use crate::work::SyntheticWork;

/// The longest sleep of an idle receiver, and so the latency of a stop.
const IDLE_POLL_TIMEOUT: Duration = Duration::from_millis(20);
/// The same, while the TX ring had no room for all replies.
const TX_POLL_TIMEOUT: Duration = Duration::from_millis(1);

/// Maximum time for the kernel to release a queue that was closed: an RCU grace period, which is
/// long on a busy machine.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(30);

/// Result of polling a queue.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PollResult {
    /// Frames.
    pub(crate) frames: u32,
    /// Datagrams.
    pub(crate) datagrams: u32,
}

/// The open queues of the devices, with the program that redirects frames into them as long as
/// this lives.
pub(crate) struct OpenQueues {
    /// Each with the index of its device and its own.
    pub(crate) queues: Vec<(usize, u32, RawXsk)>,
    pub(crate) programs: Box<dyn Any + Send>,
}

/// Opens all queues of the devices, and redirects UDP to `port` into them.
pub(crate) fn open_queues(
    name: &str,
    devices: &[String],
    port: u16,
    ring: u32,
    replies: bool,
) -> Result<OpenQueues> {
    ensure!(!devices.is_empty(), "{name} needs a device, and does not run over loopback");
    let (mut programs, mut queues) = (Vec::new(), Vec::new());
    for (number, name) in devices.iter().enumerate() {
        let index = netns::device_index(name)?;
        let mut program = load_redirect(index, port)?;
        let mut map: XskMap<_> = program.take_map("ml_raw").context("no map ml_raw")?.try_into()?;
        for queue in 0..device::queues(name)?.receive {
            let socket = open_released(|| RawXsk::open(index, queue, ring, replies))
                .with_context(|| format!("{name} queue {queue}"))?;
            map.set(queue, socket.as_fd().as_raw_fd(), 0)?;
            queues.push((number, queue, socket));
        }
        programs.push((program, map));
    }
    Ok(OpenQueues { queues, programs: Box::new(programs) })
}

/// Opens a socket on a queue that the receiver before this one may have had: the kernel releases it
/// some time after it was closed.
fn open_released(mut open: impl FnMut() -> io::Result<RawXsk>) -> io::Result<RawXsk> {
    let start = Instant::now();
    loop {
        match open() {
            Err(err) if err.kind() == ErrorKind::ResourceBusy && start.elapsed() < RELEASE_TIMEOUT => {
                thread::sleep(Duration::from_millis(5));
            }
            opened => return opened,
        }
    }
}

pub(crate) fn start<R: FrameParser>(options: &ReceiverOptions) -> Result<Box<dyn RunningReceiver>> {
    let replies = options.work == Work::Echo;
    let OpenQueues { queues, programs } =
        open_queues(R::NAME, &options.devices, options.addr.port(), options.ring, replies)?;
    let mut shares: Vec<Vec<RawXsk>> = (0..options.threads).map(|_| Vec::new()).collect();
    let mut sources = Vec::new();
    for (number, queue, socket) in queues {
        sources.push(Source::Queue(socket.as_fd().try_clone_to_owned()?));
        // Equal queues of two devices are often busy at the same time, so that they go to two
        // threads.
        shares[(number + queue as usize) % options.threads].push(socket);
    }
    let (batch, delay, app_work) = (options.batch as u32, options.fixed_delay(), options.synthetic_work);
    // Without simulated work, the check is not in the loop.
    let is_idle = app_work.is_zero();
    Workers::start(options, (options.addr, sources), shares, programs, move |worker, share| {
        match (replies, is_idle) {
            (false, true) => {
                recv_loop(worker, share, (batch, delay), |socket| Ok(poll_queue::<R>(socket, batch, || ())))
            }
            (false, false) => recv_loop(worker, share, (batch, delay), |socket| {
                Ok(poll_queue::<R>(socket, batch, || app_work.run()))
            }),
            (true, _) => recv_loop(worker, share, (batch, delay), |socket| {
                poll_and_reply::<R>(socket, batch, app_work)
            }),
        }
    })
}

/// Attaches the program that redirects UDP to `port` into the rings, to the device `index` of the
/// calling thread's namespace, as long as the value lives.
pub(crate) fn load_redirect(index: u32, port: u16) -> Result<Ebpf> {
    let mut ebpf =
        EbpfLoader::new().btf(None).override_global("ml_port", &port, true).load(manylane_bpf::REDIRECT)?;
    let program: &mut Xdp = ebpf.program_mut("ml_redirect").context("no program ml_redirect")?.try_into()?;
    program.load().context("loading the XDP program of xsk/raw")?;
    program.attach_to_if_index(index, XdpMode::Driver).context("attaching the XDP program of xsk/raw")?;
    Ok(ebpf)
}

/// Receives a batch of one queue, reads it, and does `work` for each datagram.
#[inline]
pub(crate) fn poll_queue<R: FrameParser>(socket: &mut RawXsk, batch: u32, work: impl Fn()) -> PollResult {
    let mut refused = 0;
    let frames = socket.receive(batch, |packet| {
        let payload = R::payload(packet);
        if R::REJECTS_INVALID && payload.is_none() {
            refused += 1;
            return;
        }
        black_box(payload.and_then(<[u8]>::first).copied());
        work();
    });
    PollResult { frames, datagrams: frames - refused }
}

/// Receives a batch of one queue, and sends it back.
fn poll_and_reply<R: FrameParser>(
    socket: &mut RawXsk,
    batch: u32,
    app_work: SyntheticWork,
) -> Result<PollResult> {
    let mut refused = 0;
    let frames = socket.reply(batch, |packet| {
        let payload = R::payload(packet);
        if R::REJECTS_INVALID && payload.is_none() {
            refused += 1;
            return false;
        }
        black_box(payload.and_then(<[u8]>::first).copied());
        app_work.run();
        R::reply_in_place(packet)
    });
    let frames = frames.context("replying from a queue")?;
    Ok(PollResult { frames, datagrams: frames - refused })
}

#[inline]
fn recv_loop(
    worker: &WorkerCtx<'_>,
    mut share: Vec<RawXsk>,
    (batch, delay): (u32, Duration),
    receive: impl Fn(&mut RawXsk) -> Result<PollResult>,
) -> Result<()> {
    let mut watch = Epoll::new(share.len())?;
    for (token, socket) in share.iter().enumerate() {
        watch.add(socket, token as u64)?;
    }
    let mut delivered = 0;
    // The last batch was full, so that there was no delay after it.
    let mut is_owed = false;
    while !worker.should_stop() {
        let mut frames_max = 0;
        for socket in &mut share {
            let result = receive(socket)?;
            delivered += u64::from(result.datagrams);
            frames_max = frames_max.max(result.frames);
        }
        if frames_max == 0 && is_owed {
            is_owed = false;
            tick::sleep(delay);
            continue;
        }
        if frames_max == 0 {
            let idle = if share.iter().any(RawXsk::is_sending) { TX_POLL_TIMEOUT } else { IDLE_POLL_TIMEOUT };
            // Errors are ignored, because the rings show readiness, too.
            let _ = watch.wait(idle)?.count();
            continue;
        }
        worker.stats.set_delivered(delivered);
        is_owed = !delay.is_zero() && frames_max == batch;
        if !delay.is_zero() && frames_max < batch {
            tick::sleep(delay);
        }
    }
    Ok(())
}
