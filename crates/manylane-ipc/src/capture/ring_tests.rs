//! The ring in plain memory: both ends on one thread, on two, with garbage in it, and under the
//! model checker.

use std::sync::Arc;

use super::*;

type Memory = Arc<[AtomicU64]>;

impl Words for Memory {
    fn len(&self) -> usize {
        self.as_ref().len()
    }

    fn load(&self, index: usize) -> u64 {
        self[index].load(Ordering::Relaxed)
    }
}

fn words(count: usize) -> Memory {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

/// A ring with exactly `capacity` words of frames, for one device.
fn ring(capacity: usize) -> (Producer<Memory>, Consumer<Memory, Memory>) {
    let (data, consumed) = (words(header_words(1) + capacity), words(1));
    let producer = Producer::new(data.clone(), consumed.clone(), &[5]);
    (producer, Consumer::new(data, consumed).unwrap())
}

fn record_header(time: u64, len: usize) -> RecordHeader {
    RecordHeader { time, ifindex: 5, queue: 2, direction: Direction::In, len: len as u32 }
}

#[cfg(not(loom))]
mod plain {
    use proptest::prelude::*;

    use super::*;

    fn dropped(consumer: &Consumer<Memory, Memory>) -> [(u32, u64, u64); 2] {
        let mut all = consumer.dropped().map(|of| (of.ifindex, of.received, of.sent));
        [(); 2].map(|()| all.next().unwrap())
    }

    #[test]
    fn ring_words_have_the_layout_of_the_header() {
        let (data, consumed) = (words(32 + 8), words(1));
        let mut producer = Producer::new(data.clone(), consumed.clone(), &[5]);
        let out = RecordHeader { direction: Direction::Out, ..record_header(77, 900) };
        producer.record(&out, b"12345678ninth");
        producer.record(&record_header(0, 80), &[0; 80]);
        producer.record(&out, &[0; 80]);
        drop(producer);
        let written = |at: usize| data[at].load(Ordering::Relaxed);
        let head = [u64::from_ne_bytes(*b"mlanecap") ^ 1, 8, 1, 1, 0, 0, 0, 0, 5];
        assert_eq!([0, 1, 2, 3, 4, 5, 6, 7, 8].map(written), head);
        assert_eq!([16, 17, 18, 19, 20, 21, 22, 23].map(written), [5, 1, 1, 0, 0, 0, 0, 0]);
        assert_eq!([32, 33, 34].map(written), [13 | 900 << 32, 77, 5 | 2 << 32 | 1 << 63]);
        let bytes = [*b"12345678", *b"ninth\0\0\0"].map(u64::from_ne_bytes);
        assert_eq!([35, 36, 37].map(written), [bytes[0], bytes[1], 0]);
        let mut consumer = Consumer::new(data, consumed.clone()).unwrap();
        assert_eq!(consumer.pop(&mut Vec::new()), Ok(Some(out)));
        assert_eq!(consumed[0].load(Ordering::Relaxed), 5);
    }

    #[test]
    fn ring_frames_round_trip() {
        let (mut producer, mut consumer) = ring(64);
        let mut bytes = vec![1];
        assert_eq!(consumer.pop(&mut bytes), Ok(None));
        let long = RecordHeader {
            ifindex: 9,
            queue: u32::MAX >> 1,
            direction: Direction::Out,
            ..record_header(u64::MAX, 5000)
        };
        producer.record(&record_header(1, 0), b"");
        producer.record(&long, b"cut off here");
        producer.record(&record_header(3, 8), b"12345678");
        assert_eq!((consumer.pop(&mut bytes), bytes.len()), (Ok(Some(record_header(1, 0))), 0));
        assert_eq!(consumer.peek(), Ok(Some(long)));
        assert_eq!(consumer.pop(&mut bytes), Ok(Some(long)));
        assert_eq!(bytes, b"cut off here");
        assert_eq!(
            (consumer.pop(&mut bytes), bytes.as_slice()),
            (Ok(Some(record_header(3, 8))), &b"12345678"[..])
        );
        assert_eq!(consumer.is_finished(), Ok(false));
        drop(producer);
        assert_eq!(consumer.is_finished(), Ok(true));
    }

    #[test]
    fn a_stopped_ring_ends_after_the_frames_announced_before() {
        let (mut producer, mut consumer) = ring(16);
        let mut bytes = Vec::new();
        (1..4).for_each(|time| producer.record(&record_header(time, 8), b"in time."));
        assert_eq!(consumer.pop(&mut bytes), Ok(Some(record_header(1, 8))));
        consumer.stop();
        for time in 2..4 {
            producer.record(&record_header(9, 8), b"too late");
            assert_eq!(consumer.pop(&mut bytes), Ok(Some(record_header(time, 8))));
        }
        assert_eq!(consumer.pop(&mut bytes), Ok(None));
        drop(producer);
        assert_eq!(consumer.is_finished(), Ok(true));
    }

    #[test]
    fn ring_full_drops_are_counted_by_device_and_direction() {
        // Room for four records of four words.
        let (mut producer, mut consumer) = ring(16);
        let out = RecordHeader { direction: Direction::Out, ..record_header(0, 8) };
        let other = RecordHeader { ifindex: 77, ..record_header(0, 8) };
        for _ in 0..5 {
            producer.record(&record_header(0, 8), b"received");
        }
        producer.record(&out, b"was sent");
        producer.record(&other, b"from who");
        assert_eq!(dropped(&consumer), [(5, 1, 1), (0, 1, 0)]);
        let mut bytes = Vec::new();
        assert!(consumer.pop(&mut bytes).unwrap().is_some());
        producer.record(&out, b"was sent");
        producer.record(&out, b"was sent");
        assert_eq!(dropped(&consumer), [(5, 1, 2), (0, 1, 0)]);
        let mut left = 0;
        while consumer.pop(&mut bytes).unwrap().is_some() {
            left += 1;
        }
        assert_eq!((left, bytes.as_slice()), (4, &b"was sent"[..]));
    }

    #[test]
    fn unsent_records_are_discarded() {
        let (mut producer, mut consumer) = ring(4);
        producer.stage(&record_header(1, 1), b"x");
        producer.commit(false);
        producer.commit(true);
        assert_eq!(consumer.peek(), Ok(None));
        producer.record(&record_header(2, 1), b"y");
        producer.stage(&record_header(3, 1), b"z");
        producer.commit(false);
        assert_eq!(dropped(&consumer)[0], (5, 0, 0), "no room, but no frame either");
        let mut bytes = Vec::new();
        assert_eq!((consumer.pop(&mut bytes), bytes.as_slice()), (Ok(Some(record_header(2, 1))), &b"y"[..]));
    }

    #[test]
    fn an_invalid_peer_counter_is_no_progress() {
        let (data, consumed) = (words(header_words(1) + 8), words(1));
        let mut producer = Producer::new(data, consumed.clone(), &[5]);
        producer.record(&record_header(1, 8), b"12345678");
        producer.record(&record_header(2, 8), b"12345678");
        for nonsense in [9, u64::MAX, 1 << 63, 1 << 32] {
            consumed[0].store(nonsense, Ordering::Relaxed);
            assert!(!producer.has_room(1), "{nonsense} words consumed of 8");
        }
        consumed[0].store(4, Ordering::Relaxed);
        assert!(producer.has_room(4) && !producer.has_room(5));
        producer.record(&record_header(3, 8), b"12345678");
        consumed[0].store(0, Ordering::Relaxed);
        assert!(!producer.has_room(1), "the counter went back");
    }

    #[test]
    fn a_corrupt_producer_is_detected() {
        let fresh = || {
            let (data, consumed) = (words(header_words(1) + 16), words(1));
            let mut producer = Producer::new(data.clone(), consumed.clone(), &[5]);
            producer.record(&record_header(1, 16), b"0123456789abcdef");
            // The producer, too, because dropping it is one more write.
            (data, consumed, producer)
        };
        let first = header_words(1);
        for (at, value) in
            [(PRODUCED_OFFSET, 17), (PRODUCED_OFFSET, u64::MAX), (PRODUCED_OFFSET, 2), (PRODUCED_OFFSET, 4)]
        {
            let (data, consumed, _producer) = fresh();
            data[at].store(value, Ordering::Relaxed);
            assert!(
                Consumer::new(data, consumed).unwrap().pop(&mut Vec::new()).is_err(),
                "word {at} is {value}"
            );
        }
        for sizes in
            [17_u64, u64::from(u32::MAX) << 32 | 17, 17 << 32 | 17, 15 << 32 | 16, 70_000 << 32 | 70_000]
        {
            let (data, consumed, _producer) = fresh();
            data[first].store(sizes, Ordering::Relaxed);
            assert!(Consumer::new(data, consumed).unwrap().pop(&mut Vec::new()).is_err(), "sizes {sizes:#x}");
        }
        for (at, value) in [
            (MAGIC_OFFSET, 0),
            (MAGIC_OFFSET, MAGIC ^ VERSION ^ (VERSION + 1)),
            (CAPACITY_OFFSET, 8),
            (CAPACITY_OFFSET, 0),
            (CAPACITY_OFFSET, u64::MAX),
            (DEVICES_OFFSET, 5),
            (DEVICES_OFFSET, u64::MAX),
            (DEVICES_OFFSET, 1 << 61),
        ] {
            let (data, consumed, _producer) = fresh();
            data[at].store(value, Ordering::Relaxed);
            assert!(Consumer::new(data, consumed).is_err(), "word {at} is {value}");
        }
        assert!(Consumer::new(words(0), words(1)).is_err());
        assert!(Consumer::new(fresh().0, words(0)).is_err());
    }

    #[test]
    fn two_threads_pass_everything_on() {
        let count: u64 = if cfg!(miri) { 50 } else { 50_000 };
        let (mut producer, mut consumer) = ring(256);
        let pattern = |n: u64| vec![n as u8; (n * 7 % 301) as usize];
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for n in 0..count {
                    let bytes = pattern(n);
                    while !producer.has_room((RECORD_HEADER_WORDS + bytes.len().div_ceil(8)) as u64) {
                        std::thread::yield_now();
                    }
                    producer.record(&record_header(n, bytes.len()), &bytes);
                }
            });
            let (mut n, mut bytes) = (0, Vec::new());
            while !consumer.is_finished().unwrap() {
                let Some(got) = consumer.pop(&mut bytes).unwrap() else {
                    std::thread::yield_now();
                    continue;
                };
                assert_eq!((got.time, &bytes), (n, &pattern(n)));
                n += 1;
            }
            assert_eq!(n, count);
            assert_eq!(dropped(&consumer)[0], (5, 0, 0));
        });
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 256 }, ..ProptestConfig::default() })]

        /// For any order of writes and reads: the frames read are those written, except those
        /// counted as dropped.
        #[test]
        fn every_loss_is_counted(steps in prop::collection::vec((any::<bool>(), 0_usize..90), 1..200)) {
            let (mut producer, mut consumer) = ring(64);
            let (mut model, mut lost, mut bytes) = (std::collections::VecDeque::new(), 0, Vec::new());
            let mut used = 0;
            for (n, (put, len)) in steps.into_iter().enumerate() {
                if put {
                    let frame: Vec<u8> = (0..len).map(|at| (at ^ n) as u8).collect();
                    producer.record(&record_header(n as u64, len), &frame);
                    let needed = 3 + len.div_ceil(8);
                    if used + needed <= 64 {
                        used += needed;
                        model.push_back((n as u64, frame));
                    } else {
                        lost += 1;
                    }
                } else {
                    let got = consumer.pop(&mut bytes).unwrap().map(|head| (head.time, bytes.clone()));
                    used -= got.as_ref().map_or(0, |(_, frame)| 3 + frame.len().div_ceil(8));
                    prop_assert_eq!(got, model.pop_front());
                }
                prop_assert_eq!(dropped(&consumer)[0], (5, lost, 0));
            }
        }
    }
}

