//! Traffic over a UDP proxy with established sessions, whose allocations are counted.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use manylane_proxy::udp::{PayloadKey, UdpLaneCounters, UdpProxy};
use manylane_proxy::{Options, Shared};
use manylane_tests::{Client, TEST_TIMEOUT, Variant, bind_peer};

use crate::serve_alloc_support::{CLIENTS, WARMUP, allocations};

/// Datagrams of each client that are on the way at a time.
const ROUND_DATAGRAMS: usize = 8;
/// Datagrams that are measured at a time: few, because every four seconds a thread of engine `xdp`
/// looks for new queues, and allocates.
const COUNTED: usize = 2_000;
/// Times that allocations are counted until there are none.
const ATTEMPTS_MAX: usize = 10;

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

/// Ends the threads of a test, also if it fails.
struct End<'a>(&'a AtomicBool, Arc<Shared>);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        self.1.stop();
    }
}

fn check_sessions(variant: &Variant, key: Option<PayloadKey>) {
    let server = bind_peer(SocketAddr::from(([127, 0, 0, 1], 0)));
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
        let socket = variant.builder("127.0.0.1:0").lanes(1).open().unwrap();
        let address = socket.local_addr();
        let shared = Shared::new(Options { idle_timeout: TEST_TIMEOUT, ..Options::default() }, &[to]);
        let counters = Arc::<UdpLaneCounters>::default();
        let handle = socket.handle();
        let proxy = UdpProxy::new(socket.into_lanes(), Arc::clone(&shared), Arc::clone(&counters), key);
        let mut proxy = proxy.unwrap();
        let lane = scope.spawn(move || proxy.run().unwrap());
        let end = End(&ends, Arc::clone(&shared));
        let clients: Vec<Client> = (0..CLIENTS).map(|_| Client::to(address)).collect();
        exchange(&clients, WARMUP);
        let counts: Vec<usize> = (0..ATTEMPTS_MAX)
            .map(|_| {
                let before = allocations();
                exchange(&clients, COUNTED);
                allocations() - before
            })
            .take_while(|count| *count != 0)
            .collect();
        assert!(counts.len() < ATTEMPTS_MAX, "{key:?}: allocations, each time: {counts:?}");
        drop(end);
        lane.join().unwrap();
        let total = counters.snapshot();
        assert!(total.answers_sent >= (WARMUP + COUNTED) as u64, "{total:#?}");
        assert_eq!((total.sessions, total.forwarded), (CLIENTS as u64, total.datagrams), "{total:#?}");
        let lanes = handle.counters().total();
        assert!(!variant.is_xdp() || lanes.sent_by_bypass >= COUNTED as u64, "{lanes:#?}");
        manylane_tests::record_counters(&lanes);
    });
}

/// By address, and by a key.
pub(crate) fn check(variant: &Variant) {
    check_sessions(variant, None);
    check_sessions(variant, "0:40".parse().ok());
}
