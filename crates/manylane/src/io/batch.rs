//! A batch of received datagrams in the lane's buffers.
//!
//! The buffers belong to the lane. A batch borrows them, and so does every datagram and payload.
//! The next receive borrows the lane mutably, so no payload can be read after it was overwritten.
//! A GRO message is split into its datagrams, each a slice of the one buffer.
//!
//! A [`Datagram`] has a [`RecvMeta`], whatever the engine. It has two forms, each the one in which
//! the metadata arrived: addresses and control messages, or headers. With one form, each datagram
//! would be converted, also for an application that reads only payloads.
//!
//! | other types | why they are not `RecvMeta` |
//! |---|---|
//! | [`Message`], [`Ancillary`] | a message may be several datagrams (GRO). How many follows from the control messages, so these are parsed when the message is received |
//! | [`Messages`], [`Frames`] | the buffers of a whole batch, by engine |
//! | [`Headers`] | part of one of the forms: what `manylane-wire` parses, and writes replies from |

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6};
use std::time::SystemTime;

use manylane_sys::addr::{SockAddr, Source, in_socket_family};
use manylane_sys::control::Ancillary;
use manylane_sys::mmsg::Message;
use manylane_wire::datagram::Datagram as Headers;

use super::RecvSummary;
#[cfg(test)]
use super::faults::DatagramCopy;
use super::frames::Frames;
use super::messages::Messages;

/// The ECN codepoint: the two low bits of the type of service (RFC 3168, section 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ecn {
    /// Not ECN-capable.
    NotEct,
    /// ECT(1), as L4S uses it (RFC 9331).
    Ect1,
    /// ECT(0).
    Ect0,
    /// CE: congestion was experienced on the way.
    Ce,
}

impl Ecn {
    fn from_tos(tos: u8) -> Self {
        match tos & 3 {
            0 => Self::NotEct,
            1 => Self::Ect1,
            2 => Self::Ect0,
            _ => Self::Ce,
        }
    }
}

/// Ancillary data of a message that came without control messages.
static NO_ANCILLARY: Ancillary = Ancillary { local: None, tos: None, segment_size: 0, timestamp: None };

/// The result of one receive call: an iterator over its datagrams.
pub struct Batch<'a> {
    origin: Origin<'a>,
    /// Bound address of the socket: the local address of datagrams without one of their own.
    bound_addr: &'a SocketAddr,
    messages: usize,
    datagrams: usize,
    next: usize,
    /// The remainder of the GRO message that is being split.
    gro_rest: Option<(Message<'a>, &'a Ancillary)>,
}

