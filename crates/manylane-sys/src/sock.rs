//! UDP sockets: opening, binding, options, state.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{self, PollFd, PollFlags, Timespec};
use rustix::net::{self, AddressFamily, Shutdown, SocketFlags, SocketType};

use crate::cbpf::{self, Insn};
use crate::check;

/// Opens a UDP socket of the family of `addr`, with close-on-exec.
///
/// # Errors
/// Those of `socket(2)`: `EMFILE` and `ENFILE` without descriptors, `EAFNOSUPPORT` without IPv6.
pub fn open(addr: &SocketAddr) -> io::Result<OwnedFd> {
    let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    Ok(net::socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

/// Binds the socket.
///
/// # Errors
/// Those of `bind(2)`: `EADDRINUSE`, `EADDRNOTAVAIL`, `EACCES` for a port below 1024.
pub fn bind(fd: BorrowedFd<'_>, addr: &SocketAddr) -> io::Result<()> {
    Ok(net::bind(fd, addr)?)
}

/// The address that the socket is bound to.
///
/// # Errors
/// Those of `getsockname(2)`, or `InvalidData` for a socket that is not IP.
pub fn local_addr(fd: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    SocketAddr::try_from(net::getsockname(fd)?).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Properties of a socket that a program handed over to a lessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketInfo {
    /// True for a UDP socket.
    pub is_udp: bool,
    /// True if it accepts no IPv4.
    pub only_v6: bool,
    /// Cookie of its network namespace (Linux 5.14).
    pub namespace: u64,
    /// Cookie of the socket, unique until the machine restarts (Linux 4.12).
    pub cookie: u64,
}

/// Reads the properties of a socket from another process.
///
/// # Errors
/// Those of `getsockopt(2)`: `ENOTSOCK`; `ENOPROTOOPT` before Linux 5.14.
pub fn socket_info(fd: BorrowedFd<'_>) -> io::Result<SocketInfo> {
    let number = |name| get::<i32>(fd, libc::SOL_SOCKET, name);
    let (kind, protocol) = (number(libc::SO_TYPE)?, number(libc::SO_PROTOCOL)?);
    let only_v6 = match number(libc::SO_DOMAIN)? {
        libc::AF_INET => false,
        libc::AF_INET6 => get::<i32>(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY)? != 0,
        _ => return Err(io::Error::from_raw_os_error(libc::EAFNOSUPPORT)),
    };
    let namespace = get(fd, libc::SOL_SOCKET, libc::SO_NETNS_COOKIE)?;
    let cookie = get(fd, libc::SOL_SOCKET, libc::SO_COOKIE)?;
    let is_udp = (kind, protocol) == (libc::SOCK_DGRAM, libc::IPPROTO_UDP);
    Ok(SocketInfo { is_udp, only_v6, namespace, cookie })
}

pub(crate) fn set<T: Copy>(fd: BorrowedFd<'_>, level: i32, name: i32, value: T) -> io::Result<()> {
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of `value`, which lives across the call.
    check(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const value).cast(), len) })?;
    Ok(())
}

/// A type of integers, for which any bytes are a valid value.
pub(crate) trait Plain: Default {}

impl Plain for i32 {}
impl Plain for u32 {}
impl Plain for u64 {}
impl<T: Plain, const N: usize> Plain for [T; N] where Self: Default {}

/// Reads an option by the system call: the preload library overrides the C library's function.
pub(crate) fn get<T: Plain>(fd: BorrowedFd<'_>, level: i32, name: i32) -> io::Result<T> {
    get_prefix(fd, level, name).map(|(value, _)| value)
}

/// The same for an option that older kernels have shorter: also returns the number of bytes that
/// the kernel wrote. The rest are zeros.
pub(crate) fn get_prefix<T: Plain>(fd: BorrowedFd<'_>, level: i32, name: i32) -> io::Result<(T, usize)> {
    let mut value = T::default();
    let mut len = size_of::<T>() as libc::socklen_t;
    let to = &raw mut value;
    // SAFETY: the kernel writes at most `len` bytes into `value`, which lives across the call, and
    // for which any bytes are valid.
    let done = unsafe { libc::syscall(libc::SYS_getsockopt, fd.as_raw_fd(), level, name, to, &raw mut len) };
    check(done as libc::c_int)?;
    Ok((value, len as usize))
}

/// Defined in linux/in6.h; missing in the libc crate.
const IPV6_MULTICAST_ALL: libc::c_int = 29;

