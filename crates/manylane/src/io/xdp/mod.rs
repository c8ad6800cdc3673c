//! Engine `xdp`: frames from the device into memory of the lane (AF_XDP), with a kernel socket as
//! companion.
//!
//! | stage | who owns the frame | when it is full or missing |
//! |---|---|---|
//! | the program on the device (`bpf/xdp.bpf.c`) | the driver | not ours, or not understood: to the kernel, where the companion is; not wanted ([`filter`]): dropped, counted |
//! | the RX ring of the queue | the kernel, then the lane | ring full, or no frame to fill: dropped, counted in `xsk_dropped` |
//! | [`XdpIo::receive`]: payloads, by the program's [`rx_hint`]; else lengths and checksums | the lane | broken: counted (`malformed`, `bad_checksum`), the frame is free again |
//! | the application | borrows the payload through the batch | - |
//! | [`send::XdpSender`] | reply in the frame of the request, or in a free one | no free frame, no known next hop, too long: through the companion |
//! | the TX and completion rings | the kernel, then free | TX ring full: kicked, then through the companion |
//!
//! A lane takes from one source at a time: one of its queues, or its companion; no batch mixes
//! them. It stays with a queue that brings full batches for a few of them, and then goes on to the
//! next one that has something. The companion has its turn when the queues are empty (in `serve`,
//! but for the look behind a full batch), and after some batches of theirs.

mod bpf_error;
mod checks;
mod control;
mod device;
mod filter;
mod filter_maps;
pub(crate) mod leasing;
mod mailbox;
mod round_robin;
mod route;
pub(crate) mod send;

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use manylane_bpf::abi;
use manylane_sys::busy_poll;
use manylane_sys::measure::Epoll;
use manylane_sys::xsk::{PacketRef, Payloads, Queue};
use manylane_wire::datagram::{Checksum, Datagram};
use manylane_wire::ethernet::Mac;
use manylane_wire::rx_hint::{self, PartialChecksum, RxHint};

pub(crate) use control::XdpControl;
pub use control::XdpQueue;
pub use filter::{FilterDrops, FilterHandle};

use self::device::Device;
use self::mailbox::{Content, Mailbox, QueueCommand, QueueId};
use self::round_robin::RoundRobin;
use self::route::Reader;
use self::send::XdpSender;
use super::RecvSummary;
use crate::capture::tap::Tap;
use crate::counters::{Cells, Count, LaneId};
use crate::drop_policy::DropPolicy;
use crate::error::{Error, Result};

// What the program writes is what is read.
const _: () = assert!(
    rx_hint::HINT == abi::RX_HINT
        && rx_hint::HEADERS_LEN_V4 == abi::RX_HINT_V4 as usize
        && rx_hint::HEADERS_LEN_V6 == abi::RX_HINT_V6 as usize
        && rx_hint::HEADERS_LEN_MASK == abi::RX_HINT_HEADERS_MASK
        && rx_hint::PARTIAL == abi::RX_HINT_PARTIAL
        && rx_hint::HINT_LEN == abi::RX_HINT_LEN
        && rx_hint::UDP_LEN_MAX == abi::RX_HINT_UDP_MAX
);

/// A socket's place on a device.
pub(crate) type SocketIndex = u32;

/// Batches from queues after which the companion is asked, should the queues never be empty: a
/// system call, through code and data of the kernel that are in no cache by then.
const KERNEL_POLL_BATCHES: u32 = 32;

/// Batches of nothing but broken frames that one receive passes over.
const INVALID_BUDGET: u32 = 256;

/// Batches that a lane which closes throws away at most.
const DISCARD_BUDGET: u32 = 1 << 14;

/// What the library knows of one packet of a batch from a queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Meta {
    /// Its place in the batch.
    pub(crate) index: u32,
    /// What its headers say.
    pub(crate) datagram: Datagram,
}

