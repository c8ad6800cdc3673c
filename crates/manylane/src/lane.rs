//! A lane: one receive queue and one send path of a socket, owned by exactly one thread.
//!
//! It does not know which engine it has: [`Io`]. The [`waiter`] decides how it waits.

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
use crate::port_owner;

pub(crate) use self::waiter::Pauses;

/// One receive queue and one send path of a [`Socket`](crate::Socket), for one thread at a time.
///
/// A lane can move to another thread but not be shared. As a descriptor ([`AsFd`]) it can wait in
/// an epoll of the application; level-triggered readiness means that [`recv`](Self::recv) brings
/// something. Take it out of that epoll before the lane is dropped: the kernel's socket may live on
/// for the next lane, and with it the entry. The descriptor is the kernel's socket with engine
/// `mmsg`; with `uring` and `xdp` it tells readiness and is nothing else. Once asked for it stays
/// the same one for the lane's life, also when io_uring fails and the lane goes on without.
pub struct Lane {
    shared: Arc<Shared>,
    lane_shared: Arc<LaneShared>,
    io: Io,
    caps: Capabilities,
    waiter: Waiter,
    /// Sockets that the last lane waits for when all else of it is closed: the last field.
    orphaned: OrphanedSockets,
}

/// Sockets, by their inodes, that rings may have for a moment yet although they are closed. When
/// this is dropped they have been let go of, or some seconds have passed: then whoever drops the
/// last lane finds the port free.
#[derive(Debug, Default)]
struct OrphanedSockets(Vec<u64>);

impl Drop for OrphanedSockets {
    fn drop(&mut self) {
        if !self.0.is_empty() && !port_owner::wait_unbound(&self.0) {
            log::warn!("the kernel still has the sockets of io_uring rings that another thread had used");
        }
    }
}

/// What a receive brought, and the way to answer.
pub struct Received<'a> {
    /// The datagrams; may be none.
    pub batch: Batch<'a>,
    /// Where replies go. Dropping it sends them.
    pub out: Outbox<'a>,
}

impl Lane {
    pub(crate) fn new(shared: Arc<Shared>, lane_shared: Arc<LaneShared>, io: Io, caps: Capabilities) -> Self {
        let waiter = Waiter::new(shared.config.wait);
        Self { shared, lane_shared, io, caps, waiter, orphaned: OrphanedSockets::default() }
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

    /// What the engine can do on this lane.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        self.caps
    }

    /// Pins the calling thread to the CPU that placement gave to the lane, if any.
    ///
    /// # Errors
    /// When the CPU went offline or out of the process's cpuset.
    pub fn pin(&self) -> Result<()> {
        let Some(cpu) = self.lane_shared.cpu else { return Ok(()) };
        cpu::pin(cpu).map_err(|err| Error::system(format!("pinning to CPU {cpu} (placement)"), err))
    }

