//! Messages of kernel sockets, in the buffers that they were received into.

use manylane_sys::control::Ancillary;
use manylane_sys::mmsg::{Message, RecvRing, Totals};
use manylane_sys::uring::UringRecv;

use super::RecvSummary;
#[cfg(test)]
use super::sim::SimBuffers;

/// Buffers of received messages.
#[derive(Clone, Copy)]
pub(crate) enum Messages<'a> {
    /// Buffers of a ring of `mmsghdr`.
    Mmsg(&'a RecvRing),
    /// Buffers that io_uring picked.
    Uring(&'a UringRecv),
    #[cfg(test)]
    Sim(&'a SimBuffers),
}

impl<'a> Messages<'a> {
    /// Message `index` of the last receive.
    #[inline]
    pub(crate) fn message(self, index: usize) -> Message<'a> {
        match self {
            Self::Mmsg(ring) => ring.message(index),
            Self::Uring(ring) => ring.message(index),
            #[cfg(test)]
            Self::Sim(buffers) => buffers.message(index),
        }
    }

    /// Counts the `messages` received, and writes the ancillary data of each to `ancillary`. That
    /// has an element for each message if control messages are enabled.
    #[inline]
    pub(crate) fn parse_ancillary(self, messages: usize, ancillary: &mut [Ancillary]) -> RecvSummary {
        let Totals { bytes, truncated, with_control } = match self {
            Self::Mmsg(ring) => ring.totals(),
            Self::Uring(ring) => ring.totals(),
            #[cfg(test)]
            Self::Sim(buffers) => buffers.totals(),
        };
        let mut summary = RecvSummary { messages, datagrams: messages, bytes, truncated, gro_messages: 0 };
        if with_control == 0 {
            return summary;
        }
        for index in 0..messages {
            let message = self.message(index);
            if !message.has_ancillary() {
                continue;
            }
            let parsed = message.ancillary();
            let datagrams = segment_count(message.data.len(), parsed.segment_size);
            // The message already counts as one datagram.
            summary.datagrams += datagrams - 1;
            summary.gro_messages += usize::from(datagrams > 1);
            if let Some(place) = ancillary.get_mut(index) {
                *place = parsed;
            }
        }
        summary
    }
}

/// Datagrams in a message of `len` bytes.
#[inline]
fn segment_count(len: usize, segment: u16) -> usize {
    if segment == 0 || len == 0 { 1 } else { len.div_ceil(usize::from(segment)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gro_datagrams_are_counted() {
        assert_eq!(segment_count(0, 0), 1);
        assert_eq!(segment_count(100, 0), 1);
        assert_eq!(segment_count(100, 100), 1);
        assert_eq!(segment_count(101, 100), 2);
        assert_eq!(segment_count(6400, 100), 64);
    }
}
