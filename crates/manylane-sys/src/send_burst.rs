//! Sends the same datagram repeatedly over a connected socket: the hot path of the portable
//! traffic generator. It shares no code with the library's rings, which it measures.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::mmsg::SEGMENTS_MAX;

/// Maximum bytes of a GSO message: the payload of one UDP datagram over IPv4.
const GSO_BYTES_MAX: usize = 65_507;

/// Headers for one `sendmmsg(2)` that all point to the same bytes.
#[derive(Debug)]
pub struct SendBurst {
    /// As many copies of the datagram as one message carries.
    bytes: Box<[u8]>,
    datagram_len: usize,
    per_message: usize,
    messages: usize,
}

impl SendBurst {
    /// Prepares to send `datagram`, in `messages` messages per call. With `segment`, each message
    /// carries as many datagrams as fit, which the kernel splits (UDP GSO, Linux 4.18); the socket
    /// must have been set up by [`set_segment_size`].
    #[must_use]
    pub fn new(datagram: &[u8], messages: usize, segment: bool) -> SendBurst {
        let fit = (GSO_BYTES_MAX / datagram.len().max(1)).clamp(1, SEGMENTS_MAX);
        // An empty datagram cannot be a segment: it is sent alone.
        let per_message = if segment && !datagram.is_empty() { fit } else { 1 };
        SendBurst {
            bytes: datagram.repeat(per_message).into(),
            datagram_len: datagram.len(),
            per_message,
            messages: messages.clamp(1, libc::UIO_MAXIOV as usize),
        }
    }

    /// Maximum number of datagrams per call.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.messages * self.per_message
    }

    /// Datagrams per message.
    #[must_use]
    pub fn datagrams_per_message(&self) -> usize {
        self.per_message
    }

    /// Sends `count` datagrams (at most [`capacity`](Self::capacity)) in one system call, and
    /// returns the number sent.
    ///
    /// # Errors
    /// That of the first message; if a later one fails, the number before it is returned instead.
    pub fn send(&self, socket: BorrowedFd<'_>, count: usize) -> io::Result<usize> {
        let count = count.min(self.capacity());
        let whole = count / self.per_message;
        let rest = count % self.per_message;
        let messages = whole + usize::from(rest > 0);
        let mut parts = Vec::with_capacity(messages);
        for index in 0..messages {
            let datagrams = if index < whole { self.per_message } else { rest };
            parts.push(libc::iovec {
                iov_base: self.bytes.as_ptr().cast_mut().cast(),
                iov_len: datagrams * self.datagram_len,
            });
        }
        let mut headers: Vec<libc::mmsghdr> = parts
            .iter_mut()
            .map(|part| {
                // SAFETY: `mmsghdr` is integers and pointers that may be null: all zeros are
                // valid.
                let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
                header.msg_hdr.msg_iov = part;
                header.msg_hdr.msg_iovlen = 1;
                header
            })
            .collect();
        // SAFETY: the headers and the parts they point to live until the end of this function;
        // each part spans at most `bytes`, which the kernel only reads; no message has a name or
        // control data.
        let sent =
            unsafe { libc::sendmmsg(socket.as_raw_fd(), headers.as_mut_ptr(), messages as libc::c_uint, 0) };
        // Negative: an error. Otherwise the kernel has counted the messages.
        let Ok(sent) = usize::try_from(sent) else { return Err(io::Error::last_os_error()) };
        Ok((sent * self.per_message).min(count))
    }
}

/// Makes the kernel split what this socket sends into datagrams of `size` bytes (UDP_SEGMENT,
/// Linux 4.18).
///
/// # Errors
/// `ENOPROTOOPT` on an older kernel.
pub fn set_segment_size(socket: BorrowedFd<'_>, size: u16) -> io::Result<()> {
    crate::sock::set(socket, libc::SOL_UDP, libc::UDP_SEGMENT, i32::from(size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::os::fd::AsFd;

    fn pair() -> (UdpSocket, UdpSocket) {
        let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
        receiver.set_read_timeout(Some(std::time::Duration::from_secs(120))).unwrap();
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        sender.connect(receiver.local_addr().unwrap()).unwrap();
        (sender, receiver)
    }

    #[test]
    fn sends_exactly_the_count() {
        let (sender, receiver) = pair();
        let burst = SendBurst::new(b"hello", 8, false);
        assert_eq!(burst.capacity(), 8);
        assert_eq!(burst.send(sender.as_fd(), 3).unwrap(), 3);
        let mut buffer = [0; 16];
        for _ in 0..3 {
            let length = receiver.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..length], b"hello");
        }
        receiver.set_nonblocking(true).unwrap();
        assert!(receiver.recv(&mut buffer).is_err());
    }

    #[test]
    fn gro_messages_are_split_including_the_last_segment() {
        let (sender, receiver) = pair();
        set_segment_size(sender.as_fd(), 10).unwrap();
        let burst = SendBurst::new(&[7; 10], 2, true);
        assert_eq!(burst.capacity(), 128);
        assert_eq!(burst.send(sender.as_fd(), 70).unwrap(), 70);
        let mut buffer = [0; 100];
        for _ in 0..70 {
            assert_eq!(receiver.recv(&mut buffer).unwrap(), 10);
        }
        receiver.set_nonblocking(true).unwrap();
        assert!(receiver.recv(&mut buffer).is_err());
    }

    #[test]
    fn empty_datagrams_are_sent_one_by_one() {
        let (sender, receiver) = pair();
        let burst = SendBurst::new(b"", 4, true);
        assert_eq!(burst.capacity(), 4);
        assert_eq!(burst.send(sender.as_fd(), 4).unwrap(), 4);
        let mut buffer = [0; 4];
        assert_eq!(receiver.recv(&mut buffer).unwrap(), 0);
    }
}
