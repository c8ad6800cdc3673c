//! The queues of one lane: their order, queues that are added and removed, and when the companion
//! is polled.
//!
//! # What a batch touches
//!
//! Another CPU writes the frames. After a sleep, most of the lane's own data has left the cache,
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
//!   that reads only payloads does not read them. Headers of frames without a hint are parsed out
//!   of line, into an array of the lane.
//! - **The frames of a batch** are prefetched as their descriptors are read, before the first
//!   frame is read.
//! - **The companion** is polled after some frames while queues have them
//!   ([`KERNEL_POLL_FRAMES`]): a poll that finds nothing is a system call, through code and data
//!   of the kernel that are in no cache by then.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use manylane_sys::busy_poll;
use manylane_sys::epoll::Epoll;
use manylane_sys::padded::PaddedSlice;
use manylane_wire::datagram::Datagram;

use super::control::XdpControl;
use super::lane_queue::LaneQueue;
use super::mailbox::{Content, Mailbox, QueueCommand};
use super::round_robin::RoundRobin;
use super::route::Reader;
use super::send::XdpSender;
use super::unsent::UnsentTimer;
use crate::capture::tap::Tap;
use crate::counters::{Cells, Count, LaneId};
use crate::drop_policy::DropPolicy;
use crate::error::{Error, Result};
use crate::io::RecvSummary;
use crate::io::frames::Frames;

/// Frames from queues between two polls of the companion, if the queues are never empty. The head
/// of this file says why.
const KERNEL_POLL_FRAMES: usize = 2048;

/// Frames that a batch counts as that is not full: it has emptied its queue, so time has passed.
const BATCH_FRAMES: usize = 64;

/// Maximum number of batches without a valid frame that one receive skips.
const INVALID_BUDGET: u32 = 256;

/// Maximum number of batches that a closing lane discards.
const DISCARD_BUDGET: u32 = 1 << 14;

/// The queues of one lane.
pub(super) struct LaneQueues {
    control: Arc<XdpControl>,
    lane: LaneId,
    mailbox: Arc<Mailbox>,
    queues: Vec<LaneQueue>,
    /// One of them is to be closed.
    is_closing: bool,
    round_robin: RoundRobin,
    /// Parsed headers of the packets without an rx hint, at the index of each. Shared by all
    /// queues.
    parsed: PaddedSlice<Datagram>,
    /// Frames in the receive rings after the last batch, and their entries.
    backlog: (u32, u32),
    /// The queue of the last batch; none if it came from the companion.
    current: Option<usize>,
    /// Frames since the companion was polled.
    frames_since_kernel: usize,
    reader: Reader,
    tap: Tap,
    unsent: UnsentTimer,
    epoll: Epoll,
}

/// Epoll tokens of the companion and of the timer; those of queues are their ids.
const KERNEL_SOCKET: u64 = 0;
const UNSENT_TIMER: u64 = u64::MAX;

/// Maximum number of times that a lane which closes waits for a full device: 0.1 s, and what sleeps
/// take longer than they should.
const CLOSE_FLUSHES_MAX: u32 = 1000;

/// Maximum number of events per wait; one would be enough.
const EVENTS_MAX: usize = 8;