/// One queue that a lane serves.
pub(crate) struct LaneQueue {
    id: QueueId,
    xsk: Queue,
    device: Arc<Device>,
    /// Its number on the device.
    number: u32,
    /// Frames in its receive ring behind the batch that was taken last.
    waiting: u32,
    /// To be closed when it is empty: its device is gone.
    is_closing: bool,
}

impl LaneQueue {
    fn new(id: QueueId, xsk: Queue, device: Arc<Device>, number: u32) -> Self {
        Self { id, xsk, device, number, waiting: 0, is_closing: false }
    }
}

/// The queues of one lane.
pub(crate) struct XdpIo {
    control: Arc<XdpControl>,
    lane: LaneId,
    mailbox: Arc<Mailbox>,
    queues: Vec<LaneQueue>,
    /// Whether one of them is to be closed.
    is_closing: bool,
    round_robin: RoundRobin,
    /// What the headers say of those packets of a batch that have no note, each in its place. One
    /// for all queues.
    parsed: Box<[Datagram]>,
    /// Frames in the receive rings behind what was taken last, and how many they can hold.
    backlog: (u32, u32),
    /// The queue that the last batch came from; none if it came from the companion.
    current: Option<usize>,
    /// Batches since the companion had its turn.
    batches_since_kernel: u32,
    reader: Reader,
    tap: Tap,
    bound_addr: SocketAddr,
    /// Whether datagrams carry ECN.
    ecn: bool,
    epoll: Epoll,
}

/// What a batch from a queue consists of.
#[derive(Clone, Copy)]
pub(crate) struct Frames<'a> {
    pub(crate) payloads: Payloads<'a>,
    /// See [`XdpIo::parsed`].
    parsed: &'a [Datagram],
    /// Whether datagrams carry ECN.
    pub(crate) ecn: bool,
}

impl<'a> Frames<'a> {
    /// The first packet from the one at `index` on that can be believed: of others no payload was
    /// found.
    #[inline]
    pub(crate) fn next_valid(&self, index: usize) -> Option<PacketRef<'a>> {
        self.payloads.next_with_header(index)
    }

    /// What is known of a packet that can be believed. The headers of one with a note are read
    /// here, of which nothing is left where nobody looks at what they say.
    #[inline]
    pub(crate) fn meta(&self, packet: &PacketRef<'a>) -> Meta {
        let noted = match packet.header() {
            Some(head) => Datagram::from_hint_v4(&head),
            None => packet.header().and_then(|head| Datagram::from_hint_v6(&head)),
        };
        let datagram = noted.or_else(|| self.parsed.get(packet.index).copied()).unwrap_or_default();
        Meta { index: packet.index as u32, datagram }
    }
}

/// What the companion is watched as; queues have the numbers of their [`QueueId`].
const KERNEL_SOCKET: u64 = 0;

/// Sockets that a wait tells of at most: one would do.
const EVENTS_MAX: usize = 8;

impl XdpIo {
    fn new(
        plane: Arc<XdpControl>,
        lane: LaneId,
        reader: Reader,
        tap: Tap,
        bound: SocketAddr,
        ecn: bool,
    ) -> Result<Self> {
        let failed = |err| Error::system("a descriptor for the readiness of a lane", err);
        let watch = Epoll::new(EVENTS_MAX).map_err(failed)?;
        if let Some(time) = plane.busy_poll {
            watch.busy_poll(time, busy_poll::BUDGET).map_err(|err| Error::system("EPIOCSPARAMS", err))?;
        }
        let mailbox = Arc::new(Mailbox::new(watch.handle().map_err(failed)?));
        let read = vec![Datagram::default(); plane.batch].into();
        Ok(Self {
            control: plane,
            lane,
            mailbox,
            queues: Vec::new(),
            is_closing: false,
            round_robin: RoundRobin::default(),
            parsed: read,
            backlog: (0, 0),
            current: None,
            batches_since_kernel: 0,
            reader,
            tap,
            bound_addr: bound,
            ecn,
            epoll: watch,
        })
    }

