//! Engine `xdp` and malformed frames: each is delivered, counted or left to the kernel, and valid
//! ones between them arrive.

use std::collections::HashMap;
use std::fs;
use std::net::{IpAddr, SocketAddr};

use crate::netns_support::{client, echo, lane_driver, open, sink, wait_for_arrived, wait_until};
use crate::xdp_support::{PORT, frame_to, testbed, two_queues, xdp};
use manylane::{Engine, Handle};
use manylane_sys::packet::PacketSocket;
use manylane_testbed::{Host, Layout, Testbed, skip};
use manylane_tests::{Client, pattern};
use manylane_wire::checksum::checksum;
use manylane_wire::ethernet::{self, Mac};
use manylane_wire::frame::UdpFrame;
use manylane_wire::{ipv4, udp};

fn sender(host: &Host) -> PacketSocket {
    host.run(|| PacketSocket::open(host.device_index(0).unwrap())).unwrap()
}

/// The frame with some bytes overwritten.
fn patched(frame: &[u8], at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut changed = frame.to_vec();
    changed[at..at + bytes.len()].copy_from_slice(bytes);
    changed
}

/// The frame with a corrected IPv4 header checksum.
fn fix_ip_checksum(mut frame: Vec<u8>) -> Vec<u8> {
    frame[24..26].fill(0);
    let sum = checksum(&frame[14..34]);
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
    frame
}

/// The action of the program on the device, by name.
fn frame_counts(handle: &Handle) -> HashMap<&'static str, u64> {
    handle.frame_counts().into_iter().map(|(_, what, count)| (what, count)).collect()
}

/// A frame, and its expected outcome.
struct Case {
    bytes: Vec<u8>,
    /// The counter of the program on the device.
    program: &'static str,
    /// The counter of the lane, for frames that reach it: delivered past the kernel, or by it.
    lane: &'static str,
}

fn case(bytes: Vec<u8>, program: &'static str, lane: &'static str) -> Case {
    Case { bytes, program, lane }
}

/// Frames of each kind, from good to hopeless.
fn cases(a: &Host, b: &Host, to: SocketAddr) -> Vec<Case> {
    let ipv6 = to.is_ipv6();
    let good = frame_to(a, b, to, b"as it should be", |_| ());
    // Where UDP starts, and the lengths and checksums of both headers.
    let udp = if ipv6 { 54 } else { 34 };
    let (length, sum) = (udp + 4, udp + 6);
    let far = u16::MAX.to_be_bytes();
    let last = good.len() - 1;
    // For IPv6, the kernel accepts such a sender.
    let from_ourselves = if ipv6 { "companion" } else { "" };
    let mut padded = good.clone();
    padded.resize(good.len() + 40, 0xee);
    let mut cases = vec![
        case(good.clone(), "redirected", "delivered"),
        case(frame_to(a, b, to, b"", |_| ()), "redirected", "delivered"),
        case(padded, "redirected", "delivered"),
        case(patched(&good, last, &[good[last] ^ 1]), "redirected", "bad_checksum"),
        case(patched(&good, sum, &[good[sum] ^ 0x80]), "redirected", "bad_checksum"),
        case(patched(&good, length, &far), "redirected", "malformed"),
        case(patched(&good, length, &[0, 7]), "redirected", "malformed"),
        case(patched(&good, length, &[0, 0]), "redirected", "malformed"),
        // Truncated: in the payload; in the UDP header; in the IP header; after the Ethernet
        // header.
        case(good[..good.len() - 5].to_vec(), "redirected", "malformed"),
        case(good[..udp + 7].to_vec(), "not_udp", ""),
        case(good[..udp - 3].to_vec(), "not_udp", ""),
        case(good[..15].to_vec(), "not_udp", ""),
        // From addresses that cannot be answered: our own; multicast.
        case(
            frame_to(a, b, to, b"?", |plan| plan.source = SocketAddr::new(b.ip(0, ipv6), 5)),
            "bad_source",
            from_ourselves,
        ),
        case(patched(&good, if ipv6 { 22 } else { 26 }, &[if ipv6 { 0xff } else { 0xe0 }]), "bad_source", ""),
        // Another IP version than the Ethernet type.
        case(patched(&good, 14, &[0x55]), "not_udp", ""),
        // To a closed port.
        case(frame_to(a, b, SocketAddr::new(to.ip(), 9), b"?", |_| ()), "no_port", ""),
    ];
    if ipv6 {
        cases.push(case(patched(&good, sum, &[0, 0]), "redirected", "bad_checksum"));
        cases.push(case(patched(&good, 18, &far), "redirected", "malformed"));
        cases.push(case(patched(&good, 18, &[0, 4]), "redirected", "malformed"));
        // A fragment header without an end, and a chain of extension headers.
        cases.push(case(patched(&good, 20, &[44]), "fragment_or_options", ""));
        cases.push(case(patched(&good, 20, &[60]), "fragment_or_options", ""));
    } else {
        cases.push(case(patched(&good, sum, &[0, 0]), "redirected", "delivered"));
        cases.push(case(patched(&good, 24, &[good[24] ^ 1]), "redirected", "bad_checksum"));
        cases.push(case(fix_ip_checksum(patched(&good, 16, &far)), "redirected", "malformed"));
        cases.push(case(fix_ip_checksum(patched(&good, 16, &[0, 24])), "redirected", "malformed"));
        // A header of 16 bytes, a first fragment without others, and one with a large offset.
        cases.push(case(patched(&good, 14, &[0x44]), "fragment_or_options", ""));
        cases.push(case(fix_ip_checksum(patched(&good, 20, &[0x20, 0])), "fragment_or_options", ""));
        cases.push(case(fix_ip_checksum(patched(&good, 20, &[0x1f, 0xff])), "fragment_or_options", ""));
        // Loopback and 0.0.0.0/8 as the sender.
        cases.push(case(fix_ip_checksum(patched(&good, 26, &[127, 0, 0, 1])), "bad_source", ""));
        cases.push(case(fix_ip_checksum(patched(&good, 26, &[0, 0, 0, 0])), "bad_source", ""));
    }
    cases
}

