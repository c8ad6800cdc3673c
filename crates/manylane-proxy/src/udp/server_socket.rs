//! Sockets of sessions to their servers.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use manylane_sys::errno;

/// What has become of a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    Done,
    /// The server has refused an earlier datagram; this one was not sent.
    Refused,
    BufferFull,
    Failed,
}

/// A socket that sends to one server, and receives only from it.
pub(super) fn connect(server: SocketAddr) -> io::Result<UdpSocket> {
    let any: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.set_nonblocking(true)?;
    socket.connect(server)?;
    Ok(socket)
}

/// Sends a datagram over such a socket.
pub(super) fn send(socket: &UdpSocket, payload: &[u8]) -> Sent {
    // The kernel may report another error of an earlier datagram, once, and not send this one.
    for _ in 0..2 {
        match socket.send(payload) {
            Ok(_) => return Sent::Done,
            Err(err) if err.kind() == ErrorKind::ConnectionRefused => return Sent::Refused,
            Err(err) if err.kind() == ErrorKind::WouldBlock => return Sent::BufferFull,
            Err(err) if err.raw_os_error() == Some(errno::ENOBUFS) => return Sent::BufferFull,
            Err(_) => {}
        }
    }
    Sent::Failed
}
