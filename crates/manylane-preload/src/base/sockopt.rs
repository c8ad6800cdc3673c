//! Options that a lane's socket has in common with the program's own: read from the one and set on
//! the other. An option that is not listed here makes a socket plain.

use std::ptr;

use libc::{c_int, c_void, socklen_t};
use manylane_ipc::report::Reason;

use crate::base::real::call;

/// Time at which an option is set on a lane.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// It affects how the address is bound.
    BeforeBind,
    AfterBind,
}
use Phase::{AfterBind, BeforeBind};

const UDP_NO_CHECK6_TX: c_int = 101;
const UDP_NO_CHECK6_RX: c_int = 102;
const SO_BUSY_POLL_BUDGET: c_int = 70;
const SO_PREFER_BUSY_POLL: c_int = 69;
const SO_TIMESTAMP_NEW: c_int = 63;
const SO_TIMESTAMPNS_NEW: c_int = 64;
/// No option here has a longer value.
const OPTION_LEN_MAX: usize = 64;

/// The options that a lane mirrors: level, name, when.
const REPLICATED: [(c_int, c_int, Phase); 45] = [
    (libc::SOL_SOCKET, libc::SO_REUSEADDR, BeforeBind),
    (libc::SOL_SOCKET, libc::SO_BINDTODEVICE, BeforeBind),
    (libc::SOL_IP, libc::IP_FREEBIND, BeforeBind),
    (libc::SOL_IP, libc::IP_TRANSPARENT, BeforeBind),
    (libc::SOL_IP, libc::IP_BIND_ADDRESS_NO_PORT, BeforeBind),
    (libc::SOL_IPV6, libc::IPV6_V6ONLY, BeforeBind),
    (libc::SOL_IPV6, libc::IPV6_FREEBIND, BeforeBind),
    (libc::SOL_IPV6, libc::IPV6_TRANSPARENT, BeforeBind),
    (libc::SOL_SOCKET, libc::SO_RCVBUF, BeforeBind),
    (libc::SOL_SOCKET, libc::SO_SNDBUF, BeforeBind),
    (libc::SOL_SOCKET, libc::SO_MARK, BeforeBind),
    (libc::SOL_SOCKET, libc::SO_PRIORITY, AfterBind),
    (libc::SOL_SOCKET, libc::SO_BROADCAST, AfterBind),
    (libc::SOL_SOCKET, libc::SO_DONTROUTE, AfterBind),
    (libc::SOL_SOCKET, libc::SO_NO_CHECK, AfterBind),
    (libc::SOL_SOCKET, libc::SO_RCVLOWAT, AfterBind),
    (libc::SOL_SOCKET, libc::SO_SNDTIMEO, AfterBind),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMP, BeforeBind),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, BeforeBind),
    (libc::SOL_SOCKET, SO_TIMESTAMP_NEW, BeforeBind),
    (libc::SOL_SOCKET, SO_TIMESTAMPNS_NEW, BeforeBind),
    (libc::SOL_SOCKET, libc::SO_BUSY_POLL, AfterBind),
    (libc::SOL_SOCKET, SO_PREFER_BUSY_POLL, AfterBind),
    (libc::SOL_SOCKET, SO_BUSY_POLL_BUDGET, AfterBind),
    (libc::SOL_IP, libc::IP_TOS, AfterBind),
    (libc::SOL_IP, libc::IP_TTL, AfterBind),
    (libc::SOL_IP, libc::IP_MTU_DISCOVER, AfterBind),
    (libc::SOL_IP, libc::IP_MULTICAST_TTL, AfterBind),
    (libc::SOL_IP, libc::IP_MULTICAST_LOOP, AfterBind),
    (libc::SOL_IP, libc::IP_PKTINFO, BeforeBind),
    (libc::SOL_IP, libc::IP_RECVTOS, BeforeBind),
    (libc::SOL_IP, libc::IP_RECVTTL, BeforeBind),
    (libc::SOL_IP, libc::IP_RECVORIGDSTADDR, BeforeBind),
    (libc::SOL_IPV6, libc::IPV6_TCLASS, AfterBind),
    (libc::SOL_IPV6, libc::IPV6_UNICAST_HOPS, AfterBind),
    (libc::SOL_IPV6, libc::IPV6_MTU_DISCOVER, AfterBind),
    (libc::SOL_IPV6, libc::IPV6_MULTICAST_HOPS, AfterBind),
    (libc::SOL_IPV6, libc::IPV6_MULTICAST_LOOP, AfterBind),
    (libc::SOL_IPV6, libc::IPV6_RECVPKTINFO, BeforeBind),
    (libc::SOL_IPV6, libc::IPV6_RECVTCLASS, BeforeBind),
    (libc::SOL_IPV6, libc::IPV6_RECVHOPLIMIT, BeforeBind),
    (libc::SOL_UDP, libc::UDP_SEGMENT, AfterBind),
    (libc::SOL_UDP, libc::UDP_GRO, BeforeBind),
    (libc::SOL_UDP, UDP_NO_CHECK6_TX, AfterBind),
    (libc::SOL_UDP, UDP_NO_CHECK6_RX, BeforeBind),
];