/// A mixed flood of all kinds: every valid frame arrives, every malformed one is counted, and
/// another peer is not affected.
#[test]
fn netns_xdp_each_malformed_frame_of_a_flood_is_counted() {
    const ROUNDS: u64 = 200;
    let Some(testbed) = two_queues("netns_xdp_each_malformed_frame_of_a_flood_is_counted") else {
        return;
    };
    let (a, b) = (testbed.host(0), testbed.host(1));
    for ipv6 in [false, true] {
        let socket = open(b, b.ip(0, ipv6), |builder| _ = builder.engine(Engine::Xdp).lanes(2));
        let serving = echo(b, socket);
        let honest = client(a, a.ip(0, ipv6), serving.addr);
        let cases = cases(a, b, serving.addr);
        let socket = sender(a);
        for round in 0..ROUNDS {
            // Another order each time.
            for at in 0..cases.len() {
                socket.send(&cases[(at * 11 + round as usize) % cases.len()].bytes).unwrap();
            }
            honest.ping();
        }
        assert_ne!(cases.len() % 11, 0, "all cases are sent");
        let of = |program: &str| ROUNDS * cases.iter().filter(|case| case.program == program).count() as u64;
        let lane = |lane: &str| ROUNDS * cases.iter().filter(|case| case.lane == lane).count() as u64;
        let arrived = of("redirected") + lane("companion") + ROUNDS;
        wait_for_arrived(&serving.handle, arrived);
        let seen = frame_counts(&serving.handle);
        let total = serving.stop().unwrap().total();
        let good = lane("delivered") + ROUNDS;
        let all = good + lane("companion");
        assert_eq!((total.delivered, total.delivered_by_bypass), (all, good), "{total:#?}");
        assert_eq!(
            (total.bad_checksum, total.malformed),
            (lane("bad_checksum"), lane("malformed")),
            "{total:#?}"
        );
        assert_eq!(total.arrived(), arrived, "{total:#?}");
        assert_eq!((total.sent, total.lost(), total.recv_errors), (all, 0, 0), "{total:#?}");
        assert_eq!(seen["redirected"], of("redirected") + ROUNDS, "{seen:?}");
        for program in ["fragment_or_options", "bad_source", "too_long", "no_lane", "other_vlan"] {
            assert_eq!(seen[program], of(program), "{program}: {seen:?}");
        }
        // Kernels meanwhile send neighbour and ICMP messages.
        for program in ["not_udp", "no_port"] {
            assert!(seen[program] >= of(program), "{program}: {seen:?}");
        }
    }
}

