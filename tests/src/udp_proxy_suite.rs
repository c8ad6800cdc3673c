//! The suite of the UDP proxy: what it does for clients and servers, on each engine.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use manylane::Builder;
use manylane_proxy::udp::UdpCounters;
use manylane_proxy::{Balance, Options};
use manylane_test_support::wait_for;

use crate::pattern;
use crate::udp_proxy_bed::{PAYLOAD_LEN_MAX, Server, ask, ask_until_answered};

pub use crate::udp_proxy_bed::UdpBed;

/// Every client gets the answers to its own datagrams, from one server.
pub fn clients_get_their_own_answers(bed: &UdpBed) {
    const CLIENTS: usize = 24;
    const ROUNDS: usize = 10;
    let servers = [bed.server(1), bed.server(2)];
    let proxy = bed.start(Options::default(), &servers.each_ref().map(|server| server.address));
    let clients: Vec<_> = (0..CLIENTS).map(|_| bed.client(&proxy)).collect();
    let names: Vec<u8> = clients.iter().map(|client| ask(client, b"first")).collect();
    // All at the same time, and several of each: their answers are told apart.
    let payload = |client: usize, round: usize| pattern(client * ROUNDS + round, 20 + client);
    for round in 1..ROUNDS {
        for (at, client) in clients.iter().enumerate() {
            client.send(&payload(at, round)).unwrap();
        }
        for (at, client) in clients.iter().enumerate() {
            let mut answer = [0; 2048];
            let len = client.recv(&mut answer).unwrap();
            assert_eq!((answer[0], &answer[1..len]), (names[at], &payload(at, round)[..]));
        }
    }
    assert!([1, 2].iter().all(|name| names.contains(name)), "{names:?}");
    if matches!(bed, UdpBed::Netns(_)) {
        let lanes = proxy.handle.counters().total();
        assert!(lanes.delivered_by_bypass > 0 && lanes.sent_by_bypass > 0, "{lanes:#?}");
    }
    let total = proxy.stop();
    let count = (CLIENTS * ROUNDS) as u64;
    assert_eq!((total.datagrams, total.forwarded, total.answers_sent), (count, count, count), "{total:#?}");
    assert_eq!(total.sessions, CLIENTS as u64, "{total:#?}");
    assert_eq!(total.bytes_to_clients, total.bytes_to_servers + count, "{total:#?}");
}

/// Datagrams of every size pass whole.
pub fn datagrams_of_every_size_pass(bed: &UdpBed) {
    const SIZES: [usize; 7] = [0, 1, 1471, 1472, 1473, 9000, PAYLOAD_LEN_MAX];
    let server = bed.server(1);
    let proxy = bed.start(Options::default(), &[server.address]);
    let client = bed.client(&proxy);
    for size in SIZES {
        assert_eq!(ask(&client, &pattern(7, size)), 1);
    }
    let total = proxy.stop();
    let count = SIZES.len() as u64;
    assert_eq!((total.forwarded, total.answers_sent), (count, count), "{total:#?}");
    assert_eq!(total.bytes_to_servers, SIZES.iter().sum::<usize>() as u64);
}

/// What a lane has truncated is counted, and not forwarded. Not for engine `xdp`, which truncates
/// nothing.
pub fn truncated_datagrams_are_dropped(bed: &UdpBed) {
    let server = bed.server(1);
    let change = |builder: &mut Builder| _ = builder.gro(false).datagram_size(100);
    let proxy = bed.start_with(Options::default(), &[server.address], None, change);
    let client = bed.client(&proxy);
    client.send(&[7; 101]).unwrap();
    assert_eq!(ask(&client, &[8; 100]), 1);
    let total = proxy.stop();
    assert_eq!((total.truncated, total.forwarded, total.answers), (1, 1, 1), "{total:#?}");
}

