//! IP packets of the queues of one lane, for a stack above them.
//!
//! | stage | owner of the frame | when it is full or missing |
//! |---|---|---|
//! | [`PacketQueues::receive`]: a batch of one queue | the lane | - |
//! | [`Packets`]: without link headers | the batch; changed in place | no IP: counted |
//! | [`PacketOut::space`]: a free frame | the lane | no frame, or TX ring full: sent later |
//! | [`PacketOut::send`]: next hop, link header | the kernel, then free | unknown: raw socket |
//! | [`PacketOut::finish`], once a batch | the kernel | device full: [`unsent`](super::unsent) |
//!
//! A frame is taken from the queue of the batch, because most packets answer one of it. If the next
//! hop is over another device of the lane, it is copied into a frame of that one. What goes by the
//! raw socket is counted: its next hop is unknown, or over a device without a queue of the lane.
//! Answers that make the kernel resolve a neighbour have a [budget](super::resolve_budget).

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use manylane_ipc::next_hops::NextHop;
use manylane_sys::raw_ip::PacketSender;
use manylane_sys::xsk::{PacketsMut, Sender, TxFrame};
use manylane_wire::ethernet::{Ethernet, HEADER_LEN, Mac, ether_type};
use manylane_wire::packet::Packet;
use manylane_wire::tcp::{self, Flags, Tcp};

use super::control::{FRAME_SIZE, XdpControl};
use super::lane_queue::LaneQueue;
use super::lane_queues::{LaneQueues, SendParts};
use super::resolve_budget::ResolveBudget;
use super::route::{NoNextHop, Reader};
use super::unsent::UnsentTimer;
use crate::counters::LaneId;
use crate::error::{Error, Result};
use crate::vlan::Vlan;

/// Counts of a lane's packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PacketCounts {
    /// Frames that are no IP packets.
    pub(crate) malformed: u64,
    /// Packets sent by the kernel: their next hop was not known yet, or is over a device without a
    /// queue of this lane.
    pub(crate) sent_by_kernel: u64,
    /// Packets that neither the device nor the kernel took.
    pub(crate) unsent: u64,
    /// Answers that were dropped: the kernel would have had to resolve too many neighbours.
    pub(crate) unresolved: u64,
}

/// The queues of a lane.
pub(crate) struct PacketQueues {
    queues: LaneQueues,
    kernel: PacketSender,
    budget: ResolveBudget,
    counts: PacketCounts,
    batch: usize,
    /// A packet may have the checksum of its pseudo header alone, because its sender is a kernel on
    /// this machine. Checksums of such packets are accepted as they are.
    may_be_partial: bool,
    /// The VLANs whose frames are taken. Their numbers as links begin at 1; 0 is without tags.
    vlans: Vec<Vlan>,
}

