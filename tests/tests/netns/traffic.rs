//! Host to host over veth: every size, every steering, GSO messages, addresses of all kinds.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, UdpSocket};

use crate::netns_support::{RECV_BUFFER_BYTES, client, echo, lane_driver, open, sink, wait_until};
use manylane::{Builder, Placement, Socket, Steering, SteeringBackend};
use manylane_measure::{Traffic, Until};
use manylane_sys::cpu;
use manylane_testbed::generator::LiveSender;
use manylane_testbed::skip::{self, Forced};
use manylane_testbed::{Host, Layout, Testbed};
use manylane_tests::{Client, LaneDriver, TEST_TIMEOUT, backends, pattern, send_gso};

#[test]
fn netns_every_size_is_echoed() {
    let name = "netns_every_size_is_echoed";
    if !skip::need_root(name) {
        return;
    }
    let testbed = Testbed::new(&Layout::default()).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    for ipv6 in [false, true] {
        let head = if ipv6 { 48 } else { 28 };
        let largest = if ipv6 { 65_487 } else { 65_507 };
        let fits = 1500 - head;
        // One frame, then fragments: two, many, the last one full or with one byte.
        let sizes =
            [0, 1, 2, 100, 1200, fits - 1, fits, fits + 1, 2 * fits, 9000, 30_000, largest - 1, largest];
        for by in
            backends(name, &[SteeringBackend::Ebpf, SteeringBackend::ClassicBpf, SteeringBackend::Kernel])
        {
            let serving =
                echo(b, open(b, b.ip(0, ipv6), |builder| _ = builder.lanes(4).steering_backend(by)));
            let mut sent = 0;
            for flow in 0..4 {
                let client = client(a, a.ip(0, ipv6), serving.addr);
                for size in sizes {
                    client.send(&pattern(flow, size));
                    client.expect(&pattern(flow, size));
                    sent += 1;
                }
            }
            let total = serving.stop().unwrap().total();
            assert_eq!((total.arrived(), total.delivered, total.sent, total.lost()), (sent, sent, sent, 0));
            assert_eq!((total.truncated, total.recv_errors), (0, 0));
        }
    }
}

#[test]
fn netns_policy_cpu_follows_the_receiving_cpu() {
    let name = "netns_policy_cpu_follows_the_receiving_cpu";
    let cpus = cpu::affinity().unwrap();
    if !skip::need_live_sender(name)
        || !skip::need_unless_forced(name, cpus.len() > 1, Forced::Cpus, "needs two CPUs")
    {
        return;
    }
    const DATAGRAMS: u64 = 2_000;
    let testbed = Testbed::new(&Layout::default()).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    for by in [SteeringBackend::Ebpf, SteeringBackend::ClassicBpf] {
        let placement = Placement::List(cpus[..2].to_vec());
        let socket = open(b, b.ip4(0).into(), |builder| {
            builder.lanes(2).steering(Steering::Cpu).steering_backend(by).placement(placement.clone());
        });
        let mut driver = lane_driver(b, socket);
        for cpu in &cpus[..2] {
            // The generator's CPU is also the one on which the other end receives. There are many
            // flows, so that nothing else could have put them all into one queue.
            let traffic = Traffic { flows: 50, pps: Some(20_000.0), ..Traffic::new(driver.addr(), 20) };
            let mut sender = LiveSender::new(a, b, 0, &traffic).unwrap();
            assert_eq!(sender.pin(*cpu).send(Until::Count(DATAGRAMS)).unwrap().datagrams, DATAGRAMS);
            let here = driver.lanes.iter().find(|lane| lane.cpu() == Some(*cpu)).unwrap().id();
            let mut counted = 0;
            driver.receive(DATAGRAMS as usize, |lane, _, _| counted += u64::from(lane == here));
            assert_eq!(counted, DATAGRAMS, "{by}, CPU {cpu}");
        }
    }
}

