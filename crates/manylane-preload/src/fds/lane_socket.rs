//! A lane's own kernel socket: opened like the program's, bound to the same address, in one
//! reuseport group with it.
//!
//! # A group that the program does not notice
//!
//! The program binds its socket alone. A port that is taken is refused, and this port is refused
//! to others. Only when a lane is opened does the program's socket get SO_REUSEPORT, which the
//! kernel checks when the *second* socket binds; then it makes the group. While there are lanes,
//! another process of the same user that sets SO_REUSEPORT itself could join the port. Without the
//! library it would be refused.
//!
//! The group is steered by classic BPF, which needs no privilege (`steer.rs`). Until that is
//! attached, and after a lane has lost its owner, all threads poll every socket of the group, so
//! that any socket may get a datagram. Where that is not so (before a fork, when the one receiver
//! may be in a wait without a bound on the program's own socket), the group is steered before it
//! exists ([`pre_steer`]): the kernel accepts a group's program from a socket that asks for a
//! group and is not bound yet, and keeps it when the socket is then bound without asking. Each
//! socket is therefore bound with a program that returns "the first socket". A lane that joins
//! gets nothing until the library steers to it.
//!
//! # Copies
//!
//! The kernel delivers broadcasts and multicasts to every socket of a group. A lane that is bound
//! to a wildcard address has a filter that drops them (`steer::unicast_only`), so that the program
//! gets one copy, through lane 0.

use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{c_int, pollfd, socklen_t};
use manylane_ipc::report::Reason;
use manylane_sys::addr::SockAddr;
use manylane_sys::device::LOOPBACK_IFINDEX;

use crate::base::real::{self, call};
use crate::base::settings::WAIT_SLICE_MS;
use crate::base::{sockopt, steer};
use crate::fds::table::{self, Entry};
use crate::fds::{hidden_fds, identity};

/// The address that `fd` is bound to.
pub(crate) fn local_addr(fd: c_int) -> Option<SocketAddr> {
    let (mut addr, mut len) = (SockAddr::EMPTY, SockAddr::CAPACITY as socklen_t);
    // SAFETY: both live through the call, which writes at most `len` bytes, the capacity of `addr`.
    let done = unsafe { call::getsockname(fd, (&raw mut addr).cast(), &raw mut len) };
    if done == 0 { addr.to_std() } else { None }
}

/// The inode of a socket, as in `/proc/PID/fd`; 0 if it is not known.
pub(crate) fn inode(fd: c_int) -> u64 {
    let mut stat = MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: the kernel writes a stat where there is room for one; zeroed before, and zeroes are
    // a value of it.
    unsafe { if libc::fstat(fd, stat.as_mut_ptr()) == 0 { stat.assume_init().st_ino } else { 0 } }
}

fn bind(fd: c_int, addr: SocketAddr) -> bool {
    let addr = SockAddr::from(addr);
    let bytes = addr.as_bytes();
    // SAFETY: the address lives through the call, which reads as many bytes.
    unsafe { call::bind(fd, bytes.as_ptr().cast(), bytes.len() as socklen_t) == 0 }
}

fn connect(fd: c_int, addr: SocketAddr) -> bool {
    let addr = SockAddr::from(addr);
    let bytes = addr.as_bytes();
    // SAFETY: as above.
    unsafe { call::connect(fd, bytes.as_ptr().cast(), bytes.len() as socklen_t) == 0 }
}

/// Opens one more lane's socket in the group of the program's `fd`. The library does not steer to
/// it yet. Calls `in_group` as soon as it is bound.
pub(crate) fn open_lane(fd: c_int, in_group: impl FnOnce()) -> Result<c_int, Reason> {
    let bound = local_addr(fd).ok_or(Reason::NoSocket)?;
    let family = if bound.is_ipv6() { libc::AF_INET6 } else { libc::AF_INET };
    let lane = hidden_fds::hide(|| call::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0));
    if lane < 0 {
        return Err(Reason::NoSocket);
    }
    // The calling thread may have changed its network namespace since the program's socket was
    // opened. In another one, the socket would not get the same datagrams.
    if !is_same_netns(fd, lane) {
        hidden_fds::close(lane);
        return Err(Reason::Namespace);
    }
    sockopt::replicate(fd, lane, true);
    sockopt::set_recv_timeout(lane, WAIT_SLICE_MS as u64 * 1000);
    let mut ready = sockopt::set_int_option(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)
        && sockopt::set_int_option(lane, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1);
    // A socket bound to one unicast address gets no copies of datagrams.
    if bound.ip().is_unspecified() {
        ready &= steer::unicast_only()
            .is_some_and(|only| attach_filter(lane, libc::SO_ATTACH_FILTER, only.code()));
    }
    if ready && bind(lane, bound) {
        in_group();
        sockopt::replicate(fd, lane, false);
        return Ok(lane);
    }
    hidden_fds::close(lane);
    Err(Reason::NoSocket)
}

