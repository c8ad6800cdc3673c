//! `socket/recvmmsg`, `reuseport/recvmmsg`, `reuseport/gro`: batches by `recvmmsg` on headers that are built
//! once, from one shared socket or from a socket for each thread. Those that answer send each batch back by one
//! `sendmmsg` on the same headers, trains as trains.

use std::hint::black_box;
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result};
use manylane_sys::mmsg::{BackControls, Message, RecvOptions, RecvRing, Wait};
use manylane_sys::sock::Flag;
use manylane_sys::tick;

use super::crew::{self, Crew, Post, needs_local_address};
use crate::receiver::{ReceiverOptions, Running, Work};
use crate::toil::Toil;

/// The longest train of datagrams that the kernel hands over as one message.
const TRAIN: usize = 65_535;
/// Buffers of receivers that take datagrams one by one: a page's half, more for larger datagrams.
const SINGLE: usize = 2048;

pub(crate) fn shared(options: &ReceiverOptions) -> Result<Box<dyn Running>> {
    singles(options, 1)
}

pub(crate) fn reuseport(options: &ReceiverOptions) -> Result<Box<dyn Running>> {
    singles(options, options.threads)
}

fn singles(options: &ReceiverOptions, sockets: usize) -> Result<Box<dyn Running>> {
    // A pause of threads that share one socket would leave it to one of them.
    let pause = if sockets == 1 { Duration::ZERO } else { options.linger };
    let control = needs_local_address(options);
    let sockets = crew::bind(options, sockets, local_address(options))?;
    let ring = RecvOptions { batch: options.batch, buffer: options.size.max(SINGLE), control };
    let (work, toil) = (options.work, options.toil);
    let look = move |message: &Message<'_>| single(message, toil);
    Crew::on_sockets(options, sockets, move |post, socket| take(post, socket, ring, pause, work, look))
}

pub(crate) fn gro(options: &ReceiverOptions) -> Result<Box<dyn Running>> {
    let flags = [&[Flag::Gro], local_address(options)].concat();
    let sockets = crew::bind(options, options.threads, &flags)?;
    let (pause, work, toil) = (options.linger, options.work, options.toil);
    let ring = RecvOptions { batch: options.batch, buffer: TRAIN, control: true };
    let look = move |message: &Message<'_>| train(message, toil);
    Crew::on_sockets(options, sockets, move |post, socket| take(post, socket, ring, pause, work, look))
}

fn local_address(options: &ReceiverOptions) -> &'static [Flag] {
    match needs_local_address(options) {
        false => &[],
        true if options.addr.is_ipv4() => &[Flag::PktInfoV4],
        true => &[Flag::PktInfoV6],
    }
}

/// Looks at a message that is one datagram.
#[inline]
fn single(message: &Message<'_>, toil: Toil) -> u64 {
    black_box(message.data.first().copied());
    toil.work();
    1
}

/// Looks at each datagram of a message that may be a train, and says how many there are.
#[inline]
fn train(message: &Message<'_>, toil: Toil) -> u64 {
    let segment = usize::from(message.ancillary().segment);
    if segment == 0 || segment >= message.data.len() {
        return single(message, toil);
    }
    let datagrams = message.data.chunks(segment).map(|datagram| {
        black_box(datagram.first().copied());
        toil.work();
    });
    datagrams.count() as u64
}

/// The loop of all of them; `look` takes a message and counts its datagrams.
#[inline]
fn take(
    post: &Post<'_>,
    socket: &UdpSocket,
    ring: RecvOptions,
    pause: Duration,
    work: Work,
    look: impl Fn(&Message<'_>) -> u64,
) -> Result<()> {
    let mut ring = RecvRing::new(ring).context("no memory for buffers")?;
    let mut controls = (work == Work::Echo).then(|| BackControls::of(&ring));
    let mut delivered = 0;
    let mut wait = Wait::First;
    loop {
        let messages = ring.recv(socket.as_fd(), wait)?;
        if messages == 0 && post.is_over() {
            return Ok(());
        }
        delivered += (0..messages).map(|index| look(&ring.message(index))).sum::<u64>();
        if let Some(controls) = &mut controls {
            // An answer that does not leave is missed where answers are counted.
            ring.send_back(socket.as_fd(), controls);
        }
        post.seat.show(delivered);
        // Waits for a larger batch, unless more is waiting: which behind a full one the next call will tell.
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