#[test]
fn netns_round_robin_is_exact_for_one_sender() {
    if !skip::need_live_sender("netns_round_robin_is_exact_for_one_sender") {
        return;
    }
    const DATAGRAMS: u64 = 10_003;
    let testbed = Testbed::new(&Layout::default()).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    for (ipv6, lanes) in [(false, 4), (true, 4), (false, 7)] {
        let socket = open(b, b.ip(0, ipv6), |builder| {
            builder.lanes(lanes).steering(Steering::RoundRobin).steering_backend(SteeringBackend::Ebpf);
        });
        let serving = sink(b, socket);
        let traffic = Traffic { pps: Some(50_000.0), ..Traffic::new(serving.addr, 10) };
        let sent = LiveSender::new(a, b, 0, &traffic).unwrap().send(Until::Count(DATAGRAMS)).unwrap();
        assert_eq!((sent.datagrams, sent.rejected), (DATAGRAMS, 0));
        wait_until("all datagrams delivered", &serving.handle, || {
            serving.handle.counters().total().delivered == DATAGRAMS
        });
        let counters = serving.handle.counters();
        let shares: Vec<u64> = counters.lanes.iter().map(|(_, lane)| lane.delivered).collect();
        assert!(shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 1, "{shares:?}");
        let total = serving.stop().unwrap().total();
        assert_eq!((total.arrived(), total.kernel_dropped, total.steered), (DATAGRAMS, 0, Some(DATAGRAMS)));
    }
}

#[test]
fn netns_gso_messages_arrive_as_datagrams() {
    if !skip::need_root("netns_gso_messages_arrive_as_datagrams") {
        return;
    }
    let testbed = Testbed::new(&Layout::default()).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    for (ipv6, gro) in [(false, true), (true, true), (false, false), (true, false)] {
        let mut driver = lane_driver(b, open(b, b.ip(0, ipv6), |builder| _ = builder.lanes(2).gro(gro)));
        let client = client(a, a.ip(0, ipv6), driver.addr());
        let (mut datagrams, mut gso_messages) = (0, 0);
        // The last datagram of a GSO message: full, with one byte, nearly full; messages of two
        // and of sixty-four.
        for (segment, len) in
            [(1000, 40_000), (1000, 40_001), (1400, 2_799), (1, 64), (500, 32_000), (1452, 1453)]
        {
            let bytes = pattern(len, len);
            send_gso(&client.socket, &bytes, segment as u16);
            let count = len.div_ceil(segment);
            let got = driver.recv_all(count);
            let parts: Vec<&[u8]> = got.iter().map(|got| &got.payload[..]).collect();
            assert!(parts == bytes.chunks(segment).collect::<Vec<_>>(), "{len} bytes by {segment}");
            assert!(got.iter().all(|got| got.peer == client.addr() && !got.truncated));
            datagrams += count as u64;
            gso_messages += 1;
        }
        let total = driver.handle.counters().total();
        assert_eq!((total.delivered, total.kernel_dropped), (datagrams, 0));
        // A GSO message passes through a veth link unsegmented.
        let expected =
            if gro && skip::passes_whole_gso() { (gso_messages, gso_messages) } else { (datagrams, 0) };
        assert_eq!((total.messages, total.gro_messages), expected, "GRO {gro}, IPv6 {ipv6}");
    }
}

/// Two hosts with two links between them, and a further address at the second end of each.
fn two_links() -> (Testbed, Vec<IpAddr>) {
    let testbed = Testbed::new(&Layout { links: vec![(0, 1), (0, 1)], ..Layout::default() }).unwrap();
    let b = testbed.host(1);
    let further: [(usize, IpAddr); 4] = [
        (0, Ipv4Addr::new(10, 77, 0, 50).into()),
        (1, Ipv4Addr::new(10, 77, 1, 50).into()),
        (0, Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 0x50).into()),
        (1, Ipv6Addr::new(0xfd77, 0, 0, 1, 0, 0, 0, 0x50).into()),
    ];
    let mut all = vec![b.ip(0, false), b.ip(1, false), b.ip(0, true), b.ip(1, true)];
    for (link, ip) in further {
        b.add_address(link, ip).unwrap();
        // A static neighbour: resolution over IPv6 needs a link-local address, which these hosts
        // do not have.
        let mac = b.mac(link).map(|byte| format!("{byte:02x}")).join(":");
        let device = b.device(link);
        let known = format!("neighbour replace {ip} lladdr {mac} dev {device} nud permanent\n");
        testbed.host(0).ip_batch(&known).unwrap();
        all.push(ip);
    }
    (0..2).for_each(|link| b.wait_for_addrs(link).unwrap());
    (testbed, all)
}

