//! One queue of a device that a lane serves.

use std::sync::Arc;

use manylane_sys::xsk::Queue;
use manylane_wire::datagram::Datagram;
use manylane_wire::ethernet::Mac;
use manylane_wire::rx_hint::{self, RxHint};

use super::device::Device;
use crate::capture::tap::Tap;
use crate::counters::{Cells, Count};
use crate::io::RecvSummary;

/// Id of an open queue; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueueId(pub(super) u64);

/// One queue that a lane serves.
pub(super) struct LaneQueue {
    pub(super) id: QueueId,
    pub(super) xsk: Queue,
    pub(super) device: Arc<Device>,
    /// Queue number on the device.
    pub(super) number: u32,
    /// Frames in its receive ring after the last batch.
    pub(super) waiting: u32,
    /// To be closed when it is empty, because its device is gone.
    pub(super) is_closing: bool,
}

impl LaneQueue {
    pub(super) fn new(id: QueueId, xsk: Queue, device: Arc<Device>, number: u32) -> Self {
        Self { id, xsk, device, number, waiting: 0, is_closing: false }
    }

    /// Receives a batch of datagrams; returns the number of frames, and the counts of the valid
    /// ones.
    #[inline]
    pub(super) fn receive(
        &mut self,
        frames_max: usize,
        datagram_size: usize,
        read: &mut [Datagram],
        tap: &mut Tap,
        cells: &Cells,
    ) -> (usize, RecvSummary) {
        // `read` has an element for each frame.
        let frames = self.receive_frames(frames_max.min(read.len()), tap);
        if frames == 0 {
            return (0, RecvSummary::default());
        }
        (frames, self.validate(&mut read[..frames], datagram_size, cells))
    }

    /// Receives a batch of frames without reading them; returns their number.
    #[inline]
    pub(super) fn receive_frames(&mut self, frames_max: usize, tap: &mut Tap) -> usize {
        let frames = self.xsk.receive(frames_max);
        if frames > 0 && tap.is_active() {
            self.capture(frames, tap);
        }
        frames
    }

    /// Records the frames of the batch as they were on the wire: without rx hints.
    #[cold]
    fn capture(&mut self, frames: usize, tap: &mut Tap) {
        let mac = Mac(self.device.mac());
        self.xsk.edit_packets(|frame| rx_hint::restore(frame, mac));
        tap.record_rx(self.device.index, self.number, (0..frames).map(|index| self.xsk.packet(index)));
    }

    /// Change of the number of frames in the receive ring since the last call.
    #[inline]
    pub(super) fn backlog_delta(&mut self) -> u32 {
        let waiting = self.xsk.cached_backlog();
        waiting.wrapping_sub(std::mem::replace(&mut self.waiting, waiting))
    }

    /// True if the receive ring is more than half full.
    #[cold]
    pub(super) fn is_half_full(&self) -> bool {
        let (waiting, entries) = self.xsk.backlog();
        waiting > entries / 2
    }

    /// Finds the payloads of the received packets, and counts invalid ones. Headers of packets
    /// without an rx hint are parsed into `places`, at the index of each.
    #[inline]
    fn validate(&mut self, places: &mut [Datagram], datagram_size: usize, cells: &Cells) -> RecvSummary {
        let (mut bytes, mut truncated) = (0, 0);
        let (mut bad_checksum, mut malformed) = (0, 0);
        let from_veth = self.device.is_veth;
        let packets = places.len();
        self.xsk.find_payloads(|index, packet| {
            let RxHint { payload_offset: at, len } = match rx_hint::parse(packet, from_veth) {
                Some(hinted) => hinted,
                None => match parse_packet(places.get_mut(index)?, packet, from_veth) {
                    Ok(found) => found,
                    Err(PacketError::Malformed) => {
                        malformed += 1;
                        return None;
                    }
                    Err(PacketError::Checksum) => {
                        bad_checksum += 1;
                        return None;
                    }
                },
            };
            let mut len = usize::from(len);
            if len > datagram_size {
                len = datagram_size;
                truncated += 1;
            }
            bytes += len;
            Some((at.into(), len))
        });
        if bad_checksum > 0 {
            cells.add(Count::BadChecksum, bad_checksum);
        }
        if malformed > 0 {
            cells.add(Count::Malformed, malformed);
        }
        let good = packets - (bad_checksum + malformed) as usize;
        RecvSummary { messages: good, datagrams: good, bytes, truncated, gro_messages: 0 }
    }
}

/// The reason why a packet is invalid.
enum PacketError {
    Malformed,
    Checksum,
}

/// Parses all headers of a packet. Not inlined: the loop over packets with a hint needs its
/// registers.
#[inline(never)]
fn parse_packet(place: &mut Datagram, packet: &[u8], from_veth: bool) -> Result<RxHint, PacketError> {
    place.read(packet).map_err(|_| PacketError::Malformed)?;
    let found = RxHint { payload_offset: place.payload_offset, len: place.len };
    if place.checksum.is_accepted(from_veth) { Ok(found) } else { Err(PacketError::Checksum) }
}