/// True if two sockets are in one network namespace. A kernel before 5.14 cannot tell: assumed,
/// unless the process has changed its namespace.
fn is_same_netns(one: c_int, other: c_int) -> bool {
    match (identity::netns_cookie(one), identity::netns_cookie(other)) {
        (Some(one), Some(other)) => one == other,
        _ => !has_changed_netns(),
    }
}

const SO_DETACH_REUSEPORT_BPF: c_int = 68;

/// Runs before `fd` is bound: if it gets a group, this socket receives every datagram from the
/// moment the group exists until the library steers. The kernel accepts this only from a socket
/// that asks for a group and is not bound. Bound without asking, the socket is as exclusive as
/// ever. True if it worked.
pub(crate) fn pre_steer(fd: c_int) -> bool {
    let ask = |value| sockopt::set_int_option(fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, value);
    let done = ask(1) && attach_filter(fd, libc::SO_ATTACH_REUSEPORT_CBPF, &steer::FIRST_SOCKET);
    // Otherwise other sockets could bind beside it.
    ask(0) && done
}

/// Detaches the steering from a socket that is in no group of ours (Linux 5.3): a group that the
/// program makes is the kernel's to steer.
pub(crate) fn detach_steering(fd: c_int) {
    sockopt::set_int_option(fd, libc::SOL_SOCKET, SO_DETACH_REUSEPORT_BPF, 0);
}

/// Descriptors that stay free for the program: a quarter of its limit, within these bounds.
const FD_RESERVE_MIN: usize = 64;
const FD_RESERVE_MAX: usize = 1024;

/// Returns the number of descriptors that the library may take, at most `wanted`. It never has more
/// than it leaves free, and leaves the reserve.
pub(crate) fn spare_fds(wanted: usize) -> usize {
    let limit = hidden_fds::fd_limit().min(c_int::MAX as u64) as usize;
    let hidden = table::tracked(0, u32::MAX).filter(|(_, entry)| *entry == Entry::Hidden).count();
    let reserve = (limit / 4).clamp(FD_RESERVE_MIN, FD_RESERVE_MAX);
    let free = count_free_fds(limit, (hidden + 2 * wanted).max(reserve + wanted));
    wanted.min(free.saturating_sub(hidden) / 2).min(free.saturating_sub(reserve))
}

/// Counts free descriptors below `limit`, until there are `enough`. Starts at the top, where most
/// of them are, and checks many with one poll(2).
fn count_free_fds(limit: usize, enough: usize) -> usize {
    const CHUNK_LEN: usize = 256;
    let (mut top, mut free) = (limit, 0);
    while top > 0 && free < enough {
        let first = top.saturating_sub(CHUNK_LEN);
        let mut fds: [pollfd; CHUNK_LEN] =
            std::array::from_fn(|nth| pollfd { fd: (first + nth) as c_int, events: 0, revents: 0 });
        let asked = &mut fds[..top - first];
        if real::ppoll_raw(asked, real::NO_WAIT, None) < 0 {
            break;
        }
        free += asked.iter().filter(|at| at.revents & libc::POLLNVAL != 0).count();
        top = first;
    }
    free
}

/// Attaches a classic BPF program to a socket, as its filter or as its group's steering.
pub(crate) fn attach_filter(fd: c_int, option: c_int, code: &[libc::sock_filter]) -> bool {
    let program = libc::sock_fprog { len: code.len() as u16, filter: code.as_ptr().cast_mut() };
    sockopt::write(fd, libc::SOL_SOCKET, option, &program) == 0
}

/// Address to which a retired lane moves from a wildcard: no program is bound there.
const RETIRED_ADDR: Ipv4Addr = Ipv4Addr::new(127, 255, 255, 254);
/// All hosts (RFC 1112): no datagram has this source.
const NO_SOURCE_ADDR: Ipv4Addr = Ipv4Addr::new(224, 0, 0, 1);

