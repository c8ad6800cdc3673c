//! Tests of queues on a veth pair with an XDP program: members of one queue, long packets,
//! checksums.

use std::net::UdpSocket;
use std::os::fd::AsFd as _;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use manylane_test_support::{Forced, need_kernel, need_unless_forced, wait_for};

use super::real_support::{Pair, Program, eventually, options, partial_head, with_pair};
use crate::packet::PacketSocket;
use crate::xsk::open::Step;
use crate::xsk::queue::Queue;
use crate::xsk::{QueueOptions, owners};

/// Time limit of retries.
const TIMEOUT: Duration = Duration::from_secs(120);

fn frame(member: u8, number: u32, len: usize) -> Vec<u8> {
    let mut bytes = vec![2, 0, 0, 0, 1, member, 2, 0, 0, 0, 1, 99, 0x88, 0xb5];
    bytes.extend(number.to_be_bytes());
    bytes.extend((bytes.len()..len).map(|at| (at as u32 * 7 + number) as u8));
    bytes
}

/// Receives `count` packets, each equal to `expected`.
fn receive_all(queue: &mut Queue, count: u32, expected: impl Fn(u32) -> Vec<u8>) {
    let mut next = 0;
    let receive = || {
        for i in 0..queue.receive(32) {
            assert_eq!(queue.packet(i), expected(next));
            next += 1;
        }
        (next, queue.frame_counts(), crate::xsk::statistics(queue.as_fd()))
    };
    let (received, ..) = wait_for(&format!("{count} packets"), receive, |(next, ..)| *next >= count);
    assert_eq!(received, count);
}

fn at_rest(queue: &mut Queue) {
    let complete = || {
        queue.receive(0);
        queue.frame_counts()
    };
    wait_for("the completion of all frames", complete, |census| census.sending == 0);
    queue.receive(0);
}

#[test]
fn netns_queue_members_are_added_and_removed() {
    with_pair("netns_queue_members_are_added_and_removed", 1500, |Pair { near, far }| {
        let options = QueueOptions { frames: 256, ..options(near) };
        let program = Program::attach(near).unwrap();
        let wire = PacketSocket::open(far).unwrap();
        let first = Queue::open(&options).unwrap();
        let share = first.downgrade();
        let mut second = Queue::join(&share, &options).unwrap();
        program.lead(0, first.as_fd());
        program.lead(1, second.as_fd());
        let step = |options| Queue::join(&share, &options).unwrap_err().step;
        assert_eq!(step(QueueOptions { queue: 1, ..options }), Step::Options);
        for number in 0..10 {
            wire.send(&frame(0, number, 100)).unwrap();
            wire.send(&frame(1, number, 100)).unwrap();
        }
        receive_all(&mut second, 10, |number| frame(1, number, 100));
        // The first member, which opened the queue, leaves with ten unread packets.
        wait_for("packets in the ring", || first.has_received(), |has_received| *has_received);
        program.leave(0);
        drop(first);
        second.receive(0);
        let census = second.frame_counts();
        assert_eq!((census.filling, census.free, census.invalid), (64, 192, 0), "{census:?}");
        // Frames that are not redirected go to the kernel, and the other member receives all of
        // its own.
        for number in 0..300 {
            wire.send(&frame(0, number, 100)).unwrap();
            wire.send(&frame(1, number, 100)).unwrap();
            receive_all(&mut second, 1, |_| frame(1, number, 100));
        }
        // A third member joins a queue whose first socket is closed.
        let mut third = Queue::join(&second.downgrade(), &options).unwrap();
        program.lead(2, third.as_fd());
        program.leave(1);
        drop(second);
        for number in 0..300 {
            wire.send(&frame(2, number, 100)).unwrap();
            receive_all(&mut third, 1, |_| frame(2, number, 100));
        }
        third.receive(0);
        let census = third.frame_counts();
        assert_eq!((census.filling, census.free, census.invalid), (64, 192, 0), "{census:?}");
        drop(third);
        let err = Queue::join(&share, &options).unwrap_err();
        assert_eq!(err.step, Step::Join);
        // The queue is free after its last member.
        drop(eventually(|| Queue::open(&options)));
    });
}