/// All interleavings, and all values that the memory model allows a load to see.
#[cfg(loom)]
mod model {
    use loom::thread;

    use super::*;

    /// A ring of only one record: words are written, read, and written again.
    #[test]
    fn records_of_a_ring_are_passed_on_whole() {
        loom::model(|| {
            let (mut producer, mut consumer) = ring(4);
            let other = thread::spawn(move || {
                for n in 1..=2_u64 {
                    producer.record(&record_header(n, 8), &(n * 11).to_ne_bytes());
                }
            });
            let (mut bytes, mut popped) = (Vec::new(), Vec::new());
            for _ in 0..2 {
                if let Some(head) = consumer.pop(&mut bytes).unwrap() {
                    popped.push((head.time, bytes.clone()));
                }
                thread::yield_now();
            }
            other.join().unwrap();
            while !consumer.is_finished().unwrap() {
                let head = consumer.pop(&mut bytes).unwrap().unwrap();
                popped.push((head.time, bytes.clone()));
            }
            // A record with words of two records, or a duplicate, would show here.
            let dropped = consumer.dropped().next().unwrap().received;
            assert_eq!(popped.len() as u64 + dropped, 2);
            for (n, bytes) in &popped {
                assert_eq!(bytes, &(n * 11).to_ne_bytes());
            }
            assert!(popped.windows(2).all(|pair| pair[0].0 < pair[1].0));
        });
    }

    /// A consumer that sees that the producer is gone has seen everything.
    #[test]
    fn the_last_record_is_received() {
        loom::model(|| {
            let (mut producer, mut consumer) = ring(4);
            let other = thread::spawn(move || {
                producer.record(&record_header(1, 8), &7_u64.to_ne_bytes());
            });
            let mut bytes = Vec::new();
            let mut popped = 0;
            while !consumer.is_finished().unwrap() {
                if consumer.pop(&mut bytes).unwrap().is_some() {
                    assert_eq!(bytes, 7_u64.to_ne_bytes());
                    popped += 1;
                }
                thread::yield_now();
            }
            assert_eq!(popped, 1);
            other.join().unwrap();
        });
    }
}
