//! The benchmarks in small: at a rate that nobody finds hard, every receiver takes and answers all, and the sums are
//! exact.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a failed test is what they make")]

use std::net::UdpSocket;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use manylane::Steering;
use manylane_testbed::bench::flap::{self, Event};
use manylane_testbed::bench::{Director, Load, Options, Setup, measure};
use manylane_testbed::receiver::{Kind, ReceiverOptions, Work};
use manylane_testbed::traffic::answers::Answers;
use manylane_testbed::{Layout, Testbed, skip};

fn receiver(setup: &Setup, work: Work, threads: usize) -> ReceiverOptions {
    ReceiverOptions {
        addr: setup.bind_addr(),
        work,
        threads,
        batch: 64,
        // Whatever else the machine does meanwhile, nothing is lost for want of room.
        recv_buffer: 64 << 20,
        size: 20,
        cpus: Vec::new(),
        linger: Duration::ZERO,
        devices: setup.device_names(),
        ring: 4096,
        steering: Steering::Flow,
    }
}

fn load() -> Load {
    Load { pps: Some(4000.0), duration: Duration::from_millis(200), size: 20, flows: 16, segment: false }
}

/// All that was sent was done, and all of it by the application.
fn all_is_done(setup: &mut Setup, kind: Kind, work: Work, threads: usize) {
    let options = receiver(setup, work, threads);
    let sample = measure(setup, kind, &options, &load(), 0).unwrap();
    let what = format!("{kind}, {work:?}, {threads} threads: {sample:?}");
    assert!(sample.sent > 100, "{what}");
    assert_eq!((sample.delivered, sample.kernel_dropped, sample.loss), (sample.sent, 0, 0.0), "{what}");
    assert_eq!(sample.taken, (work == Work::Echo).then_some(sample.sent), "{what}");
    assert!(sample.rx_cpu_ns > 0.0, "{what}");
}

#[test]
fn loopback_every_request_is_answered_and_counted() {
    for kind in Kind::ALL.into_iter().filter(|kind| !kind.needs_device()) {
        let mut setup = Setup::loopback(None).unwrap();
        for threads in [1, 2] {
            all_is_done(&mut setup, kind, Work::Echo, threads);
        }
    }
}

#[test]
fn netns_every_request_is_answered_and_counted() {
    if !skip::need_root("netns_every_request_is_answered_and_counted") {
        return;
    }
    let mut setup = Setup::testbed(None, 1).unwrap();
    for kind in Kind::ALL {
        for threads in [1, 2] {
            all_is_done(&mut setup, kind, Work::Echo, threads);
        }
    }
}

#[test]
fn netns_traffic_arrives_over_every_interface() {
    if !skip::need_root("netns_traffic_arrives_over_every_interface") {
        return;
    }
    const LINKS: usize = 3;
    let mut setup = Setup::testbed(None, LINKS).unwrap();
    assert!(setup.bind_addr().ip().is_unspecified() && setup.device_names().len() == LINKS);
    let host = setup.hosts().unwrap().1.clone();
    let arrived = || (0..LINKS).map(|link| host.device_counters(link).unwrap().rx_packets);
    for kind in Kind::ALL {
        let before: Vec<u64> = arrived().collect();
        all_is_done(&mut setup, kind, Work::Count, 2);
        let shares: Vec<u64> = arrived().zip(before).map(|(now, before)| now - before).collect();
        // The links take turns, in two runs that end anywhere.
        let (least, most) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
        assert!(*least > 100 && most - least <= 2, "{kind}: {shares:?}");
        all_is_done(&mut setup, kind, Work::Echo, 2);
    }
}

#[test]
fn netns_only_answers_are_taken_from_the_kernel() {
    if !skip::need_root("netns_only_answers_are_taken_from_the_kernel") {
        return;
    }
    // Hosts that have to find each other first: what is no answer must pass.
    let testbed = Testbed::new(&Layout { neighbours: false, ..Layout::default() }).unwrap();
    let (a, b) = (testbed.host(0), testbed.host(1));
    for ipv6 in [false, true] {
        let (server, other) = b.run(|| {
            (UdpSocket::bind((b.ip(0, ipv6), 0)).unwrap(), UdpSocket::bind((b.ip(0, ipv6), 0)).unwrap())
        });
        let client = a.run(|| UdpSocket::bind((a.ip(0, ipv6), 0)).unwrap());
        client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let answers = Answers::over(a, &[0], server.local_addr().unwrap().port()).unwrap();
        for _ in 0..5 {
            server.send_to(b"counted", client.local_addr().unwrap()).unwrap();
        }
        other.send_to(b"passed", client.local_addr().unwrap()).unwrap();
        let mut buffer = [0; 16];
        // Only the one that is no answer comes through, and it was the last.
        assert_eq!(client.recv(&mut buffer).unwrap(), 6);
        let start = Instant::now();
        while answers.count().unwrap() < 5 && start.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(answers.count().unwrap(), 5, "IPv6 {ipv6}");
    }
}

struct Nobody(AtomicBool);

impl Director for Nobody {
    fn progress(&mut self, _done: f64, _what: &str) {}

    fn stop(&self) -> &AtomicBool {
        &self.0
    }
}

fn options(duration: Duration) -> Options {
    Options {
        threads: vec![1],
        sizes: vec![20],
        receivers: flap::RECEIVERS.to_vec(),
        work: Work::Count,
        rounds: 1,
        duration,
        pps: Some(2000.0),
        flows: 8,
        batch: 64,
        recv_buffer: 64 << 20,
        linger: None,
        steering: Steering::Flow,
        quick: false,
        command: String::new(),
    }
}

#[test]
fn netns_flaps_are_survived_and_every_datagram_is_accounted_for() {
    if !skip::need_root("netns_flaps_are_survived_and_every_datagram_is_accounted_for") {
        return;
    }
    let mut setup = Setup::testbed(None, 1).unwrap();
    let options = options(Duration::from_millis(200));
    let document = flap::run(&mut setup, &options, &Event::ALL, &mut Nobody(AtomicBool::new(false))).unwrap();
    assert_eq!(document.schema, "manylane.bench.flap.v1");
    let possible = |kind: &Kind| Event::ALL.iter().filter(|event| event.is_possible(*kind)).count();
    assert_eq!(document.rows.len(), flap::RECEIVERS.iter().map(possible).sum::<usize>());
    for row in &document.rows {
        let what = format!("{} beside {}: {:?}", row.event, row.receiver, row.samples);
        let [seen] = &row.samples[..] else { panic!("{what}") };
        assert_eq!(seen.sample.sent, seen.sample.delivered + seen.lost, "{what}");
        // Whatever happened, traffic flows again after it: half of it was before.
        assert!(seen.sample.delivered > 250, "{what}");
        if !row.event.ends_with("-link") {
            assert_eq!((seen.lost, seen.refused), (0, 0), "{what}");
        } else {
            assert!(seen.refused > 0, "{what}");
        }
    }
}

#[test]
fn flaps_need_a_testbed() {
    let mut setup = Setup::loopback(None).unwrap();
    let options = options(Duration::from_millis(1));
    let err = flap::run(&mut setup, &options, &Event::ALL, &mut Nobody(AtomicBool::new(false))).unwrap_err();
    assert!(err.to_string().contains("testbed"), "{err}");
}
