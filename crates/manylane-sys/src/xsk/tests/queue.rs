//! Tests of the queue on the mock kernel.

use std::io;
use std::sync::atomic::Ordering;

use super::mock::{self, HEADROOM, MockQueue, options};
use crate::xsk::QueueOptions;
use crate::xsk::open::Step;
use crate::xsk::queue::Queue;
use crate::xsk::wakeup::KickOutcome;

fn packet(number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (number * 31 + at) as u8).collect()
}

#[test]
fn a_reply_in_place_returns_its_frame() {
    let (mock, mut core) = mock::open(options(16, 8, 8, 4));
    assert_eq!((core.frame_counts().filling, core.frame_counts().free), (8, 8));
    assert!(!core.has_received());
    assert_eq!(core.receive(4), 0);
    assert!(mock.kernel.borrow_mut().receive(&packet(1, 60)));
    assert!(core.has_received());
    assert_eq!(core.receive(4), 1);
    assert_eq!(core.packet(0), packet(1, 60));
    core.set_payload(0, 42, 10);
    let (payloads, mut sender) = core.split();
    assert_eq!(payloads.payload(0), &packet(1, 60)[42..52]);
    assert_eq!(sender.payload(0), Some(payloads.payload(0)));
    assert_eq!((sender.payload(1), sender.header(1)), (None, None));
    sender.in_place_header_mut(0).unwrap().fill(7);
    assert_eq!(sender.header(0).unwrap().len(), 42);
    assert!(!sender.is_sent(0));
    assert_eq!(sender.in_place_packet(0, 6), [vec![7; 42], packet(1, 60)[42..48].to_vec()].concat());
    assert!(sender.send_in_place(0, 6));
    assert!(sender.is_sent(0));
    assert!(!sender.send_in_place(0, 6), "sent before");
    assert_eq!(sender.flush().unwrap(), 0);
    let expected = [vec![7; 42], packet(1, 60)[42..48].to_vec()].concat();
    assert_eq!(mock.kernel.borrow().sent, [(0, expected)]);
    assert_eq!((core.frame_counts().sending, core.frame_counts().held), (1, 0));
    core.receive(4);
    assert_eq!(core.frame_counts().sending, 1, "not completed yet");
    mock.kernel.borrow_mut().complete(0);
    core.receive(4);
    assert_eq!(
        (core.frame_counts().filling, core.frame_counts().free, core.frame_counts().invalid),
        (8, 8, 0)
    );
}

/// An idle member checks only its ring, and misses nothing.
#[test]
fn an_idle_member_receives_sends_and_reclaims() {
    let (mock, mut core) = mock::open(options(16, 8, 8, 4));
    let quiet = |core: &mut MockQueue| (0..200).for_each(|_| assert_eq!(core.receive(4), 0));
    for number in 0..20 {
        quiet(&mut core);
        assert!(mock.kernel.borrow_mut().receive(&packet(number, 60)));
        assert!(core.has_received());
        assert_eq!(core.receive(4), 1);
        assert_eq!(core.packet(0), packet(number, 60));
        // The batch ends, whether or not packets are pending.
        quiet(&mut core);
        assert_eq!((core.frame_counts().filling, core.frame_counts().free), (8, 8));
        // Packets sent without a batch are reclaimed, at once or later.
        let (_, mut sender) = core.split();
        let fresh = sender.alloc().unwrap();
        assert!(sender.send_frame(fresh, 60).is_ok());
        assert_eq!(sender.flush().unwrap(), 0);
        if number % 2 == 1 {
            quiet(&mut core);
        }
        assert_eq!(core.frame_counts().sending, 1);
        mock.kernel.borrow_mut().complete(0);
        assert_eq!(core.receive(4), 0);
        assert_eq!(
            (core.frame_counts().sending, core.frame_counts().free, core.frame_counts().invalid),
            (0, 8, 0)
        );
    }
}

