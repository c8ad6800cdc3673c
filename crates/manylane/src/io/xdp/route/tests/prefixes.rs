//! Short packets by prefixes, while the kernel's tables change.

use super::*;

const PEER: &str = "192.0.2.77";

/// The next hop of a short packet to a peer that no lane has asked for.
fn short(reader: &mut Reader, peer: &str) -> std::result::Result<NextHop, NoNextHop> {
    reader.refresh();
    reader.packet_next_hop(ip("10.9.0.1"), ip(peer), SHORT_LEN_MAX)
}

#[track_caller]
fn expect(reader: &mut Reader, peer: &str, expected: std::result::Result<NextHop, NoNextHop>) {
    _ = wait_for(&format!("{expected:?} to {peer}"), || short(reader, peer), |next| *next == expected);
}

#[test]
fn netns_short_packets_go_by_prefixes_and_query_nothing() {
    if !can_make_namespaces("netns_short_packets_go_by_prefixes_and_query_nothing") {
        return;
    }
    let world = Testbed::new();
    world.ip(PERMANENT_NEIGHBOURS);
    world.ip("route add default via 10.9.0.2\nroute add blackhole 192.0.2.128/25\n");
    let (routes, mut reader) = world.start(REFRESH_INTERVAL);
    routes.use_prefixes();
    // Before they are known, each peer is asked for.
    expect(&mut reader, "192.0.2.101", Ok(world.near()));
    wait_for("answers to the first queries", || reader.queue.is_empty(), |is_empty| *is_empty);
    for last in 0..100 {
        assert_eq!(short(&mut reader, &format!("192.0.2.{last}")), Ok(world.near()));
    }
    assert!(reader.queue.is_empty());
    let on_link = (short(&mut reader, "10.8.0.2"), short(&mut reader, "10.8.0.77"));
    assert_eq!(on_link, (Ok(world.far()), Err(NoNextHop::Unresolved)));
    // A longer one is asked for: its path may have a smaller MTU. So is what is not plain.
    let long = reader.packet_next_hop(ip("10.9.0.1"), ip(PEER), SHORT_LEN_MAX + 1);
    assert_eq!(long, Err(NoNextHop::Unknown));
    for peer in ["192.0.2.200", "127.0.0.9", "10.9.0.1", "10.9.0.255"] {
        assert_eq!(short(&mut reader, peer), Err(NoNextHop::Unknown), "{peer}");
    }
}

#[test]
fn netns_prefixes_follow_the_kernels_tables() {
    if !can_make_namespaces("netns_prefixes_follow_the_kernels_tables") {
        return;
    }
    let world = Testbed::new();
    world.ip(PERMANENT_NEIGHBOURS);
    let (routes, mut reader) = world.start(REFRESH_INTERVAL);
    routes.use_prefixes();
    expect(&mut reader, "10.9.0.2", Ok(world.near()));
    expect(&mut reader, PEER, Err(NoNextHop::Unknown));
    world.ip("route add default via 10.9.0.2\n");
    expect(&mut reader, PEER, Ok(world.near()));
    world.ip("route add 192.0.2.64/26 via 10.8.0.2\n");
    expect(&mut reader, PEER, Ok(world.far()));
    world.ip("neighbour replace 10.8.0.2 lladdr 02:00:00:00:00:09 dev far nud permanent\n");
    expect(&mut reader, PEER, Ok(NextHop { mac: OTHER_MAC, ..world.far() }));
    // One packet makes the kernel probe a stale neighbour.
    world.ip("neighbour replace 10.8.0.2 lladdr 02:00:00:00:00:09 dev far nud stale\n");
    expect(&mut reader, PEER, Err(NoNextHop::Unknown));
    assert_eq!(short(&mut reader, PEER), Ok(NextHop { mac: OTHER_MAC, ..world.far() }));
    world.ip("neighbour delete 10.8.0.2 dev far\n");
    expect(&mut reader, PEER, Err(NoNextHop::Unresolved));
    world.ip("route delete 192.0.2.64/26 via 10.8.0.2\n");
    expect(&mut reader, PEER, Ok(world.near()));
    // Rules may depend on more than the peer.
    world.ip("rule add fwmark 7 table 77\n");
    expect(&mut reader, PEER, Err(NoNextHop::Unknown));
    world.ip("rule delete fwmark 7 table 77\n");
    expect(&mut reader, PEER, Ok(world.near()));
    world.ip("link set near down\n");
    expect(&mut reader, PEER, Err(NoNextHop::Unknown));
}

#[test]
fn netns_long_routing_tables_are_left_to_the_kernel() {
    if !can_make_namespaces("netns_long_routing_tables_are_left_to_the_kernel") {
        return;
    }
    let world = Testbed::new();
    world.ip(PERMANENT_NEIGHBOURS);
    world.ip("route add default via 10.9.0.2\n");
    let (routes, mut reader) = world.start(REFRESH_INTERVAL);
    routes.use_prefixes();
    // Not the peer below: one that was asked for keeps its next hop.
    expect(&mut reader, "192.0.2.1", Ok(world.near()));
    let routes = |verb: &str| -> String {
        (0..=255).map(|nth| format!("route {verb} 198.51.{nth}.0/24 via 10.9.0.2\n")).collect()
    };
    world.ip(&routes("add"));
    expect(&mut reader, PEER, Err(NoNextHop::Unknown));
    world.ip(&routes("delete"));
    expect(&mut reader, PEER, Ok(world.near()));
}