/// Location of a batch's bytes.
#[derive(Clone, Copy)]
pub(crate) enum Origin<'a> {
    /// In buffers of a kernel socket, with the ancillary data of each message that has control
    /// messages.
    Messages(Messages<'a>, &'a [Ancillary]),
    /// In frames of a queue.
    Frames(Frames<'a>),
    /// In copies of datagrams, some of them with faults.
    #[cfg(test)]
    Copies(&'a [DatagramCopy]),
}

impl<'a> Batch<'a> {
    #[inline]
    pub(crate) fn new(origin: Origin<'a>, bound_addr: &'a SocketAddr, summary: RecvSummary) -> Self {
        let RecvSummary { messages, datagrams, .. } = summary;
        Self { origin, bound_addr, messages, datagrams, next: 0, gro_rest: None }
    }

    /// Datagrams that the iterator has not returned yet.
    #[must_use]
    pub fn len(&self) -> usize {
        self.datagrams
    }

    /// True if there are none left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.datagrams == 0
    }

    /// Messages that carried the batch; fewer than datagrams if GRO merged some.
    #[must_use]
    pub fn messages(&self) -> usize {
        self.messages
    }

    /// The next datagram of a GRO message.
    fn next_segment(&mut self) -> Option<Datagram<'a>> {
        let (message, ancillary) = self.gro_rest.as_mut()?;
        self.datagrams -= 1;
        let Message { data, full_len, peer, .. } = *message;
        let meta = RecvMeta::Message { peer, ancillary };
        let segment = usize::from(ancillary.segment_size);
        let (payload, full_len) = match data.split_at_checked(segment) {
            Some((payload, rest)) if !rest.is_empty() => {
                (message.data, message.full_len) = (rest, full_len - segment);
                (payload, segment)
            }
            _ => {
                self.gro_rest = None;
                (data, full_len)
            }
        };
        Some(Datagram { payload, full_len, meta, bound_addr: self.bound_addr })
    }

    /// The next datagram of a batch of messages. A message without control messages is one
    /// datagram.
    #[inline]
    fn next_message(&mut self, ring: Messages<'a>, ancillary: &'a [Ancillary]) -> Option<Datagram<'a>> {
        if self.gro_rest.is_some() {
            return self.next_segment();
        }
        if self.next == self.messages {
            return None;
        }
        let message = ring.message(self.next);
        if message.has_ancillary() {
            return self.next_with_ancillary(message, ancillary);
        }
        let Message { data, full_len, peer, .. } = message;
        self.next += 1;
        self.datagrams -= 1;
        let meta = RecvMeta::Message { peer, ancillary: &NO_ANCILLARY };
        Some(Datagram { payload: data, full_len, meta, bound_addr: self.bound_addr })
    }

    /// The datagram of a message with ancillary data, or the first one of a GRO message.
    fn next_with_ancillary(
        &mut self,
        message: Message<'a>,
        ancillary: &'a [Ancillary],
    ) -> Option<Datagram<'a>> {
        let Message { data, full_len, peer, .. } = message;
        let ancillary = ancillary.get(self.next).unwrap_or(&NO_ANCILLARY);
        self.next += 1;
        let segment = usize::from(ancillary.segment_size);
        if segment == 0 || data.len() <= segment {
            self.datagrams -= 1;
            let meta = RecvMeta::Message { peer, ancillary };
            return Some(Datagram { payload: data, full_len, meta, bound_addr: self.bound_addr });
        }
        self.gro_rest = Some((message, ancillary));
        self.next_segment()
    }

    // Always inline: if the caller ignores the headers, the compiler then leaves out reading them.
    #[inline(always)]
    fn next_frame(&mut self, frames: Frames<'a>) -> Option<Datagram<'a>> {
        let packet = frames.next_valid(self.next)?;
        self.next = packet.index + 1;
        self.datagrams -= 1;
        let headers = frames.headers(&packet);
        Some(Datagram {
            payload: packet.payload(),
            full_len: headers.len.into(),
            meta: RecvMeta::Frame { index: packet.index as u32, headers, ecn: frames.ecn },
            bound_addr: self.bound_addr,
        })
    }

    #[cfg(test)]
    fn next_copy(&mut self, copies: &'a [DatagramCopy]) -> Option<Datagram<'a>> {
        if self.datagrams == 0 {
            return None;
        }
        let DatagramCopy { payload, full_len, peer, ancillary } = &copies[self.next];
        self.next += 1;
        self.datagrams -= 1;
        let meta = RecvMeta::Message { peer, ancillary };
        Some(Datagram { payload, full_len: *full_len, meta, bound_addr: self.bound_addr })
    }
}

impl<'a> Iterator for Batch<'a> {
    type Item = Datagram<'a>;

    #[inline(always)]
    fn next(&mut self) -> Option<Datagram<'a>> {
        match self.origin {
            Origin::Messages(ring, ancillary) => self.next_message(ring, ancillary),
            Origin::Frames(frames) => self.next_frame(frames),
            #[cfg(test)]
            Origin::Copies(copies) => self.next_copy(copies),
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.datagrams, Some(self.datagrams))
    }
}

impl ExactSizeIterator for Batch<'_> {}

/// One received datagram.
#[derive(Clone, Copy, Debug)]
pub struct Datagram<'a> {
    payload: &'a [u8],
    full_len: usize,
    meta: RecvMeta<'a>,
    bound_addr: &'a SocketAddr,
}

/// Metadata of a received datagram, in the form in which it arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RecvMeta<'a> {
    /// From the kernel socket.
    Message {
        /// Source address.
        peer: &'a SockAddr,
        /// Ancillary data.
        ancillary: &'a Ancillary,
    },
    /// In a frame of a queue.
    Frame {
        /// Index in the batch.
        index: u32,
        /// The parsed headers. By value, because a reply may overwrite those of the frame.
        headers: Headers,
        /// True if the application wants ECN.
        ecn: bool,
    },
}

