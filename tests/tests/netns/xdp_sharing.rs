//! Engine `xdp`: several sockets of one process on the same queues, and frames with VLAN tags.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd as _;

use crate::netns_support::{client, echo, sink, wait_for_arrived, wait_until};
use crate::xdp_support::{
    any_port, assert_all_by_xdp, assert_replies_by_xdp, frame, ipv4_layout, ping_until_sent_by_xdp, testbed,
    testbed_of_live_sender, xdp, xdp_count,
};
use manylane_measure::{Traffic, Until};
use manylane_sys::packet::PacketSocket;
use manylane_sys::sock;
use manylane_testbed::generator::LiveSender;
use manylane_tests::{Serving, TEST_TIMEOUT};
use manylane_wire::ethernet::{Mac, Vlan, ether_type};
use manylane_wire::frame::Frame;

#[test]
fn netns_xdp_sockets_of_a_process_receive_only_their_own() {
    const DATAGRAMS_EACH: u64 = 50;
    const CLIENTS: u64 = 4;
    let Some(testbed) = testbed("netns_xdp_sockets_of_a_process_receive_only_their_own", &ipv4_layout(4))
    else {
        return;
    };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let extra: IpAddr = "10.77.0.99".parse().unwrap();
    b.add_address(0, extra).unwrap();
    for sockets in [2, 3] {
        let open = |addr: SocketAddr| {
            echo(b, xdp(b, addr, |builder| _ = builder.xdp_sockets(sockets).xdp_ring(512)))
        };
        // Another port of the same address; and the same port of another address.
        let first = open(any_port(b));
        let port = first.addr.port();
        let mut all = vec![first, open(SocketAddr::new(extra, port))];
        if sockets == 3 {
            all.push(open(any_port(b)));
        }
        let mut firsts = Vec::new();
        for serving in &all {
            assert_eq!(serving.handle.device_queues().len(), 4);
            firsts.push(ping_until_sent_by_xdp(&client(a, a.ip4(0).into(), serving.addr), &serving.handle));
        }
        std::thread::scope(|scope| {
            for addr in all.iter().map(|serving| serving.addr) {
                scope.spawn(move || {
                    for _ in 0..CLIENTS {
                        let client = client(a, a.ip4(0).into(), addr);
                        (0..DATAGRAMS_EACH).for_each(|_| client.ping());
                    }
                });
            }
        });
        for (serving, first) in all.into_iter().zip(firsts) {
            let total = serving.stop().unwrap().total();
            assert_all_by_xdp(&total, CLIENTS * DATAGRAMS_EACH + first);
            assert_replies_by_xdp(&total, first);
        }
    }
}

#[test]
fn netns_xdp_closing_a_socket_does_not_affect_others() {
    const DATAGRAMS: u64 = 8_000;
    const ROUNDS: u64 = 5;
    let name = "netns_xdp_closing_a_socket_does_not_affect_others";
    let Some(testbed) = testbed_of_live_sender(name, &ipv4_layout(2)) else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    // Rings for all of them, so that a busy machine loses nothing.
    let open = || xdp(b, any_port(b), |builder| _ = builder.xdp_ring(8192).xdp_sockets(2));
    let one = |serving: &Serving| {
        let client = client(a, a.ip4(0).into(), serving.addr);
        let first = ping_until_sent_by_xdp(&client, &serving.handle);
        (0..20).for_each(|_| client.ping());
        first
    };
    // The socket that opened a queue closes it, while the other one stays.
    let opener = echo(b, open());
    let stays = sink(b, open());
    let traffic = Traffic { flows: 50, pps: Some(2_500.0), ..Traffic::new(stays.addr, 20) };
    let mut sender = LiveSender::new(a, b, 0, &traffic).unwrap();
    let mut other = Some(opener);
    std::thread::scope(|scope| {
        let sending = scope.spawn(|| sender.send(Until::Count(DATAGRAMS)).unwrap().datagrams);
        for round in 1..=ROUNDS {
            let serving = other.take().unwrap_or_else(|| echo(b, open()));
            assert_eq!(serving.handle.device_queues().len(), 2);
            let first = one(&serving);
            let due = DATAGRAMS / (ROUNDS + 1) * round;
            wait_for_arrived(&stays.handle, due);
            let total = serving.stop().unwrap().total();
            assert_all_by_xdp(&total, 20 + first);
            assert_replies_by_xdp(&total, first);
        }
        assert_eq!(sending.join().unwrap(), DATAGRAMS);
    });
    wait_for_arrived(&stays.handle, DATAGRAMS);
    assert_all_by_xdp(&stays.stop().unwrap().total(), DATAGRAMS);
}

