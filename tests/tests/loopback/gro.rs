//! Receiving GRO messages, truncation, and ancillary data: ECN and time stamps.

use std::time::{Duration, SystemTime};

use manylane::{Builder, Ecn, Engine};
use manylane_testbed::skip;
use manylane_tests::{
    Client, LaneDriver, map_ip, need_ipv6, need_uring, on_every_variant, pattern, send_and_wait,
};
use socket2::SockRef;

/// Segment size, full datagrams, bytes of the last and shorter one.
const GSO_MESSAGES: [(usize, usize, usize); 12] = [
    (1, 64, 0),
    (1, 2, 0),
    (2, 10, 1),
    (7, 63, 3),
    (10, 64, 0),
    (100, 5, 37),
    (100, 1, 1),
    (512, 20, 511),
    (1000, 2, 0),
    (1000, 64, 0),
    (1400, 46, 1),
    (1400, 3, 1399),
];

/// A lane of each engine with a kernel socket, by default options.
fn default_lanes(test: &str) -> impl Iterator<Item = LaneDriver> {
    let engines = [Some(Engine::Mmsg), need_uring(test).then_some(Engine::Uring)];
    engines.into_iter().flatten().map(|engine| {
        let mut builder = Builder::new("127.0.0.1:0").unwrap();
        LaneDriver::new(builder.engine(engine).lanes(1).open().unwrap())
    })
}

/// The switch neither loses nor reorders datagrams.
#[test]
fn loopback_trains_turn_on_gro() {
    if !skip::need_whole_gso("loopback_trains_turn_on_gro") {
        return;
    }
    for mut driver in default_lanes("loopback_trains_turn_on_gro") {
        let client = Client::to(driver.addr());
        let mut trains = 0;
        let total = |driver: &LaneDriver| driver.handle.counters().total();
        while total(&driver).gro_messages == 0 {
            assert!(trains < 1000, "{:?}", total(&driver));
            // Several, so that some are queued while it is turned on.
            let sent: Vec<_> = (trains..trains + 2).map(|seed| pattern(seed, 6400)).collect();
            send_and_wait(|| sent.iter().for_each(|train| client.send_gso(train, 100)));
            let got = driver.recv_all(2 * 64);
            let due = sent.iter().flat_map(|train| train.chunks(100));
            assert!(got.iter().map(|got| &got.payload[..]).eq(due), "after {trains}");
            trains += 2;
        }
        let before = total(&driver);
        assert_eq!((before.delivered, before.lost()), (64 * trains as u64, 0));
        // From now on, each is one message.
        client.send_gso(&pattern(1, 6400), 100);
        assert_eq!(driver.recv_all(64).len(), 64);
        let after = total(&driver);
        assert_eq!((after.gro_messages, after.messages), (before.gro_messages + 1, before.messages + 1));
        assert!(driver.is_idle());
    }
}

#[test]
fn loopback_without_trains_gro_stays_off() {
    for mut driver in default_lanes("loopback_without_trains_gro_stays_off") {
        let client = Client::to(driver.addr());
        for _ in 0..200 {
            send_and_wait(|| (0..64).for_each(|size| client.send(&pattern(size, size))));
            driver.recv_all(64);
        }
        client.send_gso(&pattern(1, 6400), 100);
        driver.recv_all(64);
        let total = driver.handle.counters().total();
        assert_eq!((total.delivered, total.messages, total.gro_messages), (201 * 64, 201 * 64, 0));
    }
}