/// A frame that the kernel's input path judges by its addresses.
struct InputCase {
    what: &'static str,
    bytes: Vec<u8>,
    /// The counter of the program on the device.
    program: &'static str,
    /// True if the kernel delivers it.
    delivered: bool,
}

/// The address of a device that is down.
const DOWN_ADDR: &str = "198.51.100.1";

/// One frame of each kind to a wildcard socket at `port`; `strict` says whether the device has a
/// strict reverse path filter.
fn input_cases(a: &Host, b: &Host, port: u16, strict: bool) -> Vec<InputCase> {
    let (to4, to6) = (SocketAddr::new(b.ip(0, false), port), SocketAddr::new(b.ip(0, true), port));
    let at = |text: &str| SocketAddr::new(text.parse().unwrap(), port);
    let from = |to: SocketAddr, source: IpAddr| {
        frame_to(a, b, to, b"judge", |plan| plan.source = SocketAddr::new(source, 4444))
    };
    let [net @ .., _] = a.ip4(0).octets();
    let broadcast = IpAddr::from([net[0], net[1], net[2], 255]);
    let mapped = SocketAddr::new(b.ip4(0).to_ipv6_mapped().into(), port);
    let near: IpAddr = "fe80::42".parse().unwrap();
    let four = frame_to(a, b, to4, b"judge", |_| ());
    let six = frame_to(a, b, to6, b"judge", |_| ());
    // UDP is shorter than the IP payload, and without a checksum.
    let short = patched(&frame_to(a, b, to4, b"judge, cut", |_| ()), 38, &[0, 13, 0, 0]);
    let judged = |what, bytes, program, delivered| InputCase { what, bytes, program, delivered };
    vec![
        judged("IPv4", four.clone(), "redirected", true),
        judged("IPv6", six.clone(), "redirected", true),
        judged("to 127.0.0.1", from(at("127.0.0.1"), a.ip4(0).into()), "no_port", false),
        judged("to 127.1.2.3", from(at("127.1.2.3"), a.ip4(0).into()), "no_port", false),
        judged("to ::1", from(at("::1"), a.ip6(0).into()), "no_port", false),
        judged("to a mapped address", from(mapped, a.ip6(0).into()), "redirected", false),
        judged("from the broadcast address", from(to4, broadcast), "bad_source", !strict),
        judged("from 255.255.255.255", from(to4, [255; 4].into()), "bad_source", false),
        judged("from 0.0.0.0", from(to4, [0; 4].into()), "bad_source", false),
        judged("from ::1", from(to6, "::1".parse().unwrap()), "bad_source", false),
        judged("from a link-local address", from(to6, near), "bad_source", true),
        judged("from an own address, IPv4", from(to4, to4.ip()), "bad_source", false),
        judged("from an own address, IPv6", from(to6, to6.ip()), "bad_source", true),
        judged(
            "from an own address of a device that is down",
            from(to4, DOWN_ADDR.parse().unwrap()),
            "bad_source",
            false,
        ),
        judged(
            "to an own address of a device that is down",
            from(at(DOWN_ADDR), a.ip4(0).into()),
            "no_port",
            true,
        ),
        judged("cut by UDP", short, "redirected", true),
        judged("without hops left, IPv4", fix_ip_checksum(patched(&four, 22, &[0])), "redirected", true),
        judged("without hops left, IPv6", patched(&six, 21, &[0]), "redirected", true),
        judged(
            "from port 0",
            frame_to(a, b, to4, b"judge", |plan| plan.source.set_port(0)),
            "redirected",
            true,
        ),
        judged("to port 0", frame_to(a, b, SocketAddr::new(to4.ip(), 0), b"judge", |_| ()), "no_port", false),
    ]
}

