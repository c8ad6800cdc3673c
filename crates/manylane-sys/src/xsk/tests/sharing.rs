//! Tests with several members of a queue, fragments and checksums, on the mock kernel.

use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::mock::{self, HEADROOM, Mock, MockQueue, options};
use crate::xsk::QueueOptions;
use crate::xsk::linearize::{FRAGS_MAX, Linearizer, PACKET_LEN_MAX};
use crate::xsk::queue::Queue;
use crate::xsk::tx_metadata::METADATA_LEN;
use crate::xsk::wakeup::{KickOutcome, RingWakeup};

fn packet(number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (number * 31 + at) as u8).collect()
}

#[test]
fn a_removed_member_returns_all_frames() {
    let (mock, mut first) = mock::open(options(64, 16, 16, 8));
    let (number, mut second) = mock.join(&options(64, 16, 16, 8), Linearizer::disabled());
    assert_eq!(
        (number, second.frame_counts().filling, second.frame_counts().free),
        (1, 16, 48),
        "the fill ring is full"
    );
    let mut kernel = mock.kernel.borrow_mut();
    for at in 0..12 {
        assert!(kernel.receive_at(1, &packet(at, 60)));
    }
    drop(kernel);
    // Four held, of which one is being sent and one is in the ring; eight unread; two allocated,
    // of which one is in the ring.
    assert_eq!(second.receive(4), 4);
    let mut sender = second.split().1;
    assert!(sender.send_in_place(0, 60));
    mock.budget.set(1);
    mock.send_result.set(Some(|| Ok(KickOutcome::Down)));
    assert_eq!(sender.flush().unwrap(), 0);
    mock.budget.set(0);
    assert!(sender.send_in_place(1, 60));
    let (fresh, _lost) = (sender.alloc().unwrap(), sender.alloc().unwrap());
    sender.send_frame(fresh, 60).unwrap();
    assert_eq!(sender.flush().unwrap(), 2);
    drop(second);
    mock.kernel.borrow_mut().close(1);
    let census = first.frame_counts();
    assert_eq!((census.sending, census.held, census.allocated), (1, 0, 0), "what is on its way");
    // The kernel already has more than one member needs; they return as they are received into.
    assert_eq!((census.filling, census.free, census.invalid), (20, 43, 0));
    mock.kernel.borrow_mut().complete(0);
    first.receive(0);
    assert_eq!(
        (first.frame_counts().filling, first.frame_counts().free),
        (20, 44),
        "the others take it back"
    );
    mock.allocator.lock().audit(&[first.cache()]);
}

#[test]
fn no_member_can_exhaust_the_frames_of_others() {
    let (mock, mut first) = mock::open(options(64, 16, 64, 8));
    let (_, mut second) = mock.join(&options(64, 16, 64, 8), Linearizer::disabled());
    mock.budget.set(0);
    let send_all = |core: &mut MockQueue| {
        core.receive(0);
        let mut sender = core.split().1;
        let mut sent = 0;
        while let Some(fresh) = sender.alloc() {
            sender.send_frame(fresh, 60).unwrap();
            sent += 1;
        }
        sent
    };
    // Of 64 frames 32 are for receiving; of the others each member has half.
    assert_eq!(send_all(&mut first), 16);
    // The first member does not read: its ring takes 16, and the fill ring is full again.
    for number in 0..16 {
        assert!(mock.kernel.borrow_mut().receive_at(0, &packet(number, 60)));
    }
    assert!(!mock.kernel.borrow_mut().receive_at(0, &packet(0, 60)));
    assert_eq!(send_all(&mut second), 16);
    assert!(mock.kernel.borrow_mut().receive_at(1, &packet(0, 60)));
    assert_eq!(second.receive(8), 1);
    assert_eq!(second.packet(0), packet(0, 60));
    // The remaining member has the whole share.
    drop(first);
    mock.kernel.borrow_mut().close(0);
    assert_eq!(send_all(&mut second), 32);
}

#[test]
#[should_panic(expected = "a frame of another queue")]
fn a_frame_of_another_member_panics() {
    let (mock, mut first) = mock::open(options(64, 16, 16, 8));
    let (_, mut second) = mock.join(&options(64, 16, 16, 8), Linearizer::disabled());
    let mut fresh = first.split().1.alloc().unwrap();
    second.split().1.frame_mut(&mut fresh)[0] = 1;
}

