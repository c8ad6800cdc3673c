//! Faults for tests, around any engine: datagrams that are lost, late, corrupted or shortened, in
//! both directions; receives that fail; sends that are refused.
//!
//! ```text
//!  engine ─► batch ─► copies, without those that are lost ─► the application
//!  engine ◄─ one message at a time, unless it is lost ◄─ refused? ◄─ the outbox
//! ```
//!
//! - **Random faults follow from the seed.** A test queues errors itself. [`Faults`] counts random
//!   faults and refused sends; the lane counts failed receives.
//! - **A fault is one of the network**: the lane does not count a datagram that is lost before it
//!   is received, and counts one as sent that is lost afterwards. Datagrams that the engine still
//!   holds when the lane closes meet no fault.
//! - **Received batches are copied**, datagram by datagram. The unit of a fault in sending is a
//!   message: a GSO message is lost as a whole.
//! - **Replies leave by the engine's transport.** Its bypass is not used.

mod state;
mod transport;

use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use manylane_sys::addr::SockAddr;
use manylane_sys::control::Ancillary;
use manylane_sys::mmsg::{SendOptions, SendRing};

use self::state::Fate;
pub(crate) use self::state::{Direction, Faults};
pub(super) use self::transport::FaultTransport;
use super::batch::{Batch, Datagram, Origin, RecvMeta};
use super::lane_io::LaneIo;
use super::{
    Capabilities, DeviceQueue, EngineShared, FilterHandle, Io, NewLane, RecvSummary, Replies, SocketEngine,
    Transport, lock,
};
use crate::config::Config;
use crate::counters::{Count, LaneId};
use crate::error::{Error, Result};
use crate::lane_shared::LaneShared;

/// An engine with faults, and a test's access to them.
pub(crate) struct FaultInjector {
    engine: Arc<dyn SocketEngine>,
    lanes: Vec<Mutex<Faults>>,
}

impl FaultInjector {
    /// Adds faults that follow from `seed` to `engine`, for a socket with `lanes` lanes.
    pub(crate) fn new(engine: Arc<dyn SocketEngine>, seed: u64, lanes: usize) -> Arc<Self> {
        let lanes = (0..lanes as u64).map(|lane| Mutex::new(Faults::new(seed.wrapping_add(lane)))).collect();
        Arc::new(Self { engine, lanes })
    }

    /// The faults of a lane. The guard must be dropped before the lane is used.
    pub(crate) fn of_lane(&self, lane: usize) -> MutexGuard<'_, Faults> {
        lock(&self.lanes[lane])
    }

    /// The faults of the lane of a socket with one lane.
    pub(crate) fn faults(&self) -> MutexGuard<'_, Faults> {
        self.of_lane(0)
    }
}

impl SocketEngine for FaultInjector {
    fn new_lane(self: Arc<Self>, new: NewLane<'_>) -> Result<Io> {
        let (lane, bound_addr) = (Arc::clone(new.lane), *new.addr);
        let options = SendOptions { batch: 1, gso: new.caps.gso };
        let send =
            SendRing::new(options).map_err(|err| Error::system("allocating buffers of a lane", err))?;
        let engine = Arc::clone(&self.engine).new_lane(new)?;
        let copies = Vec::new();
        Ok(Io::Faulty(Box::new(FaultIo { engine, injector: self, lane, bound_addr, copies, send })))
    }
}

impl EngineShared for FaultInjector {
    fn set_options(&self, config: &Config, socket: BorrowedFd<'_>) -> Result<()> {
        self.engine.set_options(config, socket)
    }

    fn start(&self) -> Result<()> {
        self.engine.start()
    }

    fn lane_added(&self) {
        self.engine.lane_added();
    }

    fn retire(&self, lane: LaneId) {
        self.engine.retire(lane);
    }

    fn shut_down(&self, lane: LaneId) {
        self.engine.shut_down(lane);
    }

    fn lane_drained(&self, lane: LaneId) {
        self.engine.lane_drained(lane);
    }

    fn stop(&self) {
        self.engine.stop();
    }

    fn close(&self) {
        self.engine.close();
    }

    fn wakeups_dominate(&self) -> bool {
        self.engine.wakeups_dominate()
    }

    fn dropped(&self, lane: LaneId) -> u64 {
        self.engine.dropped(lane)
    }

    fn filter(&self) -> Option<&FilterHandle> {
        self.engine.filter()
    }

    fn frame_counts(&self) -> Vec<(String, &'static str, u64)> {
        self.engine.frame_counts()
    }

    fn device_queues(&self) -> Vec<DeviceQueue> {
        self.engine.device_queues()
    }
}

/// A received datagram, as a copy.
#[derive(Debug)]
pub(crate) struct DatagramCopy {
    pub(super) payload: Vec<u8>,
    pub(super) full_len: usize,
    pub(super) peer: SockAddr,
    pub(super) ancillary: Ancillary,
}

impl DatagramCopy {
    fn of(datagram: &Datagram<'_>) -> Self {
        let ancillary = match *datagram.meta() {
            RecvMeta::Message { ancillary, .. } => Ancillary { segment_size: 0, ..*ancillary },
            RecvMeta::Frame { headers, ecn, .. } => Ancillary {
                local: datagram.source(),
                tos: ecn.then_some(headers.traffic_class),
                ..Ancillary::default()
            },
        };
        let (payload, full_len) = (datagram.payload().to_vec(), datagram.full_len());
        Self { payload, full_len, peer: datagram.raw_peer(), ancillary }
    }
}

