//! Engine `xdp`: several lanes, idle lanes, and several devices.

use std::fs;
use std::net::SocketAddr;
use std::sync::mpsc;
use std::time::Duration;

use crate::netns_support::{client, echo, open, wait_until, wait_within};
use crate::xdp_support::xdp_count;
use manylane::{Batch, Builder, Engine, Outbox};
use manylane_test_support::wait_for;
use manylane_testbed::{Host, Layout, Testbed, skip};
use manylane_tests::{Serving, SlowServer, TEST_TIMEOUT, pattern};

/// Bytes queued in the sockets of a port of `host`.
fn queued_bytes(host: &Host, port: u16) -> u64 {
    let table = host.run(|| fs::read_to_string("/proc/thread-self/net/udp").unwrap());
    let queue = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_ours = fields.get(1)?.ends_with(&format!(":{port:04X}"));
        let (_, queued) = fields.get(4)?.split_once(':')?;
        is_ours.then(|| u64::from_str_radix(queued, 16).unwrap())
    };
    table.lines().filter_map(queue).sum()
}

/// A lane whose rings are never empty polls its companion after 2,048 frames, so that datagrams
/// from the kernel do not wait behind all of them: also with batches that are smaller than what it
/// takes from a ring at once.
#[test]
fn netns_xdp_a_busy_lane_polls_its_companion() {
    const FRAMES: usize = 2048;
    const MORE: usize = 100;
    let test = "netns_xdp_a_busy_lane_polls_its_companion";
    if !skip::need_root(test) {
        return;
    }
    let testbed = Testbed::new(&Layout { queues: 1, ipv6: false, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    for batch in [64, 1] {
        let options = |builder: &mut Builder| {
            builder.engine(Engine::Xdp).lanes(1).batch(batch).gro(false).xdp_ring(8192);
        };
        let socket = open(b, b.ip4(0).into(), options);
        let (addr, handle) = (socket.local_addr(), socket.handle());
        let mut lane = socket.into_lanes().pop().unwrap();
        let client = client(a, a.ip4(0).into(), addr);
        let mut take = || -> Vec<usize> {
            lane.recv().unwrap().batch.map(|datagram| datagram.payload().len()).collect()
        };
        // Polls the companion, and begins to count.
        assert_eq!(take(), [0; 0]);
        let frames = 2 * FRAMES + MORE;
        let counts = || handle.frame_counts();
        let redirected = || counts().iter().find(|(_, what, _)| *what == "redirected").map(|count| count.2);
        // Not all at once: a veth device drops what it cannot deliver meanwhile.
        for sent in 1..=frames {
            client.send(b"by XDP");
            if sent % 100 == 0 || sent == frames {
                wait_until("all datagrams redirected", &handle, || redirected() == Some(sent as u64));
            }
        }
        for _ in 0..2 {
            // Larger than a frame: the kernel reassembles it.
            client.send(&pattern(0, 3000));
            wait_for("queued bytes", || queued_bytes(b, addr.port()), |bytes| *bytes > 0);
            for _ in 0..FRAMES / batch {
                assert_eq!(take(), vec![6; batch]);
            }
            assert_eq!(take(), [3000], "batches of {batch}");
        }
        let mut left = MORE;
        while left > 0 {
            let batch = take();
            assert!(!batch.is_empty() && batch.iter().all(|len| *len == 6), "{batch:?}");
            left -= batch.len();
        }
        assert_eq!(take(), [0; 0]);
    }
}

/// While a socket stops, queues that its first lanes have closed are not opened again for busy
/// lanes.
#[test]
fn netns_xdp_a_stopping_socket_opens_nothing() {
    let test = "netns_xdp_a_stopping_socket_opens_nothing";
    if !skip::need_root(test) {
        return;
    }
    let testbed = Testbed::new(&Layout { queues: 2, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    let socket = open(b, b.ip4(0).into(), |builder| _ = builder.engine(Engine::Xdp).lanes(2));
    let slow = socket.device_queues()[0].lane;
    let SlowServer { serving, entered, release, handled: _handled } =
        b.run(|| SlowServer::start(socket, slow, |payload: &[u8]| payload.len()));
    // Flows, until one is the slow lane's.
    let mut clients = Vec::new();
    wait_until("the slow lane at work", &serving.handle, || {
        clients.push(client(a, a.ip4(0).into(), serving.addr));
        clients[clients.len() - 1].send(b"to work");
        entered.try_recv().is_ok()
    });
    serving.handle.stop();
    wait_until("one queue", &serving.handle, || serving.handle.device_queues().len() == 1);
    // There is no event to wait for. Without a stop it would happen within some milliseconds.
    let opened_again = wait_within(Duration::from_millis(300), || serving.handle.device_queues().len() > 1);
    drop(release);
    assert_eq!(serving.stop().unwrap().total().delivered, clients.len() as u64);
    assert!(!opened_again);
}

/// Number of voluntary context switches of a thread of this process.
fn sleeps(thread: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/self/task/{thread}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
    line.trim().parse().unwrap()
}

/// A lane with nothing to do sleeps, and wakes for the next datagram: a wake-up a datagram, not
/// more.
#[test]
fn netns_xdp_an_idle_lane_sleeps_and_wakes() {
    const PINGS: u64 = 200;
    if !skip::need_root("netns_xdp_an_idle_lane_sleeps_and_wakes") {
        return;
    }
    let testbed = Testbed::new(&Layout { queues: 1, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    let socket = open(b, b.ip4(0).into(), |builder| {
        builder.engine(Engine::Xdp).lanes(1).rx_coalesce(Duration::ZERO);
    });
    let (tell, told) = mpsc::channel();
    let serving = b.run(|| {
        Serving::start_with(socket, move |_| {
            let mut tell = Some(tell.clone());
            move |batch: Batch<'_>, out: &mut Outbox<'_>| {
                if let Some(tell) = tell.take() {
                    let me = fs::read_link("/proc/thread-self").unwrap();
                    tell.send(me.file_name().unwrap().to_string_lossy().into_owned()).unwrap();
                }
                batch.for_each(|datagram| out.reply_borrowed(&datagram, datagram.payload()));
            }
        })
    });
    let client = client(a, a.ip4(0).into(), serving.addr);
    client.ping();
    let thread = told.recv_timeout(TEST_TIMEOUT).unwrap();
    // A spinning thread never yields its CPU voluntarily. This one checks for a removal, and
    // sleeps again.
    for _ in 0..3 {
        let before = sleeps(&thread);
        let what = format!("an idle lane that has slept more than {before} times");
        wait_for(&what, || sleeps(&thread), |count| *count >= before + 5);
        assert_eq!(serving.handle.counters().total().batches, 1, "nothing came");
    }
    for _ in 1..PINGS {
        // It sleeps before the next is sent.
        let before = sleeps(&thread);
        wait_for("another sleep", || sleeps(&thread), |count| *count > before);
        client.ping();
    }
    let total = serving.stop().unwrap().total();
    assert_eq!(
        (total.delivered, total.batches, total.delivered_by_bypass),
        (PINGS, PINGS, PINGS),
        "{total:#?}"
    );
}

/// A wildcard socket receives from every device past the kernel, and answers through the device of
/// the route.
#[test]
fn netns_xdp_a_wildcard_serves_several_devices() {
    const PINGS_EACH: u64 = 100;
    if !skip::need_root("netns_xdp_a_wildcard_serves_several_devices") {
        return;
    }
    let layout = Layout { queues: 2, links: vec![(0, 1), (0, 1), (0, 1)], ..Layout::default() };
    let testbed = Testbed::new(&layout).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    for generic in [false, true] {
        (0..3).for_each(|link| a.set_checksums(link, !generic).unwrap());
        let serving = echo(
            b,
            open(b, "::".parse().unwrap(), |builder| {
                builder.engine(Engine::Xdp).xdp_generic(generic).lanes(2);
            }),
        );
        let redirected = |device: &str| {
            let counts = serving.handle.frame_counts();
            counts.iter().find(|(of, what, _)| of == device && *what == "redirected").unwrap().2
        };
        let mut due = 0;
        for ipv6 in [false, true] {
            for link in 0..3 {
                let client =
                    client(a, a.ip(link, ipv6), SocketAddr::new(b.ip(link, ipv6), serving.addr.port()));
                // Over this link only: a reply through another device would not arrive, because
                // its source address is of this one.
                let others: Vec<u64> = (0..3).map(|at| a.device_counters(at).unwrap().rx_packets).collect();
                let before = serving.handle.counters().total();
                let mut pings = 0;
                // The first replies leave through the kernel, until the next hop is known.
                let ping = || {
                    client.ping();
                    pings += 1;
                    (pings, serving.handle.counters().total().sent_by_bypass - before.sent_by_bypass)
                };
                wait_for("replies by XDP", ping, |(pings, by_xdp)| {
                    *pings >= PINGS_EACH && *by_xdp >= PINGS_EACH / 2
                });
                due += pings;
                let now: Vec<u64> = (0..3).map(|at| a.device_counters(at).unwrap().rx_packets).collect();
                for at in 0..3 {
                    let received = now[at] - others[at];
                    assert!(
                        if at == link { received >= pings } else { received < PINGS_EACH / 2 },
                        "link {at}: {received}"
                    );
                }
            }
        }
        wait_until("all replies sent", &serving.handle, || serving.handle.counters().total().sent >= due);
        let each: Vec<u64> = ["link0", "link1", "link2"].into_iter().map(redirected).collect();
        // One finished checksum in 65,535 looks partial.
        let passed = xdp_count(&serving.handle, "partial_checksum");
        assert!(passed < 10 && (generic || passed == 0), "{passed}");
        let total = serving.stop().unwrap().total();
        assert_eq!(
            (total.delivered, total.delivered_by_bypass, each.iter().sum()),
            (due, due - passed, due - passed),
            "{each:?} {total:#?}"
        );
        assert!(each.iter().all(|count| *count >= 2 * PINGS_EACH), "{each:?}");
    }
}