impl PacketQueues {
    /// One of `lanes`, without queues: they are assigned when its control starts. The readiness of
    /// `others` wakes it, too.
    pub(crate) fn new(
        control: Arc<XdpControl>,
        (lane, lanes): (LaneId, usize),
        others: &[BorrowedFd<'_>],
    ) -> Result<Self> {
        let kernel = PacketSender::open()
            .map_err(|err| Error::system("cannot open a raw IP socket (needs CAP_NET_RAW)", err))?;
        let (batch, is_generic) = (control.batch, control.options.generic);
        let vlans = control.options.vlans.clone();
        control.use_prefixes();
        let queues = LaneQueues::new(control, lane, others)?;
        Ok(Self {
            queues,
            kernel,
            budget: ResolveBudget::new(lanes),
            counts: PacketCounts::default(),
            batch,
            may_be_partial: is_generic,
            vlans,
        })
    }

    /// Tells it the time since the lanes were opened.
    #[inline]
    pub(crate) fn set_time(&mut self, now: Duration) {
        self.budget.refill(now);
    }

    /// Receives a batch from the next queue that has packets; returns their number.
    pub(crate) fn receive(&mut self) -> usize {
        self.queues.receive_frames(self.batch)
    }

    /// Packets that the ring of each queue takes.
    pub(crate) fn ring_capacity(&self) -> usize {
        self.queues.ring_capacity()
    }

    /// True if [`receive`](Self::receive) may find some.
    pub(crate) fn can_receive(&self) -> bool {
        self.queues.can_receive()
    }

    /// The packets of the last batch, and the send side.
    pub(crate) fn split(&mut self) -> (Packets<'_>, PacketOut<'_>) {
        let SendParts { queues, current, reader, unsent } = self.queues.send_parts();
        let (before, rest) = queues.split_at_mut(current.unwrap_or(0));
        let (current, after) = rest.split_at_mut(usize::from(current.is_some()));
        let last = before.len();
        let mut packets =
            Packets { packets: None, next: 0, may_be_partial: self.may_be_partial, vlans: &self.vlans };
        let current = current.first_mut().map(|queue| {
            packets.may_be_partial |= queue.device.is_veth;
            let (received, sender) = queue.xsk.split_mut();
            packets.packets = Some(received);
            (queue.device.index, sender)
        });
        let out = PacketOut {
            queues: Queues { before, current, after },
            last,
            spare: None,
            flush_pending: false,
            reader,
            unsent,
            kernel: &self.kernel,
            budget: &mut self.budget,
            counts: &mut self.counts,
            vlans: &self.vlans,
        };
        (packets, out)
    }

    /// Sleeps until there may be packets, or one of the other descriptors is ready, for at most
    /// `timeout`.
    pub(crate) fn wait(&mut self, timeout: Duration) -> Result<()> {
        self.queues.wait(timeout)
    }

    /// Ends the last batch.
    pub(crate) fn end_batch(&mut self) {
        self.queues.end_batch();
        self.queues.flush_unsent();
    }

    /// Counts since the start.
    pub(crate) fn counts(&self) -> PacketCounts {
        self.counts
    }

    /// Counts a frame that is no IP packet.
    pub(crate) fn add_malformed(&mut self, count: u64) {
        self.counts.malformed += count;
    }

    /// True if a full device has packets left. The lane is woken when it may take them.
    pub(crate) fn is_stalled(&self) -> bool {
        self.queues.has_unsent()
    }

    /// Hands its queues over to other lanes, if there are any.
    pub(crate) fn release(&mut self) {
        self.queues.release();
    }

    /// Closes the queues, once the device has taken all packets, or after a fraction of a second.
    pub(crate) fn close(&mut self) {
        self.queues.close();
    }
}

impl AsFd for PacketQueues {
    /// Readable while there are packets, or one of the other descriptors is ready.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.queues.as_fd()
    }
}

/// The packets of a batch.
pub(crate) struct Packets<'a> {
    packets: Option<PacketsMut<'a>>,
    next: usize,
    may_be_partial: bool,
    vlans: &'a [Vlan],
}

/// A frame of a batch.
pub(crate) enum Received<'p> {
    /// An IP packet.
    Packet {
        packet: &'p mut [u8],
        /// The number of its VLAN; 0 without one.
        link: u16,
        /// Its checksums need no check.
        is_verified: bool,
    },
    /// Something else.
    Malformed,
}

impl Packets<'_> {
    /// The next frame.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<Received<'_>> {
        let frame = self.packets.as_mut()?.get_mut(self.next)?;
        self.next += 1;
        let Ok((header, _)) = Ethernet::parse(frame) else { return Some(Received::Malformed) };
        let link = if header.vlans[0].is_some() { link_of(&header, self.vlans) } else { 0 };
        let packet = &mut frame[header.header_len()..];
        let is_verified = self.may_be_partial && is_partial(packet);
        Some(Received::Packet { packet, link, is_verified })
    }
}

/// The number of a frame's VLAN, as the XDP program reads its tags.
#[cold]
fn link_of(header: &Ethernet, vlans: &[Vlan]) -> u16 {
    const VLAN_ID: u16 = 0x0fff;
    let key = header.vlans.iter().flatten().fold(0, |key, tag| key << 16 | u32::from(tag.tci & VLAN_ID));
    let at = vlans.iter().position(|vlan| vlan.key() == key);
    at.and_then(|at| u16::try_from(at + 1).ok()).unwrap_or(0)
}

/// True if a kernel on this machine left the checksum of TCP to a device.
fn is_partial(packet: &[u8]) -> bool {
    let Some(Packet { source, destination, protocol, payload }) = Packet::parse(packet) else { return false };
    protocol == tcp::PROTOCOL
        && Tcp::parse(payload).is_ok_and(|tcp| tcp.has_partial_checksum(source, destination))
}

/// True if a segment is one that anybody can cause: an answer to a SYN, or a reset.
#[cold]
fn is_stateless(segment: &[u8]) -> bool {
    let flags = segment.get(13).map_or(Flags(0), |flags| Flags(*flags));
    flags.contains(Flags::RST) || flags.contains(Flags::SYN.with(Flags::ACK))
}

