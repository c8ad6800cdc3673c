//! Faults of engine `xdp`: killed processes, owners of queues, limits, privileges, neighbours and
//! devices that change under traffic.

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use crate::faults_support::{Child, Resource, Signal, is_child, report, set_limit, status, wait_for_parent};
use crate::netns_support::{client, echo, lane_driver, open, wait_for_arrived};
use crate::xdp_support::{PORT, programs, two_queues, xdp_builder};
use manylane::{Builder, Engine, ErrorKind, Socket};
use manylane_sys::packet::PacketSocket;
use manylane_sys::xsk;
use manylane_test_support::wait_for;
use manylane_tests::{Client, LaneDriver, Serving};
use manylane_wire::checksum::checksum;
use manylane_wire::ethernet::Mac;
use manylane_wire::frame::UdpFrame;
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

/// Shorter than the time after which a next hop that is not used is forgotten.
const UNUSED_MAX: Duration = Duration::from_secs(3);

fn serve_echo(socket: Socket) -> Serving {
    Serving::start(socket, |batch, out| {
        for datagram in batch {
            out.reply_borrowed(&datagram, datagram.payload());
        }
    })
}

#[test]
#[ignore = "started by netns_xdp_a_killed_process_leaves_nothing"]
fn child_serves_by_xdp() {
    if !is_child("child_serves_by_xdp") {
        return;
    }
    let mut builder = Builder::new("0.0.0.0:4242").unwrap();
    let serving = serve_echo(builder.engine(Engine::Xdp).lanes(2).open().unwrap());
    report("serving");
    wait_for_parent();
    serving.stop().unwrap();
}

#[test]
fn netns_xdp_a_killed_process_leaves_nothing() {
    let Some(testbed) = two_queues("netns_xdp_a_killed_process_leaves_nothing") else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let child = Child::start_in(b, "child_serves_by_xdp");
    assert_eq!(child.line(), "serving");
    assert!(!programs(b).is_empty());
    let client = client(a, a.ip(0, false), SocketAddr::new(b.ip4(0).into(), PORT));
    for _ in 0..100 {
        client.ping();
    }
    // The second process gets an error that names the first.
    let mut second = Builder::new((b.ip4(0), PORT + 1)).unwrap();
    let err = b.run(|| second.engine(Engine::Xdp).open().map(drop)).unwrap_err();
    assert_eq!(err.kind(), ErrorKind::InUse, "{err}");
    assert!(err.to_string().contains("XDP program"), "{err}");
    // During traffic; datagrams in flight and errors of the client are ignored.
    for _ in 0..100 {
        _ = client.socket.send(b"on its way");
    }
    child.signal(Signal::KILL);
    // It is named until it has ended. Then there is no obstacle: its port was opened first, and is
    // closed last by the kernel.
    // Before its last descriptor is closed, no process may be visible that has it open. Without
    // CONFIG_XDP_SOCKETS_DIAG, the kernel does not tell whose socket has a queue.
    let process = format!("process {} (", child.pid());
    let index = b.device_index(0).unwrap();
    let unknown = if b.run(|| xsk::owners(index, 0)).is_err() { "of another process" } else { &*process };
    let named = [&*process, "no visible process", "the kernel has not released ", unknown];
    let mut next = None;
    let open = || b.run(|| xdp_builder(b).open()).map(|socket| next = Some(socket));
    wait_for("the end of the child", open, |opened| {
        let is_named = |err: &str| named.iter().any(|name| err.contains(name));
        opened.as_ref().map_err(|err| assert!(is_named(&err.to_string()), "{err}")).is_ok()
    })
    .unwrap();
    let serving = b.run(|| serve_echo(next.unwrap()));
    child.kill();
    let client = crate::netns_support::client(a, a.ip(0, false), serving.addr);
    for _ in 0..100 {
        client.ping();
    }
    let total = serving.stop().unwrap().total();
    assert!(total.delivered_by_bypass > 0 && total.delivered >= 100, "{total:#?}");
    wait_for("the end of all programs", || programs(b), String::is_empty);
}

