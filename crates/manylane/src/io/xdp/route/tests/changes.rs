//! Routes, devices and addresses that change while lanes query.

use std::net::Ipv4Addr;
use std::sync::{Mutex, mpsc};

use super::*;

#[test]
fn netns_routes_and_rules_change() {
    if !can_make_namespaces("netns_routes_and_rules_change") {
        return;
    }
    let world = Testbed::new();
    world.ip(PERMANENT_NEIGHBOURS);
    let (_routes, mut reader) = world.start(REFRESH_INTERVAL);
    let (near, far) = (world.near(), world.far());
    world.ip("route add 192.0.2.0/24 via 10.9.0.2\n");
    reader.expect("10.9.0.1", "192.0.2.1", Some(near));
    world.ip("route replace 192.0.2.0/24 via 10.8.0.2\n");
    reader.expect("10.9.0.1", "192.0.2.1", Some(far));
    // More specific.
    world.ip("route add 192.0.2.1/32 via 10.9.0.2 mtu 1280\n");
    reader.expect("10.9.0.1", "192.0.2.1", Some(NextHop { mtu: 1280, ..near }));
    world.ip("route del 192.0.2.1/32\n");
    reader.expect("10.9.0.1", "192.0.2.1", Some(far));
    // By source: two local addresses, two routes.
    world.ip("route add 192.0.2.0/24 via 10.9.0.2 table 100\nrule add from 10.9.0.1 lookup 100\n");
    reader.expect("10.9.0.1", "192.0.2.1", Some(near));
    reader.expect("10.8.0.1", "192.0.2.1", Some(far));
    world.ip("rule del from 10.9.0.1 lookup 100\n");
    reader.expect("10.9.0.1", "192.0.2.1", Some(far));
    world.ip("route del 192.0.2.0/24\n");
    reader.expect("10.9.0.1", "192.0.2.1", None);
    world.ip("route add 2001:db8::/32 via fd09::2\n");
    reader.expect("fd09::1", "2001:db8::1", Some(near));
    world.ip("route replace unreachable 2001:db8::/32 metric 1\n");
    reader.expect("fd09::1", "2001:db8::1", None);
}

#[test]
fn netns_routes_by_next_hop_objects_change() {
    if !can_make_namespaces("netns_routes_by_next_hop_objects_change") {
        return;
    }
    let world = Testbed::new();
    world.ip(PERMANENT_NEIGHBOURS);
    // If the kernel supports them (Linux 5.3).
    if !try_ip(&world.local, "nexthop add id 1 via 10.9.0.2 dev near\nroute add 192.0.2.0/24 nhid 1\n") {
        return;
    }
    // Otherwise the kernel reports each route as well.
    set_sysctl(&world.local, "ipv4/nexthop_compat_mode", "0");
    let (_routes, mut reader) = world.start(REFRESH_INTERVAL);
    reader.expect("10.9.0.1", "192.0.2.1", Some(world.near()));
    world.ip("nexthop replace id 1 via 10.8.0.2 dev far\n");
    reader.expect("10.9.0.1", "192.0.2.1", Some(world.far()));
}

