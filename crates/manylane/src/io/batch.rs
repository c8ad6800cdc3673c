//! What a receive brought: a batch of datagrams in the lane's buffers.
//!
//! The buffers belong to the lane; a batch borrows them, and with it every datagram and payload.
//! The next receive needs the lane back, so that nothing can be read after it was overwritten. A
//! GRO train is handed out as single datagrams, each a slice of the one buffer.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6};
use std::time::SystemTime;

use manylane_sys::addr::{SockAddr, Source};
use manylane_sys::control::Ancillary;
use manylane_sys::mmsg::Message;

use super::RecvSummary;
use super::frames::{Frames, Meta};
use super::messages::Messages;

/// Explicit congestion notification: the two low bits of the type of service (RFC 3168, section 5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ecn {
    /// The sender does not take part.
    NotEct,
    /// ECT(1), as L4S uses it (RFC 9331).
    Ect1,
    /// ECT(0).
    Ect0,
    /// A router on the way is congested.
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

/// What is said of a message of which the kernel says nothing.
static NO_ANCILLARY: Ancillary = Ancillary { local: None, tos: None, segment_size: 0, timestamp: None };

/// What one receive call brought, as an iterator over its datagrams.
pub struct Batch<'a> {
    origin: Origin<'a>,
    /// Where the socket is bound: the local address of datagrams of which the kernel does not say
    /// it.
    bound_addr: &'a SocketAddr,
    messages: usize,
    datagrams: usize,
    next: usize,
    gro_message: Option<GroMessage<'a>>,
}

/// Where the bytes of a batch are.
#[derive(Clone, Copy)]
pub(crate) enum Origin<'a> {
    /// In buffers of a kernel socket, with what the kernel said of each message that has control
    /// messages.
    Messages(Messages<'a>, &'a [Ancillary]),
    /// In frames of a queue.
    Frames(Frames<'a>),
}

/// What is left of the train that is being handed out.
struct GroMessage<'a> {
    remaining: &'a [u8],
    segment_size: usize,
    /// Bytes at its end that did not fit into the buffer.
    truncated: usize,
    peer: &'a SockAddr,
    ancillary: &'a Ancillary,
}

impl<'a> Batch<'a> {
    pub(crate) fn new(origin: Origin<'a>, bound_addr: &'a SocketAddr, taken: RecvSummary) -> Self {
        let RecvSummary { messages, datagrams, .. } = taken;
        Self { origin, bound_addr, messages, datagrams, next: 0, gro_message: None }
    }

    /// Datagrams that have not been handed out yet.
    #[must_use]
    pub fn len(&self) -> usize {
        self.datagrams
    }

    /// True if there are none (left).
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.datagrams == 0
    }

    /// Messages that the batch came as; fewer than datagrams where some were trains.
    #[must_use]
    pub fn messages(&self) -> usize {
        self.messages
    }

    /// The next datagram of a train.
    fn next_segment(&mut self) -> Option<Datagram<'a>> {
        let train = self.gro_message.as_mut()?;
        self.datagrams -= 1;
        let (peer, said) = (train.peer, train.ancillary);
        let (payload, full_len) = match train.remaining.split_at_checked(train.segment_size) {
            Some((payload, rest)) if !rest.is_empty() => {
                train.remaining = rest;
                (payload, payload.len())
            }
            _ => {
                let (payload, cut) = (train.remaining, train.truncated);
                self.gro_message = None;
                (payload, payload.len() + cut)
            }
        };
        Some(Datagram {
            payload,
            full_len,
            meta: DatagramMeta::Message { peer, said },
            bound_addr: self.bound_addr,
        })
    }

    /// The next datagram of messages: a message of which the kernel says nothing is one.
    #[inline]
    fn next_message(&mut self, ring: Messages<'a>, said: &'a [Ancillary]) -> Option<Datagram<'a>> {
        if self.gro_message.is_some() {
            return self.next_segment();
        }
        if self.next == self.messages {
            return None;
        }
        let message = ring.message(self.next);
        if message.has_ancillary() {
            return self.next_with_ancillary(message, said);
        }
        let Message { data, full_len, peer, .. } = message;
        self.next += 1;
        self.datagrams -= 1;
        let about = DatagramMeta::Message { peer, said: &NO_ANCILLARY };
        Some(Datagram { payload: data, full_len, meta: about, bound_addr: self.bound_addr })
    }

    /// The next datagram, or the first one of the next train.
    fn next_with_ancillary(&mut self, message: Message<'a>, said: &'a [Ancillary]) -> Option<Datagram<'a>> {
        let Message { data, full_len, peer, .. } = message;
        let said = said.get(self.next).unwrap_or(&NO_ANCILLARY);
        self.next += 1;
        let segment = usize::from(said.segment_size);
        if segment == 0 || data.len() <= segment {
            self.datagrams -= 1;
            let about = DatagramMeta::Message { peer, said };
            return Some(Datagram { payload: data, full_len, meta: about, bound_addr: self.bound_addr });
        }
        self.gro_message = Some(GroMessage {
            remaining: data,
            segment_size: segment,
            truncated: full_len - data.len(),
            peer,
            ancillary: said,
        });
        self.next_segment()
    }

    // Always: what it reads of headers is left out where the caller does not look at it, which
    // shows only there.
    #[inline(always)]
    fn next_frame(&mut self, frames: Frames<'a>) -> Option<Datagram<'a>> {
        let packet = frames.next_valid(self.next)?;
        self.next = packet.index + 1;
        self.datagrams -= 1;
        let meta = frames.meta(&packet);
        Some(Datagram {
            payload: packet.payload(),
            full_len: meta.datagram.len.into(),
            meta: DatagramMeta::Frame(meta, frames.ecn),
            bound_addr: self.bound_addr,
        })
    }
}

