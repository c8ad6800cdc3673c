//! `socket/recvmmsg`, `reuseport/recvmmsg`, `reuseport/gro`: batches by `recvmmsg` on headers that are built
//! once, from one shared socket or from a socket for each thread.

use std::hint::black_box;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result};
use manylane_sys::mmsg::{RecvOptions, RecvRing, Wait};
use manylane_sys::tick;

use super::crew::{self, Crew, Post};
use crate::receiver::{ReceiverOptions, Running};

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
    let sockets = crew::bind(options, sockets, false)?;
    // A pause of threads that share one socket would leave it to one of them.
    let pause = if sockets.len() == 1 { Duration::ZERO } else { options.linger };
    let ring = RecvOptions { batch: options.batch, buffer: options.size.max(SINGLE), control: false };
    Crew::start(options, sockets, move |post| take_singles(post, ring, pause))
}

pub(crate) fn gro(options: &ReceiverOptions) -> Result<Box<dyn Running>> {
    let sockets = crew::bind(options, options.threads, true)?;
    let pause = options.linger;
    let ring = RecvOptions { batch: options.batch, buffer: TRAIN, control: true };
    Crew::start(options, sockets, move |post| take_trains(post, ring, pause))
}

/// Where threads share a core, waits for a larger batch, unless more is waiting.
fn linger(pause: Duration, messages: usize, ring: &RecvRing) {
    if !pause.is_zero() && messages < ring.capacity() {
        tick::sleep(pause);
    }
}

fn take_singles(post: &Post<'_>, ring: RecvOptions, pause: Duration) -> Result<()> {
    let mut ring = RecvRing::new(ring).context("no memory for buffers")?;
    let mut delivered = 0;
    loop {
        let messages = ring.recv(post.socket.as_fd(), Wait::First)?;
        if messages == 0 && post.is_over() {
            return Ok(());
        }
        for index in 0..messages {
            let message = ring.message(index);
            black_box(message.data.first());
        }
        delivered += messages as u64;
        post.seat.show(delivered);
        linger(pause, messages, &ring);
    }
}

fn take_trains(post: &Post<'_>, ring: RecvOptions, pause: Duration) -> Result<()> {
    let mut ring = RecvRing::new(ring).context("no memory for buffers")?;
    let mut delivered = 0;
    loop {
        let messages = ring.recv(post.socket.as_fd(), Wait::First)?;
        if messages == 0 && post.is_over() {
            return Ok(());
        }
        for index in 0..messages {
            let message = ring.message(index);
            let segment = usize::from(message.ancillary().segment);
            if segment == 0 || segment >= message.data.len() {
                black_box(message.data.first());
                delivered += 1;
                continue;
            }
            for datagram in message.data.chunks(segment) {
                black_box(datagram.first());
                delivered += 1;
            }
        }
        post.seat.show(delivered);
        linger(pause, messages, &ring);
    }
}