#[test]
fn a_frame_of_the_batch_is_not_reused_before_the_batch_ends() {
    let (mock, mut core) = mock::open(options(4, 2, 4, 2));
    mock.kernel.borrow_mut().receive(&packet(1, 60));
    assert_eq!(core.receive(2), 1);
    let (payloads, mut sender) = core.split();
    assert!(sender.send_in_place(0, 60));
    assert_eq!(sender.flush().unwrap(), 0);
    mock.kernel.borrow_mut().complete(0);
    // Everything that can be allocated is, and is overwritten.
    let mut taken = Vec::new();
    while let Some(mut fresh) = sender.alloc() {
        sender.frame_mut(&mut fresh).fill(0xff);
        taken.push(fresh);
    }
    assert_eq!(taken.len(), 2);
    assert_eq!(payloads.payload(0), packet(1, 60));
    for fresh in taken {
        sender.free(fresh);
    }
    core.receive(2);
    assert_eq!((core.frame_counts().free, core.frame_counts().filling), (2, 2));
}

#[test]
fn sending_leaves_frames_for_receiving() {
    let (mock, mut core) = mock::open(options(16, 8, 16, 4));
    mock.budget.set(0);
    let mut sender = core.split().1;
    let mut sent = 0;
    while let Some(fresh) = sender.alloc() {
        sender.send_frame(fresh, 60).unwrap();
        sent += 1;
    }
    assert_eq!(sent, 8, "half");
    for round in 0..4 {
        mock.kernel.borrow_mut().receive(&packet(round, 60));
        assert_eq!(core.receive(4), 1);
        assert!(!core.split().1.send_in_place(0, 60), "all that may be sent from is");
    }
    core.receive(4);
    assert_eq!(core.frame_counts().filling, 8);
    // Completions are reclaimed when frames are short.
    mock.budget.set(3);
    assert_eq!(core.split().1.flush().unwrap(), 0);
    mock.kernel.borrow_mut().complete(0);
    assert!(core.split().1.alloc().is_some());
}

#[test]
fn a_full_send_ring_refuses_messages() {
    let (mock, mut core) = mock::open(options(16, 4, 2, 4));
    for number in 0..3 {
        mock.kernel.borrow_mut().receive(&packet(number, 60));
    }
    assert_eq!(core.receive(4), 3);
    mock.budget.set(0);
    let mut sender = core.split().1;
    assert!(sender.send_in_place(0, 60) && sender.send_in_place(1, 60) && !sender.send_in_place(2, 60));
    assert!(!sender.is_sent(2));
    let fresh = sender.alloc().unwrap();
    let fresh = sender.send_frame(fresh, 60).unwrap_err();
    assert_eq!(sender.flush().unwrap(), 2, "the kernel takes nothing");
    mock.budget.set(1);
    assert_eq!(sender.flush().unwrap(), 0);
    assert!(sender.send_in_place(2, 60));
    sender.send_frame(fresh, 60).unwrap();
    assert_eq!(sender.flush().unwrap(), 2, "no room for completions");
    (0..2).for_each(|_| mock.kernel.borrow_mut().complete(0));
    assert_eq!(sender.flush().unwrap(), 0, "which the flush itself makes");
    assert_eq!(mock.kernel.borrow().sent.len(), 4);
}

#[test]
fn unsendable_messages_are_refused() {
    let (mock, mut core) = mock::open(options(8, 4, 4, 4));
    mock.kernel.borrow_mut().receive(&packet(0, 60));
    assert_eq!(core.receive(4), 1);
    core.set_payload(0, 0, 60);
    let mut sender = core.split().1;
    assert!(!sender.send_in_place(0, 0), "an empty descriptor would never complete");
    let mut fresh = sender.alloc().unwrap();
    assert_eq!(sender.frame_mut(&mut fresh).len(), 2048);
    let fresh = sender.send_frame(fresh, 0).unwrap_err();
    let fresh = sender.send_frame(fresh, 2049).unwrap_err();
    sender.free(fresh);
    assert_eq!((core.frame_counts().held, core.frame_counts().allocated), (1, 0));
}

