//! `xsk/raw`: a minimal loop over raw AF_XDP rings, with an XDP program that does no more than it must.

use std::hint::black_box;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use aya::maps::XskMap;
use aya::programs::{Xdp, XdpMode};
use aya::{Ebpf, EbpfLoader};
use manylane_sys::measure::Watch;
use manylane_sys::raw_xsk::RawXsk;
use manylane_sys::{cpu, device, netns, tick, xsk};

use super::crew::Seat;
use crate::receiver::{ReceiverOptions, Running, Snapshot};

/// Where the payload of UDP over IPv4 starts in an untagged frame.
const PAYLOAD: usize = 42;
/// The longest sleep of an idle receiver: how late a stop may be noticed.
const IDLE: Duration = Duration::from_millis(20);

struct Raw {
    addr: SocketAddr,
    seats: Arc<[Seat]>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Result<()>>>,
    /// For the statistics of the queues.
    queues: Vec<OwnedFd>,
    /// Holds the program on the device.
    _program: Ebpf,
}

pub(crate) fn start(options: &ReceiverOptions) -> Result<Box<dyn Running>> {
    let name = options.device.as_deref().context("xsk/raw needs a device: it does not run over loopback")?;
    let index = netns::device_index(name)?;
    let mut program = load(index, options.addr.port())?;
    let mut map: XskMap<_> = program.take_map("ml_raw").context("no map ml_raw")?.try_into()?;
    let mut shares: Vec<Vec<RawXsk>> = (0..options.threads).map(|_| Vec::new()).collect();
    let mut queues = Vec::new();
    for queue in 0..device::receive_queues(name)? {
        let socket =
            RawXsk::open(index, queue, options.ring).with_context(|| format!("{name} queue {queue}"))?;
        map.set(queue, socket.as_fd().as_raw_fd(), 0)?;
        queues.push(socket.as_fd().try_clone_to_owned()?);
        shares[queue as usize % options.threads].push(socket);
    }
    let mut raw = Raw {
        addr: options.addr,
        seats: (0..options.threads).map(|_| Seat::default()).collect(),
        stop: Arc::default(),
        threads: Vec::new(),
        queues,
        _program: program,
    };
    for (index, share) in shares.into_iter().enumerate() {
        let (seats, stop) = (raw.seats.clone(), raw.stop.clone());
        let cpu = options.cpus.get(index % options.cpus.len().max(1)).copied();
        let (batch, pause) = (options.batch as u32, options.linger);
        let body = move || {
            if let Some(cpu) = cpu {
                cpu::pin(cpu).with_context(|| format!("cannot pin a receiver to CPU {cpu}"))?;
            }
            let seat = &seats[index];
            seat.take();
            let done = work(share, seat, &stop, batch, pause);
            seat.leave();
            done
        };
        let thread = std::thread::Builder::new().name(format!("receiver-{index}")).spawn(body)?;
        raw.threads.push(thread);
    }
    Ok(Box::new(raw))
}

fn load(index: u32, port: u16) -> Result<Ebpf> {
    let object = manylane_bpf::object("redirect").map_err(|why| anyhow!(why))?;
    let mut ebpf = EbpfLoader::new().btf(None).override_global("ml_port", &port, true).load(object)?;
    let program: &mut Xdp = ebpf.program_mut("ml_redirect").context("no program ml_redirect")?.try_into()?;
    program.load().context("loading the XDP program of xsk/raw")?;
    program.attach_to_if_index(index, XdpMode::Driver).context("attaching the XDP program of xsk/raw")?;
    Ok(ebpf)
}

fn work(mut share: Vec<RawXsk>, seat: &Seat, stop: &AtomicBool, batch: u32, pause: Duration) -> Result<()> {
    let mut watch = Watch::new(share.len())?;
    for (token, socket) in share.iter().enumerate() {
        watch.add(socket, token as u64)?;
    }
    let mut delivered = 0;
    while !stop.load(Ordering::Relaxed) {
        let mut most = 0;
        for socket in &mut share {
            let taken = socket.receive(batch, |packet| {
                black_box(packet.get(PAYLOAD));
            });
            delivered += u64::from(taken);
            most = most.max(taken);
        }
        if most == 0 {
            // Readiness is all that counts, and the rings tell it, too.
            let _ = watch.wait(IDLE)?.count();
            continue;
        }
        seat.show(delivered);
        if !pause.is_zero() && most < batch {
            tick::sleep(pause);
        }
    }
    Ok(())
}

impl Raw {
    fn end(&mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.threads
            .drain(..)
            .try_for_each(|thread| thread.join().map_err(|_| anyhow!("a receiver's thread panicked"))?)
    }
}

impl Running for Raw {
    fn addr(&self) -> SocketAddr {
        self.addr
    }

    fn snapshot(&self) -> Snapshot {
        let dropped = |fd: &OwnedFd| xsk::statistics(fd.as_fd()).map_or(0, |seen| seen.dropped());
        Snapshot {
            delivered: self.seats.iter().map(Seat::delivered).sum(),
            kernel_dropped: self.queues.iter().map(dropped).sum(),
            rx_cpu: self.seats.iter().map(Seat::cpu).sum(),
        }
    }

    fn stop(mut self: Box<Self>) -> Result<Snapshot> {
        self.end()?;
        Ok(self.snapshot())
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // Whoever cares about a failed thread calls `stop`.
        let _ = self.end();
    }
}