fn tag(ether_type: u16, control: u16) -> Option<Vlan> {
    Some(Vlan { ether_type, tci: control })
}

#[test]
fn netns_xdp_receives_and_replies_on_configured_vlans() {
    const DATAGRAMS_EACH: u64 = 20;
    let Some(testbed) = testbed("netns_xdp_receives_and_replies_on_configured_vlans", &ipv4_layout(2)) else {
        return;
    };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let with = echo(
        b,
        xdp(b, any_port(b), |builder| {
            _ = builder.xdp_vlan("5".parse().unwrap()).xdp_vlan("100.5".parse().unwrap());
        }),
    );
    let without = echo(b, xdp(b, any_port(b), |_| ()));
    let first = ping_until_sent_by_xdp(&client(a, a.ip4(0).into(), with.addr), &with.handle);

    // The kernel must not answer the replies by ICMP.
    let held = a.run(|| UdpSocket::bind((a.ip4(0), 0))).unwrap();
    let from = held.local_addr().unwrap();
    let socket = a.run(|| PacketSocket::listen(a.device_index(0).unwrap())).unwrap();
    sock::set_recv_timeout(socket.as_fd(), TEST_TIMEOUT).unwrap();
    let (vlan, service) = (ether_type::VLAN, ether_type::SERVICE_VLAN);
    let before = xdp_count(&with.handle, "other_vlan");
    // With priorities, which are in the replies, too. ID 0 is not a VLAN.
    for tags in [
        [tag(vlan, 5), None],
        [tag(vlan, 0x6005), None],
        [tag(service, 100), tag(vlan, 5)],
        [tag(vlan, 100), tag(vlan, 0x2005)],
        [tag(vlan, 0xa000), None],
        [None, None],
    ] {
        for number in 0..DATAGRAMS_EACH {
            let payload = [b"in a VLAN ", &number.to_be_bytes()[..]].concat();
            let sent = frame((a, from), (b, with.addr), &payload, |plan| plan.vlans = tags);
            socket.send(&sent).unwrap();
            let got = loop {
                let got = socket.receive().unwrap();
                // The socket also receives our own frames.
                if got.get(6..12) == Some(&b.mac(0)) {
                    break got;
                }
            };
            let got = Frame::parse(&got).unwrap();
            assert_eq!((got.ethernet.vlans, got.ethernet.destination), (tags, Mac(a.mac(0))));
            assert_eq!(got.endpoints(), Some((with.addr, from)));
            assert_eq!(got.udp().unwrap().payload, payload);
            assert!(got.has_valid_checksums());
        }
    }
    assert_eq!(xdp_count(&with.handle, "other_vlan"), before);
    // The kernel of the other host has no such device, and drops them.
    let refused = [
        (&with, [tag(vlan, 7), None]),
        (&with, [tag(vlan, 100), None]),
        (&with, [tag(service, 5), None]),
        (&with, [tag(service, 100), tag(vlan, 7)]),
        (&with, [tag(vlan, 5), tag(vlan, 100)]),
        (&without, [tag(vlan, 5), None]),
        (&without, [tag(service, 100), tag(vlan, 5)]),
    ];
    for (serving, tags) in &refused {
        for _ in 0..DATAGRAMS_EACH {
            let sent = frame((a, from), (b, serving.addr), b"not ours", |plan| plan.vlans = *tags);
            socket.send(&sent).unwrap();
        }
    }
    let due = before + DATAGRAMS_EACH * refused.len() as u64;
    wait_until("all frames with a tag", &with.handle, || xdp_count(&with.handle, "other_vlan") >= due);
    assert_eq!(xdp_count(&with.handle, "other_vlan"), due);
    // Frames without a tag, or with a priority only, are for every socket.
    for tags in [[None, None], [tag(vlan, 0xe000), None]] {
        let sent = frame((a, from), (b, without.addr), b"everybody's", |plan| plan.vlans = tags);
        socket.send(&sent).unwrap();
    }
    wait_for_arrived(&without.handle, 2);
    assert_all_by_xdp(&without.stop().unwrap().total(), 2);
    let total = with.stop().unwrap().total();
    assert_all_by_xdp(&total, first + 6 * DATAGRAMS_EACH);
    assert_replies_by_xdp(&total, first);
}
