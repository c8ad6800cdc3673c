//! Netlink queries of the doctor: generic netlink (ethtool, devices), links, addresses, routes and
//! sockets.
//!
//! A request is a header and attributes. A reply is messages, each split into a body and
//! attributes. A truncated message ends the parsing, and nothing beyond it is read. Only the
//! wanted attributes are parsed, so that a device is not lost if the kernel reports more, or in
//! another form.
//!
//! This client is for commands that run once: it waits for each reply, works with every netlink
//! protocol, and reports the kernel's message for an error. The library has its own
//! (`io/xdp/route/netlink.rs`), which never waits and follows events: the two share only the split
//! of a datagram into messages, six lines that the library would have to export.

use std::io;

use netlink_packet_core::{
    DefaultNla, Emitable, NLA_F_NESTED, NLA_HEADER_SIZE, NLM_F_ACK, NLM_F_ACK_TLVS, NLM_F_CAPPED, NLM_F_DUMP,
    NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkBuffer, NetlinkHeader, NlasIterator,
};
use netlink_sys::{Socket, SocketAddr};

/// Length of a message's header.
const HEADER_LEN: usize = 16;

/// Flags of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestKind {
    /// One answer.
    Get,
    /// A dump of all objects.
    Dump,
    /// An acknowledgement.
    Ack,
}

/// Attributes to send, one after the other.
#[derive(Clone, Debug, Default)]
pub(crate) struct Attrs(Vec<DefaultNla>);

impl Attrs {
    pub(crate) fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        self.0.push(DefaultNla::new(kind, value.to_vec()));
        self
    }

    pub(crate) fn u32(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    pub(crate) fn text(self, kind: u16, value: &str) -> Self {
        self.bytes(kind, &[value.as_bytes(), &[0]].concat())
    }

    pub(crate) fn nest(self, kind: u16, inner: &Attrs) -> Self {
        self.bytes(kind | NLA_F_NESTED, &inner.to_bytes())
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let attrs = self.0.as_slice();
        let mut bytes = vec![0; attrs.buffer_len()];
        attrs.emit(&mut bytes);
        bytes
    }
}

/// Received attributes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttrReader<'a>(&'a [u8]);

impl<'a> AttrReader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Each attribute with its kind.
    pub(crate) fn all(self) -> impl Iterator<Item = (u16, &'a [u8])> {
        NlasIterator::new(self.0).map_while(|attr| {
            let attr = attr.ok()?;
            let (kind, len) = (attr.kind(), usize::from(attr.length()));
            Some((kind, attr.into_inner().get(NLA_HEADER_SIZE..len)?))
        })
    }

    pub(crate) fn find(self, kind: u16) -> Option<&'a [u8]> {
        self.all().find_map(|(found, value)| (found == kind).then_some(value))
    }

    pub(crate) fn nest(self, kind: u16) -> Option<AttrReader<'a>> {
        self.find(kind).map(AttrReader)
    }

    pub(crate) fn u8(self, kind: u16) -> Option<u8> {
        self.find(kind)?.first().copied()
    }

    pub(crate) fn u32(self, kind: u16) -> Option<u32> {
        u32_at(self.find(kind)?, 0)
    }

    pub(crate) fn u64(self, kind: u16) -> Option<u64> {
        u64_at(self.find(kind)?, 0)
    }

    pub(crate) fn text(self, kind: u16) -> Option<String> {
        let bytes = self.find(kind)?;
        let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        Some(String::from_utf8_lossy(&bytes[..end]).into_owned())
    }
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// A connection to one part of the kernel, of the network namespace of the thread that opened it.
#[derive(Debug)]
pub(crate) struct NetlinkSocket {
    socket: Socket,
    sequence: u32,
}

impl NetlinkSocket {
    /// `protocol` is one of `netlink_sys::protocols`.
    pub(crate) fn open(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        // Error messages of the kernel, if it has them (Linux 4.12).
        let _ = socket.set_ext_ack(true);
        Ok(Self { socket, sequence: 0 })
    }

    /// Sends a request, and passes the body of each reply to `each`.
    pub(crate) fn request(
        &mut self,
        kind: u16,
        body: &[u8],
        want: RequestKind,
        mut each: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        self.sequence += 1;
        let mut header = NetlinkHeader::default();
        header.length = (HEADER_LEN + body.len()) as u32;
        header.message_type = kind;
        header.flags = NLM_F_REQUEST
            | match want {
                RequestKind::Dump => NLM_F_DUMP,
                RequestKind::Ack => NLM_F_ACK,
                RequestKind::Get => 0,
            };
        header.sequence_number = self.sequence;
        let mut message = vec![0; HEADER_LEN];
        header.emit(&mut message);
        message.extend(body);
        self.socket.send(&message, 0)?;
        loop {
            let (datagram, _) = self.socket.recv_from_full()?;
            let ours = |message: &NetlinkBuffer<&[u8]>| message.sequence_number() == self.sequence;
            for message in messages(&datagram).filter(ours) {
                match message.message_type() {
                    NLMSG_DONE => return Ok(()),
                    NLMSG_ERROR => return parse_ack(&message),
                    _ => {
                        each(message.payload());
                        if want == RequestKind::Get {
                            return Ok(());
                        }
                    }
                }
            }
        }
    }
}

