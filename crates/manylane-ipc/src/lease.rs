//! Messages by which one process leases queues of devices to another. Some of them carry
//! descriptors. This is the Rust side of `abi/manylane_lease.h`.
//!
//! ```text
//!   the library                                          the lessor
//!   connects, by the name in the environment ──►  asks the kernel for its peer; the connection is the lease
//!   Request: the secret in the environment, the program's UDP socket ──►  asks the kernel where the socket is bound
//!                                     ◄── Granted, memory of next hops; or Refused
//!                                     ◄── Queue for each queue, with its descriptors
//!   Open, when a thread receives ──►  the port is entered in the XDP programs
//!                                     ◄── Opened, or Refused
//!   Close, before the socket is plain ──►  the port is removed; no frame is in flight
//!                                     ◄── Closed
//! ```
//!
//! Each message but Queue is sent at most once, so a reply names its command by its kind. A thread
//! that gave up or ended leaves a reply unread: the next command skips it.
//!
//! Every process that inherited the socket by a fork has the client's end of the lease, too. When
//! the last of these ends is closed, or its process dies, the lessor sees the end of the connection
//! and takes the queues back. The lessor's end is its own: the other side cannot make it blocking.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use manylane_sys::unix_socket;
use manylane_sys::xsk::QueueParams;

/// The environment variable with the lessor's [`LeaseToken`].
pub const TOKEN_ENV_VAR: &str = "MANYLANE_LEASE_SOCKET";
/// Maximum number of queues of a lease.
pub const QUEUES_MAX: usize = 32;
/// Words of a message.
const MESSAGE_WORDS: usize = 9;
const MESSAGE_BYTES: usize = MESSAGE_WORDS * 4;
/// First word of each message; another version of the library has another one.
const MAGIC: u32 = 0x334e_4c4d;

/// Second word of each message (`enum mll_kind`).
mod kind {
    pub(super) const REQUEST: u32 = 1;
    pub(super) const OPEN: u32 = 2;
    pub(super) const CLOSE: u32 = 3;
    pub(super) const GRANTED: u32 = 4;
    pub(super) const REFUSED: u32 = 5;
    pub(super) const QUEUE: u32 = 6;
    pub(super) const OPENED: u32 = 7;
    pub(super) const CLOSED: u32 = 8;
}

/// Identifies the lessor to programs, and programs started by the lessor to it.
#[derive(Clone, PartialEq, Eq)]
pub struct LeaseToken {
    name: String,
    /// Sent with [`Message::Request`].
    pub secret: Secret,
    /// The uid that does not identify a peer for certain. Read ahead, because `/proc` may not be
    /// available when this is used.
    ambiguous_uid: Option<u32>,
}

/// A random number that cannot be guessed.
pub type Secret = [u32; 4];

impl LeaseToken {
    /// Makes a new token.
    ///
    /// # Errors
    /// If there are no random numbers.
    pub fn new() -> io::Result<Self> {
        let mut bytes = [0; 24];
        File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        Self::parse(&text).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }

    /// Parses the output of [`Display`](fmt::Display).
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (name, secret) = text.split_at_checked(16)?;
        let is_hex = text.len() == 48 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let number = u128::from_str_radix(secret, 16).ok().filter(|_| is_hex)?;
        let secret = [96, 64, 32, 0].map(|shift| (number >> shift & 0xffff_ffff) as u32);
        let ambiguous_uid = unix_socket::ambiguous_uid();
        Some(Self { name: format!("manylane.lease.{name}"), secret, ambiguous_uid })
    }

    /// Listens for clients that have the token.
    ///
    /// # Errors
    /// As for [`unix_socket::listen`].
    pub fn listen(&self) -> io::Result<OwnedFd> {
        unix_socket::listen(&self.name)
    }

    /// Connects `socket` of the caller ([`socket`](unix_socket::socket)) to the lessor. Every
    /// operation waits for at most `timeout`. Does not use the heap.
    ///
    /// # Errors
    /// As for [`unix_socket::connect`]; `EPERM` if the listener is neither root nor, for certain,
    /// the user of this process: then the lessor is gone, and another process uses its name.
    pub fn connect(&self, socket: BorrowedFd<'_>, timeout: Duration) -> io::Result<()> {
        unix_socket::connect_socket(socket, &self.name, timeout)?;
        let uid = unix_socket::peer_cred(socket)?.uid;
        let is_own = uid == unix_socket::effective_uid() && self.ambiguous_uid != Some(uid);
        if uid == 0 || is_own {
            return Ok(());
        }
        Err(io::Error::from_raw_os_error(libc::EPERM))
    }
}