    fn mailbox(&self) -> Arc<Mailbox> {
        Arc::clone(&self.mailbox)
    }

    /// Takes the queues that it was given, and gives up those that it shall.
    #[cold]
    pub(crate) fn process_mailbox(&mut self) {
        self.current = None;
        let Content { queues, commands: orders } = self.mailbox.drain();
        self.queues.extend(queues);
        for (id, order) in orders {
            let Some(at) = self.queues.iter().position(|queue| queue.id == id) else { continue };
            match order {
                QueueCommand::Close => {
                    self.queues[at].is_closing = true;
                    self.is_closing = true;
                }
                QueueCommand::HandOff => {
                    let queue = self.queues.remove(at);
                    // It is watched here since it was delivered; a descriptor for its statistics
                    // keeps it open.
                    _ = self.epoll.remove(&queue.xsk);
                    if let Some(kept) = self.control.hand_off(queue) {
                        _ = self.epoll.add(&kept.xsk, kept.id.0);
                        self.queues.push(kept);
                    }
                }
            }
        }
        self.recount();
    }

    /// Closes the queue at `at` if its device is gone and it is empty.
    #[cold]
    fn close_queue(&mut self, at: usize) {
        let queue = self.queues.remove(at);
        _ = self.epoll.remove(&queue.xsk);
        let id = queue.id;
        // First, so that nothing of ours is on the device when it is told.
        drop(queue);
        self.control.queue_closed(id);
        self.recount();
    }

    /// Lets readiness of the companion wake the lane, too.
    pub(crate) fn add_kernel_socket(&mut self, companion: BorrowedFd<'_>) -> Result<()> {
        let failed = |err| Error::system("a descriptor for the readiness of a lane", err);
        self.epoll.add(&companion, KERNEL_SOCKET).map_err(failed)
    }

    /// Whether the companion has waited long enough and comes first.
    #[inline]
    fn is_kernel_due(&self) -> bool {
        self.batches_since_kernel >= KERNEL_POLL_BATCHES
    }

    /// Whether the companion comes first. It then has its turn.
    #[inline]
    pub(crate) fn take_kernel_turn(&mut self) -> bool {
        let is_due = self.is_kernel_due();
        if is_due {
            self.ack_kernel_turn();
            self.current = None;
        }
        is_due
    }

    /// Takes a batch from the queue whose turn it is and that has something; `datagram_size` is
    /// where payloads are cut off. With [`DropPolicy::Head`] it is the last batch of a queue that
    /// was more than half full.
    pub(crate) fn receive(
        &mut self,
        most: usize,
        datagram_size: usize,
        drop_policy: DropPolicy,
        cells: &Cells,
    ) -> RecvSummary {
        self.current = None;
        if self.mailbox.has_mail() {
            self.process_mailbox();
        }
        self.tap.refresh();
        for _ in 0..self.queues.len() {
            let at = self.round_robin.advance(self.queues.len());
            let Some(queue) = self.queues.get_mut(at) else { continue };
            // Most queues have nothing most of the time. One that ends is looked at whatever it
            // says.
            if queue.xsk.is_idle() && !self.is_closing {
                continue;
            }
            // Behind a batch of which nothing can be believed there may be something: none is no
            // answer yet.
            for _ in 0..INVALID_BUDGET {
                let mut receive = |queue: &mut LaneQueue| {
                    queue.receive(most, datagram_size, &mut self.parsed, &mut self.tap, cells)
                };
                let (mut frames, mut taken) = receive(queue);
                if frames == 0 {
                    self.backlog.0 = self.backlog.0.wrapping_add(queue.backlog_delta());
                    break;
                }
                if drop_policy == DropPolicy::Head && frames == most && queue.is_half_full() {
                    // No more than the ring can hold: more may come all the time.
                    for _ in 0..queue.xsk.backlog().1 as usize / most {
                        if frames < most || !queue.xsk.has_received() {
                            break;
                        }
                        cells.add(Count::DroppedStale, taken.datagrams as u64);
                        (frames, taken) = receive(queue);
                    }
                }
                self.backlog.0 = self.backlog.0.wrapping_add(queue.backlog_delta());
                if taken.messages > 0 {
                    self.batches_since_kernel += 1;
                    self.current = Some(at);
                    self.round_robin.record_batch(at, frames == most);
                    return taken;
                }
            }
            if queue.is_closing {
                self.close_queue(at);
                break;
            }
        }
        RecvSummary::default()
    }

