//! Engine `xdp`: lanes, devices, queues and hardware addresses that change while a socket runs.

use std::net::SocketAddr;

use crate::netns_support::{client, echo, lane_driver, sink, wait_for_arrived, wait_until};
use crate::xdp_support::{
    any_port, assert_all_by_xdp, ipv4_layout, is_balanced, ping_until_recv_by_xdp, testbed,
    testbed_of_live_sender, xdp,
};
use manylane::{Builder, Engine, ErrorKind, Handle};
use manylane_measure::{Traffic, Until};
use manylane_test_support::{set_queues, wait_for};
use manylane_testbed::generator::LiveSender;
use manylane_testbed::skip::Forced;
use manylane_testbed::{Host, Layout, Testbed, skip};
use manylane_tests::Client;
use manylane_wire::ethernet::Mac;

/// The device of the first link.
const DEVICE: &str = "link0";
/// That of the second one.
const OTHER: &str = "link1";

/// Pings from many ports, so that every queue is used. Returns the number of pings.
fn ping_all_queues(a: &Host, server: SocketAddr) -> u64 {
    const CLIENTS: u64 = 32;
    for _ in 0..CLIENTS {
        client(a, a.ip4(0).into(), server).ping();
    }
    CLIENTS
}

fn wait_balanced(handle: &Handle, device: &str, queues: u32) {
    let state = || (is_balanced(handle, device, queues), handle.device_queues(), handle.lane_ids());
    wait_for("balanced queues (balanced, queues, lanes)", state, |(balanced, ..)| *balanced);
}

#[test]
fn netns_xdp_added_and_removed_lanes_share_the_queues() {
    const DATAGRAMS: u64 = 8_000;
    const ROUNDS: u64 = 4;
    let name = "netns_xdp_added_and_removed_lanes_share_the_queues";
    let Some(testbed) = testbed_of_live_sender(name, &ipv4_layout(4)) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    // Rings for all of them, so that a busy machine loses nothing.
    let serving = sink(b, xdp(b, any_port(b), |builder| _ = builder.xdp_ring(8192)));
    let handle = &serving.handle;
    let traffic = Traffic { flows: 50, pps: Some(2_500.0), ..Traffic::new(serving.addr, 20) };
    let mut sender = LiveSender::new(a, b, 0, &traffic).unwrap();
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| sender.send(Until::Count(DATAGRAMS)).unwrap().datagrams);
        for round in 1..=ROUNDS {
            // Two, three, four lanes, and back to two.
            for _ in 0..2 {
                let id = b.run(|| handle.add_lane()).unwrap();
                wait_balanced(handle, DEVICE, 4);
                assert!(handle.device_queues().iter().any(|queue| queue.lane == id));
            }
            for id in &handle.lane_ids()[..2] {
                handle.remove_lane(*id).unwrap();
                wait_balanced(handle, DEVICE, 4);
            }
            let due = DATAGRAMS / (ROUNDS + 1) * round;
            wait_for_arrived(handle, due);
        }
        assert_eq!(sending.join().unwrap(), DATAGRAMS);
    });
    wait_for_arrived(handle, DATAGRAMS);
    assert_all_by_xdp(&serving.stop().unwrap().total(), DATAGRAMS);
}

