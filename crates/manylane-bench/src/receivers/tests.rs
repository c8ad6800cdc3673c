//! Every kind of receiver over loopback: it counts each datagram, answers each request, and stops.

use std::net::UdpSocket;
use std::time::Duration;

use manylane_test_support::{need_uring, wait_for};

use crate::receivers::{Kind, ReceiverOptions, RunningReceiver, Work};

fn options(threads: usize) -> ReceiverOptions {
    let addr = ([127, 0, 0, 1], 0).into();
    ReceiverOptions { recv_buffer: 4 << 20, cpus: vec![0], ..ReceiverOptions::new(addr, threads, 10) }
}

/// Receivers that need neither a device nor the kernel module. Reports a skip of `test` if those of
/// io_uring are not among them.
fn kinds(test: &str) -> impl Iterator<Item = Kind> {
    let has_uring = need_uring(test, manylane::probe().uring);
    let is_wanted =
        move |kind: &Kind| !kind.needs_device() && !kind.needs_module() && (has_uring || !kind.needs_uring());
    Kind::ALL.into_iter().filter(is_wanted)
}

/// Sends `count` datagrams from each of 8 sources and waits until they have arrived.
fn exercise(running: &dyn RunningReceiver, count: u64) {
    for _ in 0..8 {
        let sender = UdpSocket::bind("127.0.0.1:0").unwrap();
        for number in 0..count {
            // An empty payload is a datagram like any other.
            sender.send_to(&[7; 10][..(number % 11) as usize], running.addr()).unwrap();
        }
    }
    wait_for("all datagrams", || running.snapshot(), |seen| seen.delivered >= 8 * count);
}

#[test]
fn every_receiver_counts_exactly_and_stops() {
    for kind in kinds("every_receiver_counts_exactly_and_stops") {
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

/// Sends 100 requests from each of 4 sources, and waits each time for the same payload as reply.
fn send_requests(to: std::net::SocketAddr) {
    let mut buffer = [0; 2000];
    for source in 0..4_u8 {
        let client = UdpSocket::bind("127.0.0.1:0").unwrap();
        client.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        client.connect(to).unwrap();
        for number in 0..100_usize {
            let payload = vec![source; number * 13];
            client.send(&payload).unwrap();
            let len = loop {
                match client.recv(&mut buffer) {
                    // A receive with a timeout returns EINTR when its thread was stopped for a
                    // moment.
                    Err(err) if err.kind() == std::io::ErrorKind::Interrupted => {}
                    other => break other.unwrap(),
                }
            };
            assert_eq!(buffer[..len], payload, "source {source}, number {number}");
        }
    }
}

#[test]
fn loopback_every_receiver_answers_every_request() {
    for kind in kinds("loopback_every_receiver_answers_every_request") {
        for (threads, ip) in [(1, [127, 0, 0, 1]), (3, [127, 0, 0, 1]), (2, [0, 0, 0, 0])] {
            let options = ReceiverOptions { addr: (ip, 0).into(), work: Work::Echo, ..options(threads) };
            let running = kind.start(&options).unwrap();
            send_requests(([127, 0, 0, 1], running.addr().port()).into());
            let end = running.stop().unwrap();
            assert_eq!((end.delivered, end.kernel_dropped), (400, 0), "{kind} with {threads} threads");
        }
    }
}

#[test]
fn an_idle_receiver_stops_too() {
    for kind in kinds("an_idle_receiver_stops_too") {
        let running = kind.start(&options(3)).unwrap();
        assert_eq!(running.stop().unwrap().delivered, 0, "{kind}");
    }
}

#[test]
fn a_dropped_receiver_frees_its_port() {
    for kind in kinds("a_dropped_receiver_frees_its_port") {
        let running = kind.start(&options(2)).unwrap();
        let addr = running.addr();
        drop(running);
        UdpSocket::bind(addr).unwrap_or_else(|err| panic!("{kind} still holds {addr}: {err}"));
    }
}
