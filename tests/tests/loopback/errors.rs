//! Unreachable peers: counted with the reason, without effect on other peers.

use std::net::{SocketAddr, SocketAddrV6};

use manylane::{Handle, LaneCounters};
use manylane_tests::{
    Client, LaneDriver, TEST_TIMEOUT, map_ip, need_ipv6, on_every_engine, on_every_variant, pattern,
    unused_addr,
};

fn total(handle: &Handle) -> LaneCounters {
    handle.counters().total()
}

on_every_variant! {
    /// The lane gets a thousand ICMP errors, between replies to reachable peers.
    fn icmp_errors_do_not_affect_other_peers(variant) {
        let v6 = need_ipv6(variant.test);
        for ip in ["127.0.0.1", "::1"].into_iter().filter(|ip| v6 || *ip != "::1") {
            let mut driver = LaneDriver::new(variant.builder((ip, 0)).open().unwrap());
            let clients = [Client::to(driver.addr()), Client::to(driver.addr())];
            let closed_addrs: Vec<_> = (0..10).map(|_| unused_addr(ip)).collect();
            for round in 0..100 {
                clients.iter().for_each(|client| client.send(&pattern(round, 40)));
                driver.receive(2, |_, datagram, out| {
                    for to in &closed_addrs[..5] {
                        out.send_to(*to, b"anybody there?");
                    }
                    out.reply(&datagram, datagram.payload());
                });
                clients.iter().for_each(|client| client.expect(&pattern(round, 40)));
            }
            let total = total(&driver.handle);
            assert_eq!((total.offered, total.sent, total.lost()), (1200, 1200, 0));
            assert_eq!((total.delivered, total.recv_errors, total.gso_fallbacks), (200, 0, 0));
            assert!(clients.iter().all(Client::is_idle) && driver.is_idle());
        }
    }

    /// Clients that close before their reply.
    fn closed_peers_do_not_affect_other_peers(variant) {
        let mut driver = LaneDriver::new(variant.builder("0.0.0.0:0").open().unwrap());
        let server = map_ip("127.0.0.1", driver.addr().port());
        let client = Client::to(server);
        for _ in 0..100 {
            Client::to(server).send(b"bye");
            client.send(b"here");
            driver.echo(2);
            client.expect(b"here");
        }
        let total = total(&driver.handle);
        assert_eq!((total.sent, total.lost(), total.recv_errors), (200, 0, 0));
    }

    /// Port 0, a broadcast that was not allowed, no route, too large: each in its own counter, and
    /// the datagrams around them, to the same lane's good peer, arrive.
    fn each_loss_has_its_counter(variant, no traffic) {
        let mut driver = LaneDriver::new(variant.builder("127.0.0.1:0").lanes(1).batch(80).open().unwrap());
        let handle = driver.handle.clone();
        let client = Client::to(driver.addr());
        let mut out = driver.lanes[0].sender();
        let mut offer = |to: SocketAddr, times: u64| {
            let before = total(&handle);
            out.send_to(client.addr(), b"before");
            (0..times).for_each(|_| out.send_to(to, b"lost"));
            out.send_to(client.addr(), b"after");
            let flushed = out.flush();
            assert_eq!((flushed.sent, flushed.lost), (2, times), "{to}");
            client.expect(b"before");
            client.expect(b"after");
            let after = total(&handle);
            assert_eq!(after.offered, after.sent + after.lost(), "{to}");
            assert_eq!(after.sent - before.sent, 2, "{to}");
            let lost = |of: fn(&LaneCounters) -> u64| of(&after) - of(&before);
            (lost(|c| c.lost_other), lost(|c| c.lost_denied), lost(|c| c.lost_unreachable), lost(|c| c.lost()))
        };
        for times in [1, 3, 64, 70] {
            assert_eq!(offer(SocketAddr::new(client.addr().ip(), 0), times), (times, 0, 0, times));
            assert_eq!(offer(map_ip("127.255.255.255", 9), times), (0, times, 0, times));
            // Datagrams from a loopback address cannot leave the machine. With a route the kernel
            // returns EINVAL, without one ENETUNREACH.
            let (other, denied, unreachable, all) = offer("240.0.0.1:9".parse().unwrap(), times);
            assert_eq!((other + unreachable, denied, all), (times, 0, times));
        }
        drop(out);
        assert!(client.is_idle());
    }

    /// A destination for which there is no route: an address that needs the loopback device and is
    /// not on it.
    fn no_route_counts_as_unreachable(variant, no traffic) {
        if !need_ipv6(variant.test) {
            return;
        }
        let mut driver = LaneDriver::new(variant.builder("[::]:0").lanes(1).open().unwrap());
        let nowhere = SocketAddrV6::new("fe80::1".parse().unwrap(), 9, 0, 1);
        let mut out = driver.lanes[0].sender();
        (0..5).for_each(|_| out.send_to(nowhere.into(), b"lost"));
        assert_eq!(out.flush(), manylane::Flushed { sent: 0, lost: 5 });
        drop(out);
        let total = total(&driver.handle);
        assert_eq!((total.lost_unreachable, total.lost()), (5, 5), "{total:?}");
    }

    fn oversized_sends_are_counted(variant) {
        static LARGE: [u8; 65_508] = [7; 65_508];
        let mut driver = LaneDriver::new(variant.builder("127.0.0.1:0").open().unwrap());
        let client = Client::to(driver.addr());
        client.send(b"give me more");
        driver.receive(1, |_, datagram, out| {
            out.reply(&datagram, b"first");
            out.reply(&datagram, &LARGE);
            out.reply_borrowed(&datagram, &LARGE);
            out.reply_with(&datagram, LARGE.len(), |_| unreachable!("there is no such space"));
            out.send_to(datagram.peer(), &LARGE);
            out.reply(&datagram, b"last");
            assert_eq!(out.len(), 2);
        });
        client.expect(b"first");
        client.expect(b"last");
        let total = total(&driver.handle);
        assert_eq!((total.offered, total.sent, total.lost_too_large, total.lost()), (6, 2, 4, 4));
    }
}

on_every_engine! {
    /// A peer that does not read: its own queue overflows, which does not affect the lane.
    fn a_full_peer_does_not_block_other_peers(variant) {
        let mut builder = variant.builder("127.0.0.1:0");
        let mut driver = LaneDriver::new(builder.lanes(1).send_buffer(8192).open().unwrap());
        let (deaf, client) = (Client::to(driver.addr()), Client::to(driver.addr()));
        deaf.send(b"hello");
        driver.receive(1, |_, datagram, out| {
            (0..2000).for_each(|_| out.reply(&datagram, &[1; 1000]));
        });
        client.send(b"me too");
        driver.echo(1);
        client.expect(b"me too");
        let total = total(&driver.handle);
        assert_eq!((total.offered, total.sent + total.lost()), (2001, 2001));
        assert_eq!(client.socket.read_timeout().unwrap(), Some(TEST_TIMEOUT));
    }
}