#[test]
fn a_frame_that_is_dropped_stays_counted() {
    let (_mock, mut core) = mock::open(options(8, 4, 4, 4));
    let mut sender = core.split().1;
    drop(sender.alloc().unwrap());
    core.receive(4);
    assert_eq!((core.frame_counts().allocated, core.frame_counts().total()), (1, 8));
}

#[test]
fn a_flush_of_many_budgets_leaves_nothing_where_progress_is_hidden() {
    let (mock, mut core) = mock::open(options(64, 16, 32, 16));
    mock.hides_progress.set(true);
    mock.budget.set(4);
    for (packets, calls) in [(3, 1), (4, 1), (8, 2), (11, 3)] {
        let mut sender = core.split().1;
        for _ in 0..packets {
            let fresh = sender.alloc().unwrap();
            sender.send_frame(fresh, 60).unwrap();
        }
        mock.send_calls.set(0);
        assert_eq!((sender.flush().unwrap(), mock.send_calls.get()), (0, calls), "{packets}");
    }
    // A device that takes none looks the same until the budgets of the calls are as many as the
    // packets.
    mock.send_result.set(Some(|| Ok(KickOutcome::Partial)));
    mock.budget.set(0);
    let mut sender = core.split().1;
    for _ in 0..5 {
        let fresh = sender.alloc().unwrap();
        sender.send_frame(fresh, 60).unwrap();
    }
    mock.send_calls.set(0);
    assert_eq!((sender.flush().unwrap(), mock.send_calls.get()), (5, 6));
}

#[test]
fn flush_continues_while_the_kernel_makes_progress() {
    let (mock, mut core) = mock::open(options(64, 16, 32, 16));
    let send = |core: &mut MockQueue, count| {
        let mut sender = core.split().1;
        for _ in 0..count {
            let fresh = sender.alloc().unwrap();
            sender.send_frame(fresh, 60).unwrap();
        }
        mock.send_calls.set(0);
        sender.flush()
    };
    let complete = || (0..64).for_each(|_| mock.kernel.borrow_mut().complete(0));
    mock.budget.set(4);
    assert_eq!((send(&mut core, 10).unwrap(), mock.send_calls.get()), (0, 3));
    complete();
    assert_eq!(
        (send(&mut core, 0).unwrap(), mock.send_calls.get()),
        (0, 0),
        "nothing to send, nothing asked"
    );
    // Busy: drops one at a time.
    mock.budget.set(1);
    mock.send_result.set(Some(|| Ok(KickOutcome::Dropped)));
    assert_eq!((send(&mut core, 5).unwrap(), mock.send_calls.get()), (0, 5));
    complete();
    // Busy, without progress: bounded.
    mock.budget.set(0);
    assert_eq!((send(&mut core, 5).unwrap(), mock.send_calls.get()), (5, 7));
    mock.send_result.set(Some(|| Ok(KickOutcome::Down)));
    assert_eq!((send(&mut core, 1).unwrap(), mock.send_calls.get()), (6, 1));
    mock.send_result.set(Some(|| Err(io::Error::from_raw_os_error(libc::ENXIO))));
    assert_eq!(send(&mut core, 0).unwrap_err().raw_os_error(), Some(libc::ENXIO));
    mock.send_result.set(Some(|| Ok(KickOutcome::Accepted)));
    // With zero copy the device is woken once, if it needs that, and sends when it likes.
    mock.zero_copy.set(true);
    assert_eq!((send(&mut core, 1).unwrap(), mock.send_calls.get()), (0, 0));
    mock.members.borrow()[0].tx.flags.store(libc::XDP_RING_NEED_WAKEUP, Ordering::Relaxed);
    assert_eq!((send(&mut core, 1).unwrap(), mock.send_calls.get()), (0, 1));
    mock.members.borrow()[0].tx.flags.store(0, Ordering::Relaxed);
    mock.busy_polling.set(true);
    assert_eq!((send(&mut core, 1).unwrap(), mock.send_calls.get()), (0, 1));
}

