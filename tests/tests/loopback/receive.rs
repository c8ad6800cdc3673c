//! Receiving: every datagram whole, once, with its peer and the address that it was sent to.

use std::net::{SocketAddr, UdpSocket};

use manylane_testbed::skip;
use manylane_tests::{
    Client, LaneDriver, Variant, bind_peer, map_ip, need_ipv6, on_every_engine, on_every_variant, pattern,
    send_and_wait, v4_mapped,
};

/// Boundary sizes: empty, words, cache lines, MTUs, pages, the largest.
const SIZES: [usize; 26] = [
    0, 1, 2, 3, 4, 7, 8, 9, 63, 64, 65, 127, 512, 1000, 1400, 1472, 1473, 1500, 4095, 4096, 4097, 9000,
    16_384, 32_768, 65_506, 65_507,
];

fn open(variant: &Variant, addr: &str) -> LaneDriver {
    LaneDriver::new(variant.builder(addr).open().unwrap())
}

/// Sends each size, checks the received datagram, sends it back, checks the reply.
fn echo_of_every_size(driver: &mut LaneDriver, client: &Client, peer: SocketAddr, local: SocketAddr) {
    for (seed, len) in SIZES.into_iter().enumerate() {
        let payload = pattern(seed, len);
        client.send(&payload);
        driver.receive(1, |_, datagram, out| {
            assert!(datagram.payload() == payload, "{len} bytes");
            assert_eq!((datagram.peer(), datagram.local()), (peer, local));
            assert_eq!((datagram.full_len(), datagram.is_truncated()), (len, false));
            out.reply(&datagram, datagram.payload());
        });
        client.expect(&payload);
    }
    assert!(driver.is_idle() && client.is_idle());
}

fn assert_counts(driver: &LaneDriver, clients: u64) {
    let total = driver.handle.counters().total();
    let bytes = clients * SIZES.iter().sum::<usize>() as u64;
    let sizes = clients * SIZES.len() as u64;
    assert_eq!((total.delivered, total.delivered_bytes, total.messages), (sizes, bytes, sizes));
    assert_eq!((total.offered, total.sent, total.sent_bytes, total.lost()), (sizes, sizes, bytes, 0));
    assert_eq!((total.arrived(), total.truncated, total.gro_messages, total.recv_errors), (sizes, 0, 0, 0));
}

on_every_variant! {
    fn every_size_at_an_ipv4_address(variant) {
        let mut driver = open(variant, "127.0.0.1:0");
        let client = Client::to(driver.addr());
        let (peer, local) = (client.addr(), driver.addr());
        echo_of_every_size(&mut driver, &client, peer, local);
        assert_counts(&driver, 1);
    }

    fn every_size_at_an_ipv6_address(variant) {
        if !need_ipv6(variant.test) {
            return;
        }
        let mut driver = open(variant, "[::1]:0");
        let client = Client::to(driver.addr());
        let (peer, local) = (client.addr(), driver.addr());
        echo_of_every_size(&mut driver, &client, peer, local);
        assert_counts(&driver, 1);
    }

    fn an_ipv4_wildcard_replies_from_the_destination_address(variant) {
        let mut driver = open(variant, "0.0.0.0:0");
        for ip in ["127.0.0.1", "127.0.0.2", "127.0.0.3"] {
            let server = map_ip(ip, driver.addr().port());
            let client = Client::to(server);
            let peer = client.addr();
            echo_of_every_size(&mut driver, &client, peer, server);
        }
        assert_counts(&driver, 3);
    }

    fn a_dual_stack_wildcard_replies_from_the_destination_address(variant) {
        if !need_ipv6(variant.test) {
            return;
        }
        let mut driver = open(variant, "[::]:0");
        for ip in ["127.0.0.1", "::1", "127.0.0.2", "127.0.0.3"] {
            let server = map_ip(ip, driver.addr().port());
            let client = Client::to(server);
            let (peer, local) = (v4_mapped(client.addr()), v4_mapped(server));
            echo_of_every_size(&mut driver, &client, peer, local);
        }
        assert_counts(&driver, 4);
    }

    fn batches_from_many_peers_deliver_each_datagram_once(variant) {
        for batch in [1, 2, 7, 64, 1024] {
            let mut driver = LaneDriver::new(variant.builder("127.0.0.1:0").batch(batch).open().unwrap());
            let clients: Vec<_> = (0..5).map(|_| Client::to(driver.addr())).collect();
            let of = |number: usize| (&clients[number % 5], pattern(number, number * 7 % 300));
            // From one CPU, because the kernel may deliver datagrams from two of them in
            // another order.
            send_and_wait(|| {
                for (client, payload) in (0..150).map(of) {
                    client.send(&payload);
                }
            });
            let mut due: Vec<_> = (0..150).map(of).map(|(client, payload)| (client.addr(), payload)).collect();
            let mut got: Vec<_> =
                driver.recv_all(due.len()).into_iter().map(|got| (got.peer, got.payload)).collect();
            // In order for each peer; lanes have no order among each other. With generic XDP, a
            // datagram whose checksum looks partial, one in 65,535, comes through the kernel and
            // so in another order.
            let counts = driver.handle.frame_counts();
            let passed = counts.iter().any(|(_, outcome, n)| *outcome == "partial_checksum" && *n > 0);
            for client in clients.iter().filter(|_| !passed) {
                let of = |all: &[(SocketAddr, Vec<u8>)]| -> Vec<_> {
                    all.iter().filter(|(peer, _)| *peer == client.addr()).cloned().collect()
                };
                assert!(of(&got) == of(&due), "batch {batch}");
            }
            got.sort();
            due.sort();
            assert!(got == due, "batch {batch}");
            assert!(driver.is_idle());
            if batch == 1 {
                assert_eq!(driver.handle.counters().total().batches, 150);
            }
        }
    }
}

