//! The kernel's routing tables as prefixes, if they are few and plain enough to decide by them.
//!
//! The kernel alone decides what depends on more than the peer's address: rules, several next hops,
//! types of service, encapsulation. A table with rules of its own is not read at all, and a route
//! that is not plain has no next hop here, so that the kernel is asked.

use std::io;
use std::net::IpAddr;

use manylane_sys::netlink::{AttrReader, u32_at};
use netlink_packet_core::parse_ip;

use super::netlink::dump_at_most;
use super::table::Prefix;

// Of linux/rtnetlink.h and linux/fib_rules.h.
const RTM_GETROUTE: u16 = 26;
const RTM_GETRULE: u16 = 34;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const TABLE_DEFAULT: u32 = 253;
const TABLE_MAIN: u32 = 254;
const TABLE_LOCAL: u32 = 255;

/// Routes of a family at most, the machine's own addresses among them.
const ROUTES_MAX: usize = 256;

/// Device and gateway of a plain route.
pub(super) type Way = (u32, Option<IpAddr>);

/// A route to all peers within a prefix, unless a longer one has them, too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PrefixRoute {
    pub(super) prefix: Prefix,
    /// None: the kernel has to be asked.
    pub(super) way: Option<Way>,
}

/// The routes of both families, in the order in which they are tried. Empty if there are too many
/// of a family, or rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Fib {
    pub(super) ipv4: Vec<PrefixRoute>,
    pub(super) ipv6: Vec<PrefixRoute>,
}

impl Fib {
    /// Reads the tables of the calling thread's namespace. None if they changed meanwhile.
    pub(super) fn load() -> io::Result<Option<Fib>> {
        let (ipv4, ipv6) = (load(AF_INET)?, load(AF_INET6)?);
        Ok(ipv4.zip(ipv6).map(|(ipv4, ipv6)| Fib { ipv4, ipv6 }))
    }
}

/// The routes of a family.
fn load(family: u8) -> io::Result<Option<Vec<PrefixRoute>>> {
    let mut rules = Vec::new();
    let mut header = [0; 12];
    header[0] = family;
    let whole = dump_at_most(ROUTES_MAX, RTM_GETRULE, &header, |rule| rules.push(parse_rule(rule)))?;
    let Some(is_consistent) = whole else { return Ok(Some(Vec::new())) };
    if !is_consistent {
        return Ok(None);
    }
    rules.sort_unstable();
    let mut usual = vec![Some((0, TABLE_LOCAL)), Some((32_766, TABLE_MAIN))];
    usual.extend((family == AF_INET).then_some(Some((32_767, TABLE_DEFAULT))));
    if rules != usual {
        return Ok(Some(Vec::new()));
    }
    let mut routes = Vec::new();
    let whole = dump_at_most(ROUTES_MAX, RTM_GETROUTE, &header, |route| routes.push(parse_route(route)))?;
    Ok(match whole {
        None => Some(Vec::new()),
        Some(false) => None,
        Some(true) => Some(in_order(routes)),
    })
}

/// A rule's priority and table; None if it is not one for all packets.
fn parse_rule(message: &[u8]) -> Option<(u32, u32)> {
    const HEADER_LEN: usize = 12;
    const FR_ACT_TO_TBL: u8 = 1;
    const FRA_PRIORITY: u16 = 6;
    const FRA_SUPPRESS_PREFIXLEN: u16 = 14;
    const FRA_TABLE: u16 = 15;
    const FRA_PROTOCOL: u16 = 21;
    let &[_, destination, source, tos, table, _, _, action, flag0, flag1, flag2, flag3] =
        message.first_chunk::<HEADER_LEN>()?;
    // FIB_RULE_INVERT among them; some others tell that a device does not exist.
    if [destination, source, tos, flag0, flag1, flag2, flag3] != [0; 7] || action != FR_ACT_TO_TBL {
        return None;
    }
    let (mut priority, mut table) = (0, u32::from(table));
    for (kind, value) in AttrReader::after(message, HEADER_LEN).all() {
        match kind {
            FRA_PRIORITY => priority = u32_at(value, 0)?,
            FRA_TABLE => table = u32_at(value, 0)?,
            FRA_PROTOCOL => {}
            FRA_SUPPRESS_PREFIXLEN if u32_at(value, 0)? == u32::MAX => {}
            _ => return None,
        }
    }
    Some((priority, table))
}

