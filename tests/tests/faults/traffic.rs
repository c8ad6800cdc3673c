//! Faults while traffic runs: signals, floods, closed peers; and invalid options.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use crate::faults_support::{Child, Signal, is_child, report, wait_for_parent};
use manylane::{Builder, ErrorKind, Placement, Received, Steering, SteeringBackend};
use manylane_tests::{Client, LaneDriver, Serving, TEST_TIMEOUT, backends, pattern, send_and_wait};

#[test]
#[ignore = "started by loopback_fault_a_signal_only_ends_a_wait"]
fn child_waits_for_signals() {
    if !is_child("child_waits_for_signals") {
        return;
    }
    let socket = Builder::new("127.0.0.1:0").unwrap().lanes(1).open().unwrap();
    report(&socket.local_addr().to_string());
    let handle = socket.handle();
    let mut lane = socket.into_lanes().remove(0);
    loop {
        let Received { batch, mut out } = lane.recv_timeout(TEST_TIMEOUT).unwrap();
        if batch.is_empty() {
            report("nothing");
            continue;
        }
        for datagram in batch {
            out.reply(&datagram, datagram.payload());
        }
        break;
    }
    let total = handle.counters().total();
    assert_eq!((total.recv_errors, total.batches, total.delivered), (0, 1, 1), "{total:?}");
    wait_for_parent();
}

#[test]
fn loopback_fault_a_signal_only_ends_a_wait() {
    let child = Child::start("child_waits_for_signals", None);
    let addr = child.line().parse().unwrap();
    let (mut ended, start) = (0, Instant::now());
    while ended < 10 && start.elapsed() < TEST_TIMEOUT {
        // A signal while the child does not sleep interrupts no wait, so that it is repeated.
        child.signal(Signal::STOP);
        child.signal(Signal::CONT);
        ended +=
            usize::from(child.line_within(Duration::from_millis(20)).is_some_and(|line| line == "nothing"));
    }
    assert_eq!(ended, 10);
    Client::to(addr).ping();
    child.finish();
}

#[test]
#[ignore = "started by loopback_fault_signals_do_not_disturb_serving"]
fn child_serves_through_signals() {
    if !is_child("child_serves_through_signals") {
        return;
    }
    let socket = Builder::new("127.0.0.1:0").unwrap().lanes(4).open().unwrap();
    let serving = Serving::echo(socket);
    report(&serving.addr.to_string());
    wait_for_parent();
    let total = serving.stop().unwrap().total();
    assert_eq!((total.delivered, total.sent, total.recv_errors, total.lost()), (501, 501, 0, 0));
}

#[test]
fn loopback_fault_signals_do_not_disturb_serving() {
    let child = Child::start("child_serves_through_signals", None);
    let addr = child.line().parse().unwrap();
    for round in 0..50 {
        let clients: Vec<Client> = (0..10).map(|_| Client::to(addr)).collect();
        clients.iter().for_each(|client| client.send(b"through signals"));
        if round % 2 == 0 {
            child.signal(Signal::STOP);
            child.signal(Signal::CONT);
        }
        clients.iter().for_each(|client| client.expect(b"through signals"));
    }
    child.finish();
}

/// Sends `count` datagrams of `size` bytes as fast as possible to lanes with small queues, and
/// checks that each was delivered or counted as dropped.
fn flood(size: usize, count: u64, by: SteeringBackend) {
    let mut builder = Builder::new("127.0.0.1:0").unwrap();
    let socket =
        builder.lanes(2).steering(Steering::Random).steering_backend(by).recv_buffer(200_000).open().unwrap();
    let expected = pattern(1, size);
    let payload = expected.clone();
    let serving = Serving::start(socket, move |batch, _| {
        for datagram in batch {
            assert!(datagram.payload() == expected && !datagram.is_truncated(), "{datagram:?}");
        }
    });
    let client = Client::to(serving.addr);
    send_and_wait(|| (0..count).for_each(|_| client.send(&payload)));
    let total = serving.stop().unwrap().total();
    assert_eq!(total.delivered + total.kernel_dropped, count, "{total:?}");
    assert_eq!((total.arrived(), total.discarded, total.truncated, total.recv_errors), (count, 0, 0, 0));
    assert_eq!(total.delivered_bytes, total.delivered * size as u64);
    assert!(total.steered.is_none_or(|steered| steered == count), "{total:?}");
}

#[test]
fn loopback_fault_a_flood_of_empty_datagrams_is_counted() {
    let all = [SteeringBackend::Ebpf, SteeringBackend::ClassicBpf, SteeringBackend::Kernel];
    for by in backends("loopback_fault_a_flood_of_empty_datagrams_is_counted", &all) {
        flood(0, 30_000, by);
    }
}

#[test]
fn loopback_fault_a_flood_of_the_largest_datagrams_is_counted() {
    let all = [SteeringBackend::Ebpf, SteeringBackend::ClassicBpf, SteeringBackend::Kernel];
    for by in backends("loopback_fault_a_flood_of_the_largest_datagrams_is_counted", &all) {
        flood(65_507, 3_000, by);
    }
}

#[test]
fn loopback_fault_drops_of_an_unread_queue_are_counted() {
    const DATAGRAMS: u64 = 5_000;
    let mut builder = Builder::new("127.0.0.1:0").unwrap();
    let mut driver = LaneDriver::new(builder.lanes(1).recv_buffer(20_000).open().unwrap());
    let client = Client::to(driver.addr());
    send_and_wait(|| (0..DATAGRAMS).for_each(|_| client.send(&[1; 100])));
    let dropped = driver.handle.counters().total().kernel_dropped;
    assert!(dropped > 0 && dropped < DATAGRAMS, "{dropped}");
    // None is received: datagrams that are queued when the lane is dropped are discarded and
    // counted.
    driver.lanes.clear();
    let counters = driver.handle.counters();
    assert!(counters.lanes.is_empty());
    assert_eq!(counters.closed.discarded, DATAGRAMS - dropped);
    assert_eq!((counters.closed.kernel_dropped, counters.closed.arrived()), (dropped, DATAGRAMS));
}

