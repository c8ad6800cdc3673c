//! UDP sockets: opening, binding, options, what the kernel says about them.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::time::Duration;

use crate::addr::SockAddr;
use crate::cbpf::{self, Insn};
use crate::check;

/// Opens a UDP socket of the family of `addr`, closed on exec.
///
/// # Errors
/// What `socket(2)` reports: `EMFILE` and `ENFILE` without descriptors, `EAFNOSUPPORT` without
/// IPv6.
pub fn open(addr: &SocketAddr) -> io::Result<OwnedFd> {
    let family = if addr.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: socket(2) takes plain integers.
    let fd = check(unsafe { libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: the descriptor is new and belongs to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Binds the socket.
///
/// # Errors
/// What `bind(2)` reports: `EADDRINUSE`, `EADDRNOTAVAIL`, `EACCES` for a port below 1024.
pub fn bind(fd: BorrowedFd<'_>, addr: &SocketAddr) -> io::Result<()> {
    let raw = SockAddr::from(*addr);
    let bytes = raw.as_bytes();
    // SAFETY: the pointer and length are those of a slice that lives across the call.
    check(unsafe { libc::bind(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len() as u32) })?;
    Ok(())
}

/// The address the socket is bound to.
///
/// # Errors
/// What `getsockname(2)` reports, or `InvalidData` for a socket that is not IP.
pub fn local_addr(fd: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    let mut raw = SockAddr::EMPTY;
    let mut len = SockAddr::CAPACITY as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, which is what a SockAddr has room for.
    check(unsafe { libc::getsockname(fd.as_raw_fd(), (&raw mut raw).cast(), &raw mut len) })?;
    raw.to_std().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// What a lessor has to know of a socket that a program handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketInfo {
    /// It is a UDP socket.
    pub is_udp: bool,
    /// It takes no IPv4, or could not anyway.
    pub only_v6: bool,
    /// Its network namespace, as a number (Linux 5.14).
    pub namespace: u64,
    /// A number that no other socket has, as long as the machine runs (Linux 4.12).
    pub cookie: u64,
}

/// Looks at a socket of somebody else's.
///
/// # Errors
/// What `getsockopt(2)` reports: `ENOTSOCK`; `ENOPROTOOPT` before Linux 5.14.
pub fn socket_info(fd: BorrowedFd<'_>) -> io::Result<SocketInfo> {
    /// Of asm-generic/socket.h.
    const SO_NETNS_COOKIE: i32 = 71;
    let number = |name| get_int(fd, libc::SOL_SOCKET, name);
    let (kind, protocol) = (number(libc::SO_TYPE)?, number(libc::SO_PROTOCOL)?);
    let only_v6 = match number(libc::SO_DOMAIN)? {
        libc::AF_INET => false,
        libc::AF_INET6 => get_int(fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY)? != 0,
        _ => return Err(io::Error::from_raw_os_error(libc::EAFNOSUPPORT)),
    };
    let wide = |name| {
        let mut value = 0_u64;
        let mut len = size_of::<u64>() as libc::socklen_t;
        let to = (&raw mut value).cast();
        // SAFETY: the kernel writes at most `len` bytes into `value`, which lives across the call.
        check(unsafe { libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, name, to, &raw mut len) })?;
        io::Result::Ok(value)
    };
    let (namespace, cookie) = (wide(SO_NETNS_COOKIE)?, wide(libc::SO_COOKIE)?);
    let is_udp = (kind, protocol) == (libc::SOCK_DGRAM, libc::IPPROTO_UDP);
    Ok(SocketInfo { is_udp, only_v6, namespace, cookie })
}

pub(crate) fn set<T: Copy>(fd: BorrowedFd<'_>, level: i32, name: i32, value: T) -> io::Result<()> {
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of `value`, which lives across the call.
    check(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const value).cast(), len) })?;
    Ok(())
}

fn get_int(fd: BorrowedFd<'_>, level: i32, name: i32) -> io::Result<i32> {
    let mut value = 0;
    let mut len = size_of::<i32>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes into `value`, which lives across the call.
    check(unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, (&raw mut value).cast(), &raw mut len) })?;
    Ok(value)
}

