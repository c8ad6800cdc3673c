//! Parses the kernel's messages about devices, addresses, neighbours and routes.
//!
//! No length or number is trusted. A malformed item is ignored; a malformed event is reported as
//! such, so that everything that depends on it is invalidated.

use std::net::{IpAddr, Ipv4Addr};

use manylane_sys::netlink::{AttrReader, u32_at};
use netlink_packet_core::{Parseable, parse_ip};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use netlink_packet_route::link::{LinkFlags, LinkHeader, LinkLayerType};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteMetric, RouteType, RouteVia,
};

use super::table::{NeighbourKey, Prefix};

// Message types of linux/rtnetlink.h.
const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const RTM_NEWADDR: u16 = 20;
const RTM_DELADDR: u16 = 21;
const RTM_NEWROUTE: u16 = 24;
const RTM_DELROUTE: u16 = 25;
const RTM_NEWNEIGH: u16 = 28;
const RTM_DELNEIGH: u16 = 29;
const RTM_NEWRULE: u16 = 32;
const RTM_DELRULE: u16 = 33;
const RTM_NEWNEXTHOP: u16 = 104;
const RTM_DELNEXTHOP: u16 = 105;

/// One item of the kernel's tables, from a dump or an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KernelUpdate {
    /// A device, with the attributes in the message.
    Link(u32, LinkUpdate),
    /// A device is gone, or has left for another namespace.
    LinkGone(u32),
    /// A neighbour and how to reach it, or none if it is not reachable.
    Neighbour(NeighbourKey, Option<Neighbour>),
    /// An address of a device, and whether packets to it are delivered.
    Address(u32, LocalAddr, bool),
    /// Routes to these peers may have changed.
    Routes(Prefix),
    /// Any route may have changed.
    AllRoutes,
    /// A malformed event.
    Malformed,
}

/// An address with the broadcast addresses of its network: that of the prefix, and the one that
/// was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LocalAddr {
    pub(super) ip: IpAddr,
    pub(super) broadcasts: [Option<Ipv4Addr>; 2],
}

/// The attributes of a device in a message. Some messages omit what has not changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LinkUpdate {
    pub(super) ethernet: bool,
    pub(super) up: bool,
    /// Up, and with a carrier.
    pub(super) running: bool,
    pub(super) mac: Option<[u8; 6]>,
    pub(super) mtu: Option<u32>,
    /// IPv6 MTU, which routers announce and users set independently of the device's.
    pub(super) mtu6: Option<u32>,
    /// The bridge, bond, team or VRF that it is part of.
    pub(super) master: Option<u32>,
    /// A VRF.
    pub(super) vrf: bool,
}

/// A reachable neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Neighbour {
    pub(super) mac: [u8; 6],
    pub(super) stale: bool,
}

/// A unicast route through a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) ifindex: u32,
    pub(super) gateway: Option<IpAddr>,
    /// MTU of the route, or of the path as far as the kernel has learnt it.
    pub(super) mtu: Option<u32>,
}

/// Decodes a message; None if it is not relevant.
pub(super) fn decode(kind: u16, payload: &[u8]) -> Option<KernelUpdate> {
    let fact = match kind {
        RTM_NEWLINK | RTM_DELLINK => parse_link(kind, payload),
        RTM_NEWADDR | RTM_DELADDR => parse_address(kind, payload),
        RTM_NEWNEIGH | RTM_DELNEIGH => parse_neighbour(kind, payload),
        RTM_NEWROUTE | RTM_DELROUTE => parse_route(payload),
        RTM_NEWRULE | RTM_DELRULE | RTM_NEWNEXTHOP | RTM_DELNEXTHOP => Ok(Some(KernelUpdate::AllRoutes)),
        _ => Ok(None),
    };
    fact.unwrap_or(Some(KernelUpdate::Malformed))
}

/// A message that cannot be parsed.
struct Malformed;

impl From<netlink_packet_core::DecodeError> for Malformed {
    fn from(err: netlink_packet_core::DecodeError) -> Self {
        log::debug!("cannot parse an rtnetlink message: {err}");
        Malformed
    }
}

type Decoded = Result<Option<KernelUpdate>, Malformed>;

