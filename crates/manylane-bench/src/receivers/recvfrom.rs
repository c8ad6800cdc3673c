//! `socket/recvfrom`: one socket that all threads share. Each call receives one datagram, and each
//! reply is one call. The receive blocks, or the kernel polls the device first (`SO_BUSY_POLL`),
//! or the thread polls without blocking. `module/recvfrom` is the same program, whose socket has a
//! queue for each processor.

use std::hint::black_box;
use std::io::ErrorKind;
use std::net::UdpSocket;
use std::os::fd::AsFd;

use anyhow::{Context, Result};
use manylane::{Steering, WaitPolicy};
use manylane_sys::addr::SockAddr;
use manylane_sys::{busy_poll, kernel_module, recvfrom};

use super::options::{BUF_SIZE_MIN, ReceiverOptions, Work};
use super::running::RunningReceiver;
use super::workers::{self, WorkerCtx, Workers};
use crate::work::SyntheticWork;

pub(crate) fn start(options: &ReceiverOptions) -> Result<Box<dyn RunningReceiver>> {
    start_on(options, workers::bind(options, 1, &[])?)
}

pub(crate) fn start_on_module(options: &ReceiverOptions) -> Result<Box<dyn RunningReceiver>> {
    let sockets = workers::bind(options, 1, &[])?;
    let policy = match options.steering {
        Steering::RoundRobin => kernel_module::Policy::RoundRobin,
        _ => kernel_module::Policy::Flow,
    };
    kernel_module::attach(sockets[0].as_fd(), policy)
        .context("the kernel module is not available: insmod kernel/manylane.ko")?;
    start_on(options, sockets)
}

fn start_on(options: &ReceiverOptions, sockets: Vec<UdpSocket>) -> Result<Box<dyn RunningReceiver>> {
    match options.wait {
        WaitPolicy::Spin(_) => sockets[0].set_nonblocking(true)?,
        WaitPolicy::BusyPoll(time) => {
            let micros = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
            busy_poll::set(sockets[0].as_fd(), micros, busy_poll::BUDGET_PACKETS).context("SO_BUSY_POLL")?;
        }
        _ => {}
    }
    let (size, replies) = (options.size.max(BUF_SIZE_MIN), options.work == Work::Echo);
    let app_work = options.synthetic_work;
    Workers::start_on_sockets(options, sockets, move |worker, socket| {
        recv_loop(worker, socket, size, app_work, replies)
    })
}

fn recv_loop(
    worker: &WorkerCtx<'_>,
    socket: &UdpSocket,
    size: usize,
    app_work: SyntheticWork,
    replies: bool,
) -> Result<()> {
    let mut buffer = vec![0; size];
    let mut peer = SockAddr::EMPTY;
    let mut delivered = 0;
    loop {
        match recvfrom::recv_from(socket.as_fd(), &mut buffer, &mut peer) {
            // The socket was shut down. An empty datagram looks the same.
            Ok(0) if worker.should_stop() => return Ok(()),
            Ok(len) => {
                black_box(buffer[..len].first().copied());
                app_work.run();
                if replies {
                    // A reply that is not sent is missing where replies are counted.
                    let _ = recvfrom::send_to(socket.as_fd(), &buffer[..len], &peer);
                }
                delivered += 1;
                worker.stats.set_delivered(delivered);
            }
            // Spin.
            Err(err) if err.kind() == ErrorKind::WouldBlock => {
                if worker.should_stop() {
                    return Ok(());
                }
            }
            Err(err) if matches!(err.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionRefused) => {}
            Err(err) => return Err(err.into()),
        }
    }
}