impl fmt::Display for LeaseToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name.rsplit('.').next().unwrap_or_default();
        let [a, b, c, d] = self.secret;
        write!(f, "{name}{a:08x}{b:08x}{c:08x}{d:08x}")
    }
}

impl fmt::Debug for LeaseToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ticket").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// Requests queues for the attached socket. Proves that the program has the [`LeaseToken`].
    Request(Secret),
    /// Start to redirect frames of the bound address to the queues.
    Open,
    /// Stop redirecting.
    Close,
    /// Reply to [`Request`](Self::Request): the number of queues that follow, with the memory of
    /// next hops attached.
    Granted(u32),
    /// Reply to [`Request`](Self::Request) or [`Open`](Self::Open): the error number.
    Refused(i32),
    /// A queue, with its socket and its memory attached.
    Queue(QueueParams),
    /// Reply to [`Open`](Self::Open).
    Opened,
    /// Reply to [`Close`](Self::Close).
    Closed,
}

impl Message {
    fn encode(self) -> [u32; MESSAGE_WORDS] {
        let (kind, body) = match self {
            Self::Request([first, second, third, fourth]) => {
                (kind::REQUEST, [first, second, third, fourth, 0, 0, 0])
            }
            Self::Open => (kind::OPEN, [0; 7]),
            Self::Close => (kind::CLOSE, [0; 7]),
            Self::Granted(count) => (kind::GRANTED, [count, 0, 0, 0, 0, 0, 0]),
            Self::Refused(errno) => (kind::REFUSED, [errno.cast_unsigned(), 0, 0, 0, 0, 0, 0]),
            Self::Queue(QueueParams {
                ifindex,
                queue,
                frames,
                umem_ring_size,
                ring_size,
                is_veth,
                lease_id,
            }) => {
                let (is_veth, lease_id) = (u32::from(is_veth), u32::from(lease_id));
                (kind::QUEUE, [ifindex, queue, frames, umem_ring_size, ring_size, is_veth, lease_id])
            }
            Self::Opened => (kind::OPENED, [0; 7]),
            Self::Closed => (kind::CLOSED, [0; 7]),
        };
        let mut words = [MAGIC, kind, 0, 0, 0, 0, 0, 0, 0];
        words[2..].copy_from_slice(&body);
        words
    }

    fn decode(words: [u32; MESSAGE_WORDS]) -> Option<Self> {
        let [MAGIC, kind, first, second, third, fourth, fifth, sixth, seventh] = words else { return None };
        Some(match kind {
            kind::REQUEST => Self::Request([first, second, third, fourth]),
            kind::OPEN => Self::Open,
            kind::CLOSE => Self::Close,
            kind::GRANTED => Self::Granted(first),
            kind::REFUSED => Self::Refused(first.cast_signed()),
            kind::QUEUE => Self::Queue(QueueParams {
                ifindex: first,
                queue: second,
                frames: third,
                umem_ring_size: fourth,
                ring_size: fifth,
                is_veth: sixth != 0,
                lease_id: u16::try_from(seventh).ok()?,
            }),
            kind::OPENED => Self::Opened,
            kind::CLOSED => Self::Closed,
            _ => return None,
        })
    }

    /// Sends the message with `fds`.
    ///
    /// # Errors
    /// As for [`unix_socket::send`].
    pub fn send(self, to: BorrowedFd<'_>, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut bytes = [0; MESSAGE_BYTES];
        for (to, word) in bytes.chunks_exact_mut(4).zip(self.encode()) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        unix_socket::send(to, &bytes, fds)
    }