#[test]
fn a_later_flush_sends_the_remainder_once() {
    let (mock, mut core) = mock::open(options(64, 16, 32, 16));
    assert_eq!(core.receive(4), 0);
    assert!(core.has_idle_skips());
    assert_eq!(core.flush_pending().unwrap(), 0);
    assert!(core.has_idle_skips(), "nothing was left");
    mock.budget.set(0);
    let (_, mut sender) = core.split();
    for _ in 0..5 {
        let fresh = sender.alloc().unwrap();
        sender.send_frame(fresh, 60).unwrap();
    }
    assert_eq!(sender.flush().unwrap(), 5);
    assert_eq!(core.flush_pending().unwrap(), 5);
    mock.send_calls.set(0);
    mock.budget.set(64);
    assert_eq!(core.flush_pending().unwrap(), 0);
    assert_eq!((mock.send_calls.get(), core.has_idle_skips()), (1, false));
    core.flush_pending().unwrap();
    assert_eq!(mock.send_calls.get(), 1, "all was sent");
    // Sent frames are reclaimed before the queue is skipped again.
    assert_eq!((core.receive(4), core.has_idle_skips(), core.frame_counts().sending), (0, false, 5));
    (0..5).for_each(|_| mock.kernel.borrow_mut().complete(0));
    assert_eq!((core.receive(4), core.has_idle_skips(), core.frame_counts().sending), (0, true, 0));
    core.flush_pending().unwrap();
    assert!(core.has_idle_skips());
}

#[test]
fn fill_ring_frames_are_returned_before_consumption() {
    let (mock, mut core) = mock::open(options(8, 4, 4, 4));
    for _ in 0..8 {
        (0..4).for_each(|_| assert!(mock.kernel.borrow_mut().receive(&packet(0, 60))));
        assert_eq!(core.receive(4), 4);
        // It has stored its counter of the full ring last before it took these.
        assert_eq!((core.receive(4), core.frame_counts().filling), (0, 4));
    }
    assert_eq!(core.frame_counts().invalid, 0);
}

#[test]
fn the_kernel_is_woken_to_receive_where_it_asks() {
    let (mock, mut core) = mock::open(options(8, 4, 4, 4));
    mock.fill.flags.store(libc::XDP_RING_NEED_WAKEUP, Ordering::Relaxed);
    core.receive(4);
    assert_eq!(mock.receive_calls.get(), 0, "only a device that does not copy has it");
    // The mode of a device is known before its first receive, or when it changes.
    mock.zero_copy.set(true);
    assert!(core.has_idle_skips());
    core.reset_idle();
    core.receive(4);
    assert_eq!((mock.receive_calls.get(), core.has_idle_skips()), (1, false), "asked each time");
    mock.fill.flags.store(0, Ordering::Relaxed);
    core.receive(4);
    assert_eq!(mock.receive_calls.get(), 1);
    mock.busy_polling.set(true);
    core.receive(4);
    assert_eq!(mock.receive_calls.get(), 2, "nothing there");
    mock.kernel.borrow_mut().receive(&packet(0, 60));
    core.receive(4);
    assert_eq!(mock.receive_calls.get(), 2);
}