    /// Takes what is there, without waiting; the batch may be empty.
    ///
    /// # Errors
    /// What the system reports for the socket as a whole. No error of a single datagram or peer
    /// shows here.
    #[inline]
    pub fn recv(&mut self) -> Result<Received<'_>> {
        let taken = self.recv_batch()?;
        Ok(self.received(taken))
    }

    /// Waits until something is there, for at most `timeout`; the batch is empty if nothing came,
    /// and may be after a signal, or once the lane leaves.
    ///
    /// # Errors
    /// As for [`recv`](Self::recv).
    #[inline]
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Received<'_>> {
        let taken = self.recv_batch_timeout(timeout)?;
        Ok(self.received(taken))
    }

    /// Sends of the lane's own accord, without a request.
    pub fn sender(&mut self) -> Outbox<'_> {
        self.io.end_batch();
        self.received(RecvSummary::default()).out
    }

    /// Takes the lane out of steering: when this returns, nothing more arrives in its queue, and
    /// when [`recv`](Self::recv) then brings nothing, dropping the lane loses nothing.
    ///
    /// Takes some milliseconds (an RCU grace period). With steering by the kernel's own choice the
    /// lane cannot be taken out, and what arrives between the last receive and the drop is lost.
    ///
    /// # Errors
    /// [`ErrorKind::LastLane`](crate::ErrorKind::LastLane) for the only one left.
    pub fn retire(&mut self) -> Result<()> {
        self.shared.retire(&self.lane_shared)?;
        self.io.release_queues();
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

    /// When it pauses, with batches as they are.
    pub(crate) fn pauses(&self) -> Pauses {
        Pauses::new(self.shared.rx_coalesce(), &self.io, self.caps.batch)
    }

    /// Messages that a lane which leaves drains before it stops receiving: all that are queued, and
    /// a batch that may come meanwhile.
    pub(crate) fn queued(&self) -> usize {
        self.io.queued_max() + self.caps.batch
    }

    /// Lets nothing more into the queue if the whole socket ends, or if the lane has `drained` all
    /// that was queued and is still steered to.
    pub(crate) fn maybe_shut_down(&self, drained: bool) {
        if self.shared.is_stopping() || (drained && !self.shared.can_retire()) {
            self.shared.shut_down(&self.lane_shared);
        }
    }

    /// Takes a batch of what is there.
    #[inline]
    pub(crate) fn recv_batch(&mut self) -> Result<RecvSummary> {
        let taken = self.io.recv()?;
        self.count(taken);
        Ok(taken)
    }

    /// Takes a batch as soon as there is something, by the policy of the lane; none after
    /// `timeout`.
    pub(crate) fn recv_batch_timeout(&mut self, timeout: Duration) -> Result<RecvSummary> {
        let taken = self.waiter.recv(&mut self.io, &self.lane_shared, timeout)?;
        self.count(taken);
        Ok(taken)
    }

    /// Takes the next batch of a lane that serves: at once if `pauses` have to know whether there
    /// is one, else as soon as there is something; none after `timeout`.
    #[inline]
    pub(crate) fn recv_serving(&mut self, pauses: &Pauses, timeout: Duration) -> Result<RecvSummary> {
        if !pauses.is_pending() {
            return self.recv_batch_timeout(timeout);
        }
        let taken = self.io.recv_more()?;
        self.count(taken);
        Ok(taken)
    }

    /// Pauses after a batch of so many messages, if that pays.
    #[inline]
    pub(crate) fn pause_after(&mut self, pauses: &mut Pauses, messages: usize) {
        pauses.after(messages, self.io.is_within_round());
    }

    #[inline]
    fn count(&self, taken: RecvSummary) {
        let cells = &self.lane_shared.cells;
        if taken.messages == 0 {
            return;
        }
        cells.add(Count::Batches, 1);
        cells.add(Count::Messages, taken.messages as u64);
        cells.add(Count::Delivered, taken.datagrams as u64);
        cells.add(Count::DeliveredBytes, taken.bytes as u64);
        if taken.truncated > 0 {
            cells.add(Count::Truncated, taken.truncated as u64);
        }
        if taken.gro_messages > 0 {
            cells.add(Count::GroMessages, taken.gro_messages as u64);
        }
    }

    /// What was taken last, in the form for the application.
    #[inline]
    pub(crate) fn received(&mut self, taken: RecvSummary) -> Received<'_> {
        let Parts { batch, socket, xdp } = self.io.split(taken, &self.shared.addr);
        let (lane, v6) = (&self.lane_shared, self.shared.addr.is_ipv6());
        Received { batch, out: Outbox::new(socket, lane.fd.as_fd(), &lane.cells, v6, xdp) }
    }
}

impl AsFd for Lane {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.io.readiness()
    }
}

impl Drop for Lane {
    /// Leaves steering if it has not yet, counts what is thrown away, and closes.
    fn drop(&mut self) {
        let reusable = self.shared.detach(&self.lane_shared);
        self.io.release_queues();
        self.io.discard();
        // The XSKs close before the counters are read for good.
        self.shared.remove_queues(self.lane_shared.id);
        self.io.close_queues();
        self.orphaned.0 = self.shared.finish_close(&self.lane_shared, reusable, self.io.has_left_ring());
    }
}
