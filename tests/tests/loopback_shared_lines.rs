//! Lanes share no cache line that one of them writes, and a datagram costs the same number of
//! instructions with any number of lanes and peers. Over kernel sockets; engine `xdp` has a test of
//! its own.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

mod trace_support;

use manylane::{Builder, Engine, Steering, SteeringBackend};
use manylane_tests::{Client, need_uring, send_and_wait};
use trace_support::{BATCH, BATCHES, answer_batches, check, is_traced, trace_lanes};

/// Datagrams for each lane on average. None gets less than half of that, in practice: they are
/// distributed at random.
const DATAGRAMS: usize = 2 * BATCHES * BATCH;
/// Lanes and peers.
const SIZES: [(usize, usize); 3] = [(1, 4), (8, 32), (64, 256)];

#[test]
fn loopback_mmsg_lanes_share_no_written_line() {
    check_engine("loopback_mmsg_lanes_share_no_written_line", Engine::Mmsg);
}

#[test]
fn loopback_uring_lanes_share_no_written_line() {
    let test = "loopback_uring_lanes_share_no_written_line";
    // Not in the traced process, because the probe would take most of the trace.
    if is_traced() || need_uring(test) {
        check_engine(test, Engine::Uring);
    }
}

fn check_engine(test: &str, engine: Engine) {
    let run = || SIZES.into_iter().for_each(|(lanes, peers)| answer_peers(engine, lanes, peers));
    if let Some(phases) = trace_lanes(test, run) {
        check(engine, &SIZES.map(|(lanes, _)| lanes), &phases);
    }
}

/// Lets each of `lanes` lanes answer datagrams of `peers` peers.
fn answer_peers(engine: Engine, lanes: usize, peers: usize) {
    let mut builder = Builder::new("127.0.0.1:0").unwrap();
    builder.engine(engine).lanes(lanes).batch(BATCH).datagram_size(2048).gso(false);
    // Loading eBPF would take most of the trace.
    builder.steering(Steering::Random).steering_backend(SteeringBackend::ClassicBpf);
    let socket = builder.open().unwrap();
    let clients: Vec<_> = (0..peers).map(|_| Client::to(socket.local_addr())).collect();
    send_and_wait(|| {
        (0..DATAGRAMS * lanes).for_each(|number| clients[number % peers].send(b"some request"));
    });
    for (number, lane) in socket.into_lanes().into_iter().enumerate() {
        answer_batches(number, lane);
    }
}
