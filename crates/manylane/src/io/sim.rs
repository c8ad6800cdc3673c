//! Engine `sim`, for tests: each lane has its own simulated network, with a clock that only waits
//! and polls advance. It never sleeps and needs no socket.
//!
//! | stage | owner of the bytes | when it is full or missing |
//! |---|---|---|
//! | [`Network::send`] | in flight | the lane refuses packets: counted in `lost` |
//! | the queue of the lane | the network | full: counted in `dropped`, which lanes report as `xsk_dropped` |
//! | [`SimIo::recv`] | the lane's buffers | takes at most a batch; the rest stays in the queue, or is dropped if it is stale (`drop_policy`) |
//! | the outbox | the lane's send ring | full: it is flushed |
//! | [`Network::transmit`] | [`Network::sent`] | - |
//!
//! The network is perfect; [`faults`](super::faults) are added around it. Everything that decides
//! what lanes and waits do is simulated. What only the kernel's rings and sockets do is left out: a
//! bypass, the readiness of the descriptor, the load words of steering, and sockets that close
//! late.

mod network;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use manylane_sys::addr::SockAddr;
use manylane_sys::control::Ancillary;
use manylane_sys::mmsg::{Message, SendOptions, SendRing, Totals};

pub(crate) use self::network::{Network, Packet, Sent};
use super::batch::{Batch, Origin};
use super::gro_switch::GroSwitch;
use super::lane_io::LaneIo;
use super::messages::Messages;
use super::socket_queue::{RecvMessages, SKB_TRUESIZE_MIN, SocketQueue};
use super::{Capabilities, EngineShared, Io, NewLane, RecvSummary, Replies, SocketEngine, Transport, lock};
use crate::counters::{Count, LaneId};
use crate::error::{Error, Result};
use crate::lane_shared::LaneShared;

/// Simulated time of one poll.
pub(crate) const POLL_TIME: Duration = Duration::from_nanos(100);

/// The engine of a socket, with the network of each lane, and a test's access to these.
pub(crate) struct Sim(Vec<Arc<Mutex<Network>>>);

impl Sim {
    pub(crate) fn new(lanes: usize) -> Arc<Self> {
        let start = Instant::now();
        Arc::new(Self((0..lanes).map(|_| Arc::new(Mutex::new(Network::new(start)))).collect()))
    }

    /// The network of a lane. The guard must be dropped before the lane is used.
    pub(crate) fn of_lane(&self, lane: usize) -> MutexGuard<'_, Network> {
        lock(&self.0[lane])
    }

    /// The network of the lane of a socket with one lane.
    pub(crate) fn network(&self) -> MutexGuard<'_, Network> {
        self.of_lane(0)
    }
}

impl SocketEngine for Sim {
    fn new_lane(self: Arc<Self>, new: NewLane<'_>) -> Result<Io> {
        let NewLane { config, caps, lane, .. } = new;
        let options = SendOptions { batch: caps.batch, gso: caps.gso };
        let send =
            SendRing::new(options).map_err(|err| Error::system("allocating buffers of a lane", err))?;
        let recv = SimRecv {
            network: Arc::clone(&self.0[lane.id.0 as usize]),
            batch: caps.batch,
            datagram_size: caps.datagram_size,
            buffers: SimBuffers::default(),
            ancillary: vec![Ancillary::default(); caps.batch].into(),
        };
        let queue =
            SocketQueue::new(Arc::clone(lane), caps.batch, config.drop_policy, None, GroSwitch::new(false));
        Ok(Io::Sim(SimIo { queue, recv, send, caps }))
    }
}

impl EngineShared for Sim {
    fn shut_down(&self, lane: LaneId) {
        self.of_lane(lane.0 as usize).leave();
    }