#[test]
fn netns_xdp_lanes_by_hand_share_the_queues() {
    let Some(testbed) = testbed("netns_xdp_lanes_by_hand_share_the_queues", &ipv4_layout(4)) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let mut driver = lane_driver(b, xdp(b, any_port(b), |_| ()));
    let handle = driver.handle.clone();
    let (server, mut pings) = (driver.addr(), 0);
    let mut round = |driver: &mut manylane_tests::LaneDriver| {
        // A lane that is called checks its mailbox.
        wait_until("balanced queues", &handle, || driver.drain() == 0 && is_balanced(&handle, DEVICE, 4));
        let clients: Vec<Client> = (0..32).map(|_| client(a, a.ip4(0).into(), server)).collect();
        clients.iter().for_each(|client| client.send(b"by hand"));
        driver.echo(clients.len());
        clients.iter().for_each(|client| client.expect(b"by hand"));
        pings += clients.len() as u64;
        assert_all_by_xdp(&handle.counters().total(), pings);
    };
    round(&mut driver);
    for _ in 0..2 {
        b.run(|| driver.open());
        round(&mut driver);
    }
    // Several before any lane has checked, as many as there are queues, and one more.
    driver.lanes.truncate(2);
    round(&mut driver);
    for _ in 0..3 {
        b.run(|| driver.open());
    }
    round(&mut driver);
    // Dropped at once, after it was retired, and the first one.
    driver.lanes.pop();
    round(&mut driver);
    let mut lane = driver.lanes.pop().unwrap();
    lane.retire().unwrap();
    drop(lane);
    round(&mut driver);
    driver.lanes.remove(0);
    round(&mut driver);
}

/// Two links between the first two hosts, and a third host without any.
fn two_links() -> Layout {
    Layout { hosts: 3, links: vec![(0, 1), (0, 1)], ..ipv4_layout(2) }
}

