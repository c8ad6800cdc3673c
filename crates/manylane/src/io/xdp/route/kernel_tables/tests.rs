//! Next hops from sequences of kernel updates, and which entries each update changes.

use std::net::Ipv4Addr;

use super::super::table::Prefix;
use super::*;

const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const GATEWAY: Neighbour = Neighbour { mac: [2, 0, 0, 0, 0, 9], stale: false };

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn neighbour(ifindex: u32, address: &str) -> NeighbourKey {
    NeighbourKey { ifindex, address: ip(address) }
}

fn address(ifindex: u32, text: &str, delivered: bool) -> KernelUpdate {
    KernelUpdate::Address(ifindex, LocalAddr { ip: ip(text), broadcasts: [None; 2] }, delivered)
}

fn device() -> LinkUpdate {
    LinkUpdate {
        ethernet: true,
        up: true,
        running: true,
        mac: Some(MAC),
        mtu: Some(1500),
        mtu6: Some(1400),
        ..LinkUpdate::default()
    }
}

struct World {
    kernel: KernelTables,
    table: Writer,
}

impl World {
    fn new(facts: impl IntoIterator<Item = KernelUpdate>) -> Self {
        let mut world = Self { kernel: KernelTables::default(), table: Writer::new() };
        for fact in facts {
            world.apply(fact);
        }
        world
    }

    fn apply(&mut self, fact: KernelUpdate) -> Effects {
        let mut effects = Effects::default();
        self.kernel.apply(fact, &mut self.table, &mut effects);
        effects
    }

    fn resolve(&mut self, peer: &str, gateway: Option<&str>, mtu: Option<u32>) -> Option<NextHop> {
        let route = Route { ifindex: 3, gateway: gateway.map(ip), mtu };
        let (hop, found) = self.kernel.resolve(ip(peer), &route, 0)?;
        let local = if ip(peer).is_ipv4() { "10.0.0.1" } else { "fd00::1" };
        self.table.insert(&RouteKey::new(ip(local), ip(peer)).unwrap(), hop, &found);
        Some(found.next)
    }

    fn entry(&self, peer: &str) -> Option<[u8; 6]> {
        let local = if ip(peer).is_ipv4() { "10.0.0.1" } else { "fd00::1" };
        let pair = RouteKey::new(ip(local), ip(peer)).unwrap();
        let table = self.table.table();
        table.find(&pair, table.hash(&pair)).map(|found| found.next.mac)
    }
}

#[test]
fn a_next_hop_needs_a_running_ethernet_device_and_a_neighbour() {
    let mut world = World::new([]);
    assert_eq!(world.resolve("10.0.0.9", None, None), None);
    assert!(!world.apply(KernelUpdate::Neighbour(neighbour(3, "10.0.0.9"), Some(GATEWAY))).requery);
    for fact in [
        LinkUpdate { ethernet: false, ..device() },
        LinkUpdate { running: false, ..device() },
        LinkUpdate { running: true, mac: None, ..device() },
    ] {
        world.kernel.links.clear();
        world.apply(KernelUpdate::Link(3, fact));
        assert_eq!(world.resolve("10.0.0.9", None, None), None, "{fact:?}");
    }
    world.apply(KernelUpdate::Link(3, device()));
    let next = NextHop { ifindex: 3, source_mac: MAC, mac: GATEWAY.mac, mtu: 1500 };
    assert_eq!(world.resolve("10.0.0.9", None, None), Some(next));
    assert_eq!(world.resolve("192.0.2.1", Some("10.0.0.9"), None), Some(next));
    assert_eq!(world.resolve("192.0.2.1", Some("10.0.0.8"), None), None);
}

/// The state for neighbours and peers is bounded whatever their number, and is removed with
/// them.
#[test]
fn a_flood_of_neighbours_and_peers_is_bounded() {
    let near =
        |at: usize| NeighbourKey { ifindex: 3, address: Ipv4Addr::from_bits(0x0a00_0000 + at as u32).into() };
    let mut world = World::new([KernelUpdate::Link(3, device())]);
    for at in 0..NEIGHBOURS_MAX + 1000 {
        world.apply(KernelUpdate::Neighbour(near(at), Some(GATEWAY)));
    }
    assert_eq!(world.kernel.neighbours.len(), NEIGHBOURS_MAX);
    let route = Route { ifindex: 3, gateway: None, mtu: None };
    for at in 0..AWAITED_MAX + 1000 {
        let peer = Ipv4Addr::from_bits(0x0b00_0000 + at as u32).into();
        assert_eq!(world.kernel.resolve(peer, &route, 0), None);
    }
    assert_eq!(world.kernel.awaited.len(), AWAITED_MAX);
    for at in 0..NEIGHBOURS_MAX + 1000 {
        world.apply(KernelUpdate::Neighbour(near(at), None));
    }
    world.kernel.clear_awaited();
    assert!(world.kernel.neighbours.is_empty() && world.kernel.awaited.is_empty());
}

