//! Frames are conserved. For any order in which packets arrive, are held, answered, dropped, sent
//! and completed, and in which members join and leave: every frame is in one state, payloads do
//! not change while they may be borrowed, and packets are sent as they were written.

use std::collections::{HashMap, VecDeque};

use proptest::prelude::*;

use super::mock::{self, HEADROOM, Mock, MockQueue};
use crate::xsk::QueueOptions;
use crate::xsk::frames::FrameState;
use crate::xsk::linearize::Linearizer;
use crate::xsk::send::{Sender, TxFrame};

/// Size of the longest packet that fits a frame; smaller under Miri, which is slow.
const FRAME_PACKET_MAX: usize = if cfg!(miri) { 64 } else { 2048 - HEADROOM as usize };
/// Size of a fragment.
const FRAG_LEN: usize = FRAME_PACKET_MAX / 2;

/// An action during a batch. Indices are taken modulo the number of items.
#[derive(Clone, Debug)]
enum Act {
    /// A packet arrives for any member during the batch; in fragments if it is long.
    Arrive {
        member: usize,
        len: usize,
    },
    /// A packet arrives with a wrong descriptor.
    ArriveInvalid {
        member: usize,
        too_long: bool,
    },
    /// The kernel reports a nonexistent frame as received or sent.
    InvalidAddr {
        member: usize,
        sent: bool,
    },
    /// Writes the header, and sends the packet with part of its payload.
    SendInPlace {
        packet: usize,
        payload: usize,
    },
    Alloc,
    SendFrame {
        which: usize,
        len: usize,
    },
    Free {
        which: usize,
    },
    /// The kernel takes up to `budget` packets in each call.
    Flush {
        budget: usize,
    },
    Complete {
        which: usize,
    },
}

#[derive(Clone, Debug)]
enum Step {
    /// Packets arrive before a batch of one member; then the batch is received, and the actions
    /// follow.
    Round {
        member: usize,
        arrive: Vec<usize>,
        max: usize,
        acts: Vec<Act>,
    },
    Join {
        ring: u32,
        tx_ring: u32,
        assembles: bool,
    },
    Leave {
        member: usize,
    },
}

fn act() -> impl Strategy<Value = Act> {
    let index = any::<usize>;
    let long = 1..=3 * FRAME_PACKET_MAX;
    prop_oneof![
        4 => (index(), long).prop_map(|(member, len)| Act::Arrive { member, len }),
        1 => (index(), any::<bool>()).prop_map(|(member, too_long)| Act::ArriveInvalid { member, too_long }),
        1 => (index(), any::<bool>()).prop_map(|(member, sent)| Act::InvalidAddr { member, sent }),
        8 => (index(), index()).prop_map(|(packet, payload)| Act::SendInPlace { packet, payload }),
        6 => Just(Act::Alloc),
        4 => (index(), 1..=FRAME_PACKET_MAX).prop_map(|(which, len)| Act::SendFrame { which, len }),
        2 => index().prop_map(|which| Act::Free { which }),
        3 => (0..6_usize).prop_map(|budget| Act::Flush { budget }),
        6 => index().prop_map(|which| Act::Complete { which }),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let round = (
        any::<usize>(),
        prop::collection::vec(1..=FRAME_PACKET_MAX + FRAG_LEN, 0..12),
        0..10_usize,
        prop::collection::vec(act(), 0..24),
    );
    prop_oneof![
        8 => round.prop_map(|(member, arrive, max, acts)| Step::Round { member, arrive, max, acts }),
        1 => (0..5_u32, 0..5_u32, any::<bool>()).prop_map(|(ring, tx_ring, assembles)| Step::Join {
            ring: 1 << ring,
            tx_ring: 1 << tx_ring,
            assembles,
        }),
        1 => any::<usize>().prop_map(|member| Step::Leave { member }),
    ]
}

fn sizes() -> impl Strategy<Value = QueueOptions> {
    // Rings larger and smaller than the number of frames; batches larger than the ring.
    (2..40_u32, 0..5_u32, 0..5_u32, 1..12_usize)
        .prop_map(|(frames, ring, tx_ring, batch)| mock::options(frames, 1 << ring, 1 << tx_ring, batch))
}

/// The expected state of a member.
struct MemberModel {
    member: MockQueue,
    /// Its number in the kernel.
    number: usize,
    linearizes: bool,
    ring: u32,
    /// Packets that arrived and were not received yet, oldest first. Unusable ones are empty.
    arrived: VecDeque<Vec<u8>>,
    /// The current batch, and the offsets of its payloads.
    batch: Vec<(Vec<u8>, usize)>,
    /// Allocated frames.
    tx_frames: Vec<TxFrame>,
    /// Packets put into the TX ring, in order.
    sent: Vec<Vec<u8>>,
}

struct World<'a> {
    mock: &'a Mock,
    members: Vec<MemberModel>,
    invalid: u64,
    packets: u8,
}