/// Frames that the kernel would not deliver are not delivered past it: either engine treats the
/// same frames equally.
#[test]
fn netns_xdp_input_checks_match_the_kernel() {
    let name = "netns_xdp_input_checks_match_the_kernel";
    let Some(testbed) = testbed(name, &Layout { queues: 1, ..Layout::default() }) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    b.ip_batch(&format!("link add down0 type veth peer name down1\naddress add {DOWN_ADDR}/24 dev down0\n"))
        .unwrap();
    let socket = sender(a);
    for (strict, filter) in [(false, "0"), (true, "1")] {
        for conf in ["all", b.device(0)] {
            b.set_sysctl(&format!("net.ipv4.conf.{conf}.rp_filter"), filter).unwrap();
        }
        for engine in [Engine::Mmsg, Engine::Xdp] {
            let wildcard = "::".parse().unwrap();
            let mut driver = lane_driver(b, open(b, wildcard, |builder| _ = builder.engine(engine).lanes(1)));
            let port = driver.addr().port();
            let fence = client(a, a.ip4(0).into(), SocketAddr::new(b.ip(0, false), port));
            for InputCase { what, bytes, program, delivered } in input_cases(a, b, port, strict) {
                let case = format!("{what}, {engine:?}, rp_filter {filter}");
                println!("{case}");
                let before = frame_counts(&driver.handle);
                socket.send(&bytes).unwrap();
                // When a later frame has arrived, the outcome of the earlier one is known.
                fence.send(b"fence");
                let got = driver.recv_all(1 + usize::from(delivered));
                let arrived: Vec<_> = got.iter().map(|got| got.payload.as_slice()).collect();
                let expected: &[&[u8]] = if delivered { &[b"judge", b"fence"] } else { &[b"fence"] };
                assert_eq!(arrived.len(), expected.len(), "{case}");
                assert!(expected.iter().all(|one| arrived.contains(one)), "{case}");
                if engine == Engine::Xdp {
                    let after = frame_counts(&driver.handle);
                    let fences = u64::from(program == "redirected");
                    assert_eq!(after["redirected"], before["redirected"] + 1 + fences, "{case}: {after:?}");
                    if program != "redirected" {
                        assert_eq!(after[program], before[program] + 1, "{case}: {after:?}");
                    }
                }
            }
            assert_eq!(driver.drain(), 0);
        }
    }
}

/// Number of packets that the kernel of `host` has dropped by `rp_filter`.
fn reverse_path_drops(host: &Host) -> u64 {
    let text = host.run(|| fs::read_to_string("/proc/thread-self/net/netstat")).unwrap();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("TcpExt: "));
    let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
    let named = names.split(' ').zip(values.split(' ')).find(|(name, _)| *name == "IPReversePathFilter");
    named.unwrap().1.parse().unwrap()
}

/// A source that the kernel would send to over another device, as the filter by reverse path sees
/// it: strict (1) drops it, loose (2) does not. On a device that was not named, engine `xdp`
/// leaves IPv4 to the strict filter; on one that was named, it takes all (docs/xdp.md).
/// Takes 12 s: 27 sockets, and three changes of a sysctl, which has no event: a refresh every four
/// seconds finds them.
#[test]
fn netns_xdp_sources_of_another_device_are_left_to_rp_filter() {
    let name = "netns_xdp_sources_of_another_device_are_left_to_rp_filter";
    let layout = Layout { hosts: 3, links: vec![(0, 1), (2, 1)], queues: 1, ..Layout::default() };
    let Some(testbed) = testbed(name, &layout) else { return };
    let (a, b, c) = (testbed.host(0), testbed.host(1), testbed.host(2));
    let device = b.device(0);
    let set_filter = |filter: &str| {
        for (conf, filter) in [("all", "0"), (device, filter)] {
            b.set_sysctl(&format!("net.ipv4.conf.{conf}.rp_filter"), filter).unwrap();
        }
    };
    let socket = sender(a);
    let send = |port: u16| {
        let (to, from) = (SocketAddr::new(b.ip4(0).into(), port), SocketAddr::new(c.ip4(1).into(), 4444));
        socket.send(&frame_to(a, b, to, b"judge", |plan| plan.source = from)).unwrap();
    };
    let bounds: [IpAddr; 3] = ["::".parse().unwrap(), "0.0.0.0".parse().unwrap(), b.ip4(0).into()];
    let engines = [(Engine::Mmsg, false), (Engine::Xdp, false), (Engine::Xdp, true)];
    for (filter, bound, (engine, is_named)) in ["0", "1", "2"]
        .into_iter()
        .flat_map(|filter| bounds.into_iter().map(move |bound| (filter, bound)))
        .flat_map(|(filter, bound)| engines.into_iter().map(move |engine| (filter, bound, engine)))
    {
        let case = format!("{bound}, rp_filter {filter}, {engine:?}, named: {is_named}");
        println!("{case}");
        set_filter(filter);
        let options = |builder: &mut manylane::Builder| {
            builder.engine(engine).lanes(1);
            if is_named {
                builder.xdp_devices([device]);
            }
        };
        let mut driver = lane_driver(b, open(b, bound, options));
        let port = driver.addr().port();
        let by_xdp = engine == Engine::Xdp && (is_named || filter != "1");
        let dropped = filter == "1" && !by_xdp;
        let before = reverse_path_drops(b);
        send(port);
        client(a, a.ip4(0).into(), SocketAddr::new(b.ip4(0).into(), port)).send(b"fence");
        let got = driver.recv_all(if dropped { 1 } else { 2 });
        let mut arrived: Vec<_> = got.iter().map(|got| got.payload.as_slice()).collect();
        arrived.sort_unstable();
        let expected: &[&[u8]] = if dropped { &[b"fence"] } else { &[b"fence", b"judge"] };
        assert_eq!(arrived, expected, "{case}");
        assert_eq!(reverse_path_drops(b) - before, u64::from(dropped), "{case}");
        // The filter does not apply to IPv6.
        let ip6 = u64::from(bound == bounds[0]);
        if ip6 == 1 {
            client(a, a.ip6(0).into(), SocketAddr::new(b.ip6(0).into(), port)).send(b"IPv6");
            assert_eq!(driver.recv_all(1)[0].payload, b"IPv6", "{case}");
        }
        assert_eq!(driver.drain(), 0, "{case}");
        let total = driver.handle.counters().total();
        let taken = if by_xdp { 2 } else { 0 } + if engine == Engine::Xdp { ip6 } else { 0 };
        assert_eq!(
            (total.delivered, total.delivered_by_bypass),
            (got.len() as u64 + ip6, taken),
            "{case}: {total:#?}"
        );
    }
    follow_reverse_path_filter(&testbed, &set_filter, &send);
}