#[test]
fn invalid_kernel_descriptors_are_counted_and_ignored() {
    let (mock, mut core) = mock::open(options(8, 4, 4, 4));
    let mut kernel = mock.kernel.borrow_mut();
    // Beyond the last frame; a frame that is not the kernel's.
    assert!(kernel.push_rx(0, 8 * 2048) && kernel.push_rx(0, u64::MAX));
    assert!(kernel.push_rx(0, 7 * 2048 + HEADROOM));
    drop(kernel);
    assert_eq!(core.receive(4), 0);
    assert_eq!(
        (core.frame_counts().invalid, core.frame_counts().free, core.frame_counts().filling),
        (3, 4, 4)
    );
    // More than the frame has, and an unknown option: the frame was the kernel's and is reclaimed.
    let mut kernel = mock.kernel.borrow_mut();
    assert!(kernel.receive_with(0, 2048 - 256 + 1, 0, &packet(0, 60)));
    assert!(kernel.receive_with(0, 60, 4, &packet(0, 60)));
    assert!(kernel.receive(&packet(1, 2048 - 256)));
    drop(kernel);
    assert_eq!(core.receive(4), 1);
    assert_eq!(core.packet(0), packet(1, 2048 - 256));
    assert_eq!((core.frame_counts().invalid, core.frame_counts().free), (5, 6));
    // The same frame again, while it is in the batch.
    let addr = {
        let mut sender = core.split().1;
        assert!(sender.send_in_place(0, 60));
        sender.flush().unwrap();
        mock.kernel.borrow_mut().complete(0);
        mock.kernel.borrow_mut().sending()[0]
    };
    let mut kernel = mock.kernel.borrow_mut();
    assert!(kernel.push_completion(u64::from(addr) * 2048), "completed twice");
    assert!(kernel.push_completion(u64::MAX));
    drop(kernel);
    core.receive(4);
    let census = core.frame_counts();
    assert_eq!((census.invalid, census.free, census.filling, census.total()), (7, 4, 4, 8));
}

#[test]
fn sent_packet_headers_stay_unchanged() {
    let (mock, mut core) = mock::open(options(8, 4, 4, 4));
    mock.kernel.borrow_mut().receive(&packet(0, 60));
    core.receive(4);
    core.set_payload(0, 42, 18);
    let mut sender = core.split().1;
    assert!(sender.send_in_place(0, 18));
    assert_eq!(sender.in_place_header_mut(0), None);
}

/// Receives that ask for few packets share a pass over the rings. Those that it took ahead count as
/// pending until their batch begins, for the kernel, too.
#[test]
fn packets_taken_ahead_are_pending_until_their_batch() {
    let (mock, mut core) = mock::open(options(64, 32, 8, 4));
    let arrive = |number| assert!(mock.kernel.borrow_mut().receive(&packet(number, 60)));
    (0..7).for_each(arrive);
    let mut passes = 0;
    for number in 0..7 {
        let filling = core.frame_counts().filling;
        assert_eq!((core.backlog(), core.has_received()), ((7 - number as u32, 32), true));
        assert_eq!(mock.kernel.borrow_mut().unread(0), 7 - number as u32, "the descriptor is readable");
        assert_eq!(core.receive(1), 1);
        assert_eq!((core.packet(0), core.cached_backlog()), (&packet(number, 60)[..], 6 - number as u32));
        passes += u32::from(core.frame_counts().filling != filling);
        // A batch may end, and the next begin, while its packet is being sent.
        assert!(core.split().1.send_in_place(0, 60));
    }
    assert_eq!(passes, 2, "of up to four packets each");
    // Larger batches than what was taken ahead are complete.
    assert_eq!(core.split().1.flush().unwrap(), 0);
    (0..7).for_each(|_| mock.kernel.borrow_mut().complete(0));
    (10..16).for_each(arrive);
    let mut numbers = Vec::new();
    for count in [1, 4, 1] {
        assert_eq!(core.receive(count), count);
        numbers.extend((0..count).map(|i| core.packet(i).to_vec()));
    }
    assert_eq!(numbers, (10..16).map(|number| packet(number, 60)).collect::<Vec<_>>());
    assert_eq!((core.receive(4), core.has_received()), (0, false));
    assert_eq!((core.frame_counts().filling, core.frame_counts().free), (32, 32));
}

