//! The UDP sockets that are bound to a port, by netlink (Linux 3.3, `CONFIG_INET_UDP_DIAG`).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::netlink::{AttrReader, NETLINK_SOCK_DIAG, NLM_F_DUMP, NetlinkSocket, SOCK_DIAG_BY_FAMILY, u32_at};

/// Defined in linux/inet_diag.h.
const INET_DIAG_SKV6ONLY: u16 = 11;
/// Sizes of `struct inet_diag_req_v2` and `struct inet_diag_msg`.
const REQUEST_LEN: usize = 56;
const MESSAGE_LEN: usize = 72;
/// Maximum number of reads of an answer, with some hundred sockets each. The kernel skips what it
/// has listed before in each of them, so the time grows with the square of the number.
const READS_MAX: usize = 64;

/// A UDP socket of any process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoundSocket {
    /// Its cookie, unique until the machine restarts
    /// ([`sock::SocketInfo`](crate::sock::SocketInfo)).
    pub cookie: u64,
    /// The address that it is bound to.
    pub ip: IpAddr,
    /// True if it accepts no IPv4.
    pub only_v6: bool,
    /// The device that it is bound to; 0 if none.
    pub device: u32,
    /// True if it is connected to a peer.
    pub is_connected: bool,
    /// User that opened it.
    pub uid: u32,
    /// Its inode, as in `/proc/PID/fd` ([`sock::inode`](crate::sock::inode)).
    pub inode: u64,
}

impl BoundSocket {
    /// True if datagrams to `ip` may be for it.
    #[must_use]
    pub fn matches(&self, ip: IpAddr) -> bool {
        matches(self.ip, self.only_v6, ip)
    }

    /// True if some datagrams may be for either.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let any = |ip: IpAddr| ip.to_canonical().is_unspecified();
        match (any(self.ip), any(other.ip)) {
            (_, false) => self.matches(other.ip.to_canonical()),
            (false, true) => other.matches(self.ip.to_canonical()),
            (true, true) => {
                let v4 = |socket: &Self| socket.matches(Ipv4Addr::LOCALHOST.into());
                let v6 = |socket: &Self| socket.matches(Ipv6Addr::LOCALHOST.into());
                v4(self) && v4(other) || v6(self) && v6(other)
            }
        }
    }
}

/// True if datagrams to `ip` may be for a socket that is bound to `bound`.
fn matches(bound: IpAddr, only_v6: bool, ip: IpAddr) -> bool {
    match bound.to_canonical() {
        bound if !bound.is_unspecified() => ip == bound,
        IpAddr::V4(_) => ip.is_ipv4(),
        IpAddr::V6(_) => ip.is_ipv6() || !only_v6,
    }
}

/// Finds bound sockets. The first query opens a socket in the network namespace of the calling
/// thread; later ones use it again, and need no free descriptor.
#[derive(Debug, Default)]
pub struct BoundSockets(Option<NetlinkSocket>);