    /// Whether a queue that had no turn in this round has something. If not, the round is over.
    #[inline]
    pub(crate) fn is_within_round(&mut self) -> bool {
        let queues = &self.queues;
        let is_within = self
            .round_robin
            .remaining(queues.len())
            .any(|at| queues.get(at).is_some_and(|queue| queue.xsk.has_received()));
        if !is_within {
            self.round_robin.end_round();
        }
        is_within
    }

    /// Writes down how full the receive rings are behind what was just taken, for who looks from
    /// outside.
    #[inline]
    pub(crate) fn publish_backlog(&self, cells: &Cells) {
        cells.set(Count::RingFrames, self.backlog.0.into());
        cells.set(Count::RingEntries, self.backlog.1.into());
    }

    /// The queues are others than before.
    fn recount(&mut self) {
        self.round_robin.restart();
        self.is_closing = self.queues.iter().any(|queue| queue.is_closing);
        self.backlog = (0, 0);
        for queue in &mut self.queues {
            self.backlog.0 += queue.waiting;
            self.backlog.1 += queue.xsk.backlog().1;
        }
    }

    /// The companion has its turn.
    #[inline]
    pub(crate) fn ack_kernel_turn(&mut self) {
        self.batches_since_kernel = 0;
    }

    /// Whether the batch that was taken last came from a queue, and the companion's turn has not
    /// come.
    #[inline]
    pub(crate) fn has_batch(&self) -> bool {
        self.current.is_some() && !self.is_kernel_due()
    }

    /// Gives its queues to the other lanes, as far as there are any.
    pub(crate) fn release_queues(&mut self) {
        self.control.retire(self.lane);
        self.process_mailbox();
    }

    /// The batch that was taken last is over: what is sent next is no reply.
    pub(crate) fn end_batch(&mut self) {
        self.current = None;
        if self.mailbox.has_mail() {
            self.process_mailbox();
        }
        self.tap.refresh();
    }

    /// Takes what is left, of a lane that closes, and returns how many datagrams it was.
    pub(crate) fn discard(&mut self, cells: &Cells) -> u64 {
        let mut left = 0;
        // Nothing more is led here, so that this ends with the rings.
        for _ in 0..DISCARD_BUDGET {
            let taken = self.receive(usize::MAX, usize::MAX, DropPolicy::Tail, cells);
            if taken.messages == 0 && !self.has_received() {
                break;
            }
            left += taken.datagrams as u64;
        }
        left
    }

    /// Whether a [`receive`](Self::receive) could bring something: a look that costs a few loads,
    /// for who looks often. Where queues work in the lane's calls, only such a call tells.
    #[inline]
    pub(crate) fn can_receive(&self) -> bool {
        self.control.busy_poll.is_some() || self.has_received() || self.mailbox.has_mail()
    }

    /// Whether a queue has something that [`receive`](Self::receive) would bring.
    fn has_received(&self) -> bool {
        self.queues.iter().any(|queue| queue.xsk.has_received())
    }

    /// Sleeps until a queue or the companion has something, or for `timeout`.
    pub(crate) fn wait(&mut self, timeout: Duration) -> Result<()> {
        for queue in &mut self.queues {
            // What a full device did not take must not lie there while the lane sleeps. That it
            // still does not is no error: the next batch tries again.
            _ = queue.xsk.flush_pending();
        }
        if !self.has_received() {
            _ = self.epoll.wait(timeout).map_err(|err| Error::system("waiting for a lane", err))?;
        }
        Ok(())
    }

