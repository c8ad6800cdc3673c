//! Engine `xdp` over a veth pair: datagrams that XDP takes, those that it leaves to the kernel,
//! and that none is lost.

use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc;

use crate::netns_support::{client, echo, lane_driver, open, sink, wait_for_arrived, wait_until};
use crate::xdp_support::{frame_to, testbed_of_live_sender};
use manylane::{Batch, Builder, Ecn, Engine, ErrorKind, LaneCounters, Outbox, Socket};
use manylane_measure::{Traffic, Until};
use manylane_sys::packet::PacketSocket;
use manylane_testbed::generator::LiveSender;
use manylane_testbed::skip;
use manylane_testbed::{Host, Layout, Testbed};
use manylane_tests::{Client, Serving, TEST_TIMEOUT, pattern};
use manylane_wire::ethernet::{Mac, Vlan, ether_type};

fn testbed(name: &str) -> Option<Testbed> {
    skip::need_root(name).then(|| Testbed::new(&Layout::default()).unwrap())
}

fn xdp(host: &Host, ip: IpAddr, change: impl FnOnce(&mut Builder) + Send) -> Socket {
    open(host, ip, |builder| change(builder.engine(Engine::Xdp)))
}

/// The sum closes, and only the expected datagrams were lost.
fn assert_arrived(total: &LaneCounters, arrived: u64, lost: u64) {
    assert_eq!((total.arrived(), total.delivered), (arrived, arrived - lost), "{total:#?}");
}

#[test]
fn netns_xdp_every_size_is_echoed() {
    let Some(testbed) = testbed("netns_xdp_every_size_is_echoed") else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    for ipv6 in [false, true] {
        let head = if ipv6 { 48 } else { 28 };
        let largest = if ipv6 { 65_487 } else { 65_507 };
        let fits = 1500 - head;
        let whole = [0, 1, 2, 17, 100, 1200, fits - 1, fits];
        let pieces = [fits + 1, 2 * fits, 9000, 30_000, largest - 1, largest];
        let serving = echo(b, xdp(b, b.ip(0, ipv6), |builder| _ = builder.lanes(2)));
        let mut sent = 0;
        for flow in 0..4 {
            let client = client(a, a.ip(0, ipv6), serving.addr);
            for size in whole.into_iter().chain(pieces) {
                client.send(&pattern(flow, size));
                client.expect(&pattern(flow, size));
                sent += 1;
            }
        }
        let total = serving.stop().unwrap().total();
        assert_arrived(&total, sent, 0);
        assert_eq!((total.sent, total.lost()), (sent, 0));
        // All unfragmented datagrams arrived past the stack; fragments did not.
        assert_eq!(total.delivered_by_bypass, 4 * whole.len() as u64, "{total:#?}");
        assert!(total.sent_by_bypass > 0 && total.sent_by_bypass <= total.delivered_by_bypass, "{total:#?}");
    }
}

#[test]
fn netns_xdp_a_wildcard_receives_every_address_and_loopback() {
    let Some(testbed) = testbed("netns_xdp_a_wildcard_receives_every_address_and_loopback") else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let extra: IpAddr = "10.77.0.99".parse().unwrap();
    b.add_address(0, extra).unwrap();
    let serving = echo(b, xdp(b, "::".parse().unwrap(), |builder| _ = builder.lanes(2)));
    let port = serving.addr.port();
    for ip in [b.ip(0, false), b.ip(0, true), extra] {
        let client = client(a, a.ip(0, ip.is_ipv6()), SocketAddr::new(ip, port));
        for _ in 0..10 {
            client.ping();
        }
    }
    // An address that is added later is followed.
    let later: IpAddr = "10.77.0.100".parse().unwrap();
    b.add_address(0, later).unwrap();
    client(a, a.ip(0, false), SocketAddr::new(later, port)).ping();
    let before = serving.handle.counters().total();
    assert!(before.delivered_by_bypass >= 30, "{before:#?}");
    // Over loopback through the companion.
    b.run(|| Client::to(SocketAddr::new("127.0.0.1".parse().unwrap(), port)).ping());
    b.run(|| Client::to(SocketAddr::new("::1".parse().unwrap(), port)).ping());
    let total = serving.stop().unwrap().total();
    assert_eq!(total.delivered_by_bypass, before.delivered_by_bypass);
    assert_arrived(&total, 33, 0);
    assert_eq!(total.sent, 33);
}