#[test]
fn netns_a_wildcard_replies_from_the_destination_address() {
    if !skip::need_root("netns_a_wildcard_replies_from_the_destination_address") {
        return;
    }
    let (testbed, addresses) = two_links();
    let (a, b) = (testbed.host(0), testbed.host(1));
    for any in [IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V6(Ipv6Addr::UNSPECIFIED)] {
        let mut driver = lane_driver(b, open(b, any, |builder| _ = builder.lanes(3)));
        let port = driver.addr().port();
        for asked in addresses.iter().filter(|ip| any.is_ipv6() || ip.is_ipv4()) {
            // Also over the link that the address does not belong to: a connected client accepts
            // the reply only from the address that it sent to.
            for link in [0, 1] {
                let client = client(a, a.ip(link, asked.is_ipv6()), (*asked, port).into());
                client.send(b"which one?");
                driver.receive(1, |_, datagram, out| {
                    assert_eq!(datagram.local().ip().to_canonical(), *asked);
                    assert_eq!(datagram.peer().ip().to_canonical(), client.addr().ip());
                    out.reply(&datagram, b"this one");
                });
                client.expect(b"this one");
            }
        }
        assert_eq!(driver.handle.counters().total().lost(), 0);
    }
}

/// Adds the same link-local addresses to both ends of both links, which then differ only in the
/// device.
fn link_local(host: &Host, last: u16) -> Ipv6Addr {
    let ip = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, last);
    for link in [0, 1] {
        host.add_address(link, ip.into()).unwrap();
        host.wait_for_addrs(link).unwrap();
    }
    ip
}

#[test]
fn netns_replies_to_link_local_peers_use_their_link() {
    if !skip::need_root("netns_replies_to_link_local_peers_use_their_link") {
        return;
    }
    let (testbed, _) = two_links();
    let (a, b) = (testbed.host(0), testbed.host(1));
    let (from, to) = (link_local(a, 1), link_local(b, 2));
    let scope = |host: &Host, link| host.device_index(link).unwrap();
    let scoped = |ip, port, scope| SocketAddr::V6(SocketAddrV6::new(ip, port, 0, scope));
    let ask = |driver: &mut LaneDriver, link: usize| {
        let port = driver.addr().port();
        let target = scoped(to, port, scope(a, link));
        let client = client_at(a, scoped(from, 0, scope(a, link)), target);
        client.send(b"on which link?");
        driver.receive(1, |_, datagram, out| {
            assert_eq!(datagram.peer().ip(), from);
            assert_eq!(datagram.local(), scoped(to, port, scope(b, link)));
            let SocketAddr::V6(peer) = datagram.peer() else { panic!("{}", datagram.peer()) };
            assert_eq!(peer.scope_id(), scope(b, link));
            out.reply(&datagram, b"on this one");
            // Also unsolicited, with the scope of the peer's address.
            out.send_to(datagram.peer(), b"and once more");
        });
        client.expect(b"on this one");
        client.expect(b"and once more");
    };
    let mut any = lane_driver(b, open(b, Ipv6Addr::UNSPECIFIED.into(), |builder| _ = builder.lanes(2)));
    for link in [0, 1, 0] {
        ask(&mut any, link);
    }
    for link in [0, 1] {
        let addr = scoped(to, 0, scope(b, link));
        let socket = b.run(|| Builder::new(addr).unwrap().lanes(2).open().unwrap());
        let mut one = lane_driver(b, socket);
        ask(&mut one, link);
        assert_eq!(one.handle.counters().total().lost(), 0);
    }
    assert_eq!(any.handle.counters().total().lost(), 0);
}

fn client_at(host: &Host, from: SocketAddr, to: SocketAddr) -> Client {
    host.run(|| Client::between(from, to))
}

