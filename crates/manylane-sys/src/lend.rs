//! What is said when one process lends queues of devices to another: one message each way, some of them with descriptors.
//!
//! ```text
//! the library                                          the lender
//!   ask: the program's UDP socket, one end of a pair ──►  looks at the socket itself where it is bound
//!                                     ◄── Terms, memory of next hops          (on the other end of the pair,
//!                                     ◄── Terms and descriptors of each queue   which is the loan from now on)
//!   Order::Open, when somebody receives ──►  the port goes into the XDP programs
//!                                     ◄── done, or why not
//!   Order::Close, before the socket is plain ──►  the port goes out; nothing is on its way any more
//!                                     ◄── done
//! ```
//!
//! Every process that a fork gave the socket to has the loan's end, too. When the last one is closed, or dead, the lender
//! sees the end of it, and takes the queues back.

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::time::Duration;

use crate::{check, local};

/// The variable that names the descriptor of the lender.
pub const VARIABLE: &str = "MANYLANE_LENDER";
/// Queues that one loan has at most.
pub const QUEUES: usize = 32;
/// Words of a message.
const WORDS: usize = 9;
/// First word of each: another version of the library is not understood.
const MAGIC: u32 = 0x314e_4c4d;

/// What a message says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// Lend queues for the socket that comes with this.
    Ask,
    /// Frames of the bound address shall come to the queues.
    Open,
    /// None shall come any more.
    Close,
    /// It is so; of [`Ask`](Self::Ask): so many queues follow, and the memory of next hops is with this.
    Done(u32),
    /// It is not, by this number of an error.
    Refused(i32),
    /// A queue, with its socket and its memory.
    Queue(Terms),
}

/// What a queue that is lent is like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Index of its device.
    pub ifindex: u32,
    /// Its number there.
    pub queue: u32,
    /// Frames of its memory.
    pub frames: u32,
    /// Entries of its fill and its completion ring.
    pub shared_ring: u32,
    /// Entries of the receive and of the send ring.
    pub ring: u32,
    /// Frames may come with unfinished checksums: the device is one end of a pair.
    pub is_virtual_pair: bool,
    /// Number of the loan, which no other loan has while this one lasts; never 0.
    pub loan: u16,
}

impl Message {
    fn words(self) -> [u32; WORDS] {
        let mut words = [0; WORDS];
        words[0] = MAGIC;
        match self {
            Self::Ask => words[1] = 1,
            Self::Open => words[1] = 2,
            Self::Close => words[1] = 3,
            Self::Done(count) => (words[1], words[2]) = (4, count),
            Self::Refused(errno) => (words[1], words[2]) = (5, errno as u32),
            Self::Queue(terms) => {
                let Terms { ifindex, queue, frames, shared_ring, ring, is_virtual_pair, loan } = terms;
                words[1] = 6;
                words[2..].copy_from_slice(&[
                    ifindex,
                    queue,
                    frames,
                    shared_ring,
                    ring,
                    u32::from(is_virtual_pair),
                    u32::from(loan),
                ]);
            }
        }
        words
    }

    fn of(words: [u32; WORDS]) -> Option<Self> {
        let [MAGIC, kind, first, second, third, fourth, fifth, sixth, seventh] = words else { return None };
        Some(match kind {
            1 => Self::Ask,
            2 => Self::Open,
            3 => Self::Close,
            4 => Self::Done(first),
            5 => Self::Refused(first as i32),
            6 => Self::Queue(Terms {
                ifindex: first,
                queue: second,
                frames: third,
                shared_ring: fourth,
                ring: fifth,
                is_virtual_pair: sixth != 0,
                loan: u16::try_from(seventh).ok()?,
            }),
            _ => return None,
        })
    }

    /// Sends it with `fds`.
    ///
    /// # Errors
    /// As of [`local::send`].
    pub fn send(self, to: BorrowedFd<'_>, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut bytes = [0; WORDS * 4];
        for (to, word) in bytes.chunks_exact_mut(4).zip(self.words()) {
            to.copy_from_slice(&word.to_ne_bytes());
        }
        local::send(to, &bytes, fds)
    }

    /// Receives one into `fds`, and how many descriptors came with it; none when the other end is closed. Without the heap.
    ///
    /// # Errors
    /// As of [`local::recv`]; `InvalidData` for what is no message.
    pub fn receive(from: BorrowedFd<'_>, fds: &mut Fds) -> io::Result<Option<Self>> {
        let mut bytes = [0; WORDS * 4];
        let len = local::recv_into(from, &mut bytes, fds)?;
        if len == 0 {
            return Ok(None);
        }
        let mut words = [0; WORDS];
        for (word, from) in words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_ne_bytes([from[0], from[1], from[2], from[3]]);
        }
        let known = if len == bytes.len() { Self::of(words) } else { None };
        known.map(Some).ok_or_else(|| io::Error::from_raw_os_error(libc::EPROTO))
    }
}

/// Descriptors that came with a message.
pub type Fds = [Option<OwnedFd>; local::MOST_FDS];

/// Two connected sockets for messages; every operation on the first waits for `patience` at most, on the second not at
/// all.
///
/// # Errors
/// `EMFILE`.
pub fn pair(patience: Duration) -> io::Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    // SAFETY: the kernel writes two descriptors.
    check(unsafe {
        libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0, fds.as_mut_ptr())
    })?;
    // SAFETY: the descriptors are new and belong to nobody else.
    let [ours, theirs] = fds.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    local::set_patience(ours.as_fd(), patience)?;
    // SAFETY: takes no pointer.
    check(unsafe { libc::fcntl(theirs.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) })?;
    Ok((ours, theirs))
}

/// Lets programs that are started inherit a descriptor, under a number that few programs look at.
///
/// # Errors
/// `EMFILE`.
pub fn inheritable(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    const HIGH: libc::c_int = 1000;
    for least in [HIGH, 64, 3] {
        // SAFETY: takes no pointer.
        let raw = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD, least) };
        if raw >= 0 {
            // SAFETY: the descriptor is new and belongs to nobody else.
            return Ok(unsafe { OwnedFd::from_raw_fd(raw) });
        }
    }
    Err(io::Error::last_os_error())
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let (ours, theirs) = pair(Duration::from_secs(10)).unwrap();
        let terms = Terms {
            ifindex: 7,
            queue: 3,
            frames: 4096,
            shared_ring: 2048,
            ring: 1024,
            is_virtual_pair: true,
            loan: 65535,
        };
        let all = [
            Message::Ask,
            Message::Open,
            Message::Close,
            Message::Done(3),
            Message::Refused(-1),
            Message::Queue(terms),
        ];
        for message in all {
            message.send(ours.as_fd(), &[ours.as_fd(), theirs.as_fd()]).unwrap();
            let mut fds = Fds::default();
            assert_eq!(Message::receive(theirs.as_fd(), &mut fds).unwrap(), Some(message));
            assert_eq!(fds.iter().flatten().count(), 2);
        }
        local::send(ours.as_fd(), b"something else", &[]).unwrap();
        assert!(Message::receive(theirs.as_fd(), &mut Fds::default()).is_err());
        drop(ours);
        assert_eq!(Message::receive(theirs.as_fd(), &mut Fds::default()).unwrap(), None);
    }
}
