//! Packets of a device's queue, in the frames that they were received into.

use manylane_sys::xsk::{PacketRef, Payloads};
use manylane_wire::datagram::Datagram;

/// What the library knows of one packet of a batch from a queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meta {
    /// Its place in the batch.
    pub(crate) index: u32,
    /// What its headers say.
    pub(crate) datagram: Datagram,
}

/// What a batch from a queue consists of.
#[derive(Clone, Copy)]
pub(crate) struct Frames<'a> {
    pub(crate) payloads: Payloads<'a>,
    /// What the headers say of those packets that have no note, each in its place.
    pub(crate) parsed: &'a [Datagram],
    /// Whether datagrams carry ECN.
    pub(crate) ecn: bool,
}

impl<'a> Frames<'a> {
    /// The first packet from the one at `index` on that can be believed: of others no payload was
    /// found.
    #[inline]
    pub(crate) fn next_valid(&self, index: usize) -> Option<PacketRef<'a>> {
        self.payloads.next_with_header(index)
    }

    /// What is known of a packet that can be believed. The headers of one with a note are read
    /// here, of which nothing is left where nobody looks at what they say.
    #[inline]
    pub(crate) fn meta(&self, packet: &PacketRef<'a>) -> Meta {
        let noted = match packet.header() {
            Some(head) => Datagram::from_hint_v4(&head),
            None => packet.header().and_then(|head| Datagram::from_hint_v6(&head)),
        };
        let datagram = noted.or_else(|| self.parsed.get(packet.index).copied()).unwrap_or_default();
        Meta { index: packet.index as u32, datagram }
    }
}
