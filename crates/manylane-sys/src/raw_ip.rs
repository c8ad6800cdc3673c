//! Raw IP sockets: whole packets to the kernel's routing, and ICMP errors from it (raw(7)). They
//! need CAP_NET_RAW.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, ipproto};

use crate::sock;

// linux/icmp.h and linux/icmpv6.h.
const SOL_RAW: i32 = 255;
const ICMP_FILTER: i32 = 1;
const ICMPV6_FILTER: i32 = 1;
const ICMP_DEST_UNREACH: u32 = 3;
const ICMPV6_DEST_UNREACH: u32 = 1;
const ICMPV6_PKT_TOOBIG: u32 = 2;

/// The longest ICMP error that is read: what it quotes behind the headers of IP and TCP is not
/// needed.
const ERROR_LEN_MAX: usize = 256;

/// Packets that wait to be read, in bytes of `SO_RCVBUF`: anybody can send ICMP errors.
const RECV_BUFFER: i32 = 32 << 10;

fn open(family: AddressFamily, protocol: net::Protocol) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(net::socket_with(family, SocketType::RAW, flags, Some(protocol))?)
}

/// The socket of a family that this kernel may not have.
fn open_ipv6(protocol: net::Protocol) -> io::Result<Option<OwnedFd>> {
    match open(AddressFamily::INET6, protocol) {
        Err(err) if err.raw_os_error() == Some(libc::EAFNOSUPPORT) => Ok(None),
        opened => opened.map(Some),
    }
}

/// Sends packets with their IP headers: the kernel finds the route and the neighbour.
#[derive(Debug)]
pub struct PacketSender {
    ipv4: OwnedFd,
    /// None if the kernel has no IPv6.
    ipv6: Option<OwnedFd>,
}

impl PacketSender {
    /// Opens its sockets.
    ///
    /// # Errors
    /// `EPERM` without CAP_NET_RAW, `EMFILE` without descriptors.
    pub fn open() -> io::Result<Self> {
        // This protocol alone says that packets have their headers (`IP_HDRINCL`).
        Ok(Self { ipv4: open(AddressFamily::INET, ipproto::RAW)?, ipv6: open_ipv6(ipproto::RAW)? })
    }

    /// Sends a packet to its destination. Does not wait.
    ///
    /// # Errors
    /// Those of `sendto(2)`: `EHOSTUNREACH` and `ENETUNREACH` without a route, `EMSGSIZE` if it is
    /// longer than the route allows, `EAGAIN` if the device is full.
    pub fn send(&self, packet: &[u8], to: IpAddr) -> io::Result<()> {
        let socket = if to.is_ipv4() { Some(&self.ipv4) } else { self.ipv6.as_ref() };
        let socket = socket.ok_or(io::ErrorKind::Unsupported)?;
        // The port is not used, and IPv6 demands that it is zero.
        net::sendto(socket, packet, SendFlags::DONTWAIT, &std::net::SocketAddr::new(to, 0))?;
        Ok(())
    }
}

/// Receives the ICMP errors "unreachable" and, of IPv6, "packet too big", of all destinations.
#[derive(Debug)]
pub struct IcmpErrors {
    socket: OwnedFd,
    buffer: [u8; ERROR_LEN_MAX],
}

impl IcmpErrors {
    /// Those of IPv4.
    ///
    /// # Errors
    /// As those of [`PacketSender::open`].
    pub fn ipv4() -> io::Result<Self> {
        let socket = open(AddressFamily::INET, ipproto::ICMP)?;
        sock::set(socket.as_fd(), SOL_RAW, ICMP_FILTER, !(1_u32 << ICMP_DEST_UNREACH))?;
        Self::new(socket)
    }

    /// Those of IPv6. None if the kernel has no IPv6.
    ///
    /// # Errors
    /// As those of [`PacketSender::open`].
    pub fn ipv6() -> io::Result<Option<Self>> {
        let Some(socket) = open_ipv6(ipproto::ICMPV6)? else { return Ok(None) };
        let mut blocked = [u32::MAX; 8];
        blocked[0] = !(1 << ICMPV6_DEST_UNREACH | 1 << ICMPV6_PKT_TOOBIG);
        sock::set(socket.as_fd(), libc::IPPROTO_ICMPV6, ICMPV6_FILTER, blocked)?;
        Self::new(socket).map(Some)
    }

    fn new(socket: OwnedFd) -> io::Result<Self> {
        sock::set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, RECV_BUFFER)?;
        Ok(Self { socket, buffer: [0; ERROR_LEN_MAX] })
    }

    /// The next error, truncated: with its IP header if it is one of IPv4, without if of IPv6. None
    /// if there is none.
    pub fn receive(&mut self) -> Option<&[u8]> {
        let (len, _) = net::recv(&self.socket, &mut self.buffer[..], RecvFlags::DONTWAIT).ok()?;
        self.buffer.get(..len)
    }
}

impl AsFd for IcmpErrors {
    /// Readable while there are errors.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