/// The messages in one datagram from the kernel.
fn messages(mut rest: &[u8]) -> impl Iterator<Item = NetlinkBuffer<&[u8]>> {
    std::iter::from_fn(move || {
        let message = NetlinkBuffer::new_checked(rest).ok()?;
        rest = rest.get((message.length() as usize).next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    })
}

/// The result in an acknowledgement: an error number, and a text if the kernel sent one.
fn parse_ack(message: &NetlinkBuffer<&[u8]>) -> io::Result<()> {
    const TEXT: u16 = 1;
    let body = message.payload();
    let code = u32_at(body, 0).unwrap_or(0) as i32;
    if code == 0 {
        return Ok(());
    }
    let err = io::Error::from_raw_os_error(code.wrapping_neg());
    // After the number: the header of the request, and its body unless it was truncated.
    let asked = u32_at(body, 4).unwrap_or(0) as usize;
    let skip = 4 + if message.flags() & NLM_F_CAPPED == 0 { asked.next_multiple_of(4) } else { HEADER_LEN };
    let text = (message.flags() & NLM_F_ACK_TLVS != 0)
        .then(|| AttrReader::new(body.get(skip..).unwrap_or_default()).text(TEXT))
        .flatten();
    Err(match text {
        Some(text) => io::Error::new(err.kind(), format!("{err}: {text}")),
        None => err,
    })
}

/// A family of generic netlink.
#[derive(Debug)]
pub(crate) struct Family {
    socket: NetlinkSocket,
    id: u16,
}

impl Family {
    /// Finds a family by its name.
    pub(crate) fn open(name: &str) -> io::Result<Self> {
        const CONTROL: u16 = 16;
        const GET_FAMILY: u8 = 3;
        const FAMILY_ID: u16 = 1;
        const FAMILY_NAME: u16 = 2;
        let mut family =
            Self { socket: NetlinkSocket::open(netlink_sys::protocols::NETLINK_GENERIC)?, id: CONTROL };
        let mut id = None;
        family.request(GET_FAMILY, &Attrs::default().text(FAMILY_NAME, name), RequestKind::Get, |attrs| {
            id = attrs.find(FAMILY_ID).and_then(|value| u16_at(value, 0));
        })?;
        family.id = id.ok_or(io::ErrorKind::NotFound)?;
        Ok(family)
    }

    /// Sends a request, and passes the attributes of each reply to `each`.
    pub(crate) fn request(
        &mut self,
        command: u8,
        attrs: &Attrs,
        want: RequestKind,
        mut each: impl FnMut(AttrReader<'_>),
    ) -> io::Result<()> {
        let body = [&[command, 1, 0, 0][..], &attrs.to_bytes()].concat();
        self.socket.request(self.id, &body, want, |answer| {
            each(AttrReader::new(answer.get(4..).unwrap_or_default()));
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn journal_entries_round_trip() {
        let inner = Attrs::default().text(2, "eth0").u32(1, 7);
        let attrs = Attrs::default().nest(1, &inner).bytes(9, &[1, 2, 3]).u32(4, 5);
        let bytes = attrs.to_bytes();
        let read = AttrReader::new(&bytes);
        assert_eq!(read.nest(1).unwrap().text(2).as_deref(), Some("eth0"));
        assert_eq!(read.nest(1).unwrap().u32(1), Some(7));
        assert_eq!((read.u32(4), read.find(9), read.u8(9)), (Some(5), Some(&[1, 2, 3][..]), Some(1)));
        assert_eq!((read.u64(4), read.u32(77)), (None, None));
    }

    #[test]
    fn truncated_attributes_end_the_walk() {
        let bytes = Attrs::default().u32(1, 1).u32(2, 2).to_bytes();
        for len in 0..bytes.len() {
            let read = AttrReader::new(&bytes[..len]);
            assert_eq!(read.all().count(), len / 8, "{len}");
        }
        // An attribute of length 0 would loop for ever.
        assert_eq!(AttrReader::new(&[0; 16]).all().count(), 0);
        for bytes in [[0; 32], [255; 32]] {
            assert_eq!((messages(&bytes).count(), AttrReader::new(&bytes).all().count()), (0, 0));
        }
    }

    #[test]
    fn netlink_queries_are_answered() {
        assert!(Family::open("nlctrl").is_ok());
        let err = Family::open("no-such-family").unwrap_err();
        assert_eq!(err.kind(), io::ErrorKind::NotFound);
    }
}
