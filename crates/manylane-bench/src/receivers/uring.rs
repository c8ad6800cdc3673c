//! `uring/plain`: a multishot receive for each thread, on a socket of its own (`SO_REUSEPORT`). It
//! is the usual hand-written loop, with buffers as large as the datagrams, and one `sendmmsg` for
//! the replies of each batch. Receives that are submitted one by one (`uring/single` of `bench
//! batch`) cost more, and are not included here.

use std::hint::black_box;
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result};
use manylane_sys::mmsg::{SendOptions, SendRing};
use manylane_sys::sock;
use manylane_sys::tick;
use manylane_sys::uring::{BareMultishot, BareOptions};

use super::options::{BUF_SIZE_MIN, ReceiverOptions, Work};
use super::running::RunningReceiver;
use super::workers::{self, WorkerCtx, Workers, needs_local_address, pktinfo_flags};
use crate::work::SyntheticWork;

/// No timeout is needed, because a shutdown ends the wait.
const RECV_TIMEOUT: Duration = Duration::MAX;
/// Max time that a reply waits for room in the send buffer.
const SEND_TIMEOUT: Duration = Duration::from_millis(100);

pub(crate) fn start(options: &ReceiverOptions) -> Result<Box<dyn RunningReceiver>> {
    let control = needs_local_address(options);
    let sockets = workers::bind(options, options.threads, pktinfo_flags(options))?;
    let ring = BareOptions { batch: options.batch, buffer: options.size.max(BUF_SIZE_MIN), control };
    let (delay, work, app_work) = (options.fixed_delay(), options.work, options.synthetic_work);
    Workers::start_on_sockets(options, sockets, move |worker, socket| {
        recv_loop(worker, socket, ring, delay, (work, app_work))
    })
}

fn recv_loop(
    worker: &WorkerCtx<'_>,
    socket: &UdpSocket,
    options: BareOptions,
    delay: Duration,
    (work, app_work): (Work, SyntheticWork),
) -> Result<()> {
    let mut ring = BareMultishot::new(socket.as_fd(), options)
        .context("io_uring is not available (Linux 6.0, sysctl kernel.io_uring_disabled)")?;
    let send = SendOptions { batch: options.batch, gso: false };
    let mut replies = (work == Work::Echo).then(|| SendRing::new(send)).transpose()?;
    let mut delivered = 0;
    let mut sleep = Some(RECV_TIMEOUT);
    loop {
        let messages = ring.recv(sleep)?;
        if messages == 0 && worker.should_stop() {
            return Ok(());
        }
        for index in 0..messages {
            black_box(ring.message(index).data.first().copied());
            app_work.run();
        }
        delivered += messages as u64;
        if let Some(replies) = &mut replies {
            send_replies(socket, &ring, messages, replies);
        }
        worker.stats.set_delivered(delivered);
        sleep = Some(RECV_TIMEOUT);
        if !delay.is_zero() {
            if messages == options.batch {
                sleep = None;
            } else {
                tick::sleep(delay);
            }
        }
    }
}

/// Sends the batch back. Replies that are not sent are missing at the client, which counts them.
fn send_replies(socket: &UdpSocket, ring: &BareMultishot, messages: usize, replies: &mut SendRing) {
    let mut out = replies.batch();
    for index in 0..messages {
        let message = ring.message(index);
        // The ring has room for a batch.
        out.push(message.peer, message.ancillary().local, message.data);
    }
    let mut at = 0;
    while at < out.messages() {
        match out.send(socket.as_fd(), at) {
            Ok(sent) => at += sent,
            Err(err)
                if err.kind() == std::io::ErrorKind::WouldBlock
                    && sock::wait_writable(socket.as_fd(), SEND_TIMEOUT) => {}
            Err(_) => at += 1,
        }
    }
}
