//! The send path past the kernel's stack, of an engine that has one. The outbox tries it first, and
//! leaves to the kernel's socket ([`transport`](super::transport)) what it does not take.

use std::net::{IpAddr, SocketAddr};

use super::batch::Datagram;
use super::xdp::send::XdpSender;
use crate::counters::Cells;

/// Send path of an engine past the kernel's stack, for one batch.
///
/// A function that returns false has sent nothing: the datagram is left to the kernel's socket.
/// Until that has sent its queue, later datagrams to the same peer are left to it too, so that none
/// overtakes another.
pub(crate) enum Bypass<'a> {
    Xdp(XdpSender<'a>),
}

impl<'a> Bypass<'a> {
    /// Replies with a copy of `payload`.
    #[inline]
    pub(crate) fn reply(&mut self, request: &Datagram<'_>, payload: &[u8]) -> bool {
        let Self::Xdp(sender) = self;
        sender.reply(request, payload)
    }

    /// As [`reply`](Self::reply), without a copy if `payload` is a prefix of the request's.
    #[inline]
    pub(crate) fn reply_borrowed(&mut self, request: &Datagram<'_>, payload: &'a [u8]) -> bool {
        let Self::Xdp(sender) = self;
        sender.reply_borrowed(request, payload)
    }

    /// Sends a copy of `payload` that is no reply, from the address `from` if given.
    pub(crate) fn send(&mut self, from: Option<IpAddr>, peer: SocketAddr, payload: &[u8]) -> bool {
        let Self::Xdp(sender) = self;
        sender.send(from, peer, payload)
    }

    /// Submits the `datagrams` datagrams that were taken since the last flush, and counts them.
    pub(crate) fn flush(&mut self, datagrams: u64, cells: &Cells) {
        let Self::Xdp(sender) = self;
        sender.flush(datagrams, cells);
    }

    /// The kernel's socket has sent its queue: later datagrams cannot overtake it.
    pub(crate) fn clear_diverted(&mut self) {
        let Self::Xdp(sender) = self;
        sender.clear_diverted();
    }

    /// Removes what was taken and not submitted.
    pub(crate) fn abandon(&mut self) {
        let Self::Xdp(sender) = self;
        sender.abandon();
    }
}
