//! Engine `mmsg`: a kernel socket, with `recvmmsg` and `sendmmsg` on headers that are built once.
//!
//! | stage | owner of the buffer | when it is full or missing |
//! |---|---|---|
//! | the kernel queues | the socket's receive queue (`SO_RCVBUF`) | the kernel drops and counts: `kernel_dropped` |
//! | [`MmsgIo::recv`] | the lane's receive ring | takes at most a batch; the rest stays in the queue |
//! | the application | borrows the ring through the batch | - |
//! | the outbox | the lane's send ring, or borrows of the batch | full: it is flushed |
//! | the kernel sends | the socket's send buffer (`SO_SNDBUF`) | waits for room, at most 100 ms at a time and 1 s in all, then counts `lost_sndbuf_full` |

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use manylane_sys::busy_poll;
use manylane_sys::control::Ancillary;
use manylane_sys::mmsg::{RecvOptions, RecvRing, SendOptions, SendRing, Wait};
use manylane_sys::padded::PaddedSlice;
use manylane_sys::sock;

use super::batch::{Batch, Origin};
use super::gro_switch::GroSwitch;
use super::kernel_socket::needs_ancillary;
use super::lane_io::LaneIo;
use super::messages::Messages;
use super::socket_queue::{LoadWords, RecvMessages, SocketQueue};
use super::{Capabilities, EngineShared, NewLane, RecvSummary, Replies, Transport};
use crate::config::{Config, Gro};
use crate::counters::Count;
use crate::error::{Error, Result};
use crate::lane_shared::LaneShared;

/// Engine `mmsg` of a socket.
pub(super) struct MmsgEngine;

impl EngineShared for MmsgEngine {
    fn set_options(&self, config: &Config, socket: BorrowedFd<'_>) -> Result<()> {
        let Some(time) = config.wait.busy_poll_time() else { return Ok(()) };
        let micros = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
        busy_poll::set(socket, micros, busy_poll::BUDGET_PACKETS)
            .map_err(|err| Error::system("SO_BUSY_POLL", err))
    }
}

/// Maximum number of receives with which a closing lane discards its queue.
const DISCARD_BUDGET: usize = 1 << 14;

/// One lane of engine `mmsg`. An `uring` or `xdp` lane contains one for its kernel socket.
pub(crate) struct MmsgIo {
    pub(super) queue: SocketQueue,
    recv: MmsgRecv,
    send: SendRing,
    caps: Capabilities,
}

/// Headers and buffers for `recvmmsg`.
struct MmsgRecv {
    ring: RecvRing,
    /// Ancillary data of each message of the last batch; stale for messages without control
    /// messages.
    ancillary: PaddedSlice<Ancillary>,
    /// The current receive timeout of the socket.
    timeout: Option<Duration>,
}

impl MmsgRecv {
    /// Limits the wait of a receive to `timeout`, or to no less than three quarters of it: if
    /// `SO_RCVTIMEO` is within this range, it is kept, which saves the system call.
    fn set_timeout(&mut self, socket: BorrowedFd<'_>, timeout: Duration) -> io::Result<()> {
        if self.timeout.is_some_and(|set| set <= timeout && set >= timeout - timeout / 4) {
            return Ok(());
        }
        // Less than 1 µs would be rounded to zero, which means without a timeout.
        sock::set_recv_timeout(socket, timeout.max(Duration::from_micros(1)))?;
        self.timeout = Some(timeout);
        Ok(())
    }
}

impl RecvMessages for MmsgRecv {
    #[inline]
    fn recv_batch(&mut self, lane: &LaneShared, wait: Option<Duration>) -> io::Result<RecvSummary> {
        let wait = match wait {
            Some(timeout) => {
                self.set_timeout(lane.fd.as_fd(), timeout)?;
                Wait::First
            }
            None => Wait::Never,
        };
        let messages = self.ring.recv(lane.fd.as_fd(), wait)?;
        Ok(Messages::Mmsg(&self.ring).parse_ancillary(messages, &mut self.ancillary))
    }

    #[inline]
    fn messages(&self) -> Messages<'_> {
        Messages::Mmsg(&self.ring)
    }

    fn held(&self) -> usize {
        0
    }
}