/// Reads only a few of a device's hundred attributes, some of which are deeply nested, so that a
/// new or odd one does not prevent reading the others.
fn parse_link(kind: u16, payload: &[u8]) -> Decoded {
    const HEADER_LEN: usize = 16;
    const IFLA_ADDRESS: u16 = 1;
    const IFLA_MTU: u16 = 4;
    const IFLA_MASTER: u16 = 10;
    const IFLA_LINKINFO: u16 = 18;
    const IFLA_INFO_KIND: u16 = 1;
    const IFLA_AF_SPEC: u16 = 26;
    const IFLA_INET6_CONF: u16 = 2;
    /// Index of the MTU in that array (DEVCONF_MTU6).
    const DEVCONF_MTU6: usize = 2;
    let header = LinkHeader::parse(payload)?;
    // Bridges report ports in their own address family; a removed port is still a device.
    if header.interface_family != AddressFamily::Unspec {
        return Ok(None);
    }
    if kind == RTM_DELLINK {
        return Ok(Some(KernelUpdate::LinkGone(header.index)));
    }
    let attributes = AttrReader::after(payload, HEADER_LEN);
    let inet6 =
        attributes.nest(IFLA_AF_SPEC).and_then(|spec| spec.nest(u8::from(AddressFamily::Inet6).into()));
    let conf6 = inet6.and_then(|inet6| inet6.find(IFLA_INET6_CONF));
    let info_kind = attributes.nest(IFLA_LINKINFO).and_then(|info| info.find(IFLA_INFO_KIND));
    let up = header.flags.contains(LinkFlags::Up);
    Ok(Some(KernelUpdate::Link(
        header.index,
        LinkUpdate {
            ethernet: header.link_layer_type == LinkLayerType::Ether,
            up,
            running: up && header.flags.contains(LinkFlags::Running),
            mac: attributes.find(IFLA_ADDRESS).and_then(|mac| mac.try_into().ok()),
            mtu: attributes.u32(IFLA_MTU),
            mtu6: conf6.and_then(|conf| u32_at(conf, DEVCONF_MTU6 * 4)),
            master: attributes.u32(IFLA_MASTER),
            vrf: info_kind.is_some_and(|kind| kind == b"vrf\0"),
        },
    )))
}

/// The id of the XDP program in a message about `ifindex`: the driver's, else any other.
pub(super) fn parse_xdp_program(ifindex: u32, payload: &[u8]) -> Option<u32> {
    const HEADER_LEN: usize = 16;
    const IFLA_XDP: u16 = 43;
    /// IFLA_XDP_PROG_ID and, where there are several programs, those of the driver, of generic XDP
    /// and of the hardware.
    const PROG_ID_ATTRS: [u16; 4] = [4, 6, 5, 7];
    LinkHeader::parse(payload).ok().filter(|header| header.index == ifindex)?;
    let xdp = AttrReader::after(payload, HEADER_LEN).nest(IFLA_XDP)?;
    PROG_ID_ATTRS.into_iter().find_map(|kind| xdp.u32(kind))
}

fn parse_address(kind: u16, payload: &[u8]) -> Decoded {
    let message = AddressMessage::parse(payload)?;
    let mut flags = AddressFlags::from_bits_retain(message.header.flags.bits().into());
    let (mut address, mut local, mut broadcast) = (None, None, None);
    for attribute in message.attributes {
        match attribute {
            // On a device with a peer this is the peer's address, and the other is local.
            AddressAttribute::Address(ip) => address = Some(ip),
            AddressAttribute::Local(ip) => local = Some(ip),
            AddressAttribute::Broadcast(ip) => broadcast = Some(ip),
            AddressAttribute::Flags(all) => flags = all,
            _ => {}
        }
    }
    let ip = local.or(address).ok_or(Malformed)?;
    let unsure = flags.contains(AddressFlags::Tentative) && !flags.contains(AddressFlags::Optimistic);
    let delivered = kind == RTM_NEWADDR && !unsure && !flags.contains(AddressFlags::Dadfailed);
    // On a device with a peer, the network is that of the peer.
    let prefix = match address.unwrap_or(ip) {
        IpAddr::V4(ip) => broadcast_of(ip, message.header.prefix_len),
        IpAddr::V6(_) => None,
    };
    let local = LocalAddr { ip, broadcasts: [prefix, broadcast] };
    Ok(Some(KernelUpdate::Address(message.header.index, local, delivered)))
}

/// The broadcast address of a network, unless it is too small to have one.
fn broadcast_of(ip: Ipv4Addr, prefix: u8) -> Option<Ipv4Addr> {
    let hosts = u32::MAX.checked_shr(prefix.into()).unwrap_or(0);
    (prefix < 31).then(|| Ipv4Addr::from_bits(ip.to_bits() | hosts))
}

