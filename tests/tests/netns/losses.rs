//! Losses of the sending side that only a network can cause: a send buffer that stays full, and no
//! memory for the fragments of a datagram. Each is counted exactly, by its reason, and datagrams
//! that count as sent arrive.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;

use crate::netns_support::{client, echo, lane_driver, open, wait_until};
use manylane::{Builder, Engine, Flushed, LaneCounters, Received};
use manylane_sys::process::run_isolated;
use manylane_sys::sock::{self, Flag};
use manylane_testbed::skip;
use manylane_testbed::{Host, Layout, Testbed};
use manylane_tests::{Client, LaneDriver, pattern};

/// A token bucket of one byte a second: after its initial burst it passes nothing.
const TBF_BLOCKED: &str = "tbf rate 8bit burst 1540 limit 1000000";
/// The same bucket without a limit.
const TBF_OPEN: &str = "tbf rate 1gbit burst 1000000 limit 1000000";

/// True if the test can run here: root, and a kernel with this queueing discipline.
fn can_run(name: &str) -> bool {
    let tc = run_isolated(None, "tc", &["-V"], b"").is_ok();
    skip::need_root(name) && skip::need(name, tc, "the program tc is missing: apt-get install iproute2") && {
        let testbed = Testbed::new(&Layout::default()).unwrap();
        let has_tbf = set_qdisc(testbed.host(0), "add", TBF_BLOCKED);
        skip::need_unless_forced(name, has_tbf, skip::Forced::Kernel, "no queueing discipline tbf")
    }
}

/// Adds a queueing discipline to the first device of `host`. Returns true if the kernel accepted
/// it.
fn set_qdisc(host: &Host, what: &str, discipline: &str) -> bool {
    let line = format!("qdisc {what} dev {} root {discipline}", host.device(0));
    host.output("tc", &line.split(' ').collect::<Vec<_>>()).unwrap().status.success()
}

/// Releases the queued packets of `host`, and returns when they are on the way.
fn release(host: &Host, to: SocketAddr) {
    assert!(set_qdisc(host, "change", TBF_OPEN));
    // The queue checks its tokens when a packet is added.
    host.run(|| UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }))
        .unwrap()
        .send_to(b"go on", to)
        .unwrap();
}

/// One lane at `host`, with a send buffer of `send_buffer` bytes.
fn one_lane(host: &Host, ipv6: bool, send_buffer: usize) -> LaneDriver {
    let options = move |builder: &mut Builder| {
        builder.engine(Engine::Mmsg).lanes(1).batch(256).send_buffer(send_buffer);
    };
    lane_driver(host, open(host, host.ip(0, ipv6), options))
}

fn total(driver: &LaneDriver) -> LaneCounters {
    driver.handle.counters().total()
}

/// Offers datagrams of these sizes in one flush.
fn offer(driver: &mut LaneDriver, to: SocketAddr, sizes: &[usize]) -> Flushed {
    let mut out = driver.lanes[0].sender();
    sizes.iter().zip(0..).for_each(|(size, seed)| out.send_to(to, &pattern(seed, *size)));
    out.flush()
}

/// Answers one datagram, if there is one.
fn echo_one(driver: &mut LaneDriver) -> bool {
    let Received { batch, mut out } = driver.lanes[0].recv().unwrap();
    let is_there = !batch.is_empty();
    batch.into_iter().for_each(|datagram| out.reply(&datagram, datagram.payload()));
    is_there
}

/// Receives the offered datagrams, each once. Not in order, because a veth pair delivers a
/// datagram on the sending CPU, and those queued by a queueing discipline are sent by the CPU of
/// its timer.
fn expect(client: &Client, sizes: &[usize]) {
    let mut due: Vec<_> = sizes.iter().zip(0..).map(|(size, seed)| pattern(seed, *size)).collect();
    let mut came: Vec<_> = sizes.iter().map(|_| client.recv()).collect();
    due.sort();
    came.sort();
    assert!(came == due, "{:?} came", came.iter().map(Vec::len).collect::<Vec<_>>());
}

