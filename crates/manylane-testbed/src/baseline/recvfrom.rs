//! `socket/recvfrom`: one socket, shared by all threads; each takes one datagram with one call.

use std::hint::black_box;
use std::io::ErrorKind;
use std::os::fd::AsFd;

use anyhow::Result;
use manylane_sys::addr::SockAddr;
use manylane_sys::measure;

use super::crew::{self, Crew, Post};
use crate::receiver::{ReceiverOptions, Running};

pub(crate) fn start(options: &ReceiverOptions) -> Result<Box<dyn Running>> {
    let sockets = crew::bind(options, 1, false)?;
    let size = options.size.max(2048);
    Crew::start(options, sockets, move |post| work(post, size))
}

fn work(post: &Post<'_>, size: usize) -> Result<()> {
    let mut buffer = vec![0; size];
    let mut peer = SockAddr::EMPTY;
    let mut delivered = 0;
    loop {
        match measure::recv_from(post.socket.as_fd(), &mut buffer, &mut peer) {
            // Shut down for receiving: no datagram, though one without payload looks alike.
            Ok(0) if post.is_over() => return Ok(()),
            Ok(len) => {
                black_box(buffer[..len].first());
                delivered += 1;
                post.seat.show(delivered);
            }
            Err(err) if err.kind() == ErrorKind::Interrupted => {}
            Err(err) => return Err(err.into()),
        }
    }
}