/// Takes a lane out of the table of ports, for good. It keeps its queued datagrams, and gets no
/// new ones: it is connected to an address that sends nothing. Without a route there, its filter
/// drops them.
///
/// A bound socket keeps its port until it is closed. This one stays open while any thread or
/// forked process may receive from it. So that it does not block others on that port, it moves
/// from a wildcard to an address of its own, and sets SO_REUSEADDR and, if it moved, SO_REUSEPORT.
pub(crate) fn retire(lane: c_int) {
    attach_filter(lane, libc::SO_ATTACH_FILTER, &steer::DROP_ALL);
    let mut alone = false;
    if let Some(bound) = local_addr(lane) {
        alone = bound.ip().is_unspecified() && move_away(lane, bound);
        if !alone {
            connect(lane, unreachable_addr(bound));
        }
    }
    sockopt::set_int_option(lane, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1);
    // If other sockets can bind to its address, too, it would be in a group with them.
    sockopt::set_int_option(lane, libc::SOL_SOCKET, libc::SO_REUSEPORT, c_int::from(alone));
}

/// Moves a socket from a wildcard to [`RETIRED_ADDR`]. A connect sets the local address; a connect
/// to a multicast group sets it to that of IP_MULTICAST_IF. Fails without a loopback device that
/// is up, and from `::` with IPV6_V6ONLY.
fn move_away(lane: c_int, bound: SocketAddr) -> bool {
    let source = libc::ip_mreqn {
        imr_multiaddr: libc::in_addr { s_addr: 0 },
        imr_address: libc::in_addr { s_addr: u32::from(RETIRED_ADDR).to_be() },
        imr_ifindex: LOOPBACK_IFINDEX as c_int,
    };
    sockopt::write(lane, libc::SOL_IP, libc::IP_MULTICAST_IF, &source) == 0
        && connect(lane, peer_of(bound, NO_SOURCE_ADDR.into()))
}

/// An address that sends nothing: the bound one with another port, loopback in place of the
/// wildcard.
fn unreachable_addr(bound: SocketAddr) -> SocketAddr {
    match bound.ip() {
        IpAddr::V6(ip) if ip.is_unspecified() => peer_of(bound, Ipv6Addr::LOCALHOST.into()),
        IpAddr::V4(ip) if ip.is_unspecified() => peer_of(bound, Ipv4Addr::LOCALHOST.into()),
        ip => peer_of(bound, ip),
    }
}

/// Port 1 of `ip`, in the family of `bound`, and with its scope.
fn peer_of(bound: SocketAddr, ip: IpAddr) -> SocketAddr {
    let SocketAddr::V6(mut peer) = bound else { return SocketAddr::new(ip, 1) };
    peer.set_ip(match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    });
    peer.set_port(1);
    peer.into()
}

/// This process, or one that it was forked from, may have changed its network namespace.
static HAS_CHANGED_NETNS: AtomicBool = AtomicBool::new(false);

/// True if a new socket may be in another network namespace than an older one, as far as the
/// process used the C library for the change.
fn has_changed_netns() -> bool {
    HAS_CHANGED_NETNS.load(Ordering::SeqCst)
}

/// The process changes its network namespace, or may.
pub(crate) fn mark_netns_changed() {
    HAS_CHANGED_NETNS.store(true, Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd as _;

    use super::*;

    fn addr(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn a_retired_lane_keeps_its_address_unless_wildcard() {
        for (bound, peer) in [
            ("0.0.0.0:53", "127.0.0.1:1"),
            ("[::]:53", "[::1]:1"),
            ("10.0.0.1:53", "10.0.0.1:1"),
            ("[fe80::1%3]:53", "[fe80::1%3]:1"),
        ] {
            assert_eq!(unreachable_addr(addr(bound)), addr(peer));
        }
        assert_eq!(peer_of(addr("[::]:53"), NO_SOURCE_ADDR.into()), addr("[::ffff:224.0.0.1]:1"));
    }

    #[test]
    fn socket_addresses_round_trip() {
        for text in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(first) = UdpSocket::bind(text) else { continue };
            let at = local_addr(first.as_raw_fd()).unwrap();
            assert_eq!(at, first.local_addr().unwrap());
            let family = if at.is_ipv6() { libc::AF_INET6 } else { libc::AF_INET };
            let fd = call::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
            assert!(!bind(fd, at), "the port is taken");
            assert!(bind(fd, addr(text)) && connect(fd, at));
            assert_eq!(local_addr(fd).map(|own| own.ip()), Some(at.ip()));
            call::close(fd);
        }
    }
}
