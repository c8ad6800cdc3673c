//! `socket/recvmmsg`, `reuseport/recvmmsg`, `reuseport/gro`: batches by `recvmmsg` on headers that
//! are built once, from one shared socket or from a socket for each thread. Those that answer send
//! each batch back by one `sendmmsg` on the same headers, trains as trains.

use std::hint::black_box;
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result};
use manylane_sys::mmsg::{EchoControls, Message, RecvOptions, RecvRing, Wait};
use manylane_sys::sock::Flag;
use manylane_sys::tick;

use super::workers::{self, WorkerCtx, Workers, needs_local_address};
use crate::receiver::{ReceiverOptions, RunningReceiver, Work};
use crate::synthetic_work::SyntheticWork;

/// The longest train of datagrams that the kernel hands over as one message.
const GRO_SIZE_MAX: usize = 65_535;
/// Buffers of receivers that take datagrams one by one: a page's half, more for larger datagrams.
const BUF_SIZE_MIN: usize = 2048;

pub(crate) fn start_shared(options: &ReceiverOptions) -> Result<Box<dyn RunningReceiver>> {
    start_without_gro(options, 1)
}

pub(crate) fn start_reuseport(options: &ReceiverOptions) -> Result<Box<dyn RunningReceiver>> {
    start_without_gro(options, options.threads)
}

fn start_without_gro(options: &ReceiverOptions, sockets: usize) -> Result<Box<dyn RunningReceiver>> {
    // A pause of threads that share one socket would leave it to one of them.
    let pause = if sockets == 1 { Duration::ZERO } else { options.rx_coalesce };
    let control = needs_local_address(options);
    let sockets = workers::bind(options, sockets, pktinfo_flags(options))?;
    let ring = RecvOptions { batch: options.batch, buffer: options.size.max(BUF_SIZE_MIN), control };
    let (work, toil) = (options.work, options.synthetic_work);
    let handle = move |message: &Message<'_>| process_datagram(message, toil);
    Workers::start_on_sockets(options, sockets, move |post, socket| {
        recv_loop(post, socket, ring, pause, work, handle)
    })
}

pub(crate) fn start_gro(options: &ReceiverOptions) -> Result<Box<dyn RunningReceiver>> {
    let flags = [&[Flag::Gro], pktinfo_flags(options)].concat();
    let sockets = workers::bind(options, options.threads, &flags)?;
    let (pause, work, toil) = (options.rx_coalesce, options.work, options.synthetic_work);
    let ring = RecvOptions { batch: options.batch, buffer: GRO_SIZE_MAX, control: true };
    let handle = move |message: &Message<'_>| process_gro_message(message, toil);
    Workers::start_on_sockets(options, sockets, move |post, socket| {
        recv_loop(post, socket, ring, pause, work, handle)
    })
}

fn pktinfo_flags(options: &ReceiverOptions) -> &'static [Flag] {
    match needs_local_address(options) {
        false => &[],
        true if options.addr.is_ipv4() => &[Flag::PktInfoV4],
        true => &[Flag::PktInfoV6],
    }
}

/// Looks at a message that is one datagram.
#[inline]
fn process_datagram(message: &Message<'_>, toil: SyntheticWork) -> u64 {
    black_box(message.data.first().copied());
    toil.run();
    1
}

/// Looks at each datagram of a message that may be a train, and says how many there are.
#[inline]
fn process_gro_message(message: &Message<'_>, toil: SyntheticWork) -> u64 {
    let segment = usize::from(message.ancillary().segment_size);
    if segment == 0 || segment >= message.data.len() {
        return process_datagram(message, toil);
    }
    let datagrams = message.data.chunks(segment).map(|datagram| {
        black_box(datagram.first().copied());
        toil.run();
    });
    datagrams.count() as u64
}

/// The loop of all of them; `look` takes a message and counts its datagrams.
#[inline]
fn recv_loop(
    post: &WorkerCtx<'_>,
    socket: &UdpSocket,
    ring: RecvOptions,
    pause: Duration,
    work: Work,
    handle: impl Fn(&Message<'_>) -> u64,
) -> Result<()> {
    let mut ring = RecvRing::new(ring).context("no memory for buffers")?;
    let mut controls = (work == Work::Echo).then(|| EchoControls::new(&ring));
    let mut delivered = 0;
    let mut wait = Wait::First;
    loop {
        let messages = ring.recv(socket.as_fd(), wait)?;
        if messages == 0 && post.should_stop() {
            return Ok(());
        }
        delivered += (0..messages).map(|index| handle(&ring.message(index))).sum::<u64>();
        if let Some(controls) = &mut controls {
            // An answer that does not leave is missed where answers are counted.
            ring.echo(socket.as_fd(), controls);
        }
        post.stats.set_delivered(delivered);
        // Waits for a larger batch, unless more is waiting: which behind a full one the next call
        // will tell.
        wait = Wait::First;
        if !pause.is_zero() {
            if messages == ring.capacity() {
                wait = Wait::Never;
            } else {
                tick::sleep(pause);
            }
        }
    }
}
