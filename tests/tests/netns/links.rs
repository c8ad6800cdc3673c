//! Links that go down, unreachable routes, paths with a small MTU: losses are counted by reason,
//! and nothing hangs.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::netns_support::{client, echo, lane_driver, open, sink, wait_until};
use manylane::{Flushed, LaneCounters, SteeringBackend};
use manylane_measure::{Traffic, Until, sockets};
use manylane_sys::process::run_isolated;
use manylane_testbed::skip;
use manylane_testbed::{Host, Layout, Testbed};
use manylane_tests::{LaneDriver, TEST_TIMEOUT, backends, pattern, send_gso};

/// Sends `count` datagrams of 100 bytes each from the first lane, no two of which are joined.
fn send(driver: &mut LaneDriver, to: SocketAddr, count: u64) -> Flushed {
    let mut sum = Flushed::default();
    let mut out = driver.lanes[0].sender();
    for number in 0..count {
        out.send_to(to, &pattern(number as usize, 100));
        let done = out.flush();
        sum.sent += done.sent;
        sum.lost += done.lost;
    }
    sum
}

fn total(driver: &LaneDriver) -> LaneCounters {
    driver.handle.counters().total()
}

#[test]
fn netns_sending_while_the_link_is_down_is_unreachable() {
    if !skip::need_root("netns_sending_while_the_link_is_down_is_unreachable") {
        return;
    }
    let testbed = Testbed::new(&Layout { neighbours: false, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    for ipv6 in [false, true] {
        let mut driver = lane_driver(b, open(b, b.ip(0, ipv6), |builder| _ = builder.lanes(2)));
        let client = client(a, a.ip(0, ipv6), driver.addr());
        let exchange = |driver: &mut LaneDriver| {
            // Datagrams that wait for the neighbour's address would be sent later, so wait for
            // each.
            for number in 0..50 {
                client.send(&pattern(number, 64));
                driver.echo(1);
                client.expect(&pattern(number, 64));
            }
        };
        exchange(&mut driver);
        b.set_link(0, false).unwrap();
        let started = Instant::now();
        let done = send(&mut driver, client.addr(), 30);
        assert_eq!((done.sent, done.lost), (0, 30), "IPv6 {ipv6}");
        assert!(
            started.elapsed() < TEST_TIMEOUT,
            "sending took {:?}: {:?}",
            started.elapsed(),
            total(&driver)
        );
        let counted = total(&driver);
        assert_eq!((counted.offered, counted.sent), (80, 50));
        assert_eq!((counted.lost_unreachable, counted.lost()), (30, 30), "IPv6 {ipv6}: {counted:?}");
        assert!(driver.is_idle());

        b.set_link(0, true).unwrap();
        a.wait_for_carrier(0).unwrap();
        b.wait_for_carrier(0).unwrap();
        exchange(&mut driver);
        let counted = total(&driver);
        assert_eq!((counted.delivered, counted.sent, counted.lost()), (100, 100, 30));
        assert_eq!((counted.kernel_dropped, counted.recv_errors), (0, 0));
    }
}

#[test]
fn netns_drops_at_the_peer_are_device_losses() {
    if !skip::need_root("netns_drops_at_the_peer_are_device_losses") {
        return;
    }
    let testbed = Testbed::new(&Layout { ipv6: false, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    let mut driver = lane_driver(b, open(b, b.ip(0, false), |builder| _ = builder.lanes(1)));
    let target = (a.ip4(0), 9).into();
    a.set_link(0, false).unwrap();
    let before = b.device_counters(0).unwrap();
    let done = send(&mut driver, target, 40);
    let after = b.device_counters(0).unwrap();
    // The route still exists, so that the socket accepts them; the device cannot send them.
    assert_eq!((done.sent, done.lost), (40, 0));
    let packets = after.tx_packets - before.tx_packets;
    let on_the_device = packets + (after.tx_dropped - before.tx_dropped);
    // Linux 6.1 does not count what it drops for want of a carrier.
    let counted = if skip::is_kernel((6, 12)) { 40 } else { on_the_device };
    assert_eq!((packets, on_the_device), (0, counted), "{before:?} {after:?}");
    assert_eq!((total(&driver).sent, total(&driver).lost()), (40, 0));
}

#[test]
fn netns_lanes_survive_link_down_and_up() {
    let name = "netns_lanes_survive_link_down_and_up";
    if !skip::need_root(name) {
        return;
    }
    // Without IPv6, and in one direction only, the link carries only this traffic.
    let testbed = Testbed::new(&Layout { ipv6: false, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    for by in backends(name, &[SteeringBackend::Ebpf, SteeringBackend::ClassicBpf, SteeringBackend::Kernel]) {
        let serving = sink(b, open(b, b.ip4(0).into(), |builder| _ = builder.lanes(3).steering_backend(by)));
        let counters = |host: &Host| host.device_counters(0).unwrap();
        let (a_before, b_before) = (counters(a), counters(b));
        let stop = Arc::new(AtomicBool::new(false));
        let until_told = Until::Stop(Arc::clone(&stop));
        let traffic = Traffic { flows: 16, pps: Some(20_000.0), ..Traffic::new(serving.addr, 32) };
        let sender = a.spawn("sender", move || sockets::send(&traffic, until_told).unwrap()).unwrap();
        let delivered = || serving.handle.counters().total().delivered;
        for _ in 0..4 {
            let so_far = delivered();
            wait_until("200 more datagrams", &serving.handle, || delivered() > so_far + 200);
            b.set_link(0, false).unwrap();
            b.set_link(0, true).unwrap();
            a.wait_for_carrier(0).unwrap();
        }
        let so_far = delivered();
        wait_until("200 more datagrams", &serving.handle, || delivered() > so_far + 200);
        stop.store(true, Ordering::Relaxed);
        let sent = sender.join().unwrap();
        let arrived = || counters(b).rx_packets - b_before.rx_packets;
        wait_until("what arrived at the device", &serving.handle, || delivered() == arrived());
        let a_after = counters(a);
        let total = serving.stop().unwrap().total();
        // All datagrams that arrived at the device were delivered; all others were refused at the
        // other end.
        assert_eq!((total.delivered, total.arrived()), (arrived(), arrived()), "{by}");
        assert_eq!((total.kernel_dropped, total.recv_errors), (0, 0), "{by}");
        let (out, refused) =
            (a_after.tx_packets - a_before.tx_packets, a_after.tx_dropped - a_before.tx_dropped);
        let seen = format!("{by}: {sent:?} {a_before:?} {a_after:?}");
        assert!(out + refused <= sent.datagrams + sent.rejected, "{seen}");
        // Linux 6.1 does not count what it drops for want of a carrier.
        if skip::is_kernel((6, 12)) {
            assert_eq!(out + refused, sent.datagrams + sent.rejected, "{seen}");
        }
        assert!(total.delivered <= out, "{by}");
    }
}

/// The counter of one reason.
type Reason = fn(&LaneCounters) -> u64;

#[test]
fn netns_route_and_policy_refusals_are_counted_by_reason() {
    if !skip::need_root("netns_route_and_policy_refusals_are_counted_by_reason") {
        return;
    }
    const DATAGRAMS: u64 = 25;
    let testbed = Testbed::new(&Layout::default()).unwrap();
    let b = testbed.host(1);
    let refusals: [(&str, Reason); 5] = [
        ("xfrm policy add dir out dst TO action block", |c| c.lost_denied),
        ("route replace prohibit TO", |c| c.lost_denied),
        ("route replace unreachable TO", |c| c.lost_unreachable),
        ("route replace throw TO", |c| c.lost_unreachable),
        ("route replace blackhole TO", |c| c.lost_other),
    ];
    for ipv6 in [false, true] {
        let mut driver = lane_driver(b, open(b, b.ip(0, ipv6), |builder| _ = builder.lanes(1)));
        for (number, (refusal, reason)) in refusals.iter().enumerate() {
            let peer = format!("{}{}", if ipv6 { "fd77::10" } else { "10.77.0.10" }, number);
            let prefix = format!("{peer}/{}", if ipv6 { 128 } else { 32 });
            b.ip_batch(&format!("{}\n", refusal.replace("TO", &prefix))).unwrap();
            let before = total(&driver);
            // One by one, and as a GSO message, of which each datagram is lost for the same
            // reason.
            let peer = SocketAddr::new(peer.parse().unwrap(), 7);
            let mut done = send(&mut driver, peer, DATAGRAMS);
            let mut out = driver.lanes[0].sender();
            (0..DATAGRAMS).for_each(|_| out.send_to(peer, b"one of several"));
            done.lost += out.flush().lost;
            drop(out);
            assert_eq!((done.sent, done.lost), (0, 2 * DATAGRAMS), "{refusal}");
            let after = total(&driver);
            assert_eq!(reason(&after) - reason(&before), 2 * DATAGRAMS, "{refusal}: {after:?}");
            assert_eq!(after.lost() - before.lost(), 2 * DATAGRAMS, "{refusal}");
            assert_eq!(after.offered, after.sent + after.lost());
        }
        // Other peers are not affected.
        let a = testbed.host(0);
        let client = client(a, a.ip(0, ipv6), driver.addr());
        client.send(b"still there?");
        driver.echo(1);
        client.expect(b"still there?");
    }
}

/// Answers GRO messages of `segment` bytes with GSO messages, and checks that every datagram
/// arrives.
fn check_gso_replies(driver: &mut LaneDriver, client: &manylane_tests::Client, segment: usize, count: usize) {
    let bytes = pattern(segment, segment * count);
    send_gso(&client.socket, &bytes, segment as u16);
    // Waits until the whole message is queued, so that it is in one batch.
    driver.echo(count);
    for part in bytes.chunks(segment) {
        client.expect(part);
    }
}

#[test]
fn netns_gso_above_the_route_mtu_is_sent_as_datagrams() {
    if !skip::need_root("netns_gso_above_the_route_mtu_is_sent_as_datagrams") {
        return;
    }
    let testbed = Testbed::new(&Layout::default()).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    for ipv6 in [false, true] {
        let mut driver = lane_driver(b, open(b, b.ip(0, ipv6), |builder| _ = builder.lanes(1)));
        let client = client(a, a.ip(0, ipv6), driver.addr());
        check_gso_replies(&mut driver, &client, 1400, 20);
        let wide = total(&driver);
        assert_eq!((wide.sent, wide.gso_messages, wide.gso_fallbacks), (20, 1, 0), "IPv6 {ipv6}");
        // From here on, the kernel has to fragment datagrams of this size, and refuses GSO
        // messages of them.
        b.ip_batch(&format!("route replace {} dev {} mtu 1280\n", a.ip(0, ipv6), b.device(0))).unwrap();
        check_gso_replies(&mut driver, &client, 1400, 20);
        let narrow = total(&driver);
        assert_eq!((narrow.sent, narrow.gso_messages, narrow.lost()), (40, 1, 0), "IPv6 {ipv6}: {narrow:?}");
        assert_eq!(narrow.gso_fallbacks, 1, "IPv6 {ipv6}");
        // Small datagrams to the same peer may still be a GSO message, or not; they arrive in any
        // case.
        check_gso_replies(&mut driver, &client, 500, 20);
        assert_eq!((total(&driver).sent, total(&driver).lost()), (60, 0));
    }
}

/// Three hosts in a row. The middle one forwards, and its link to the first has an MTU of 1280.
fn narrow_path() -> Testbed {
    let layout = Layout { hosts: 3, links: vec![(0, 1), (1, 2)], ..Layout::default() };
    let testbed = Testbed::new(&layout).unwrap();
    let (a, router, b) = (testbed.host(0), testbed.host(1), testbed.host(2));
    router.set_sysctl("net.ipv4.ip_forward", "1").unwrap();
    router.set_sysctl("net.ipv6.conf.all.forwarding", "1").unwrap();
    router.ip_batch(&format!("link set dev {} mtu 1280\n", router.device(0))).unwrap();
    for (host, link, other) in [(a, 0, 1), (b, 1, 0)] {
        let far =
            if other == 1 { ["10.77.1.0/24", "fd77:0:0:1::/64"] } else { ["10.77.0.0/24", "fd77::/64"] };
        host.ip_batch(&format!("route add {} via {}\n", far[0], router.ip4(link))).unwrap();
        host.ip_batch(&format!("route add {} via {}\n", far[1], router.ip6(link))).unwrap();
    }
    testbed
}

#[test]
fn netns_path_mtu_is_discovered() {
    if !skip::need_root("netns_path_mtu_is_discovered") {
        return;
    }
    let testbed = narrow_path();
    let (a, b) = (testbed.host(0), testbed.host(2));
    for ipv6 in [false, true] {
        let mut driver = lane_driver(b, open(b, b.ip(1, ipv6), |builder| _ = builder.lanes(2)));
        let client = client(a, a.ip(0, ipv6), driver.addr());
        let large = pattern(3, 1400);
        // The router drops the first reply and reports the MTU by ICMP; then the kernel knows it.
        client.socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let mut tries = 0;
        loop {
            tries += 1;
            client.send(b"how wide?");
            driver.receive(1, |_, datagram, out| out.reply(&datagram, &large));
            let mut buffer = vec![0; 2000];
            match client.socket.recv(&mut buffer) {
                Ok(len) => {
                    assert!(buffer[..len] == large);
                    break;
                }
                Err(_) => assert!(tries < 20, "IPv6 {ipv6}: no answer gets through"),
            }
        }
        assert!(tries > 1, "IPv6 {ipv6}: the path was not narrow");
        client.socket.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        // The router's message has ended no receive, failed no send and affected no other peer.
        let counted = total(&driver);
        assert_eq!((counted.delivered, counted.sent), (tries, tries));
        assert_eq!((counted.recv_errors, counted.lost()), (0, 0));
        // A GSO message of large replies: refused as one, sent one by one. The requests are small.
        send_gso(&client.socket, &pattern(1, 160), 10);
        driver.receive(16, |_, datagram, out| out.reply(&datagram, &large));
        (0..16).for_each(|_| client.expect(&large));
        let counted = total(&driver);
        assert_eq!((counted.sent, counted.lost()), (tries + 16, 0), "IPv6 {ipv6}: {counted:?}");
        assert!(counted.gso_fallbacks > 0 && counted.gso_messages == 0, "IPv6 {ipv6}: {counted:?}");
    }
}

#[test]
fn netns_replies_pass_a_device_without_csum_offload() {
    let name = "netns_replies_pass_a_device_without_csum_offload";
    let tc = run_isolated(None, "tc", &["-V"], b"").is_ok();
    if !skip::need_root(name) || !skip::need(name, tc, "the program tc is missing: apt-get install iproute2")
    {
        return;
    }
    let testbed = Testbed::new(&Layout { ipv6: false, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    // A tap device computes no checksums unless its program declares it. Packets to it are
    // redirected over the link on egress.
    let mac = a.mac(0).map(|byte| format!("{byte:02x}")).join(":");
    b.ip_batch(&format!(
        "tuntap add dev plain0 mode tap\nlink set dev plain0 up\n\
         neighbour replace {peer} lladdr {mac} dev plain0 nud permanent\n\
         route replace {peer}/32 dev plain0 src {own}\n",
        peer = a.ip4(0),
        own = b.ip4(0),
    ))
    .unwrap();
    let tc = |line: String| {
        let done = b.output("tc", &line.split(' ').collect::<Vec<_>>()).unwrap();
        assert!(done.status.success(), "tc {line}: {}", String::from_utf8_lossy(&done.stderr));
    };
    tc("qdisc add dev plain0 clsact".into());
    tc(format!(
        "filter add dev plain0 egress protocol all u32 match u32 0 0 action mirred egress redirect dev {}",
        b.device(0)
    ));
    let mut driver = lane_driver(b, open(b, b.ip4(0).into(), |builder| _ = builder.lanes(1)));
    let client = client(a, a.ip4(0).into(), driver.addr());
    for round in 1..=3 {
        check_gso_replies(&mut driver, &client, 1000, 30);
        let counted = total(&driver);
        assert_eq!((counted.sent, counted.lost()), (30 * round, 0), "{counted:?}");
        // Since Linux 6.11 the kernel computes the checksums of a GSO message for such a device.
        // Older kernels refuse, and after the first refusal the lane uses no GSO at all.
        let (gso_messages, refused) = (counted.gso_messages, counted.gso_fallbacks);
        assert!((gso_messages, refused) == (round, 0) || (gso_messages, refused) == (0, 1), "{counted:?}");
    }
}

#[test]
fn netns_a_server_survives_the_loss_of_a_link() {
    if !skip::need_root("netns_a_server_survives_the_loss_of_a_link") {
        return;
    }
    let testbed = Testbed::new(&Layout { links: vec![(0, 1), (0, 1)], ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    let serving = echo(b, open(b, std::net::Ipv4Addr::UNSPECIFIED.into(), |builder| _ = builder.lanes(2)));
    let to = |link: usize| client(a, a.ip4(link).into(), (b.ip4(link), serving.addr.port()).into());
    let (one, other) = (to(0), to(1));
    one.ping();
    other.ping();
    b.set_link(0, false).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| (0..200).for_each(|_| other.ping()));
    });
    b.set_link(0, true).unwrap();
    a.wait_for_carrier(0).unwrap();
    one.ping();
    let total = serving.stop().unwrap().total();
    assert_eq!((total.delivered, total.sent, total.lost()), (203, 203, 0));
}