impl LaneQueues {
    /// A lane without queues. The readiness of `others` (a companion) wakes it, too.
    pub(super) fn new(control: Arc<XdpControl>, lane: LaneId, others: &[BorrowedFd<'_>]) -> Result<Self> {
        let failed = |err| Error::system("creating an epoll instance for a lane", err);
        let epoll = Epoll::new(EVENTS_MAX).map_err(failed)?;
        if let Some(time) = control.busy_poll {
            epoll
                .busy_poll(time, busy_poll::BUDGET_PACKETS)
                .map_err(|err| Error::system("EPIOCSPARAMS", err))?;
        }
        others.iter().try_for_each(|other| epoll.add(other, KERNEL_SOCKET)).map_err(failed)?;
        let unsent = UnsentTimer::new().map_err(|err| Error::system("creating a timer for a lane", err))?;
        epoll.add(&unsent, UNSENT_TIMER).map_err(failed)?;
        let mailbox = Arc::new(Mailbox::new(epoll.handle().map_err(failed)?));
        control.add_lane(lane, Arc::clone(&mailbox));
        Ok(Self {
            lane,
            mailbox,
            queues: Vec::new(),
            is_closing: false,
            round_robin: RoundRobin::default(),
            parsed: PaddedSlice::new(Datagram::default(), control.batch),
            backlog: (0, 0),
            current: None,
            frames_since_kernel: 0,
            reader: control.route_reader(),
            tap: control.tap(lane),
            unsent,
            epoll,
            control,
        })
    }

    /// Adds the queues in the mailbox, and executes its commands.
    #[cold]
    pub(super) fn process_mailbox(&mut self) {
        self.current = None;
        let Content { queues, commands } = self.mailbox.drain();
        self.queues.extend(queues);
        for (id, command) in commands {
            let Some(at) = self.queues.iter().position(|queue| queue.id == id) else { continue };
            match command {
                QueueCommand::Close => {
                    self.queues[at].is_closing = true;
                    self.is_closing = true;
                }
                QueueCommand::HandOff => {
                    let queue = self.queues.remove(at);
                    // Remove it from this epoll explicitly: a descriptor for its statistics keeps
                    // it open.
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
        // Dropped first, so that nothing of ours is on the device when control is notified.
        drop(queue);
        self.control.queue_closed(id);
        self.recount();
    }

    /// True if the companion is due.
    #[inline]
    fn is_kernel_due(&self) -> bool {
        self.frames_since_kernel >= KERNEL_POLL_FRAMES
    }

    /// Returns true if the companion is due, and then no longer.
    #[inline]
    pub(super) fn take_kernel_due(&mut self) -> bool {
        let is_due = self.is_kernel_due();
        if is_due {
            self.reset_kernel_due();
            self.current = None;
        }
        is_due
    }

    /// Receives a batch from the next queue that has frames. Payloads are truncated at
    /// `datagram_size`. With [`DropPolicy::Head`], it is the last batch of a queue that was more
    /// than half full.
    pub(super) fn receive(
        &mut self,
        frames_max: usize,
        datagram_size: usize,
        drop_policy: DropPolicy,
        cells: &Cells,
    ) -> RecvSummary {
        self.end_batch();
        for _ in 0..self.queues.len() {
            let at = self.round_robin.advance(self.queues.len());
            let Some(queue) = self.queues.get_mut(at) else { continue };
            // Most queues are empty most of the time. A closing queue is checked in any case.
            if queue.xsk.is_idle() && !self.is_closing {
                continue;
            }
            // Valid frames may follow a batch without any, so an empty result is not final.
            for _ in 0..INVALID_BUDGET {
                let mut receive = |queue: &mut LaneQueue| {
                    queue.receive(frames_max, datagram_size, &mut self.parsed, &mut self.tap, cells)
                };
                let (mut frames, mut summary) = receive(queue);
                if frames == 0 {
                    self.backlog.0 = self.backlog.0.wrapping_add(queue.backlog_delta());
                    break;
                }
                if drop_policy == DropPolicy::Head && frames == frames_max && queue.is_half_full() {
                    // Bounded by the size of the ring, because frames may keep arriving.
                    for _ in 0..queue.xsk.backlog().1 as usize / frames_max {
                        if frames < frames_max || !queue.xsk.has_received() {
                            break;
                        }
                        cells.add(Count::DroppedStale, summary.datagrams as u64);
                        (frames, summary) = receive(queue);
                    }
                }
                self.backlog.0 = self.backlog.0.wrapping_add(queue.backlog_delta());
                if summary.messages > 0 {
                    let is_full = frames == frames_max;
                    self.frames_since_kernel += if is_full { frames } else { BATCH_FRAMES };
                    self.current = Some(at);
                    self.round_robin.record_batch(at, is_full);
                    return summary;
                }
            }
            if queue.is_closing {
                self.close_queue(at);
                break;
            }
        }
        RecvSummary::default()
    }

    /// Receives a batch of frames from the next queue that has some, without reading them; returns
    /// their number.
    pub(super) fn receive_frames(&mut self, frames_max: usize) -> usize {
        self.end_batch();
        for _ in 0..self.queues.len() {
            let at = self.round_robin.advance(self.queues.len());
            let Some(queue) = self.queues.get_mut(at) else { continue };
            if queue.xsk.is_idle() && !self.is_closing {
                continue;
            }
            let frames = queue.receive_frames(frames_max, &mut self.tap);
            if frames > 0 {
                self.current = Some(at);
                self.round_robin.record_batch(at, frames == frames_max);
                return frames;
            }
            if queue.is_closing {
                self.close_queue(at);
                break;
            }
        }
        0
    }

    /// True if a queue that was not served in this round has frames. If none has, the round ends.
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

    /// Publishes the fill level of the receive rings after the last batch, for metrics.
    #[inline]
    pub(super) fn publish_backlog(&self, cells: &Cells) {
        cells.set(Count::RingFrames, self.backlog.0.into());
        cells.set(Count::RingEntries, self.backlog.1.into());
    }

    /// The set of queues has changed.
    fn recount(&mut self) {
        self.round_robin.restart();
        self.is_closing = self.queues.iter().any(|queue| queue.is_closing);
        self.backlog = (0, 0);
        for queue in &mut self.queues {
            self.backlog.0 += queue.waiting;
            self.backlog.1 += queue.xsk.backlog().1;
        }
    }

    /// The companion is being polled.
    #[inline]
    pub(super) fn reset_kernel_due(&mut self) {
        self.frames_since_kernel = 0;
    }

    /// True if the last batch came from a queue, and the companion is not due.
    #[inline]
    pub(super) fn has_batch(&self) -> bool {
        self.current.is_some() && !self.is_kernel_due()
    }

    /// Hands its queues over to other lanes, if there are any.
    pub(super) fn release(&mut self) {
        self.control.state().retire(self.lane);
        self.process_mailbox();
    }

    /// Closes the queues, once the device has taken all frames, or after a fraction of a second.
    pub(super) fn close(&mut self) {
        self.current = None;
        for _ in 0..CLOSE_FLUSHES_MAX {
            if !self.unsent.is_running() {
                break;
            }
            thread::sleep(UnsentTimer::INTERVAL);
            self.flush_unsent();
        }
        self.queues.clear();
    }

    /// True if there are frames that a full device did not take.
    pub(super) fn has_unsent(&self) -> bool {
        self.unsent.is_running()
    }

    /// Sends frames that a full device did not take, if there are any: while nothing is received,
    /// no batch does it.
    #[inline]
    pub(super) fn flush_unsent(&mut self) {
        if self.unsent.is_running() {
            self.flush_queues();
        }
    }

    fn flush_queues(&mut self) {
        // An error means that the device is gone, and what is in its ring is lost.
        let left = self.queues.iter_mut().map(|queue| queue.xsk.flush_pending().unwrap_or(0)).sum();
        if left > 0 || self.unsent.is_running() {
            self.unsent.restart(left);
        }
    }

    /// Ends the last batch: what is sent next is no reply.
    #[inline]
    pub(super) fn end_batch(&mut self) {
        self.current = None;
        if self.mailbox.has_mail() {
            self.process_mailbox();
        }
        self.tap.refresh();
    }

    /// Discards the remaining frames of a closing lane; returns the number of datagrams.
    pub(super) fn discard(&mut self, cells: &Cells) -> u64 {
        let mut left = 0;
        // No more frames are redirected here, so this ends with the rings' content.
        for _ in 0..DISCARD_BUDGET {
            let summary = self.receive(usize::MAX, usize::MAX, DropPolicy::Tail, cells);
            if summary.messages == 0 && !self.has_received() {
                break;
            }
            left += summary.datagrams as u64;
        }
        left
    }

    /// True if a [`receive`](Self::receive) could return a batch. Costs a few loads. With busy
    /// polling always true, because the kernel then polls the device only in the lane's calls.
    #[inline]
    pub(super) fn can_receive(&self) -> bool {
        self.control.busy_poll.is_some() || self.has_received() || self.mailbox.has_mail()
    }

    /// Frames that the rings of one queue hold.
    pub(super) fn ring_capacity(&self) -> usize {
        self.control.options.ring as usize
    }

    /// True if a queue has frames for [`receive`](Self::receive).
    fn has_received(&self) -> bool {
        self.queues.iter().any(|queue| queue.xsk.has_received())
    }

    /// Sleeps until a queue or the companion has datagrams, for at most `timeout`.
    pub(super) fn wait(&mut self, timeout: Duration) -> Result<()> {
        // With zero copy, the driver may ask for a wakeup only now.
        self.flush_queues();
        if !self.has_received() {
            _ = self.epoll.wait(timeout).map_err(|err| Error::system("waiting for a lane", err))?;
        }
        Ok(())
    }

    /// The last batch, if it came from a queue, and the send path: that queue, else the first one.
    #[inline]
    pub(super) fn split(&mut self) -> (Option<Frames<'_>>, Option<XdpSender<'_>>) {
        // Once a batch, whatever its source, so that sends use current routes.
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
                &mut self.unsent,
                (device, finishes),
                &self.control.bound_addr,
            )),
        )
    }
}

/// What a lane needs to send frames of its own: its queues, the one of the last batch, and what
/// belongs to all.
pub(super) struct SendParts<'a> {
    pub(super) queues: &'a mut [LaneQueue],
    pub(super) current: Option<usize>,
    pub(super) reader: &'a mut Reader,
    pub(super) unsent: &'a mut UnsentTimer,
}

impl LaneQueues {
    /// The queues, for what handles their frames by itself.
    #[inline]
    pub(super) fn send_parts(&mut self) -> SendParts<'_> {
        // Once a batch, so that sends use current routes.
        self.reader.refresh();
        SendParts {
            queues: &mut self.queues,
            current: self.current,
            reader: &mut self.reader,
            unsent: &mut self.unsent,
        }
    }
}

impl AsFd for LaneQueues {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