/// Sizes of which no two neighbours are joined: each is larger than the one before.
fn non_gso_sizes(count: usize) -> Vec<usize> {
    (0..count).map(|at| 100 + at).collect()
}

#[test]
fn netns_full_send_buffer_losses_are_counted_exactly() {
    if !can_run("netns_full_send_buffer_losses_are_counted_exactly") {
        return;
    }
    for ipv6 in [false, true] {
        let testbed = Testbed::new(&Layout::default()).unwrap();
        let (a, b) = (testbed.host(0), testbed.host(1));
        let mut driver = one_lane(b, ipv6, 8192);
        let (client, poke) =
            (client(a, a.ip(0, ipv6), driver.addr()), client(a, a.ip(0, ipv6), driver.addr()));
        assert!(set_qdisc(b, "add", TBF_BLOCKED));

        // The first ones fill the buffer. The others are tried once each, after the waits of a
        // flush.
        let sizes = non_gso_sizes(100);
        let done = offer(&mut driver, client.addr(), &sizes);
        assert!(done.sent > 0 && done.sent < 100, "IPv6 {ipv6}: {done:?}");
        assert_eq!(done.sent + done.lost, 100);
        let full = total(&driver);
        assert_eq!(
            (full.offered, full.sent, full.lost_sndbuf_full),
            (100, done.sent, done.lost),
            "IPv6 {ipv6}"
        );
        assert_eq!((full.lost(), full.send_calls), (done.lost, 1 + done.lost), "IPv6 {ipv6}: {full:?}");
        let taken: usize = sizes[..done.sent as usize].iter().sum();
        assert_eq!(full.sent_bytes, taken as u64);

        // While it is full, all datagrams are lost, including all of a GSO message.
        assert_eq!(offer(&mut driver, client.addr(), &non_gso_sizes(7)), Flushed { sent: 0, lost: 7 });
        assert_eq!(offer(&mut driver, client.addr(), &[90; 20]), Flushed { sent: 0, lost: 20 });
        let still = total(&driver);
        assert_eq!((still.offered, still.sent, still.lost_sndbuf_full), (127, done.sent, done.lost + 27));
        assert_eq!((still.lost(), still.gso_messages, still.gso_fallbacks), (done.lost + 27, 0, 0));
        assert_eq!(still.send_calls - full.send_calls, 7 + 1);

        // Exactly the datagrams that count as sent arrive, and the lane continues.
        release(b, poke.addr());
        expect(&client, &sizes[..done.sent as usize]);
        assert_eq!(offer(&mut driver, client.addr(), &[90; 20]), Flushed { sent: 20, lost: 0 });
        expect(&client, &[90; 20]);
        assert!(client.is_idle());
        let end = total(&driver);
        assert_eq!((end.offered, end.sent, end.lost()), (147, done.sent + 20, done.lost + 27));
    }
}

#[test]
fn netns_fragment_memory_losses_are_counted_exactly() {
    if !skip::need_root("netns_fragment_memory_losses_are_counted_exactly") {
        return;
    }
    let testbed = Testbed::new(&Layout::default()).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    for ipv6 in [false, true] {
        // The minimum of a socket. The kernel allocates all fragments of a datagram before it
        // sends the first. It allows them twice the buffer, and then returns ENOBUFS, not EAGAIN.
        let mut driver = one_lane(b, ipv6, 2304);
        let client = client(a, a.ip(0, ipv6), driver.addr());
        for round in 1..=3 {
            let sizes = [10, 30_000, 40_000, 50_000, 20];
            assert_eq!(offer(&mut driver, client.addr(), &sizes), Flushed { sent: 2, lost: 3 });
            client.expect(&pattern(0, 10));
            client.expect(&pattern(4, 20));
            let counted = total(&driver);
            assert_eq!(
                (counted.offered, counted.sent, counted.sent_bytes),
                (5 * round, 2 * round, 30 * round)
            );
            assert_eq!((counted.lost_no_buffers, counted.lost()), (3 * round, 3 * round), "IPv6 {ipv6}");
            // The first datagram of the batch; eleven attempts of the second, which exhaust the
            // retries of this flush; one of each other.
            assert_eq!(counted.send_calls, 15 * round, "IPv6 {ipv6}: {counted:?}");
        }
        assert!(client.is_idle());
    }
}

