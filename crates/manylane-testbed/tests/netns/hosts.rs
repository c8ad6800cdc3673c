//! The testbed itself: hosts that reach each other, and nothing left over.

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use manylane_test_support::wait_for;
use manylane_testbed::topology::namespaces_in_use;
use manylane_testbed::{Host, Layout, Testbed, skip};

/// For what has to happen; a machine with much else to do may take its time.
const TIMEOUT: Duration = Duration::from_secs(120);
/// For what must not happen.
const NO_TRAFFIC_TIMEOUT: Duration = Duration::from_millis(300);

fn bind(host: &Host, ip: IpAddr) -> UdpSocket {
    let socket = host.run(|| UdpSocket::bind((ip, 0)).unwrap());
    socket.set_read_timeout(Some(TIMEOUT)).unwrap();
    socket
}

/// Sends one datagram and reports whether it arrived.
fn reaches(from: &UdpSocket, to: &UdpSocket) -> bool {
    arrives_within(TIMEOUT, from, to)
}

/// Waits until datagrams arrive again after a link was down. The first ones may not: the kernel
/// drops what waits for a neighbour that does not answer for three seconds, and it may have asked
/// for the last time just before the link came back.
fn wait_reached(from: &UdpSocket, to: &UdpSocket) {
    let what = format!("a datagram from {:?} to {:?}", from.local_addr(), to.local_addr());
    wait_for(&what, || arrives_within(Duration::from_secs(1), from, to), |arrived| *arrived);
}

/// Sends one datagram, and reports whether this very one arrived.
fn arrives_within(time: Duration, from: &UdpSocket, to: &UdpSocket) -> bool {
    static SENT: AtomicU64 = AtomicU64::new(0);
    let number = SENT.fetch_add(1, Ordering::Relaxed).to_ne_bytes();
    let target: SocketAddr = to.local_addr().unwrap();
    if from.send_to(&number, target).is_err() {
        return false;
    }
    let (start, mut buffer) = (Instant::now(), [0; 16]);
    while let Some(left) = time.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
        to.set_read_timeout(Some(left)).unwrap();
        if to.recv(&mut buffer).is_ok_and(|length| buffer[..length] == number) {
            return true;
        }
    }
    false
}

#[test]
fn netns_hosts_reach_each_other_over_every_link() {
    if !skip::need_root("netns_hosts_reach_each_other_over_every_link") {
        return;
    }
    let layout = Layout { hosts: 3, links: vec![(0, 1), (1, 2), (0, 1)], ..Layout::default() };
    let testbed = Testbed::new(&layout).unwrap();
    for (link, &(a, b)) in layout.links.iter().enumerate() {
        for ipv6 in [false, true] {
            let (a, b) = (testbed.host(a), testbed.host(b));
            let (from, to) = (bind(a, a.ip(link, ipv6)), bind(b, b.ip(link, ipv6)));
            assert!(reaches(&from, &to), "link {link}, IPv6 {ipv6}");
            assert!(reaches(&to, &from), "link {link} back, IPv6 {ipv6}");
        }
    }
}

#[test]
fn netns_devices_have_the_queues_and_the_mtu_of_the_layout() {
    if !skip::need_root("netns_devices_have_the_queues_and_the_mtu_of_the_layout") {
        return;
    }
    let layout = Layout { queues: 8, mtu: 9000, ..Layout::default() };
    let testbed = Testbed::new(&layout).unwrap();
    for host in [testbed.host(0), testbed.host(1)] {
        let mut show = host.command("ip").unwrap();
        let done = show.args(["-d", "link", "show", "dev", host.device(0)]).output().unwrap();
        let text = String::from_utf8(done.stdout).unwrap();
        for word in ["numtxqueues 8", "numrxqueues 8", "mtu 9000"] {
            assert!(text.contains(word), "{word} not in {text}");
        }
        assert!(host.device_index(0).unwrap() > 0);
    }
}

#[test]
fn netns_a_host_takes_further_addresses() {
    if !skip::need_root("netns_a_host_takes_further_addresses") {
        return;
    }
    let testbed = Testbed::new(&Layout::default()).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    for (ip, ipv6) in [("10.77.0.50", false), ("fd77::50", true)] {
        let ip: IpAddr = ip.parse().unwrap();
        b.add_address(0, ip).unwrap();
        assert!(reaches(&bind(a, a.ip(0, ipv6)), &bind(b, ip)), "{ip}");
    }
}

#[test]
fn netns_a_link_goes_down_and_up() {
    if !skip::need_root("netns_a_link_goes_down_and_up") {
        return;
    }
    let testbed = Testbed::new(&Layout::default()).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    for ipv6 in [false, true] {
        let (from, to) = (bind(a, a.ip(0, ipv6)), bind(b, b.ip(0, ipv6)));
        assert!(reaches(&from, &to));
        b.set_link(0, false).unwrap();
        assert!(!arrives_within(NO_TRAFFIC_TIMEOUT, &from, &to));
        // The kernel tells of a lost carrier when it comes to it.
        let has_carrier = || a.run(|| manylane_sys::netns::is_device_running(a.device(0)).unwrap());
        wait_for("the loss of the other end's carrier", has_carrier, |has_carrier| !has_carrier);
        b.set_link(0, true).unwrap();
        a.wait_for_carrier(0).unwrap();
        b.wait_for_carrier(0).unwrap();
        wait_reached(&from, &to);
        wait_reached(&to, &from);
    }
}