#[test]
fn netns_xdp_receives_every_frame_of_a_fast_sender() {
    let name = "netns_xdp_receives_every_frame_of_a_fast_sender";
    let Some(testbed) = testbed_of_live_sender(name, &Layout::default()) else { return };
    const DATAGRAMS: u64 = 100_000;
    let (a, b) = (testbed.host(0), testbed.host(1));
    let serving = sink(b, xdp(b, b.ip4(0).into(), |builder| _ = builder.lanes(4)));
    let traffic = Traffic { flows: 50, pps: Some(100_000.0), ..Traffic::new(serving.addr, 20) };
    let mut sender = LiveSender::new(a, b, 0, &traffic).unwrap();
    assert_eq!(sender.send(Until::Count(DATAGRAMS)).unwrap().datagrams, DATAGRAMS);
    wait_for_arrived(&serving.handle, DATAGRAMS);
    let redirected: u64 = serving
        .handle
        .frame_counts()
        .iter()
        .filter(|(_, what, _)| *what == "redirected")
        .map(|(_, _, n)| n)
        .sum();
    let total = serving.stop().unwrap().total();
    assert_arrived(&total, DATAGRAMS, total.xsk_dropped);
    assert_eq!(
        (total.delivered_by_bypass + total.xsk_dropped, redirected),
        (DATAGRAMS, DATAGRAMS),
        "{total:#?}"
    );
}

#[test]
fn netns_xdp_malformed_frames_are_counted() {
    let Some(testbed) = testbed("netns_xdp_malformed_frames_are_counted") else { return };
    const ROUNDS: u64 = 50;
    let (a, b) = (testbed.host(0), testbed.host(1));
    let serving = sink(b, xdp(b, b.ip4(0).into(), |builder| _ = builder.lanes(2)));
    let to = serving.addr;
    let good = frame_to(a, b, to, b"good", |_| ());
    let mut padded = good.clone();
    padded.resize(60, 0xee);
    let mut checksum = good.clone();
    *checksum.last_mut().unwrap() ^= 1;
    let mut header_checksum = good.clone();
    header_checksum[24] ^= 1;
    let mut long_udp = good.clone();
    long_udp[38..40].copy_from_slice(&100_u16.to_be_bytes());
    let mut short_udp = good.clone();
    short_udp[38..40].copy_from_slice(&7_u16.to_be_bytes());
    let mut long_ip = good.clone();
    long_ip[16..18].copy_from_slice(&1400_u16.to_be_bytes());
    let other_mac = frame_to(a, b, to, b"not for us", |plan| plan.destination_mac = Mac([2, 9, 9, 9, 9, 9]));
    let ourselves =
        frame_to(a, b, to, b"from ourselves", |plan| plan.source = SocketAddr::new(b.ip4(0).into(), 5));
    let broadcaster = frame_to(a, b, to, b"from all", |plan| plan.source_mac = Mac::BROADCAST);
    let tag = Some(Vlan { ether_type: ether_type::VLAN, tci: 7 });
    let tagged = frame_to(a, b, to, b"a VLAN we are not in", |plan| plan.vlans = [tag, None]);
    let socket = a.run(|| PacketSocket::open(a.device_index(0).unwrap())).unwrap();
    for _ in 0..ROUNDS {
        for frame in [&good, &padded, &broadcaster] {
            socket.send(frame).unwrap();
        }
        for frame in [&checksum, &header_checksum, &long_udp, &short_udp, &long_ip] {
            socket.send(frame).unwrap();
        }
        for frame in [&other_mac, &ourselves, &tagged] {
            socket.send(frame).unwrap();
        }
    }
    wait_for_arrived(&serving.handle, 8 * ROUNDS);
    let total = serving.stop().unwrap().total();
    assert_eq!(total.delivered, 3 * ROUNDS, "{total:#?}");
    assert_eq!((total.bad_checksum, total.malformed), (2 * ROUNDS, 3 * ROUNDS), "{total:#?}");
    assert_arrived(&total, 8 * ROUNDS, 5 * ROUNDS);
}

#[test]
fn netns_xdp_two_sockets_of_a_process_share_a_device() {
    let Some(testbed) = testbed("netns_xdp_two_sockets_of_a_process_share_a_device") else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let first = echo(b, xdp(b, b.ip4(0).into(), |builder| _ = builder.lanes(2)));
    let second = echo(b, xdp(b, b.ip4(0).into(), |builder| _ = builder.lanes(2)));
    for serving in [&first, &second] {
        let client = client(a, a.ip(0, false), serving.addr);
        for _ in 0..10 {
            client.ping();
        }
    }
    for serving in [first, second] {
        let total = serving.stop().unwrap().total();
        assert_arrived(&total, 10, 0);
    }
}

#[test]
fn netns_xdp_invalid_options_are_refused() {
    let Some(testbed) = testbed("netns_xdp_invalid_options_are_refused") else { return };
    let b = testbed.host(1);
    let refused = |change: &(dyn Fn(&mut Builder) + Sync)| {
        b.run(|| {
            let mut builder = Builder::new((b.ip4(0), 0)).unwrap();
            change(builder.engine(Engine::Xdp));
            builder.open().map(drop).unwrap_err()
        })
    };
    for change in [
        &(|builder: &mut Builder| _ = builder.xdp_ring(1000)) as &(dyn Fn(&mut Builder) + Sync),
        &|builder| _ = builder.xdp_devices(["nosuch0"]),
        &|builder| _ = builder.lanes(9).xdp_surplus_lanes(false),
        &|builder| _ = builder.steering(manylane::Steering::RoundRobin),
        &|builder| _ = builder.timestamps(true),
    ] {
        let err = refused(change);
        assert_eq!(err.kind(), ErrorKind::Config, "{err}");
    }
    // A refused socket leaves nothing behind.
    let socket = xdp(b, b.ip4(0).into(), |builder| _ = builder.lanes(2));
    assert_eq!(socket.device_queues().len(), 4);
    drop(socket);
}

