//! The queues of one lane: their order, queues that are added and removed, and when the companion
//! is polled.
//!
//! # What a batch touches
//!
//! Another core writes the frames. After a pause, most of the lane's own data has left the cache,
//! too. A cache miss costs more than the instructions that work on the line. So the receive path
//! is built to touch few lines:
//!
//! - **An empty queue** costs one line of its own and the producer counter of its RX ring. A queue
//!   is idle once a full pass has found its RX ring empty, its fill ring full and no completion
//!   pending. The next 64 receives then check only the RX ring (`Queue::is_idle`). The flush
//!   before a sleep does not read the TX ring of such a queue (`Queue::flush_pending`).
//! - **The consumer counter of the fill ring** is not read where a bound on it is known: the
//!   kernel takes a frame out of the fill ring before it reports a packet in it
//!   (`Producer::assume_pending_max`).
//! - **Headers** are not read if the program on the device has left a hint in the frame: the hint
//!   has the offset and the length of the payload (`rx_hint::parse`). The headers are read when
//!   the datagram is handed out, by value, because a reply may overwrite them
//!   (`PacketRef::header`). This code is inlined into the caller's loop, so that an application
//!   that looks at payloads only does not read them. Headers of frames without a hint are parsed
//!   out of line, into an array of the lane.
//! - **The frames of a batch** are prefetched as their descriptors are taken, before the first
//!   frame is read.
//! - **The companion** is polled every 32 batches while queues have frames
//!   ([`KERNEL_POLL_BATCHES`]): a poll that finds nothing is a system call, through code and data
//!   of the kernel that are in no cache by then.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use manylane_sys::busy_poll;
use manylane_sys::measure::Epoll;
use manylane_wire::datagram::Datagram;

use super::control::XdpControl;
use super::lane_queue::LaneQueue;
use super::mailbox::{Content, Mailbox, QueueCommand};
use super::round_robin::RoundRobin;
use super::route::Reader;
use super::send::XdpSender;
use crate::capture::tap::Tap;
use crate::counters::{Cells, Count, LaneId};
use crate::drop_policy::DropPolicy;
use crate::error::{Error, Result};
use crate::io::RecvSummary;
use crate::io::frames::Frames;

/// Batches from queues after which the companion is asked, should the queues never be empty: a
/// system call, through code and data of the kernel that are in no cache by then.
const KERNEL_POLL_BATCHES: u32 = 32;

/// Batches of nothing but broken frames that one receive passes over.
const INVALID_BUDGET: u32 = 256;

/// Batches that a lane which closes throws away at most.
const DISCARD_BUDGET: u32 = 1 << 14;

/// The queues of one lane.
pub(super) struct LaneQueues {
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
    epoll: Epoll,
}

/// What the companion is watched as; queues have those of their ids.
const KERNEL_SOCKET: u64 = 0;

/// Sockets that a wait tells of at most: one would do.
const EVENTS_MAX: usize = 8;

impl LaneQueues {
    /// A lane that has no queue yet, and that readiness of its `companion` wakes, too.
    pub(super) fn new(control: Arc<XdpControl>, lane: LaneId, companion: BorrowedFd<'_>) -> Result<Self> {
        let failed = |err| Error::system("a descriptor for the readiness of a lane", err);
        let epoll = Epoll::new(EVENTS_MAX).map_err(failed)?;
        if let Some(time) = control.busy_poll {
            epoll.busy_poll(time, busy_poll::BUDGET).map_err(|err| Error::system("EPIOCSPARAMS", err))?;
        }
        epoll.add(&companion, KERNEL_SOCKET).map_err(failed)?;
        let mailbox = Arc::new(Mailbox::new(epoll.handle().map_err(failed)?));
        control.add_lane(lane, Arc::clone(&mailbox));
        Ok(Self {
            lane,
            mailbox,
            queues: Vec::new(),
            is_closing: false,
            round_robin: RoundRobin::default(),
            parsed: vec![Datagram::default(); control.batch].into(),
            backlog: (0, 0),
            current: None,
            batches_since_kernel: 0,
            reader: control.route_reader(),
            tap: control.tap(lane),
            epoll,
            control,
        })
    }

    /// Takes the queues that it was given, and gives up those that it shall.
    #[cold]
    pub(super) fn process_mailbox(&mut self) {
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

    /// Whether the companion has waited long enough and comes first.
    #[inline]
    fn is_kernel_due(&self) -> bool {
        self.batches_since_kernel >= KERNEL_POLL_BATCHES
    }

    /// Whether the companion comes first. It then has its turn.
    #[inline]
    pub(super) fn take_kernel_turn(&mut self) -> bool {
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
    pub(super) fn receive(
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
    pub(super) fn is_within_round(&mut self) -> bool {
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
    pub(super) fn publish_backlog(&self, cells: &Cells) {
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
    pub(super) fn ack_kernel_turn(&mut self) {
        self.batches_since_kernel = 0;
    }

    /// Whether the batch that was taken last came from a queue, and the companion's turn has not
    /// come.
    #[inline]
    pub(super) fn has_batch(&self) -> bool {
        self.current.is_some() && !self.is_kernel_due()
    }

    /// Gives its queues to the other lanes, as far as there are any.
    pub(super) fn release(&mut self) {
        self.control.retire(self.lane);
        self.process_mailbox();
    }

    /// Closes the queues.
    pub(super) fn close(&mut self) {
        self.current = None;
        self.queues.clear();
    }

    /// The batch that was taken last is over: what is sent next is no reply.
    pub(super) fn end_batch(&mut self) {
        self.current = None;
        if self.mailbox.has_mail() {
            self.process_mailbox();
        }
        self.tap.refresh();
    }

    /// Takes what is left, of a lane that closes, and returns how many datagrams it was.
    pub(super) fn discard(&mut self, cells: &Cells) -> u64 {
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
    pub(super) fn can_receive(&self) -> bool {
        self.control.busy_poll.is_some() || self.has_received() || self.mailbox.has_mail()
    }

    /// Frames that the rings of one queue hold.
    pub(super) fn ring_capacity(&self) -> usize {
        self.control.ring_capacity()
    }

    /// Whether a queue has something that [`receive`](Self::receive) would bring.
    fn has_received(&self) -> bool {
        self.queues.iter().any(|queue| queue.xsk.has_received())
    }

    /// Sleeps until a queue or the companion has something, or for `timeout`.
    pub(super) fn wait(&mut self, timeout: Duration) -> Result<()> {
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
    pub(super) fn split(&mut self) -> (Option<Frames<'_>>, Option<XdpSender<'_>>) {
        // Once a batch, wherever it came from: what is sent goes by the routes of now.
        self.reader.refresh();
        let Some(queue) = self.queues.get_mut(self.current.unwrap_or(0)) else { return (None, None) };
        let (device, finishes) = (queue.device.index, queue.device.has_tx_checksum);
        self.tap.set_tx_queue(device, queue.number);
        let (payloads, sender) = queue.xsk.split();
        let frames = self.current.map(|_| Frames { payloads, parsed: &self.parsed, ecn: self.control.ecn });
        (
            frames,
            Some(XdpSender::new(
                sender,
                &mut self.reader,
                &mut self.tap,
                (device, finishes),
                self.control.bound_addr,
            )),
        )
    }
}

impl AsFd for LaneQueues {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