#[test]
#[ignore = "started by netns_xdp_too_little_memory_is_a_limit"]
fn child_has_no_memory_for_umem() {
    if !is_child("child_has_no_memory_for_umem") {
        return;
    }
    let open = || {
        let mut builder = Builder::new("0.0.0.0:4242").unwrap();
        builder.engine(Engine::Xdp).lanes(2).batch(8).gro(false).datagram_size(2048).xdp_ring(16_384).open()
    };
    set_limit(Resource::As, Some(status("VmSize") * 1024 + (40 << 20)));
    let err = open().map(drop).unwrap_err();
    set_limit(Resource::As, None);
    assert_eq!(err.kind(), ErrorKind::Limit, "{err}");
    // Nothing is left that would prevent a new start.
    open().map(drop).unwrap();
    report("done");
}

#[test]
fn netns_xdp_too_little_memory_is_a_limit() {
    let Some(testbed) = two_queues("netns_xdp_too_little_memory_is_a_limit") else { return };
    let b = testbed.host(1);
    let child = Child::start_in(b, "child_has_no_memory_for_umem");
    assert_eq!(child.line(), "done");
    child.finish();
}

#[test]
#[ignore = "started by netns_xdp_needs_no_privilege_after_open"]
fn child_drops_its_privileges() {
    if !is_child("child_drops_its_privileges") {
        return;
    }
    let mut builder = Builder::new("0.0.0.0:4242").unwrap();
    let socket = builder.engine(Engine::Xdp).lanes(2).open().unwrap();
    // Of this thread, and of the lanes' threads that it starts.
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none }).unwrap();
    let serving = serve_echo(socket);
    report("serving");
    wait_for_parent();
    let total = serving.stop().unwrap().total();
    assert_eq!((total.delivered, total.delivered_by_bypass, total.sent), (2500, 2500, 2500), "{total:#?}");
    report(&total.sent_by_bypass.to_string());
}

#[test]
fn netns_xdp_needs_no_privilege_after_open() {
    // More than the replies to the first peer and one later one: the next hops of all were
    // resolved. Again, as long as the thread that follows routes had no CPU for so many.
    wait_for("more than 1500 replies past the stack", sent_by_xdp_without_privileges, |sent| {
        sent.is_none_or(|sent| sent > 1500)
    });
}

/// Replies past the stack, of 2500; none without root.
fn sent_by_xdp_without_privileges() -> Option<u64> {
    let testbed = two_queues("netns_xdp_needs_no_privilege_after_open")?;
    let (a, b) = (testbed.host(0), testbed.host(1));
    let child = Child::start_in(b, "child_drops_its_privileges");
    assert_eq!(child.line(), "serving");
    let client = client(a, a.ip(0, false), SocketAddr::new(b.ip4(0).into(), PORT));
    for _ in 0..500 {
        client.ping();
    }
    // A peer that did not exist then, whose hardware address is not resolved yet; and one behind a
    // new route.
    a.add_address(0, "10.77.0.50".parse().unwrap()).unwrap();
    a.ip_batch(&format!("address add 192.0.2.1/32 dev {}\n", a.device(0))).unwrap();
    b.ip_batch(&format!("route add 192.0.2.1/32 via 10.77.0.50 dev {}\n", b.device(0))).unwrap();
    for ip in ["10.77.0.50", "192.0.2.1"] {
        let client =
            crate::netns_support::client(a, ip.parse().unwrap(), SocketAddr::new(b.ip4(0).into(), PORT));
        for _ in 0..1000 {
            client.ping();
        }
    }
    let child = child.release();
    let sent = child.line().parse().unwrap();
    child.finish();
    Some(sent)
}