/// A client that sends to one of several addresses gets the answer from there.
pub fn answers_come_from_the_address_that_was_asked(bed: &UdpBed) {
    let other: IpAddr = match bed {
        UdpBed::Loopback(_) => Ipv4Addr::new(127, 0, 0, 9).into(),
        UdpBed::Netns(testbed) => {
            let [a, b, c, d] = testbed.host(1).ip4(0).octets();
            let other = Ipv4Addr::new(a, b, c, d + 100).into();
            testbed.host(1).add_address(0, other).unwrap();
            other
        }
    };
    let server = bed.server(1);
    let at = Some(Ipv4Addr::UNSPECIFIED.into());
    let mut proxy = bed.start_at(at, Options::default(), &[server.address], None, |_| {});
    proxy.address.set_ip(other);
    let client = bed.client(&proxy);
    for _ in 0..3 {
        assert_eq!(ask(&client, b"question"), 1);
    }
    assert_eq!(proxy.stop().sessions, 1);
}

/// A session ends without datagrams, and the next datagram begins another one.
pub fn idle_sessions_end(bed: &UdpBed) {
    let server = bed.server(1);
    let options = Options { idle_timeout: Duration::from_millis(200), ..Options::default() };
    let proxy = bed.start(options, &[server.address]);
    let client = bed.client(&proxy);
    ask(&client, b"one");
    wait_for("the end of the session", || proxy.counters(), |total| total.open == 0 && total.idle == 1);
    assert_eq!(proxy.shared.settings().servers.all()[0].connections(), 0);
    ask(&client, b"two");
    assert_eq!(proxy.stop().sessions, 2);
}

/// With a known number of answers, a session ends with the last one.
pub fn answered_sessions_end(bed: &UdpBed) {
    let server = bed.server(1);
    let options = Options { answers: Some(1.try_into().unwrap()), ..Options::default() };
    let proxy = bed.start(options, &[server.address]);
    let client = bed.client(&proxy);
    for count in 1..=5 {
        ask(&client, b"question");
        wait_for("the end of a session", || proxy.counters(), |total| total.finished == count);
    }
    let total = proxy.stop();
    assert_eq!((total.sessions, total.finished, total.answers_sent), (5, 5, 5), "{total:#?}");
}

/// With a key, a client that changes its address keeps its session, and gets its answers at the
/// new address.
pub fn keys_are_sessions_whatever_the_address(bed: &UdpBed) {
    let servers = [bed.server(1), bed.server(2)];
    let addresses = servers.each_ref().map(|server| server.address);
    let proxy = bed.start_with(Options::default(), &addresses, "1:3".parse().ok(), |_| {});
    let names: Vec<[u8; 2]> = (0..8)
        .map(|key| {
            let payload = format!("-key{key}").into_bytes();
            [(); 2].map(|()| ask(&bed.client(&proxy), &payload))
        })
        .collect();
    // The key ends before the number.
    assert!(names.iter().all(|pair| *pair == names[0]), "{names:?}");
    let other = bed.client(&proxy);
    let others = (0..8).map(|key| ask(&other, format!("-{key:03}").as_bytes())).collect::<Vec<u8>>();
    assert!([1, 2].iter().all(|name| others.contains(name)), "{others:?}");
    other.send(b"-ke").unwrap();
    wait_for("a datagram that is too short", || proxy.counters(), |total| total.too_short == 1);
    let total = proxy.stop();
    assert_eq!((total.sessions, total.forwarded, total.answers_sent), (9, 24, 24), "{total:#?}");
}

/// Proxies with the same servers, in any order, choose alike: by key, and by client.
pub fn proxies_choose_alike(bed: &UdpBed) {
    let servers = [bed.server(1), bed.server(2), bed.server(3)];
    let mut addresses = servers.each_ref().map(|server| server.address);
    let options = Options { balance: Balance::Hash, ..Options::default() };
    for key in [None, "0:4".parse().ok()] {
        let one = bed.start_with(options.clone(), &addresses, key, |_| {});
        addresses.reverse();
        let two = bed.start_with(options.clone(), &addresses, key, |_| {});
        let mut names: Vec<u8> = (0..16)
            .map(|at| {
                let payload = format!("{at:04}").into_bytes();
                let client = bed.bind(0);
                let names = [&one, &two].map(|proxy| {
                    // By key, the address does not matter.
                    let client = if key.is_some() { &bed.bind(0) } else { &client };
                    client.connect(proxy.address).unwrap();
                    ask(client, &payload)
                });
                assert_eq!(names[0], names[1], "{at} by {key:?}");
                names[0]
            })
            .collect();
        names.sort_unstable();
        names.dedup();
        assert!(names.len() > 1, "one server for all");
        assert_eq!((one.stop().sessions, two.stop().sessions), (16, 16));
    }
}