/// A filter that is switched on, and off again, under a socket that runs.
fn follow_reverse_path_filter(testbed: &Testbed, set_filter: &dyn Fn(&str), send: &dyn Fn(u16)) {
    let (a, b) = (testbed.host(0), testbed.host(1));
    set_filter("0");
    let serving = sink(b, open(b, b.ip4(0).into(), |builder| _ = builder.engine(Engine::Xdp).lanes(1)));
    let handle = &serving.handle;
    let port = serving.addr.port();
    let client = client(a, a.ip4(0).into(), serving.addr);
    let mut sent = 0;
    let mut wait_for_way = |by_xdp: bool| {
        wait_until("the other way", handle, || {
            let before = handle.counters().total();
            client.send(b"which way?");
            sent += 1;
            wait_until("a delivered datagram", handle, || {
                handle.counters().total().delivered > before.delivered
            });
            let after = handle.counters().total();
            (after.delivered_by_bypass > before.delivered_by_bypass) == by_xdp
        });
        sent
    };
    wait_for_way(true);
    set_filter("1");
    wait_for_way(false);
    let before = reverse_path_drops(b);
    send(port);
    wait_until("a drop of the reverse path filter", handle, || reverse_path_drops(b) == before + 1);
    set_filter("0");
    let sent = wait_for_way(true);
    let total = serving.stop().unwrap().total();
    assert_eq!((total.arrived(), total.delivered), (sent, sent), "{total:#?}");
}

/// Short frames are padded to 60 bytes, which must not change the payload.
#[test]
fn netns_xdp_padding_is_no_payload() {
    let Some(testbed) = two_queues("netns_xdp_padding_is_no_payload") else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    for ipv6 in [false, true] {
        let mut driver =
            lane_driver(b, open(b, b.ip(0, ipv6), |builder| _ = builder.engine(Engine::Xdp).lanes(2)));
        let socket = sender(a);
        for len in 0..=18 {
            let payload = pattern(len, len);
            let mut bytes = frame_to(a, b, driver.addr(), &payload, |_| ());
            bytes.resize(bytes.len().max(60), 0xa5);
            socket.send(&bytes).unwrap();
            let got = &driver.recv_all(1)[0];
            assert_eq!((&got.payload, got.full_len, got.truncated), (&payload, len, false));
        }
        assert_eq!(driver.handle.counters().total().delivered_by_bypass, 19);
    }
}