impl<'a> Datagram<'a> {
    /// The payload, valid as long as the batch.
    #[inline]
    #[must_use]
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }

    /// True if the payload was truncated to the size of the buffer.
    #[must_use]
    pub fn is_truncated(&self) -> bool {
        self.full_len > self.payload.len()
    }

    /// Bytes of the payload as sent; more than were received if it was truncated.
    #[must_use]
    pub fn full_len(&self) -> usize {
        self.full_len
    }

    /// Source address. With a dual-stack socket, an IPv4 peer is a v4-mapped IPv6 address.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        match self.meta {
            // The kernel fills in the address of every datagram of an IP socket.
            RecvMeta::Message { peer, .. } => {
                peer.to_std().unwrap_or(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0))
            }
            RecvMeta::Frame { headers, .. } => self.in_socket_family(headers.source()),
        }
    }

    /// The local address that the datagram was sent to, and that a reply is sent from. For a
    /// broadcast it is the address of the receiving interface. A link-local address has that
    /// interface as its scope.
    #[must_use]
    pub fn local(&self) -> SocketAddr {
        let port = self.bound_addr.port();
        match self.meta {
            RecvMeta::Message { ancillary, .. } => match ancillary.local {
                Some(Source { ip: IpAddr::V6(ip), interface }) => {
                    SocketAddrV6::new(ip, port, 0, interface).into()
                }
                Some(source) => SocketAddr::new(source.ip, port),
                None => *self.bound_addr,
            },
            // Never link-local: the companion receives those.
            RecvMeta::Frame { headers, .. } => {
                SocketAddr::new(self.in_socket_family(headers.destination()).ip(), port)
            }
        }
    }

    /// The ECN codepoint; none unless [enabled](crate::Builder::ecn).
    #[must_use]
    pub fn ecn(&self) -> Option<Ecn> {
        let tos = match self.meta {
            RecvMeta::Message { ancillary, .. } => ancillary.tos,
            RecvMeta::Frame { headers, ecn, .. } => ecn.then_some(headers.traffic_class),
        };
        tos.map(Ecn::from_tos)
    }

    /// Time at which the kernel received the packet; none unless enabled. All datagrams of a GRO
    /// message have that of the first one.
    #[must_use]
    pub fn timestamp(&self) -> Option<SystemTime> {
        match self.meta {
            RecvMeta::Message { ancillary, .. } => ancillary.timestamp,
            RecvMeta::Frame { .. } => None,
        }
    }

    #[inline]
    pub(crate) fn meta(&self) -> &RecvMeta<'a> {
        &self.meta
    }

    /// The peer as a kernel address.
    #[inline]
    pub(crate) fn raw_peer(&self) -> SockAddr {
        match self.meta {
            RecvMeta::Message { peer, .. } => *peer,
            RecvMeta::Frame { .. } => self.peer().into(),
        }
    }

    /// Source address for a reply, if the kernel would not select it. Multicast addresses cannot
    /// be one.
    #[inline]
    pub(crate) fn source(&self) -> Option<Source> {
        let source = match self.meta {
            RecvMeta::Message { ancillary, .. } => ancillary.local,
            RecvMeta::Frame { headers, .. } => {
                Some(Source { ip: self.in_socket_family(headers.destination()).ip(), interface: 0 })
            }
        };
        source.filter(|source| !source.ip.is_multicast())
    }

    /// Converts an address of a frame to the socket's family.
    fn in_socket_family(&self, addr: SocketAddr) -> SocketAddr {
        in_socket_family(addr, self.bound_addr.is_ipv6())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ecn_is_the_low_bits() {
        assert_eq!(Ecn::from_tos(0xb8), Ecn::NotEct);
        assert_eq!(Ecn::from_tos(0xb9), Ecn::Ect1);
        assert_eq!(Ecn::from_tos(0x02), Ecn::Ect0);
        assert_eq!(Ecn::from_tos(0xff), Ecn::Ce);
    }
}
