//! The receive queue of a lane's kernel socket, independent of the call that receives from it.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use manylane_bpf::abi;
use manylane_sys::map::SharedWords;
use manylane_sys::sock;

use super::RecvSummary;
use super::gro_switch::GroSwitch;
use super::messages::Messages;
use crate::counters::Count;
use crate::drop_policy::DropPolicy;
use crate::error::Error;
use crate::lane_shared::LaneShared;

/// Maximum and minimum memory of a small datagram in the queue, in bytes (skb truesize).
const SKB_TRUESIZE_MAX: usize = 4096;
pub(super) const SKB_TRUESIZE_MIN: usize = 512;

/// Receives messages from a socket's queue.
pub(super) trait RecvMessages {
    /// Receives a batch; waits for the first message for at most `wait`, if given.
    fn recv_batch(&mut self, lane: &LaneShared, wait: Option<Duration>) -> io::Result<RecvSummary>;

    /// The buffers of the last batch.
    fn messages(&self) -> Messages<'_>;

    /// Messages that have left the queue and were not returned yet.
    fn held(&self) -> usize;

    /// Memory of the queue in use, and its limit, in bytes. Each [`held`](Self::held) message
    /// counts as the smallest possible one.
    fn backlog(&self, lane: &LaneShared) -> (usize, usize) {
        let state = sock::queue_state(lane.fd.as_fd()).unwrap_or_default();
        (state.queued_bytes as usize + self.held() * SKB_TRUESIZE_MIN, state.limit_bytes as usize)
    }
}

/// The receive queue of a kernel socket.
pub(super) struct SocketQueue {
    pub(super) lane: Arc<LaneShared>,
    /// Messages in a full batch.
    batch: usize,
    drop_policy: DropPolicy,
    load: Option<LoadWords>,
    gro: GroSwitch,
}

/// Words in which a lane publishes its load to eBPF (steering `least-loaded` only).
pub(super) struct LoadWords {
    words: Arc<SharedWords>,
    /// Index of the lane's first word.
    base: usize,
}

impl LoadWords {
    pub(super) fn new(words: Arc<SharedWords>, lane: &LaneShared) -> Self {
        Self { words, base: lane.slot as usize * abi::LOAD_WORDS }
    }

    fn steered(&self) -> u64 {
        self.words.load(self.base + abi::LOAD_STEERED)
    }

    /// Adds `messages` messages; `steered` is the number steered to the lane before the receive.
    fn record(&self, messages: usize, steered: u64) {
        let at = self.base + abi::LOAD_RECEIVED;
        // The queue is empty: all that was steered here was received or dropped, so the sums are
        // equal.
        let total = if messages == 0 { steered } else { self.words.load(at) + messages as u64 };
        self.words.store(at, total);
    }
}

impl SocketQueue {
    pub(super) fn new(
        lane: Arc<LaneShared>,
        batch: usize,
        drop_policy: DropPolicy,
        load: Option<LoadWords>,
        gro: GroSwitch,
    ) -> Self {
        Self { lane, batch, drop_policy, load, gro }
    }

    /// Receives a batch through `from`.
    #[inline]
    pub(super) fn recv(
        &mut self,
        from: &mut impl RecvMessages,
        wait: Option<Duration>,
    ) -> io::Result<RecvSummary> {
        let summary = self.recv_recorded(from, wait)?;
        self.gro.observe(from.messages(), summary.messages, self.lane.fd.as_fd());
        if self.drop_policy == DropPolicy::Head && summary.messages == self.batch {
            return self.drop_stale(from, summary);
        }
        Ok(summary)
    }

    /// Receives a batch, and records it in the load words.
    #[inline]
    fn recv_recorded(&self, from: &mut impl RecvMessages, wait: Option<Duration>) -> io::Result<RecvSummary> {
        let Some(load) = &self.load else { return from.recv_batch(&self.lane, wait) };
        let steered = load.steered();
        let summary = from.recv_batch(&self.lane, wait)?;
        load.record(summary.messages, steered);
        Ok(summary)
    }

    /// If the queue is more than half full, drops the batch `summary` and all following ones but
    /// the last.
    #[cold]
    fn drop_stale(&self, from: &mut impl RecvMessages, mut summary: RecvSummary) -> io::Result<RecvSummary> {
        let (queued, limit) = from.backlog(&self.lane);
        if queued <= limit / 2 {
            return Ok(summary);
        }
        // Bounded, because datagrams may keep arriving.
        let mut datagrams_max = limit / SKB_TRUESIZE_MIN;
        while summary.messages == self.batch
            && datagrams_max >= summary.messages
            && from.backlog(&self.lane).0 > 0
        {
            self.lane.cells.add(Count::DroppedStale, summary.datagrams as u64);
            datagrams_max -= summary.messages;
            summary = self.recv_recorded(from, None)?;
        }
        Ok(summary)
    }

    /// Counts a failed receive.
    #[cold]
    pub(super) fn recv_error(&self, err: io::Error) -> Error {
        self.lane.cells.add(Count::RecvErrors, 1);
        Error::system("receiving", err)
    }

    /// Messages that the queue has room for, at a page each: the size of small frames of a device.
    pub(super) fn capacity(&self) -> usize {
        let state = sock::queue_state(self.lane.fd.as_fd());
        state.map_or(usize::MAX, |state| state.limit_bytes as usize / SKB_TRUESIZE_MAX)
    }

    /// Upper bound of the messages in the queue.
    pub(super) fn queued_max(&self) -> usize {
        let queued = sock::queue_state(self.lane.fd.as_fd()).map_or(0, |state| state.queued_bytes as usize);
        queued / SKB_TRUESIZE_MIN
    }
}
