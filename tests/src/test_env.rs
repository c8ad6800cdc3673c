//! The place of a test: loopback, or a testbed with the server on one host and its clients on the
//! other.
//!
//! Tests use loopback addresses. In a testbed these are mapped to addresses of the two hosts, so
//! that the datagrams of the same test cross a device and XDP sees them. The place follows from
//! the network namespace of the calling thread, so that all threads of a test are at its place.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use manylane::LaneCounters;
use manylane_test_support::set_queues;
use manylane_testbed::{Host, Layout, Testbed};

/// Maximum wait for an event before a test fails.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// Places other than loopback, by the namespace of their servers.
static TEST_ENVS: Mutex<Vec<(u64, Arc<TestEnv>)>> = Mutex::new(Vec::new());

/// 127.0.0.2 to 127.0.0.9 are 10.77.0.102 to 10.77.0.109.
const EXTRA_HOSTS: std::ops::RangeInclusive<u8> = 2..=9;

/// Two hosts and the link between them.
#[derive(Debug)]
pub(crate) struct TestEnv {
    server: Host,
    client: Host,
    /// True if their devices are no veth pair of the test.
    is_existing: bool,
    /// Number of datagrams that lanes received past the kernel's stack.
    by_xdp: AtomicU64,
}

impl TestEnv {
    /// Runs `test` at a place of its own, whose devices have the given number of queues, and with
    /// `wire` get frames as over a wire. Returns the number of datagrams received past the stack.
    pub(crate) fn run(queues: u32, wire: bool, test: impl FnOnce() + Send) -> u64 {
        let devices: Vec<[String; 2]> = devices().into_iter().collect();
        let is_existing = !devices.is_empty();
        let testbed = Testbed::new(&Layout { queues, devices, ..Layout::default() }).unwrap();
        let (client, server) = (testbed.host(0).clone(), testbed.host(1).clone());
        if is_existing {
            server.run(|| set_queues(server.device(0), queues, queues)).unwrap();
        }
        add_addresses(&client, &server);
        client.set_checksums(0, !wire).unwrap();
        let place =
            Arc::new(TestEnv { server: server.clone(), client, is_existing, by_xdp: AtomicU64::new(0) });
        server.run(|| {
            let space = namespace();
            let _leave = TestEnvGuard(space);
            test_envs().push((space, Arc::clone(&place)));
            test();
        });
        place.by_xdp.load(Ordering::Relaxed)
    }

    /// The place of the calling thread; none for loopback.
    fn current() -> Option<Arc<TestEnv>> {
        let places = test_envs();
        if places.is_empty() {
            return None;
        }
        let space = namespace();
        places.iter().find(|(other, _)| *other == space).map(|(_, place)| Arc::clone(place))
    }
}

/// The devices of `MANYLANE_TEST_DEVICES`, two PCI addresses: those of the clients' host and of the
/// server's, instead of a veth pair. Only one test at a time can use them.
fn devices() -> Option<[String; 2]> {
    let text = std::env::var("MANYLANE_TEST_DEVICES").ok()?;
    let addresses: Vec<String> = text.split_whitespace().map(String::from).collect();
    Some(addresses.try_into().expect("MANYLANE_TEST_DEVICES: two PCI addresses"))
}

/// Removes a place when its test ends, even if it fails.
struct TestEnvGuard(u64);

impl Drop for TestEnvGuard {
    fn drop(&mut self) {
        test_envs().retain(|(space, _)| *space != self.0);
    }
}

fn test_envs() -> std::sync::MutexGuard<'static, Vec<(u64, Arc<TestEnv>)>> {
    TEST_ENVS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn namespace() -> u64 {
    fs::metadata("/proc/thread-self/ns/net").unwrap().ino()
}

/// The further addresses, and their neighbour entries, so that no frame of a test waits for ARP.
fn add_addresses(client: &Host, server: &Host) {
    let mac = server.mac(0).map(|byte| format!("{byte:02x}")).join(":");
    let (mut ours, mut theirs) = (String::new(), String::new());
    for number in EXTRA_HOSTS {
        let ip = extra_addr(number);
        ours += &format!("address add {ip}/24 dev {}\n", server.device(0));
        theirs += &format!("neighbour replace {ip} lladdr {mac} dev {} nud permanent\n", client.device(0));
    }
    server.ip_batch(&ours).unwrap();
    client.ip_batch(&theirs).unwrap();
}

fn extra_addr(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, 100 + number)
}

/// Maps a loopback address to the server's address at the place of the test. Other addresses are
/// unchanged.
#[must_use]
pub fn map_addr(addr: SocketAddr) -> SocketAddr {
    let Some(place) = TestEnv::current() else { return addr };
    let ip = match addr.ip() {
        IpAddr::V4(ip) => match ip.octets() {
            [127, 0, 0, 1] => place.server.ip4(0).into(),
            [127, 0, 0, number] if EXTRA_HOSTS.contains(&number) => extra_addr(number).into(),
            [127, 255, 255, 255] => Ipv4Addr::new(10, 77, 0, 255).into(),
            [127, ..] => panic!("{ip} stands for nothing"),
            _ => ip.into(),
        },
        IpAddr::V6(ip) if ip.is_loopback() => place.server.ip6(0).into(),
        IpAddr::V6(ip) => ip.into(),
    };
    SocketAddr::new(ip, addr.port())
}

/// As [`map_addr`], of an address as text.
#[must_use]
pub fn map_ip(ip: &str, port: u16) -> SocketAddr {
    map_addr(SocketAddr::new(ip.parse().unwrap(), port))
}

/// A socket on the clients' side, at a loopback address or the one that it is mapped to.
#[must_use]
pub fn bind_peer(from: SocketAddr) -> UdpSocket {
    let Some(place) = TestEnv::current() else { return UdpSocket::bind(from).unwrap() };
    let ip = match from.ip() {
        ip if ip.is_loopback() => place.client.ip(0, ip.is_ipv6()),
        ip => ip,
    };
    place.client.run(|| UdpSocket::bind((ip, from.port())).unwrap())
}

/// An address on the clients' side without a socket. On loopback, another process may bind the
/// port at any time, and would then get a datagram, which does no harm.
#[must_use]
pub fn unused_addr(ip: &str) -> SocketAddr {
    bind_peer(SocketAddr::new(ip.parse().unwrap(), 0)).local_addr().unwrap()
}

/// Records the counters of a socket at the end of its use, for the check that datagrams arrived
/// past the stack.
pub fn record_counters(total: &LaneCounters) {
    if let Some(place) = TestEnv::current() {
        place.by_xdp.fetch_add(total.delivered_by_bypass, Ordering::Relaxed);
    }
}

/// The hosts of clients and of the server, if their devices are no veth pair of the test.
pub(crate) fn hosts_of_existing_devices() -> Option<(Host, Host)> {
    let place = TestEnv::current().filter(|place| place.is_existing)?;
    Some((place.client.clone(), place.server.clone()))
}

/// True if the test runs in a testbed.
pub(crate) fn is_testbed() -> bool {
    TestEnv::current().is_some()
}
