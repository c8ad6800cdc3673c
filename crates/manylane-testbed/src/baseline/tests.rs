use std::net::UdpSocket;
use std::time::{Duration, Instant};

use crate::receiver::{Kind, ReceiverOptions, Running};

fn options(threads: usize) -> ReceiverOptions {
    ReceiverOptions {
        addr: ([127, 0, 0, 1], 0).into(),
        threads,
        batch: 64,
        recv_buffer: 4 << 20,
        size: 10,
        linger: Duration::ZERO,
        device: None,
        ring: 2048,
        cpus: vec![0],
        steering: manylane::Steering::Flow,
    }
}

/// Sends `count` datagrams from each of 8 sources and waits until they arrived, a few seconds at most.
fn exercise(running: &dyn Running, count: u64) {
    for _ in 0..8 {
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        for number in 0..count {
            // An empty payload is a datagram like any other.
            sender.send_to(&[7; 10][..(number % 11) as usize], running.addr()).unwrap();
        }
    }
    let deadline = Instant::now() + Duration::from_secs(5);
    while running.snapshot().delivered < 8 * count && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn every_receiver_counts_exactly_and_stops() {
    for kind in Kind::ALL.into_iter().filter(|kind| !kind.needs_device()) {
        for threads in [1, 4] {
            let running = kind.start(&options(threads)).unwrap();
            exercise(running.as_ref(), 100);
            assert!(running.snapshot().rx_cpu > Duration::ZERO, "{kind} used no CPU time");
            let end = running.stop().unwrap();
            assert_eq!((end.delivered, end.kernel_dropped), (800, 0), "{kind} with {threads} threads");
            assert!(end.rx_cpu > Duration::ZERO, "{kind} forgot its CPU time");
        }
    }
}

#[test]
fn an_idle_receiver_stops_too() {
    for kind in Kind::ALL.into_iter().filter(|kind| !kind.needs_device()) {
        let running = kind.start(&options(3)).unwrap();
        assert_eq!(running.stop().unwrap().delivered, 0, "{kind}");
    }
}

#[test]
fn a_dropped_receiver_leaves_its_port() {
    for kind in Kind::ALL.into_iter().filter(|kind| !kind.needs_device()) {
        let running = kind.start(&options(2)).unwrap();
        let addr = running.addr();
        drop(running);
        UdpSocket::bind(addr).unwrap_or_else(|err| panic!("{kind} still holds {addr}: {err}"));
    }
}