/// One lane of an engine with faults. All other operations go to the engine unchanged.
pub(crate) struct FaultIo {
    injector: Arc<FaultInjector>,
    lane: Arc<LaneShared>,
    bound_addr: SocketAddr,
    /// The last batch.
    copies: Vec<DatagramCopy>,
    send: SendRing,
    /// The last field, as in a lane.
    engine: Io,
}

impl FaultIo {
    /// Sleeps by an operation of the engine. A batch that is lost as a whole does not end the
    /// sleep.
    fn sleep_by(
        &mut self,
        sleep: fn(&mut Io, Duration) -> Result<RecvSummary>,
        timeout: Duration,
    ) -> Result<RecvSummary> {
        let deadline = self.engine.now() + timeout;
        self.recv_by(|engine| {
            let left = deadline.saturating_duration_since(engine.now());
            sleep(engine, left)
        })
    }

    /// Receives by an operation of the engine. An empty batch means, as without faults, that
    /// nothing was queued.
    fn recv_by(&mut self, mut recv: impl FnMut(&mut Io) -> Result<RecvSummary>) -> Result<RecvSummary> {
        let failure = self.faults().recv_errors.pop_front();
        if let Some(code) = failure {
            self.lane.cells.add(Count::RecvErrors, 1);
            return Err(Error::system("receiving", io::Error::from_raw_os_error(code)));
        }
        loop {
            let summary = recv(&mut self.engine)?;
            let left = self.copy(summary);
            if summary.messages == 0 || left.datagrams > 0 {
                return Ok(left);
            }
        }
    }

    /// Copies the datagrams of the engine's batch that are not lost; returns their totals.
    fn copy(&mut self, summary: RecvSummary) -> RecvSummary {
        self.copies.clear();
        let mut late = Vec::new();
        let batch = self.engine.split(summary, &self.bound_addr).batch;
        let mut faults = lock(faults_of(&self.injector, &self.lane));
        let Faults { random, rx, .. } = &mut *faults;
        for datagram in batch {
            let mut copy = DatagramCopy::of(&datagram);
            let len = copy.payload.len();
            let fate = rx.apply(random, &mut copy.payload, (1, len));
            if copy.payload.len() < len {
                copy.full_len = copy.payload.len();
            }
            match fate {
                Fate::Lost => {}
                Fate::Late => late.push(copy),
                Fate::InTime => self.copies.push(copy),
            }
        }
        self.copies.append(&mut late);
        let datagrams = self.copies.len();
        RecvSummary {
            messages: summary.messages.min(datagrams),
            datagrams,
            bytes: self.copies.iter().map(|copy| copy.payload.len()).sum(),
            truncated: self.copies.iter().filter(|copy| copy.full_len > copy.payload.len()).count(),
            gro_messages: summary.gro_messages.min(datagrams),
        }
    }

    fn faults(&self) -> MutexGuard<'_, Faults> {
        lock(faults_of(&self.injector, &self.lane))
    }

    /// See [`Io::split`](super::Io::split).
    pub(super) fn split<'a>(
        &'a mut self,
        summary: RecvSummary,
        bound: &'a SocketAddr,
    ) -> (Batch<'a>, Replies<'a>) {
        let faults = faults_of(&self.injector, &self.lane);
        let Replies { queue, transport } = self.engine.split(RecvSummary::default(), bound).replies;
        let transport = FaultTransport { transport, faults, send: &mut self.send };
        let replies = Replies { queue, transport: Transport::Faulty(Box::new(transport)) };
        (Batch::new(Origin::Copies(&self.copies), bound, summary), replies)
    }
}

impl LaneIo for FaultIo {
    fn capabilities(&self) -> Capabilities {
        self.engine.capabilities()
    }

    fn recv(&mut self) -> Result<RecvSummary> {
        self.recv_by(Io::recv)
    }

    fn sleep(&mut self, timeout: Duration) -> Result<RecvSummary> {
        self.sleep_by(Io::sleep, timeout)
    }

    fn recv_more(&mut self) -> Result<RecvSummary> {
        self.recv_by(Io::recv_more)
    }

    fn poll(&mut self, number: u32) -> Result<RecvSummary> {
        self.recv_by(|engine| engine.poll(number))
    }

    fn sleep_precise(&mut self, time: Duration) -> Result<RecvSummary> {
        self.sleep_by(Io::sleep_precise, time)
    }

    fn delay(&mut self, period: Duration) {
        self.engine.delay(period);
    }

    fn now(&self) -> Instant {
        self.engine.now()
    }

    fn is_within_round(&mut self) -> bool {
        self.engine.is_within_round()
    }

    fn end_batch(&mut self) {
        self.engine.end_batch();
    }

    fn leave(&mut self) {
        self.engine.leave();
    }

    fn close(&mut self) {
        self.engine.close();
    }

    fn readiness(&self) -> BorrowedFd<'_> {
        self.engine.readiness()
    }

    fn recv_capacity(&self) -> usize {
        self.engine.recv_capacity()
    }

    fn queued_max(&self) -> usize {
        self.engine.queued_max()
    }

    fn discard(&mut self) {
        self.engine.discard();
    }
}

fn faults_of<'a>(injector: &'a FaultInjector, lane: &LaneShared) -> &'a Mutex<Faults> {
    &injector.lanes[lane.id.0 as usize]
}