/// The way in which a socket finds its devices, and whether it has both links and loopback.
fn device_selections(b: &Host) -> [(SocketAddr, Option<[&'static str; 2]>, bool); 3] {
    let wildcard = SocketAddr::from(([0, 0, 0, 0], 0));
    [(wildcard, None, true), (wildcard, Some([DEVICE, OTHER]), true), (any_port(b), None, false)]
}

/// Removes the first link and adds it again, for each way in which a socket finds its devices.
fn check_link_removal(name: &str, go: impl Fn(&Host, &Testbed), come: impl Fn(&Host, &Testbed)) {
    let Some(testbed) = testbed(name, &two_links()) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    for (bound, devices, is_wide) in device_selections(b) {
        let serving = echo(
            b,
            xdp(b, bound, |builder: &mut Builder| {
                if let Some(devices) = devices {
                    builder.xdp_devices(devices);
                }
            }),
        );
        let handle = &serving.handle;
        let at = |link: usize| SocketAddr::new(b.ip4(link).into(), serving.addr.port());
        let ping = |link: usize| {
            let client = client(a, a.ip4(link).into(), at(link));
            (0..10).for_each(|_| client.ping());
            10
        };
        let mut by_xdp = ping(0);
        let mut others = 0;
        // Twice, so that leftovers of the first time would show.
        for _ in 0..2 {
            go(b, &testbed);
            if is_wide {
                by_xdp += ping(1);
                b.run(|| {
                    Client::to(SocketAddr::new("127.0.0.1".parse().unwrap(), serving.addr.port())).ping();
                });
                others += 1;
            }
            wait_balanced(handle, DEVICE, 0);
            come(b, &testbed);
            wait_balanced(handle, DEVICE, 2);
            others += ping_until_recv_by_xdp(&client(a, a.ip4(0).into(), at(0)), handle);
            by_xdp += ping(0);
            if is_wide {
                by_xdp += ping(1);
            }
        }
        let total = serving.stop().unwrap().total();
        let all = by_xdp + others;
        assert_eq!((total.arrived(), total.delivered, total.sent), (all, all, all), "{total:#?}");
        assert!(total.delivered_by_bypass >= by_xdp, "fewer than {by_xdp} by XDP: {total:#?}");
    }
}

#[test]
fn netns_xdp_a_recreated_device_is_reattached() {
    check_link_removal(
        "netns_xdp_a_recreated_device_is_reattached",
        |b, _| b.ip_batch(&format!("link delete dev {DEVICE}\n")).unwrap(),
        |_, testbed| testbed.recreate_link(0, &two_links()).unwrap(),
    );
}

#[test]
fn netns_xdp_a_returned_device_is_attached_again() {
    let send = |from: &Host, to: &Host| {
        from.ip_batch(&format!("link set dev {DEVICE} netns {}\n", to.namespace().path())).unwrap();
    };
    check_link_removal(
        "netns_xdp_a_returned_device_is_attached_again",
        |b, testbed| send(b, testbed.host(2)),
        |b, testbed| {
            send(testbed.host(2), b);
            testbed.restore_link(0, &two_links()).unwrap();
        },
    );
}

/// At once, before lanes have released it.
#[test]
fn netns_xdp_a_device_recreated_at_once_is_reattached() {
    let name = "netns_xdp_a_device_recreated_at_once_is_reattached";
    let Some(testbed) = testbed(name, &two_links()) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    // Two sockets: the program stays until the last one is closed.
    let all =
        [(); 2].map(|()| echo(b, xdp(b, any_port(b), |builder| _ = builder.xdp_sockets(2).xdp_ring(512))));
    for _ in 0..3 {
        let (there, back) = (testbed.host(2).namespace().path(), b.namespace().path());
        b.ip_batch(&format!("link set dev {DEVICE} netns {there}\n")).unwrap();
        testbed.host(2).ip_batch(&format!("link set dev {DEVICE} netns {back}\n")).unwrap();
        testbed.restore_link(0, &two_links()).unwrap();
        for serving in &all {
            ping_until_recv_by_xdp(&client(a, a.ip4(0).into(), serving.addr), &serving.handle);
            wait_balanced(&serving.handle, DEVICE, 2);
            let before = serving.handle.counters().total().delivered_by_bypass;
            let pings = ping_all_queues(a, serving.addr);
            assert_eq!(serving.handle.counters().total().delivered_by_bypass, before + pings);
        }
    }
    for serving in all {
        let total = serving.stop().unwrap().total();
        assert_eq!((total.delivered, total.sent), (total.arrived(), total.arrived()), "{total:#?}");
    }
}

/// A bridge with the first link of `b` in it, and with the address of that; false if this kernel
/// has no bridges.
fn bridge(name: &str, b: &Host) -> bool {
    let made = b.ip_batch("link add name br0 type bridge\n");
    if !skip::need_unless_forced(
        name,
        made.is_ok(),
        Forced::Kernel,
        "this kernel has no bridges (CONFIG_BRIDGE)",
    ) {
        return false;
    }
    let ip = b.ip4(0);
    b.ip_batch(&format!(
        "link set dev {DEVICE} master br0\nlink set dev br0 address {} up\naddress del {ip}/24 dev {DEVICE}\naddress add {ip}/24 dev br0\n",
        Mac(b.mac(0))
    ))
    .unwrap();
    true
}

/// Frames of a bridge member belong to the bridge. An upper device cannot have an XSK of its own,
/// except with generic XDP. Both are refused with a hint, and generic XDP works.
#[test]
fn netns_xdp_a_bridge_and_its_ports_are_refused() {
    let name = "netns_xdp_a_bridge_and_its_ports_are_refused";
    let Some(testbed) = testbed(name, &ipv4_layout(1)) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    if !bridge(name, b) {
        return;
    }
    let addr = any_port(b);
    let open = |device: &str, generic: bool| {
        b.run(|| {
            let mut builder = Builder::new(addr).unwrap();
            builder.engine(Engine::Xdp).lanes(1).xdp_devices([device]).xdp_generic(generic).open()
        })
    };
    for generic in [false, true] {
        let err = open(DEVICE, generic).map(drop).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Unsupported, "{err}");
        assert!(err.to_string().contains("link0 is a part of br0"), "{err}");
    }
    // A bridge without ports may get some later.
    b.ip_batch("link add name br1 type bridge\nlink set dev br1 up\n").unwrap();
    for (device, ports) in [("br0", "link0"), ("br1", "any that it is given")] {
        let err = open(device, false).map(drop).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Unsupported, "{err}");
        assert!(err.to_string().contains(&format!("{device} is made of other devices ({ports})")), "{err}");
    }
    drop(open("br1", true).unwrap());
    // Frames as on a wire, because behind the driver, frames with partial checksums are left to
    // the kernel.
    a.set_checksums(0, false).unwrap();
    let serving = echo(b, open("br0", true).unwrap());
    let client = client(a, a.ip4(0).into(), serving.addr);
    (0..10).for_each(|_| client.ping());
    assert_all_by_xdp(&serving.stop().unwrap().total(), 10);
}