#[test]
fn the_mtu_is_the_smallest_that_counts() {
    let six = neighbour(3, "fe80::9");
    let mut world = World::new([
        KernelUpdate::Link(3, device()),
        KernelUpdate::Neighbour(neighbour(3, "10.0.0.9"), Some(GATEWAY)),
        KernelUpdate::Neighbour(six, Some(GATEWAY)),
    ]);
    let mut mtu = |peer, mtu| {
        let gateway = if ip(peer).is_ipv4() { "10.0.0.9" } else { "fe80::9" };
        world.resolve(peer, Some(gateway), mtu).unwrap().mtu
    };
    assert_eq!((mtu("192.0.2.1", None), mtu("2001:db8::1", None)), (1500, 1400));
    assert_eq!((mtu("192.0.2.1", Some(1300)), mtu("2001:db8::1", Some(1300))), (1300, 1300));
    assert_eq!((mtu("192.0.2.1", Some(9000)), mtu("2001:db8::1", Some(9000))), (1500, 1400));
}

#[test]
fn an_awaited_neighbour_is_announced_once() {
    let mut world = World::new([KernelUpdate::Link(3, device())]);
    let gateway = neighbour(3, "10.0.0.9");
    assert_eq!(world.resolve("192.0.2.1", Some("10.0.0.9"), None), None);
    assert!(!world.apply(KernelUpdate::Neighbour(gateway, None)).requery);
    assert!(!world.apply(KernelUpdate::Neighbour(neighbour(4, "10.0.0.9"), Some(GATEWAY))).requery);
    assert!(world.apply(KernelUpdate::Neighbour(gateway, Some(GATEWAY))).requery);
    assert!(!world.apply(KernelUpdate::Neighbour(gateway, Some(GATEWAY))).requery);
}

#[test]
fn a_neighbour_that_changes_changes_its_entries() {
    let gateway = neighbour(3, "10.0.0.9");
    let mut world =
        World::new([KernelUpdate::Link(3, device()), KernelUpdate::Neighbour(gateway, Some(GATEWAY))]);
    world.resolve("192.0.2.1", Some("10.0.0.9"), None).unwrap();
    let other = Neighbour { mac: [2, 0, 0, 0, 0, 8], stale: true };
    assert!(!world.apply(KernelUpdate::Neighbour(gateway, Some(other))).flush);
    assert_eq!(world.entry("192.0.2.1"), Some(other.mac));
    assert!(!world.apply(KernelUpdate::Neighbour(gateway, None)).requery);
    assert_eq!(world.entry("192.0.2.1"), None);
    assert!(
        world.apply(KernelUpdate::Neighbour(gateway, Some(other))).requery,
        "it is missed by those who had it"
    );
}

#[test]
fn the_master_of_a_device_is_tracked() {
    let mut world = World::new([KernelUpdate::Link(3, device()), KernelUpdate::Link(4, device())]);
    let up = Change::Link { ifindex: 3, up: true, gone: false };
    let part = LinkUpdate { master: Some(4), ..device() };
    assert_eq!(world.apply(KernelUpdate::Link(3, part)).changes, [up]);
    assert_eq!(world.kernel.local_state().masters, [(3, 4)]);
    // A message without the MAC address omits the master as well.
    assert_eq!(world.apply(KernelUpdate::Link(3, LinkUpdate { mac: None, ..device() })).changes, []);
    assert_eq!(world.kernel.local_state().masters, [(3, 4)]);
    assert_eq!(world.apply(KernelUpdate::Link(3, device())).changes, [up]);
    assert_eq!(world.kernel.local_state().masters, []);
    let vrf = LinkUpdate { vrf: true, ..device() };
    world.apply(KernelUpdate::Link(9, vrf));
    // So does a partial message omit the kind.
    world.apply(KernelUpdate::Link(9, LinkUpdate { mac: None, ..device() }));
    assert_eq!(world.kernel.local_state().vrfs, [9]);
}