#[test]
fn netns_a_broadcast_reaches_every_lane() {
    let name = "netns_a_broadcast_reaches_every_lane";
    if !skip::need_root(name) {
        return;
    }
    let testbed = Testbed::new(&Layout::default()).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    for by in backends(name, &[SteeringBackend::Ebpf, SteeringBackend::ClassicBpf, SteeringBackend::Kernel]) {
        let any = Ipv4Addr::UNSPECIFIED.into();
        let mut driver = lane_driver(b, open(b, any, |builder| _ = builder.lanes(3).steering_backend(by)));
        let port = driver.addr().port();
        let requester = a.run(|| UdpSocket::bind((a.ip4(0), 0)).unwrap());
        requester.set_broadcast(true).unwrap();
        requester.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        // The kernel delivers a broadcast to every matching socket, without steering: each lane
        // gets a copy, and each answers from the address of the device.
        for target in [Ipv4Addr::new(10, 77, 0, 255), Ipv4Addr::BROADCAST] {
            let sent = a.run(|| send_over(&requester, a, (target, port).into()));
            if !sent {
                continue;
            }
            let mut lanes = Vec::new();
            driver.receive(3, |lane, datagram, out| {
                lanes.push(lane);
                assert_eq!(datagram.local().ip(), IpAddr::from(b.ip4(0)));
                out.reply(&datagram, lane.to_string().as_bytes());
            });
            lanes.sort();
            assert_eq!(lanes, driver.handle.lane_ids());
            for _ in lanes {
                let (_, from) = manylane_tests::retry_eintr(|| requester.recv_from(&mut [0; 8])).unwrap();
                assert_eq!(from, (b.ip4(0), port).into());
            }
            assert!(driver.is_idle());
        }
    }
}

/// A host without a default route has no route to 255.255.255.255.
fn send_over(socket: &UdpSocket, host: &Host, target: SocketAddr) -> bool {
    if target.ip() == IpAddr::V4(Ipv4Addr::BROADCAST) {
        host.ip_batch(&format!("route replace 255.255.255.255/32 dev {}\n", host.device(0))).unwrap();
    }
    socket.send_to(b"anybody?", target).unwrap() == 8
}

#[test]
fn netns_eight_lanes_share_the_cpus() {
    if !skip::need_live_sender("netns_eight_lanes_share_the_cpus") {
        return;
    }
    const DATAGRAMS: u64 = 20_000;
    // Without IPv6 the device counts only this traffic.
    let testbed = Testbed::new(&Layout { ipv6: false, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    for (steering, by) in [
        (Steering::RoundRobin, SteeringBackend::Ebpf),
        (Steering::LeastLoaded, SteeringBackend::Ebpf),
        (Steering::Flow, SteeringBackend::Ebpf),
        (Steering::Flow, SteeringBackend::ClassicBpf),
        (Steering::Flow, SteeringBackend::Kernel),
    ] {
        let socket: Socket = open(b, b.ip4(0).into(), |builder| {
            builder.lanes(8).steering(steering).steering_backend(by).recv_buffer(RECV_BUFFER_BYTES);
        });
        let serving = sink(b, socket);
        let traffic = Traffic { flows: 256, pps: Some(50_000.0), ..Traffic::new(serving.addr, 16) };
        let before = b.device_counters(0).unwrap().rx_packets;
        let sent = LiveSender::new(a, b, 0, &traffic).unwrap().send(Until::Count(DATAGRAMS)).unwrap();
        // Before Linux 6.5, receive work may wait for a thread, and the link rejects what its ring
        // cannot hold meanwhile.
        assert!(sent.rejected == 0 || !skip::is_kernel((6, 5)), "{sent:?}");
        assert_eq!(sent.datagrams + sent.rejected, DATAGRAMS);
        wait_until("all datagrams delivered", &serving.handle, || {
            serving.handle.counters().total().delivered == sent.datagrams
        });
        let counters = serving.stop().unwrap();
        assert_eq!(b.device_counters(0).unwrap().rx_packets - before, sent.datagrams);
        assert_eq!((counters.total().arrived(), counters.total().kernel_dropped), (sent.datagrams, 0));
    }
}
