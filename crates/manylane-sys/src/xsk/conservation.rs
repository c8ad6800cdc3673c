//! Frames are conserved: whatever order packets arrive, are held, answered, dropped, sent and completed in, every
//! frame is in one place, payloads stay as they came while they may be borrowed, and what leaves is what was
//! written.

use std::collections::HashMap;

use proptest::prelude::*;

use super::QueueOptions;
use super::core::Core;
use super::frames::Place;
use super::mock::{self, HEADROOM, Mock};
use super::send::{Fresh, Sender};

/// Bytes of the longest packet: all that a frame has room for; under Miri, which takes its time, fewer.
const LONGEST: usize = if cfg!(miri) { 64 } else { 2048 - HEADROOM as usize };

/// What happens during a batch, in any order. Indices are taken modulo what there is.
#[derive(Clone, Debug)]
enum Act {
    /// A packet arrives while the batch is being worked on.
    Arrive {
        len: usize,
    },
    /// A packet arrives that the kernel describes wrongly.
    ArriveWrong {
        too_long: bool,
    },
    /// The kernel says that it has received into, or sent, a frame that there is not.
    Lie {
        sent: bool,
    },
    /// The header is written, and the packet sent with part of its payload.
    SendHeld {
        packet: usize,
        payload: usize,
    },
    Take,
    SendFresh {
        which: usize,
        len: usize,
    },
    GiveBack {
        which: usize,
    },
    /// The kernel takes up to `budget` in each call.
    Flush {
        budget: usize,
    },
    Complete {
        which: usize,
    },
}

/// Before a batch packets arrive; then it is taken, and things happen.
#[derive(Clone, Debug)]
struct Round {
    arrive: Vec<usize>,
    most: usize,
    acts: Vec<Act>,
}

fn act() -> impl Strategy<Value = Act> {
    let index = any::<usize>;
    prop_oneof![
        4 => (1..=LONGEST).prop_map(|len| Act::Arrive { len }),
        1 => any::<bool>().prop_map(|too_long| Act::ArriveWrong { too_long }),
        1 => any::<bool>().prop_map(|sent| Act::Lie { sent }),
        8 => (index(), index()).prop_map(|(packet, payload)| Act::SendHeld { packet, payload }),
        6 => Just(Act::Take),
        4 => (index(), 1..=LONGEST).prop_map(|(which, len)| Act::SendFresh { which, len }),
        2 => index().prop_map(|which| Act::GiveBack { which }),
        3 => (0..6_usize).prop_map(|budget| Act::Flush { budget }),
        6 => index().prop_map(|which| Act::Complete { which }),
    ]
}

fn round() -> impl Strategy<Value = Round> {
    let arrive = prop::collection::vec(1..=LONGEST, 0..12);
    (arrive, 0..10_usize, prop::collection::vec(act(), 0..24)).prop_map(|(arrive, most, acts)| Round {
        arrive,
        most,
        acts,
    })
}

fn sizes() -> impl Strategy<Value = QueueOptions> {
    // Rings larger than all frames, and smaller; batches larger than the ring.
    (2..40_u32, 0..5_u32, 0..5_u32, 1..12_usize)
        .prop_map(|(frames, ring, tx_ring, batch)| mock::options(frames, 1 << ring, 1 << tx_ring, batch))
}

/// What the queue should have, by what was done to it.
struct World<'a> {
    mock: &'a Mock,
    /// Arrived and not received yet, oldest first.
    arrived: std::collections::VecDeque<Vec<u8>>,
    /// Frames of our own, and what we wrote into them.
    fresh: Vec<Fresh>,
    /// What was put into the send ring, in order.
    sent: Vec<Vec<u8>>,
    invalid: u64,
    packets: u8,
}