    /// The batch that was received last, if it came from a queue, and the way out: through that
    /// queue, else through the first one.
    pub(crate) fn split(&mut self) -> (Option<Frames<'_>>, Option<XdpSender<'_>>) {
        // Once a batch, wherever it came from: what is sent goes by the routes of now.
        self.reader.refresh();
        let Some(queue) = self.queues.get_mut(self.current.unwrap_or(0)) else { return (None, None) };
        let (device, finishes) = (queue.device.index, queue.device.has_tx_checksum);
        self.tap.set_tx_queue(device, queue.number);
        let (payloads, sender) = queue.xsk.split();
        let frames = self.current.map(|_| Frames { payloads, parsed: &self.parsed, ecn: self.ecn });
        (
            frames,
            Some(XdpSender::new(
                sender,
                &mut self.reader,
                &mut self.tap,
                (device, finishes),
                self.bound_addr,
            )),
        )
    }
}

impl AsFd for XdpIo {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl LaneQueue {
    /// Takes a batch: frames, and what they bring.
    #[inline]
    fn receive(
        &mut self,
        most: usize,
        datagram_size: usize,
        read: &mut [Datagram],
        tap: &mut Tap,
        cells: &Cells,
    ) -> (usize, RecvSummary) {
        // One place for each.
        let frames = self.xsk.receive(most.min(read.len()));
        if frames == 0 {
            return (0, RecvSummary::default());
        }
        if tap.is_active() {
            self.restore();
        }
        tap.record_rx(self.device.index, self.number, (0..frames).map(|index| self.xsk.packet(index)));
        (frames, self.validate(&mut read[..frames], datagram_size, cells))
    }

    /// Makes the frames of the batch what they were on the wire: who captures them knows nothing of
    /// notes.
    #[cold]
    fn restore(&mut self) {
        let mac = Mac(self.device.mac());
        self.xsk.edit_packets(|frame| rx_hint::restore(frame, mac));
    }

    /// By how many more frames wait in the receive ring than when it was asked last.
    #[inline]
    fn backlog_delta(&mut self) -> u32 {
        let waiting = self.xsk.cached_backlog();
        waiting.wrapping_sub(std::mem::replace(&mut self.waiting, waiting))
    }

    /// Whether more waits in the receive ring than half of what it can hold.
    #[cold]
    fn is_half_full(&self) -> bool {
        let (waiting, entries) = self.xsk.backlog();
        waiting > entries / 2
    }

    /// Finds the payloads of the packets that were received, and counts what cannot be believed.
    /// The headers of those that have no note are read, each into its place in `places`.
    fn validate(&mut self, places: &mut [Datagram], datagram_size: usize, cells: &Cells) -> RecvSummary {
        let (mut bytes, mut truncated) = (0, 0);
        let (mut bad_checksum, mut malformed) = (0, 0);
        let unfinished =
            if self.device.is_veth { PartialChecksum::Accepted } else { PartialChecksum::Rejected };
        let packets = places.len();
        self.xsk.find_payloads(|index, packet| {
            let RxHint { payload_offset: at, len } = match rx_hint::parse(packet, unfinished) {
                Some(noted) => noted,
                None => match parse_packet(places.get_mut(index)?, packet, unfinished) {
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

/// Why a packet is not to be believed.
enum PacketError {
    Malformed,
    Checksum,
}

/// Reads all headers of a packet. Apart from the loop over packets with a note, which needs its
/// registers for itself.
#[inline(never)]
fn parse_packet(
    place: &mut Datagram,
    packet: &[u8],
    unfinished: PartialChecksum,
) -> std::result::Result<RxHint, PacketError> {
    place.read(packet).map_err(|_| PacketError::Malformed)?;
    match place.checksum {
        Checksum::Invalid => Err(PacketError::Checksum),
        Checksum::Partial if unfinished == PartialChecksum::Rejected => Err(PacketError::Checksum),
        _ => Ok(RxHint { payload_offset: place.payload_offset, len: place.len }),
    }
}