fn open_linearizing(frames: u32, ring: u32, batch: usize) -> (Rc<Mock>, MockQueue) {
    mock::open_with(options(frames, ring, 8, batch), Linearizer::new(ring).unwrap(), 0)
}

#[test]
fn a_multi_buffer_packet_is_linearized_and_its_frames_freed() {
    let (mock, mut core) = open_linearizing(16, 8, 4);
    let long = packet(1, 1792 * 3 + 5);
    let mut kernel = mock.kernel.borrow_mut();
    assert!(kernel.receive(&packet(0, 60)));
    assert!(kernel.receive_frags(0, &long, 1792));
    assert!(kernel.receive(&packet(2, 61)));
    drop(kernel);
    assert_eq!(core.receive(4), 3);
    assert_eq!(core.packet(0), packet(0, 60));
    assert_eq!(core.packet(1), long);
    assert_eq!(core.packet(2), packet(2, 61));
    assert_eq!(
        (core.frame_counts().held, core.frame_counts().filling, core.frame_counts().invalid),
        (2, 8, 0)
    );
    core.set_payload(1, 42, 5000);
    let (payloads, mut sender) = core.split();
    assert_eq!(payloads.payload(1), &long[42..5042]);
    assert!(sender.is_multi_buffer(1) && !sender.is_multi_buffer(0));
    assert_eq!(sender.header(1), Some(&long[..42]));
    assert!(!sender.send_in_place(1, 5000) && !sender.is_sent(1), "there is no frame to send from");
    assert!(sender.send_in_place(2, 61));
}

#[test]
fn incomplete_packets_wait_and_invalid_ones_are_dropped() {
    let (mock, mut core) = open_linearizing(32, 16, 8);
    let begins = |count| {
        for number in 0..count {
            assert!(mock.kernel.borrow_mut().receive_with(0, 60, libc::XDP_PKT_CONTD, &packet(number, 60)));
        }
    };
    // The remaining fragments have not arrived yet.
    mock.kernel.borrow_mut().receive(&packet(9, 60));
    begins(2);
    assert_eq!(core.receive(8), 1);
    assert_eq!(core.receive(8), 0);
    assert!(core.has_received());
    mock.kernel.borrow_mut().receive(&packet(2, 60));
    assert_eq!(core.receive(8), 1);
    assert_eq!(core.packet(0), [packet(0, 60), packet(1, 60), packet(2, 60)].concat());
    // One fragment is no frame of the kernel's; the frames of the others are freed.
    begins(1);
    mock.kernel.borrow_mut().push_rx(0, u64::MAX);
    assert_eq!(core.receive(8), 0);
    assert_eq!(
        (core.frame_counts().invalid, core.frame_counts().held, core.frame_counts().filling),
        (1, 0, 16)
    );
    // More than the ring has room for: the end cannot arrive. The next fragments belong to it.
    begins(16);
    assert_eq!(core.receive(8), 0);
    assert_eq!((core.frame_counts().invalid, core.frame_counts().filling), (2, 0));
    core.receive(0);
    begins(1);
    mock.kernel.borrow_mut().receive(&packet(3, 60));
    mock.kernel.borrow_mut().receive(&packet(4, 60));
    assert_eq!(core.receive(8), 1);
    assert_eq!(core.packet(0), packet(4, 60));
    core.receive(0);
    assert_eq!(
        (core.frame_counts().invalid, core.frame_counts().filling, core.frame_counts().free),
        (2, 16, 16)
    );
}

#[test]
#[cfg_attr(miri, ignore = "a megabyte of packets takes Miri minutes")]
fn packets_beyond_the_maximum_are_dropped() {
    let frames_max = FRAGS_MAX as u32 * 2;
    let (mock, mut core) = open_linearizing(frames_max * 2, frames_max, 8);
    // Longer than any packet, in few enough fragments; and in too many fragments.
    assert!(mock.kernel.borrow_mut().receive_frags(0, &packet(0, PACKET_LEN_MAX + 1), 1792));
    assert!(mock.kernel.borrow_mut().receive_frags(0, &packet(0, FRAGS_MAX + 1), 1));
    mock.kernel.borrow_mut().receive(&packet(1, 60));
    // The second is dropped before its last fragment is read, which counts as one more packet.
    assert_eq!(core.receive(4), 1);
    assert_eq!(core.packet(0), packet(1, 60));
    assert_eq!(core.frame_counts().invalid, 2);
    core.receive(0);
    assert!(mock.kernel.borrow_mut().receive_frags(0, &packet(2, PACKET_LEN_MAX), 1792));
    assert_eq!(core.receive(4), 1);
    assert_eq!(core.packet(0), packet(2, PACKET_LEN_MAX));
}