/// Options without an effect on UDP.
const IGNORED: [(c_int, c_int); 4] = [
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::SOL_SOCKET, libc::SO_LINGER),
    (libc::SOL_SOCKET, libc::SO_OOBINLINE),
    (libc::SOL_SOCKET, libc::SO_DEBUG),
];

/// The reason why a socket with this option must be plain; none if lanes can have it, too.
pub(crate) fn plain_reason(level: c_int, name: c_int) -> Option<Reason> {
    if replicated(level, name).is_some() || IGNORED.contains(&(level, name)) {
        return None;
    }
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_REUSEPORT) => Some(Reason::Reuseport),
        (libc::SOL_IP, libc::IP_RECVERR) | (libc::SOL_IPV6, libc::IPV6_RECVERR) => Some(Reason::ErrorQueue),
        (
            libc::SOL_IP,
            libc::IP_ADD_MEMBERSHIP
            | libc::IP_ADD_SOURCE_MEMBERSHIP
            | libc::MCAST_JOIN_GROUP
            | libc::MCAST_JOIN_SOURCE_GROUP,
        )
        | (
            libc::SOL_IPV6,
            libc::IPV6_ADD_MEMBERSHIP | libc::MCAST_JOIN_GROUP | libc::MCAST_JOIN_SOURCE_GROUP,
        ) => Some(Reason::Multicast),
        _ => Some(Reason::Option),
    }
}

/// The option of `level` to set on every lane when the program sets `name`; none if lanes do not
/// have it.
pub(crate) fn replicated(level: c_int, name: c_int) -> Option<c_int> {
    // The kernel reports a forced size as that of the plain option.
    let name = match (level, name) {
        (libc::SOL_SOCKET, libc::SO_RCVBUFFORCE) => libc::SO_RCVBUF,
        (libc::SOL_SOCKET, libc::SO_SNDBUFFORCE) => libc::SO_SNDBUF,
        _ => name,
    };
    REPLICATED.iter().any(|(of, at, _)| (*of, *at) == (level, name)).then_some(name)
}

/// Sets the options of the program's socket `from` on `lane`, where they differ. Skips options
/// that the address family does not have.
pub(crate) fn replicate(from: c_int, lane: c_int, before_bind: bool) {
    for (level, name, when) in REPLICATED {
        if (when == BeforeBind) == before_bind {
            replicate_one(from, lane, level, name);
        }
    }
}

/// Sets one option on `lane` to its value on `from`.
pub(crate) fn replicate_one(from: c_int, lane: c_int, level: c_int, name: c_int) {
    let (Some(want), have) = (read(from, level, name), read(lane, level, name)) else { return };
    if have == Some(want) {
        return;
    }
    let (mut value, len) = want;
    // The kernel doubles the value that is set.
    let forced = match (level, name) {
        (libc::SOL_SOCKET, libc::SO_RCVBUF) => Some(libc::SO_RCVBUFFORCE),
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => Some(libc::SO_SNDBUFFORCE),
        _ => None,
    };
    if let Some(forced) = forced {
        let doubled = i32::from_ne_bytes([value[0], value[1], value[2], value[3]]);
        value[..4].copy_from_slice(&(doubled / 2).to_ne_bytes());
        if write(lane, level, forced, &value[..len]) == 0 {
            return;
        }
    }
    write(lane, level, name, &value[..len]);
}

