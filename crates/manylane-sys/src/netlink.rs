//! Requests to the kernel by netlink, its replies, and its events (`netlink(7)`).
//!
//! Nothing here waits or needs a privilege: the kernel answers a request within the call that sends
//! it, and continues a dump within each receive. No length or number in a message is trusted: a
//! malformed message is an error, and a malformed attribute ends the iteration.

use std::io;
use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

pub use libc::{NETLINK_GENERIC, NETLINK_ROUTE, NETLINK_SOCK_DIAG, NLM_F_DUMP};
use libc::{NLM_F_ACK, NLM_F_ACK_TLVS, NLM_F_CAPPED, NLM_F_DUMP_INTR, NLM_F_REQUEST, c_int};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{self, AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::sock;

/// Requests and messages of linux/sock_diag.h.
pub const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// Size of `struct nlmsghdr`.
const HEADER_LEN: usize = 16;
/// Larger than any datagram of the kernel (at most 32 KiB, in a dump).
const DATAGRAM_SIZE_MAX: usize = 64 << 10;
/// Maximum number of datagrams of a reply, in case it has no end.
const DATAGRAMS_MAX: usize = 1 << 16;

/// A message from the kernel.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    /// Its type.
    pub kind: u16,
    /// `NLM_F_…`.
    pub flags: u16,
    /// Number of the request that it answers.
    pub sequence: u32,
    /// The bytes after the header.
    pub payload: &'a [u8],
}

/// The messages of a datagram. Ends at the first malformed one.
pub fn messages(mut rest: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let (message, behind) = split_message(rest)?;
        rest = behind;
        Some(message)
    })
}

/// True if a datagram consists of messages alone.
fn is_well_formed(mut rest: &[u8]) -> bool {
    while let Some((_, behind)) = split_message(rest) {
        rest = behind;
    }
    rest.is_empty()
}

/// The first message, and the bytes behind it; none if it is malformed.
fn split_message(bytes: &[u8]) -> Option<(Message<'_>, &[u8])> {
    let len = u32_at(bytes, 0)? as usize;
    let (kind, flags, sequence) = (u16_at(bytes, 4)?, u16_at(bytes, 6)?, u32_at(bytes, 8)?);
    let payload = bytes.get(HEADER_LEN..len)?;
    let behind = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    Some((Message { kind, flags, sequence, payload }, behind))
}

/// Attributes to send, one after the other.
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct Attrs(Vec<u8>);

#[allow(missing_docs, reason = "appends an attribute whose value has this type")]
impl Attrs {
    pub fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        self.0.extend((4 + value.len() as u16).to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub fn u32(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    pub fn text(self, kind: u16, value: &str) -> Self {
        self.bytes(kind, &[value.as_bytes(), &[0]].concat())
    }

    pub fn nest(self, kind: u16, inner: &Attrs) -> Self {
        self.bytes(kind | libc::NLA_F_NESTED as u16, &inner.0)
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// Received attributes.
#[derive(Clone, Copy, Debug)]
pub struct AttrReader<'a>(&'a [u8]);

#[allow(missing_docs, reason = "reads the first attribute of this kind as this type")]
impl<'a> AttrReader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The attributes that follow the first `header_len` bytes of a message.
    pub fn after(message: &'a [u8], header_len: usize) -> Self {
        Self(message.get(header_len..).unwrap_or_default())
    }

    /// Each attribute with its kind.
    pub fn all(self) -> impl Iterator<Item = (u16, &'a [u8])> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let len = usize::from(u16_at(rest, 0)?);
            let kind = u16_at(rest, 2)? & libc::NLA_TYPE_MASK as u16;
            let value = rest.get(4..len)?;
            rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
            Some((kind, value))
        })
    }

