//! No allocation on the path of a datagram: receive, reply and send, on every variant. The counter
//! counts the calling thread only.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use allocation_counter::measure;
use manylane::{Batch, Builder, Handle, Lane, Outbox, Received};
use manylane_tests::{
    Client, Serving, TEST_TIMEOUT, Variant, map_ip, on_every_variant, record_counters, retry_eintr,
};

const ROUNDS: usize = 300;

/// One lane and a client of it.
struct Rig {
    lane: Lane,
    handle: Handle,
    client: Client,
    payload: Vec<u8>,
    replies: [u8; 2048],
}

impl Rig {
    fn new(builder: &mut Builder, ip: &str) -> Self {
        let socket = builder.lanes(1).open().unwrap();
        let (handle, lane) = (socket.handle(), socket.into_lanes().remove(0));
        let client = Client::to(map_ip(ip, lane.local_addr().port()));
        Self { lane, handle, client, payload: vec![7; 1000], replies: [0; 2048] }
    }

    /// Sends single datagrams, an empty one and a GSO message, answers in every way, and receives
    /// the replies.
    fn round(&mut self) {
        self.client.send(&self.payload[..50]);
        self.client.send(b"");
        self.client.send_gso(&self.payload, 90);
        let mut seen = 0;
        while seen < 14 {
            let Received { batch, mut out } = self.lane.recv_timeout(TEST_TIMEOUT).unwrap();
            for datagram in batch {
                match seen % 4 {
                    0 => out.reply(&datagram, datagram.payload()),
                    1 => out.reply_borrowed(&datagram, datagram.payload()),
                    2 => out.send_to(datagram.peer(), datagram.payload()),
                    _ => out.reply_with(&datagram, 10, |space| space.len()),
                }
                assert!(!datagram.is_truncated() && datagram.local() != datagram.peer());
                std::hint::black_box((datagram.ecn(), datagram.timestamp()));
                seen += 1;
            }
            out.flush();
        }
        for _ in 0..seen {
            retry_eintr(|| self.client.socket.recv(&mut self.replies)).unwrap();
        }
        // An empty receive without waiting, and an unsolicited send.
        assert!(self.lane.recv().unwrap().batch.is_empty());
        self.lane.sender().send_to(self.client.addr(), b"by the way");
        retry_eintr(|| self.client.socket.recv(&mut self.replies)).unwrap();
    }

    fn assert_no_allocation(&mut self) {
        (0..20).for_each(|_| self.round());
        let info = measure(|| (0..ROUNDS).for_each(|_| self.round()));
        assert_eq!((info.count_total, info.bytes_total), (0, 0));
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        record_counters(&self.handle.counters().total());
    }
}

fn check_at(variant: &Variant, bound: &str, ip: &str) {
    for (ecn, timestamps) in [(true, false), (false, false), (true, true)] {
        // Frames of engine xdp have no time stamps, so that the option is refused.
        if timestamps && variant.is_xdp() {
            continue;
        }
        let mut builder = variant.builder(bound);
        Rig::new(builder.ecn(ecn).timestamps(timestamps), ip).assert_no_allocation();
    }
}

/// Checks the counter itself, without which the other tests would always pass.
#[test]
fn loopback_the_allocation_counter_counts() {
    assert_eq!(measure(|| drop(std::hint::black_box(Box::new(1)))).count_total, 1);
}

on_every_variant! {
    fn no_allocation_at_a_specific_address(variant) {
        check_at(variant, "127.0.0.1:0", "127.0.0.1");
    }

    fn no_allocation_at_a_wildcard(variant) {
        check_at(variant, "0.0.0.0:0", "127.0.0.1");
        if manylane_tests::need_ipv6(variant.test) {
            check_at(variant, "[::]:0", "::1");
            check_at(variant, "[::]:0", "127.0.0.1");
        }
    }

    /// Losses are counted, not reported, which does not allocate either.
    fn no_allocation_for_losses(variant, no traffic) {
        let mut rig = Rig::new(&mut variant.builder("127.0.0.1:0"), "127.0.0.1");
        let (nowhere, denied) = (SocketAddr::new(rig.client.addr().ip(), 0), map_ip("127.255.255.255", 9));
        let large = [0; 65_508];
        let mut lose = || {
            let mut out = rig.lane.sender();
            (0..10).for_each(|_| out.send_to(nowhere, b"lost"));
            (0..10).for_each(|_| out.send_to(denied, b"lost"));
            out.send_to(denied, &large);
            assert_eq!(out.flush().lost, 20);
        };
        lose();
        assert_eq!(measure(|| (0..20).for_each(|_| lose())).count_total, 0);
    }

    /// A thread that reads the counters allocates, but the lane's thread does not.
    fn no_allocation_while_counters_are_read(variant) {
        let mut rig = Rig::new(&mut variant.builder("127.0.0.1:0"), "127.0.0.1");
        let handle = rig.handle.clone();
        let reads = AtomicU64::new(0);
        // Dropped at the end of the check, also if it panics.
        let checking = Arc::new(());
        let checks = Arc::downgrade(&checking);
        thread::scope(|scope| {
            let _checking = checking;
            scope.spawn(|| {
                while checks.strong_count() > 0 {
                    assert!(measure(|| assert_eq!(handle.counters().lanes.len(), 1)).count_total > 0);
                    reads.fetch_add(1, Ordering::Relaxed);
                }
            });
            while reads.load(Ordering::Relaxed) == 0 {
                thread::yield_now();
            }
            rig.assert_no_allocation();
        });
    }

    /// The same batches and outboxes in a closure.
    fn no_allocation_in_a_closure(variant) {
        static SEEN: AtomicU64 = AtomicU64::new(0);
        let serve = |batch: Batch<'_>, out: &mut Outbox<'_>| {
            let info = measure(|| {
                for datagram in batch {
                    out.reply(&datagram, datagram.payload());
                }
            });
            SEEN.fetch_add(info.count_total, Ordering::Relaxed);
        };
        let serving = Serving::start(variant.builder("127.0.0.1:0").open().unwrap(), serve);
        let client = Client::to(serving.addr);
        (0..200).for_each(|_| client.ping());
        assert_eq!(serving.stop().unwrap().total().delivered, 200);
        assert_eq!(SEEN.load(Ordering::Relaxed), 0);
    }
}