#[test]
fn netns_members_on_several_threads_lose_nothing() {
    const FRAMES_EACH: u32 = 20_000;
    const WINDOW_FRAMES: usize = 16;
    with_pair("netns_members_on_several_threads_lose_nothing", 1500, |Pair { near, far }| {
        let options = QueueOptions { frames: 256, ..options(near) };
        let program = Program::attach(near).unwrap();
        // The far end receives XDP frames only with NAPI, which its own program makes it run.
        let _far_program = Program::attach(far).unwrap();
        let first = Queue::open(&options).unwrap();
        let second = Queue::join(&first.downgrade(), &options).unwrap();
        program.lead(0, first.as_fd());
        program.lead(1, second.as_fd());
        let got = [AtomicUsize::new(0), AtomicUsize::new(0)];
        let over = Barrier::new(2);
        let member = |mut queue: Queue, number: u8| {
            let (start, mut next) = (Instant::now(), 0);
            while next < FRAMES_EACH {
                assert!(start.elapsed() < 3 * TIMEOUT, "{next} of {FRAMES_EACH}: {queue:?}");
                let count = queue.receive(32);
                let (payloads, mut sender) = queue.split();
                for i in 0..count {
                    let expected = frame(number, next, 100);
                    assert_eq!(payloads.payload(i), expected);
                    // Sent back, in place or in a frame of its own; not checked there.
                    if next % 2 == 0 {
                        assert!(sender.send_in_place(i, 100));
                    } else if let Some(mut fresh) = sender.alloc() {
                        sender.frame_mut(&mut fresh)[..100].copy_from_slice(&expected);
                        assert!(sender.send_frame(fresh, 100).is_ok());
                    }
                    next += 1;
                }
                assert_eq!(sender.flush().unwrap(), 0);
                got[usize::from(number)].store(next as usize, Ordering::Release);
                if count == 0 {
                    std::thread::yield_now();
                }
            }
            assert_eq!(crate::xsk::statistics(queue.as_fd()).unwrap().dropped(), 0);
            at_rest(&mut queue);
            over.wait();
            let census = queue.frame_counts();
            over.wait();
            census
        };
        let censuses = std::thread::scope(|scope| {
            let threads = [scope.spawn(|| member(first, 0)), scope.spawn(|| member(second, 1))];
            let wire = PacketSocket::open(far).unwrap();
            for number in 0..FRAMES_EACH {
                for to in 0..2_u8 {
                    let start = Instant::now();
                    while got[usize::from(to)].load(Ordering::Acquire) + WINDOW_FRAMES <= number as usize {
                        assert!(start.elapsed() < TIMEOUT, "member {to} is stuck at {number}: {got:?}");
                        std::thread::yield_now();
                    }
                    wire.send(&frame(to, number, 100)).unwrap();
                }
            }
            threads.map(|thread| thread.join().unwrap())
        });
        for census in censuses {
            assert_eq!((census.sending, census.allocated, census.invalid), (0, 0, 0), "{census:?}");
            assert_eq!(census.total(), 256);
        }
    });
}

#[test]
fn netns_long_packets_are_received_whole() {
    let test = "netns_long_packets_are_received_whole";
    if !need_kernel(test, (5, 18), "XDP programs for frames in several pieces") {
        return;
    }
    with_pair(test, 9000, |Pair { near, far }| {
        let program = Program::attach(near).unwrap();
        let wire = PacketSocket::open(far).unwrap();
        let options = QueueOptions { multi_buffer: true, ..options(near) };
        let mut queue = Queue::open(&options).unwrap();
        if !need_unless_forced(test, queue.has_multi_buffer(), Forced::Kernel, "no XDP_USE_SG") {
            return;
        }
        program.lead(0, queue.as_fd());
        let len = |number: u32| [60, 5000, 9000, 1792, 1793, 1500][number as usize % 6];
        for number in 0..300 {
            wire.send(&frame(0, number, len(number))).unwrap();
            receive_all(&mut queue, 1, |_| frame(0, number, len(number)));
        }
        // A socket that joins receives them, too.
        let mut other = Queue::join(&queue.downgrade(), &options).unwrap();
        assert!(other.has_multi_buffer());
        program.lead(1, other.as_fd());
        for number in 0..3 {
            wire.send(&frame(1, number, 7000)).unwrap();
        }
        receive_all(&mut other, 3, |number| frame(1, number, 7000));
        drop(other);
        queue.receive(0);
        let census = queue.frame_counts();
        assert_eq!((census.filling, census.free, census.invalid), (64, 64, 0), "{census:?}");
        assert_eq!(crate::xsk::statistics(queue.as_fd()).unwrap().dropped(), 0);
        // Without multi-buffer: dropped by the kernel, and counted.
        drop(queue);
        let mut queue = eventually(|| Queue::open(&QueueOptions { multi_buffer: false, ..options }));
        assert!(!queue.has_multi_buffer());
        program.lead(0, queue.as_fd());
        wire.send(&frame(0, 1, 5000)).unwrap();
        wire.send(&frame(0, 2, 60)).unwrap();
        receive_all(&mut queue, 1, |_| frame(0, 2, 60));
        assert_eq!(crate::xsk::statistics(queue.as_fd()).unwrap().dropped(), 1);
    });
}

