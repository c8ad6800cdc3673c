//! Cost of a lane beyond the system call, and of each option of receiving.
//!
//! `cargo bench -p manylane`: a queue is filled, then emptied by each receiver in turn, with only
//! the emptying on the clock of the thread. No wake-ups, no second thread, no softirq: just the
//! receive path. The first rows are the bare ring without anything of the library; lanes are read
//! against them.

#![allow(clippy::unwrap_used, reason = "a bench ends where its set-up fails")]

use std::hint::black_box;
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::time::Duration;

use manylane::{Builder, Steering};
use manylane_sys::mmsg::{RecvOptions, RecvRing, Wait};
use manylane_sys::{cpu, sock};

/// Datagrams in the queue, bytes in each, rounds.
const QUEUE_LEN: usize = 2000;
const PAYLOAD_BYTES: usize = 10;
const ROUNDS: usize = 60;
const RECV_BUFFER_BYTES: usize = 8 << 20;

type Receiver = Box<dyn FnMut() -> usize>;

/// A receiver and the sender that fills its queue.
struct Row {
    name: String,
    sender: UdpSocket,
    receive: Receiver,
    nanos: Vec<u64>,
}

fn sender(target: std::net::SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.connect(target).unwrap();
    socket
}

fn ring(name: &str, batch: usize, buffer: usize) -> Row {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    sock::set_buffer(socket.as_fd(), sock::Buffer::Receive, RECV_BUFFER_BYTES).unwrap();
    let sender = sender(socket.local_addr().unwrap());
    let mut ring = RecvRing::new(RecvOptions { batch, buffer, control: false }).unwrap();
    let receive = move || {
        let messages = ring.recv(socket.as_fd(), Wait::First).unwrap();
        for index in 0..messages {
            black_box(ring.message(index).data.first());
        }
        messages
    };
    Row { name: format!("ring, {name}"), sender, receive: Box::new(receive), nanos: Vec::new() }
}

fn lane(name: &str, change: impl Fn(&mut Builder)) -> Row {
    let mut builder = Builder::new("127.0.0.1:0").unwrap();
    builder.lanes(1).recv_buffer(RECV_BUFFER_BYTES);
    change(&mut builder);
    let socket = builder.open().unwrap();
    let sender = sender(socket.local_addr());
    let mut lane = socket.into_lanes().pop().unwrap();
    let receive = move || {
        let received = lane.recv_timeout(Duration::from_millis(100)).unwrap();
        let datagrams = received.batch.len();
        for datagram in received.batch {
            black_box(datagram.payload().first());
        }
        datagrams
    };
    Row { name: format!("lane, {name}"), sender, receive: Box::new(receive), nanos: Vec::new() }
}

fn main() {
    let mut rows = vec![
        ring("batch 64", 64, 2048),
        ring("batch 1", 1, 2048),
        lane("default (batch 64, GRO)", |_| {}),
        lane("no GRO", |b| _ = b.gro(false).datagram_size(2048)),
        lane("ECN", |b| _ = b.ecn(true)),
        lane("time stamps", |b| _ = b.timestamps(true)),
        lane("batch 1", |b| _ = b.batch(1)),
        lane("batch 1024", |b| _ = b.batch(1024)),
        lane("round robin", |b| _ = b.steering(Steering::RoundRobin)),
    ];
    for _ in 0..ROUNDS {
        for row in &mut rows {
            for _ in 0..QUEUE_LEN {
                row.sender.send(&[1; PAYLOAD_BYTES]).unwrap();
            }
            let start = cpu::thread_cpu_time();
            let mut taken = 0;
            while taken < QUEUE_LEN {
                taken += (row.receive)();
            }
            let spent = cpu::thread_cpu_time() - start;
            row.nanos.push(spent.as_nanos() as u64 / QUEUE_LEN as u64);
        }
    }
    println!("{:32} {:>8} {:>8} {:>8}   ns of CPU per datagram", "receiver", "min", "median", "max");
    for row in &mut rows {
        row.nanos.sort_unstable();
        let [min, median, max] = [0, ROUNDS / 2, ROUNDS - 1].map(|at| row.nanos[at]);
        println!("{:32} {min:>8} {median:>8} {max:>8}", row.name);
    }
}