#[test]
fn netns_xdp_removed_lanes_lose_nothing() {
    let name = "netns_xdp_removed_lanes_lose_nothing";
    let Some(testbed) = testbed_of_live_sender(name, &Layout::default()) else { return };
    const DATAGRAMS: u64 = 16_000;
    let (a, b) = (testbed.host(0), testbed.host(1));
    // Rings for all of them, so that a busy machine loses nothing.
    let options = |builder: &mut Builder| _ = builder.lanes(4).xdp_ring(16_384);
    let serving: Serving = sink(b, xdp(b, b.ip4(0).into(), options));
    let traffic = Traffic { flows: 50, pps: Some(20_000.0), ..Traffic::new(serving.addr, 20) };
    let mut sender = LiveSender::new(a, b, 0, &traffic).unwrap();
    let ids = serving.handle.lane_ids();
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| sender.send(Until::Count(DATAGRAMS)).unwrap().datagrams);
        for id in &ids[..3] {
            wait_until("a tenth of the datagrams", &serving.handle, || {
                serving.handle.counters().total().arrived() > DATAGRAMS / 10
            });
            serving.handle.remove_lane(*id).unwrap();
        }
        assert_eq!(sending.join().unwrap(), DATAGRAMS);
    });
    wait_for_arrived(&serving.handle, DATAGRAMS);
    let total = serving.stop().unwrap().total();
    assert_arrived(&total, DATAGRAMS, 0);
    assert!(total.delivered_by_bypass > 0, "{total:#?}");
}

/// Frames that are in the rings at the stop are handled, however many batches they are.
#[test]
fn netns_xdp_a_stop_drains_the_queues() {
    const QUEUED_DATAGRAMS: u64 = 1500;
    if !skip::need_root("netns_xdp_a_stop_drains_the_queues") {
        return;
    }
    let testbed = Testbed::new(&Layout { ipv6: false, queues: 1, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    let (enter, entered) = mpsc::channel();
    let (release, released) = mpsc::channel::<()>();
    let mut released = Some(released);
    let serving = Serving::start_with(xdp(b, b.ip4(0).into(), |builder| _ = builder.lanes(1)), move |_| {
        let (enter, mut released) = (enter.clone(), released.take());
        move |batch: Batch<'_>, _: &mut Outbox<'_>| {
            batch.for_each(drop);
            if let Some(released) = released.take() {
                enter.send(()).unwrap();
                let _ = released.recv_timeout(TEST_TIMEOUT);
            }
        }
    });
    let client = client(a, a.ip4(0).into(), serving.addr);
    client.send(b"first");
    entered.recv_timeout(TEST_TIMEOUT).unwrap();
    let redirected =
        || serving.handle.frame_counts().iter().find(|(_, what, _)| *what == "redirected").map(|c| c.2);
    // Not all at once: a veth device drops what it cannot deliver meanwhile.
    for sent in (100..=QUEUED_DATAGRAMS).step_by(100) {
        (0..100).for_each(|_| client.send(b"queued"));
        wait_until("all datagrams redirected", &serving.handle, || redirected() == Some(1 + sent));
    }
    serving.handle.stop();
    drop(release);
    let total = serving.outcome().unwrap().total();
    assert_eq!(
        (total.delivered, total.delivered_by_bypass, total.discarded),
        (1 + QUEUED_DATAGRAMS, 1 + QUEUED_DATAGRAMS, 0),
        "{total:#?}"
    );
}

#[test]
fn netns_xdp_ecn_is_reported_on_request() {
    let Some(testbed) = testbed("netns_xdp_ecn_is_reported_on_request") else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    for (asked, told) in [(false, None), (true, Some(Ecn::Ect0))] {
        let socket = xdp(b, b.ip4(0).into(), |builder| _ = builder.lanes(2).ecn(asked));
        let mut driver = lane_driver(b, socket);
        let bytes = frame_to(a, b, driver.addr(), b"ECT(0)", |plan| plan.traffic_class = 2);
        let sender = a.run(|| PacketSocket::open(a.device_index(0).unwrap())).unwrap();
        sender.send(&bytes).unwrap();
        let got = driver.recv_all(1);
        assert_eq!((got[0].ecn, got[0].payload.as_slice()), (told, &b"ECT(0)"[..]));
        assert_eq!(driver.handle.counters().total().delivered_by_bypass, 1);
    }
}