fn parse_neighbour(kind: u16, payload: &[u8]) -> Decoded {
    let message = NeighbourMessage::parse(payload)?;
    let header = message.header;
    // Forwarding entries of bridges arrive in the same group. Proxy entries are addresses that
    // this host answers for, not neighbours.
    if header.flags.contains(NeighbourFlags::Proxy) {
        return Ok(None);
    }
    let (mut destination, mut mac) = (None, None);
    for attribute in message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(ip)) => destination = Some(ip.into()),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(ip)) => destination = Some(ip.into()),
            NeighbourAttribute::LinkLayerAddress(bytes) => mac = <[u8; 6]>::try_from(bytes).ok(),
            _ => {}
        }
    }
    let Some(address) = destination else { return Ok(None) };
    let usable = match header.state {
        NeighbourState::Reachable
        | NeighbourState::Stale
        | NeighbourState::Delay
        | NeighbourState::Probe
        | NeighbourState::Permanent
        | NeighbourState::Noarp => kind == RTM_NEWNEIGH,
        _ => false,
    };
    let stale = header.state == NeighbourState::Stale;
    let mac = mac.filter(|mac| usable && *mac != [0; 6]);
    let hop = NeighbourKey { ifindex: header.ifindex, address };
    Ok(Some(KernelUpdate::Neighbour(hop, mac.map(|mac| Neighbour { mac, stale }))))
}

/// The peers whose routes a message changes. The rest of the message does not matter.
fn parse_route(payload: &[u8]) -> Decoded {
    const HEADER_LEN: usize = 12;
    const RTA_DST: u16 = 1;
    let header = RouteHeader::parse(payload)?;
    let none: IpAddr = match header.address_family {
        AddressFamily::Inet => [0; 4].into(),
        AddressFamily::Inet6 => [0; 16].into(),
        _ => return Ok(None),
    };
    let destination = match AttrReader::after(payload, HEADER_LEN).find(RTA_DST) {
        Some(bytes) => parse_ip(bytes)?,
        None if header.destination_prefix_length == 0 => none,
        None => return Err(Malformed),
    };
    Ok(Some(KernelUpdate::Routes(Prefix::new(destination, header.destination_prefix_length))))
}

/// The route in a reply, if frames can be sent by it.
pub(super) fn parse_route_reply(kind: u16, payload: &[u8]) -> Option<Route> {
    if kind != RTM_NEWROUTE {
        return None;
    }
    let answer = RouteMessage::parse(payload).ok()?;
    if answer.header.kind != RouteType::Unicast {
        return None;
    }
    let (mut ifindex, mut gateway, mut mtu) = (None, None, None);
    for attribute in answer.attributes {
        match attribute {
            RouteAttribute::Oif(index) => ifindex = Some(index),
            RouteAttribute::Gateway(RouteAddress::Inet(ip)) | RouteAttribute::Via(RouteVia::Inet(ip)) => {
                gateway = Some(ip.into());
            }
            RouteAttribute::Gateway(RouteAddress::Inet6(ip)) | RouteAttribute::Via(RouteVia::Inet6(ip)) => {
                gateway = Some(ip.into());
            }
            RouteAttribute::Metrics(metrics) => {
                mtu = metrics.iter().find_map(|metric| match metric {
                    RouteMetric::Mtu(mtu) if *mtu > 0 => Some(*mtu),
                    _ => None,
                });
            }
            // Encapsulated, or a next hop of an unknown kind.
            RouteAttribute::Encap(_)
            | RouteAttribute::EncapType(_)
            | RouteAttribute::Gateway(_)
            | RouteAttribute::Via(_)
            | RouteAttribute::MultiPath(_)
            | RouteAttribute::NewDestination(_)
            | RouteAttribute::NewDestinationAddress(_) => return None,
            _ => {}
        }
    }
    Some(Route { ifindex: ifindex?, gateway, mtu })
}

#[cfg(test)]
mod tests {
    use manylane_sys::netlink::messages;
    use proptest::prelude::*;

    use super::*;