    /// Receives a message, and its descriptors into `fds`; none if the other end is closed. Does
    /// not use the heap.
    ///
    /// # Errors
    /// As for [`unix_socket::recv`]; `InvalidData` for an invalid message.
    pub fn receive(from: BorrowedFd<'_>, fds: &mut Fds) -> io::Result<Option<Self>> {
        let mut bytes = [0; MESSAGE_BYTES];
        let len = unix_socket::recv_into(from, &mut bytes, fds)?;
        if len == 0 { Ok(None) } else { Self::from_bytes(&bytes, len).map(Some) }
    }

    /// Waits for the reply to this command, an [`Open`](Self::Open) or a [`Close`](Self::Close):
    /// true if the lessor did it, false if it refused it or has ended the lease. Skips the reply to
    /// an earlier command. Does not use the heap.
    ///
    /// # Errors
    /// As for [`receive`](Self::receive).
    pub fn await_reply(self, from: BorrowedFd<'_>) -> io::Result<bool> {
        // Before the reply to a Close, that to the Open may be queued.
        for _ in 0..2 {
            match (self, Self::receive(from, &mut Fds::default())?) {
                (Self::Open, Some(Self::Opened)) | (Self::Close, Some(Self::Closed)) => return Ok(true),
                (Self::Close, Some(Self::Opened | Self::Refused(_))) => {}
                _ => break,
            }
        }
        Ok(false)
    }

    /// Peeks at the next message, which stays queued, and whether it carries descriptors. None at
    /// the end of the connection. Never blocks ([`unix_socket::peek`]).
    ///
    /// # Errors
    /// As for [`unix_socket::peek`]; `EPROTO` for an invalid message.
    pub fn peek(from: BorrowedFd<'_>) -> io::Result<Option<(Self, bool)>> {
        let mut bytes = [0; MESSAGE_BYTES];
        let Some(peeked) = unix_socket::peek(from, &mut bytes)? else { return Ok(None) };
        Self::from_bytes(&bytes, peeked.len).map(|message| Some((message, peeked.has_fds)))
    }

    /// Receives a message without descriptors; none at the end of the connection. Never blocks: a
    /// message with descriptors stays queued.
    ///
    /// # Errors
    /// As for [`peek`](Self::peek); `EPROTO` if the message carries descriptors.
    pub fn receive_without_fds(from: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        match Self::peek(from)? {
            Some((message, false)) => unix_socket::discard(from).map(|()| Some(message)),
            Some((_, true)) => Err(io::Error::from_raw_os_error(libc::EPROTO)),
            None => Ok(None),
        }
    }

    /// Parses a message of `len` bytes.
    fn from_bytes(bytes: &[u8; MESSAGE_BYTES], len: usize) -> io::Result<Self> {
        let mut words = [0; MESSAGE_WORDS];
        for (word, from) in words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_ne_bytes([from[0], from[1], from[2], from[3]]);
        }
        let known = if len == bytes.len() { Self::decode(words) } else { None };
        known.ok_or_else(|| io::Error::from_raw_os_error(libc::EPROTO))
    }
}

/// Descriptors of a message.
pub type Fds = [Option<OwnedFd>; unix_socket::FDS_MAX];