impl World<'_> {
    fn pattern(&mut self, len: usize) -> Vec<u8> {
        self.packets = self.packets.wrapping_add(1);
        (0..len).map(|at| (at as u8).wrapping_mul(7) ^ self.packets).collect()
    }

    fn add_member(&mut self, core: MockQueue, number: usize, assembles: bool, ring: u32) {
        let (arrived, batch, fresh, sent) = (VecDeque::new(), Vec::new(), Vec::new(), Vec::new());
        self.members.push(MemberModel {
            member: core,
            number,
            linearizes: assembles,
            ring,
            arrived,
            batch,
            tx_frames: fresh,
            sent,
        });
    }

    /// Delivers a packet; `arrived` are those in flight to that member.
    fn arrive(&mut self, number: usize, assembles: bool, len: usize, arrived: &mut VecDeque<Vec<u8>>) {
        let packet = self.pattern(len);
        let mut kernel = self.mock.kernel.borrow_mut();
        if len <= FRAME_PACKET_MAX {
            if kernel.receive_at(number, &packet) {
                arrived.push_back(packet);
            }
        } else if kernel.receive_frags(number, &packet, FRAG_LEN) {
            arrived.push_back(if assembles { packet } else { Vec::new() });
        }
    }

    /// Executes an action in the batch of `me`, which sends through `sender`.
    fn act(&mut self, act: &Act, view: &mut MemberView<'_>, sender: &mut Sender<'_>) {
        match *act {
            Act::Arrive { member, .. }
            | Act::ArriveInvalid { member, .. }
            | Act::InvalidAddr { member, .. } => {
                // The member of the batch, or one of the others.
                let at = member % (self.members.len() + 1);
                let (number, assembles, mut arrived) = match self.members.get_mut(at) {
                    Some(other) => (other.number, other.linearizes, std::mem::take(&mut other.arrived)),
                    None => (view.number, view.linearizes, std::mem::take(view.arrived)),
                };
                self.inject(act, number, assembles, &mut arrived);
                match self.members.get_mut(at) {
                    Some(other) => other.arrived = arrived,
                    None => *view.arrived = arrived,
                }
            }
            Act::SendInPlace { packet, payload } if !view.batch.is_empty() => {
                let i = packet % view.batch.len();
                let (bytes, at) = &view.batch[i];
                let was_sent = sender.is_sent(i);
                let header = self.pattern(*at);
                let can_be_sent = !was_sent && !sender.is_multi_buffer(i);
                let there = sender.in_place_header_mut(i);
                assert_eq!(there.is_some(), can_be_sent);
                if let Some(there) = there {
                    there.copy_from_slice(&header);
                }
                let len = payload % (bytes.len() - at + 1);
                if sender.send_in_place(i, len) {
                    assert!(!was_sent && sender.is_sent(i) && !sender.is_multi_buffer(i));
                    view.sent.push([&header[..], &bytes[*at..at + len]].concat());
                } else {
                    assert_eq!(sender.is_sent(i), was_sent);
                }
            }
            Act::Alloc => view.tx_frames.extend(sender.alloc()),
            Act::SendFrame { which, len } if !view.tx_frames.is_empty() => {
                let mut fresh = view.tx_frames.swap_remove(which % view.tx_frames.len());
                let bytes = self.pattern(len);
                sender.frame_mut(&mut fresh)[..len].copy_from_slice(&bytes);
                match sender.send_frame(fresh, len) {
                    Ok(()) => view.sent.push(bytes),
                    Err(fresh) => view.tx_frames.push(fresh),
                }
            }
            Act::Free { which } if !view.tx_frames.is_empty() => {
                sender.free(view.tx_frames.swap_remove(which % view.tx_frames.len()));
            }
            Act::Flush { budget } => {
                self.mock.budget.set(budget);
                let left = sender.flush().unwrap();
                assert_eq!(self.sent_by(view.number).len() + left, view.sent.len());
            }
            Act::Complete { which } => self.mock.kernel.borrow_mut().complete(which),
            Act::SendInPlace { .. } | Act::SendFrame { .. } | Act::Free { .. } => {}
        }
    }

    fn inject(&mut self, act: &Act, number: usize, assembles: bool, arrived: &mut VecDeque<Vec<u8>>) {
        match *act {
            Act::Arrive { len, .. } => self.arrive(number, assembles, len, arrived),
            Act::ArriveInvalid { too_long, .. } => {
                let (len, options) = if too_long { (2048 - HEADROOM as u32 + 1, 0) } else { (60, 4) };
                if self.mock.kernel.borrow_mut().receive_with(number, len, options, &[0; 60]) {
                    arrived.push_back(Vec::new());
                }
            }
            Act::InvalidAddr { sent, .. } => {
                let nowhere = u64::MAX / 2;
                let mut kernel = self.mock.kernel.borrow_mut();
                if sent {
                    self.invalid += u64::from(kernel.has_room() && kernel.push_completion(nowhere));
                } else if kernel.push_rx(number, nowhere) {
                    arrived.push_back(Vec::new());
                }
            }
            _ => {}
        }
    }

    fn sent_by(&self, number: usize) -> Vec<Vec<u8>> {
        let kernel = self.mock.kernel.borrow();
        kernel.sent.iter().filter(|(member, _)| *member == number).map(|(_, bytes)| bytes.clone()).collect()
    }

    /// One batch of a member, from its beginning until the next one may begin.
    fn round(&mut self, member: usize, arrive: &[usize], max: usize, acts: &[Act]) {
        let mut view = self.members.remove(member % self.members.len());
        for &len in arrive {
            self.arrive(view.number, view.linearizes, len, &mut view.arrived);
        }
        let wanted = max.min(view.member.batch_max());
        let looked = wanted.min(view.arrived.len());
        let arrived_packets: Vec<_> = view.arrived.drain(..looked).collect();
        let arrived_packets: Vec<Vec<u8>> =
            arrived_packets.into_iter().filter(|packet| !packet.is_empty()).collect();
        self.invalid += (looked - arrived_packets.len()) as u64;
        assert_eq!(view.member.receive(max), arrived_packets.len());
        let at = |packet: &Vec<u8>| usize::from(packet[0]) % packet.len();
        view.batch = arrived_packets
            .into_iter()
            .map(|packet| (at(&packet), packet))
            .map(|(at, packet)| (packet, at))
            .collect();
        for (i, (packet, at)) in view.batch.iter().enumerate() {
            assert_eq!(view.member.packet(i), packet);
            view.member.set_payload(i, *at, packet.len() - at);
        }
        let (payloads, mut sender) = view.member.split();
        let borrowed: Vec<&[u8]> = (0..view.batch.len()).map(|i| payloads.payload(i)).collect();
        let mut parts = MemberView {
            number: view.number,
            linearizes: view.linearizes,
            arrived: &mut view.arrived,
            batch: &view.batch,
            tx_frames: &mut view.tx_frames,
            sent: &mut view.sent,
        };
        for act in acts {
            self.act(act, &mut parts, &mut sender);
            for (i, (packet, at)) in view.batch.iter().enumerate() {
                assert_eq!(borrowed[i], &packet[*at..], "payload {i} changed");
            }
        }
        self.members.push(view);
        self.audit();
    }

    fn leave(&mut self, member: usize) {
        let MemberModel { member, number, arrived, sent: queued, .. } =
            self.members.remove(member % self.members.len());
        drop(member);
        self.mock.kernel.borrow_mut().close(number);
        // Of the unread entries, only invalid addresses were counted.
        let odd = arrived.iter().filter(|packet| packet.is_empty()).count() as u64;
        let seen = self.mock.allocator.frame_counts().invalid;
        assert!((self.invalid..=self.invalid + odd).contains(&seen));
        self.invalid = seen;
        // Unsent packets will never be sent; sent ones are as written.
        let sent = self.sent_by(number);
        assert_eq!(sent, queued[..sent.len()]);
        self.audit();
    }

    /// Checks that every frame is in the expected state, and that batches have not changed.
    fn audit(&self) {
        let frames = &self.mock.allocator.frames;
        let caches: Vec<_> = self.members.iter().map(|member| member.member.cache()).collect();
        self.mock.allocator.lock().audit(&caches);
        let of = |kind| frames.in_state(kind, None).collect::<Vec<u32>>();
        let mut queued = 0;
        for member in &self.members {
            queued += member.sent.len() - self.sent_by(member.number).len();
            for (i, (packet, at)) in member.batch.iter().enumerate() {
                assert_eq!(
                    &member.member.packet(i)[*at..],
                    &packet[*at..],
                    "payload {i} of another member changed"
                );
            }
        }
        let mut kernel = self.mock.kernel.borrow_mut();
        let mut receiving = kernel.receiving();
        // The entries of packets that are in no batch yet are not released, but their frames are
        // held.
        let ahead: Vec<u32> = self.members.iter().flat_map(|member| member.member.frames_ahead()).collect();
        receiving.retain(|frame| *frame < frames.count() && !ahead.contains(frame));
        assert_eq!(receiving, of(FrameState::Filling));
        let mut sending = kernel.sending();
        sending.retain(|&frame| frame < frames.count());
        let mut ours = [of(FrameState::Sending), of(FrameState::HeldSending)].concat();
        assert!(sending.iter().all(|frame| ours.contains(frame)), "sent from a frame that is not being sent");
        ours.retain(|frame| !sending.contains(frame));
        assert_eq!(ours.len(), queued, "the others are in the send rings");
        let mut times: HashMap<u32, u32> = HashMap::new();
        receiving.iter().chain(&sending).for_each(|&frame| *times.entry(frame).or_default() += 1);
        assert!(times.values().all(|&times| times == 1), "a frame is in two places");
        let fresh: usize = self.members.iter().map(|member| member.tx_frames.len()).sum();
        let census = self.mock.allocator.frame_counts();
        assert_eq!((census.allocated as usize, census.total()), (fresh, frames.count()));
        assert!(census.invalid <= self.invalid);
    }

    /// Drains everything: receives and drops pending packets, sends queued ones, completes all.
    fn drain(&mut self) {
        for member in &mut self.members {
            let mut sender = member.member.split().1;
            member.tx_frames.drain(..).for_each(|fresh| sender.free(fresh));
        }
        self.mock.budget.set(usize::MAX);
        let rings: u32 = self.members.iter().map(|member| member.ring).sum();
        let target = rings.min(self.mock.allocator.frames.count() / 2);
        for _ in 0..1000 {
            for _ in 0..self.members.len() {
                // Each member in turn: `round` moves it to the end.
                self.round(0, &[], usize::MAX, &[Act::Flush { budget: usize::MAX }]);
                let max = self.mock.kernel.borrow().options.tx_ring;
                for _ in 0..max {
                    self.mock.kernel.borrow_mut().complete(0);
                }
            }
            let waits = self.members.iter().any(|member| member.member.has_received());
            let census = self.mock.allocator.frame_counts();
            if !waits && census.sending + census.held == 0 && census.filling >= target {
                return;
            }
        }
        panic!("no rest: {:?}, {target} to be filled", self.mock.allocator.frame_counts());
    }
}