    /// A message of a type with its attributes, as the kernel lays it out.
    fn message(header: &[u8], attributes: &[(u16, &[u8])]) -> Vec<u8> {
        let mut bytes = header.to_vec();
        for (kind, value) in attributes {
            bytes.extend((value.len() as u16 + 4).to_ne_bytes());
            bytes.extend(kind.to_ne_bytes());
            bytes.extend(*value);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes
    }

    fn neighbour_message(state: u16, mac: &[u8]) -> Vec<u8> {
        let mut header = vec![2, 0, 0, 0];
        header.extend(7u32.to_ne_bytes());
        header.extend(state.to_ne_bytes());
        header.extend([0, 1]);
        message(&header, &[(1, &[10, 0, 0, 9]), (2, mac)])
    }

    #[test]
    fn neighbours_are_usable_in_some_states_only() {
        let hop = NeighbourKey { ifindex: 7, address: [10, 0, 0, 9].into() };
        let read = |kind, state, mac: &[u8]| match decode(kind, &neighbour_message(state, mac)) {
            Some(KernelUpdate::Neighbour(at, found)) if at == hop => found,
            other => panic!("{other:?}"),
        };
        let mac = [2, 0, 0, 0, 0, 5];
        for (state, usable) in [
            (0x00, false), // NONE
            (0x01, false), // INCOMPLETE
            (0x02, true),  // REACHABLE
            (0x04, true),  // STALE
            (0x08, true),  // DELAY
            (0x10, true),  // PROBE
            (0x20, false), // FAILED
            (0x40, true),  // NOARP
            (0x80, true),  // PERMANENT
        ] {
            let expected = usable.then_some(Neighbour { mac, stale: state == 0x04 });
            assert_eq!(read(RTM_NEWNEIGH, state, &mac), expected, "state {state:#x}");
            assert_eq!(read(RTM_DELNEIGH, state, &mac), None);
        }
        for odd in [&[][..], &[0; 6], &[1; 5], &[1; 20]] {
            assert_eq!(read(RTM_NEWNEIGH, 0x02, odd), None, "{odd:?}");
        }
    }

    #[test]
    fn unusable_route_types_are_ignored() {
        let answer = |kind: u8, more: &[(u16, &[u8])]| {
            let device = 3u32.to_ne_bytes();
            let mut attributes: Vec<(u16, &[u8])> = vec![(1, &[192, 0, 2, 1]), (4, &device)];
            attributes.extend(more);
            parse_route_reply(
                RTM_NEWROUTE,
                &message(&[2, 32, 0, 0, 254, 0, 0, kind, 0, 0, 0, 0], &attributes),
            )
        };
        let plain = Route { ifindex: 3, gateway: None, mtu: None };
        assert_eq!(answer(1, &[]), Some(plain));
        for kind in [0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 200] {
            assert_eq!(answer(kind, &[]), None, "type {kind}");
        }
        let gateway = |ip: IpAddr| Some(Route { gateway: Some(ip), ..plain });
        assert_eq!(answer(1, &[(5, &[10, 0, 0, 254])]), gateway([10, 0, 0, 254].into()));
        let mut via = 10u16.to_ne_bytes().to_vec();
        via.extend([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!(answer(1, &[(18, &via)]), gateway("fe80::1".parse().unwrap()));
        assert_eq!(answer(1, &[(18, &[1, 0, 9, 9])]), None, "a next hop of another kind");
        let metrics = message(&[], &[(2, &1400u32.to_ne_bytes()), (10, &64u32.to_ne_bytes())]);
        assert_eq!(answer(1, &[(8, &metrics)]), Some(Route { mtu: Some(1400), ..plain }));
        assert_eq!(answer(1, &[(21, &2u16.to_ne_bytes())]), None, "wrapped");
        assert_eq!(answer(1, &[(21, &999u16.to_ne_bytes()), (22, &[1, 2, 3])]), None, "wrapped somehow");
    }

    #[test]
    fn only_relevant_device_attributes_are_read() {
        let mut header = vec![0, 0, 1, 0];
        header.extend(9u32.to_ne_bytes());
        header.extend(0x41u32.to_ne_bytes());
        header.extend([0; 4]);
        let conf = message(&[], &[(2, &[1, 0, 0, 0, 64, 0, 0, 0, 0, 5, 0, 0, 9, 9, 9, 9])]);
        let spec = message(&[], &[(2, &[1, 2]), (10, &conf)]);
        let info = message(&[], &[(1, b"vrf\0"), (2, &[0; 8])]);
        let whole = message(
            &header,
            &[
                (77, &[1]),
                (1, &[2, 3, 4, 5, 6, 7]),
                (4, &1500u32.to_ne_bytes()),
                (10, &7u32.to_ne_bytes()),
                (18, &info),
                (26, &spec),
            ],
        );
        let fact = LinkUpdate {
            ethernet: true,
            up: true,
            running: true,
            mac: Some([2, 3, 4, 5, 6, 7]),
            mtu: Some(1500),
            mtu6: Some(0x500),
            master: Some(7),
            vrf: true,
        };
        assert_eq!(decode(RTM_NEWLINK, &whole), Some(KernelUpdate::Link(9, fact)));
        let partial = LinkUpdate { mac: None, mtu: None, mtu6: None, master: None, vrf: false, ..fact };
        assert_eq!(decode(RTM_NEWLINK, &header), Some(KernelUpdate::Link(9, partial)));
        for other in [&b"vrf_slave\0"[..], b"bridge\0", b"vrf", b""] {
            let bytes = message(&header, &[(18, &message(&[], &[(1, other)]))]);
            assert_eq!(decode(RTM_NEWLINK, &bytes), Some(KernelUpdate::Link(9, partial)), "{other:?}");
        }
        assert_eq!(decode(RTM_DELLINK, &header), Some(KernelUpdate::LinkGone(9)));
        header[0] = 7; // AF_BRIDGE
        assert_eq!(decode(RTM_DELLINK, &header), None);
        assert_eq!(decode(RTM_NEWLINK, &header[..10]), Some(KernelUpdate::Malformed));
    }

    #[test]
    fn broadcast_addresses_follow_from_an_address() {
        let read = |prefix: u8, attributes: &[(u16, &[u8])]| {
            let payload = message(&[2, prefix, 0, 0, 3, 0, 0, 0], attributes);
            match decode(RTM_NEWADDR, &payload) {
                Some(KernelUpdate::Address(3, local, true)) => {
                    local.broadcasts.map(|ip| ip.map(|ip| ip.octets()))
                }
                other => panic!("{other:?}"),
            }
        };
        let (one, all): (&[u8], &[u8]) = (&[10, 0, 1, 1], &[10, 0, 1, 99]);
        assert_eq!(read(24, &[(1, one), (2, one)]), [Some([10, 0, 1, 255]), None]);
        assert_eq!(read(22, &[(1, one), (2, one), (4, all)]), [Some([10, 0, 3, 255]), Some([10, 0, 1, 99])]);
        // With a peer, the network is the peer's.
        assert_eq!(read(24, &[(1, &[10, 7, 7, 7]), (2, one)]), [Some([10, 7, 7, 255]), None]);
        for small in [31, 32, 33, 255] {
            assert_eq!(read(small, &[(1, one), (2, one)]), [None, None], "{small}");
        }
    }

    #[test]
    fn changed_routes_name_the_affected_peers() {
        let header = |family, length| [family, length, 0, 0, 254, 0, 0, 1, 0, 0, 0, 0];
        let read = |family, length, bytes: &[u8]| {
            decode(RTM_DELROUTE, &message(&header(family, length), &[(1, bytes), (5, &[1])]))
        };
        let prefix = |ip: &str, length| Some(KernelUpdate::Routes(Prefix::new(ip.parse().unwrap(), length)));
        assert_eq!(read(2, 24, &[192, 0, 2, 0]), prefix("192.0.2.0", 24));
        assert_eq!(read(10, 0, &[0; 16]), prefix("::", 0));
        assert_eq!(decode(RTM_NEWROUTE, &header(2, 0)), prefix("0.0.0.0", 0));
        assert_eq!(decode(RTM_NEWROUTE, &header(2, 8)), Some(KernelUpdate::Malformed));
        assert_eq!(read(2, 24, &[1, 2, 3]), Some(KernelUpdate::Malformed));
        assert_eq!(decode(RTM_NEWRULE, &[]), Some(KernelUpdate::AllRoutes));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn no_bytes_make_it_panic(kind in 0u16..110, bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode(kind, &bytes);
            let _ = parse_route_reply(RTM_NEWROUTE, &bytes);
            for message in messages(&bytes) {
                let _ = decode(message.kind, message.payload);
            }
        }

        /// A well-formed header with arbitrary content.
        #[test]
        fn no_attributes_make_it_panic(
            kind in 16u16..34,
            header in proptest::collection::vec(any::<u8>(), 16),
            family in proptest::sample::select(vec![0u8, 2, 7, 10, 28]),
            attributes in proptest::collection::vec((0u16..40, proptest::collection::vec(any::<u8>(), 0..20)), 0..8),
        ) {
            let attributes: Vec<(u16, &[u8])> =
                attributes.iter().map(|(kind, value)| (*kind, value.as_slice())).collect();
            for length in [8, 12, 16] {
                let mut header = header[..length].to_vec();
                header[0] = family;
                let bytes = message(&header, &attributes);
                let _ = decode(kind, &bytes);
                let _ = parse_route_reply(RTM_NEWROUTE, &bytes);
            }
        }
    }
}