/// An option of a lane's socket that is on or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flag {
    /// `SO_REUSEPORT` (Linux 3.9). Set on a bound socket, it starts a new group that later sockets
    /// can join.
    ReusePort,
    /// `IPV6_V6ONLY`: an IPv6 wildcard socket accepts no IPv4.
    OnlyV6,
    /// `IP_PKTINFO`: report the destination address of each datagram.
    PktInfoV4,
    /// `IPV6_RECVPKTINFO`: the same for IPv6.
    PktInfoV6,
    /// `IP_RECVTOS`: report the type of service.
    TosV4,
    /// `IPV6_RECVTCLASS`: report the traffic class.
    TosV6,
    /// `UDP_GRO` (Linux 5.0): deliver several datagrams as one message.
    Gro,
    /// `SO_TIMESTAMPNS`: report when the kernel received the packet.
    Timestamp,
    /// `IP_MULTICAST_ALL`: deliver multicast of groups that other sockets joined.
    MulticastAllV4,
    /// `IPV6_MULTICAST_ALL` (Linux 4.20): the same for IPv6.
    MulticastAllV6,
    /// `IP_RECVERR`: report ICMP errors in later calls. Lanes do not set it; an application may.
    ErrorsV4,
    /// `IPV6_RECVERR`: the same for IPv6.
    ErrorsV6,
}

/// Turns an option on or off.
///
/// # Errors
/// Those of `setsockopt(2)`; `ENOPROTOOPT` where the kernel does not have the option.
pub fn set_flag(fd: BorrowedFd<'_>, flag: Flag, on: bool) -> io::Result<()> {
    let (level, name) = match flag {
        Flag::ReusePort => (libc::SOL_SOCKET, libc::SO_REUSEPORT),
        Flag::OnlyV6 => (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY),
        Flag::PktInfoV4 => (libc::IPPROTO_IP, libc::IP_PKTINFO),
        Flag::PktInfoV6 => (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO),
        Flag::TosV4 => (libc::IPPROTO_IP, libc::IP_RECVTOS),
        Flag::TosV6 => (libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS),
        Flag::Gro => (libc::SOL_UDP, libc::UDP_GRO),
        Flag::Timestamp => (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS),
        Flag::MulticastAllV4 => (libc::IPPROTO_IP, libc::IP_MULTICAST_ALL),
        Flag::MulticastAllV6 => (libc::IPPROTO_IPV6, IPV6_MULTICAST_ALL),
        Flag::ErrorsV4 => (libc::IPPROTO_IP, libc::IP_RECVERR),
        Flag::ErrorsV6 => (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
    };
    set(fd, level, name, i32::from(on))
}

/// True if an error may come from an earlier datagram of the socket: the errors that the kernel
/// derives from ICMP messages (`icmp_err_convert` in net/ipv4/icmp.c, `icmpv6_err_convert` in
/// net/ipv6/icmp.c).
///
/// A socket that is not connected gets them only with `IP_RECVERR`. Each is reported once, by the
/// next call of any kind, which then does nothing else.
#[must_use]
pub fn is_icmp_error(code: i32) -> bool {
    matches!(
        code,
        libc::ECONNREFUSED
            | libc::EHOSTUNREACH
            | libc::ENETUNREACH
            | libc::EHOSTDOWN
            | libc::ENONET
            | libc::EACCES
            | libc::EMSGSIZE
            | libc::EPROTO
            | libc::ENOPROTOOPT
            | libc::EOPNOTSUPP
    )
}

/// True if the kernel supports `UDP_SEGMENT` (GSO, Linux 4.18) on this socket.
#[must_use]
pub fn supports_gso(fd: BorrowedFd<'_>) -> bool {
    get::<i32>(fd, libc::SOL_UDP, libc::UDP_SEGMENT).is_ok()
}

/// Whether `UDP_GRO` (Linux 5.0) is on. Whoever turns it on makes the kernel look for joinable
/// packets until the socket closes.
///
/// # Errors
/// Those of `getsockopt(2)`; `ENOPROTOOPT` where the kernel does not have the option.
pub fn has_gro(fd: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(get::<i32>(fd, libc::SOL_UDP, libc::UDP_GRO)? != 0)
}

/// A buffer of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffer {
    /// Datagrams received and not read yet.
    Receive,
    /// Datagrams sent that have not left yet.
    Send,
}