/// IPv6 carries 20 bytes more than IPv4, there and back.
#[test]
fn loopback_the_largest_ipv6_datagram_is_not_truncated() {
    if !need_ipv6("loopback_the_largest_ipv6_datagram_is_not_truncated") {
        return;
    }
    for gro in [true, false] {
        let builder = &mut manylane::Builder::new("[::1]:0").unwrap();
        let mut driver = LaneDriver::new(builder.gro(gro).open().unwrap());
        let client = Client::to(driver.addr());
        for len in [65_508, 65_527] {
            let payload = pattern(1, len);
            client.send(&payload);
            driver.receive(1, |_, datagram, out| {
                assert!(datagram.payload() == payload && !datagram.is_truncated());
                out.reply(&datagram, datagram.payload());
                out.reply_borrowed(&datagram, datagram.payload());
            });
            client.expect(&payload);
            client.expect(&payload);
        }
        let total = driver.handle.counters().total();
        assert_eq!((total.offered, total.sent, total.lost_too_large), (4, 4, 0));
        assert!(client.is_idle());
    }
}

/// Two sockets of one process are independent.
#[test]
fn loopback_two_sockets_at_once() {
    let open = || LaneDriver::new(manylane::Builder::new("127.0.0.1:0").unwrap().lanes(2).open().unwrap());
    let (mut one, mut two) = (open(), open());
    let clients = [Client::to(one.addr()), Client::to(two.addr())];
    for round in 0..50 {
        clients[0].send(&pattern(round, 40));
        clients[1].send(&pattern(round, 50));
        two.echo(1);
        one.echo(1);
        clients[0].expect(&pattern(round, 40));
        clients[1].expect(&pattern(round, 50));
    }
    drop(one);
    clients[1].send(b"still there");
    two.echo(1);
    clients[1].expect(b"still there");
    assert_eq!(two.handle.counters().total().delivered, 51);
}

on_every_engine! {
    fn only_v6_leaves_ipv4_to_others(variant) {
        if !need_ipv6(variant.test) {
            return;
        }
        let mut builder = variant.builder("[::]:0");
        builder.lanes(2).only_v6(true);
        // Again, as long as another test has the port over IPv4.
        let mut ports = (0..10).map(|_| {
            let driver = LaneDriver::new(builder.open().unwrap());
            let other = UdpSocket::bind(("0.0.0.0", driver.addr().port()));
            (driver, other)
        });
        let (mut driver, other) = ports.find(|(_, other)| other.is_ok()).expect("a port that is free over IPv4");
        let other = other.unwrap();
        let client = Client::to(map_ip("::1", driver.addr().port()));
        client.send(b"six");
        driver.echo(1);
        client.expect(b"six");
        let client = Client::to(map_ip("127.0.0.1", driver.addr().port()));
        client.send(b"four");
        other.set_read_timeout(Some(manylane_tests::TEST_TIMEOUT)).unwrap();
        assert_eq!(manylane_tests::retry_eintr(|| other.recv(&mut [0; 10])).unwrap(), 4);
        assert!(driver.is_idle());
    }

    /// A socket with a specific address does not receive datagrams to another one of the machine.
    fn a_specific_address_receives_only_its_own(variant) {
        let mut builder = variant.builder("127.0.0.2:0");
        let mut driver = LaneDriver::new(builder.lanes(2).open().unwrap());
        let port = driver.addr().port();
        let Ok(other) = UdpSocket::bind(map_ip("127.0.0.3", port)) else {
            let why = "another process of this machine has the port on 127.0.0.3";
            assert!(skip::need(variant.test, false, why));
            return;
        };
        let client = bind_peer("127.0.0.1:0".parse().unwrap());
        client.set_read_timeout(Some(manylane_tests::TEST_TIMEOUT)).unwrap();
        client.send_to(b"three", map_ip("127.0.0.3", port)).unwrap();
        client.send_to(b"two", map_ip("127.0.0.2", port)).unwrap();
        assert_eq!(manylane_tests::retry_eintr(|| other.recv(&mut [0; 10])).unwrap(), 5);
        driver.echo(1);
        let mut buffer = [0; 10];
        let (len, from) = manylane_tests::retry_eintr(|| client.recv_from(&mut buffer)).unwrap();
        assert_eq!((&buffer[..len], from), (&b"two"[..], map_ip("127.0.0.2", port)));
        assert!(driver.is_idle());
    }
}