    pub fn find(self, kind: u16) -> Option<&'a [u8]> {
        self.all().find_map(|(found, value)| (found == kind).then_some(value))
    }

    pub fn nest(self, kind: u16) -> Option<AttrReader<'a>> {
        self.find(kind).map(AttrReader)
    }

    pub fn u8(self, kind: u16) -> Option<u8> {
        self.find(kind)?.first().copied()
    }

    pub fn u32(self, kind: u16) -> Option<u32> {
        u32_at(self.find(kind)?, 0)
    }

    pub fn u64(self, kind: u16) -> Option<u64> {
        u64_at(self.find(kind)?, 0)
    }

    pub fn text(self, kind: u16) -> Option<String> {
        let text = self.find(kind)?.split(|&byte| byte == 0).next()?;
        Some(String::from_utf8_lossy(text).into_owned())
    }
}

macro_rules! numbers {
    ($($name:ident: $type:ty;)*) => {$(
        /// The number at an offset, in the byte order of the machine.
        #[must_use]
        pub fn $name(bytes: &[u8], at: usize) -> Option<$type> {
            Some(<$type>::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
        }
    )*};
}

numbers! {
    u16_at: u16;
    u32_at: u32;
    u64_at: u64;
}

/// A connection to one part of the kernel, of the network namespace of the thread that opened it.
#[derive(Debug)]
pub struct NetlinkSocket {
    fd: OwnedFd,
    sequence: u32,
    /// Requests that are sent next.
    requests: Vec<u8>,
    buffer: Vec<u8>,
    pub(crate) datagrams_max: usize,
}

impl NetlinkSocket {
    /// Opens a socket of this protocol, such as [`NETLINK_ROUTE`].
    ///
    /// # Errors
    /// Those of opening a socket; `EAFNOSUPPORT` where netlink is not allowed.
    pub fn open(protocol: c_int) -> io::Result<Self> {
        let protocol = NonZeroU32::new(protocol as u32).map(Protocol::from_raw);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)?;
        net::bind(&fd, &SocketAddrNetlink::new(0, 0))?;
        // Optional: strict checks of requests (Linux 4.20).
        let _ = sock::set(fd.as_fd(), libc::SOL_NETLINK, libc::NETLINK_GET_STRICT_CHK, 1);
        let buffer = vec![0; DATAGRAM_SIZE_MAX];
        Ok(Self { fd, sequence: 0, requests: Vec::new(), buffer, datagrams_max: DATAGRAMS_MAX })
    }

    /// Asks for the texts of errors (Linux 4.12), for users to read: an [`io::Error`] with a text
    /// has no error number.
    pub fn enable_error_texts(&self) {
        // Without them, errors have numbers alone.
        let _ = sock::set(self.as_fd(), libc::SOL_NETLINK, libc::NETLINK_EXT_ACK, 1);
    }

    /// Subscribes to the events of a group.
    ///
    /// # Errors
    /// Those of `setsockopt(2)`.
    pub fn join(&self, group: u32) -> io::Result<()> {
        sock::set(self.as_fd(), libc::SOL_NETLINK, libc::NETLINK_ADD_MEMBERSHIP, group)
    }

    /// Appends a request to those that are sent next; returns its sequence number.
    pub fn queue(&mut self, kind: u16, flags: c_int, body: &[u8]) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        self.requests.extend(((HEADER_LEN + body.len()) as u32).to_ne_bytes());
        self.requests.extend(kind.to_ne_bytes());
        self.requests.extend(((NLM_F_REQUEST | flags) as u16).to_ne_bytes());
        self.requests.extend(self.sequence.to_ne_bytes());
        self.requests.extend([0; 4]);
        self.requests.extend(body);
        self.requests.resize(self.requests.len().next_multiple_of(4), 0);
        self.sequence
    }

    /// Sends the queued requests.
    ///
    /// # Errors
    /// Those of `send(2)`.
    pub fn send(&mut self) -> io::Result<()> {
        let sent = net::send(&self.fd, &self.requests, SendFlags::empty());
        self.requests.clear();
        Ok(sent.map(drop)?)
    }

    /// The messages of the next datagram from the kernel; none if there is none.
    ///
    /// # Errors
    /// Those of `recv(2)` except `EINTR`; `ENOBUFS` if messages were lost, `EBADMSG` if one is
    /// malformed.
    pub fn receive(&mut self) -> io::Result<Option<impl Iterator<Item = Message<'_>>>> {
        // A receive that continues a dump may be interrupted. The next one then continues it.
        let receive = || net::recvfrom(&self.fd, &mut self.buffer[..], RecvFlags::TRUNC);
        let (len, whole, from) = match retry_on_intr(receive) {
            Err(Errno::AGAIN) => return Ok(None),
            received => received?,
        };
        if whole > len {
            return Err(Errno::NOBUFS.into());
        }
        // Processes with CAP_NET_ADMIN can write to this socket, too: ignore them.
        let sender = from.and_then(|from| SocketAddrNetlink::try_from(from).ok());
        let is_kernel = sender.is_some_and(|sender| sender.pid() == 0);
        let datagram = &self.buffer[..if is_kernel { len } else { 0 }];
        if !is_well_formed(datagram) {
            return Err(Errno::BADMSG.into());
        }
        Ok(Some(messages(datagram)))
    }

    /// Sends one request, and passes the type and payload of each reply to `each`. With
    /// [`NLM_F_DUMP`] it is for all objects; false if some changed meanwhile, so that the dump may
    /// be inconsistent.
    ///
    /// # Errors
    /// The kernel's answer to the request; errors of sending and receiving; an error if the reply
    /// has no end.
    pub fn request(
        &mut self,
        kind: u16,
        flags: c_int,
        body: &[u8],
        mut each: impl FnMut(u16, &[u8]),
    ) -> io::Result<bool> {
        // Replies that an earlier request left.
        for _ in 0..self.datagrams_max {
            if matches!(self.receive(), Ok(None)) {
                break;
            }
        }
        let sequence = self.queue(kind, flags | NLM_F_ACK, body);
        self.send()?;
        let mut is_consistent = true;
        for _ in 0..self.datagrams_max {
            let Some(messages) = self.receive()? else {
                return Err(io::Error::other("the netlink reply does not end"));
            };
            for message in messages.filter(|message| message.sequence == sequence) {
                is_consistent &= c_int::from(message.flags) & NLM_F_DUMP_INTR == 0;
                match c_int::from(message.kind) {
                    libc::NLMSG_DONE | libc::NLMSG_ERROR => {
                        return parse_end(&message).map(|()| is_consistent);
                    }
                    _ => each(message.kind, message.payload),
                }
            }
        }
        Err(io::Error::other(format!("the netlink reply has more than {} datagrams", self.datagrams_max)))
    }
}

