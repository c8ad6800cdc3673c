//! Socket addresses in the kernel's format.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// Length of `struct sockaddr_in`.
const LEN_V4: usize = 16;
/// Length of `struct sockaddr_in6`.
const LEN_V6: usize = 28;

/// A `sockaddr_in` or `sockaddr_in6`, byte for byte.
///
/// The kernel fills it on receive, and a reply passes it back unchanged, so the hot path never
/// converts an address. The length follows from the family, the first two bytes.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub struct SockAddr([u8; 32]);

impl SockAddr {
    /// An address without a family: the value before the kernel has written to it.
    pub const EMPTY: Self = Self([0; 32]);

    /// Space that the kernel may fill, in bytes.
    pub const CAPACITY: usize = LEN_V6;

    /// The address at the beginning of `bytes`. None if it is incomplete, or of the other family.
    #[must_use]
    pub fn parse(bytes: &[u8], is_v6: bool) -> Option<Self> {
        let (family, len) = if is_v6 { (libc::AF_INET6, LEN_V6) } else { (libc::AF_INET, LEN_V4) };
        let mut addr = Self::EMPTY;
        addr.0[..len].copy_from_slice(bytes.get(..len)?);
        (addr.family() == family).then_some(addr)
    }

    /// Address family (`AF_INET`, `AF_INET6`), 0 while empty.
    pub(crate) fn family(&self) -> i32 {
        i32::from(u16::from_ne_bytes([self.0[0], self.0[1]]))
    }

    /// The bytes that make up the address, empty for a family that is not IP.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        match self.family() {
            libc::AF_INET => &self.0[..LEN_V4],
            libc::AF_INET6 => &self.0[..LEN_V6],
            _ => &[],
        }
    }

    /// True if this is an IPv6 address (including a mapped IPv4 one).
    pub(crate) fn is_v6(&self) -> bool {
        self.family() == libc::AF_INET6
    }

    /// True if this is an IPv4-mapped IPv6 address, `::ffff:0:0/96` (RFC 4291, section 2.5.5.2).
    pub(crate) fn is_v4_mapped(&self) -> bool {
        self.is_v6() && self.0[8..20] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]
    }

    /// The address in the standard library's form; a v4-mapped IPv6 address stays one.
    #[must_use]
    pub fn to_std(&self) -> Option<SocketAddr> {
        let raw = &self.0;
        let port = u16::from_be_bytes([raw[2], raw[3]]);
        match self.family() {
            libc::AF_INET => {
                Some(SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::new(raw[4], raw[5], raw[6], raw[7]), port)))
            }
            libc::AF_INET6 => {
                let mut ip = [0; 16];
                ip.copy_from_slice(&raw[8..24]);
                let flow = u32::from_be_bytes([raw[4], raw[5], raw[6], raw[7]]);
                let scope = u32::from_ne_bytes([raw[24], raw[25], raw[26], raw[27]]);
                Some(SocketAddr::V6(SocketAddrV6::new(Ipv6Addr::from(ip), port, flow, scope)))
            }
            _ => None,
        }
    }
}

impl From<SocketAddr> for SockAddr {
    fn from(addr: SocketAddr) -> Self {
        let mut raw = [0; 32];
        raw[2..4].copy_from_slice(&addr.port().to_be_bytes());
        match addr {
            SocketAddr::V4(v4) => {
                raw[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
                raw[4..8].copy_from_slice(&v4.ip().octets());
            }
            SocketAddr::V6(v6) => {
                raw[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
                raw[4..8].copy_from_slice(&v6.flowinfo().to_be_bytes());
                raw[8..24].copy_from_slice(&v6.ip().octets());
                raw[24..28].copy_from_slice(&v6.scope_id().to_ne_bytes());
            }
        }
        Self(raw)
    }
}

/// The address in the form that a socket of this family uses: an IPv6 socket has IPv4 addresses
/// v4-mapped.
#[must_use]
#[inline]
pub fn in_socket_family(addr: SocketAddr, is_v6: bool) -> SocketAddr {
    match addr {
        SocketAddr::V4(v4) if is_v6 => (v4.ip().to_ipv6_mapped(), v4.port()).into(),
        _ => addr,
    }
}

impl PartialEq for SockAddr {
    /// Compares family, address, port, flow label and scope. Ignores bytes behind the address,
    /// where the kernel leaves parts of an earlier, longer one.
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for SockAddr {}

impl fmt::Debug for SockAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.to_std() {
            Some(addr) => write!(f, "{addr}"),
            None => write!(f, "(family {})", self.family()),
        }
    }
}

/// Source of a reply: the address that the request was sent to.
///
/// The interface is zero unless the address is link-local, which needs one; otherwise the routing
/// table selects it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// Local address.
    pub ip: IpAddr,
    /// Interface index, 0 for any.
    pub interface: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn converts_both_families_both_ways() {
        for text in ["127.0.0.1:53", "0.0.0.0:0", "[::1]:65535", "[fe80::1]:1", "[::ffff:10.0.0.1]:7"] {
            let addr: SocketAddr = text.parse().unwrap();
            assert_eq!(SockAddr::from(addr).to_std(), Some(addr));
        }
        let scoped = SocketAddr::V6(SocketAddrV6::new("fe80::2".parse().unwrap(), 9, 5, 3));
        assert_eq!(SockAddr::from(scoped).to_std(), Some(scoped));
        assert_eq!(SockAddr::EMPTY.to_std(), None);
        let bytes = SockAddr::from(scoped);
        assert_eq!(SockAddr::parse(bytes.as_bytes(), true), Some(bytes));
        assert_eq!(SockAddr::parse(&bytes.as_bytes()[..LEN_V6 - 1], true), None);
        assert_eq!(SockAddr::parse(bytes.as_bytes(), false), None);
        assert_eq!(SockAddr::EMPTY.as_bytes(), b"");
    }

    #[test]
    fn bytes_after_the_address_are_ignored() {
        let mut stale = SockAddr::from("10.0.0.1:1".parse::<SocketAddr>().unwrap());
        stale.0[20] = 7;
        assert_eq!(stale, SockAddr::from("10.0.0.1:1".parse::<SocketAddr>().unwrap()));
    }
}
