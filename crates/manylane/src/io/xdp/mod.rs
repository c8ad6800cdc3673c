//! Engine `xdp`: frames from the device into memory of the lane (AF_XDP), with a kernel socket as
//! companion.
//!
//! | stage | owner of the frame | when it is full or missing |
//! |---|---|---|
//! | the program on the device (`bpf/xdp.bpf.c`) | the driver | not ours, or not understood: to the kernel, and so to the companion; refused by the [`filter`](super::filter): dropped, counted |
//! | the RX ring of the queue | the kernel, then the lane | ring full, or no frame to fill: dropped, counted in `xsk_dropped` |
//! | [`lane_queue`]: payloads, by the program's [`rx_hint`]; else lengths and checksums | the lane | invalid: counted (`malformed`, `bad_checksum`), the frame is free again |
//! | the application | borrows the payload through the batch | - |
//! | [`send::XdpSender`] | reply in the frame of the request, or in a free one | no free frame, no known next hop, too long: through the companion |
//! | the TX and completion rings | the kernel, then free | TX ring full: kicked, then through the companion |
//! | the same, what [`unsent`] wakes the lane for | the lane | device full: they wait in the ring |
//!
//! A batch comes from one source: a queue of the lane, or the companion. A lane stays with a queue
//! for a few batches as long as they are full, and then goes on to the next queue that has frames
//! ([`lane_queues`]). It polls the companion when its queues are empty, and after a number of
//! batches from queues. In `serve`, the receive that follows a full batch polls the queues only.

mod checks;
mod control;
mod device;
mod lane_queue;
mod lane_queues;
pub(crate) mod leasing;
mod mailbox;
pub(crate) mod packets;
mod ports;
mod resolve_budget;
mod round_robin;
mod route;
pub(super) mod send;
mod unsent;

use std::net::SocketAddr;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use manylane_bpf::abi;
use manylane_wire::rx_hint;

pub(crate) use control::XdpControl;
pub(crate) use ports::Ports;

use self::lane_queues::LaneQueues;
use self::send::XdpSender;
use super::batch::{Batch, Origin};
use super::lane_io::LaneIo;
use super::mmsg::MmsgIo;
use super::{Capabilities, NewLane, RecvSummary, Replies};
use crate::config::{Config, XdpOptions};
use crate::counters::Count;
use crate::drop_policy::DropPolicy;
use crate::error::{Error, ErrorKind, Result};
use crate::lane_shared::LaneShared;
use crate::steer::Steering;

// The layout that the XDP program writes is the one that is read here.
const _: () = assert!(
    rx_hint::HINT == abi::RX_HINT
        && rx_hint::HEADERS_LEN_V4 == abi::RX_HINT_V4 as usize
        && rx_hint::HEADERS_LEN_V6 == abi::RX_HINT_V6 as usize
        && rx_hint::HEADERS_LEN_MASK == abi::RX_HINT_HEADERS_MASK
        && rx_hint::PARTIAL == abi::RX_HINT_PARTIAL
        && rx_hint::HINT_LEN == abi::RX_HINT_LEN
        && rx_hint::UDP_LEN_MAX == abi::RX_HINT_UDP_MAX
);

/// A lane that spins polls its companion, which is a system call, once in this many polls.
const POLLS_PER_KERNEL_POLL: u32 = 64;

/// Checks the options.
pub(super) fn check(config: &Config) -> Result<()> {
    let refuse = |message: String| Err(Error::new(ErrorKind::Config, message));
    if !matches!(config.steering, Steering::Flow | Steering::Cpu) {
        return refuse(format!(
            "engine xdp does not support steering {}, because the device picks the queue, and with it the lane: use flow or cpu",
            config.steering
        ));
    }
    if config.timestamps {
        return refuse("engine xdp does not support timestamps".into());
    }
    if config.reuse_port {
        return refuse(
            "engine xdp does not support reuse_port, because this process receives all frames".into(),
        );
    }
    let XdpOptions { ring, sockets, sources, .. } = config.xdp;
    if !ring.is_power_of_two() || !(64..=16_384).contains(&ring) {
        return refuse(format!("invalid xdp_ring {ring}: expected a power of two from 64 to 16384"));
    }
    if !(1..=abi::SOCKETS_MAX).contains(&sockets) {
        return refuse(format!("invalid xdp_sockets {sockets}: expected 1 to {}", abi::SOCKETS_MAX));
    }
    if !(1024..=1 << 24).contains(&sources) {
        return refuse(format!("invalid limit_sources {sources}: expected 1024 to {}", 1 << 24));
    }
    Ok(())
}

