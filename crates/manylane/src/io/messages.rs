//! Messages of kernel sockets, in the buffers that they were received into.

use manylane_sys::control::Ancillary;
use manylane_sys::mmsg::{Message, RecvRing, Totals};
use manylane_sys::uring::UringRecv;

use super::RecvSummary;

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
            let datagrams = segment_count(message.data.len(), ancillary.segment_size);
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

/// Datagrams in a message of `len` bytes.
#[inline]
fn segment_count(len: usize, segment: u16) -> usize {
    if segment == 0 || len == 0 { 1 } else { len.div_ceil(usize::from(segment)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_datagrams_of_trains() {
        assert_eq!(segment_count(0, 0), 1);
        assert_eq!(segment_count(100, 0), 1);
        assert_eq!(segment_count(100, 100), 1);
        assert_eq!(segment_count(101, 100), 2);
        assert_eq!(segment_count(6400, 100), 64);
    }
}