fn read(fd: c_int, level: c_int, name: c_int) -> Option<([u8; OPTION_LEN_MAX], usize)> {
    let mut value = [0; OPTION_LEN_MAX];
    let len = read_into(fd, level, name, &mut value)?;
    Some((value, len))
}

/// Reads an option. Returns its length.
pub(crate) fn read_into(fd: c_int, level: c_int, name: c_int, value: &mut [u8]) -> Option<usize> {
    let mut len = value.len() as socklen_t;
    // SAFETY: both live through the call, which writes at most `len` bytes.
    let done = unsafe { call::getsockopt(fd, level, name, value.as_mut_ptr().cast(), &raw mut len) };
    (done == 0).then_some(len as usize)
}

/// Sets an option.
pub(crate) fn write<T: ?Sized>(fd: c_int, level: c_int, name: c_int, value: &T) -> c_int {
    let (at, len) = (ptr::from_ref(value).cast::<c_void>(), size_of_val(value) as socklen_t);
    // SAFETY: the value lives through the call, which only reads it.
    unsafe { call::setsockopt(fd, level, name, at, len) }
}

/// Options that add control messages to datagrams.
const CMSG_OPTIONS: [(c_int, c_int); 12] = [
    (libc::SOL_SOCKET, libc::SO_TIMESTAMP),
    (libc::SOL_SOCKET, libc::SO_TIMESTAMPNS),
    (libc::SOL_SOCKET, SO_TIMESTAMP_NEW),
    (libc::SOL_SOCKET, SO_TIMESTAMPNS_NEW),
    (libc::SOL_IP, libc::IP_PKTINFO),
    (libc::SOL_IP, libc::IP_RECVTOS),
    (libc::SOL_IP, libc::IP_RECVTTL),
    (libc::SOL_IP, libc::IP_RECVORIGDSTADDR),
    (libc::SOL_IPV6, libc::IPV6_RECVPKTINFO),
    (libc::SOL_IPV6, libc::IPV6_RECVTCLASS),
    (libc::SOL_IPV6, libc::IPV6_RECVHOPLIMIT),
    (libc::SOL_UDP, libc::UDP_GRO),
];

/// Other options that frames cannot honour unless they are zero: they change how a datagram is
/// sent, or which ones are received.
const KERNEL_ONLY: [(c_int, c_int); 10] = [
    (libc::SOL_SOCKET, libc::SO_BINDTODEVICE),
    (libc::SOL_SOCKET, libc::SO_MARK),
    (libc::SOL_SOCKET, libc::SO_PRIORITY),
    (libc::SOL_SOCKET, libc::SO_DONTROUTE),
    (libc::SOL_SOCKET, libc::SO_NO_CHECK),
    (libc::SOL_IP, libc::IP_TOS),
    (libc::SOL_IPV6, libc::IPV6_TCLASS),
    (libc::SOL_UDP, libc::UDP_SEGMENT),
    (libc::SOL_UDP, UDP_NO_CHECK6_TX),
    (libc::SOL_UDP, UDP_NO_CHECK6_RX),
];

/// True if an option adds control messages to datagrams.
pub(crate) fn enables_cmsg(level: c_int, name: c_int) -> bool {
    CMSG_OPTIONS.contains(&(level, name))
}

/// True if `fd` has an option set that adds control messages.
pub(crate) fn has_cmsg(fd: c_int) -> bool {
    CMSG_OPTIONS.iter().any(|at| is_set(fd, at))
}

fn is_set(fd: c_int, (level, name): &(c_int, c_int)) -> bool {
    read(fd, *level, *name).is_some_and(|(value, len)| value.iter().take(len).any(|byte| *byte != 0))
}

/// True if a socket's options require the kernel's data path, not frames (engine `xdp`).
pub(crate) fn needs_kernel(fd: c_int) -> bool {
    has_cmsg(fd) || KERNEL_ONLY.iter().any(|at| is_set(fd, at))
}