/// The program is detached when a device joins a bridge, and attached again when it leaves.
#[test]
fn netns_xdp_a_device_enslaved_later_is_detached() {
    let name = "netns_xdp_a_device_enslaved_later_is_detached";
    let Some(testbed) = testbed(name, &ipv4_layout(2)) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let addr = any_port(b);
    let serving = echo(b, xdp(b, addr, |builder| _ = builder.xdp_devices([DEVICE])));
    let mut by_xdp = ping_all_queues(a, serving.addr);
    if !bridge(name, b) {
        return;
    }
    wait_balanced(&serving.handle, DEVICE, 0);
    let mut others = ping_all_queues(a, serving.addr);
    assert_eq!(serving.handle.counters().total().delivered_by_bypass, by_xdp);
    b.ip_batch(&format!("link del dev br0\naddress add {}/24 dev {DEVICE}\n", b.ip4(0))).unwrap();
    wait_balanced(&serving.handle, DEVICE, 2);
    others += ping_until_recv_by_xdp(&client(a, a.ip4(0).into(), serving.addr), &serving.handle);
    by_xdp += ping_all_queues(a, serving.addr);
    let total = serving.stop().unwrap().total();
    let all = by_xdp + others;
    assert_eq!((total.arrived(), total.delivered, total.sent), (all, all, all), "{total:#?}");
    assert_eq!(total.delivered_by_bypass, by_xdp + 1, "{total:#?}");
}

/// Devices whose number of queues can be changed, for the test `name`.
fn testbed_of_fewer_queues(name: &str) -> Option<Testbed> {
    let has = skip::need_kernel(name, (5, 15), "veth devices that use fewer queues than they have");
    if has { testbed(name, &ipv4_layout(4)) } else { None }
}

/// A veth device accepts no program while its peer has more send queues than it has receive
/// queues. The error names that as the reason, and no other one.
#[test]
fn netns_xdp_a_peer_with_more_queues_is_named() {
    let name = "netns_xdp_a_peer_with_more_queues_is_named";
    let Some(testbed) = testbed_of_fewer_queues(name) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let receive_by = |queues| b.run(|| set_queues(b.device(0), queues, 4)).unwrap();
    let addr = any_port(b);
    let open = || b.run(|| Builder::new(addr).unwrap().engine(Engine::Xdp).lanes(2).open());
    receive_by(2);
    let text = open().map(drop).unwrap_err().to_string();
    assert!(text.contains(b.device(0)) && text.contains("'ethtool -L'"), "{text}");
    assert!(!text.contains("CAP_"), "{text}");
    receive_by(4);
    let serving = echo(b, open().unwrap());
    client(a, a.ip4(0).into(), serving.addr).ping();
    assert_eq!(serving.stop().unwrap().total().delivered_by_bypass, 1);
}