#[test]
fn netns_partial_checksums_are_completed() {
    with_pair("netns_partial_checksums_are_completed", 1500, |Pair { near, far }| {
        let program = Program::attach(near).unwrap();
        let wire = PacketSocket::open(far).unwrap();
        let receiver = UdpSocket::bind("192.0.2.2:0").unwrap();
        receiver.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let port = receiver.local_addr().unwrap().port();
        let mut queue = Queue::open(&options(near)).unwrap();
        let (test, has) = ("netns_partial_checksums_are_completed", queue.split().1.has_csum_offload());
        if !need_unless_forced(test, has, Forced::Kernel, "no XDP_UMEM_TX_METADATA_LEN") {
            return;
        }
        program.lead(0, queue.as_fd());
        wire.send(&frame(0, 7, 142)).unwrap();
        wait_for("a frame", || queue.receive(32), |count| *count > 0);
        queue.find_payloads(|_, _| Some((42, 100)));
        let (payloads, mut sender) = queue.split();
        let payload = payloads.payload(0);
        partial_head(sender.in_place_header_mut(0).unwrap(), port, 100);
        assert!(sender.send_in_place_partial(0, 100, 34, 6));
        // Partial, it is rejected; otherwise it would arrive first.
        let mut send = |partial: bool, number: u8| {
            let mut fresh = sender.alloc().unwrap();
            let bytes = sender.frame_mut(&mut fresh);
            partial_head(bytes, port, 50);
            bytes[42..92].fill(number);
            if partial {
                sender.send_frame_partial(fresh, 92, 34, 6).unwrap();
            } else {
                sender.send_frame(fresh, 92).unwrap();
            }
        };
        send(false, 1);
        send(true, 2);
        assert_eq!(sender.flush().unwrap(), 0);
        let mut got = [0; 2048];
        let len = receiver.recv(&mut got).unwrap();
        assert_eq!(got[..len], *payload);
        let len = receiver.recv(&mut got).unwrap();
        assert_eq!(got[..len], [2; 50]);
        at_rest(&mut queue);
        let census = queue.frame_counts();
        assert_eq!((census.filling, census.free, census.invalid), (64, 64, 0), "{census:?}");
        assert_eq!(crate::xsk::statistics(queue.as_fd()).unwrap().tx_invalid_descs, 0);
    });
}

#[test]
fn netns_owners_of_a_queue_are_found() {
    with_pair("netns_owners_of_a_queue_are_found", 1500, |Pair { near, far }| {
        match owners(near, 0) {
            Ok(found) => assert_eq!(found, []),
            Err(err) => {
                let (test, why) =
                    ("netns_owners_of_a_queue_are_found", format!("no XDP_SOCKETS_DIAG: {err}"));
                _ = need_unless_forced(test, false, Forced::Kernel, &why);
                return;
            }
        }
        let queue = Queue::open(&options(near)).unwrap();
        // The member, and the socket with which the queue was opened.
        assert_eq!(owners(near, 0).unwrap().len(), 2);
        let other = Queue::join(&queue.downgrade(), &options(near)).unwrap();
        assert_eq!(owners(near, 0).unwrap().len(), 3);
        assert_eq!((owners(near, 1).unwrap(), owners(far, 0).unwrap()), (vec![], vec![]));
        drop((queue, other));
    });
}