#[test]
fn netns_devices_and_addresses_change() {
    if !can_make_namespaces("netns_devices_and_addresses_change") {
        return;
    }
    let world = Testbed::new();
    world.ip(PERMANENT_NEIGHBOURS);
    let (routes, mut reader) = world.start(REFRESH_INTERVAL);
    let (near, far) = (world.near(), world.far());
    let (tell, told) = mpsc::channel();
    let observer = Arc::downgrade(&routes);
    routes.on_change(Box::new(move |change| {
        let addresses = observer.upgrade().map(|routes| routes.local_addresses());
        let _ = tell.send((*change, addresses.unwrap_or_default()));
    }));
    let wait_for_change = |wanted: &ChangePredicate<'_>| loop {
        let (change, addresses) = told.recv_timeout(TEST_TIMEOUT).expect("a change");
        if wanted(&change, &addresses) {
            break;
        }
    };
    let has = |addresses: &[(u32, IpAddr)], device: &NextHop, text: &str| {
        addresses.contains(&(device.ifindex, ip(text)))
    };
    for text in ["10.9.0.1", "fd09::1", "fe80::1"] {
        assert!(has(&routes.local_addresses(), &near, text), "{text}");
    }
    reader.expect("10.9.0.1", "10.9.0.2", Some(near));

    world.ip("address add 10.9.0.50/32 peer 10.9.0.60 dev near\n");
    wait_for_change(&|change, all| *change == Change::Addresses && has(all, &near, "10.9.0.50"));
    assert!(!has(&routes.local_addresses(), &near, "10.9.0.60"));
    // Only after duplicate address detection the address exists, with a change.
    world.ip("address add fd09::50/64 dev near\n");
    wait_for_change(&|change, all| *change == Change::Addresses && has(all, &near, "fd09::50"));
    world.ip("address del 10.9.0.50/32 peer 10.9.0.60 dev near\n");
    wait_for_change(&|change, all| *change == Change::Addresses && !has(all, &near, "10.9.0.50"));

    world.ip("link set near mtu 1450\n");
    reader.expect("10.9.0.1", "10.9.0.2", Some(NextHop { mtu: 1450, ..near }));
    reader.expect("fd09::1", "fd09::2", Some(NextHop { mtu: 1450, ..near }));
    world.ip("link set near address 02:00:00:00:00:09\n");
    world.ip(PERMANENT_NEIGHBOURS);
    reader.expect("10.9.0.1", "10.9.0.2", Some(NextHop { mtu: 1450, source_mac: OTHER_MAC, ..near }));

    let link = |up, gone| Change::Link { ifindex: near.ifindex, up, gone };
    // The peer takes the carrier down.
    assert!(try_ip(&world.peer, "link set near down\n"));
    wait_for_change(&|change, _| *change == link(false, false));
    reader.expect("10.9.0.1", "10.9.0.2", None);
    assert!(has(&routes.local_addresses(), &near, "10.9.0.1"), "up without a carrier");
    assert!(try_ip(&world.peer, "link set near up\n"));
    wait_for_change(&|change, _| *change == link(true, false));
    world.ip(PERMANENT_NEIGHBOURS);
    reader.expect("10.9.0.1", "10.9.0.2", Some(NextHop { mtu: 1450, source_mac: OTHER_MAC, ..near }));

    world.ip("link set near down\n");
    wait_for_change(&|change, all| *change == Change::Addresses && !has(all, &near, "10.9.0.1"));
    reader.expect("10.9.0.1", "10.9.0.2", None);
    reader.expect("10.8.0.1", "10.8.0.2", Some(far));
    world.ip("link del near\n");
    wait_for_change(&|change, _| *change == link(false, true));
    assert!(routes.local_addresses().iter().all(|(ifindex, _)| *ifindex != near.ifindex));
    world.ip("link add new type veth peer name other\n");
    let added = world.device("new");
    wait_for_change(&|change, _| *change == Change::Link { ifindex: added, up: false, gone: false });
}

#[test]
fn netns_a_next_hop_stays_in_force_while_others_change() {
    if !can_make_namespaces("netns_a_next_hop_stays_in_force_while_others_change") {
        return;
    }
    let world = Testbed::new();
    world.ip(PERMANENT_NEIGHBOURS);
    let (routes, mut reader) = world.start(REFRESH_INTERVAL);
    let near = world.near();
    let (tell, told) = mpsc::channel();
    routes.on_change(Box::new(move |change| _ = tell.send(*change)));
    for (local, peer) in [("10.9.0.1", "10.9.0.2"), ("fd09::1", "fd09::2")] {
        reader.expect(local, peer, Some(near));
    }
    let is_up = |change| matches!(change, Change::Link { up: true, .. });
    let is_gone = |change| matches!(change, Change::Link { gone: true, .. });
    let is_of_addresses = |change| change == Change::Addresses;
    // The second address exists only after duplicate address detection.
    for (lines, wanted) in [
        ("address add 10.9.0.50/24 dev near\n", &is_of_addresses as &dyn Fn(Change) -> bool),
        ("address add fd09::50/64 dev near\n", &is_of_addresses),
        ("link add new type veth peer name other\nlink set new up\nlink set other up\n", &is_up),
        ("address add 192.0.2.77/24 dev new\n", &is_of_addresses),
        ("link del new\n", &is_gone),
        ("address del 10.9.0.50/24 dev near\n", &is_of_addresses),
        ("link set far down\n", &is_of_addresses),
        ("link set far up\n", &is_up),
    ] {
        world.ip(lines);
        let mut changes = Vec::new();
        let is_there = || {
            // Changes reported earlier belong to the previous step.
            changes.extend(told.try_iter());
            for (local, peer) in [("10.9.0.1", "10.9.0.2"), ("fd09::1", "fd09::2")] {
                assert_eq!(reader.query_now(local, peer), Some(near), "{lines}");
            }
            changes.clone()
        };
        wait_for(&format!("the change by {lines}"), is_there, |all| all.iter().copied().any(wanted));
    }
    // The kernel was queried again all the same, to be sure.
    reader.refresh();
    let (pair, epoch) = (RouteKey::new(ip("10.9.0.1"), ip("10.9.0.2")).unwrap(), epoch_of(reader.clock));
    let table = Arc::clone(&routes.shared.table);
    let query = || {
        reader.query_now("10.9.0.1", "10.9.0.2");
        table.find(&pair, table.hash(&pair)).map(|found| found.epoch)
    };
    wait_for("the entry of the current epoch", query, |found| *found == Some(epoch));
}