/// Invalid entries do not end a batch, and a packet without a payload is whole.
#[test]
fn a_batch_continues_after_an_invalid_message() {
    let (mock, mut core) = mock::open(options(32, 16, 8, 8));
    let held_already = {
        mock.kernel.borrow_mut().receive(&packet(0, 60));
        assert_eq!(core.receive(1), 1);
        core.packet(0).to_vec()
    };
    let mut kernel = mock.kernel.borrow_mut();
    for number in 1..=5 {
        assert!(kernel.receive(&packet(number, 60)));
        // Beyond all memory.
        if number == 2 {
            assert!(kernel.push_rx(0, 1 << 40));
        }
    }
    drop(kernel);
    assert_eq!(held_already, packet(0, 60));
    // The invalid entry is one of the six requested.
    assert_eq!((core.receive(6), core.frame_counts().invalid), (5, 1));
    let mut seen = Vec::new();
    core.find_payloads(|_, bytes| {
        seen.push(bytes.to_vec());
        (seen.len() != 3).then_some((42, 10))
    });
    assert_eq!(seen, (1..=5).map(|number| packet(number, 60)).collect::<Vec<_>>());
    let (payloads, _) = core.split();
    let lengths: Vec<_> = (0..5).map(|i| payloads.payload(i).len()).collect();
    assert_eq!(lengths, [10, 10, 60, 10, 10]);
    assert_eq!(core.receive(6), 0);
    assert_eq!((core.frame_counts().filling, core.frame_counts().held), (16, 0));
}

/// Headers are read by value until they can be written to: then a mutable slice exists, and no
/// other code may read them.
#[test]
fn a_header_is_not_read_after_it_may_be_overwritten() {
    let (mock, mut core) = mock::open(options(32, 16, 16, 8));
    for round in 0..2 {
        for number in 0..5 {
            assert!(mock.kernel.borrow_mut().receive(&packet(number, 60)));
        }
        assert_eq!(core.receive(8), 5);
        // No payload is found in the second one.
        core.find_payloads(|i, _| (i != 1).then_some((42, 10)));
        let (payloads, mut sender) = core.split();
        let numbers = |from| payloads.next_with_header(from).map(|found| found.index);
        assert_eq!([0, 1, 2, 4, 5].map(numbers), [Some(0), Some(2), Some(2), Some(4), None]);
        let found = |i| payloads.next_with_header(i).unwrap();
        for i in [0, 2, 3, 4] {
            let expected = packet(i, 60);
            assert_eq!(
                found(i).header::<42>().as_ref().map(|head| &head[..]),
                Some(&expected[..42]),
                "round {round}"
            );
            assert_eq!((found(i).header::<41>(), found(i).header::<62>()), (None, None));
            assert_eq!(found(i).payload(), &expected[42..52]);
        }
        let before = found(2);
        sender.in_place_header_mut(2).unwrap()[0] ^= 0xff;
        assert!([found(0), before, found(2)].iter().all(|found| found.header::<42>().is_none()));
        assert!(found(3).header::<42>().is_some());
        sender.in_place_header_mut(4).unwrap().fill(1);
        // Writing to an earlier one later changes nothing.
        sender.in_place_header_mut(0).unwrap().fill(2);
        assert!(found(3).header::<42>().is_none() && found(4).header::<42>().is_none());
        assert_eq!(found(4).payload(), &packet(4, 60)[42..52]);
    }
}

#[test]
#[should_panic(expected = "a packet of 60 bytes has no 19 bytes at 42")]
fn a_payload_lies_within_its_packet() {
    let (mock, mut core) = mock::open(options(8, 4, 4, 4));
    mock.kernel.borrow_mut().receive(&packet(0, 60));
    core.receive(4);
    core.set_payload(0, 42, 19);
}

#[test]
fn sizes_are_checked_before_anything_is_opened() {
    let good = options(64, 32, 32, 16);
    let bad = [
        QueueOptions { ring: 48, ..good },
        QueueOptions { ring: 0, ..good },
        QueueOptions { tx_ring: 33, ..good },
        QueueOptions { frame_size: 3000, ..good },
        QueueOptions { frame_size: 1024, ..good },
        QueueOptions { frame_size: 8192, ..good },
        QueueOptions { frames: 0, ..good },
        QueueOptions { batch: 0, ..good },
    ];
    for options in bad {
        let err = Queue::open(&options).unwrap_err();
        assert_eq!((err.step, err.source.raw_os_error()), (Step::Options, Some(libc::EINVAL)), "{options:?}");
    }
}

#[test]
fn a_queue_may_change_threads() {
    fn is_send<T: Send>() {}
    is_send::<Queue>();
}