/// Of linux/in6.h; the libc crate does not have it.
const IPV6_MULTICAST_ALL: libc::c_int = 29;

/// An option of a lane's socket that is on or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flag {
    /// `SO_REUSEPORT` (Linux 3.9). Set on a bound socket, it lets later ones join it in a new
    /// group.
    ReusePort,
    /// `IPV6_V6ONLY`: an IPv6 wildcard socket takes no IPv4.
    OnlyV6,
    /// `IP_PKTINFO`: say to which address each datagram was sent.
    PktInfoV4,
    /// `IPV6_RECVPKTINFO`: the same over IPv6.
    PktInfoV6,
    /// `IP_RECVTOS`: say the type of service.
    TosV4,
    /// `IPV6_RECVTCLASS`: say the traffic class.
    TosV6,
    /// `UDP_GRO` (Linux 5.0): hand trains of datagrams over as one message.
    Gro,
    /// `SO_TIMESTAMPNS`: say when the kernel took the packet.
    Timestamp,
    /// `IP_MULTICAST_ALL`: take multicast of groups that other sockets joined.
    MulticastAllV4,
    /// `IPV6_MULTICAST_ALL` (Linux 4.20): the same over IPv6.
    MulticastAllV6,
    /// `IP_RECVERR`: tell of ICMP errors by calls that follow. No lane asks for them; an
    /// application may.
    ErrorsV4,
    /// `IPV6_RECVERR`: the same over IPv6.
    ErrorsV6,
}

/// Turns an option on or off.
///
/// # Errors
/// What `setsockopt(2)` reports; `ENOPROTOOPT` where the kernel does not have the option.
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

/// Whether an error may be one that an earlier datagram has left on the socket: what the kernel
/// makes of ICMP messages (`icmp_err_convert` in net/ipv4/icmp.c, `icmpv6_err_convert` in
/// net/ipv6/icmp.c).
///
/// A socket that is not connected has them if somebody has asked for them (`IP_RECVERR`). Each is
/// told once, by whatever call comes next, which then does nothing else.
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

/// Whether the kernel takes `UDP_SEGMENT` (GSO, Linux 4.18) on this socket.
#[must_use]
pub fn supports_gso(fd: BorrowedFd<'_>) -> bool {
    get_int(fd, libc::SOL_UDP, libc::UDP_SEGMENT).is_ok()
}

/// Which of the two buffers of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffer {
    /// What has arrived and was not taken yet.
    Receive,
    /// What was sent and has not left yet.
    Send,
}

/// Asks for a buffer of `bytes` and returns the size that the kernel gave (it books twice what is
/// asked for, for its own overhead; here both are the payload's side).
///
/// Tries `SO_RCVBUFFORCE`/`SO_SNDBUFFORCE` first, which `CAP_NET_ADMIN` may, then the plain option,
/// which the kernel silently caps at `net.core.rmem_max`/`wmem_max`.
///
/// # Errors
/// What `setsockopt(2)` reports.
pub fn set_buffer(fd: BorrowedFd<'_>, which: Buffer, bytes: usize) -> io::Result<usize> {
    let (force, plain) = match which {
        Buffer::Receive => (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF),
        Buffer::Send => (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF),
    };
    let ask = i32::try_from(bytes).unwrap_or(i32::MAX / 2).min(i32::MAX / 2);
    if set(fd, libc::SOL_SOCKET, force, ask).is_err() {
        set(fd, libc::SOL_SOCKET, plain, ask)?;
    }
    Ok(get_int(fd, libc::SOL_SOCKET, plain)?.unsigned_abs() as usize / 2)
}

/// Bounds how long a receive may sleep; zero means for ever.
///
/// # Errors
/// What `setsockopt(2)` reports.
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
    /// Memory that queued datagrams hold, in bytes with the kernel's overhead.
    pub queued_bytes: u32,
    /// Memory at which the kernel drops what arrives: the size of the receive buffer, its overhead
    /// included.
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
    let mut words = [0_u32; 9];
    let mut len = size_of_val(&words) as libc::socklen_t;
    let name = libc::SO_MEMINFO;
    // SAFETY: the kernel writes at most `len` bytes into `words`, which lives across the call.
    check(unsafe {
        libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, name, (&raw mut words).cast(), &raw mut len)
    })?;
    Ok(QueueState { queued_bytes: words[0], limit_bytes: words[1], drops: words[8] })
}

