//! Next hops by the neighbours that the kernel finds, loses and forgets.

use std::net::Ipv4Addr;

use manylane_test_support::is_kernel;

use super::*;

#[test]
fn netns_peers_on_the_link_and_behind_gateways() {
    if !can_make_namespaces("netns_peers_on_the_link_and_behind_gateways") {
        return;
    }
    let world = Testbed::new();
    world.ip(PERMANENT_NEIGHBOURS);
    world.ip(
        "route add 192.0.2.0/24 via 10.9.0.2\nroute add 2001:db8::/32 via fe80::2 dev near\n\
         route add 198.51.100.0/24 via 10.8.0.2 mtu 1300\nroute add 203.0.113.0/24 via inet6 fe80::2 dev near\n",
    );
    let (_routes, mut reader) = world.start(REFRESH_INTERVAL);
    let (near, far) = (world.near(), world.far());
    reader.expect("10.9.0.1", "10.9.0.2", Some(near));
    reader.expect("::ffff:10.9.0.1", "::ffff:10.9.0.2", Some(near));
    reader.expect("fd09::1", "fd09::2", Some(near));
    reader.expect("fe80::1", "fe80::2", Some(near));
    reader.expect("10.9.0.1", "192.0.2.7", Some(near));
    reader.expect("fd09::1", "2001:db8::7", Some(near));
    reader.expect("10.9.0.1", "198.51.100.7", Some(NextHop { mtu: 1300, ..far }));
    reader.expect("10.9.0.1", "203.0.113.7", Some(near));
}

