//! Local sockets that carry messages and descriptors (`AF_UNIX`, `SOCK_SEQPACKET`, Linux 2.6.4),
//! under abstract names, which belong to the network namespace and not to a file system.
//!
//! | module | does |
//! |---|---|
//! | this one | listens and connects |
//! | `peer` | identifies the process at the other end |
//! | `message` | sends, receives and peeks at messages |

mod message;
mod peer;
#[cfg(all(test, not(miri)))]
mod tests;

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::sockopt::{self, Timeout};
use rustix::net::{self, AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};

pub use self::message::{
    FDS_MAX, Peeked, discard, drain, drain_blocking, enable_peek, peek, recv, recv_into, recv_without_fds,
    send, wait_for_message,
};
pub use self::peer::{PeerCred, PeerProcess, ambiguous_uid, effective_uid, peer_cred};
use crate::sock;

/// Backlog of connections to accept.
const BACKLOG: libc::c_int = 16;

/// An unconnected socket.
///
/// # Errors
/// `EMFILE` without descriptors.
pub fn socket() -> io::Result<OwnedFd> {
    open(SocketFlags::empty())
}

fn open(flags: SocketFlags) -> io::Result<OwnedFd> {
    // Bypasses the C library, here and below: the preload library overrides its functions, and
    // requests queues within calls of the program.
    Ok(net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | flags, None)?)
}

/// Listens under an abstract `name`, in the network namespace of the calling thread; [`accept`]
/// does not block.
///
/// # Errors
/// `EADDRINUSE` if the name is taken, `ENAMETOOLONG`, `EMFILE` without descriptors.
pub fn listen(name: &str) -> io::Result<OwnedFd> {
    let socket = open(SocketFlags::NONBLOCK)?;
    net::bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// As [`listen`], for connections that cannot carry descriptors: sending some fails
/// (`SO_PASSRIGHTS`, Linux 6.16). Before that they arrive, and receiving them, or closing a
/// connection with unread ones, may block for as long as the sender likes, if closing the
/// descriptor blocks.
///
/// # Errors
/// As for [`listen`].
pub fn listen_without_fds(name: &str) -> io::Result<OwnedFd> {
    let socket = listen(name)?;
    _ = accept_fds(socket.as_fd(), false);
    Ok(socket)
}

/// Lets descriptors arrive by a connection, or not (`SO_PASSRIGHTS`, Linux 6.16).
///
/// # Errors
/// `ENOPROTOOPT` before Linux 6.16: they always arrive.
pub fn accept_fds(fd: BorrowedFd<'_>, do_accept: bool) -> io::Result<()> {
    /// Defined in asm-generic/socket.h.
    const SO_PASSRIGHTS: libc::c_int = 83;
    sock::set(fd, libc::SOL_SOCKET, SO_PASSRIGHTS, i32::from(do_accept))
}

/// Accepts a connection, whose operations do not block either.
///
/// # Errors
/// `WouldBlock` if there is none, `EMFILE` without descriptors.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    Ok(net::accept_with(listener, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC)?)
}

/// Connects to an abstract `name` in the network namespace of the calling thread. Connecting, and
/// every operation on the connection, waits for at most `timeout`.
///
/// # Errors
/// `ECONNREFUSED` if there is no listener, `WouldBlock` after a timeout.
pub fn connect(name: &str, timeout: Duration) -> io::Result<OwnedFd> {
    let socket = socket()?;
    connect_socket(socket.as_fd(), name, timeout)?;
    Ok(socket)
}

/// As [`connect`], for a connection by which no descriptors arrive, as with
/// [`listen_without_fds`], and messages can be peeked at ([`enable_peek`]).
///
/// # Errors
/// As for [`connect`].
pub fn connect_without_fds(name: &str, timeout: Duration) -> io::Result<OwnedFd> {
    connect_socket_without_fds(socket()?, name, timeout)
}

/// As [`connect_without_fds`], but does not wait for a listener whose backlog is full.
///
/// # Errors
/// As for [`connect`]; `WouldBlock` if the backlog is full.
pub fn connect_now_without_fds(name: &str, timeout: Duration) -> io::Result<OwnedFd> {
    let socket = connect_socket_without_fds(open(SocketFlags::NONBLOCK)?, name, timeout)?;
    rustix::io::ioctl_fionbio(&socket, false)?;
    Ok(socket)
}

fn connect_socket_without_fds(socket: OwnedFd, name: &str, timeout: Duration) -> io::Result<OwnedFd> {
    _ = accept_fds(socket.as_fd(), false);
    enable_peek(socket.as_fd())?;
    connect_socket(socket.as_fd(), name, timeout)?;
    Ok(socket)
}

/// As [`connect`], with a socket of the caller.
///
/// # Errors
/// As for [`connect`].
pub fn connect_socket(socket: BorrowedFd<'_>, name: &str, timeout: Duration) -> io::Result<()> {
    set_timeout(socket, timeout)?;
    Ok(net::connect(socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?)
}

/// Refuses further connections to a listener. Those that are pending can still be accepted.
pub fn refuse_connections(listener: BorrowedFd<'_>) {
    // Cannot fail for a socket that listens.
    _ = net::shutdown(listener, Shutdown::Read);
}

/// Limits the time that each operation on a connection waits.
///
/// # Errors
/// Those of `setsockopt(2)`.
fn set_timeout(fd: BorrowedFd<'_>, timeout: Duration) -> io::Result<()> {
    // The kernel takes a signed number of seconds.
    let limit = Some(timeout.min(Duration::from_secs(1 << 30)));
    sockopt::set_socket_timeout(fd, Timeout::Recv, limit)?;
    Ok(sockopt::set_socket_timeout(fd, Timeout::Send, limit)?)
}
