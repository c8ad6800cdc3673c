//! Tests against the kernel: routes, neighbours and addresses that change while lanes query.

use std::net::{IpAddr, UdpSocket};
use std::sync::mpsc;
use std::time::Instant;
use std::{fs, thread};

use manylane_sys::netns::NetNs;
use manylane_sys::process::run_isolated;

use super::*;
use crate::skip;

/// Far longer than any step takes on a machine that is busy with other tests.
const TEST_TIMEOUT: Duration = Duration::from_secs(20);
/// Epoch length for tests that wait for several.
const TEST_REFRESH_INTERVAL: Duration = Duration::from_millis(50);

const LOCAL_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const PEER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
const OTHER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];

/// True if this process can make network namespaces. Reports the skip of test `name` if not.
pub(in crate::io::xdp) fn can_make_namespaces(name: &str) -> bool {
    let Err(err) = NetNs::create() else { return true };
    skip::report(name, &format!("no network namespace can be made, run as root: {err}"));
    false
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(in crate::io::xdp) fn run<T: Send>(namespace: &NetNs, work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let inside = scope.spawn(|| {
            namespace.enter().unwrap();
            work()
        });
        inside.join().unwrap()
    })
}

/// Runs lines of `ip -batch` in a namespace; true if they succeed.
pub(in crate::io::xdp) fn try_ip(namespace: &NetNs, lines: &str) -> bool {
    let done = run_isolated(Some(namespace), "ip", &["-batch", "-"], lines.as_bytes());
    done.expect("the program ip: apt-get install iproute2").status.success()
}

pub(in crate::io::xdp) fn set_sysctl(namespace: &NetNs, name: &str, value: &str) {
    run(namespace, || fs::write(format!("/proc/sys/net/{name}"), value).unwrap());
}

/// Two namespaces, joined by `near` (10.9.0.0/24, fd09::/64) and `far` (10.8.0.0/24): local is 1,
/// peer is 2.
struct Testbed {
    local: NetNs,
    peer: NetNs,
}

impl Testbed {
    fn new() -> Self {
        let world = Self { local: NetNs::create().unwrap(), peer: NetNs::create().unwrap() };
        let peer = world.peer.path();
        // The local second device has another index than the peer's first, so that confusing them
        // is noticed.
        world.ip(&format!(
            "link set lo up\n\
             link add near address 02:00:00:00:00:01 type veth peer near address 02:00:00:00:00:02 netns {peer}\n\
             link add far mtu 1400 address 02:00:00:00:01:01 type veth peer far address 02:00:00:00:01:02 netns {peer}\n"
        ));
        for (namespace, host) in [(&world.local, 1), (&world.peer, 2)] {
            let lines = format!(
                "link set near addrgenmode none\nlink set far addrgenmode none\nlink set lo up\n\
                 address add 10.9.0.{host}/24 dev near\naddress add 10.8.0.{host}/24 dev far\n\
                 address add fd09::{host}/64 dev near nodad\naddress add fe80::{host}/64 dev near nodad\n\
                 link set near up\nlink set far up\n"
            );
            assert!(try_ip(namespace, &lines));
        }
        for device in ["near", "far"] {
            wait_until(|| run(&world.local, || manylane_sys::netns::is_device_running(device).unwrap()));
        }
        world
    }

    fn ip(&self, lines: &str) {
        assert!(try_ip(&self.local, lines), "{lines}");
    }

    fn device(&self, name: &str) -> u32 {
        run(&self.local, || manylane_sys::netns::device_index(name).unwrap())
    }

    fn start(&self, period: Duration) -> (Arc<Routes>, Reader) {
        let routes = run(&self.local, || Routes::start_with_interval(period).unwrap());
        let reader = routes.reader();
        (routes, reader)
    }

    /// Sends a datagram by an ordinary socket, as the companion of a lane would.
    fn send(&self, local: &str, peer: &str, bytes: usize) {
        let socket = run(&self.local, || UdpSocket::bind((ip(local), 0)).unwrap());
        let _ = socket.send_to(&vec![0; bytes], (ip(peer), 9));
    }

    fn near(&self) -> NextHop {
        NextHop { ifindex: self.device("near"), source_mac: LOCAL_MAC, mac: PEER_MAC, mtu: 1500 }
    }