/// Impossible source hardware addresses: frames from the broadcast address, or from our own, are
/// answered by the kernel's tables only.
#[test]
fn netns_xdp_forged_source_macs_are_not_replied_to() {
    const FRAMES_EACH: u64 = 100;
    let Some(testbed) = two_queues("netns_xdp_forged_source_macs_are_not_replied_to") else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    for ipv6 in [false, true] {
        let serving = echo(b, open(b, b.ip(0, ipv6), |builder| _ = builder.engine(Engine::Xdp).lanes(2)));
        // Only the peer gets the replies.
        let peer = client(a, a.ip(0, ipv6), serving.addr);
        let socket = sender(a);
        for mac in [Mac::BROADCAST, Mac(b.mac(0)), Mac([0; 6]), Mac([1, 0, 0x5e, 0, 0, 1])] {
            for _ in 0..FRAMES_EACH {
                let lie = |plan: &mut UdpFrame<'_>| (plan.source, plan.source_mac) = (peer.addr(), mac);
                socket.send(&frame_to(a, b, serving.addr, b"who?", lie)).unwrap();
                peer.expect(b"who?");
            }
        }
        // To the broadcast address, and to another host's: left to the kernel, which accepts the
        // first.
        for (mac, answered) in [(Mac::BROADCAST, true), (Mac([2, 9, 9, 9, 9, 9]), false)] {
            for _ in 0..FRAMES_EACH {
                let other =
                    |plan: &mut UdpFrame<'_>| (plan.source, plan.destination_mac) = (peer.addr(), mac);
                socket.send(&frame_to(a, b, serving.addr, b"all", other)).unwrap();
                if answered {
                    peer.expect(b"all");
                }
            }
        }
        peer.ping();
        let seen = frame_counts(&serving.handle);
        let total = serving.stop().unwrap().total();
        assert_eq!(
            (total.delivered, total.delivered_by_bypass, total.sent),
            (5 * FRAMES_EACH + 1, 4 * FRAMES_EACH + 1, 5 * FRAMES_EACH + 1)
        );
        assert!(seen["other_mac"] >= 2 * FRAMES_EACH, "{seen:?}");
        assert!(peer.is_idle());
    }
}

/// Datagrams that XDP does not take arrive through the companion once, in both families: fragments
/// from another host, and all loopback traffic to the bound address.
#[test]
fn netns_xdp_companion_delivers_fragments_and_loopback_once() {
    const FRAMES_EACH: usize = 20;
    let Some(testbed) = two_queues("netns_xdp_companion_delivers_fragments_and_loopback_once") else {
        return;
    };
    let (a, b) = (testbed.host(0), testbed.host(1));
    for (bound, ipv6) in [(false, false), (true, true), (true, false)] {
        // The third: IPv4 at a socket for both families.
        let ip: IpAddr = if bound == ipv6 { b.ip(0, ipv6) } else { "::".parse().unwrap() };
        let serving = echo(b, open(b, ip, |builder| _ = builder.engine(Engine::Xdp).lanes(2)));
        let server = SocketAddr::new(b.ip(0, ipv6), serving.addr.port());
        let near = b.run(|| Client::between(SocketAddr::new(b.ip(0, ipv6), 0), server));
        let far = client(a, a.ip(0, ipv6), server);
        for round in 0..FRAMES_EACH {
            for (client, len) in [(&near, 100), (&near, 9000), (&far, 2000), (&far, 20_000)] {
                client.send(&pattern(round, len));
                client.expect(&pattern(round, len));
            }
        }
        far.ping();
        assert!(near.is_idle() && far.is_idle());
        let total = serving.stop().unwrap().total();
        let through = 4 * FRAMES_EACH as u64;
        assert_eq!(
            (total.delivered, total.delivered_by_bypass, total.arrived()),
            (through + 1, 1, through + 1),
            "{total:#?}"
        );
        assert_eq!((total.sent, total.lost()), (through + 1, 0), "{total:#?}");
    }
}

/// Frames that fit one XSK frame, and those that need several (Linux 6.6), pass the kernel by.
/// Behind the driver, the longer ones pass through it. None is lost, and the replies are complete.
#[test]
fn netns_xdp_multi_buffer_frames_are_received() {
    let name = "netns_xdp_multi_buffer_frames_are_received";
    if !skip::need_root(name) || !skip::need_kernel(name, (6, 6), "frames in several pieces") {
        return;
    }
    for (generic, by_xdp) in [(false, 40), (true, 21)] {
        longer_frames(generic, by_xdp);
        jumbo_echo(generic);
    }
}