#[test]
fn netns_non_neighbours_have_no_next_hop() {
    if !can_make_namespaces("netns_non_neighbours_have_no_next_hop") {
        return;
    }
    let world = Testbed::new();
    world.ip(PERMANENT_NEIGHBOURS);
    world.ip(
        "route add blackhole 192.0.2.1\nroute add unreachable 192.0.2.2\nroute add prohibit 192.0.2.3\n\
         route add unreachable 2001:db8::2\nroute add 192.0.2.4 dev lo\n\
         address add fe80::1/64 dev far nodad\n",
    );
    let mut nowhere = vec![
        ("10.9.0.1", "10.9.0.1"),
        ("10.9.0.1", "10.8.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("fd09::1", "fd09::1"),
        ("::1", "::1"),
        ("10.9.0.1", "10.9.0.255"),
        ("10.9.0.1", "255.255.255.255"),
        ("10.9.0.1", "224.0.0.1"),
        ("fd09::1", "ff02::1"),
        ("10.9.0.1", "0.0.0.0"),
        ("10.9.0.1", "192.0.2.1"),
        ("10.9.0.1", "192.0.2.2"),
        ("10.9.0.1", "192.0.2.3"),
        ("10.9.0.1", "192.0.2.4"),
        ("10.9.0.1", "203.0.113.1"),
        ("fd09::1", "2001:db8::2"),
        ("fd09::1", "2001:db8::3"),
        // Not a local address: the kernel rejects it as a source.
        ("10.9.0.77", "10.9.0.2"),
        ("fd09::1", "10.9.0.2"),
        // Either device is possible.
        ("fe80::1", "fe80::2"),
        ("fd09::1", "fe80::2"),
    ];
    // If the kernel supports tunnels of this kind, and tells that a route leads into one.
    if is_kernel((6, 1))
        && try_ip(&world.local, "route add 198.51.100.1 encap ip id 7 dst 10.9.0.2 via 10.9.0.2 dev near\n")
    {
        nowhere.push(("10.9.0.1", "198.51.100.1"));
    }
    for (n, (local, peer)) in nowhere.into_iter().enumerate() {
        let known = format!("10.9.0.{}", 10 + n);
        world.ip(&format!("neighbour replace {known} lladdr 02:00:00:00:00:02 dev near nud permanent\n"));
        let (_routes, mut reader) = world.start(REFRESH_INTERVAL);
        reader.expect_none(local, peer, ("10.9.0.1", &known, world.near()));
    }
}

#[test]
fn netns_a_neighbour_is_used_once_the_kernel_has_found_it() {
    if !can_make_namespaces("netns_a_neighbour_is_used_once_the_kernel_has_found_it") {
        return;
    }
    let world = Testbed::new();
    let (_routes, mut reader) = world.start(REFRESH_INTERVAL);
    world.ip("neighbour replace 10.8.0.2 lladdr 02:00:00:00:01:02 dev far nud permanent\n");
    for (local, peer) in [("10.9.0.1", "10.9.0.2"), ("fd09::1", "fd09::2")] {
        let (_routes, mut first) = world.start(REFRESH_INTERVAL);
        first.expect_none(local, peer, ("10.8.0.1", "10.8.0.2", world.far()));
        // What the lane does meanwhile.
        assert_eq!(reader.query_now(local, peer), None);
        world.send(local, peer, 10);
        reader.expect(local, peer, Some(world.near()));
        first.expect(local, peer, Some(world.near()));
    }
}

#[test]
fn netns_a_gateway_changes_its_mac_and_disappears() {
    if !can_make_namespaces("netns_a_gateway_changes_its_mac_and_disappears") {
        return;
    }
    let world = Testbed::new();
    world.ip(PERMANENT_NEIGHBOURS);
    world.ip("route add 192.0.2.0/24 via 10.9.0.2\n");
    let (_routes, mut reader) = world.start(REFRESH_INTERVAL);
    let mut peers: Vec<String> = (1..=200).map(|n| format!("192.0.2.{n}")).collect();
    peers.push("10.9.0.2".into());
    for peer in &peers {
        reader.expect("10.9.0.1", peer, Some(world.near()));
    }
    world.ip("neighbour replace 10.9.0.2 lladdr 02:00:00:00:00:09 dev near nud permanent\n");
    let stamp = stamp_of(reader.clock);
    let changed = NextHop { mac: OTHER_MAC, ..world.near() };
    peers.iter().for_each(|peer| reader.expect("10.9.0.1", peer, Some(changed)));
    assert!(stamp_of(reader.clock).wrapping_sub(stamp) <= 1, "changed in place, not forgotten and asked for");
    world.ip("neighbour replace 10.9.0.2 dev near nud failed\n");
    peers.iter().for_each(|peer| reader.expect("10.9.0.1", peer, None));
    world.ip(PERMANENT_NEIGHBOURS);
    reader.expect("10.9.0.1", &peers[0], Some(world.near()));
    world.ip("neighbour del 10.9.0.2 dev near\n");
    reader.expect("10.9.0.1", &peers[0], None);
}

#[test]
fn netns_a_stale_neighbour_is_used_but_the_kernel_is_reminded() {
    if !can_make_namespaces("netns_a_stale_neighbour_is_used_but_the_kernel_is_reminded") {
        return;
    }
    let world = Testbed::new();
    world.ip(PERMANENT_NEIGHBOURS);
    world.ip("neighbour replace 10.9.0.2 lladdr 02:00:00:00:00:02 dev near nud stale\n");
    // Long enough that no entry expires while another test has the CPU.
    let (_routes, mut reader) = world.start(4 * TEST_REFRESH_INTERVAL);
    let ask = |reader: &mut Reader| reader.query_now("10.9.0.1", "10.9.0.2");
    // Once per epoch a datagram takes the socket; then the entry is used again.
    for _ in 0..3 {
        reader.expect("10.9.0.1", "10.9.0.2", Some(world.near()));
        reader.expect("10.9.0.1", "10.9.0.2", None);
    }
    // A reachable neighbour is used all the time, as soon as that is known.
    world.ip(PERMANENT_NEIGHBOURS);
    let turns = |reader: &mut Reader, number: u16, check: &dyn Fn(Option<NextHop>)| {
        let start = epoch_of(reader.clock);
        let (mut last, mut is_known) = (start, true);
        let query = || {
            let answer = ask(reader);
            reader.refresh();
            let now = epoch_of(reader.clock);
            // An entry that was not used for an epoch, because this thread had no CPU, may have
            // expired.
            is_known &= now.wrapping_sub(last) <= 1;
            if is_known {
                check(answer);
            }
            is_known |= answer.is_some();
            last = now;
            now.wrapping_sub(start)
        };
        wait_for(&format!("{number} epochs"), query, |passed| *passed >= number);
    };
    turns(&mut reader, 2, &|_| ());
    reader.expect("10.9.0.1", "10.9.0.2", Some(world.near()));
    turns(&mut reader, 3, &|answer| assert_eq!(answer, Some(world.near())));
}

#[test]
fn netns_unused_entries_expire() {
    if !can_make_namespaces("netns_unused_entries_expire") {
        return;
    }
    let world = Testbed::new();
    world.ip(PERMANENT_NEIGHBOURS);
    let (routes, mut reader) = world.start(TEST_REFRESH_INTERVAL);
    reader.expect("10.9.0.1", "10.9.0.2", Some(world.near()));
    let table = &routes.shared.table;
    let pair = RouteKey::new(ip("10.9.0.1"), ip("10.9.0.2")).unwrap();
    let epoch = || table.find(&pair, table.hash(&pair)).map(|found| found.epoch);
    wait_for("the entry to expire (epoch)", epoch, Option::is_none);
    reader.expect("10.9.0.1", "10.9.0.2", Some(world.near()));
}

#[test]
fn netns_a_flood_of_peers_is_bounded_and_evicts_fairly() {
    if !can_make_namespaces("netns_a_flood_of_peers_is_bounded_and_evicts_fairly") {
        return;
    }
    let world = Testbed::new();
    world.ip(PERMANENT_NEIGHBOURS);
    world.ip("route add default via 10.9.0.2\n");
    let (routes, mut reader) = world.start(REFRESH_INTERVAL);
    let (near, local) = (world.near(), ip("10.9.0.1"));
    let start = Instant::now();
    let (mut flood, mut good) = (0x1400_0000_u32, 0);
    // Longer, as long as the thread that asks the kernel has no CPU.
    let is_enough = |good: u32| good > 0 || start.elapsed() > TEST_TIMEOUT;
    while start.elapsed() < Duration::from_millis(500) || !is_enough(good) {
        reader.refresh();
        for _ in 0..64 {
            flood += 1;
            assert_eq!(reader.next_hop(local, Ipv4Addr::from(flood).into()), None);
        }
        good += u32::from(reader.next_hop(local, ip("192.0.2.1")) == Some(near));
    }
    assert!(good > 0, "the one that comes again was never known");
    let peers = flood - 0x1400_0000;
    let pair = |n| RouteKey::new(local, Ipv4Addr::from(n).into()).unwrap();
    let table = &routes.shared.table;
    let known =
        (0x1400_0000..=flood).filter(|n| table.find(&pair(*n), table.hash(&pair(*n))).is_some()).count();
    // The thread goes on meanwhile.
    let elapsed = start.elapsed();
    let rounds = elapsed.as_millis() / worker::ROUND_INTERVAL.as_millis() + 2;
    assert!(known as u128 <= rounds * worker::QUERIES_PER_ROUND as u128, "{known} of {peers} in {elapsed:?}");
    assert!(known <= table::ENTRIES_MAX);
}
