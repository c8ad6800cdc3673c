//! Tests of the queue on the real kernel: on the loopback device of a network namespace of its
//! own.

use std::net::UdpSocket;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::time::Duration;

use manylane_test_support::{need_leases, wait_for};

use super::real_support::{datagram, in_namespace, options, reopen};
use crate::xsk::open::Step;
use crate::xsk::queue::Queue;
use crate::xsk::{Holder, LeasedQueue, LessorQueue, Mode, QueueOptions};

#[test]
fn netns_the_lock_of_a_queue_is_broken_if_its_holder_is_gone() {
    let test = "netns_the_lock_of_a_queue_is_broken_if_its_holder_is_gone";
    if !need_leases(test) {
        return;
    }
    in_namespace(test, |ifindex| {
        let mut queue = LessorQueue::open(ifindex, 0, false).unwrap();
        let mut open_leased = |lease| {
            let (terms, socket) = queue.lease(lease).unwrap();
            LeasedQueue::open(terms, socket, queue.file()).unwrap()
        };
        let (first, second) = (open_leased(1), open_leased(65535));
        // In the format of a token: the use count of its slot, and the slot.
        let (one, other) = (Holder::new(1, 7 << 32 | 4096), Holder::new(65535, 7 << 32 | 4096));
        assert_eq!((other.lease(), other.token()), (65535, 7 << 32 | 4096));
        std::mem::forget(first.lock(one, |_| false).unwrap());
        // The holder itself again: a signal handler.
        assert!(first.lock(one, |_| true).is_none());
        assert!(second.lock(other, |holder| holder != one).is_none());
        drop(second.lock(other, |holder| holder == one).unwrap());
        // The lessor identifies holders by lease.
        std::mem::forget(second.lock(other, |_| false).unwrap());
        assert!(!LessorQueue::reclaim(&first, |lease| lease == 1));
        assert!(LessorQueue::reclaim(&first, |lease| lease == 65535));
        drop(second.lock(other, |_| false).unwrap());
    });
}

#[test]
fn netns_a_queue_of_a_device_has_one_owner() {
    in_namespace("netns_a_queue_of_a_device_has_one_owner", |ifindex| {
        let options = options(ifindex);
        let mut queue = Queue::open(&options).unwrap();
        assert!(!queue.is_zero_copy() && !queue.has_received());
        assert_eq!(queue.receive(32), 0);
        let census = queue.frame_counts();
        assert_eq!((census.free, census.filling, census.total(), census.invalid), (64, 64, 128, 0));
        assert_eq!(crate::xsk::statistics(queue.as_fd()).unwrap(), crate::xsk::Statistics::default());
        let failed = |options: QueueOptions| {
            let err = Queue::open(&options).unwrap_err();
            (err.step, err.source.raw_os_error().unwrap_or(0))
        };
        assert_eq!(failed(options), (Step::Bind, libc::EBUSY));
        assert_eq!(failed(QueueOptions { queue: 7, ..options }), (Step::Bind, libc::EINVAL));
        assert_eq!(failed(QueueOptions { ifindex: 999, ..options }), (Step::Bind, libc::ENODEV));
        drop(queue);
        assert!(!reopen(&QueueOptions { mode: Mode::Auto, ..options }).is_zero_copy());
        let zero_copy = QueueOptions { mode: Mode::ZeroCopy, ..options };
        let busy = (Step::Bind, libc::EBUSY);
        let last = wait_for("the release of the queue", || failed(zero_copy), |last| *last != busy);
        assert_eq!(last, (Step::Bind, libc::EOPNOTSUPP));
    });
}

#[test]
fn netns_sent_frames_arrive_and_are_reclaimed() {
    in_namespace("netns_sent_frames_arrive_and_are_reclaimed", |ifindex| {
        // The packets come from a device, not from a route: loopback addresses are rejected by
        // default.
        for setting in ["route_localnet", "accept_local"] {
            std::fs::write(format!("/proc/sys/net/ipv4/conf/lo/{setting}"), "1").unwrap();
        }
        let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
        receiver.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let port = receiver.local_addr().unwrap().port();
        let mut queue = Queue::open(&options(ifindex)).unwrap();
        for round in 0..20_u8 {
            let mut sender = queue.split().1;
            for number in 0..50 {
                let mut fresh = sender.alloc().unwrap();
                let len = datagram(sender.frame_mut(&mut fresh), port, &[round, number]);
                sender.send_frame(fresh, len).unwrap();
            }
            assert_eq!(sender.flush().unwrap(), 0);
            for number in 0..50 {
                let mut got = [0; 16];
                let len = receiver.recv(&mut got).unwrap();
                assert_eq!(got[..len], [round, number]);
            }
            // The kernel completes a packet when the receiver has released it, which may be a
            // moment later.
            let complete = || {
                queue.receive(0);
                queue.frame_counts()
            };
            let census = wait_for("the completion of all frames", complete, |census| census.sending == 0);
            assert_eq!((census.free, census.filling, census.invalid), (64, 64, 0), "{census:?}");
        }
        assert_eq!(crate::xsk::statistics(queue.as_fd()).unwrap().tx_invalid_descs, 0);
        queue.busy_poll(20, 64).unwrap();
        assert_eq!(queue.receive(32), 0);
        queue.busy_poll(0, 0).unwrap();
        assert!(queue.as_fd().as_raw_fd() > 0);
    });
}
