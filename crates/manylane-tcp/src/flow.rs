//! The addresses of a connection.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// Both ends of a connection: the key of every table. IPv4 addresses are stored mapped to IPv6
/// (RFC 4291, section 2.5.5.2); packets that carry mapped addresses are dropped, so that no two
/// flows have one key. Two peers behind different links (VLANs) may have the same addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Flow {
    local: [u8; 16],
    remote: [u8; 16],
    local_port: u16,
    remote_port: u16,
    link: u16,
}

impl Flow {
    /// The flow between our address and the peer's, over a link.
    #[must_use]
    pub(crate) fn new(local: SocketAddr, remote: SocketAddr, link: u16) -> Flow {
        Flow {
            local: octets(local.ip()),
            remote: octets(remote.ip()),
            local_port: local.port(),
            remote_port: remote.port(),
            link,
        }
    }

    /// Our end.
    #[must_use]
    pub(crate) fn local(&self) -> SocketAddr {
        SocketAddr::new(address(self.local), self.local_port)
    }

    /// The peer's end.
    #[must_use]
    pub(crate) fn remote(&self) -> SocketAddr {
        SocketAddr::new(address(self.remote), self.remote_port)
    }

    /// The link that the caller has named.
    #[must_use]
    pub(crate) fn link(&self) -> u16 {
        self.link
    }

    /// The same flow over another link.
    #[must_use]
    pub(crate) fn over(self, link: u16) -> Flow {
        Flow { link, ..self }
    }

    /// True if it runs over IPv4.
    #[must_use]
    pub(crate) fn is_ipv4(&self) -> bool {
        Ipv6Addr::from(self.local).to_ipv4_mapped().is_some()
    }

    /// The bytes that are hashed.
    pub(crate) fn bytes(&self) -> [u8; 38] {
        let mut bytes = [0; 38];
        bytes[..16].copy_from_slice(&self.local);
        bytes[16..32].copy_from_slice(&self.remote);
        bytes[32..34].copy_from_slice(&self.local_port.to_be_bytes());
        bytes[34..36].copy_from_slice(&self.remote_port.to_be_bytes());
        bytes[36..].copy_from_slice(&self.link.to_be_bytes());
        bytes
    }
}

fn octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

fn address(octets: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(octets).to_canonical()
}
