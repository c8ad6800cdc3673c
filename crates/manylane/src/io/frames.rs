//! Packets of a device's queue, in the frames that they were received into.

use manylane_sys::xsk::{PacketRef, Payloads};
use manylane_wire::datagram::Datagram;
use manylane_wire::rx_hint::{HEADERS_LEN_V4, HEADERS_LEN_V6};

/// Metadata of one packet of a batch from a queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meta {
    /// Index in the batch.
    pub(crate) index: u32,
    /// Its parsed headers.
    pub(crate) datagram: Datagram,
}

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

    /// Metadata of a valid packet. With an rx hint, its headers are parsed here; inlining removes
    /// that if the caller ignores the result.
    #[inline]
    pub(crate) fn meta(&self, packet: &PacketRef<'a>) -> Meta {
        let hinted = match packet.header::<HEADERS_LEN_V4>() {
            Some(head) => Datagram::from_hint_v4(&head),
            None => packet.header::<HEADERS_LEN_V6>().and_then(|head| Datagram::from_hint_v6(&head)),
        };
        let datagram = hinted.or_else(|| self.parsed.get(packet.index).copied()).unwrap_or_default();
        Meta { index: packet.index as u32, datagram }
    }
}