/// A server that refuses is taken out, and comes back when it is readmitted.
pub fn servers_that_refuse_are_taken_out(bed: &UdpBed) {
    let closed = bed.bind(0).local_addr().unwrap();
    let server = bed.server(1);
    let proxy = bed.start(Options::default(), &[closed, server.address]);
    let is_up = || proxy.shared.settings().servers.all()[0].is_up();
    let asked = || {
        assert_eq!(ask_until_answered(&bed.client(&proxy), b"question"), 1);
        is_up()
    };
    wait_for("a server that is out", asked, |is_up| !is_up);
    for _ in 0..8 {
        assert_eq!(ask(&bed.client(&proxy), b"question"), 1);
    }
    let back = Server::new(bed.bind(closed.port()), 2);
    proxy.shared.settings().servers.readmit();
    assert!(is_up());
    let answered = || ask(&bed.client(&proxy), b"question");
    wait_for("an answer of the server that is back", answered, |name| *name == 2);
    drop(back);
    let total = proxy.stop();
    assert!(total.refused >= 2 && total.no_server == 0, "{total:#?}");
}

/// If all servers are out, datagrams are dropped and counted.
pub fn without_a_server_datagrams_are_dropped(bed: &UdpBed) {
    let closed = bed.bind(0).local_addr().unwrap();
    let proxy = bed.start(Options::default(), &[closed]);
    let client = bed.client(&proxy);
    let sent = || {
        client.send(b"question").unwrap();
        proxy.counters()
    };
    wait_for("a datagram without a server", sent, |total| total.no_server > 0);
    assert!(!proxy.shared.settings().servers.all()[0].is_up());
    let total = proxy.stop();
    // The first refusal may have been an accident.
    assert_eq!((total.refused, total.answers), (2, 0), "{total:#?}");
}

/// A server without a route is passed over; if there is no other, datagrams are dropped.
pub fn servers_without_a_route_are_passed_over(bed: &UdpBed) {
    // Link-local, and so unreachable without a device.
    let nowhere = "[fe80::1]:9".parse().unwrap();
    let server = bed.server(1);
    let proxy = bed.start(Options::default(), &[nowhere, server.address]);
    for _ in 0..6 {
        assert_eq!(ask(&bed.client(&proxy), b"question"), 1);
    }
    proxy.shared.reload(Options::default(), &[nowhere]);
    let sent = || {
        bed.client(&proxy).send(b"question").unwrap();
        proxy.counters()
    };
    wait_for("a datagram without a socket", sent, |total| total.no_socket > 0);
    assert_eq!(proxy.stop().no_server, 0);
}

/// Limits on sessions, in all and of a source.
pub fn sessions_are_limited(bed: &UdpBed) {
    let server = bed.server(1);
    for (in_all, of_source) in [(2, None), (100, Some(2))] {
        let options =
            Options { connections_max: in_all, connections_max_per_source: of_source, ..Options::default() };
        let proxy = bed.start(options, &[server.address]);
        let clients = [(); 2].map(|()| bed.client(&proxy));
        clients.iter().for_each(|client| _ = ask(client, b"in"));
        let other = bed.client(&proxy);
        (0..3).for_each(|_| _ = other.send(b"out").unwrap());
        let refused = |total: &UdpCounters| (total.over_limit, total.over_source_limit);
        let expected = if of_source.is_some() { (0, 3) } else { (3, 0) };
        wait_for("refused datagrams", || proxy.counters(), |total| refused(total) == expected);
        clients.iter().for_each(|client| _ = ask(client, b"still in"));
        let total = proxy.stop();
        assert_eq!((total.sessions, total.forwarded), (2, 4), "{total:#?}");
    }
}

