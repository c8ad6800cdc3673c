//! The operations of each engine, and the totals of a receive.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use manylane_sys::tick;

use super::Capabilities;
use crate::error::Result;

/// Totals of one receive.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RecvSummary {
    pub(crate) messages: usize,
    pub(crate) datagrams: usize,
    pub(crate) bytes: usize,
    pub(crate) truncated: usize,
    pub(crate) gro_messages: usize,
}

/// Operations of a lane's engine. The defaults are for engines without special needs.
pub(super) trait LaneIo {
    /// The features that the lane was granted; the same for its life.
    fn capabilities(&self) -> Capabilities;

    /// Receives a batch of queued datagrams; it may be empty.
    fn recv(&mut self) -> Result<RecvSummary>;

    /// Receives what may have arrived behind a full batch.
    fn recv_more(&mut self) -> Result<RecvSummary> {
        self.recv()
    }

    /// Poll `number` since the lane began to spin: as [`recv`](Self::recv), but most polls skip
    /// checks that need a system call.
    fn poll(&mut self, _number: u32) -> Result<RecvSummary> {
        self.recv()
    }

    /// Blocks until a datagram arrives or `timeout` expires, and receives. May return up to a
    /// quarter early.
    fn sleep(&mut self, timeout: Duration) -> Result<RecvSummary>;

    /// As [`sleep`](Self::sleep), for a short time with microsecond precision.
    fn sleep_precise(&mut self, time: Duration) -> Result<RecvSummary> {
        self.sleep(time)
    }

    /// Sleeps until the clock is next at a multiple of `period`, whatever arrives.
    fn delay(&mut self, period: Duration) {
        tick::sleep(period);
    }

    /// The time, by the clock of the engine.
    fn now(&self) -> Instant {
        Instant::now()
    }

    /// True if a queue that was not served since the last delay has frames. Each queue is served
    /// once per round, because a lane that served them as long as any has frames might never
    /// delay.
    fn is_within_round(&mut self) -> bool {
        false
    }

    /// Ends the last batch: what is sent next is no reply.
    fn end_batch(&mut self) {}

    /// A descriptor that is readable while [`recv`](Self::recv) has work; the same one for the
    /// lane's life.
    fn readiness(&self) -> BorrowedFd<'_>;

    /// Datagrams that the receive buffers can take during a delay.
    fn recv_capacity(&self) -> usize;

    /// Upper bound of the messages in the kernel socket's queue.
    fn queued_max(&self) -> usize;

    /// The lane is out of steering: hands the queues of devices over to other lanes, if any.
    fn leave(&mut self) {}

    /// Discards and counts what is still queued, before the lane closes.
    fn discard(&mut self);

    /// Closes the remaining queues of devices.
    fn close(&mut self) {}
}