/// Gives the socket's reuseport group a classic BPF program that returns the index of a socket
/// (Linux 4.5). It needs no privilege.
///
/// # Errors
/// `EINVAL` for a program that the kernel's check refuses, or a socket without `SO_REUSEPORT`.
pub fn attach_reuseport_cbpf(fd: BorrowedFd<'_>, program: &[Insn]) -> io::Result<()> {
    let fprog = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?,
        filter: program.as_ptr().cast_mut(),
    };
    set(fd, libc::SOL_SOCKET, libc::SO_ATTACH_REUSEPORT_CBPF, fprog)
}

/// Makes the kernel drop, and count as dropped, everything that would still be queued on the
/// socket: what is in the queue can be taken in peace.
///
/// # Errors
/// What `setsockopt(2)` reports.
pub fn drop_all_incoming(fd: BorrowedFd<'_>) -> io::Result<()> {
    // Keep nothing of the packet.
    let program = [cbpf::insn(cbpf::RET_K, 0)];
    let fprog = libc::sock_fprog { len: 1, filter: program.as_ptr().cast_mut() };
    set(fd, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, fprog)
}

/// Wakes whoever sleeps in a receive on the socket, for good: later receives do not sleep any more.
/// What is queued can still be taken.
pub fn wake(fd: BorrowedFd<'_>) {
    // On a socket that is not connected this reports ENOTCONN, after it has done its work
    // (inet_shutdown in net/ipv4/af_inet.c).
    // SAFETY: shutdown(2) takes plain integers.
    unsafe { libc::shutdown(fd.as_raw_fd(), libc::SHUT_RD) };
}

/// The number under which `/proc/net/udp` lists the socket.
///
/// # Errors
/// What `fstat(2)` reports.
pub fn inode(fd: BorrowedFd<'_>) -> io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    let file = std::fs::File::from(fd.try_clone_to_owned()?);
    Ok(file.metadata()?.ino())
}

/// Sleeps until there is something to receive, or the socket is shut down, or for `timeout`, to the
/// precision of the calling thread's timer slack (ppoll(2)). A signal ends it early.
pub fn wait_readable(fd: BorrowedFd<'_>, timeout: Duration) {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let time = libc::timespec {
        tv_sec: timeout.as_secs().min(1 << 30) as libc::time_t,
        tv_nsec: libc::c_long::from(timeout.subsec_nanos() as i32),
    };
    // SAFETY: the kernel reads and writes one pollfd and reads `time`, which live across the call;
    // a null signal mask leaves the mask alone. Its errors are those of arguments that are wrong.
    unsafe { libc::ppoll(&raw mut poll, 1, &raw const time, ptr::null()) };
}

/// Waits until the socket can send, for at most `timeout`; true if it can.
#[must_use]
pub fn wait_writable(fd: BorrowedFd<'_>, timeout: Duration) -> bool {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    let millis = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: the kernel reads and writes one pollfd, which lives across the call.
    unsafe { libc::poll(&raw mut poll, 1, millis) == 1 && poll.revents & libc::POLLOUT != 0 }
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
    fn a_group_forms_around_a_socket_that_was_bound_alone() {
        let first = bound_socket();
        let addr = local_addr(first.as_fd()).unwrap();
        let second = open(&addr).unwrap();
        set_flag(second.as_fd(), Flag::ReusePort, true).unwrap();
        assert_eq!(bind(second.as_fd(), &addr).unwrap_err().raw_os_error(), Some(libc::EADDRINUSE));
        set_flag(first.as_fd(), Flag::ReusePort, true).unwrap();
        bind(second.as_fd(), &addr).unwrap();
    }

    #[test]
    fn drops_of_a_full_queue_are_counted() {
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
