//! A lane: one receive queue and one send path of a socket, owned by exactly one thread.
//!
//! [`Io`] hides which engine it has. The [`waiter`] decides how it waits.

#[cfg(test)]
pub(crate) mod tests;
mod waiter;

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use manylane_sys::cpu;

use self::waiter::Waiter;
use crate::counters::{Count, LaneId};
use crate::error::{Error, Result};
use crate::group::Shared;
use crate::io::batch::Batch;
use crate::io::{Capabilities, Io, Parts, RecvSummary};
use crate::lane_shared::LaneShared;
use crate::outbox::Outbox;

/// One receive queue and one send path of a [`Socket`](crate::Socket), for one thread at a time.
///
/// A lane can move to another thread, but cannot be shared. Its descriptor ([`AsFd`]) can be added
/// to an epoll of the application: while it is readable (level-triggered), [`recv`](Self::recv)
/// has work. Remove it from that epoll before the lane is dropped, because the kernel's socket,
/// and with it the entry, may stay open for the next lane. The descriptor may be the kernel's
/// socket, or one that only reports readiness: use it for nothing else. It is the same for the
/// lane's life.
pub struct Lane {
    shared: Arc<Shared>,
    lane_shared: Arc<LaneShared>,
    waiter: Waiter,
    /// Its drop may wait until the port is free, after all else is closed: has to be the last
    /// field.
    io: Io,
}

/// A received batch, and the outbox for replies.
pub struct Received<'a> {
    /// The datagrams; may be empty.
    pub batch: Batch<'a>,
    /// Takes the replies. Dropping it sends them.
    pub out: Outbox<'a>,
}

impl Lane {
    pub(crate) fn new(shared: Arc<Shared>, lane_shared: Arc<LaneShared>, io: Io) -> Self {
        let waiter = Waiter::new(shared.config.wait, &io);
        Self { shared, lane_shared, waiter, io }
    }

    /// The lane's id, unique within the socket.
    #[must_use]
    pub fn id(&self) -> LaneId {
        self.lane_shared.id
    }

    /// The CPU that placement gave to the lane; none without pinning.
    #[must_use]
    pub fn cpu(&self) -> Option<usize> {
        self.lane_shared.cpu
    }