    fn far(&self) -> NextHop {
        let (source_mac, mac) = ([2, 0, 0, 0, 1, 1], [2, 0, 0, 0, 1, 2]);
        NextHop { ifindex: self.device("far"), source_mac, mac, mtu: 1400 }
    }
}

/// Permanent neighbours, for tests that are not about them.
const PERMANENT_NEIGHBOURS: &str = "neighbour replace 10.9.0.2 lladdr 02:00:00:00:00:02 dev near nud permanent\n\
                          neighbour replace fd09::2 lladdr 02:00:00:00:00:02 dev near nud permanent\n\
                          neighbour replace fe80::2 lladdr 02:00:00:00:00:02 dev near nud permanent\n\
                          neighbour replace 10.8.0.2 lladdr 02:00:00:00:01:02 dev far nud permanent\n";

/// Matches an expected change, with the addresses after it.
type ChangePredicate<'a> = dyn Fn(&Change, &[(u32, IpAddr)]) -> bool + 'a;

pub(in crate::io::xdp) fn wait_until(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < TEST_TIMEOUT, "it does not come");
        thread::sleep(Duration::from_millis(1));
    }
}

impl Reader {
    fn query_now(&mut self, local: &str, peer: &str) -> Option<NextHop> {
        self.refresh();
        self.next_hop(ip(local), ip(peer))
    }

