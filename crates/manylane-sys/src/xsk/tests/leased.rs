//! Tests of leased queues on rings in plain memory, which another process may write to.

use std::cell::Cell;
use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use libc::xdp_desc;

use super::super::lessor::LessorQueue;
use super::super::ring::MockRing;
use super::*;

const ENTRIES: u32 = 64;
const EMPTY: xdp_desc = xdp_desc { addr: 0, len: 0, options: 0 };

/// The rings of a queue.
struct Rings {
    fill: MockRing<u64>,
    completion: MockRing<u64>,
    rx: MockRing<xdp_desc>,
    tx: MockRing<xdp_desc>,
}

impl Rings {
    /// Rings whose entries to be received are all `desc`.
    fn new(desc: xdp_desc) -> Self {
        Self {
            fill: MockRing::new(ENTRIES, 0),
            completion: MockRing::new(ENTRIES, 0),
            rx: MockRing::new(ENTRIES, desc),
            tx: MockRing::new(ENTRIES, EMPTY),
        }
    }

    /// A queue on them, without a socket.
    fn queue(&self) -> LeasedQueue {
        let terms = QueueParams {
            frames: 2 * ENTRIES,
            umem_ring_size: ENTRIES,
            ring_size: ENTRIES,
            lease_id: 1,
            ..QueueParams::default()
        };
        let rings = AllRings {
            fill: self.fill.memory(),
            completion: self.completion.memory(),
            rx: self.rx.memory(),
            tx: self.tx.memory(),
        };
        let map = |len| Mapping::new(len).unwrap();
        LeasedQueue {
            terms,
            socket: Socket::from_fd(File::open("/dev/null").unwrap().into()),
            rings,
            memory: map(memory_size(terms.frames)),
            maps: [(); 2].map(|()| Maps([map(1), map(1)])),
        }
    }

    /// Number of entries that were removed from the RX ring.
    fn removed(&self) -> u32 {
        self.rx.counters()[1].load(Ordering::Relaxed)
    }
}

/// Ends the thread that fills a ring, also if the test fails.
struct EndThread<'a>(&'a AtomicBool);

impl Drop for EndThread<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `test` while the RX ring is refilled as fast as it is emptied.
fn with_a_ring_that_stays_full(desc: xdp_desc, test: impl FnOnce(&Rings, &LeasedQueue)) {
    let rings = Rings::new(desc);
    let queue = rings.queue();
    let [produced, consumed] = rings.rx.counters();
    let is_over = AtomicBool::new(false);
    let over = EndThread(&is_over);
    let fill =
        || produced.store(consumed.load(Ordering::Relaxed).wrapping_add(ENTRIES / 2), Ordering::Release);
    fill();
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                fill();
                thread::yield_now();
            }
        });
        let _over = over;
        test(&rings, &queue);
    });
}

#[test]
fn a_receive_ends_however_many_invalid_packets_are_added() {
    let invalid = xdp_desc { addr: u64::MAX, len: 60, options: 0 };
    with_a_ring_that_stays_full(invalid, |rings, queue| {
        for _ in 0..100 {
            let before = rings.removed();
            let mut guard = queue.lock(Holder::new(1, 1), |_| false).unwrap();
            assert!(guard.peek(|_| Some(())).is_none());
            let refused = guard.refused();
            assert!(refused <= REFUSED_MAX, "{refused}");
            assert_eq!(rings.removed().wrapping_sub(before), refused);
        }
        assert!(rings.removed() >= ENTRIES / 2, "the next receive goes on");
    });
}

#[test]
fn refused_packets_are_removed_and_an_accepted_one_stays() {
    let rings = Rings::new(xdp_desc { addr: 256, len: 60, options: 0 });
    let queue = rings.queue();
    rings.rx.counters()[0].store(3, Ordering::Release);
    let mut guard = queue.lock(Holder::new(1, 1), |_| false).unwrap();
    let calls = Cell::new(0);
    let second = |_: &[u8]| {
        calls.set(calls.get() + 1);
        (calls.get() > 1).then_some(calls.get())
    };
    assert_eq!(guard.peek(second).map(|(found, packet)| (found, packet.len())), Some((2, 60)));
    assert_eq!((guard.refused(), rings.removed()), (1, 1));
    assert_eq!(guard.peek(second).map(|(found, _)| found), Some(3), "the same packet");
    guard.pop();
    assert_eq!((guard.refused(), rings.removed()), (1, 2));
}

#[test]
fn a_queue_is_reclaimed_however_much_is_added() {
    let valid = xdp_desc { addr: 256, len: 60, options: 0 };
    for desc in [valid, xdp_desc { options: 1, ..valid }, xdp_desc { addr: u64::MAX, ..valid }] {
        with_a_ring_that_stays_full(desc, |rings, queue| {
            for _ in 0..100 {
                let before = rings.removed();
                assert!(LessorQueue::reclaim(queue, |_| false));
                assert!(rings.removed().wrapping_sub(before) <= ENTRIES);
            }
            let filled = Consumer::resume(rings.fill.memory()).pending();
            assert_eq!(filled > 0, desc.addr != u64::MAX, "only frames of the queue are filled again");
        });
    }
}