#[test]
fn netns_xdp_a_changed_peer_mac_is_used() {
    let Some(testbed) = two_queues("netns_xdp_a_changed_peer_mac_is_used") else {
        return;
    };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let serving = echo(b, open(b, b.ip4(0).into(), |builder| _ = builder.engine(Engine::Xdp).lanes(2)));
    let client = client(a, a.ip(0, false), serving.addr);
    let by_xdp = || serving.handle.counters().total().sent_by_bypass;
    // The first replies leave through the kernel, until the next hop is known.
    let ping_by_xdp = || {
        client.ping();
        by_xdp()
    };
    wait_for("a datagram by XDP", ping_by_xdp, |count| *count > 0);
    for last in 1..=5 {
        let mac = format!("02:77:00:00:00:{last:02x}");
        a.ip_batch(&format!("link set dev {} address {mac}\n", a.device(0))).unwrap();
        b.ip_batch(&format!(
            "neighbour replace {} lladdr {mac} dev {} nud permanent\n",
            a.ip4(0),
            b.device(0)
        ))
        .unwrap();
        // A reply that is sent before the change has been followed goes to a stale address, as one
        // of the kernel would. The request is repeated.
        // By another client: a further reply may come at any time.
        let asker = crate::netns_support::client(a, a.ip(0, false), serving.addr);
        asker.socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        let ask = || {
            asker.send(b"there?");
            asker.try_recv()
        };
        wait_for("a reply", ask, Option::is_some);
        let before = by_xdp();
        wait_for("a datagram by XDP", ping_by_xdp, |count| *count > before);
    }
    let total = serving.stop().unwrap().total();
    assert_eq!((total.delivered, total.lost()), (total.arrived(), 0), "{total:#?}");
}

/// Changes that do not concern a peer: each reply still leaves past the stack.
#[test]
fn netns_xdp_unrelated_address_and_link_changes_keep_replies() {
    let Some(testbed) = two_queues("netns_xdp_unrelated_address_and_link_changes_keep_replies") else {
        return;
    };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let everywhere = "0.0.0.0".parse().unwrap();
    let mut driver = lane_driver(b, open(b, everywhere, |builder| _ = builder.engine(Engine::Xdp).lanes(2)));
    let port = driver.addr().port();
    let one = client(a, a.ip4(0).into(), SocketAddr::new(b.ip4(0).into(), port));
    // One reply to a neighbour that has become stale would take the socket, by design.
    let mac = a.mac(0).map(|byte| format!("{byte:02x}")).join(":");
    let known = format!("neighbour replace {} lladdr {mac} dev {} nud permanent\n", a.ip4(0), b.device(0));
    b.ip_batch(&known).unwrap();
    wait_for("a reply by XDP", || ping(&mut driver, &one), |(_, by_xdp)| *by_xdp);
    let mut last = Instant::now();
    let mut assert_by_xdp = |driver: &mut LaneDriver, lines: &str| {
        let before = std::mem::replace(&mut last, Instant::now());
        let seen = ping(driver, &one);
        if before.elapsed() < UNUSED_MAX {
            assert_eq!(seen, (true, true), "{lines}");
        } else {
            // This thread had no CPU for so long that the next hop may have been forgotten.
            wait_for("a reply by XDP again", || ping(driver, &one), |(_, by_xdp)| *by_xdp);
        }
    };
    let device = b.device(0);
    for lines in [
        // An address is usable only after duplicate address detection, which takes a second or
        // two.
        format!("address add fd77::50/64 dev {device}\n"),
        "link add there type veth peer name here\nlink set there up\nlink set here up\n".to_owned(),
        "address add 192.0.2.77/24 dev there\n".to_owned(),
        "link delete there\n".to_owned(),
        format!("address add 10.77.0.77/24 dev {device}\n"),
    ] {
        b.ip_batch(&lines).unwrap();
        thread::scope(|scope| {
            let settling = scope.spawn(|| b.wait_for_addrs(0).unwrap());
            while !settling.is_finished() {
                assert_by_xdp(&mut driver, &lines);
            }
        });
    }
    // The last change is followed now, and so are all earlier ones.
    let other = client(a, a.ip4(0).into(), SocketAddr::new("10.77.0.77".parse().unwrap(), port));
    wait_for("a reply", || ping(&mut driver, &other), |(arrived, _)| *arrived);
    for _ in 0..50 {
        assert_by_xdp(&mut driver, "all of them");
    }
}