/// New settings are for new sessions, and end none.
pub fn servers_change_without_ending_sessions(bed: &UdpBed) {
    let servers = [bed.server(1), bed.server(2)];
    let proxy = bed.start(Options::default(), &[servers[0].address]);
    let before = bed.client(&proxy);
    assert_eq!(ask(&before, b"before"), 1);
    proxy.shared.reload(Options::default(), &[servers[1].address]);
    // A lane notices within a moment.
    let answered = || ask(&bed.client(&proxy), b"after");
    for _ in 0..2 {
        wait_for("an answer of the new server", answered, |name| *name == 2);
    }
    assert_eq!(ask(&before, b"again"), 1);
    let total = proxy.stop();
    assert_eq!((total.idle + total.cut_off, total.answers_sent), (total.sessions, total.answers));
}

/// A proxy that is stopped begins no more sessions. Answers in those that there are still pass.
pub fn answers_pass_before_the_end(bed: &UdpBed) {
    let server = bed.bind(0);
    let proxy = bed.start(Options::default(), &[server.local_addr().unwrap()]);
    let clients = [(); 4].map(|()| bed.client(&proxy));
    let mut payload = [0; 16];
    let peers = clients.each_ref().map(|client| {
        client.send(b"question").unwrap();
        server.recv_from(&mut payload).unwrap().1
    });
    proxy.shared.stop();
    let stopped = || {
        // Sessions in use keep the proxy.
        clients.iter().for_each(|client| _ = client.send(b"more").unwrap());
        // A session of its own, until its lane has noticed.
        bed.client(&proxy).send(b"late").unwrap();
        proxy.counters()
    };
    wait_for("refused sessions", stopped, |total| total.stopping > 0);
    for (client, peer) in clients.iter().zip(peers) {
        server.send_to(b"answer", peer).unwrap();
        let len = client.recv(&mut payload).unwrap();
        assert_eq!(&payload[..len], b"answer");
    }
    let total = proxy.stop();
    assert!(total.answers_sent >= 4, "{total:#?}");
}

/// Sessions that stay in use are cut off.
pub fn sessions_in_use_are_cut_off_at_the_end(bed: &UdpBed) {
    let server = bed.server(1);
    let options = Options { drain_timeout: Duration::from_millis(200), ..Options::default() };
    let proxy = bed.start(options, &[server.address]);
    let client = bed.client(&proxy);
    ask(&client, b"question");
    let ends = AtomicBool::new(false);
    let total = thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                // The proxy may be gone by now.
                _ = client.send(b"more");
                thread::yield_now();
            }
        });
        let total = proxy.stop();
        ends.store(true, Ordering::Relaxed);
        total
    });
    assert_eq!((total.sessions, total.cut_off), (1, 1), "{total:#?}");
}

/// The suite as tests on one bed, which is made for each by its name.
#[macro_export]
macro_rules! udp_proxy_suite {
    ($bed:expr) => {
        $crate::udp_proxy_suite! {
            $bed;
            clients_get_their_own_answers
            datagrams_of_every_size_pass
            answers_come_from_the_address_that_was_asked
            idle_sessions_end
            answered_sessions_end
            keys_are_sessions_whatever_the_address
            proxies_choose_alike
            servers_that_refuse_are_taken_out
            without_a_server_datagrams_are_dropped
            servers_without_a_route_are_passed_over
            sessions_are_limited
            servers_change_without_ending_sessions
            answers_pass_before_the_end
            sessions_in_use_are_cut_off_at_the_end
        }
    };
    ($bed:expr; $($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                let bed: Option<$crate::udp_proxy_suite::UdpBed> = ($bed)(stringify!($name));
                if let Some(bed) = bed {
                    $crate::udp_proxy_suite::$name(&bed);
                }
            }
        )*
    };
}