/// The queues of a lane while one of them has a batch. They are numbered in this order.
struct Queues<'a> {
    before: &'a mut [LaneQueue],
    /// The queue of the batch: its device and its send side.
    current: Option<(u32, Sender<'a>)>,
    after: &'a mut [LaneQueue],
}

impl Queues<'_> {
    fn other(&mut self, at: usize) -> Option<&mut LaneQueue> {
        let behind = self.before.len() + usize::from(self.current.is_some());
        match at.checked_sub(behind) {
            Some(at) => self.after.get_mut(at),
            None => self.before.get_mut(at),
        }
    }

    /// The send side of a queue.
    #[inline]
    fn sender(&mut self, at: usize) -> Option<Sender<'_>> {
        if at == self.before.len() && self.current.is_some() {
            return self.current.as_mut().map(|(_, sender)| sender.reborrow());
        }
        self.other(at).map(|queue| queue.xsk.split_mut().1)
    }

    /// The queue to send by over a device: that of the batch, else the first one.
    #[inline]
    fn of_device(&self, device: u32) -> Option<usize> {
        let here = self.before.len();
        if self.current.as_ref().is_some_and(|(current, _)| *current == device) {
            return Some(here);
        }
        let is_there = |queue: &LaneQueue| queue.device.index == device;
        let behind = here + usize::from(self.current.is_some());
        let before = self.before.iter().position(is_there);
        before.or_else(|| self.after.iter().position(is_there).map(|at| at + behind))
    }
}

/// The send side of a lane for a batch.
pub(crate) struct PacketOut<'a> {
    queues: Queues<'a>,
    /// The queue that the last packet was sent by.
    last: usize,
    /// A free frame, and the queue that it belongs to.
    spare: Option<(usize, TxFrame)>,
    /// TX rings have packets that the kernel was not notified of.
    flush_pending: bool,
    reader: &'a mut Reader,
    unsent: &'a mut UnsentTimer,
    kernel: &'a PacketSender,
    budget: &'a mut ResolveBudget,
    counts: &'a mut PacketCounts,
    vlans: &'a [Vlan],
}