    fn dropped(&self, lane: LaneId) -> u64 {
        self.of_lane(lane.0 as usize).dropped
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
    queue: SocketQueue,
    recv: SimRecv,
    send: SendRing,
    caps: Capabilities,
}

/// Receives from the network of a lane.
struct SimRecv {
    network: Arc<Mutex<Network>>,
    batch: usize,
    datagram_size: usize,
    buffers: SimBuffers,
    ancillary: Box<[Ancillary]>,
}

impl RecvMessages for SimRecv {
    fn recv_batch(&mut self, _lane: &LaneShared, wait: Option<Duration>) -> io::Result<RecvSummary> {
        let mut network = lock(&self.network);
        if let Some(timeout) = wait {
            network.wait_readable(timeout);
        }
        let count = self.batch.min(network.queue.len());
        let buffer = |packet: Packet| {
            let (control, mut bytes) = (packet.control(), packet.payload);
            let full_len = bytes.len();
            bytes.truncate(self.datagram_size);
            Buffer { bytes, full_len, peer: packet.peer.into(), control }
        };
        self.buffers.0 = network.queue.drain(..count).map(buffer).collect();
        Ok(Messages::Sim(&self.buffers).parse_ancillary(count, &mut self.ancillary))
    }

    fn messages(&self) -> Messages<'_> {
        Messages::Sim(&self.buffers)
    }

    fn held(&self) -> usize {
        0
    }

    fn backlog(&self, _lane: &LaneShared) -> (usize, usize) {
        let network = lock(&self.network);
        let bytes = |packets: usize| packets.saturating_mul(SKB_TRUESIZE_MIN);
        (bytes(network.queue.len()), bytes(network.queue_max))
    }
}

impl SimIo {
    fn network(&self) -> MutexGuard<'_, Network> {
        lock(&self.recv.network)
    }

    /// See [`Io::split`](super::Io::split).
    pub(super) fn split<'a>(
        &'a mut self,
        summary: RecvSummary,
        bound: &'a SocketAddr,
    ) -> (Batch<'a>, Replies<'a>) {
        let origin = Origin::Messages(Messages::Sim(&self.recv.buffers), &self.recv.ancillary);
        let transport = Transport::Sim(&self.recv.network);
        let replies = Replies { queue: self.send.batch(), transport };
        (Batch::new(origin, bound, summary), replies)
    }
}

impl LaneIo for SimIo {
    fn capabilities(&self) -> Capabilities {
        self.caps
    }

    fn recv(&mut self) -> Result<RecvSummary> {
        self.queue.recv(&mut self.recv, None).map_err(|err| self.queue.recv_error(err))
    }

    fn poll(&mut self, _number: u32) -> Result<RecvSummary> {
        self.network().advance(POLL_TIME);
        self.recv()
    }

    fn sleep(&mut self, timeout: Duration) -> Result<RecvSummary> {
        self.queue.lane.cells.add(Count::Sleeps, 1);
        self.queue.recv(&mut self.recv, Some(timeout)).map_err(|err| self.queue.recv_error(err))
    }

    fn delay(&mut self, period: Duration) {
        let mut network = self.network();
        let into = network.now.as_nanos() % period.as_nanos().max(1);
        network.advance(period - Duration::from_nanos(into as u64));
    }

    fn is_within_round(&mut self) -> bool {
        let mut network = self.network();
        let is_within = network.round > 0;
        network.round = network.round.saturating_sub(1);
        is_within
    }

    fn now(&self) -> Instant {
        self.network().clock()
    }

    fn readiness(&self) -> BorrowedFd<'_> {
        self.queue.lane.fd.as_fd()
    }

    fn recv_capacity(&self) -> usize {
        self.network().queue_max
    }

    fn queued_max(&self) -> usize {
        self.network().queue.len()
    }

    fn leave(&mut self) {
        self.network().leave();
    }

    fn discard(&mut self) {
        let left = self.network().queue.drain(..).map(|packet| packet.datagrams()).sum();
        self.queue.lane.cells.add(Count::Discarded, left);
    }
}