impl<'a> Iterator for Batch<'a> {
    type Item = Datagram<'a>;

    #[inline(always)]
    fn next(&mut self) -> Option<Datagram<'a>> {
        match self.origin {
            Origin::Messages(ring, said) => self.next_message(ring, said),
            Origin::Frames(frames) => self.next_frame(frames),
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
    meta: DatagramMeta<'a>,
    bound_addr: &'a SocketAddr,
}

/// What is known of a datagram, in the form in which it came.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DatagramMeta<'a> {
    /// The kernel's words.
    Message {
        /// Who sent it.
        peer: &'a SockAddr,
        /// What the control messages say.
        said: &'a Ancillary,
    },
    /// What its headers say, and whether the application wants to know ECN. By value: a reply may
    /// be written over them.
    Frame(Meta, bool),
}

impl<'a> Datagram<'a> {
    /// The payload, as long as the batch.
    #[inline]
    #[must_use]
    pub fn payload(&self) -> &'a [u8] {
        self.payload
    }

    /// Whether the payload was cut off at the size of the buffer.
    #[must_use]
    pub fn is_truncated(&self) -> bool {
        self.full_len > self.payload.len()
    }

    /// Bytes that were sent: more than the payload has if it was cut off.
    #[must_use]
    pub fn full_len(&self) -> usize {
        self.full_len
    }

    /// Who sent it. An IPv4 peer of a dual-stack socket is a v4-mapped IPv6 address.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        match self.meta {
            // The kernel fills the address of every datagram of an IP socket.
            DatagramMeta::Message { peer, .. } => {
                peer.to_std().unwrap_or(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0))
            }
            DatagramMeta::Frame(Meta { datagram, .. }, _) => self.in_socket_family(datagram.source()),
        }
    }

    /// The local address it was sent to, from which a reply leaves. For a broadcast it is the
    /// address of the interface that it came in on. A link-local one has that interface as its
    /// scope.
    #[must_use]
    pub fn local(&self) -> SocketAddr {
        let port = self.bound_addr.port();
        match self.meta {
            DatagramMeta::Message { said, .. } => match said.local {
                Some(Source { ip: IpAddr::V6(ip), interface }) => {
                    SocketAddrV6::new(ip, port, 0, interface).into()
                }
                Some(source) => SocketAddr::new(source.ip, port),
                None => *self.bound_addr,
            },
            // Never a link-local one: those are the companion's.
            DatagramMeta::Frame(meta, _) => {
                SocketAddr::new(self.in_socket_family(meta.datagram.destination()).ip(), port)
            }
        }
    }

    /// Explicit congestion notification; none unless [asked for](crate::Builder::ecn).
    #[must_use]
    pub fn ecn(&self) -> Option<Ecn> {
        let tos = match self.meta {
            DatagramMeta::Message { said, .. } => said.tos,
            DatagramMeta::Frame(meta, ecn) => ecn.then_some(meta.datagram.traffic_class),
        };
        tos.map(Ecn::from_tos)
    }

    /// When the kernel took the packet; none unless asked for. All datagrams of a train have the
    /// first one's.
    #[must_use]
    pub fn timestamp(&self) -> Option<SystemTime> {
        match self.meta {
            DatagramMeta::Message { said, .. } => said.timestamp,
            DatagramMeta::Frame(..) => None,
        }
    }

    #[inline]
    pub(crate) fn meta(&self) -> &DatagramMeta<'a> {
        &self.meta
    }

    /// The peer as the kernel wants it.
    #[inline]
    pub(crate) fn raw_peer(&self) -> SockAddr {
        match self.meta {
            DatagramMeta::Message { peer, .. } => *peer,
            DatagramMeta::Frame(..) => self.peer().into(),
        }
    }

    /// Where a reply has to leave from, if the kernel would not know: multicast addresses cannot be
    /// one.
    #[inline]
    pub(crate) fn source(&self) -> Option<Source> {
        let source = match self.meta {
            DatagramMeta::Message { said, .. } => said.local,
            DatagramMeta::Frame(meta, _) => {
                Some(Source { ip: self.in_socket_family(meta.datagram.destination()).ip(), interface: 0 })
            }
        };
        source.filter(|source| !source.ip.is_multicast())
    }

    /// An address of a frame as the socket's family writes it.
    fn in_socket_family(&self, addr: SocketAddr) -> SocketAddr {
        match addr.ip() {
            IpAddr::V4(ip) if self.bound_addr.is_ipv6() => (ip.to_ipv6_mapped(), addr.port()).into(),
            _ => addr,
        }
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