#[test]
fn running_devices_without_addresses_are_known() {
    let mut world =
        World::new([KernelUpdate::Link(LOOPBACK_IFINDEX, device()), KernelUpdate::Link(3, device())]);
    let no_carrier = LinkUpdate { running: false, ..device() };
    let down = LinkUpdate { up: false, ..no_carrier };
    world.apply(KernelUpdate::Link(4, down));
    assert_eq!(world.kernel.local_state().up, [3]);
    // Routes over it apply, with or without a carrier.
    let change = Change::Link { ifindex: 4, up: false, gone: false };
    assert_eq!(world.apply(KernelUpdate::Link(4, no_carrier)).changes, [change]);
    assert_eq!(world.kernel.local_state().up, [3, 4]);
    assert_eq!(world.apply(KernelUpdate::Link(4, down)).changes, [change]);
    assert_eq!(world.kernel.local_state().up, [3]);
}

#[test]
fn only_changes_that_matter_are_reported() {
    let mut world = World::new([]);
    let up = |up| Change::Link { ifindex: 3, up, gone: false };
    let effects = world.apply(KernelUpdate::Link(3, device()));
    assert_eq!((effects.revalidate, effects.requery, effects.changes), (true, true, vec![up(true)]));
    let partial = LinkUpdate { mac: None, mtu: None, mtu6: None, ..device() };
    let effects = world.apply(KernelUpdate::Link(3, partial));
    assert_eq!((effects.revalidate, effects.requery, effects.changes), (false, false, vec![]));
    let effects = world.apply(KernelUpdate::Link(3, LinkUpdate { mtu: Some(1400), ..device() }));
    assert_eq!((effects.revalidate, effects.requery, effects.changes), (false, true, vec![]));

    let at = |delivered| address(3, "10.0.0.1", delivered);
    assert_eq!(world.apply(at(true)).changes, [Change::Addresses]);
    let effects = world.apply(at(true));
    assert_eq!((effects.requery, effects.changes), (false, vec![]));
    assert_eq!(world.kernel.local_state().addresses, [(3, ip("10.0.0.1"))]);

    let down = LinkUpdate { up: false, running: false, ..device() };
    assert_eq!(world.apply(KernelUpdate::Link(3, down)).changes, [up(false), Change::Addresses]);
    let locals = world.kernel.local_state();
    assert_eq!((locals.addresses, locals.down_addresses), (vec![], vec![(3, ip("10.0.0.1"))]));
    world.apply(KernelUpdate::Link(3, device()));
    let locals = world.kernel.local_state();
    assert_eq!((locals.addresses, locals.down_addresses), (vec![(3, ip("10.0.0.1"))], vec![]));
    let gone = Change::Link { ifindex: 3, up: false, gone: true };
    assert_eq!(world.apply(KernelUpdate::LinkGone(3)).changes, [gone, Change::Addresses]);
    assert_eq!(world.apply(KernelUpdate::LinkGone(3)).changes, []);
}

#[test]
fn a_device_and_an_address_touch_their_own_entries_only() {
    let mut world = World::new([
        KernelUpdate::Link(3, device()),
        KernelUpdate::Neighbour(neighbour(3, "10.0.0.9"), Some(GATEWAY)),
    ]);
    let both = ["192.0.2.1", "198.51.100.1"];
    let enter = |world: &mut World| {
        for peer in both {
            world.resolve(peer, Some("10.0.0.9"), None).unwrap();
        }
    };
    let entries = |world: &World| both.map(|peer| world.entry(peer).is_some());
    enter(&mut world);
    let down = LinkUpdate { running: false, ..device() };
    for (fact, doubt) in [
        (address(3, "fd00::50", true), false),
        (address(3, "10.0.0.50", true), false),
        (KernelUpdate::Link(4, device()), true),
        (KernelUpdate::Link(4, LinkUpdate { mtu: Some(1400), ..device() }), false),
        (KernelUpdate::Link(4, down), false),
        (KernelUpdate::LinkGone(4), false),
    ] {
        let effects = world.apply(fact);
        assert_eq!((effects.flush, effects.revalidate, effects.requery), (false, doubt, true), "{fact:?}");
        assert_eq!(entries(&world), [true, true], "{fact:?}");
    }
    // A peer that becomes a local address, and a local address that moves to another device.
    assert!(!world.apply(address(3, "192.0.2.1", true)).flush);
    assert_eq!(entries(&world), [false, true]);
    for fact in [
        address(5, "10.0.0.1", true),
        KernelUpdate::Link(3, LinkUpdate { mac: Some([2, 0, 0, 0, 0, 7]), ..device() }),
        KernelUpdate::Link(3, LinkUpdate { running: false, ..device() }),
        KernelUpdate::LinkGone(3),
    ] {
        world.apply(KernelUpdate::Link(3, device()));
        enter(&mut world);
        let effects = world.apply(fact);
        assert_eq!((effects.flush, effects.revalidate, effects.requery), (false, false, true), "{fact:?}");
        assert_eq!(entries(&world), [false, false], "{fact:?}");
    }
    // A removed address may remove any route with it.
    world.apply(KernelUpdate::Link(3, device()));
    world.apply(KernelUpdate::Neighbour(neighbour(3, "10.0.0.9"), Some(GATEWAY)));
    world.apply(address(3, "10.0.0.50", true));
    enter(&mut world);
    let effects = world.apply(address(3, "10.0.0.50", false));
    assert_eq!((effects.flush, effects.revalidate, entries(&world)), (false, true, [true, true]));
    let effects = world.apply(address(5, "10.0.0.1", false));
    assert_eq!((effects.flush, effects.revalidate, entries(&world)), (false, true, [false, false]));
}

