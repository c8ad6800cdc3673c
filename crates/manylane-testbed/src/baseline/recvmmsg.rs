//! `socket/recvmmsg`, `reuseport/recvmmsg`, `reuseport/gro`: batches by `recvmmsg` on headers that are built
//! once, from one shared socket or from a socket for each thread.

use std::hint::black_box;
use std::os::fd::AsFd;

use anyhow::{Context, Result};
use manylane_sys::mmsg::{RecvOptions, RecvRing, Wait};

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
    let ring = RecvOptions { batch: options.batch, buffer: options.size.max(SINGLE), control: false };
    Crew::start(options, sockets, move |post| take_singles(post, ring))
}

pub(crate) fn gro(options: &ReceiverOptions) -> Result<Box<dyn Running>> {
    let sockets = crew::bind(options, options.threads, true)?;
    let ring = RecvOptions { batch: options.batch, buffer: TRAIN, control: true };
    Crew::start(options, sockets, move |post| take_trains(post, ring))
}

fn take_singles(post: &Post<'_>, ring: RecvOptions) -> Result<()> {
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
    }
}

fn take_trains(post: &Post<'_>, ring: RecvOptions) -> Result<()> {
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
    }
}