/// Sets a buffer to `bytes`, and returns the size that the kernel granted. (The kernel doubles the
/// value for its own overhead; both values here are without it.)
///
/// Tries `SO_RCVBUFFORCE`/`SO_SNDBUFFORCE` first, which needs `CAP_NET_ADMIN`, then the plain
/// option, which the kernel silently caps at `net.core.rmem_max`/`wmem_max`.
///
/// # Errors
/// Those of `setsockopt(2)`.
pub fn set_buffer(fd: BorrowedFd<'_>, which: Buffer, bytes: usize) -> io::Result<usize> {
    let (force, plain) = match which {
        Buffer::Receive => (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF),
        Buffer::Send => (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF),
    };
    let ask = i32::try_from(bytes).unwrap_or(i32::MAX / 2).min(i32::MAX / 2);
    if set(fd, libc::SOL_SOCKET, force, ask).is_err() {
        set(fd, libc::SOL_SOCKET, plain, ask)?;
    }
    Ok(get::<i32>(fd, libc::SOL_SOCKET, plain)?.unsigned_abs() as usize / 2)
}

/// Limits the time that a receive sleeps; zero means no limit.
///
/// # Errors
/// Those of `setsockopt(2)`.
pub fn set_recv_timeout(fd: BorrowedFd<'_>, timeout: Duration) -> io::Result<()> {
    let value = libc::timeval {
        tv_sec: timeout.as_secs().min(1 << 30) as libc::time_t,
        tv_usec: libc::suseconds_t::from(timeout.subsec_micros()),
    };
    set(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, value)
}

/// State of a socket's receive queue (`SO_MEMINFO`, Linux 4.12).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueState {
    /// Memory of queued datagrams in bytes, including the kernel's overhead.
    pub queued_bytes: u32,
    /// Memory at which the kernel drops datagrams: the size of the receive buffer, including its
    /// overhead.
    pub limit_bytes: u32,
    /// Datagrams that the kernel dropped at this socket since it was opened: queue full, out of
    /// memory, wrong checksum. Wraps at 2^32.
    pub drops: u32,
}

/// Reads the state of the receive queue.
///
/// # Errors
/// `ENOPROTOOPT` before Linux 4.12.
pub fn queue_state(fd: BorrowedFd<'_>) -> io::Result<QueueState> {
    // Indices of linux/sock_diag.h: SK_MEMINFO_RMEM_ALLOC is 0, SK_MEMINFO_RCVBUF is 1,
    // SK_MEMINFO_DROPS is 8, nine words in all.
    let words: [u32; 9] = get(fd, libc::SOL_SOCKET, libc::SO_MEMINFO)?;
    Ok(QueueState { queued_bytes: words[0], limit_bytes: words[1], drops: words[8] })
}

/// Attaches a classic BPF program that returns the index of a socket to the socket's reuseport
/// group (Linux 4.5). Unprivileged.
///
/// # Errors
/// `EINVAL` for a program that the kernel's check refuses, or a socket without `SO_REUSEPORT`;
/// `ENOMEM` for one that takes more than `net.core.optmem_max`, with 8 bytes for each of the
/// kernel's own instructions.
pub fn attach_reuseport_cbpf(fd: BorrowedFd<'_>, program: &[Insn]) -> io::Result<()> {
    let fprog = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?,
        filter: program.as_ptr().cast_mut(),
    };
    set(fd, libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF, fprog)
}

/// Detaches the program of the socket's reuseport group (Linux 5.3): the kernel selects by its hash
/// again.
///
/// # Errors
/// `ENOENT` if there is none.
pub fn detach_reuseport_bpf(fd: BorrowedFd<'_>) -> io::Result<()> {
    set(fd, libc::SOL_SOCKET, libc::SO_DETACH_REUSEPORT_BPF, 0)
}

/// Makes the kernel drop, and count as dropped, all further datagrams to the socket. Those in the
/// queue can still be received.
///
/// # Errors
/// Those of `setsockopt(2)`.
pub fn drop_all_incoming(fd: BorrowedFd<'_>) -> io::Result<()> {
    // Keep nothing of the packet.
    let program = [cbpf::insn(cbpf::RET_K, 0)];
    let fprog = libc::sock_fprog { len: 1, filter: program.as_ptr().cast_mut() };
    set(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, fprog)
}

