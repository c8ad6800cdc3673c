//! Packets of a device's queue, in the frames that they were received into.

use manylane_sys::xsk::{PacketRef, Payloads};
use manylane_wire::datagram::Datagram;
use manylane_wire::rx_hint::{HEADERS_LEN_V4, HEADERS_LEN_V6};

/// A batch from a queue.
#[derive(Clone, Copy)]
pub(crate) struct Frames<'a> {
    pub(crate) payloads: Payloads<'a>,
    /// Parsed headers of the packets without an rx hint, at the index of each.
    pub(crate) parsed: &'a [Datagram],
    /// True if datagrams carry ECN.
    pub(crate) ecn: bool,
}

impl<'a> Frames<'a> {
    /// The first valid packet at or after `index`: an invalid one has no payload.
    #[inline]
    pub(crate) fn next_valid(&self, index: usize) -> Option<PacketRef<'a>> {
        self.payloads.next_with_header(index)
    }

    /// Headers of a valid packet. With an rx hint, they are parsed here; inlining removes that if
    /// the caller ignores the result.
    #[inline]
    pub(crate) fn headers(&self, packet: &PacketRef<'a>) -> Datagram {
        let hinted = match packet.header::<HEADERS_LEN_V4>() {
            Some(head) => Datagram::from_hint_v4(&head),
            None => packet.header::<HEADERS_LEN_V6>().and_then(|head| Datagram::from_hint_v6(&head)),
        };
        hinted.or_else(|| self.parsed.get(packet.index).copied()).unwrap_or_default()
    }
}