/// One lane of engine `xdp`: its queues, and its companion, which also sends what the queues
/// cannot.
pub(crate) struct XdpIo {
    /// Before the companion: XSKs close first.
    queues: LaneQueues,
    companion: MmsgIo,
    lane: Arc<LaneShared>,
    drop_policy: DropPolicy,
}

impl XdpIo {
    pub(super) fn new(control: Arc<XdpControl>, new: NewLane<'_>) -> Result<Self> {
        let (lane, drop_policy) = (Arc::clone(new.lane), new.config.drop_policy);
        let companion = MmsgIo::new(new)?;
        let queues = LaneQueues::new(control, lane.id, &[lane.fd.as_fd()])?;
        Ok(Self { queues, companion, lane, drop_policy })
    }

    #[inline]
    fn recv_from_queues(&mut self) -> RecvSummary {
        let Capabilities { batch, datagram_size, .. } = self.companion.capabilities();
        let cells = &self.lane.cells;
        let summary = self.queues.receive(batch, datagram_size, self.drop_policy, cells);
        self.queues.publish_backlog(cells);
        if summary.messages > 0 {
            cells.add(Count::DeliveredByBypass, summary.datagrams as u64);
        }
        summary
    }

    /// See [`Io::split`](super::Io::split).
    #[inline]
    pub(super) fn split<'a>(
        &'a mut self,
        summary: RecvSummary,
        bound: &'a SocketAddr,
    ) -> (Batch<'a>, Replies<'a>, Option<XdpSender<'a>>) {
        let (batch, replies) = self.companion.split(summary, bound);
        let (frames, sender) = self.queues.split();
        let batch = frames.map_or(batch, |frames| Batch::new(Origin::Frames(frames), bound, summary));
        (batch, replies, sender)
    }
}

impl LaneIo for XdpIo {
    /// A frame of a queue is one datagram, in both directions: `gro` and `gso` are false, although
    /// the companion may still do both. The rest is the companion's. So `datagram_size` is 65535 if
    /// that has GRO, and holds for frames too.
    fn capabilities(&self) -> Capabilities {
        Capabilities { gro: false, gso: false, ..self.companion.capabilities() }
    }

    /// Receives a batch from a queue that has frames, else from the companion.
    #[inline]
    fn recv(&mut self) -> Result<RecvSummary> {
        let kernel_first = self.queues.take_kernel_due();
        if kernel_first {
            let summary = self.companion.recv()?;
            if summary.messages > 0 {
                return Ok(summary);
            }
        }
        let summary = self.recv_from_queues();
        if summary.messages > 0 || kernel_first {
            return Ok(summary);
        }
        self.queues.reset_kernel_due();
        self.queues.flush_unsent();
        self.companion.recv()
    }

    /// Receives what may have arrived behind a full batch. While batches come from queues, this
    /// does not poll the companion, which is a system call: it is polled after a number of batches
    /// anyway.
    #[inline]
    fn recv_more(&mut self) -> Result<RecvSummary> {
        if self.queues.has_batch() { Ok(self.recv_from_queues()) } else { self.recv() }
    }

    #[inline]
    fn poll(&mut self, number: u32) -> Result<RecvSummary> {
        if self.queues.can_receive() || number.is_multiple_of(POLLS_PER_KERNEL_POLL) {
            self.recv()
        } else {
            Ok(RecvSummary::default())
        }
    }

    fn sleep(&mut self, timeout: Duration) -> Result<RecvSummary> {
        self.lane.cells.add(Count::Sleeps, 1);
        // No extra poll of the companion: `recv` polls it if it is due or the queues are empty.
        self.queues.wait(timeout)?;
        self.recv()
    }

    #[inline]
    fn is_within_round(&mut self) -> bool {
        self.queues.is_within_round()
    }

    fn end_batch(&mut self) {
        self.queues.end_batch();
    }

    fn readiness(&self) -> BorrowedFd<'_> {
        self.queues.as_fd()
    }

    fn recv_capacity(&self) -> usize {
        self.queues.ring_capacity().min(self.companion.recv_capacity())
    }

    fn queued_max(&self) -> usize {
        self.companion.queued_max()
    }

    fn leave(&mut self) {
        self.queues.release();
    }

    fn close(&mut self) {
        self.queues.close();
    }

    fn discard(&mut self) {
        let left = self.queues.discard(&self.lane.cells);
        self.lane.cells.add(Count::Discarded, left);
        self.companion.discard();
    }
}
