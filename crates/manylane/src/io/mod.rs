//! Engines: how a lane talks to the kernel. One file each, with the same few operations.

pub(crate) mod mmsg;
pub(crate) mod uring;
pub(crate) mod xdp;

use manylane_sys::control::Ancillary;
use manylane_sys::mmsg::{Message, RecvRing, Totals};
use manylane_sys::uring::UringRecv;

use crate::batch;

/// What an engine on this socket can do. Nobody asks which engine it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Messages that one call takes or sends.
    pub batch: usize,
    /// Bytes of the largest datagram that is received whole.
    pub datagram_size: usize,
    /// Trains of datagrams are received as one message.
    pub gro: bool,
    /// Consecutive replies may leave as a train.
    pub gso: bool,
    /// Datagrams carry a time stamp of the kernel.
    pub timestamps: bool,
}

/// What one receive brought.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RecvSummary {
    pub(crate) messages: usize,
    pub(crate) datagrams: usize,
    pub(crate) bytes: usize,
    pub(crate) truncated: usize,
    pub(crate) gro_messages: usize,
}

/// Where messages of kernel sockets are.
#[derive(Clone, Copy)]
pub(crate) enum Messages<'a> {
    /// In the buffers of a ring of headers.
    Mmsg(&'a RecvRing),
    /// In buffers that the kernel picked.
    Uring(&'a UringRecv),
}

impl<'a> Messages<'a> {
    /// Message `index` of the last receive.
    #[inline]
    pub(crate) fn message(self, index: usize) -> Message<'a> {
        match self {
            Self::Mmsg(ring) => ring.message(index),
            Self::Uring(ring) => ring.message(index),
        }
    }

    /// Looks at the `messages` that were received, and keeps what the kernel said of each in
    /// `said`, which has a place for each where there are control messages at all.
    #[inline]
    pub(crate) fn parse_ancillary(self, messages: usize, said: &mut [Ancillary]) -> RecvSummary {
        let Totals { bytes, truncated, with_control } = match self {
            Self::Mmsg(ring) => ring.totals(),
            Self::Uring(ring) => ring.totals(),
        };
        let mut taken = RecvSummary { messages, datagrams: messages, bytes, truncated, gro_messages: 0 };
        if with_control == 0 {
            return taken;
        }
        for index in 0..messages {
            let message = self.message(index);
            if !message.has_ancillary() {
                continue;
            }
            let ancillary = message.ancillary();
            let datagrams = batch::segment_count(message.data.len(), ancillary.segment_size);
            // A message is one already.
            taken.datagrams += datagrams - 1;
            taken.gro_messages += usize::from(datagrams > 1);
            if let Some(place) = said.get_mut(index) {
                *place = ancillary;
            }
        }
        taken
    }
}