    /// The address that the socket is bound to.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.shared.addr
    }

    /// The features that the engine was granted on this lane; the same for the lane's life.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        self.io.capabilities()
    }

    /// Pins the calling thread to the CPU that placement gave to the lane, if any.
    ///
    /// # Errors
    /// If the CPU is offline, or was removed from the process's cpuset.
    pub fn pin(&self) -> Result<()> {
        let Some(cpu) = self.lane_shared.cpu else { return Ok(()) };
        cpu::pin(cpu).map_err(|err| Error::system(format!("pinning to CPU {cpu} (placement)"), err))
    }

    /// Receives the queued datagrams, up to a batch, without waiting. The batch may be empty.
    ///
    /// # Errors
    /// Errors of the socket as a whole. Errors of a single datagram or peer are never returned
    /// here.
    #[inline]
    pub fn recv(&mut self) -> Result<Received<'_>> {
        let summary = self.recv_batch()?;
        Ok(self.received(summary))
    }

    /// Blocks until a datagram arrives or `timeout` expires. The batch is empty after a timeout.
    /// It may also be empty after a signal, or when the lane is being removed.
    ///
    /// # Errors
    /// As for [`recv`](Self::recv).
    #[inline]
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Received<'_>> {
        let summary = self.recv_batch_timeout(timeout)?;
        Ok(self.received(summary))
    }

    /// An outbox for datagrams that answer no request.
    pub fn sender(&mut self) -> Outbox<'_> {
        self.io.end_batch();
        self.received(RecvSummary::default()).out
    }

    /// Takes the lane out of steering. When this returns, no more datagrams arrive in its queue.
    /// Once [`recv`](Self::recv) then returns an empty batch, the lane can be dropped without
    /// loss.
    ///
    /// Takes some milliseconds (an RCU grace period). With steering by the kernel's own choice the
    /// lane cannot be taken out: datagrams that arrive between the last receive and the drop are
    /// lost.
    ///
    /// # Errors
    /// [`ErrorKind::LastLane`](crate::ErrorKind::LastLane) for the only open lane.
    pub fn retire(&mut self) -> Result<()> {
        self.shared.retire(&self.lane_shared)?;
        self.io.leave();
        Ok(())
    }

    pub(crate) fn lane_shared(&self) -> &LaneShared {
        &self.lane_shared
    }

    pub(crate) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.shared)
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.lane_shared.is_draining()
    }

    /// Delays receives from now on where that pays: for [`recv_serving`](Self::recv_serving).
    pub(crate) fn start_coalescing(&mut self) {
        self.waiter.start_coalescing(self.shared.rx_coalesce());
    }

    /// Messages that a lane which is being removed drains before it shuts down receiving: those
    /// queued, and one more batch that may arrive meanwhile.
    pub(crate) fn queued(&self) -> usize {
        self.io.queued_max() + self.io.capabilities().batch
    }

    /// Shuts down receiving if the whole socket ends, or if the lane has `drained` all that was
    /// queued and is still steered to.
    pub(crate) fn maybe_shut_down(&self, drained: bool) {
        if self.shared.is_stopping() || (drained && !self.shared.can_retire()) {
            self.shared.shut_down(&self.lane_shared);
        }
    }

    /// Receives a batch of queued datagrams.
    #[inline]
    pub(crate) fn recv_batch(&mut self) -> Result<RecvSummary> {
        let summary = self.io.recv()?;
        self.count(summary);
        Ok(summary)
    }

    /// Waits for a batch by the lane's policy; an empty one after `timeout`.
    pub(crate) fn recv_batch_timeout(&mut self, timeout: Duration) -> Result<RecvSummary> {
        let summary = self.waiter.recv(&mut self.io, &self.lane_shared, timeout)?;
        self.count(summary);
        Ok(summary)
    }

    /// Receives the next batch of a lane in `serve`; waits for at most `timeout`.
    #[inline]
    pub(crate) fn recv_serving(&mut self, timeout: Duration) -> Result<RecvSummary> {
        if !self.waiter.is_delay_pending() {
            return self.recv_batch_timeout(timeout);
        }
        let summary = self.io.recv_more()?;
        self.count(summary);
        Ok(summary)
    }

    /// Delays after a batch of `messages` messages, if that pays.
    #[inline]
    pub(crate) fn delay_after(&mut self, messages: usize) {
        self.waiter.delay_after(&mut self.io, messages);
    }

    #[inline]
    fn count(&self, summary: RecvSummary) {
        let cells = &self.lane_shared.cells;
        if summary.messages == 0 {
            return;
        }
        cells.add(Count::Batches, 1);
        cells.add(Count::Messages, summary.messages as u64);
        cells.add(Count::Delivered, summary.datagrams as u64);
        cells.add(Count::DeliveredBytes, summary.bytes as u64);
        if summary.truncated > 0 {
            cells.add(Count::Truncated, summary.truncated as u64);
        }
        if summary.gro_messages > 0 {
            cells.add(Count::GroMessages, summary.gro_messages as u64);
        }
    }

    /// The last batch, in the form for the application.
    #[inline]
    pub(crate) fn received(&mut self, summary: RecvSummary) -> Received<'_> {
        let Parts { batch, replies, bypass } = self.io.split(summary, &self.shared.addr);
        let out = Outbox::new(replies, bypass, &self.lane_shared.cells, self.shared.addr.is_ipv6());
        Received { batch, out }
    }
}

impl AsFd for Lane {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.io.readiness()
    }
}

impl Drop for Lane {
    /// Leaves steering if it has not yet, counts the discarded datagrams, and closes.
    fn drop(&mut self) {
        let reusable = self.shared.detach(&self.lane_shared);
        self.io.leave();
        self.io.discard();
        // Queues close before the final read of the counters.
        self.shared.engine.lane_drained(self.lane_shared.id);
        self.io.close();
        self.shared.finish_close(&self.lane_shared, reusable);
    }
}