/// Takes 13 s: three changes without an event, each of which the refresh of every four seconds
/// finds.
#[test]
fn netns_xdp_added_queues_are_served() {
    let Some(testbed) = testbed_of_fewer_queues("netns_xdp_added_queues_are_served") else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    // A veth device with a program needs as many receive queues as its peer has send queues, and
    // sockets keep theirs.
    let set = |host: &Host, receive: u32, send: u32| {
        let set = host.run(|| set_queues(host.device(0), receive, send));
        for host in [a, b].into_iter().filter(|_| set.is_ok()) {
            host.wait_for_carrier(0).unwrap();
        }
        set
    };
    set(a, 4, 1).unwrap();
    set(b, 1, 4).unwrap();
    let serving = echo(b, xdp(b, any_port(b), |_| ()));
    let handle = &serving.handle;
    assert!(is_balanced(handle, DEVICE, 1));
    let mut by_xdp = ping_all_queues(a, serving.addr);
    let mut others = 0;
    for queues in 2..=4 {
        set(b, queues, 4).unwrap();
        set(a, 4, queues).unwrap();
        // All of them, through the kernel or past it.
        others += ping_all_queues(a, serving.addr);
        wait_balanced(handle, DEVICE, queues);
        // A veth device applies the program to new queues only when it is set up the next time
        // (Linux 6.18).
        b.set_link(0, false).unwrap();
        b.set_link(0, true).unwrap();
        b.wait_for_carrier(0).unwrap();
        others += ping_until_recv_by_xdp(&client(a, a.ip4(0).into(), serving.addr), handle);
        by_xdp += ping_all_queues(a, serving.addr);
        // Two lanes, and those that are added.
        b.run(|| handle.add_lane()).unwrap();
        wait_balanced(handle, DEVICE, queues);
        by_xdp += ping_all_queues(a, serving.addr);
    }
    // None of the queues in use can be removed.
    set(a, 4, 1).unwrap();
    set(b, 1, 4).unwrap_err();
    assert!(is_balanced(handle, DEVICE, 4));
    let total = serving.stop().unwrap().total();
    assert_eq!(
        (total.arrived(), total.delivered, total.sent),
        (by_xdp + others, by_xdp + others, by_xdp + others)
    );
    assert!(total.delivered_by_bypass >= by_xdp, "fewer than {by_xdp} by XDP: {total:#?}");
}

/// Frames in the TX ring of a queue that the device does not send by stay there.
#[test]
fn netns_xdp_queues_that_cannot_send_are_left_to_the_kernel() {
    let name = "netns_xdp_queues_that_cannot_send_are_left_to_the_kernel";
    let Some(testbed) = testbed_of_fewer_queues(name) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    b.run(|| set_queues(b.device(0), 4, 2)).unwrap();
    b.wait_for_carrier(0).unwrap();
    let serving = echo(b, xdp(b, any_port(b), |_| ()));
    let all = ping_all_queues(a, serving.addr) + ping_all_queues(a, serving.addr);
    assert!(is_balanced(&serving.handle, DEVICE, 2));
    let total = serving.stop().unwrap().total();
    assert_eq!(
        (total.arrived(), total.delivered, total.sent, total.lost()),
        (all, all, all, 0),
        "{total:#?}"
    );
    assert!(total.delivered_by_bypass > 0 && total.delivered_by_bypass < all, "{total:#?}");
}

/// Takes 12 s: three changes without an event, as above.
#[test]
fn netns_xdp_a_changed_device_mac_is_used() {
    let name = "netns_xdp_a_changed_device_mac_is_used";
    let Some(testbed) = testbed(name, &ipv4_layout(2)) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let serving = echo(b, xdp(b, any_port(b), |_| ()));
    let handle = &serving.handle;
    let mut by_xdp = ping_all_queues(a, serving.addr);
    let mut others = 0;
    for last in 1..=3 {
        let mac = format!("02:77:00:00:00:{last:02x}");
        b.ip_batch(&format!("link set dev {DEVICE} address {mac}\n")).unwrap();
        let to = b.ip4(0);
        a.ip_batch(&format!("neighbour replace {to} lladdr {mac} dev {DEVICE} nud permanent\n")).unwrap();
        let client = client(a, a.ip4(0).into(), serving.addr);
        others += ping_until_recv_by_xdp(&client, handle);
        by_xdp += ping_all_queues(a, serving.addr);
    }
    let total = serving.stop().unwrap().total();
    let all = by_xdp + others;
    assert_eq!((total.arrived(), total.delivered, total.sent), (all, all, all), "{total:#?}");
    assert!(
        total.delivered_by_bypass >= by_xdp + 3 && total.delivered_by_bypass <= all,
        "{by_xdp}: {total:#?}"
    );
}