impl AsFd for NetlinkSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The result at the end of a reply: an error number, and a text if one was asked for.
fn parse_end(message: &Message<'_>) -> io::Result<()> {
    const TEXT: u16 = 1;
    let (body, flags) = (message.payload, c_int::from(message.flags));
    let code = u32_at(body, 0).unwrap_or(0) as i32;
    if code >= 0 {
        return Ok(());
    }
    let err = io::Error::from_raw_os_error(code.wrapping_neg());
    // After the number of an error: the header of the request, and its body unless it was
    // truncated.
    let asked = u32_at(body, 4).unwrap_or(0) as usize;
    let skip = match c_int::from(message.kind) {
        libc::NLMSG_DONE => 4,
        _ if flags & NLM_F_CAPPED == 0 => 4 + asked.next_multiple_of(4),
        _ => 4 + HEADER_LEN,
    };
    match AttrReader::after(body, skip).text(TEXT).filter(|_| flags & NLM_F_ACK_TLVS != 0) {
        Some(text) => Err(io::Error::new(err.kind(), format!("{err}: {text}"))),
        None => Err(err),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u16, body: &[u8]) -> Vec<u8> {
        let len = (HEADER_LEN + body.len()) as u32;
        let head = [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), &[0; 10]].concat();
        [&head[..], body].concat()
    }

    #[test]
    fn attributes_are_read_as_they_were_written() {
        let inner = Attrs::default().text(2, "eth0").u32(1, 7);
        let attrs = Attrs::default().nest(1, &inner).bytes(9, &[1, 2, 3]).u32(4, 5);
        let read = AttrReader::new(attrs.as_bytes());
        assert_eq!(read.nest(1).unwrap().text(2).as_deref(), Some("eth0"));
        assert_eq!(read.nest(1).unwrap().u32(1), Some(7));
        assert_eq!((read.u32(4), read.find(9), read.u8(9)), (Some(5), Some(&[1, 2, 3][..]), Some(1)));
        assert_eq!((read.u64(4), read.u32(77)), (None, None));
    }

    #[test]
    fn truncated_messages_and_attributes_end_the_iteration() {
        let attrs = Attrs::default().u32(1, 1).u32(2, 2);
        for len in 0..attrs.as_bytes().len() {
            assert_eq!(AttrReader::new(&attrs.as_bytes()[..len]).all().count(), len / 8, "{len}");
        }
        let whole = [message(20, &[7; 8]), message(21, &[8; 4])].concat();
        let found: Vec<_> = messages(&whole).map(|message| (message.kind, message.payload)).collect();
        assert_eq!(found, [(20, &[7; 8][..]), (21, &[8; 4])]);
        for len in 0..whole.len() {
            assert_eq!(messages(&whole[..len]).count(), usize::from(len >= 24), "{len}");
            assert_eq!(is_well_formed(&whole[..len]), [0, 24].contains(&len), "{len}");
        }
        // Wrong lengths: shorter than their content, or zero, which would loop for ever.
        for lie in 0..whole.len() as u32 {
            let mut bytes = whole.clone();
            bytes[..4].copy_from_slice(&lie.to_ne_bytes());
            assert!(messages(&bytes).count() <= 2);
            assert!(AttrReader::new(&bytes).all().count() <= whole.len() / 4);
        }
        assert!(is_well_formed(&whole) && is_well_formed(&message(20, &[7; 5])), "with and without padding");
        for bytes in [[0; 32], [255; 32]] {
            assert!(!is_well_formed(&bytes));
            assert_eq!((messages(&bytes).count(), AttrReader::new(&bytes).all().count()), (0, 0));
        }
    }

    #[test]
    fn the_end_of_a_reply_has_the_error() {
        let end = |kind: c_int, flags: c_int, body: &[u8]| {
            parse_end(&Message { kind: kind as u16, flags: flags as u16, sequence: 1, payload: body })
        };
        let code = (-libc::ENOENT).to_ne_bytes();
        assert!(end(libc::NLMSG_ERROR, 0, &[0; 20]).is_ok() && end(libc::NLMSG_DONE, 0, &[]).is_ok());
        for kind in [libc::NLMSG_ERROR, libc::NLMSG_DONE] {
            assert_eq!(end(kind, 0, &code).unwrap_err().raw_os_error(), Some(libc::ENOENT));
        }
        let text = Attrs::default().text(1, "no such thing");
        let body = [&code[..], &message(7, &[]), text.as_bytes()].concat();
        for flags in [NLM_F_ACK_TLVS, NLM_F_ACK_TLVS | NLM_F_CAPPED] {
            let err = end(libc::NLMSG_ERROR, flags, &body).unwrap_err();
            assert!(err.to_string().ends_with(": no such thing"), "{err}");
        }
    }

    #[test]
    #[cfg(not(miri))]
    fn errors_of_the_kernel_keep_their_numbers() {
        const GET_LINK: u16 = 18;
        // `struct ifinfomsg` with the index of no device, and a type, which is an error with a text
        // since Linux 4.20.
        let mut body = [0; 16];
        body[2] = 1;
        body[4..8].copy_from_slice(&i32::MAX.to_ne_bytes());
        let mut socket = NetlinkSocket::open(NETLINK_ROUTE).unwrap();
        let err = socket.request(GET_LINK, 0, &body, |_, _| {}).unwrap_err();
        assert!(matches!(err.raw_os_error(), Some(libc::EINVAL | libc::ENODEV)), "{err}");
        socket.datagrams_max = 0;
        let err = socket.request(GET_LINK, 0, &body, |_, _| {}).unwrap_err();
        assert!(err.to_string().ends_with("has more than 0 datagrams"), "{err}");
    }
}
