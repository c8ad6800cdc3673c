//! `socket/recvmmsg`, `reuseport/recvmmsg`, `reuseport/gro`: batches by `recvmmsg` on headers that
//! are built once, from one shared socket or from a socket for each thread. Receivers that answer
//! send each batch back with one `sendmmsg` on the same headers, GRO messages as GSO messages.

use std::hint::black_box;
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result};
use manylane_sys::mmsg::{EchoControls, Message, RecvOptions, RecvRing, Wait};
use manylane_sys::sock::Flag;
use manylane_sys::tick;

use super::options::{BUF_SIZE_MIN, ReceiverOptions, Work};
use super::running::RunningReceiver;
use super::workers::{self, WorkerCtx, Workers, needs_local_address, pktinfo_flags};
use crate::work::SyntheticWork;

/// Maximum length of a GRO message, in bytes.
const GRO_SIZE_MAX: usize = 65_535;

/// Starts threads that share one socket, or have one each.
pub(crate) fn start(options: &ReceiverOptions, sockets: usize) -> Result<Box<dyn RunningReceiver>> {
    // If threads that share one socket delayed, one of them would receive everything.
    let delay = if sockets == 1 { Duration::ZERO } else { options.fixed_delay() };
    let control = needs_local_address(options);
    let sockets = workers::bind(options, sockets, pktinfo_flags(options))?;
    let ring = RecvOptions { batch: options.batch, buffer: options.size.max(BUF_SIZE_MIN), control };
    let (work, app_work) = (options.work, options.synthetic_work);
    let handle = move |message: &Message<'_>| process_datagram(message, app_work);
    Workers::start_on_sockets(options, sockets, move |worker, socket| {
        recv_loop(worker, socket, ring, delay, work, handle)
    })
}

pub(crate) fn start_gro(options: &ReceiverOptions) -> Result<Box<dyn RunningReceiver>> {
    let flags = [&[Flag::Gro], pktinfo_flags(options)].concat();
    let sockets = workers::bind(options, options.threads, &flags)?;
    let (delay, work, app_work) = (options.fixed_delay(), options.work, options.synthetic_work);
    let ring = RecvOptions { batch: options.batch, buffer: GRO_SIZE_MAX, control: true };
    let handle = move |message: &Message<'_>| process_gro_message(message, app_work);
    Workers::start_on_sockets(options, sockets, move |worker, socket| {
        recv_loop(worker, socket, ring, delay, work, handle)
    })
}

/// Reads a message that is one datagram.
#[inline]
fn process_datagram(message: &Message<'_>, app_work: SyntheticWork) -> u64 {
    black_box(message.data.first().copied());
    app_work.run();
    1
}

/// Reads each datagram of a message that may be a GRO message, and returns their number.
#[inline]
fn process_gro_message(message: &Message<'_>, app_work: SyntheticWork) -> u64 {
    let segment = usize::from(message.ancillary().segment_size);
    if segment == 0 || segment >= message.data.len() {
        return process_datagram(message, app_work);
    }
    let datagrams = message.data.chunks(segment).map(|datagram| {
        black_box(datagram.first().copied());
        app_work.run();
    });
    datagrams.count() as u64
}

/// The common loop. `handle` reads a message and returns its number of datagrams.
#[inline]
fn recv_loop(
    worker: &WorkerCtx<'_>,
    socket: &UdpSocket,
    ring: RecvOptions,
    delay: Duration,
    work: Work,
    handle: impl Fn(&Message<'_>) -> u64,
) -> Result<()> {
    let mut ring = RecvRing::new(ring).context("cannot allocate buffers")?;
    let mut controls = (work == Work::Echo).then(|| EchoControls::new(&ring));
    let mut delivered = 0;
    let mut wait = Wait::First;
    loop {
        let messages = ring.recv(socket.as_fd(), wait)?;
        if messages == 0 && worker.should_stop() {
            return Ok(());
        }
        delivered += (0..messages).map(|index| handle(&ring.message(index))).sum::<u64>();
        if let Some(controls) = &mut controls {
            // A reply that is not sent is missing where replies are counted.
            ring.echo(socket.as_fd(), controls);
        }
        worker.stats.set_delivered(delivered);
        // Delays for a larger batch, unless more is probably queued, as after a full batch.
        wait = Wait::First;
        if !delay.is_zero() {
            if messages == ring.capacity() {
                wait = Wait::Never;
            } else {
                tick::sleep(delay);
            }
        }
    }
}
