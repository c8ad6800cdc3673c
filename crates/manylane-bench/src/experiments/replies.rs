//! `bench replies`: the cost of sending a datagram, by size and by messages per call. It compares
//! `sendmmsg` on headers that are built once, as lanes on kernel sockets reply, with io_uring and
//! one entry per datagram. One thread sends over loopback to a socket that drops everything, so the
//! CPU time of every method includes the kernel's delivery to that socket.

use std::net::UdpSocket;
use std::os::fd::AsFd;

use anyhow::{Context, Result, ensure};
use manylane_measure::named_enum;
use manylane_sys::addr::SockAddr;
use manylane_sys::mmsg::{SendOptions, SendRing};
use manylane_sys::uring::BareSender;
use manylane_sys::{cpu, sock};

use super::batch::{Config, compare};
use crate::schema::{BENCH_REPLIES, BatchRow, BatchSample, BenchSettings, Document};
use crate::{Controller, Limits, Options, Setup, run_pinned};

/// Max bytes of payload, and max datagrams, of a sample. The first eighth is warm-up.
const BYTES_MAX: usize = 64 << 20;
const DATAGRAMS_MAX: usize = 8192;

named_enum! {
    /// Methods of sending.
    pub enum SendMethod {
        /// `sendmmsg`.
        Sendmmsg = "socket/sendmmsg",
        /// One entry per datagram (`IORING_OP_SENDMSG`), without completions for successful sends.
        UringSendmsg = "uring/sendmsg",
        /// The same, without a copy of the payload (`IORING_OP_SENDMSG_ZC`).
        UringZeroCopy = "uring/sendmsg-zc",
    }
}

/// Runs the benchmark. It uses the sizes and rounds of `options`.
pub fn run(
    setup: &Setup,
    options: &Options,
    senders: &[SendMethod],
    messages: &[usize],
    controller: &mut dyn Controller,
) -> Result<Document<BenchSettings, BatchRow>> {
    let mut settings = options.settings(setup, &Limits::default());
    settings.receivers = senders.iter().map(ToString::to_string).collect();
    settings.notes.push("a filter of the destination socket drops all datagrams".into());
    let cpu = setup.receiver_cpus().first().copied();
    let rows = compare(options, senders, messages, controller, |config, round| {
        run_pinned(cpu, || measure(config, round))
    })?;
    Ok(Document::new(BENCH_REPLIES, settings, rows))
}

fn measure(Config { method, size, messages }: Config<SendMethod>, round: usize) -> Result<BatchSample> {
    let target = UdpSocket::bind("127.0.0.1:0").context("opening a socket")?;
    sock::drop_all_incoming(target.as_fd()).context("attaching a filter to a socket")?;
    let peer = SockAddr::from(target.local_addr()?);
    let socket = UdpSocket::bind("127.0.0.1:0").context("opening a socket")?;
    // Payloads in separate memory, as those of a batch.
    let payloads: Vec<Vec<u8>> = (0..messages).map(|at| vec![at as u8; size]).collect();
    let calls = (DATAGRAMS_MAX.min(BYTES_MAX / size.max(1)) / messages).max(8);
    let mut send = make_send_fn(method, &socket, peer, messages)?;
    let mut sum = BatchSample { round, ..BatchSample::default() };
    let mut before = cpu::thread_cpu_time();
    for call in 0..calls + calls / 8 {
        if call == calls / 8 {
            (sum.sent, sum.delivered, sum.calls) = (0, 0, 0);
            before = cpu::thread_cpu_time();
        }
        sum.delivered += send(&payloads)? as u64;
        sum.sent += messages as u64;
        sum.calls += 1;
    }
    let time = cpu::thread_cpu_time().saturating_sub(before);
    ensure!(sum.delivered > 0, "no datagram was sent");
    sum.rx_cpu_ns = time.as_nanos() as f64 / sum.delivered as f64;
    Ok(sum)
}

/// Sends payloads and returns how many were accepted.
type SendFn<'a> = Box<dyn FnMut(&[Vec<u8>]) -> Result<usize> + 'a>;

fn make_send_fn(sender: SendMethod, socket: &UdpSocket, peer: SockAddr, batch: usize) -> Result<SendFn<'_>> {
    if sender == SendMethod::Sendmmsg {
        let mut ring = SendRing::new(SendOptions { batch, gso: false })?;
        return Ok(Box::new(move |payloads| {
            let mut queue = ring.batch();
            for payload in payloads {
                queue.push(&peer, None, payload);
            }
            Ok(queue.send(socket.as_fd(), 0)?)
        }));
    }
    let zero_copy = sender == SendMethod::UringZeroCopy;
    let ring = BareSender::new(socket.as_fd(), batch, zero_copy);
    let mut ring = ring.context("io_uring is not available (Linux 6.0, sysctl kernel.io_uring_disabled)")?;
    Ok(Box::new(move |payloads| Ok(ring.send(&peer, payloads.iter().map(Vec::as_slice))?)))
}