#[test]
fn changed_routes_affect_only_their_peers() {
    let mut world = World::new([
        KernelUpdate::Link(3, device()),
        KernelUpdate::Neighbour(neighbour(3, "10.0.0.9"), Some(GATEWAY)),
    ]);
    for peer in ["192.0.2.1", "198.51.100.1"] {
        world.resolve(peer, Some("10.0.0.9"), None).unwrap();
    }
    let changed = KernelUpdate::Routes(Prefix::new(ip("192.0.2.0"), 24));
    let effects = world.apply(changed);
    assert!(!effects.flush && effects.requery);
    assert_eq!((world.entry("192.0.2.1"), world.entry("198.51.100.1")), (None, Some(GATEWAY.mac)));
    let mut effects = Effects::default();
    for n in 0..=ROUTE_CHANGES_MAX {
        assert!(!effects.flush, "after {n}");
        let World { kernel, table } = &mut world;
        kernel.apply(KernelUpdate::Routes(Prefix::new(ip("203.0.113.0"), 24)), table, &mut effects);
    }
    assert!(effects.flush);
    assert!(world.apply(KernelUpdate::AllRoutes).flush);
    assert!(world.apply(KernelUpdate::Malformed).flush);
}

#[test]
fn addresses_of_a_link_need_one_device() {
    let world = World::new([
        address(3, "fe80::1", true),
        address(3, "fe80::2", true),
        address(4, "fe80::2", true),
        address(4, "fd00::1", true),
    ]);
    let device = |local, peer| {
        let pair = RouteKey::new(ip(local), ip(peer)).unwrap();
        world.kernel.query(&pair).map(|question| question.device)
    };
    assert_eq!(device("fe80::1", "fe80::9"), Some(Some(3)));
    assert_eq!(device("fe80::1", "2001:db8::9"), Some(Some(3)));
    assert_eq!(device("fe80::2", "fe80::9"), None);
    assert_eq!(device("fe80::3", "fe80::9"), None);
    assert_eq!(device("fd00::1", "fe80::9"), None);
    assert_eq!(device("fd00::1", "2001:db8::9"), Some(None));
}

#[test]
fn a_new_snapshot_reports_its_differences() {
    let no_carrier = LinkUpdate { running: false, ..device() };
    let mut old = World::new([
        KernelUpdate::Link(1, device()),
        KernelUpdate::Link(2, device()),
        KernelUpdate::Link(3, device()),
        address(3, "10.0.0.1", true),
        KernelUpdate::Link(4, LinkUpdate { up: false, ..no_carrier }),
        KernelUpdate::Link(5, device()),
        KernelUpdate::Link(6, device()),
    ]);
    let new = World::new([
        KernelUpdate::Link(2, no_carrier),
        KernelUpdate::Link(3, device()),
        address(3, "10.0.0.2", true),
        KernelUpdate::Link(4, no_carrier),
        KernelUpdate::Link(5, LinkUpdate { master: Some(3), ..device() }),
        // Its MTU is not reported.
        KernelUpdate::Link(6, LinkUpdate { mtu: Some(1400), ..device() }),
        KernelUpdate::Link(7, device()),
    ]);
    let mut effects = Effects::default();
    old.kernel.replace(new.kernel, &mut effects);
    let link = |ifindex, up, gone| Change::Link { ifindex, up, gone };
    assert!(effects.flush);
    let changed = [
        link(1, false, true),
        link(2, false, false),
        // It went up without a carrier.
        link(4, false, false),
        link(5, true, false),
        link(7, true, false),
        Change::Addresses,
    ];
    assert_eq!(effects.changes, changed);
    assert_eq!(old.kernel.local_state().addresses, [(3, ip("10.0.0.2"))]);
}
