//! The UDP proxy does not allocate for a datagram, once its sessions are established. One test,
//! because the counter is that of the process.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

#[expect(dead_code, reason = "the replies of a server are for other programs")]
mod serve_alloc_support;

use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use manylane::{Builder, Engine};
use manylane_proxy::udp::{PayloadKey, UdpLaneCounters, UdpProxy};
use manylane_proxy::{Options, Shared};
use manylane_tests::{Client, TEST_TIMEOUT, need_uring};
use serve_alloc_support::{CLIENTS, COUNTED, WARMUP, allocations, assert_counts};

/// Datagrams of each client that are on the way at a time.
const ROUND_DATAGRAMS: usize = 8;

/// Sends datagrams by all clients, and receives the answers.
fn exchange(clients: &[Client], datagrams: usize) {
    let mut answer = [0; 2048];
    for _ in 0..datagrams.div_ceil(CLIENTS * ROUND_DATAGRAMS) {
        for (at, client) in clients.iter().enumerate() {
            for len in 0..ROUND_DATAGRAMS {
                client.send(&[at as u8; 100][..40 + len]);
            }
        }
        for client in clients {
            (0..ROUND_DATAGRAMS).for_each(|_| _ = client.socket.recv(&mut answer).unwrap());
        }
    }
}

fn check(engine: Engine, key: Option<PayloadKey>) {
    let server = UdpSocket::bind("127.0.0.1:0").unwrap();
    server.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let to = server.local_addr().unwrap();
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut bytes = [0; 2048];
            while !ends.load(Ordering::Relaxed) {
                if let Ok((len, peer)) = server.recv_from(&mut bytes) {
                    server.send_to(&bytes[..len], peer).unwrap();
                }
            }
        });
        let mut builder = Builder::new("127.0.0.1:0").unwrap();
        builder.engine(engine).lanes(1);
        let socket = builder.open().unwrap();
        let address = socket.local_addr();
        let shared = Shared::new(Options { idle_timeout: TEST_TIMEOUT, ..Options::default() }, &[to]);
        let counters = Arc::<UdpLaneCounters>::default();
        let proxy = UdpProxy::new(socket.into_lanes(), Arc::clone(&shared), Arc::clone(&counters), key);
        let mut proxy = proxy.unwrap();
        let lane = scope.spawn(move || proxy.run().unwrap());
        let clients: Vec<Client> = (0..CLIENTS).map(|_| Client::to(address)).collect();
        exchange(&clients, WARMUP);
        let before = allocations();
        exchange(&clients, COUNTED);
        assert_eq!(allocations() - before, 0, "{engine}, {key:?}");
        shared.stop();
        lane.join().unwrap();
        ends.store(true, Ordering::Relaxed);
        let total = counters.snapshot();
        assert!(total.answers_sent >= (WARMUP + COUNTED) as u64, "{total:#?}");
        assert_eq!((total.sessions, total.forwarded), (CLIENTS as u64, total.datagrams), "{total:#?}");
    });
}

#[test]
fn loopback_udp_proxy_allocates_nothing_for_a_datagram() {
    assert_counts();

    let has_uring = need_uring("loopback_udp_proxy_allocates_nothing_for_a_datagram");
    for engine in [Some(Engine::Mmsg), has_uring.then_some(Engine::Uring)].into_iter().flatten() {
        check(engine, None);
        check(engine, "0:40".parse().ok());
    }
}