impl BoundSockets {
    /// All UDP sockets that are bound to `port`, with any address.
    ///
    /// # Errors
    /// `ENOENT` if the kernel does not support it; errors of opening and reading the socket; an
    /// error if they are more than some ten thousand.
    pub fn find_by_port(&mut self, port: u16) -> io::Result<Vec<BoundSocket>> {
        // After an error, the rest of the answer may still be queued: the next query takes a new
        // socket.
        let mut kernel = self.0.take().map_or_else(|| NetlinkSocket::open(NETLINK_SOCK_DIAG), Ok)?;
        kernel.datagrams_max = READS_MAX;
        let mut found = Vec::new();
        for family in [libc::AF_INET, libc::AF_INET6] {
            let request = request(family, port);
            kernel.request(SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, &request, |_, message| {
                found.push(parse(message));
            })?;
        }
        self.0 = Some(kernel);
        found.into_iter().collect::<Option<_>>().ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

fn request(family: libc::c_int, port: u16) -> [u8; REQUEST_LEN] {
    let mut bytes = [0; REQUEST_LEN];
    bytes[0] = family as u8;
    bytes[1] = libc::IPPROTO_UDP as u8;
    // In all states.
    bytes[4..8].fill(0xff);
    bytes[8..10].copy_from_slice(&port.to_be_bytes());
    bytes
}

fn parse(message: &[u8]) -> Option<BoundSocket> {
    let bytes: &[u8; MESSAGE_LEN] = message.first_chunk()?;
    // `struct inet_diag_sockid`, which begins at 4: two ports, two addresses, a device, a cookie.
    let (at, to) = (8, 24);
    let is_v6 = libc::c_int::from(bytes[0]) == libc::AF_INET6;
    let peer: [u8; 16] = bytes[to..to + 16].try_into().ok()?;
    let is_connected = bytes[6..8] != [0; 2] || peer != [0; 16];
    let attrs = AttrReader::after(message, MESSAGE_LEN);
    let only_v6 = is_v6 && attrs.u8(INET_DIAG_SKV6ONLY).is_some_and(|is| is != 0);
    let ip = if is_v6 {
        Ipv6Addr::from(<[u8; 16]>::try_from(&bytes[at..at + 16]).ok()?).into()
    } else {
        Ipv4Addr::from(<[u8; 4]>::try_from(&bytes[at..at + 4]).ok()?).into()
    };
    let cookie = u64::from(u32_at(bytes, 44)?) | u64::from(u32_at(bytes, 48)?) << 32;
    Some(BoundSocket {
        cookie,
        ip,
        only_v6,
        device: u32_at(bytes, 40)?,
        is_connected,
        uid: u32_at(bytes, 64)?,
        inode: u32_at(bytes, 68)?.into(),
    })
}

#[cfg(all(test, not(miri)))]
#[allow(clippy::unwrap_used, reason = "helpers of tests")]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::AsFd as _;

    use manylane_test_support::wait_for;

    use super::*;
    use crate::sock;

    fn bound(ip: &str, only_v6: bool) -> BoundSocket {
        BoundSocket {
            cookie: 1,
            ip: ip.parse().unwrap(),
            only_v6,
            device: 0,
            is_connected: false,
            uid: 0,
            inode: 0,
        }
    }

    #[test]
    fn addresses_overlap_as_the_kernel_delivers() {
        for (one, other, both) in [
            ("10.0.0.1", "10.0.0.1", true),
            ("10.0.0.1", "10.0.0.2", false),
            ("10.0.0.1", "0.0.0.0", true),
            ("::ffff:10.0.0.1", "10.0.0.1", true),
            ("::ffff:10.0.0.1", "::", true),
            ("10.0.0.1", "::", true),
            ("0.0.0.0", "::", true),
            ("::1", "0.0.0.0", false),
            ("fd00::1", "::", true),
            ("fd00::1", "fd00::2", false),
        ] {
            let (one, other) = (bound(one, false), bound(other, false));
            assert_eq!((one.overlaps(&other), other.overlaps(&one)), (both, both), "{one:?} {other:?}");
        }
        for (one, both) in [("10.0.0.1", false), ("0.0.0.0", false), ("fd00::1", true), ("::", true)] {
            assert_eq!(bound(one, true).overlaps(&bound("::", true)), both, "{one}");
        }
    }

    #[test]
    fn truncated_diag_replies_are_no_socket() {
        for len in 0..MESSAGE_LEN {
            assert_eq!(parse(&[1; MESSAGE_LEN][..len]), None);
        }
        assert!(parse(&[1; MESSAGE_LEN]).is_some());
    }

    #[test]
    fn loopback_sockets_of_a_port_are_found_until_they_are_closed() {
        let mut all = BoundSockets::default();
        for at in ["127.0.0.1:0", "[::1]:0"] {
            let socket = UdpSocket::bind(at).unwrap();
            let addr = socket.local_addr().unwrap();
            let cookie: u64 = sock::get(socket.as_fd(), libc::SOL_SOCKET, libc::SO_COOKIE).unwrap();
            let mut find =
                || all.find_by_port(addr.port()).unwrap().into_iter().find(|bound| bound.cookie == cookie);
            let found = find().unwrap();
            assert_eq!((found.ip, found.device, found.is_connected), (addr.ip(), 0, false));
            assert_eq!(found.uid, crate::unix_socket::effective_uid());
            assert_eq!(found.inode, sock::inode(socket.as_fd()).unwrap());
            socket.connect((addr.ip(), 9)).unwrap();
            assert!(find().unwrap().is_connected);
            drop(socket);
            // A program that another test starts has a copy until it executes.
            wait_for("the socket to be closed", find, Option::is_none);
        }
    }
}