#[test]
fn netns_qdisc_drops_are_device_losses() {
    if !can_run("netns_qdisc_drops_are_device_losses") {
        return;
    }
    let testbed = Testbed::new(&Layout { ipv6: false, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    let mut driver = one_lane(b, false, 1 << 20);
    let (client, poke) =
        (client(a, a.ip4(0).into(), driver.addr()), client(a, a.ip4(0).into(), driver.addr()));
    // Room for a few: the kernel drops the others, and reports that only to sockets with
    // IP_RECVERR. A lane does not set it, because one bad peer would disturb all.
    assert!(set_qdisc(b, "add", "tbf rate 8bit burst 1540 limit 3000"));
    let sizes = non_gso_sizes(100);
    assert_eq!(offer(&mut driver, client.addr(), &sizes), Flushed { sent: 100, lost: 0 });
    let counted = total(&driver);
    assert_eq!((counted.offered, counted.sent, counted.lost(), counted.send_calls), (100, 100, 0, 1));
    let show = b.output("tc", &["-s", "-j", "qdisc", "show", "dev", b.device(0)]).unwrap();
    let queues: serde_json::Value = serde_json::from_slice(&show.stdout).unwrap();
    let dropped = queues[0]["drops"].as_u64().unwrap() as usize;
    assert!(dropped > 0 && dropped < 100, "{queues}");
    release(b, poke.addr());
    expect(&client, &sizes[..100 - dropped]);
    assert!(client.is_idle());
}

/// However small the buffer, and however late the thread runs after each wait: a flush waits as
/// long as the device takes datagrams. The last case takes 300 ms in all, the longest single wait
/// some 20 ms.
#[test]
fn netns_senders_wait_for_a_progressing_device() {
    if !can_run("netns_senders_wait_for_a_progressing_device") {
        return;
    }
    for (rate, count) in [("100mbit", 200), ("800kbit", 20), ("400kbit", 40)] {
        let testbed = Testbed::new(&Layout { ipv6: false, ..Layout::default() }).unwrap();
        let (a, b) = (testbed.host(0), testbed.host(1));
        let mut driver = one_lane(b, false, 4096);
        let client = client(a, a.ip4(0).into(), driver.addr());
        assert!(set_qdisc(b, "add", &format!("tbf rate {rate} burst 3000 limit 1000000")));
        let sizes: Vec<usize> = (0..count).map(|at| 400 + at).collect();
        let done = offer(&mut driver, client.addr(), &sizes);
        assert_eq!((done.sent, done.lost), (count as u64, 0), "{rate}");
        expect(&client, &sizes);
        assert_eq!(total(&driver).lost(), 0);
    }
}

/// Datagrams that are queued at the stop are handled without a wait for each of their batches.
#[test]
fn netns_stop_waits_only_once_for_a_full_send_buffer() {
    const DATAGRAMS: u64 = 30_000;
    if !can_run("netns_stop_waits_only_once_for_a_full_send_buffer") {
        return;
    }
    let testbed = Testbed::new(&Layout { ipv6: false, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    let socket =
        open(b, b.ip4(0).into(), |builder| _ = builder.engine(Engine::Mmsg).lanes(1).send_buffer(8192));
    let serving = echo(b, socket);
    let client = client(a, a.ip4(0).into(), serving.addr);
    assert!(set_qdisc(b, "add", TBF_BLOCKED));
    let before = b.device_counters(0).unwrap().rx_packets;
    // The replies are not joined, so that each could add a wait.
    (0..DATAGRAMS as usize).for_each(|at| client.send(&[1; 200][..100 + at % 64]));
    wait_until("all datagrams at the device", &serving.handle, || {
        b.device_counters(0).unwrap().rx_packets - before >= DATAGRAMS
    });
    let total = serving.stop().unwrap().total();
    assert_eq!((total.offered, total.sent + total.lost_sndbuf_full), (total.delivered, total.delivered));
    assert_eq!((total.lost(), total.lost_sndbuf_full > 0), (total.lost_sndbuf_full, true), "{total:?}");
}

/// ICMP errors of one peer cost no other peer a datagram, in either direction, even if the
/// application has enabled them.
#[test]
fn netns_an_error_of_one_peer_loses_no_other_datagram() {
    const ROUNDS: u64 = 30;
    if !skip::need_root("netns_an_error_of_one_peer_loses_no_other_datagram") {
        return;
    }
    let testbed = Testbed::new(&Layout::default()).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    // Each datagram expires at the router, which reports it each time.
    for (name, value) in [
        ("net.ipv4.ip_forward", "1"),
        ("net.ipv4.icmp_ratemask", "0"),
        ("net.ipv6.conf.all.forwarding", "1"),
        ("net.ipv6.icmp.ratelimit", "0"),
        // Types in this mask share a budget of 50 in 20 ms; 128, an echo, is never limited.
        ("net.ipv6.icmp.ratemask", "128"),
    ] {
        a.set_sysctl(name, value).unwrap();
    }
    for (net, ipv6) in [("192.0.2.0/24", false), ("2001:db8::/32", true)] {
        a.ip_batch(&format!("route add {net} via {}\n", b.ip(0, ipv6))).unwrap();
        b.ip_batch(&format!("route add {net} via {} hoplimit 1\n", a.ip(0, ipv6))).unwrap();
    }
    for (ipv6, flag) in [(false, Flag::ErrorsV4), (true, Flag::ErrorsV6)] {
        let mut driver = one_lane(b, ipv6, 1 << 20);
        sock::set_flag(driver.lanes[0].as_fd(), flag, true).unwrap();
        let (handle, client) = (driver.handle.clone(), client(a, a.ip(0, ipv6), driver.addr()));
        // Hop limit exceeded (EHOSTUNREACH), and a closed port (ECONNREFUSED).
        let far: IpAddr = if ipv6 { "2001:db8::1" } else { "192.0.2.1" }.parse().unwrap();
        for round in 1..=ROUNDS {
            let mut both = [far, a.ip(0, ipv6)];
            both.rotate_left(round as usize / 2 % 2);
            for ip in both {
                let told = b.device_counters(0).unwrap().rx_packets + 1;
                let done = offer(&mut driver, SocketAddr::new(ip, 9), &[14]);
                assert_eq!(done, Flushed { sent: 1, lost: 0 });
                wait_until("the ICMP errors at the device", &handle, || {
                    b.device_counters(0).unwrap().rx_packets >= told
                });
                // In every other round the receive gets the error.
                if round % 2 == 0 {
                    client.send(b"here");
                    // Not by readiness, which lasts until the error is fetched.
                    wait_until("a datagram after the error", &handle, || echo_one(&mut driver));
                    client.expect(b"here");
                } else {
                    let done = offer(&mut driver, client.addr(), &[5]);
                    assert_eq!(done, Flushed { sent: 1, lost: 0 }, "{:#?}", total(&driver));
                    expect(&client, &[5]);
                }
            }
        }
        let counted = total(&driver);
        assert_eq!((counted.sent, counted.lost(), counted.recv_errors), (4 * ROUNDS, 0, 0), "{counted:#?}");
        assert_eq!(counted.delivered, ROUNDS);
        // Each time that the lane sent another datagram, it got the error first.
        assert!(counted.send_calls > 4 * ROUNDS, "nothing was told: {counted:#?}");
    }
}