/// A request and its reply, by hand, so that they are counted. Returns whether they went past the
/// stack.
fn ping(driver: &mut LaneDriver, client: &Client) -> (bool, bool) {
    let before = driver.handle.counters().total();
    client.send(b"ping");
    driver.echo(1);
    client.expect(b"ping");
    let after = driver.handle.counters().total();
    assert_eq!((after.delivered - before.delivered, after.sent - before.sent), (1, 1), "{after:#?}");
    (after.delivered_by_bypass > before.delivered_by_bypass, after.sent_by_bypass > before.sent_by_bypass)
}

#[test]
fn netns_xdp_options_and_extension_headers_use_the_companion() {
    let Some(testbed) = two_queues("netns_xdp_options_and_extension_headers_use_the_companion") else {
        return;
    };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let serving = echo(b, open(b, "::".parse().unwrap(), |builder| _ = builder.engine(Engine::Xdp).lanes(2)));
    let port = serving.addr.port();
    let frame = |ipv6: bool| {
        let to = SocketAddr::new(b.ip(0, ipv6), port);
        let from = SocketAddr::new(a.ip(0, ipv6), 4444);
        let plan =
            UdpFrame { payload: b"with more", ..UdpFrame::new(Mac(a.mac(0)), Mac(b.mac(0)), from, to) };
        let mut bytes = vec![0; plan.len()];
        plan.write(&mut bytes).unwrap();
        bytes
    };
    // IPv4 with a word of options: no operation, three times, and the end.
    let mut options = frame(false);
    options.splice(34..34, [1, 1, 1, 0]);
    options[14] = 0x46;
    let total = u16::from_be_bytes([options[16], options[17]]) + 4;
    options[16..18].copy_from_slice(&total.to_be_bytes());
    options[24..26].fill(0);
    let sum = checksum(&options[14..38]);
    options[24..26].copy_from_slice(&sum.to_be_bytes());
    // IPv6 with a hop-by-hop header that contains only padding (PadN of four bytes), and one with
    // destination options.
    let extended = |kind: u8| {
        let mut bytes = frame(true);
        bytes.splice(54..54, [17, 0, 1, 4, 0, 0, 0, 0]);
        let length = u16::from_be_bytes([bytes[18], bytes[19]]) + 8;
        bytes[18..20].copy_from_slice(&length.to_be_bytes());
        bytes[20] = kind;
        bytes
    };
    let socket = a.run(|| PacketSocket::open(a.device_index(0).unwrap())).unwrap();
    for frame in [options, extended(0), extended(60), frame(false), frame(true)] {
        for _ in 0..10 {
            socket.send(&frame).unwrap();
        }
    }
    wait_for_arrived(&serving.handle, 50);
    let total = serving.stop().unwrap().total();
    assert_eq!((total.delivered, total.delivered_by_bypass), (50, 20), "{total:#?}");
}

#[test]
fn netns_xdp_survives_link_flaps() {
    let Some(testbed) = two_queues("netns_xdp_survives_link_flaps") else { return };
    let (a, b) = (testbed.host(0), testbed.host(1));
    let serving = echo(b, open(b, b.ip4(0).into(), |builder| _ = builder.engine(Engine::Xdp).lanes(2)));
    let client = client(a, a.ip(0, false), serving.addr);
    for _ in 0..3 {
        for _ in 0..100 {
            client.ping();
        }
        b.set_link(0, false).unwrap();
        b.set_link(0, true).unwrap();
        b.wait_for_carrier(0).unwrap();
        a.wait_for_carrier(0).unwrap();
    }
    client.ping();
    let total = serving.stop().unwrap().total();
    assert_eq!((total.delivered, total.lost()), (301, 0), "{total:#?}");
    assert!(total.delivered_by_bypass > 0);
}
