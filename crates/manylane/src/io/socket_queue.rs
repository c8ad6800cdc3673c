//! The receive queue of a lane's kernel socket, whichever call takes messages out of it.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use manylane_bpf::abi;
use manylane_sys::map::SharedWords;
use manylane_sys::sock;

use super::RecvSummary;
use crate::counters::Count;
use crate::drop_policy::DropPolicy;
use crate::error::Error;
use crate::lane_shared::LaneShared;

/// Bytes of memory that a small datagram takes in the queue, at most and at least.
const SKB_TRUESIZE_MAX: usize = 4096;
const SKB_TRUESIZE_MIN: usize = 512;

/// A way to take messages out of a socket's queue.
pub(super) trait TakeMessages {
    /// Takes a batch; waits for the first message for so long, if at all.
    fn take(&mut self, lane: &LaneShared, wait: Option<Duration>) -> io::Result<RecvSummary>;

    /// Messages that have left the queue and were not handed out.
    fn held(&self) -> usize;
}

/// The queue.
pub(super) struct SocketQueue {
    pub(super) lane: Arc<LaneShared>,
    /// Messages of a full batch.
    batch: usize,
    drop_policy: DropPolicy,
    load: Option<LoadWords>,
}

/// Where eBPF reads how much a lane has taken (steering `least-loaded` only).
pub(super) struct LoadWords {
    words: Arc<SharedWords>,
    /// The lane's first word.
    base: usize,
}

impl LoadWords {
    pub(super) fn new(words: Arc<SharedWords>, lane: &LaneShared) -> Self {
        Self { words, base: lane.slot as usize * abi::LOAD_WORDS }
    }

    fn steered(&self) -> u64 {
        self.words.load(self.base + abi::LOAD_STEERED)
    }

    /// Counts `taken` messages, where `steered` had been steered to the lane before.
    fn record(&self, taken: usize, steered: u64) {
        let at = self.base + abi::LOAD_TAKEN;
        // An empty queue means that all that was steered here was taken or dropped: the sums meet
        // again.
        let total = if taken == 0 { steered } else { self.words.load(at) + taken as u64 };
        self.words.store(at, total);
    }
}

impl SocketQueue {
    pub(super) fn new(
        lane: Arc<LaneShared>,
        batch: usize,
        drop_policy: DropPolicy,
        load: Option<LoadWords>,
    ) -> Self {
        Self { lane, batch, drop_policy, load }
    }

    /// Takes a batch by `from`.
    #[inline]
    pub(super) fn recv(
        &self,
        from: &mut impl TakeMessages,
        wait: Option<Duration>,
    ) -> io::Result<RecvSummary> {
        let taken = self.take(from, wait)?;
        if self.drop_policy == DropPolicy::Head && taken.messages == self.batch {
            return self.drop_stale(from, taken);
        }
        Ok(taken)
    }

    #[inline]
    fn take(&self, from: &mut impl TakeMessages, wait: Option<Duration>) -> io::Result<RecvSummary> {
        let Some(load) = &self.load else { return from.take(&self.lane, wait) };
        let steered = load.steered();
        let taken = from.take(&self.lane, wait)?;
        load.record(taken.messages, steered);
        Ok(taken)
    }

    /// Gives up the batch that was `taken`, and what is behind it, if the queue is more than half
    /// full: up to the last batch that is there.
    #[cold]
    fn drop_stale(&self, from: &mut impl TakeMessages, mut taken: RecvSummary) -> io::Result<RecvSummary> {
        let (queued, limit) = self.backlog(from);
        if queued <= limit / 2 {
            return Ok(taken);
        }
        // More may come all the time.
        let mut most = limit / SKB_TRUESIZE_MIN;
        while taken.messages == self.batch && most >= taken.messages && self.backlog(from).0 > 0 {
            self.lane.cells.add(Count::DroppedStale, taken.datagrams as u64);
            most -= taken.messages;
            taken = self.take(from, None)?;
        }
        Ok(taken)
    }

    /// Bytes of memory that wait in the queue, and how many there can be; what is `held` counts as
    /// little as it can have been.
    fn backlog(&self, from: &impl TakeMessages) -> (usize, usize) {
        let state = sock::queue_state(self.lane.fd.as_fd()).unwrap_or_default();
        (state.queued_bytes as usize + from.held() * SKB_TRUESIZE_MIN, state.limit_bytes as usize)
    }

    /// Counts a receive that has failed.
    #[cold]
    pub(super) fn recv_error(&self, err: io::Error) -> Error {
        self.lane.cells.add(Count::RecvErrors, 1);
        Error::system("receiving", err)
    }

    /// Messages that the queue has room for, counted with a page each: what small frames of a
    /// device take.
    pub(super) fn capacity(&self) -> usize {
        let state = sock::queue_state(self.lane.fd.as_fd());
        state.map_or(usize::MAX, |state| state.limit_bytes as usize / SKB_TRUESIZE_MAX)
    }

    /// Messages that may be in the queue now, at most.
    pub(super) fn queued_max(&self) -> usize {
        let queued = sock::queue_state(self.lane.fd.as_fd()).map_or(0, |state| state.queued_bytes as usize);
        queued / SKB_TRUESIZE_MIN
    }
}