#[test]
fn loopback_fault_a_closed_peer_does_not_affect_others() {
    let mut driver = LaneDriver::new(Builder::new("127.0.0.1:0").unwrap().lanes(1).open().unwrap());
    let client = Client::to(driver.addr());
    for round in 0..20 {
        let gone = Client::to(driver.addr());
        gone.send(b"no answer, please");
        drop(gone);
        client.send(&pattern(round, 50));
        driver.echo(2);
        client.expect(&pattern(round, 50));
    }
    let total = driver.handle.counters().total();
    assert_eq!((total.delivered, total.offered, total.sent), (40, 40, 40));
    assert_eq!((total.lost(), total.recv_errors), (0, 0));
}

#[test]
fn loopback_fault_oversized_replies_are_counted() {
    let mut driver = LaneDriver::new(Builder::new("127.0.0.1:0").unwrap().lanes(1).open().unwrap());
    let client = Client::to(driver.addr());
    client.send(b"tell me everything");
    let everything = vec![9; 65_508];
    driver.receive(1, |_, datagram, out| {
        out.reply(&datagram, &everything);
        out.reply_with(&datagram, 70_000, |_| 10);
        out.reply(&datagram, &everything[..65_507]);
    });
    assert_eq!(client.recv().len(), 65_507);
    let total = driver.handle.counters().total();
    assert_eq!((total.offered, total.sent, total.lost_too_large, total.lost()), (3, 1, 2, 2));
}

/// The header of IPv6 does not count: 20 bytes more than over IPv4, but not for an IPv4 peer of the
/// same socket.
#[test]
fn loopback_fault_the_datagram_limit_depends_on_the_family() {
    if !manylane_tests::need_ipv6("loopback_fault_the_datagram_limit_depends_on_the_family") {
        return;
    }
    const PAYLOAD_BYTES_MAX: usize = 65_527;
    let everything = vec![9; PAYLOAD_BYTES_MAX + 1];
    let mut driver = LaneDriver::new(Builder::new("[::]:0").unwrap().lanes(1).open().unwrap());
    let port = driver.addr().port();
    for (ip, len_max) in [("::1", PAYLOAD_BYTES_MAX), ("127.0.0.1", 65_507)] {
        let client = Client::to(SocketAddr::new(ip.parse().unwrap(), port));
        client.send(b"tell me everything");
        driver.receive(1, |_, datagram, out| {
            out.reply(&datagram, &everything[..len_max + 1]);
            out.reply_with(&datagram, len_max + 1, |_| 10);
            out.reply(&datagram, &everything[..len_max]);
            out.reply_with(&datagram, len_max, |space| space.len());
        });
        assert_eq!((client.recv().len(), client.recv().len()), (len_max, len_max), "{ip}");
    }
    let total = driver.handle.counters().total();
    assert_eq!((total.offered, total.sent, total.lost_too_large, total.lost()), (8, 4, 4, 4));
}

#[test]
fn loopback_fault_nonlocal_addresses_are_refused() {
    // Addresses for documentation (RFC 5737, RFC 3849): no machine has them.
    for addr in ["192.0.2.1:0", "[2001:db8::1]:0"] {
        let err = Builder::new(addr).unwrap().open().map(drop).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Address, "{err}");
        assert!(err.to_string().contains(&format!("binding {addr}")), "{err}");
    }
    for addr in ["127.0.0.1", "127.0.0.1:65536", "[::1:7", ":", "", "host.invalid:7"] {
        assert_eq!(Builder::new(addr).map(drop).unwrap_err().kind(), ErrorKind::Address, "{addr}");
    }
}

#[test]
fn loopback_fault_invalid_options_open_nothing() {
    let port = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
    let refused = |change: &dyn Fn(&mut Builder), names: &str| {
        let mut builder = Builder::new((Ipv4Addr::LOCALHOST, port)).unwrap();
        change(&mut builder);
        let err = builder.open().map(drop).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::Config, "{err}");
        assert!(err.to_string().contains(names), "{names}: {err}");
    };
    refused(&|b| _ = b.lanes(0), "lanes");
    refused(&|b| _ = b.lanes(257), "lanes");
    refused(&|b| _ = b.batch(0), "batch");
    refused(&|b| _ = b.batch(1025), "batch");
    refused(&|b| _ = b.datagram_size(0), "datagram_size");
    refused(&|b| _ = b.datagram_size(65_536), "datagram_size");
    refused(&|b| _ = b.send_buffer(usize::MAX), "send_buffer");
    refused(&|b| _ = b.only_v6(true), "only_v6");
    refused(&|b| _ = b.reuse_port(true).steering_backend(SteeringBackend::Ebpf), "reuse_port");
    refused(&|b| _ = b.reuse_port(true).steering_backend(SteeringBackend::ClassicBpf), "reuse_port");
    refused(&|b| _ = b.steering(Steering::Key { offset: 0, len: 0 }), "key");
    refused(&|b| _ = b.steering(Steering::Key { offset: 9, len: 65 }), "key");
    refused(&|b| _ = b.placement(Placement::List(Vec::new())), "placement");
    refused(&|b| _ = b.placement(Placement::List(vec![0, 1 << 20])), "placement");
    // None of them has bound the port.
    Builder::new((Ipv4Addr::LOCALHOST, port)).unwrap().open().unwrap();
}
