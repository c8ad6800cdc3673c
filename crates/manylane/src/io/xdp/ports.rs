//! The addresses and ports that lead to a socket of engine `xdp`.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use manylane_bpf::abi;

use super::checks::steered_addrs;
use super::route::LocalState;

/// What leads to a socket.
#[derive(Clone, Debug)]
pub(crate) enum Ports {
    /// A UDP port.
    Udp {
        /// Address and port.
        bound: SocketAddr,
        /// A wildcard of IPv6 takes no IPv4.
        only_v6: bool,
    },
    /// TCP ports.
    Tcp {
        /// Those that are listened on.
        listeners: Vec<SocketAddr>,
        /// First ports of the blocks ([`abi::PORT_BLOCK`]) that connections to others come from, at
        /// any address of this machine.
        source_blocks: Vec<u16>,
    },
}

impl Ports {
    /// The one address, if there is only one; unspecified if any address may lead to it.
    pub(super) fn address(&self) -> IpAddr {
        match self {
            Ports::Udp { bound, .. } => bound.ip(),
            Ports::Tcp { listeners, source_blocks } => match listeners.as_slice() {
                [one] if source_blocks.is_empty() => one.ip(),
                _ => Ipv6Addr::UNSPECIFIED.into(),
            },
        }
    }

    /// The address that is bound, for a UDP socket.
    pub(super) fn udp(&self) -> Option<SocketAddr> {
        match self {
            Ports::Udp { bound, .. } => Some(*bound),
            Ports::Tcp { .. } => None,
        }
    }

    /// The keys of the map of ports of `device`; none of IPv4 if `leaves_ip4`.
    pub(super) fn keys(&self, device: u32, leaves_ip4: bool, locals: &LocalState) -> HashSet<abi::PortKey> {
        let mut keys = HashSet::new();
        match self {
            Ports::Udp { bound, only_v6 } => {
                let addresses = steered_addrs(bound.ip(), *only_v6, device, leaves_ip4, locals);
                keys.extend(addresses.iter().map(|ip| udp_key(*ip, bound.port())));
            }
            Ports::Tcp { listeners, source_blocks } => {
                // Also while it is down: the first segments after it is up again would reach the
                // kernel otherwise, which resets connections that it does not know.
                let mut locals = locals.clone();
                let down = locals.down_addresses.iter().filter(|(at, _)| *at == device);
                locals.addresses.extend(down);
                let steered = |ip: IpAddr| steered_addrs(ip, true, device, leaves_ip4, &locals);
                for listener in listeners {
                    let addresses = steered(listener.ip());
                    keys.extend(addresses.iter().map(|ip| port_key(*ip, abi::PROTOCOL_TCP, listener.port())));
                }
                let any: [IpAddr; 2] = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
                for ip in any.into_iter().flat_map(steered) {
                    keys.extend(source_blocks.iter().map(|first| block_key(ip, *first)));
                }
            }
        }
        keys
    }
}

/// True for the key of a port or block of TCP.
pub(super) fn is_tcp(key: &abi::PortKey) -> bool {
    key[18] == abi::PROTOCOL_TCP
}

/// The key of an address.
pub(super) fn addr_key(ip: IpAddr) -> abi::AddrKey {
    match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

/// The key of a UDP port.
pub(super) fn udp_key(ip: IpAddr, port: u16) -> abi::PortKey {
    port_key(ip, abi::PROTOCOL_UDP, port)
}

fn port_key(ip: IpAddr, protocol: u8, port: u16) -> abi::PortKey {
    let mut key = [0; size_of::<abi::PortKey>()];
    key[..16].copy_from_slice(&addr_key(ip));
    key[16..18].copy_from_slice(&port.to_be_bytes());
    key[18] = protocol;
    key
}

fn block_key(ip: IpAddr, first: u16) -> abi::PortKey {
    let mut key = port_key(ip, abi::PROTOCOL_TCP, first);
    key[19] = 1;
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    const ETH: u32 = 2;

    fn keys(ports: &Ports) -> usize {
        let at = |ip: &str| (ETH, ip.parse().unwrap());
        let addresses = vec![at("10.0.0.1"), at("10.0.0.2"), at("fd00::1")];
        let locals = LocalState { addresses, up: vec![ETH], ..LocalState::default() };
        let found = ports.keys(ETH, false, &locals);
        assert_eq!(
            found.iter().filter(|key| is_tcp(key)).count(),
            match ports {
                Ports::Tcp { .. } => found.len(),
                Ports::Udp { .. } => 0,
            }
        );
        found.len()
    }

    fn tcp(listeners: &[&str], source_blocks: &[u16]) -> Ports {
        let listeners = listeners.iter().map(|text| text.parse().unwrap()).collect();
        Ports::Tcp { listeners, source_blocks: source_blocks.to_vec() }
    }

    #[test]
    fn wildcards_and_blocks_have_a_key_for_each_address() {
        let bound = "[::]:7".parse().unwrap();
        assert_eq!(keys(&Ports::Udp { bound, only_v6: false }), 3);
        assert_eq!(keys(&Ports::Udp { bound, only_v6: true }), 1);
        assert_eq!(keys(&tcp(&["0.0.0.0:80"], &[])), 2);
        // A listener of IPv6 takes no IPv4.
        assert_eq!(keys(&tcp(&["[::]:80"], &[])), 1);
        assert_eq!(keys(&tcp(&["10.0.0.1:80", "0.0.0.0:80"], &[])), 2);
        assert_eq!(keys(&tcp(&[], &[61_184, 61_440])), 6);
    }

    #[test]
    fn addresses_of_a_device_that_is_down_lead_to_tcp_lanes() {
        let at = |device, ip: &str| (device, ip.parse().unwrap());
        let down_addresses = vec![at(ETH, "10.0.0.1"), at(ETH + 1, "10.5.0.1")];
        let locals = LocalState { down_addresses, ..LocalState::default() };
        assert_eq!(tcp(&["0.0.0.0:80"], &[61_184]).keys(ETH, false, &locals).len(), 2);
        let bound = "0.0.0.0:7".parse().unwrap();
        assert!(Ports::Udp { bound, only_v6: false }.keys(ETH, false, &locals).is_empty());
    }

    #[test]
    fn only_a_lone_listener_has_an_address() {
        let any: IpAddr = Ipv6Addr::UNSPECIFIED.into();
        assert_eq!(tcp(&["10.0.0.1:80"], &[]).address(), "10.0.0.1".parse::<IpAddr>().unwrap());
        assert_eq!(tcp(&["10.0.0.1:80"], &[61_184]).address(), any);
        assert_eq!(tcp(&["10.0.0.1:80", "10.0.0.2:80"], &[]).address(), any);
    }
}
