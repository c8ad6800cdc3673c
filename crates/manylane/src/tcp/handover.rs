//! Packets that arrived at another lane than the one that has their connection.
//!
//! The device picks the queue of a packet, and with it the lane: by a hash of the flow, so that a
//! connection stays with the lane that its SYN came to. Two cases are different. Answers to our own
//! connections arrive at any lane; the source port tells which one has it. And the device, or the
//! host at the other end of a virtual link, may change its mind about a connection that lives: then
//! a packet that no lane expects goes from lane to lane, until one has its connection or all were
//! asked.
//!
//! Each lane has a box of a fixed size. If it is full, the packet is dropped and counted: its
//! sender sends it again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use manylane_sys::event_fd::EventFd;

use super::source_ports::SourcePorts;
use crate::error::{Error, Result};

/// Packets that a box holds.
const BOX_PACKETS: usize = 256;
/// Longest packet that is handed over: that of a frame.
const PACKET_LEN_MAX: usize = 2048;

/// A packet on its way.
pub(super) struct HandedPacket {
    len: usize,
    bytes: [u8; PACKET_LEN_MAX],
    /// The link that it came over.
    pub(super) link: u16,
    /// Lanes that did not have its connection.
    pub(super) asked: usize,
}

impl HandedPacket {
    /// Its bytes.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // `len` was checked when it was made.
        &mut self.bytes[..self.len]
    }
}

/// What the other lanes know of a lane.
struct LaneBox {
    sender: SyncSender<HandedPacket>,
    /// It was signalled since the lane last looked.
    has_mail: AtomicBool,
    event: EventFd,
}

impl LaneBox {
    /// Puts a packet into it. False if the lane is closed.
    fn put(&self, counts: &mut HandoverCounts, link: u16, packet: &[u8], asked: usize) -> bool {
        let mut bytes = [0; PACKET_LEN_MAX];
        let Some(place) = bytes.get_mut(..packet.len()) else {
            counts.full += 1;
            return true;
        };
        place.copy_from_slice(packet);
        match self.sender.try_send(HandedPacket { len: packet.len(), bytes, link, asked }) {
            Ok(()) => {
                counts.sent += 1;
                // Behind the packet: a lane that clears the flag first then sees the packet.
                if !self.has_mail.swap(true, Ordering::AcqRel) {
                    self.event.signal();
                }
                true
            }
            Err(TrySendError::Full(_)) => {
                counts.full += 1;
                true
            }
            Err(TrySendError::Disconnected(_)) => false,
        }
    }
}

/// The lanes of a group, and the ports that connections to others come from.
struct Boxes {
    lanes: Vec<LaneBox>,
    source_blocks: Vec<u16>,
}

/// Counts of packets that were handed over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HandoverCounts {
    /// To other lanes.
    pub(super) sent: u64,
    /// Not taken, because the other lane's box was full.
    pub(super) full: u64,
}

/// The handover of one lane.
pub(super) struct Handover {
    boxes: Arc<Boxes>,
    own: usize,
    receiver: Receiver<HandedPacket>,
    pub(super) counts: HandoverCounts,
}

impl Handover {
    /// Those of a group of lanes.
    pub(super) fn group(lanes: usize, source_blocks: &[u16]) -> Result<Vec<Handover>> {
        let (mut boxes, mut receivers) = (Vec::new(), Vec::new());
        for _ in 0..lanes {
            let (sender, receiver) = sync_channel(if lanes > 1 { BOX_PACKETS } else { 1 });
            let event = EventFd::new().map_err(|err| Error::system("creating an eventfd for a lane", err))?;
            boxes.push(LaneBox { sender, has_mail: AtomicBool::new(false), event });
            receivers.push(receiver);
        }
        let boxes = Arc::new(Boxes { lanes: boxes, source_blocks: source_blocks.to_vec() });
        let one = |(own, receiver)| Handover {
            boxes: Arc::clone(&boxes),
            own,
            receiver,
            counts: HandoverCounts::default(),
        };
        Ok(receivers.into_iter().enumerate().map(one).collect())
    }

    /// The number of this lane.
    pub(super) fn own(&self) -> usize {
        self.own
    }