impl PacketOut<'_> {
    /// Space for a packet of `length` bytes; the same until [`send`](Self::send). None if there is
    /// none now, or a frame is too short.
    #[inline]
    pub(crate) fn space(&mut self, length: usize) -> Option<&mut [u8]> {
        if self.spare.is_none() {
            let at = self.last;
            if !self.has_room(at) {
                self.notify(at);
                if !self.has_room(at) {
                    return None;
                }
            }
            self.spare = Some((at, self.queues.sender(at)?.alloc()?));
        }
        let (at, frame) = self.spare.as_mut()?;
        self.queues.sender(*at)?.into_frame_mut(frame).get_mut(HEADER_LEN..HEADER_LEN + length)
    }

    /// Sends the first `length` bytes of the space, in the VLAN with this number.
    #[inline]
    pub(crate) fn send(&mut self, length: usize, link: u16) {
        let Some((at, mut frame)) = self.spare.take() else { return };
        let Some(mut sender) = self.queues.sender(at) else { return };
        let packet =
            sender.frame_mut(&mut frame).get(HEADER_LEN..HEADER_LEN + length).and_then(Packet::parse);
        let Some(Packet { source, destination, payload, .. }) = packet else {
            self.counts.unsent += 1;
            return sender.free(frame);
        };
        let next = self.reader.packet_next_hop(source, destination, length);
        if next == Err(NoNextHop::Unresolved) && is_stateless(payload) && !self.budget.take() {
            self.counts.unresolved += 1;
            self.spare = Some((at, frame));
            return;
        }
        let next = next.ok().filter(|next| length <= next.mtu as usize);
        let by_queue = next.and_then(|next| Some((next, self.queues.of_device(next.ifindex)?)));
        match by_queue {
            Some((next, to)) if to == at => self.push(at, frame, length, &next, link),
            Some((next, to)) => self.push_copy(at, frame, length, &next, link, to),
            None => self.send_by_kernel(at, frame, length, destination),
        }
    }

    /// Puts a frame into the TX ring of its queue.
    #[inline]
    fn push(&mut self, at: usize, mut frame: TxFrame, length: usize, next: &NextHop, link: u16) {
        let vlan = usize::from(link).checked_sub(1).and_then(|at| self.vlans.get(at));
        let Some(mut sender) = self.queues.sender(at) else { return };
        let Some(len) = write_link_header(sender.frame_mut(&mut frame), length, next, vlan) else {
            self.counts.unsent += 1;
            return sender.free(frame);
        };
        let mut refused = sender.send_frame(frame, len).err();
        self.flush_pending = true;
        if let Some(frame) = refused {
            self.notify(at);
            let Some(mut sender) = self.queues.sender(at) else { return };
            refused = sender.send_frame(frame, len).err();
            if let Some(frame) = refused {
                sender.free(frame);
                self.counts.unsent += 1;
            }
        }
        self.last = at;
    }

    /// Sends a packet by another queue than the one that its frame is of.
    #[cold]
    fn push_copy(
        &mut self,
        at: usize,
        mut frame: TxFrame,
        length: usize,
        next: &NextHop,
        link: u16,
        to: usize,
    ) {
        let mut copy = [0; FRAME_SIZE as usize];
        if let Some(mut sender) = self.queues.sender(at) {
            if let (Some(packet), Some(copy)) =
                (sender.frame_mut(&mut frame).get(..HEADER_LEN + length), copy.get_mut(..HEADER_LEN + length))
            {
                copy.copy_from_slice(packet);
            }
            sender.free(frame);
        }
        self.last = to;
        let fresh = self.queues.sender(to).and_then(|mut sender| sender.alloc());
        let (Some(mut fresh), Some(mut sender)) = (fresh, self.queues.sender(to)) else {
            self.counts.unsent += 1;
            return;
        };
        if let (Some(room), Some(copy)) =
            (sender.frame_mut(&mut fresh).get_mut(..HEADER_LEN + length), copy.get(..HEADER_LEN + length))
        {
            room.copy_from_slice(copy);
        }
        self.push(to, fresh, length, next, link);
    }

    /// Leaves a packet to the kernel, which finds the neighbour.
    #[cold]
    fn send_by_kernel(&mut self, at: usize, mut frame: TxFrame, length: usize, to: IpAddr) {
        if let Some(mut sender) = self.queues.sender(at)
            && let Some(packet) = sender.frame_mut(&mut frame).get(HEADER_LEN..HEADER_LEN + length)
        {
            match self.kernel.send(packet, to) {
                Ok(()) => self.counts.sent_by_kernel += 1,
                Err(_) => self.counts.unsent += 1,
            }
        }
        self.spare = Some((at, frame));
    }

    fn has_room(&mut self, at: usize) -> bool {
        self.queues.sender(at).is_some_and(|mut sender| sender.has_room())
    }

    /// Notifies the kernel of the packets in a TX ring.
    fn notify(&mut self, at: usize) {
        if let Some(mut sender) = self.queues.sender(at) {
            // An error means that the device is gone, and its frames with it.
            self.unsent.add(sender.flush().unwrap_or(0));
        }
    }

    /// Notifies the kernel of all packets, and frees what is left over.
    #[inline]
    pub(crate) fn finish(mut self) {
        if let Some((at, frame)) = self.spare.take()
            && let Some(mut sender) = self.queues.sender(at)
        {
            sender.free(frame);
        }
        if !self.flush_pending {
            return;
        }
        if self.queues.current.is_some() {
            self.notify(self.queues.before.len());
        }
        let others = self.queues.before.iter_mut().chain(self.queues.after.iter_mut());
        let left = others.map(|queue| queue.xsk.flush_pending().unwrap_or(0)).sum();
        self.unsent.add(left);
    }
}

/// Writes the header of the link in front of a packet that is behind the space for one without
/// tags. Returns the length of the frame; none if it is too long.
#[inline]
fn write_link_header(frame: &mut [u8], length: usize, next: &NextHop, vlan: Option<&Vlan>) -> Option<usize> {
    let is_ipv4 = frame.get(HEADER_LEN)? >> 4 == 4;
    let header = Ethernet {
        destination: Mac(next.mac),
        source: Mac(next.source_mac),
        vlans: vlan.map_or([None; 2], |vlan| vlan.tags()),
        ether_type: if is_ipv4 { ether_type::IPV4 } else { ether_type::IPV6 },
    };
    let len = header.header_len() + length;
    if vlan.is_some() {
        // Makes room for the tags.
        let frame = frame.get_mut(..len)?;
        frame.copy_within(HEADER_LEN..HEADER_LEN + length, header.header_len());
    }
    header.write(frame).ok().map(|_| len)
}