/// A route and its table. None if it cannot be read.
fn parse_route(message: &[u8]) -> Option<(u32, PrefixRoute)> {
    const HEADER_LEN: usize = 12;
    const RTN_UNICAST: u8 = 1;
    const RTA_DST: u16 = 1;
    const RTA_OIF: u16 = 4;
    const RTA_GATEWAY: u16 = 5;
    const RTA_PRIORITY: u16 = 6;
    const RTA_PREFSRC: u16 = 7;
    const RTA_METRICS: u16 = 8;
    const RTAX_MTU: u16 = 2;
    const RTA_CACHEINFO: u16 = 12;
    const RTA_TABLE: u16 = 15;
    const RTA_PREF: u16 = 20;
    let &[family, length, source, tos, table, _, _, kind, ..] = message.first_chunk::<HEADER_LEN>()?;
    let flags = u32_at(message, 8)?;
    let (mut destination, mut gateway, mut device) = (None, None, None);
    let mut table = u32::from(table);
    // Flags: learnt from a router, or a device without a carrier.
    let mut is_plain = kind == RTN_UNICAST && source == 0 && tos == 0 && flags == 0;
    for (kind, value) in AttrReader::after(message, HEADER_LEN).all() {
        match kind {
            RTA_DST => destination = Some(parse_ip(value).ok()?),
            RTA_OIF => device = Some(u32_at(value, 0)?),
            RTA_GATEWAY => gateway = Some(parse_ip(value).ok()?),
            RTA_TABLE => table = u32_at(value, 0)?,
            RTA_PRIORITY | RTA_PREFSRC | RTA_CACHEINFO | RTA_PREF => {}
            // Of metrics, such as a hop limit, the MTU alone matters to a lane.
            RTA_METRICS => is_plain &= AttrReader::new(value).find(RTAX_MTU).is_none(),
            // Several next hops, encapsulation, and what is not known yet.
            _ => is_plain = false,
        }
    }
    let any: IpAddr = if family == AF_INET { [0; 4].into() } else { [0; 16].into() };
    let destination = destination.or((length == 0).then_some(any))?;
    let way = device.filter(|_| is_plain).map(|device| (device, gateway));
    Some((table, PrefixRoute { prefix: Prefix::new(destination, length), way }))
}

/// The routes in the order of the default rules: the machine's own addresses, then the main table
/// by length. Nothing if one cannot be read.
fn in_order(routes: Vec<Option<(u32, PrefixRoute)>>) -> Vec<PrefixRoute> {
    let Some(routes) = routes.into_iter().collect::<Option<Vec<_>>>() else { return Vec::new() };
    let of_table = |wanted| routes.iter().filter(move |(table, _)| *table == wanted).map(|(_, route)| route);
    if of_table(TABLE_DEFAULT).next().is_some() {
        return Vec::new();
    }
    let mut main: Vec<PrefixRoute> = of_table(TABLE_MAIN).cloned().collect();
    main.sort_by_key(|route| std::cmp::Reverse(route.prefix.length()));
    // Of several routes with one prefix, the kernel picks one.
    let prefixes: Vec<Prefix> = main.iter().map(|route| route.prefix).collect();
    for route in &mut main {
        if prefixes.iter().filter(|prefix| **prefix == route.prefix).count() > 1 {
            route.way = None;
        }
    }
    let own = of_table(TABLE_LOCAL).map(|route| PrefixRoute { way: None, ..route.clone() });
    own.chain(main).collect()
}

#[cfg(test)]
mod tests {
    use manylane_sys::netlink::Attrs;

    use super::*;

    /// A route of IPv4.
    fn route(table: u8, to: [u8; 4], length: u8, attrs: Attrs) -> Vec<u8> {
        let attrs = attrs.bytes(1, &to);
        [&[AF_INET, length, 0, 0, table, 3, 0, 1, 0, 0, 0, 0], attrs.as_bytes()].concat()
    }