    /// Queries until the result is `expected`.
    #[track_caller]
    fn expect(&mut self, local: &str, peer: &str, expected: Option<NextHop>) {
        let start = Instant::now();
        loop {
            let answer = self.query_now(local, peer);
            if answer == expected {
                return;
            }
            assert!(start.elapsed() < TEST_TIMEOUT, "{local} to {peer}: {answer:?}, not {expected:?}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Queries until the kernel has answered a later query, and checks that there is no result.
    #[track_caller]
    fn expect_none(&mut self, local: &str, peer: &str, known: (&str, &str, NextHop)) {
        assert_eq!(self.query_now(local, peer), None, "{local} to {peer}");
        // Queries of a lane are answered in order, and each is new to the table.
        self.expect(known.0, known.1, Some(known.2));
        assert_eq!(self.query_now(local, peer), None, "{local} to {peer}");
    }
}

#[test]
fn needs_no_privilege_and_ends() {
    let routes = Routes::start().unwrap();
    let loopback = ip("127.0.0.1");
    assert!(routes.local_addresses().iter().any(|(ifindex, ip)| *ip == loopback && *ifindex > 0));
    let mut reader = routes.reader();
    assert_eq!(reader.query_now("127.0.0.1", "127.0.0.1"), None);
    assert_eq!(reader.query_now("127.0.0.1", "::1"), None);
    let shared = Arc::downgrade(&routes.shared);
    drop(routes);
    assert!(!*lock(&shared.upgrade().unwrap().has_exited), "a reader keeps the thread");
    drop(reader);
    wait_until(|| shared.upgrade().is_none());
}

#[test]
fn a_watcher_may_have_the_last_reference() {
    let routes = Routes::start().unwrap();
    let (shared, last) = (Arc::downgrade(&routes.shared), Mutex::new(Some(Arc::clone(&routes))));
    routes.on_change(Box::new(move |_| drop(lock(&last).take())));
    {
        // As the thread does on a change.
        let shared = Arc::clone(&routes.shared);
        drop(routes);
        for watcher in lock(&shared.listeners).iter() {
            watcher(&Change::Addresses);
        }
    }
    wait_until(|| shared.upgrade().is_none());
}

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
fn netns_what_is_no_neighbour_has_no_next_hop() {
    if !can_make_namespaces("netns_what_is_no_neighbour_has_no_next_hop") {
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
    // If the kernel supports tunnels of this kind.
    if try_ip(&world.local, "route add 198.51.100.1 encap ip id 7 dst 10.9.0.2 via 10.9.0.2 dev near\n") {
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
fn netns_a_gateway_changes_its_mac_and_goes() {
    if !can_make_namespaces("netns_a_gateway_changes_its_mac_and_goes") {
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
    wait_until(|| peers.iter().all(|peer| reader.query_now("10.9.0.1", peer) == Some(changed)));
    assert!(stamp_of(reader.clock).wrapping_sub(stamp) <= 1, "changed in place, not forgotten and asked for");
    world.ip("neighbour replace 10.9.0.2 dev near nud failed\n");
    wait_until(|| peers.iter().all(|peer| reader.query_now("10.9.0.1", peer).is_none()));
    world.ip(PERMANENT_NEIGHBOURS);
    reader.expect("10.9.0.1", &peers[0], Some(world.near()));
    world.ip("neighbour del 10.9.0.2 dev near\n");
    reader.expect("10.9.0.1", &peers[0], None);
}

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
    let wait_for = |wanted: &ChangePredicate<'_>| loop {
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
    wait_for(&|change, all| *change == Change::Addresses && has(all, &near, "10.9.0.50"));
    assert!(!has(&routes.local_addresses(), &near, "10.9.0.60"));
    // Only after duplicate address detection the address exists, with a change.
    world.ip("address add fd09::50/64 dev near\n");
    wait_for(&|change, all| *change == Change::Addresses && has(all, &near, "fd09::50"));
    world.ip("address del 10.9.0.50/32 peer 10.9.0.60 dev near\n");
    wait_for(&|change, all| *change == Change::Addresses && !has(all, &near, "10.9.0.50"));

    world.ip("link set near mtu 1450\n");
    reader.expect("10.9.0.1", "10.9.0.2", Some(NextHop { mtu: 1450, ..near }));
    reader.expect("fd09::1", "fd09::2", Some(NextHop { mtu: 1450, ..near }));
    world.ip("link set near address 02:00:00:00:00:09\n");
    world.ip(PERMANENT_NEIGHBOURS);
    reader.expect("10.9.0.1", "10.9.0.2", Some(NextHop { mtu: 1450, source_mac: OTHER_MAC, ..near }));

    let link = |up, gone| Change::Link { ifindex: near.ifindex, up, gone };
    // The peer takes the carrier down.
    assert!(try_ip(&world.peer, "link set near down\n"));
    wait_for(&|change, _| *change == link(false, false));
    reader.expect("10.9.0.1", "10.9.0.2", None);
    assert!(has(&routes.local_addresses(), &near, "10.9.0.1"), "up without a carrier");
    assert!(try_ip(&world.peer, "link set near up\n"));
    wait_for(&|change, _| *change == link(true, false));
    world.ip(PERMANENT_NEIGHBOURS);
    reader.expect("10.9.0.1", "10.9.0.2", Some(NextHop { mtu: 1450, source_mac: OTHER_MAC, ..near }));

    world.ip("link set near down\n");
    wait_for(&|change, all| *change == Change::Addresses && !has(all, &near, "10.9.0.1"));
    reader.expect("10.9.0.1", "10.9.0.2", None);
    reader.expect("10.8.0.1", "10.8.0.2", Some(far));
    world.ip("link del near\n");
    wait_for(&|change, _| *change == link(false, true));
    assert!(routes.local_addresses().iter().all(|(ifindex, _)| *ifindex != near.ifindex));
    world.ip("link add new type veth peer name other\n");
    let added = world.device("new");
    wait_for(&|change, _| *change == Change::Link { ifindex: added, up: false, gone: false });
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
        let start = Instant::now();
        loop {
            // Changes reported earlier belong to the previous step.
            let is_there = told.try_iter().any(wanted);
            for (local, peer) in [("10.9.0.1", "10.9.0.2"), ("fd09::1", "fd09::2")] {
                assert_eq!(reader.query_now(local, peer), Some(near), "{lines}");
            }
            if is_there {
                break;
            }
            assert!(start.elapsed() < TEST_TIMEOUT, "it does not come: {lines}");
            thread::sleep(Duration::from_millis(1));
        }
    }
    // The kernel was queried again all the same, to be sure.
    reader.refresh();
    let (pair, epoch) = (RouteKey::new(ip("10.9.0.1"), ip("10.9.0.2")).unwrap(), epoch_of(reader.clock));
    let table = Arc::clone(&routes.shared.table);
    wait_until(|| {
        reader.query_now("10.9.0.1", "10.9.0.2");
        table.find(&pair, table.hash(&pair)).is_some_and(|found| found.epoch == epoch)
    });
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
fn netns_a_stale_neighbour_is_used_but_the_kernel_is_reminded() {
    if !can_make_namespaces("netns_a_stale_neighbour_is_used_but_the_kernel_is_reminded") {
        return;
    }
    let world = Testbed::new();
    world.ip(PERMANENT_NEIGHBOURS);
    world.ip("neighbour replace 10.9.0.2 lladdr 02:00:00:00:00:02 dev near nud stale\n");
    // Long enough that no entry expires while another test has the processor.
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
        wait_until(|| {
            check(ask(reader));
            epoch_of(reader.clock).wrapping_sub(start) >= number
        });
    };
    turns(&mut reader, 2, &|_| ());
    reader.expect("10.9.0.1", "10.9.0.2", Some(world.near()));
    turns(&mut reader, 3, &|answer| assert_eq!(answer, Some(world.near())));
}

#[test]
fn netns_entries_that_nobody_uses_go() {
    if !can_make_namespaces("netns_entries_that_nobody_uses_go") {
        return;
    }
    let world = Testbed::new();
    world.ip(PERMANENT_NEIGHBOURS);
    let (routes, mut reader) = world.start(TEST_REFRESH_INTERVAL);
    reader.expect("10.9.0.1", "10.9.0.2", Some(world.near()));
    let table = &routes.shared.table;
    let pair = RouteKey::new(ip("10.9.0.1"), ip("10.9.0.2")).unwrap();
    wait_until(|| table.find(&pair, table.hash(&pair)).is_none());
    reader.expect("10.9.0.1", "10.9.0.2", Some(world.near()));
}

#[test]
fn netns_events_that_were_lost_are_made_up_for() {
    if !can_make_namespaces("netns_events_that_were_lost_are_made_up_for") {
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
    wait_until(|| routes.local_addresses().contains(&(near, ip("10.9.0.51"))));
    wait_until(|| matches!(told.try_recv(), Ok(Change::Link { gone: true, .. })));
}

#[test]
fn netns_a_flood_of_peers_is_bounded_and_keeps_nobody_out() {
    if !can_make_namespaces("netns_a_flood_of_peers_is_bounded_and_keeps_nobody_out") {
        return;
    }
    let world = Testbed::new();
    world.ip(PERMANENT_NEIGHBOURS);
    world.ip("route add default via 10.9.0.2\n");
    let (routes, mut reader) = world.start(REFRESH_INTERVAL);
    let (near, local) = (world.near(), ip("10.9.0.1"));
    let start = Instant::now();
    let (mut flood, mut good) = (0x1400_0000_u32, 0);
    while start.elapsed() < Duration::from_millis(500) {
        reader.refresh();
        for _ in 0..64 {
            flood += 1;
            assert_eq!(reader.next_hop(local, Ipv4Addr::from(flood).into()), None);
        }
        good += u32::from(reader.next_hop(local, ip("192.0.2.1")) == Some(near));
    }
    let elapsed = start.elapsed();
    assert!(good > 0, "the one that comes again was never known");
    let peers = flood - 0x1400_0000;
    let pair = |n| RouteKey::new(local, Ipv4Addr::from(n).into()).unwrap();
    let table = &routes.shared.table;
    let known =
        (0x1400_0000..=flood).filter(|n| table.find(&pair(*n), table.hash(&pair(*n))).is_some()).count();
    let rounds = elapsed.as_millis() / worker::ROUND_INTERVAL.as_millis() + 2;
    assert!(known as u128 <= rounds * worker::QUERIES_PER_ROUND as u128, "{known} of {peers} in {elapsed:?}");
    assert!(known <= table::ENTRIES_MAX);
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
    wait_until(|| {
        for _ in 0..64 {
            flood += 1;
            other.next_hop(local, Ipv4Addr::from(flood).into());
        }
        reader.next_hop(local, peer).is_none()
    });
    thread::sleep(Duration::from_millis(50));
    assert_eq!(reader.next_hop(local, peer), None, "it was queried in this epoch");
    assert_eq!(reader.next_hop_again(local, peer), None);
    reader.expect("10.9.0.1", "192.0.2.1", Some(world.near()));
}