/// A member without its core, which is borrowed.
struct MemberView<'a> {
    number: usize,
    linearizes: bool,
    arrived: &'a mut VecDeque<Vec<u8>>,
    batch: &'a [(Vec<u8>, usize)],
    tx_frames: &'a mut Vec<TxFrame>,
    sent: &'a mut Vec<Vec<u8>>,
}

fn linearizer(assembles: bool, ring: u32) -> Linearizer {
    if assembles { Linearizer::new(ring).unwrap() } else { Linearizer::disabled() }
}

fn cases() -> ProptestConfig {
    // Few cases under Miri, and no failure file, because Miri has no files.
    let cases = if cfg!(miri) { 2 } else { 1000 };
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

#[test]
fn pending_frames_of_a_removed_member_are_not_shared() {
    // Granted while it was alone with a short ring: more than is left beside the longer ring of
    // the member that stays.
    let options = mock::options(6, 1, 4, 1);
    let (mock, core) = mock::open_with(options, Linearizer::disabled(), 0);
    let mut world = World { mock: &mock, members: Vec::new(), invalid: 0, packets: 0 };
    world.add_member(core, 0, false, options.ring);
    let taken = vec![Act::Alloc; 4];
    world.round(0, &[], 0, &taken);
    let sent = vec![Act::SendFrame { which: 0, len: 1 }; 4];
    world.round(0, &[], 0, &sent);
    let longer = QueueOptions { ring: 4, ..options };
    let (number, core) = mock.join(&longer, Linearizer::disabled());
    world.add_member(core, number, false, longer.ring);
    world.leave(0);
    let census = mock.allocator.frame_counts();
    assert_eq!(
        (census.sending, census.filling),
        (4, 2),
        "of three that it should have, until some come back"
    );
    world.drain();
    let census = mock.allocator.frame_counts();
    assert_eq!((census.sending, census.filling), (0, 3));
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn frames_are_conserved(
        options in sizes(),
        assembles in any::<bool>(),
        steps in prop::collection::vec(step(), 1..12),
    ) {
        let (mock, core) = mock::open_with(options, linearizer(assembles, options.ring), 0);
        let mut world = World { mock: &mock, members: Vec::new(), invalid: 0, packets: 0 };
        world.add_member(core, 0, assembles, options.ring);
        for step in &steps {
            match step {
                Step::Round { member, arrive, max, acts } => world.round(*member, arrive, *max, acts),
                Step::Join { ring, tx_ring, assembles } => {
                    let options = QueueOptions { ring: *ring, tx_ring: *tx_ring, ..options };
                    let (number, core) = mock.join(&options, linearizer(*assembles, *ring));
                    world.add_member(core, number, *assembles, *ring);
                    world.audit();
                }
                Step::Leave { member } if world.members.len() > 1 => world.leave(*member),
                Step::Leave { .. } => {}
            }
        }
        world.drain();
        let census = mock.allocator.frame_counts();
        prop_assert_eq!(census.free + census.filling, options.frames);
        prop_assert_eq!(census.invalid, world.invalid);
        for member in &world.members {
            prop_assert_eq!(&world.sent_by(member.number), &member.sent);
        }
        while !world.members.is_empty() {
            world.leave(0);
        }
    }
}