#[test]
#[cfg_attr(miri, ignore = "a megabyte of packets takes Miri minutes")]
fn messages_beyond_the_buffers_arrive_in_the_next_batch() {
    let (mock, mut core) = open_linearizing(2048, 1024, 64);
    for number in 0..20 {
        assert!(mock.kernel.borrow_mut().receive_frags(0, &packet(number, PACKET_LEN_MAX - 1), 1792));
    }
    assert_eq!(core.receive(64), 16);
    assert_eq!(core.packet(15), packet(15, PACKET_LEN_MAX - 1));
    assert_eq!(core.receive(64), 4);
    assert_eq!(core.packet(0), packet(16, PACKET_LEN_MAX - 1));
    assert_eq!(core.frame_counts().invalid, 0);
}

#[test]
fn checksum_offload_metadata_precedes_the_packet() {
    let (mock, mut core) = mock::open_with(options(16, 8, 8, 4), Linearizer::disabled(), METADATA_LEN);
    assert!(core.split().1.has_csum_offload());
    let mut kernel = mock.kernel.borrow_mut();
    kernel.receive(&packet(1, 60));
    kernel.receive(&packet(2, 60));
    // As after a program has moved the start of the packet: with too little room before it, and
    // unaligned.
    kernel.headroom = 16;
    kernel.receive(&packet(3, 60));
    kernel.headroom = HEADROOM + 2;
    kernel.receive(&packet(4, 60));
    drop(kernel);
    assert_eq!(core.receive(4), 4);
    let mut sender = core.split().1;
    assert!(!sender.send_in_place_partial(0, 60, 34, 25), "past the end");
    assert!(sender.send_in_place_partial(0, 60, 34, 24));
    assert!(sender.send_in_place(1, 60));
    assert!(!sender.send_in_place_partial(2, 60, 34, 6) && !sender.send_in_place(2, 60));
    assert!(!sender.send_in_place_partial(3, 60, 34, 6) && sender.send_in_place(3, 60));
    let mut fresh = sender.alloc().unwrap();
    assert_eq!(sender.frame_mut(&mut fresh).len(), 2048 - METADATA_LEN);
    sender.frame_mut(&mut fresh)[..60].copy_from_slice(&packet(5, 60));
    let fresh = sender.send_frame_partial(fresh, 60, 60, 0).unwrap_err();
    let fresh = sender.send_frame(fresh, 2048 - METADATA_LEN + 1).unwrap_err();
    sender.send_frame_partial(fresh, 60, 34, 6).unwrap();
    assert_eq!(sender.flush().unwrap(), 0);
    let kernel = mock.kernel.borrow();
    let sent: Vec<_> = kernel.sent.iter().map(|(_, bytes)| bytes.clone()).collect();
    assert_eq!(sent, [1, 2, 4, 5].map(|number| packet(number, 60)));
    let told = |offset: u16| {
        let flags = u64::from(libc::XDP_TXMD_FLAGS_CHECKSUM).to_ne_bytes();
        [&flags[..], &34_u16.to_ne_bytes(), &offset.to_ne_bytes(), &[0; 12]].concat()
    };
    assert_eq!(
        kernel.sent_metadata.iter().map(|told| told.to_vec()).collect::<Vec<_>>(),
        [told(24), told(6)]
    );
}

#[test]
fn no_checksum_offload_without_kernel_support() {
    let (mock, mut core) = mock::open(options(16, 8, 8, 4));
    assert!(!core.split().1.has_csum_offload());
    mock.kernel.borrow_mut().receive(&packet(1, 60));
    assert_eq!(core.receive(4), 1);
    let mut sender = core.split().1;
    assert!(!sender.send_in_place_partial(0, 60, 34, 6) && sender.send_in_place(0, 60));
}