#[test]
fn netns_two_testbeds_do_not_see_each_other() {
    if !skip::need_root("netns_two_testbeds_do_not_see_each_other") {
        return;
    }
    let one = Testbed::new(&Layout::default()).unwrap();
    let other = Testbed::new(&Layout::default()).unwrap();
    // The same address and port in both.
    let make = |testbed: &Testbed| {
        let host = testbed.host(1);
        host.run(|| UdpSocket::bind((host.ip4(0), 7777)).unwrap())
    };
    let (in_one, in_other) = (make(&one), make(&other));
    let from = bind(one.host(0), one.host(0).ip4(0).into());
    assert!(reaches(&from, &in_one));
    in_other.set_nonblocking(true).unwrap();
    assert!(in_other.recv(&mut [0; 8]).is_err());
}

#[test]
fn netns_sysctls_belong_to_one_host() {
    if !skip::need_root("netns_sysctls_belong_to_one_host") {
        return;
    }
    let testbed = Testbed::new(&Layout::default()).unwrap();
    let read = |host: &Host| host.run(|| std::fs::read_to_string("/proc/sys/net/ipv4/ip_forward").unwrap());
    testbed.host(0).set_sysctl("net.ipv4.ip_forward", "1").unwrap();
    assert_eq!(read(testbed.host(0)).trim(), "1");
    assert_eq!(read(testbed.host(1)).trim(), "0");
    assert!(testbed.host(0).set_sysctl("net.ipv4.no_such_thing", "1").is_err());
}

#[test]
fn netns_ip_errors_name_the_lines() {
    if !skip::need_root("netns_ip_errors_name_the_lines") {
        return;
    }
    let testbed = Testbed::new(&Layout::default()).unwrap();
    let err = testbed.host(0).ip_batch("address add 10.1.2.3/24 dev nowhere\n").unwrap_err().to_string();
    assert!(err.contains("nowhere") && err.contains("address add"), "{err}");
}

/// The process that the next test kills: it builds a testbed, says so, and waits.
#[test]
#[ignore = "run by netns_killing_a_process_leaves_nothing"]
fn helper_hold_a_testbed() {
    if std::env::var_os("MANYLANE_HOLD").is_none() {
        return;
    }
    let testbed = Testbed::new(&Layout::default()).unwrap();
    let host = testbed.host(0).clone();
    let (entered, is_inside) = std::sync::mpsc::channel();
    let _inside = host
        .spawn("inside", move || {
            entered.send(()).unwrap();
            std::thread::sleep(Duration::from_secs(600));
        })
        .unwrap();
    is_inside.recv().unwrap();
    let number = host.run(|| std::fs::read_link("/proc/thread-self/ns/net").unwrap());
    println!("\nholding {}", number.display());
    std::thread::sleep(Duration::from_secs(600));
}

#[test]
fn netns_killing_a_process_leaves_nothing() {
    if !skip::need_root("netns_killing_a_process_leaves_nothing") {
        return;
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "hosts::helper_hold_a_testbed", "--nocapture"])
        .env("MANYLANE_HOLD", "1")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = lines.find_map(|line| line.ok().filter(|line| line.starts_with("holding"))).unwrap();
    let number: u64 = line.trim_start_matches("holding net:[").trim_end_matches(']').parse().unwrap();
    assert!(namespaces_in_use().unwrap().contains(&number), "the child is in {number}");
    assert!(!mounted(number));

    child.kill().unwrap();
    child.wait().unwrap();
    let used = || namespaces_in_use().unwrap();
    wait_for(&format!("the end of namespace {number}"), used, |used| !used.contains(&number));
    // The other way to keep a namespace is to mount it.
    assert!(!mounted(number));
}

fn mounted(number: u64) -> bool {
    std::fs::read_to_string("/proc/self/mountinfo").unwrap().contains(&format!("net:[{number}]"))
}

#[test]
fn netns_dropping_a_testbed_removes_it() {
    if !skip::need_root("netns_dropping_a_testbed_removes_it") {
        return;
    }
    let testbed = Testbed::new(&Layout::default()).unwrap();
    let a = testbed.host(0).clone();
    let number = std::fs::metadata(testbed.host(1).namespace().path()).unwrap().ino();
    drop(testbed);
    // One host is kept by the clone. The other is gone, and took the devices of the link with it.
    wait_for("the end of the link's other end", || a.device_index(0).ok(), Option::is_none);
    // Another test's new namespace may have its number for a while.
    let used = || namespaces_in_use().unwrap();
    wait_for(&format!("the end of namespace {number}"), used, |used| !used.contains(&number));
}