impl MmsgIo {
    pub(super) fn new(new: NewLane<'_>) -> Result<Self> {
        let NewLane { config, addr, caps, lane, load } = new;
        let load = load.map(|words| LoadWords::new(words, lane));
        let gro = GroSwitch::new(caps.gro && config.gro == Gro::ByTraffic);
        let queue = SocketQueue::new(Arc::clone(lane), caps.batch, config.drop_policy, load, gro);
        let control = needs_ancillary(config, caps, addr);
        // One byte more than the largest datagram, so that only a larger one counts as truncated.
        let options = RecvOptions { batch: caps.batch, buffer: caps.datagram_size, control };
        let memory = |err| Error::system("allocating buffers of a lane", err);
        let ring = RecvRing::new(options).map_err(memory)?;
        let ancillary = PaddedSlice::new(Ancillary::default(), if control { caps.batch } else { 0 });
        let send = SendRing::new(SendOptions { batch: caps.batch, gso: caps.gso }).map_err(memory)?;
        Ok(Self { queue, recv: MmsgRecv { ring, ancillary, timeout: None }, send, caps })
    }

    /// See [`Io::split`](super::Io::split).
    #[inline]
    pub(super) fn split<'a>(
        &'a mut self,
        summary: RecvSummary,
        bound: &'a SocketAddr,
    ) -> (Batch<'a>, Replies<'a>) {
        let origin = Origin::Messages(Messages::Mmsg(&self.recv.ring), &self.recv.ancillary);
        let transport = Transport::Socket(self.queue.lane.fd.as_fd());
        let replies = Replies { queue: self.send.batch(), transport };
        (Batch::new(origin, bound, summary), replies)
    }
}

impl LaneIo for MmsgIo {
    fn capabilities(&self) -> Capabilities {
        self.caps
    }

    #[inline]
    fn recv(&mut self) -> Result<RecvSummary> {
        self.queue.recv(&mut self.recv, None).map_err(|err| self.queue.recv_error(err))
    }

    fn sleep(&mut self, timeout: Duration) -> Result<RecvSummary> {
        self.queue.lane.cells.add(Count::Sleeps, 1);
        self.queue.recv(&mut self.recv, Some(timeout)).map_err(|err| self.queue.recv_error(err))
    }

    fn sleep_precise(&mut self, time: Duration) -> Result<RecvSummary> {
        self.queue.lane.cells.add(Count::Sleeps, 1);
        sock::wait_readable(self.readiness(), time);
        self.recv()
    }

    fn readiness(&self) -> BorrowedFd<'_> {
        self.queue.lane.fd.as_fd()
    }

    /// Datagrams that the socket's buffer can take during a delay.
    fn recv_capacity(&self) -> usize {
        self.queue.capacity()
    }

    fn queued_max(&self) -> usize {
        self.queue.queued_max()
    }

    fn discard(&mut self) {
        for _ in 0..DISCARD_BUDGET {
            match self.recv.recv_batch(&self.queue.lane, None) {
                Ok(summary) if summary.messages > 0 => {
                    self.queue.lane.cells.add(Count::Discarded, summary.datagrams as u64);
                }
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn loopback_a_receive_bounds_its_wait_and_saves_calls() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let lane = LaneShared::of_socket(&socket);
        let ring = RecvRing::new(RecvOptions { batch: 1, buffer: 64, control: false }).unwrap();
        let mut recv = MmsgRecv { ring, ancillary: PaddedSlice::default(), timeout: None };
        // Whole ticks of every kernel's clock.
        for (wait, set) in [(Some(400), 400), (None, 400), (Some(500), 400), (Some(300), 300)] {
            // The receive does not wait, because this datagram is queued.
            socket.send_to(b"x", socket.local_addr().unwrap()).unwrap();
            let summary = recv.recv_batch(&lane, wait.map(Duration::from_millis)).unwrap();
            assert_eq!(summary.messages, 1, "{wait:?}");
            assert_eq!(socket.read_timeout().unwrap(), Some(Duration::from_millis(set)), "{wait:?}");
        }
    }
}
