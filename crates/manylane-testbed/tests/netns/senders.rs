//! The two senders: what they say they sent is what arrives.

use std::collections::BTreeMap;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use manylane_measure::{Sent, Traffic, Until, sockets};
use manylane_sys::sock;
use manylane_testbed::generator::LiveSender;
use manylane_testbed::{Host, Layout, Testbed, skip};

/// Datagrams per source port, and whether all had the payload expected.
#[derive(Default, Debug)]
struct FlowCounts {
    flows: BTreeMap<u16, u64>,
    wrong: u64,
}

impl FlowCounts {
    fn total(&self) -> u64 {
        self.flows.values().sum()
    }
}

/// A plain receiver at `ip` that ends when `count` datagrams came and no more came for a moment, or
/// none for long.
fn receive(host: &Host, ip: IpAddr, payload: Vec<u8>, count: u64) -> (u16, thread::JoinHandle<FlowCounts>) {
    let socket = host.run(|| UdpSocket::bind((ip, 0)).unwrap());
    socket.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    // Room for all of it: this is about the sender, however slow the machine is today.
    let room = sock::set_buffer(socket.as_fd(), sock::Buffer::Receive, 1 << 28).unwrap();
    assert!(room >= 1 << 28, "a receive buffer of {room} bytes");
    let port = socket.local_addr().unwrap().port();
    let receiver = thread::spawn(move || {
        let mut seen = FlowCounts::default();
        let mut buffer = vec![0; 65_536];
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(120) {
            let (length, peer) = match socket.recv_from(&mut buffer) {
                Ok(received) => received,
                // Stopped or frozen for a moment.
                Err(err) if err.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(_) => break,
            };
            *seen.flows.entry(peer.port()).or_default() += 1;
            seen.wrong += u64::from(buffer[..length] != payload[..]);
            if seen.total() == count {
                socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            }
        }
        seen
    });
    (port, receiver)
}

fn live(testbed: &Testbed, ipv6: bool, size: usize, flows: u16, pps: f64, count: u64) -> (Sent, FlowCounts) {
    let (from, to) = (testbed.host(0), testbed.host(1));
    let mut traffic = Traffic { flows, pps: Some(pps), ..Traffic::new((to.ip(0, ipv6), 1).into(), size) };
    let (port, receiver) = receive(to, to.ip(0, ipv6), traffic.datagram().into_owned(), count);
    traffic.target.set_port(port);
    let sent = LiveSender::new(from, to, 0, &traffic).unwrap().send(Until::Count(count)).unwrap();
    (sent, receiver.join().unwrap())
}

fn assert_even(seen: &FlowCounts, flows: usize) {
    let (min, max) = (seen.flows.values().min().unwrap(), seen.flows.values().max().unwrap());
    assert_eq!(seen.flows.len(), flows);
    assert!(max - min <= 1, "{seen:?}");
}

/// Takes 6 s, as the next one: a generator for each size or family, whose program the kernel loads
/// and removes with grace periods, and enough frames for its rate.
#[test]
fn netns_every_generated_frame_arrives_evenly_spread() {
    if !skip::need_live_sender("netns_every_generated_frame_arrives_evenly_spread") {
        return;
    }
    let testbed = Testbed::new(&Layout::default()).unwrap();
    for ipv6 in [false, true] {
        for size in [0, 1, 10, 333, 1452] {
            let (sent, seen) = live(&testbed, ipv6, size, 7, 20_000.0, 5_000);
            assert_eq!((sent.datagrams, sent.rejected), (5_000, 0), "IPv6 {ipv6}, {size} bytes");
            assert_eq!((seen.total(), seen.wrong), (5_000, 0), "IPv6 {ipv6}, {size} bytes");
            assert_even(&seen, 7);
        }
    }
}

#[test]
fn netns_generated_frames_have_correct_checksums() {
    if !skip::need_live_sender("netns_generated_frames_have_correct_checksums") {
        return;
    }
    let testbed = Testbed::new(&Layout::default()).unwrap();
    // Over many source ports the sum passes through every carry. The kernel drops what is wrong,
    // and counts.
    for ipv6 in [false, true] {
        let (sent, seen) = live(&testbed, ipv6, 9, 25_000, 50_000.0, 25_000);
        assert_eq!((sent.datagrams, seen.total()), (25_000, 25_000));
        assert_even(&seen, 25_000);
    }
    let to = testbed.host(1);
    let counted = to.run(|| std::fs::read_to_string("/proc/thread-self/net/snmp6").unwrap());
    let errors = counted.lines().find(|line| line.starts_with("Udp6InCsumErrors")).unwrap();
    assert!(errors.ends_with("\t0") || errors.ends_with(" 0"), "{errors}");
}