#[cfg(all(test, not(miri)))]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        let ticket = LeaseToken::new().unwrap();
        let listener = ticket.listen().unwrap();
        let ours = unix_socket::socket().unwrap();
        ticket.connect(ours.as_fd(), Duration::from_secs(120)).unwrap();
        let theirs = unix_socket::accept(listener.as_fd()).unwrap();
        unix_socket::enable_peek(theirs.as_fd()).unwrap();
        (ours, theirs)
    }

    #[test]
    fn lease_tokens_round_trip_and_reject_other_text() {
        let ticket = LeaseToken::new().unwrap();
        let text = ticket.to_string();
        assert_eq!(LeaseToken::parse(&text), Some(ticket));
        assert!(!format!("{:?}", LeaseToken::parse(&text)).contains(&text[16..24]));
        for wrong in ["", "1000", &text[1..], &format!("{text}0"), &format!("+{}", &text[1..])] {
            assert_eq!(LeaseToken::parse(wrong), None, "{wrong}");
        }
        assert_eq!(LeaseToken::parse(&format!("{}+{}", &text[..16], &text[17..])), None);
    }

    const PARAMS: QueueParams = QueueParams {
        ifindex: 7,
        queue: 3,
        frames: 4096,
        umem_ring_size: 2048,
        ring_size: 1024,
        is_veth: true,
        lease_id: 65535,
    };

    #[test]
    fn lease_messages_have_the_layout_of_the_header() {
        const MLN3: u32 = 0x334e_4c4d;
        for (message, words) in [
            (Message::Request([9, 8, 7, 6]), [MLN3, 1, 9, 8, 7, 6, 0, 0, 0]),
            (Message::Open, [MLN3, 2, 0, 0, 0, 0, 0, 0, 0]),
            (Message::Close, [MLN3, 3, 0, 0, 0, 0, 0, 0, 0]),
            (Message::Granted(3), [MLN3, 4, 3, 0, 0, 0, 0, 0, 0]),
            (Message::Refused(-1), [MLN3, 5, u32::MAX, 0, 0, 0, 0, 0, 0]),
            (Message::Queue(PARAMS), [MLN3, 6, 7, 3, 4096, 2048, 1024, 1, 65535]),
            (Message::Opened, [MLN3, 7, 0, 0, 0, 0, 0, 0, 0]),
            (Message::Closed, [MLN3, 8, 0, 0, 0, 0, 0, 0, 0]),
        ] {
            assert_eq!((message.encode(), Message::decode(words)), (words, Some(message)));
        }
    }

    #[test]
    fn lease_messages_round_trip() {
        let (ours, theirs) = pair();
        let all = [
            Message::Request([1, 2, 3, u32::MAX]),
            Message::Open,
            Message::Close,
            Message::Granted(3),
            Message::Refused(-1),
            Message::Queue(PARAMS),
            Message::Opened,
            Message::Closed,
        ];
        for message in all {
            message.send(ours.as_fd(), &[ours.as_fd(), theirs.as_fd()]).unwrap();
            assert_eq!(Message::peek(theirs.as_fd()).unwrap(), Some((message, true)));
            assert!(Message::receive_without_fds(theirs.as_fd()).is_err());
            let mut fds = Fds::default();
            assert_eq!(Message::receive(theirs.as_fd(), &mut fds).unwrap(), Some(message));
            assert_eq!(fds.iter().flatten().count(), 2);
            message.send(ours.as_fd(), &[]).unwrap();
            assert_eq!(Message::peek(theirs.as_fd()).unwrap(), Some((message, false)));
            assert_eq!(Message::receive_without_fds(theirs.as_fd()).unwrap(), Some(message));
        }
        unix_socket::send(ours.as_fd(), b"something else", &[]).unwrap();
        assert!(Message::peek(theirs.as_fd()).is_err());
        assert!(Message::receive(theirs.as_fd(), &mut Fds::default()).is_err());
        drop(ours);
        assert_eq!(Message::peek(theirs.as_fd()).unwrap(), None);
        assert_eq!(Message::receive(theirs.as_fd(), &mut Fds::default()).unwrap(), None);
    }

    #[test]
    fn a_reply_is_for_the_command_that_it_names() {
        let reply_to = |command: Message, replies: &[Message]| {
            let (library, lessor) = pair();
            replies.iter().for_each(|reply| reply.send(lessor.as_fd(), &[]).unwrap());
            drop(lessor);
            command.await_reply(library.as_fd()).unwrap()
        };
        let refused = Message::Refused(libc::EPROTO);
        assert!(reply_to(Message::Open, &[Message::Opened]));
        assert!(!reply_to(Message::Open, &[refused]));
        assert!(!reply_to(Message::Open, &[]));
        assert!(reply_to(Message::Close, &[Message::Closed]));
        // The reply to the Open was not received.
        assert!(reply_to(Message::Close, &[Message::Opened, Message::Closed]));
        assert!(!reply_to(Message::Close, &[Message::Opened]));
        assert!(!reply_to(Message::Close, &[refused]));
    }
}