fn jumbo_echo(generic: bool) {
    let testbed = Testbed::new(&Layout { queues: 1, mtu: 9000, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    // Behind the driver, frames with partial checksums are left to the kernel.
    a.set_checksums(0, !generic).unwrap();
    let options =
        |builder: &mut manylane::Builder| _ = builder.engine(Engine::Xdp).xdp_generic(generic).lanes(1);
    let serving = echo(b, open(b, b.ip4(0).into(), options));
    let client = client(a, a.ip4(0).into(), serving.addr);
    let sizes = [10, 1700, 1780, 2000, 4000, 4096, 6000, 8972, 8973, 20_000];
    for (round, len) in sizes.into_iter().cycle().take(200).enumerate() {
        client.send(&pattern(round, len));
        client.expect(&pattern(round, len));
    }
    let passed = frame_counts(&serving.handle)["partial_checksum"];
    let total = serving.stop().unwrap().total();
    assert_eq!((total.delivered, total.sent, total.lost()), (200, 200, 0), "{total:#?}");
    // Fragments are left to the kernel; behind the driver, so are long frames. There, one checksum
    // in 65,535 looks partial, of a short frame or a long one.
    let by_xdp = if generic { 40 } else { 160 };
    let lowest = if generic { by_xdp - passed } else { by_xdp };
    assert!((lowest..=by_xdp).contains(&total.delivered_by_bypass), "{passed} passed: {total:#?}");
}

/// A finished checksum can have the value of a partial one. Behind the driver, where it cannot
/// be known which it is, the kernel gets the datagram, and it arrives.
#[test]
fn netns_xdp_a_seemingly_partial_checksum_goes_to_the_kernel() {
    let name = "netns_xdp_a_seemingly_partial_checksum_goes_to_the_kernel";
    let Some(testbed) = testbed(name, &Layout { queues: 1, ..Layout::default() }) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    for (generic, passed) in [(true, 1), (false, 0)] {
        let options =
            |builder: &mut manylane::Builder| _ = builder.engine(Engine::Xdp).xdp_generic(generic).lanes(1);
        let serving = sink(b, open(b, b.ip4(0).into(), options));
        let to_server = |payload: u16| frame_to(a, b, serving.addr, &payload.to_be_bytes(), |_| ());
        // Of IPv4: the addresses, the protocol, and the length of UDP.
        let looks_partial = |frame: &[u8]| {
            let pseudo = [&frame[26..34], &[0, 17], &frame[38..40]].concat();
            frame[40..42] == (!checksum(&pseudo)).to_be_bytes()
        };
        let found = (0..=u16::MAX).map(to_server).find(|frame| looks_partial(frame)).unwrap();
        let socket = sender(a);
        socket.send(&to_server(1)).unwrap();
        socket.send(&found).unwrap();
        socket.send(&to_server(2)).unwrap();
        wait_for_arrived(&serving.handle, 3);
        let seen = frame_counts(&serving.handle);
        let total = serving.stop().unwrap().total();
        assert_eq!((total.delivered, total.delivered_by_bypass), (3, 3 - passed), "{total:#?}");
        assert_eq!((seen["redirected"], seen["partial_checksum"]), (3 - passed, passed), "{seen:?}");
    }
}

fn longer_frames(generic: bool, by_xdp: u64) {
    let testbed = Testbed::new(&Layout { queues: 1, mtu: 3000, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    // Always the same port, and so the same checksums: none that looks partial.
    let ours = SocketAddr::new(b.ip4(0).into(), PORT);
    let serving = sink(b, xdp(b, ours, |builder| _ = builder.xdp_generic(generic).lanes(1)));
    let socket = sender(a);
    let longest = 2048 - 256;
    let head = ethernet::HEADER_LEN + ipv4::HEADER_LEN + udp::HEADER_LEN;
    for len in longest - head - 20..longest - head + 20 {
        socket.send(&frame_to(a, b, serving.addr, &pattern(1, len), |_| ())).unwrap();
    }
    wait_for_arrived(&serving.handle, 40);
    let seen = frame_counts(&serving.handle);
    let total = serving.stop().unwrap().total();
    assert_eq!(
        (total.delivered, total.delivered_by_bypass, seen["too_long"]),
        (40, by_xdp, 40 - by_xdp),
        "{total:#?}"
    );
}