    /// Readable when packets were handed over to this lane.
    pub(super) fn event(&self) -> &EventFd {
        &self.boxes.lanes[self.own].event
    }

    /// Takes a packet to `port` of which this lane has no connection, and for which `asked` others
    /// had none. False if no other lane can have it.
    #[cold]
    pub(super) fn pass_on(&mut self, port: u16, link: u16, packet: &[u8], asked: usize) -> bool {
        let Self { boxes, own, counts, .. } = self;
        let lanes = boxes.lanes.len();
        if let Some(to) = SourcePorts::lane_of(&boxes.source_blocks, port, lanes) {
            return to != *own && boxes.lanes[to].put(counts, link, packet, asked + 1);
        }
        // The next lane that is open, up to the one that it arrived at.
        (1..lanes.saturating_sub(asked))
            .any(|ahead| boxes.lanes[(*own + ahead) % lanes].put(counts, link, packet, asked + ahead))
    }

    /// True if there may be packets.
    #[inline]
    pub(super) fn has_mail(&self) -> bool {
        self.boxes.lanes[self.own].has_mail.load(Ordering::Acquire)
    }

    /// Begins to empty the box.
    pub(super) fn clear(&self) {
        let own = &self.boxes.lanes[self.own];
        own.event.clear();
        own.has_mail.swap(false, Ordering::AcqRel);
    }

    /// The next packet that was handed over to this lane.
    pub(super) fn next(&self) -> Option<HandedPacket> {
        self.receiver.try_recv().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first byte of what is in the box of a lane, and how many lanes were asked.
    fn taken(lane: &Handover) -> Vec<(u8, usize)> {
        std::iter::from_fn(|| lane.next()).map(|mut handed| (handed.bytes_mut()[0], handed.asked)).collect()
    }

    #[test]
    fn packets_to_source_ports_go_to_their_lane() {
        let mut lanes = Handover::group(3, &[61_184, 61_440, 61_696]).unwrap();
        assert!(lanes[0].pass_on(61_700, 0, &[7], 0));
        assert_eq!(taken(&lanes[2]), [(7, 1)]);
        // That lane does not have it either.
        assert!(!lanes[2].pass_on(61_700, 0, &[7], 1));
        assert_eq!((lanes[0].counts.sent, lanes[2].counts.sent), (1, 0));
    }

    #[test]
    fn other_packets_go_round_once() {
        let mut lanes = Handover::group(3, &[]).unwrap();
        assert!(lanes[1].pass_on(80, 0, &[1], 0));
        assert_eq!(taken(&lanes[2]), [(1, 1)]);
        assert!(lanes[2].pass_on(80, 0, &[1], 1));
        assert_eq!(taken(&lanes[0]), [(1, 2)]);
        assert!(!lanes[0].pass_on(80, 0, &[1], 2));
    }

    #[test]
    fn lanes_that_are_closed_are_passed_over() {
        let mut lanes = Handover::group(3, &[61_184, 61_440, 61_696]).unwrap();
        drop(lanes.remove(1));
        assert!(lanes[0].pass_on(80, 0, &[2], 0));
        assert_eq!(taken(&lanes[1]), [(2, 2)]);
        assert!(!lanes[1].pass_on(80, 0, &[2], 2));
        // No one has the ports of a lane that is closed.
        assert!(!lanes[0].pass_on(61_440, 0, &[2], 0));
        drop(lanes.remove(1));
        assert!(!lanes[0].pass_on(80, 0, &[2], 0));
    }

    #[test]
    fn a_full_box_drops_and_counts() {
        let mut lanes = Handover::group(2, &[]).unwrap();
        for _ in 0..=BOX_PACKETS {
            assert!(lanes[0].pass_on(80, 0, &[3], 0));
        }
        assert!(lanes[0].pass_on(80, 0, &[3; PACKET_LEN_MAX + 1], 0));
        assert_eq!(lanes[0].counts, HandoverCounts { sent: BOX_PACKETS as u64, full: 2 });
        assert!(lanes[1].has_mail());
        lanes[1].clear();
        assert_eq!((taken(&lanes[1]).len(), lanes[1].has_mail()), (BOX_PACKETS, false));
    }
}