    fn via(device: u32, gateway: Option<[u8; 4]>) -> Attrs {
        let attrs = Attrs::default().u32(4, device);
        gateway.into_iter().fold(attrs, |attrs, gateway| attrs.bytes(5, &gateway))
    }

    fn read(messages: &[Vec<u8>]) -> Vec<(Prefix, Option<Way>)> {
        let routes = in_order(messages.iter().map(|message| parse_route(message)).collect());
        routes.into_iter().map(|route| (route.prefix, route.way)).collect()
    }

    fn prefix(ip: [u8; 4], length: u8) -> Prefix {
        Prefix::new(ip.into(), length)
    }

    #[test]
    fn own_addresses_come_first_and_then_longer_prefixes() {
        let routes = [
            route(254, [0; 4], 0, via(3, Some([10, 0, 0, 1]))),
            route(254, [10, 0, 0, 0], 24, via(3, None)),
            route(255, [10, 0, 0, 2], 32, via(3, None)),
            route(77, [10, 9, 0, 0], 16, via(4, None)),
        ];
        let expected = [
            (prefix([10, 0, 0, 2], 32), None),
            (prefix([10, 0, 0, 0], 24), Some((3, None))),
            (prefix([0; 4], 0), Some((3, Some([10, 0, 0, 1].into())))),
        ];
        assert_eq!(read(&routes), expected);
    }

    #[test]
    fn the_kernel_is_asked_for_all_others() {
        // Multipath, encapsulation, a next hop of the other family, a new attribute, and an MTU.
        let attrs = [9, 22, 18, 99].map(|kind| via(3, None).bytes(kind, &[0; 8]));
        for attrs in attrs.into_iter().chain([via(3, None).nest(8, &Attrs::default().u32(2, 500))]) {
            let routes = [route(254, [10, 9, 0, 0], 16, attrs.clone())];
            assert_eq!(read(&routes), [(prefix([10, 9, 0, 0], 16), None)], "{attrs:?}");
        }
        let hop_limit = via(3, None).nest(8, &Attrs::default().u32(10, 64));
        assert_eq!(read(&[route(254, [10, 9, 0, 0], 16, hop_limit)])[0].1, Some((3, None)));
        // Two with one prefix; a type of service, a blackhole, a link that is down.
        let two = [3, 4].map(|device| route(254, [10, 9, 0, 0], 16, via(device, None).u32(6, device)));
        assert_eq!(read(&two), [(prefix([10, 9, 0, 0], 16), None); 2]);
        for (at, value) in [(3, 4), (7, 6), (8, 16)] {
            let mut bytes = route(254, [10, 9, 0, 0], 16, via(3, None));
            bytes[at] = value;
            assert_eq!(read(&[bytes]), [(prefix([10, 9, 0, 0], 16), None)], "byte {at}");
        }
        assert!(read(&[route(253, [0; 4], 0, via(3, None)), route(254, [0; 4], 0, via(3, None))]).is_empty());
        assert!(read(&[route(254, [0; 4], 0, via(3, None)), vec![2; 5]]).is_empty());
    }

    #[test]
    fn rules_are_plain_or_none() {
        let rule = |attrs: Attrs| [&[2, 0, 0, 0, 254, 0, 0, 1, 0, 0, 0, 0], attrs.as_bytes()].concat();
        let usual = || Attrs::default().u32(15, 254).u32(6, 32_766).u32(14, u32::MAX).bytes(21, &[2]);
        assert_eq!(parse_rule(&rule(usual())), Some((32_766, 254)));
        // A mark, a device, a suppressed prefix.
        for odd in [usual().u32(10, 1), usual().text(3, "eth0"), Attrs::default().u32(14, 0)] {
            assert_eq!(parse_rule(&rule(odd)), None);
        }
        for at in [1, 2, 3, 8] {
            let mut bytes = rule(usual());
            bytes[at] = 2;
            assert_eq!(parse_rule(&bytes), None, "byte {at}");
        }
        assert_eq!(parse_rule(&[2; 11]), None);
    }
}
