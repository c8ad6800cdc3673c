//! One datagram per call: `recvfrom(2)` and `sendto(2)`, as most servers use them.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::addr::SockAddr;

/// Receives one datagram by `recvfrom(2)` and waits for it. Returns its length, and its source in
/// `peer`.
///
/// Unlike the standard library's `recv_from`, it works on a socket that was shut down for reading:
/// it returns 0 and leaves `peer` without a family.
///
/// # Errors
/// Those of `recvfrom(2)`.
#[inline]
pub fn recv_from(fd: BorrowedFd<'_>, buffer: &mut [u8], peer: &mut SockAddr) -> io::Result<usize> {
    let mut len = SockAddr::CAPACITY as libc::socklen_t;
    // SAFETY: the kernel writes at most `buffer.len()` bytes into the buffer and at most `len`
    // bytes, the capacity of a SockAddr, into `peer`; all of them live across the call.
    let got = unsafe {
        libc::recvfrom(
            fd.as_raw_fd(),
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            0,
            std::ptr::from_mut(peer).cast(),
            &raw mut len,
        )
    };
    if got < 0 { Err(io::Error::last_os_error()) } else { Ok(got as usize) }
}

/// Sends one datagram to `peer` by `sendto(2)`, waiting for room in the send buffer.
///
/// As the standard library's `send_to`, for an address in the form that [`recv_from`] returns.
///
/// # Errors
/// Those of `sendto(2)`.
#[inline]
pub fn send_to(fd: BorrowedFd<'_>, payload: &[u8], peer: &SockAddr) -> io::Result<usize> {
    let address = peer.as_bytes();
    // SAFETY: the kernel reads `payload.len()` bytes of the payload and `address.len()` bytes of
    // the address; both live across the call.
    let sent = unsafe {
        libc::sendto(
            fd.as_raw_fd(),
            payload.as_ptr().cast(),
            payload.len(),
            libc::MSG_NOSIGNAL,
            address.as_ptr().cast(),
            address.len() as libc::socklen_t,
        )
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(sent as usize) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::os::fd::AsFd as _;

    #[test]
    fn recv_returns_a_datagram_or_the_end() {
        let (receiver, sender) =
            (UdpSocket::bind("127.0.0.1:0").unwrap(), UdpSocket::bind("127.0.0.1:0").unwrap());
        sender.send_to(b"hello", receiver.local_addr().unwrap()).unwrap();
        let (mut buffer, mut peer) = ([0; 16], SockAddr::EMPTY);
        assert_eq!(recv_from(receiver.as_fd(), &mut buffer, &mut peer).unwrap(), 5);
        assert_eq!(peer.to_std(), Some(sender.local_addr().unwrap()));
        assert_eq!(send_to(receiver.as_fd(), &buffer[..5], &peer).unwrap(), 5);
        let mut answer = [0; 16];
        let (len, from) = sender.recv_from(&mut answer).unwrap();
        assert_eq!((&answer[..len], from), (&b"hello"[..], receiver.local_addr().unwrap()));
        crate::sock::wake(receiver.as_fd());
        peer = SockAddr::EMPTY;
        assert_eq!(recv_from(receiver.as_fd(), &mut buffer, &mut peer).unwrap(), 0);
        assert_eq!(peer.to_std(), None);
    }
}