on_every_variant! {
    /// A sender that uses GSO: single datagrams are delivered, with exact content and order.
    fn gro_messages_are_split_into_datagrams(variant) {
        for addr in ["127.0.0.1:0", "[::]:0"] {
            if addr != "127.0.0.1:0" && !need_ipv6(variant.test) {
                return;
            }
            let mut driver = LaneDriver::new(variant.builder(addr).open().unwrap());
            let ip = if addr == "[::]:0" { "::1" } else { "127.0.0.1" };
            let server = map_ip(ip, driver.addr().port());
            let client = Client::to(server);
            let (mut delivered, mut bytes) = (0, 0);
            for (seed, (segment, full, last)) in GSO_MESSAGES.into_iter().enumerate() {
                let payload = pattern(seed, segment * full + last);
                client.send_gso(&payload, segment as u16);
                let mut due: Vec<_> = payload.chunks(segment).collect();
                let mut got = driver.recv_all(due.len());
                // With generic XDP, one in 65,535 comes later, through the companion: that whose
                // checksum looks like the sum of a pseudo-header alone.
                if variant.generic {
                    due.sort_unstable();
                    got.sort_unstable_by(|one, other| one.payload.cmp(&other.payload));
                }
                assert!(got.iter().map(|got| &got.payload[..]).eq(due.iter().copied()), "{segment} {full} {last}");
                for got in &got {
                    assert_eq!((got.peer, got.local, got.truncated), (client.addr(), server, false));
                    assert_eq!((got.full_len, got.lane), (got.payload.len(), got.lane));
                }
                delivered += due.len() as u64;
                bytes += payload.len() as u64;
            }
            // Between GSO messages, single datagrams, one of them empty.
            for payload in [&b""[..], b"one"] {
                client.send(payload);
                assert_eq!(driver.recv_all(1)[0].payload, payload);
            }
            let total = driver.handle.counters().total();
            assert_eq!((total.delivered, total.delivered_bytes), (delivered + 2, bytes + 3));
            let gro_messages = GSO_MESSAGES.len() as u64;
            let expected = if variant.gets_gro_messages() { (gro_messages, gro_messages + 2) } else { (0, delivered + 2) };
            // With XDP they arrive segmented.
            if !variant.is_xdp() {
                assert_eq!((total.gro_messages, total.messages), expected);
            }
            assert!(driver.is_idle());
        }
    }

    /// Those that the options ask for, except that a queue of a device has neither GRO nor GSO. A
    /// kernel socket with GRO has larger buffers than asked for, also as a companion.
    fn capabilities_are_those_granted(variant, no traffic) {
        let (mut builder, kernel) = (variant.builder("127.0.0.1:0"), !variant.is_xdp());
        let caps = builder.batch(7).datagram_size(2048).timestamps(kernel).open().unwrap().capabilities();
        assert_eq!((caps.batch, caps.datagram_size), (7, if variant.gro { 65_535 } else { 2048 }));
        let expected = (variant.gro && kernel, variant.gso && kernel, kernel);
        assert_eq!((caps.gro, caps.gso, caps.timestamps), expected);
    }

    /// GRO messages and single datagrams of several peers in one batch, sent back unchanged.
    fn gro_messages_of_many_peers_echo(variant, 1 queue) {
        let mut driver = LaneDriver::new(variant.builder("0.0.0.0:0").lanes(1).batch(128).open().unwrap());
        let server = map_ip("127.0.0.2", driver.addr().port());
        let clients: Vec<_> = (0..4).map(|_| Client::to(server)).collect();
        let sizes = |at: usize| [(100, 1050), (64, 64), (300, 900), (1, 20)][at];
        send_and_wait(|| {
            for (at, client) in clients.iter().enumerate() {
                let (segment, len) = sizes(at);
                client.send_gso(&pattern(at, len), segment as u16);
                client.send(b"");
                client.send_gso(&pattern(at + 10, len), segment as u16);
            }
        });
        let datagrams: usize = (0..4).map(|at| 1 + 2 * sizes(at).1.div_ceil(sizes(at).0)).sum();
        driver.receive(datagrams, |_, datagram, out| out.reply_borrowed(&datagram, datagram.payload()));
        for (at, client) in clients.iter().enumerate() {
            let (segment, len) = sizes(at);
            pattern(at, len).chunks(segment).for_each(|chunk| client.expect(chunk));
            client.expect(b"");
            pattern(at + 10, len).chunks(segment).for_each(|chunk| client.expect(chunk));
            assert!(client.is_idle());
        }
        let total = driver.handle.counters().total();
        assert_eq!((total.sent, total.lost()), (datagrams as u64, 0));
        // All except that of one datagram arrive as GRO messages, and leave as GSO messages, with
        // single ones between. With XDP they arrive segmented, and leave one by one.
        if !variant.is_xdp() {
            assert_eq!(total.gro_messages, if variant.gets_gro_messages() { 6 } else { 0 });
            assert_eq!(total.gso_messages, if variant.gso { 6 } else { 0 });
        }
    }

    /// Larger than the buffer: truncated and flagged, with its original length. Its neighbours are
    /// complete.
    fn truncated_datagrams_are_flagged(variant) {
        let mut driver =
            LaneDriver::new(variant.builder("127.0.0.1:0").lanes(1).gro(false).datagram_size(100).open().unwrap());
        let client = Client::to(driver.addr());
        let sizes = [99, 100, 101, 0, 1000, 100, 65_507, 1, 102];
        send_and_wait(|| sizes.iter().enumerate().for_each(|(seed, len)| client.send(&pattern(seed, *len))));
        let mut got = driver.recv_all(sizes.len());
        if variant.is_xdp() {
            // The kernel reassembles fragments, which arrive through the companion, in no order
            // with the others.
            got.sort_by_key(|got| sizes.iter().enumerate().position(|(seed, len)| {
                got.full_len == *len && got.payload == pattern(seed, *len)[..(*len).min(100)]
            }));
        }
        for (seed, (got, len)) in got.iter().zip(sizes).enumerate() {
            assert_eq!((got.full_len, got.truncated), (len, len > 100));
            assert!(got.payload == pattern(seed, len)[..len.min(100)], "{len} bytes");
        }
        // A reply to a truncated datagram is like any other.
        client.send(&pattern(1, 200));
        driver.echo(1);
        client.expect(&pattern(1, 200)[..100]);
        let total = driver.handle.counters().total();
        assert_eq!((total.delivered, total.truncated), (10, 5));
        assert_eq!(total.delivered_bytes, 99 + 100 + 100 + 100 + 100 + 100 + 1 + 100 + 100);
    }

    /// ECN marks of IPv4, IPv6 and both on one socket, together with other bits of the type of
    /// service.
    fn ecn_is_reported(variant) {
        let marks = [Ecn::NotEct, Ecn::Ect1, Ecn::Ect0, Ecn::Ce];
        let v6 = need_ipv6(variant.test);
        for (bound, ip, on) in [
            ("127.0.0.1:0", "127.0.0.1", true), ("0.0.0.0:0", "127.0.0.2", true), ("127.0.0.1:0", "127.0.0.1", false),
            ("[::1]:0", "::1", true), ("[::]:0", "::1", true), ("[::]:0", "127.0.0.1", true),
            ("[::]:0", "::1", false), ("[::]:0", "127.0.0.1", false),
        ] {
            if bound.starts_with('[') && !v6 {
                continue;
            }
            let mut driver = LaneDriver::new(variant.builder(bound).ecn(on).open().unwrap());
            let client = Client::to(map_ip(ip, driver.addr().port()));
            for dscp in [0, 0xb8] {
                for (bits, mark) in (0..).zip(marks) {
                    let socket = SockRef::from(&client.socket);
                    if ip == "::1" {
                        socket.set_tclass_v6(dscp | bits).unwrap();
                    } else {
                        socket.set_tos_v4(dscp | bits).unwrap();
                    }
                    client.send(b"marked");
                    client.send_gso(&[7; 100], 30);
                    for got in driver.recv_all(5) {
                        assert_eq!(got.ecn, on.then_some(mark), "{bound} {ip} {bits}");
                    }
                }
            }
        }
    }

    fn timestamps_lie_between_before_and_after(variant, no traffic) {
        if variant.is_xdp() {
            // Frames have none: the option is refused, not ignored.
            let err = variant.builder("127.0.0.1:0").timestamps(true).open().map(drop).unwrap_err();
            assert_eq!(err.kind(), manylane::ErrorKind::Config, "{err}");
            return;
        }
        // The kernel's clock for stamps may lag behind the exact one by a tick.
        let tick = Duration::from_millis(20);
        let mut driver = LaneDriver::new(variant.builder("127.0.0.1:0").timestamps(true).open().unwrap());
        let client = Client::to(driver.addr());
        let mut last = SystemTime::now() - tick;
        for _ in 0..50 {
            let before = SystemTime::now();
            client.send(b"when");
            let stamp = driver.recv_all(1)[0].timestamp.expect("a time stamp");
            assert!(before - tick <= stamp && stamp <= SystemTime::now() + tick);
            assert!(last <= stamp, "stamps do not go back");
            last = stamp;
        }
        // One for the whole message, or for each of its datagrams.
        client.send_gso(&[1; 100], 10);
        let got = driver.recv_all(10);
        assert!(got.iter().all(|got| got.timestamp.unwrap() >= last));
        assert!(!variant.gets_gro_messages() || got.iter().all(|one| one.timestamp == got[0].timestamp));
    }

    fn timestamps_are_off_by_default(variant) {
        let mut driver = LaneDriver::new(variant.builder("127.0.0.1:0").open().unwrap());
        let client = Client::to(driver.addr());
        client.send(b"when");
        assert_eq!(driver.recv_all(1)[0].timestamp, None);
        client.send_gso(&[1; 100], 10);
        assert!(driver.recv_all(10).iter().all(|got| got.timestamp.is_none()));
    }
}
