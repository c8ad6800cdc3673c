//! `socket/recvfrom`: one socket, shared by all threads; each takes one datagram with one call.

use std::hint::black_box;
use std::io::ErrorKind;

use anyhow::Result;

use super::crew::{self, Crew, Post};
use crate::receiver::{ReceiverOptions, Running};

pub(crate) fn start(options: &ReceiverOptions) -> Result<Box<dyn Running>> {
    let sockets = crew::bind(options, 1, false)?;
    let size = options.size.max(2048);
    Crew::start(options, sockets, move |post| work(post, size))
}

fn work(post: &Post<'_>, size: usize) -> Result<()> {
    let mut buffer = vec![0; size];
    let mut delivered = 0;
    loop {
        match post.socket.recv_from(&mut buffer) {
            // Shut down for receiving: no datagram, though one without payload looks alike.
            Ok((0, _)) if post.is_over() => return Ok(()),
            Ok((len, peer)) => {
                black_box((buffer[..len].first(), peer));
                delivered += 1;
                post.seat.show(delivered);
            }
            // The standard library cannot make an address of the end of a socket, and says so.
            Err(_) if post.is_over() => return Ok(()),
            Err(err) if err.kind() == ErrorKind::Interrupted => {}
            Err(err) => return Err(err.into()),
        }
    }
}