/// True if an option changes frames: one that they cannot honour, or a field of the IP header.
pub(crate) fn affects_frames(level: c_int, name: c_int) -> bool {
    enables_cmsg(level, name)
        || KERNEL_ONLY.contains(&(level, name))
        || matches!(
            (level, name),
            (libc::SOL_IP, libc::IP_TTL | libc::IP_MTU_DISCOVER) | (libc::SOL_IPV6, libc::IPV6_UNICAST_HOPS)
        )
}

/// The hop limit of sent packets, and whether routers may fragment them.
pub(crate) fn ip_header_fields(fd: c_int) -> (u8, bool) {
    let hops = int_option(fd, libc::SOL_IPV6, libc::IPV6_UNICAST_HOPS);
    let hops = hops.or_else(|| int_option(fd, libc::SOL_IP, libc::IP_TTL));
    let discover = int_option(fd, libc::SOL_IP, libc::IP_MTU_DISCOVER).unwrap_or(libc::IP_PMTUDISC_WANT);
    let forbids = matches!(discover, libc::IP_PMTUDISC_WANT | libc::IP_PMTUDISC_DO | libc::IP_PMTUDISC_PROBE);
    (hops.and_then(|hops| u8::try_from(hops).ok()).filter(|hops| *hops > 0).unwrap_or(64), !forbids)
}

/// Reads an option with an integer value.
pub(crate) fn int_option(fd: c_int, level: c_int, name: c_int) -> Option<c_int> {
    let (value, len) = read(fd, level, name)?;
    (len == size_of::<c_int>()).then(|| c_int::from_ne_bytes([value[0], value[1], value[2], value[3]]))
}

/// Sets an option with an integer value.
pub(crate) fn set_int_option(fd: c_int, level: c_int, name: c_int, value: c_int) -> bool {
    write(fd, level, name, &value) == 0
}

/// A receive timeout that is negative: a receive does not wait.
pub(crate) const NO_WAIT_US: u64 = u64::MAX;

/// Sets the receive timeout; 0: none.
pub(crate) fn set_recv_timeout(fd: c_int, us: u64) {
    let sec = if us == NO_WAIT_US { -1 } else { (us / 1_000_000) as i64 };
    let time = libc::timeval { tv_sec: sec, tv_usec: (us % 1_000_000) as i64 };
    write(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &time);
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd as _;
    use std::time::Duration;

    use manylane_test_support::wait_for;

    use super::*;

    #[test]
    fn lanes_accept_ipv6_without_a_checksum_as_their_socket_does() {
        let Ok(own) = UdpSocket::bind("[::1]:0") else { return };
        let lane = UdpSocket::bind("[::1]:0").unwrap();
        let client = UdpSocket::bind("[::1]:0").unwrap();
        lane.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        assert!(set_int_option(client.as_raw_fd(), libc::SOL_UDP, UDP_NO_CHECK6_TX, 1));
        let receives = || {
            client.send_to(b"unchecked", lane.local_addr().unwrap()).unwrap();
            lane.recv(&mut [0; 16]).is_ok()
        };
        assert!(!receives());
        assert!(!needs_kernel(own.as_raw_fd()));
        assert!(set_int_option(own.as_raw_fd(), libc::SOL_UDP, UDP_NO_CHECK6_RX, 1));
        replicate(own.as_raw_fd(), lane.as_raw_fd(), true);
        wait_for("a datagram without a checksum", receives, |receives| *receives);
        assert_eq!(plain_reason(libc::SOL_UDP, UDP_NO_CHECK6_RX), None);
        assert!(needs_kernel(own.as_raw_fd()) && affects_frames(libc::SOL_UDP, UDP_NO_CHECK6_RX));
    }

    #[test]
    fn unsupported_options_make_a_socket_plain() {
        const UDP_ENCAP: c_int = 100;
        for name in [libc::UDP_CORK, UDP_ENCAP] {
            assert_eq!(plain_reason(libc::SOL_UDP, name), Some(Reason::Option), "{name}");
        }
    }
}
