//! Engine `sim`, for tests: a simulated network with seeded loss and reordering, and a clock that
//! only waits and polls advance. It sleeps nowhere and needs no socket.
//!
//! | stage | who owns the bytes | when it is full or missing |
//! |---|---|---|
//! | [`Network::send`] | in flight | lost by chance: counted in `lost` |
//! | the queue of the lane | the network | full: counted in `dropped`, which lanes report as `xsk_dropped` |
//! | [`SimIo::recv`] | the lane's buffers | takes at most a batch; the rest stays in the queue |
//! | the outbox | the lane's send ring | no room, or an error that a test has queued: as `sendmmsg` fails |
//! | [`Network::transmit`] | [`Network::sent`] | - |

mod network;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use manylane_sys::addr::SockAddr;
use manylane_sys::control::Ancillary;
use manylane_sys::mmsg::{Message, SendOptions, SendRing, Totals};

pub(crate) use self::network::{Faults, Network, Packet, Sent};
use super::batch::{Batch, Origin};
use super::messages::Messages;
use super::{Capabilities, Io, NewLane, Parts, RecvSummary, Replies, SocketEngine, Transport};
use crate::counters::{Count, LaneId};
use crate::error::{Error, Result};
use crate::lane_shared::LaneShared;

/// Simulated time of one poll.
pub(crate) const POLL_TIME: Duration = Duration::from_nanos(100);
/// The engine of a socket; also the test's access to the network.
#[derive(Debug)]
pub(crate) struct Sim {
    network: Mutex<Network>,
    /// Zero of the clock.
    start: Instant,
}

impl Sim {
    /// A network without faults, in which all that is random follows from `seed`.
    pub(crate) fn new(seed: u64) -> Arc<Self> {
        let network = Network::new(seed);
        Arc::new(Self { network: Mutex::new(network), start: Instant::now() })
    }

    pub(crate) fn network(&self) -> MutexGuard<'_, Network> {
        // A test has one thread, so a lock that is held would never be released.
        self.network.try_lock().unwrap()
    }

    pub(crate) fn now(&self) -> Instant {
        self.start + self.network().now
    }
}

impl SocketEngine for Sim {
    fn new_lane(self: Arc<Self>, new: NewLane<'_>) -> Result<Io> {
        let NewLane { can, lane, .. } = new;
        let options = SendOptions { batch: can.batch, gso: can.gso };
        let send = SendRing::new(options).map_err(|err| Error::system("buffers of a lane", err))?;
        let ancillary = vec![Ancillary::default(); can.batch].into();
        let (buffers, lane) = (SimBuffers::default(), Arc::clone(lane));
        Ok(Io::Sim(SimIo { sim: self, lane, can, buffers, ancillary, send }))
    }

    fn dropped(&self, _lane: LaneId) -> u64 {
        self.network().dropped
    }
}

/// The packets of a batch.
#[derive(Debug, Default)]
pub(crate) struct SimBuffers(Vec<Buffer>);

#[derive(Debug)]
struct Buffer {
    bytes: Vec<u8>,
    full_len: usize,
    peer: SockAddr,
    control: Vec<u8>,
}

impl SimBuffers {
    pub(super) fn message(&self, index: usize) -> Message<'_> {
        let Buffer { bytes, full_len, peer, control } = &self.0[index];
        Message::new(bytes, *full_len, peer, control)
    }

    pub(super) fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        for Buffer { bytes, full_len, control, .. } in &self.0 {
            totals.bytes += bytes.len();
            totals.truncated += usize::from(*full_len > bytes.len());
            totals.with_control += usize::from(!control.is_empty());
        }
        totals
    }
}

/// One lane of engine `sim`.
pub(crate) struct SimIo {
    sim: Arc<Sim>,
    lane: Arc<LaneShared>,
    can: Capabilities,
    buffers: SimBuffers,
    ancillary: Box<[Ancillary]>,
    send: SendRing,
}

impl SimIo {
    pub(super) fn recv(&mut self) -> Result<RecvSummary> {
        let mut network = self.sim.network();
        if let Some(code) = network.recv_error.take() {
            self.lane.cells.add(Count::RecvErrors, 1);
            return Err(Error::system("receiving", io::Error::from_raw_os_error(code)));
        }
        let taken = self.can.batch.min(network.queue.len());
        let buffer = |packet: Packet| {
            let (control, mut bytes) = (packet.control(), packet.payload);
            let full_len = bytes.len();
            bytes.truncate(self.can.datagram_size);
            Buffer { bytes, full_len, peer: packet.peer.into(), control }
        };
        self.buffers.0 = network.queue.drain(..taken).map(buffer).collect();
        Ok(Messages::Sim(&self.buffers).parse_ancillary(taken, &mut self.ancillary))
    }

    pub(super) fn poll(&mut self) -> Result<RecvSummary> {
        self.sim.network().advance(POLL_TIME);
        self.recv()
    }

    pub(super) fn sleep(&mut self, timeout: Duration) -> Result<RecvSummary> {
        self.lane.cells.add(Count::Sleeps, 1);
        self.sim.network().wait_readable(timeout);
        self.recv()
    }

    pub(super) fn delay(&mut self, period: Duration) {
        let mut network = self.sim.network();
        let into = network.now.as_nanos() % period.as_nanos().max(1);
        network.advance(period - Duration::from_nanos(into as u64));
    }

    pub(super) fn now(&self) -> Instant {
        self.sim.now()
    }

    pub(super) fn split<'a>(&'a mut self, taken: RecvSummary, bound: &'a SocketAddr) -> Parts<'a> {
        let origin = Origin::Messages(Messages::Sim(&self.buffers), &self.ancillary);
        let transport = Transport::Sim(&self.sim);
        let replies = Replies { queue: self.send.batch(), transport, bypass: None };
        Parts { batch: Batch::new(origin, bound, taken), replies }
    }

    pub(super) fn readiness(&self) -> BorrowedFd<'_> {
        self.lane.fd.as_fd()
    }

    pub(super) fn recv_capacity(&self) -> usize {
        self.sim.network().queue_max
    }

    pub(super) fn queued_max(&self) -> usize {
        self.sim.network().queue.len()
    }

    pub(super) fn leave(&mut self) {
        self.sim.network().leave();
    }

    pub(super) fn discard(&mut self) {
        let left = self.sim.network().queue.drain(..).map(|packet| packet.datagrams()).sum();
        self.lane.cells.add(Count::Discarded, left);
    }
}
