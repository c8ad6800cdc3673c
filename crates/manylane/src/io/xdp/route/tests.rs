//! Tests against the kernel. This module has their network namespaces.

mod changes;
mod neighbours;
mod prefixes;

use std::net::{IpAddr, UdpSocket};
use std::sync::Mutex;
use std::time::Instant;
use std::{fs, thread};

use manylane_sys::netns::NetNs;
use manylane_sys::process::run_isolated;
use manylane_test_support::{need, wait_for};

use super::*;

/// Far longer than any step takes on a machine that is busy with other tests.
const TEST_TIMEOUT: Duration = Duration::from_secs(120);
/// Epoch length for tests that wait for several.
const TEST_REFRESH_INTERVAL: Duration = Duration::from_millis(50);

const LOCAL_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
const PEER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
const OTHER_MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];

/// True if this process can make network namespaces. Reports the skip of test `name` if not.
pub(in crate::io::xdp) fn can_make_namespaces(name: &str) -> bool {
    let Err(err) = NetNs::create() else { return true };
    need(name, false, &format!("no network namespace can be made, run as root: {err}"))
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
            let is_running = || run(&world.local, || manylane_sys::netns::is_device_running(device).unwrap());
            wait_for(&format!("{device} to run"), is_running, |is| *is);
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

impl Reader {
    fn query_now(&mut self, local: &str, peer: &str) -> Option<NextHop> {
        self.refresh();
        self.next_hop(ip(local), ip(peer))
    }

    /// Queries until the result is `expected`.
    #[track_caller]
    fn expect(&mut self, local: &str, peer: &str, expected: Option<NextHop>) {
        let what = format!("{expected:?} from {local} to {peer}");
        wait_for(&what, || self.query_now(local, peer), |answer| *answer == expected);
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
    wait_for("the thread to end (references)", || shared.strong_count(), |count| *count == 0);
}

#[test]
fn a_watcher_may_drop_the_last_reference() {
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
    wait_for("the thread to end (references)", || shared.strong_count(), |count| *count == 0);
}