/// Opens a TCP socket that listens at an address, and lets nothing in: no other socket can have the
/// address, and the kernel answers no packet to it, neither by accepting nor by a reset.
///
/// # Errors
/// Those of `bind(2)` and `listen(2)`: `EADDRINUSE`, `EADDRNOTAVAIL`, `EACCES` for a port below
/// 1024.
pub fn hold_tcp_address(addr: &SocketAddr) -> io::Result<OwnedFd> {
    let family = if addr.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let fd = net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // Connections of an earlier process may still be in TIME-WAIT.
    net::sockopt::set_socket_reuseaddr(&fd, true)?;
    if addr.is_ipv6() {
        net::sockopt::set_ipv6_v6only(&fd, true)?;
    }
    drop_all_incoming(fd.as_fd())?;
    net::bind(&fd, addr)?;
    net::listen(&fd, 0)?;
    Ok(fd)
}

/// Wakes all receives that sleep on the socket, for good: later receives do not sleep either.
/// Queued datagrams can still be received.
pub fn wake(fd: BorrowedFd<'_>) {
    // Reports ENOTCONN on a socket that is not connected, after it has done its work
    // (inet_shutdown in net/ipv4/af_inet.c).
    _ = net::shutdown(fd, Shutdown::Read);
}

/// The inode under which `/proc/net/udp` lists the socket.
///
/// # Errors
/// Those of `fstat(2)`.
pub fn inode(fd: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(rustix::fs::fstat(fd)?.st_ino)
}

/// Sleeps until a datagram is queued, the socket is shut down, or `timeout` expires, with the
/// precision of the calling thread's timer slack (ppoll(2)). A signal ends it early. True if a
/// receive does not block.
pub fn wait_readable(fd: BorrowedFd<'_>, timeout: Duration) -> bool {
    // Other errors than a signal mean invalid arguments.
    wait_for(fd, PollFlags::IN, timeout).is_ok_and(|events| !events.is_empty())
}

/// Waits until one of `events` or an error is pending, for at most `timeout`; returns the pending
/// ones.
fn wait_for(fd: BorrowedFd<'_>, events: PollFlags, timeout: Duration) -> io::Result<PollFlags> {
    let mut poll = [PollFd::from_borrowed_fd(fd, events)];
    let tv_sec = timeout.as_secs().min(1 << 30) as i64;
    let time = Timespec { tv_sec, tv_nsec: timeout.subsec_nanos().into() };
    event::poll(&mut poll, Some(&time))?;
    Ok(poll[0].revents())
}

/// Waits until the socket can send, for at most `timeout`; true if it can.
#[must_use]
pub fn wait_writable(fd: BorrowedFd<'_>, timeout: Duration) -> bool {
    wait_for(fd, PollFlags::OUT, timeout).is_ok_and(|events| events.contains(PollFlags::OUT))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn bound_socket() -> OwnedFd {
        let addr = "127.0.0.1:0".parse().unwrap();
        let fd = open(&addr).unwrap();
        bind(fd.as_fd(), &addr).unwrap();
        fd
    }

    #[test]
    fn a_single_bound_socket_becomes_a_reuseport_group() {
        let first = bound_socket();
        let addr = local_addr(first.as_fd()).unwrap();
        let second = open(&addr).unwrap();
        set_flag(second.as_fd(), Flag::ReusePort, true).unwrap();
        assert_eq!(bind(second.as_fd(), &addr).unwrap_err().raw_os_error(), Some(libc::EADDRINUSE));
        set_flag(first.as_fd(), Flag::ReusePort, true).unwrap();
        bind(second.as_fd(), &addr).unwrap();
    }

    #[test]
    fn full_queue_drops_are_counted() {
        let fd = bound_socket();
        let limit_bytes = queue_state(fd.as_fd()).unwrap().limit_bytes;
        assert!(limit_bytes > 4096);
        let empty = QueueState { queued_bytes: 0, limit_bytes, drops: 0 };
        assert_eq!(queue_state(fd.as_fd()).unwrap(), empty);
        set_buffer(fd.as_fd(), Buffer::Receive, 4096).unwrap();
        let sender = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let target = local_addr(fd.as_fd()).unwrap();
        for _ in 0..100 {
            sender.send_to(&[0; 1000], target).unwrap();
        }
        let state = queue_state(fd.as_fd()).unwrap();
        assert!(state.drops > 0 && state.drops < 100 && state.queued_bytes > 0, "{state:?}");
    }
}