impl World<'_> {
    fn pattern(&mut self, len: usize) -> Vec<u8> {
        self.packets = self.packets.wrapping_add(1);
        (0..len).map(|at| (at as u8).wrapping_mul(7) ^ self.packets).collect()
    }

    fn arrive(&mut self, len: usize) {
        let packet = self.pattern(len);
        if self.mock.kernel.borrow_mut().receive(&packet) {
            self.arrived.push_back(packet);
        }
    }

    fn act(&mut self, act: &Act, sender: &mut Sender<'_>, batch: &[Vec<u8>], ats: &[usize]) {
        match *act {
            Act::Arrive { len } => self.arrive(len),
            Act::ArriveWrong { too_long } => {
                let (len, options) = if too_long { (2048 - HEADROOM as u32 + 1, 0) } else { (60, 1) };
                if self.mock.kernel.borrow_mut().receive_as(len, options, &[0; 60]) {
                    // An empty one stands for it.
                    self.arrived.push_back(Vec::new());
                }
            }
            Act::Lie { sent } => {
                let nowhere = u64::MAX / 2;
                let mut kernel = self.mock.kernel.borrow_mut();
                if sent {
                    self.invalid += u64::from(kernel.has_room() && kernel.lie_in_completion(nowhere));
                } else if kernel.lie_in_rx(nowhere) {
                    self.arrived.push_back(Vec::new());
                }
            }
            Act::SendHeld { packet, payload } if !batch.is_empty() => {
                let i = packet % batch.len();
                let was_sent = sender.is_sent(i);
                let header = self.pattern(ats[i]);
                if !was_sent {
                    sender.header_mut(i).copy_from_slice(&header);
                }
                let len = payload % (batch[i].len() - ats[i] + 1);
                if sender.send_held(i, len) {
                    assert!(!was_sent && sender.is_sent(i));
                    self.sent.push([&header[..], &batch[i][ats[i]..ats[i] + len]].concat());
                } else {
                    assert_eq!(sender.is_sent(i), was_sent);
                }
            }
            Act::Take => self.fresh.extend(sender.take()),
            Act::SendFresh { which, len } if !self.fresh.is_empty() => {
                let mut fresh = self.fresh.swap_remove(which % self.fresh.len());
                let bytes = self.pattern(len);
                sender.fresh_mut(&mut fresh)[..len].copy_from_slice(&bytes);
                match sender.send_fresh(fresh, len) {
                    Ok(()) => self.sent.push(bytes),
                    Err(fresh) => self.fresh.push(fresh),
                }
            }
            Act::GiveBack { which } if !self.fresh.is_empty() => {
                sender.give_back(self.fresh.swap_remove(which % self.fresh.len()));
            }
            Act::Flush { budget } => {
                self.mock.budget.set(budget);
                let left = sender.flush().unwrap();
                assert_eq!(self.mock.kernel.borrow().sent.len() + left, self.sent.len());
            }
            Act::Complete { which } => self.mock.kernel.borrow_mut().complete(which),
            Act::SendHeld { .. } | Act::SendFresh { .. } | Act::GiveBack { .. } => {}
        }
    }

    /// One batch, from its begin until the next one may begin.
    fn round(&mut self, core: &mut Core, round: &Round) {
        round.arrive.iter().for_each(|&len| self.arrive(len));
        let wanted = round.most.min(core.most());
        let looked = wanted.min(self.arrived.len());
        let came: Vec<_> = self.arrived.drain(..looked).collect();
        let batch: Vec<Vec<u8>> = came.into_iter().filter(|packet| !packet.is_empty()).collect();
        self.invalid += (looked - batch.len()) as u64;
        assert_eq!(core.receive(self.mock, round.most), batch.len());
        self.audit(core);
        let ats: Vec<usize> = batch.iter().map(|packet| usize::from(packet[0]) % packet.len()).collect();
        for (i, packet) in batch.iter().enumerate() {
            assert_eq!(core.packet(i), packet);
            core.set_payload(i, ats[i], packet.len() - ats[i]);
        }
        let (payloads, mut sender) = core.split(self.mock);
        let borrowed: Vec<&[u8]> = (0..batch.len()).map(|i| payloads.payload(i)).collect();
        for act in &round.acts {
            self.act(act, &mut sender, &batch, &ats);
            for (i, packet) in batch.iter().enumerate() {
                assert_eq!(borrowed[i], &packet[ats[i]..], "payload {i} changed");
            }
        }
        self.audit(core);
    }

    /// Every frame is in one place, and where we think it is.
    fn audit(&self, core: &Core) {
        let of = core.frames().audit();
        let mut kernel = self.mock.kernel.borrow_mut();
        let frames = core.census().total();
        let mut receiving = kernel.receiving();
        receiving.retain(|&frame| frame < frames);
        assert_eq!(receiving, of(Place::Filling));
        let mut sending = kernel.sending();
        sending.retain(|&frame| frame < frames);
        let mut ours = [of(Place::Sending), of(Place::HeldSending)].concat();
        assert!(sending.iter().all(|frame| ours.contains(frame)), "sent from a frame that is not being sent");
        ours.retain(|frame| !sending.contains(frame));
        // The others are in the send ring.
        assert_eq!(ours.len(), self.sent.len() - kernel.sent.len());
        let mut times: HashMap<u32, u32> = HashMap::new();
        receiving.iter().chain(&sending).for_each(|&frame| *times.entry(frame).or_default() += 1);
        assert!(times.values().all(|&times| times == 1), "a frame is in two places");
        assert_eq!(core.census().taken as usize, self.fresh.len());
        assert!(core.census().invalid <= self.invalid);
    }
}

fn cases() -> ProptestConfig {
    // Under Miri few, and no file of failures, since there are no files.
    let cases = if cfg!(miri) { 2 } else { 1000 };
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn frames_are_conserved(options in sizes(), rounds in prop::collection::vec(round(), 1..12)) {
        let (mock, mut core) = mock::open(options);
        let mut world = World {
            mock: &mock,
            arrived: std::collections::VecDeque::new(),
            fresh: Vec::new(),
            sent: Vec::new(),
            invalid: 0,
            packets: 0,
        };
        for round in &rounds {
            world.round(&mut core, round);
            prop_assert_eq!(core.census().total(), options.frames);
        }

        // All comes to rest: what waits is received and dropped, what was queued is sent, all is completed.
        let fresh = std::mem::take(&mut world.fresh);
        let mut sender = core.split(&mock).1;
        fresh.into_iter().for_each(|fresh| sender.give_back(fresh));
        mock.budget.set(usize::MAX);
        while core.split(&mock).1.flush().unwrap() > 0 || core.has_received() || core.census().sending > 0 {
            for _ in 0..options.tx_ring {
                mock.kernel.borrow_mut().complete(0);
            }
            let rest = Round { arrive: Vec::new(), most: usize::MAX, acts: Vec::new() };
            world.round(&mut core, &rest);
        }
        core.receive(&mock, 0);
        let census = core.census();
        prop_assert_eq!(census.filling, options.ring.min(options.frames / 2));
        prop_assert_eq!(census.free + census.filling, options.frames);
        prop_assert_eq!(census.invalid, world.invalid);
        prop_assert_eq!(&mock.kernel.borrow().sent, &world.sent);
    }
}