#[test]
fn netns_the_mtu_of_the_path_is_learnt_while_running() {
    if !can_make_namespaces("netns_the_mtu_of_the_path_is_learnt_while_running") {
        return;
    }
    let world = Testbed::new();
    world.ip(PERMANENT_NEIGHBOURS);
    world.ip("route add 192.0.2.0/24 via 10.9.0.2\n");
    // Behind the peer's host the path has a smaller MTU.
    set_sysctl(&world.peer, "ipv4/ip_forward", "1");
    let narrow = "link add narrow type veth peer name behind\nlink set narrow mtu 1300 up\n\
                  link set behind up\naddress add 192.0.2.254/24 dev narrow\n";
    assert!(try_ip(&world.peer, narrow));
    let (_routes, mut reader) = world.start(TEST_REFRESH_INTERVAL);
    reader.expect("10.9.0.1", "192.0.2.1", Some(world.near()));
    // Too large for the path: the host reports that, and the local kernel remembers it.
    world.send("10.9.0.1", "192.0.2.1", 1400);
    reader.expect("10.9.0.1", "192.0.2.1", Some(NextHop { mtu: 1300, ..world.near() }));
    reader.expect("10.9.0.1", "192.0.2.2", Some(world.near()));
}

#[test]
fn netns_lost_netlink_events_cause_a_resync() {
    if !can_make_namespaces("netns_lost_netlink_events_cause_a_resync") {
        return;
    }
    let world = Testbed::new();
    world.ip(PERMANENT_NEIGHBOURS);
    let (routes, mut reader) = world.start(REFRESH_INTERVAL);
    reader.expect("10.9.0.1", "10.9.0.2", Some(world.near()));
    // The thread is blocked while more events occur than the buffer holds.
    let (held, hold) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let once = Mutex::new(Some((held, released)));
    let (tell, told) = mpsc::channel();
    routes.on_change(Box::new(move |change| {
        if let Some((held, released)) = lock(&once).take() {
            held.send(()).unwrap();
            let _ = released.recv_timeout(TEST_TIMEOUT);
        }
        let _ = tell.send(*change);
    }));
    world.ip("address add 10.9.0.50/24 dev near\n");
    hold.recv_timeout(TEST_TIMEOUT).unwrap();
    let mut storm = String::new();
    for n in 0..30_000 {
        let mac = format!("02:00:00:01:{:02x}:{:02x}", n / 256, n % 256);
        storm += &format!("neighbour replace 10.9.0.200 lladdr {mac} dev near nud permanent\n");
    }
    world.ip(&storm);
    world.ip("neighbour replace 10.9.0.2 lladdr 02:00:00:00:00:09 dev near nud permanent\n\
         address add 10.9.0.51/24 dev near\nlink del far\n");
    release.send(()).unwrap();
    reader.expect("10.9.0.1", "10.9.0.2", Some(NextHop { mac: OTHER_MAC, ..world.near() }));
    let near = world.near().ifindex;
    let added = (near, ip("10.9.0.51"));
    wait_for("10.9.0.51", || routes.local_addresses(), |all| all.contains(&added));
    wait_for(
        "the end of a link",
        || told.try_recv(),
        |change| matches!(change, Ok(Change::Link { gone: true, .. })),
    )
    .unwrap();
}

#[test]
fn netns_a_pair_that_others_replaced_is_queried_again() {
    if !can_make_namespaces("netns_a_pair_that_others_replaced_is_queried_again") {
        return;
    }
    let world = Testbed::new();
    world.ip(PERMANENT_NEIGHBOURS);
    world.ip("route add default via 10.9.0.2\n");
    // No epoch ends meanwhile.
    let (routes, mut reader) = world.start(10 * TEST_TIMEOUT);
    let (local, peer) = (ip("10.9.0.1"), ip("192.0.2.1"));
    reader.expect("10.9.0.1", "192.0.2.1", Some(world.near()));
    let mut other = routes.reader();
    let mut flood = 0x1400_0000_u32;
    let send_to_others = || {
        for _ in 0..64 {
            flood += 1;
            other.next_hop(local, Ipv4Addr::from(flood).into());
        }
        (flood, reader.next_hop(local, peer))
    };
    wait_for("the entry to be replaced", send_to_others, |(_, found)| found.is_none());
    thread::sleep(Duration::from_millis(50));
    assert_eq!(reader.next_hop(local, peer), None, "it was queried in this epoch");
    assert_eq!(reader.next_hop_again(local, peer), None);
    reader.expect("10.9.0.1", "192.0.2.1", Some(world.near()));
}