#[test]
fn netns_generator_count_matches_the_device() {
    if !skip::need_live_sender("netns_generator_count_matches_the_device") {
        return;
    }
    let testbed = Testbed::new(&Layout { ipv6: false, ..Layout::default() }).unwrap();
    let (from, to) = (testbed.host(0), testbed.host(1));
    // A socket that nobody reads: the traffic ends there, and no ICMP goes back.
    let sink = to.run(|| UdpSocket::bind((to.ip4(0), 0)).unwrap());
    let traffic = Traffic { flows: 3, ..Traffic::new(sink.local_addr().unwrap(), 10) };
    let mut sender = LiveSender::new(from, to, 0, &traffic).unwrap();
    for until in [Until::Count(1), Until::Count(100_003), Until::Duration(Duration::from_millis(200))] {
        let (from_before, to_before) = (from.device_counters(0).unwrap(), to.device_counters(0).unwrap());
        let sent = sender.send(until.clone()).unwrap();
        let (from_after, to_after) = (from.device_counters(0).unwrap(), to.device_counters(0).unwrap());
        assert_eq!(from_after.tx_packets - from_before.tx_packets, sent.datagrams, "{until:?}");
        assert_eq!(from_after.tx_dropped - from_before.tx_dropped, sent.rejected, "{until:?}");
        assert_eq!(to_after.rx_packets - to_before.rx_packets, sent.datagrams, "{until:?}");
        if let Until::Count(count) = until {
            assert_eq!(sent.datagrams + sent.rejected, count);
        }
    }
}

#[test]
fn netns_generator_keeps_its_rate_and_stops() {
    if !skip::need_live_sender("netns_generator_keeps_its_rate_and_stops") {
        return;
    }
    let testbed = Testbed::new(&Layout::default()).unwrap();
    let (from, to) = (testbed.host(0), testbed.host(1));
    let sink = to.run(|| UdpSocket::bind((to.ip4(0), 0)).unwrap());
    let traffic = Traffic { pps: Some(10_000.0), ..Traffic::new(sink.local_addr().unwrap(), 10) };
    let mut sender = LiveSender::new(from, to, 0, &traffic).unwrap();
    // Nothing to do is no error and takes no time.
    for nothing in [Until::Count(0), Until::Duration(Duration::ZERO), Until::Stop(Arc::new(true.into()))] {
        let sent = sender.send(nothing).unwrap();
        assert!(sent.datagrams <= 1_000, "{sent:?}");
    }
    let stop = Arc::new(AtomicBool::new(false));
    let later = stop.clone();
    let timer = thread::spawn(move || {
        thread::sleep(Duration::from_millis(500));
        later.store(true, Ordering::Relaxed);
    });
    let sent = sender.send(Until::Stop(stop)).unwrap();
    timer.join().unwrap();
    // The schedule is absolute: however loaded the machine is, it is never ahead.
    let due = sent.elapsed.as_secs_f64() * 10_000.0;
    assert!(sent.datagrams as f64 <= due + 2.0, "{sent:?}");
    assert!(sent.datagrams > 0, "{sent:?}");
}

#[test]
fn netns_generator_reports_a_link_that_is_down() {
    if !skip::need_live_sender("netns_generator_reports_a_link_that_is_down") {
        return;
    }
    let testbed = Testbed::new(&Layout::default()).unwrap();
    let (from, to) = (testbed.host(0), testbed.host(1));
    let traffic = Traffic::new((to.ip4(0), 9).into(), 10);
    let mut sender = LiveSender::new(from, to, 0, &traffic).unwrap();
    to.set_link(0, false).unwrap();
    let err = sender.send(Until::Count(100)).unwrap_err().to_string();
    assert!(err.contains("none of 100 frames"), "{err}");
}

#[test]
fn netns_generator_refuses_oversized_frames() {
    if !skip::need_live_sender("netns_generator_refuses_oversized_frames") {
        return;
    }
    let testbed = Testbed::new(&Layout::default()).unwrap();
    let (from, to) = (testbed.host(0), testbed.host(1));
    let target = (to.ip4(0), 9).into();
    let err = LiveSender::new(from, to, 0, &Traffic::new(target, 1473)).unwrap_err().to_string();
    assert!(err.contains("1472"), "{err}");
    let jumbo = Testbed::new(&Layout { mtu: 9000, ..Layout::default() }).unwrap();
    let (from, to) = (jumbo.host(0), jumbo.host(1));
    assert!(LiveSender::new(from, to, 0, &Traffic::new(target, 8000)).is_err(), "more than a page");
    let (sent, seen) = live(&jumbo, false, 3272, 1, 1_000.0, 50);
    assert_eq!((sent.datagrams, seen.total(), seen.wrong), (50, 50, 0), "the largest for a page");
    let traffic = Traffic { gso: true, ..Traffic::new(target, 10) };
    assert!(LiveSender::new(from, to, 0, &traffic).is_err());
}

#[test]
fn netns_the_portable_sender_counts_sent_datagrams() {
    if !skip::need_root("netns_the_portable_sender_counts_sent_datagrams") {
        return;
    }
    let testbed = Testbed::new(&Layout::default()).unwrap();
    let (from, to) = (testbed.host(0), testbed.host(1));
    for (ipv6, segment) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut traffic = Traffic {
            flows: 5,
            pps: Some(20_000.0),
            gso: segment,
            payload: Some(b"portable".to_vec()),
            ..Traffic::new((to.ip(0, ipv6), 1).into(), 0)
        };
        let (port, receiver) = receive(to, to.ip(0, ipv6), traffic.datagram().into_owned(), 4_000);
        traffic.target.set_port(port);
        let sent = from.run(|| sockets::send(&traffic, Until::Count(4_000))).unwrap();
        let seen = receiver.join().unwrap();
        assert_eq!((sent.datagrams, sent.rejected), (4_000, 0));
        assert_eq!((seen.total(), seen.wrong), (4_000, 0), "IPv6 {ipv6}, GSO {segment}");
        assert_even(&seen, 5);
    }
}