/// A device that sends and receives by itself.
struct Silent;

impl RingWakeup for Silent {
    fn is_zero_copy(&self) -> bool {
        true
    }

    fn is_busy_polling(&self) -> bool {
        false
    }

    fn tx_budget(&self) -> u32 {
        u32::MAX
    }

    fn send(&self) -> std::io::Result<KickOutcome> {
        Ok(KickOutcome::Accepted)
    }

    fn receive(&self) {}
}

/// The kernel on one thread, two members on two more. Whichever completes, frees and fills, each
/// frame has one owner, and the bytes of each packet are those that were written.
#[test]
fn members_on_several_threads_share_the_frames() {
    // On a busy machine, each yield can cost many milliseconds: few packets, and yields only if
    // there is nothing left to do.
    let (each, batch) = if cfg!(miri) { (40, 4) } else { (50_000, 16) };
    let options = QueueOptions { ..options(64, 16, 16, batch) };
    let mock = mock::kernel(options, 0);
    let [first, second] = [(); 2].map(|()| mock.join_with(Silent, &options, Linearizer::disabled()));
    let allocator = std::sync::Arc::clone(&mock.allocator);
    // The mock, on this thread, keeps the memory of the rings; the members' ends move to other
    // threads.
    let kernel = &mut *mock.kernel.borrow_mut();
    let received = [AtomicUsize::new(0), AtomicUsize::new(0)];
    let member = |mut core: Queue<Silent>, received: &AtomicUsize, number: usize| {
        let (mut next, mut answered) = (0, 0);
        while next < each || answered < each {
            let count = core.receive(batch);
            let (payloads, mut sender) = core.split();
            for i in 0..count {
                assert_eq!(
                    payloads.payload(i),
                    packet(number + next + i, 60),
                    "packet {} is another",
                    next + i
                );
            }
            for i in 0..count {
                // In place, or in a frame of its own: each packet has one answer, or is dropped if
                // there is no room.
                if i % 2 == 0 {
                    let _ = sender.send_in_place(i, 60);
                } else if let Some(mut fresh) = sender.alloc() {
                    sender.frame_mut(&mut fresh)[..60].copy_from_slice(&packet(number + next + i, 60));
                    if let Err(fresh) = sender.send_frame(fresh, 60) {
                        sender.free(fresh);
                    }
                }
                answered += 1;
            }
            sender.flush().unwrap();
            next += count;
            received.store(next, Ordering::Relaxed);
            if count == 0 {
                std::thread::yield_now();
            }
        }
        core
    };
    let mut cores = std::thread::scope(|scope| {
        let (of_first, of_second) = (&received[0], &received[1]);
        let threads = [
            scope.spawn(move || member(first, of_first, 0)),
            scope.spawn(move || member(second, of_second, 1)),
        ];
        let mut sent = [0; 2];
        while received.iter().any(|received| received.load(Ordering::Relaxed) < each) {
            let mut is_idle = true;
            for number in 0..2 {
                if sent[number] < each && kernel.receive_at(number, &packet(number + sent[number], 60)) {
                    sent[number] += 1;
                    is_idle = false;
                }
                kernel.send(number, 4, false);
                for (number, bytes) in kernel.sent.drain(..) {
                    is_idle = false;
                    assert_eq!(bytes.len(), 60, "of member {number}");
                    let first = bytes[0];
                    assert!(bytes.iter().zip(0_u8..).all(|(&byte, at)| byte == first.wrapping_add(at)));
                }
                kernel.complete(sent[0]);
            }
            if is_idle {
                std::thread::yield_now();
            }
        }
        threads.map(|thread| thread.join().unwrap())
    });
    // Drain everything.
    while allocator.frame_counts().sending > 0 {
        for (number, core) in cores.iter_mut().enumerate() {
            kernel.send(number, usize::MAX, false);
            (0..64).for_each(|at| kernel.complete(at));
            core.receive(batch);
        }
    }
    let census = allocator.frame_counts();
    assert_eq!((census.total(), census.held, census.allocated, census.invalid), (64, 0, 0, 0));
    let caches: Vec<_> = cores.iter().map(Queue::cache).collect();
    allocator.lock().audit(&caches);
}
