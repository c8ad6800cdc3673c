//! Engines: how a lane talks to the kernel. Each engine is one file or folder with the same few
//! operations. Only [`Io`] knows which engine a lane has.
//!
//! | file | what it holds |
//! |---|---|
//! | [`mmsg`], [`uring`], [`xdp`] | the engines; `uring` and `xdp` contain an [`MmsgIo`] for what they leave to the kernel socket |
//! | [`socket_queue`] | what `mmsg` and `uring` share: the load words that steering reads, head drops |
//! | [`messages`], [`frames`] | the bytes of a batch, in the buffers that the engine received them into |
//! | [`batch`] | the datagrams of a batch, as the application sees them |

pub(crate) mod batch;
mod frames;
mod messages;
pub(crate) mod mmsg;
mod socket_queue;
pub(crate) mod uring;
pub(crate) mod xdp;

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use manylane_sys::map::SharedWords;
use manylane_sys::mmsg::SendBatch;

use self::batch::Batch;
use self::mmsg::MmsgIo;
use self::socket_queue::{LoadWords, SocketQueue};
use self::uring::UringIo;
use self::xdp::send::XdpSender;
use self::xdp::{XdpControl, XdpIo};
use crate::config::{Config, Engine};
use crate::error::Result;
use crate::lane_shared::LaneShared;

/// Capabilities of an engine on this socket. Code tests these, never which engine it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Messages that one call receives or sends.
    pub batch: usize,
    /// Size of the largest datagram that is received whole, in bytes.
    pub datagram_size: usize,
    /// GRO: several datagrams may be received as one message.
    pub gro: bool,
    /// GSO: consecutive replies may be sent as one message.
    pub gso: bool,
    /// Datagrams carry a time stamp of the kernel.
    pub timestamps: bool,
}

/// Totals of one receive.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RecvSummary {
    pub(crate) messages: usize,
    pub(crate) datagrams: usize,
    pub(crate) bytes: usize,
    pub(crate) truncated: usize,
    pub(crate) gro_messages: usize,
}

/// The last batch, and the send paths for replies.
pub(crate) struct Parts<'a> {
    pub(crate) batch: Batch<'a>,
    /// Through the kernel's socket.
    pub(crate) socket: SendBatch<'a>,
    /// Past the kernel's stack; tried first.
    pub(crate) xdp: Option<XdpSender<'a>>,
}

/// The engine of one lane. Each operation is one call per batch, or rarer.
pub(crate) enum Io {
    Mmsg(MmsgIo),
    Uring(UringIo),
    Xdp(XdpIo),
}

/// Calls a method that all engines have.
macro_rules! each {
    ($io:expr, $engine:ident => $call:expr) => {
        match $io {
            Self::Mmsg($engine) => $call,
            Self::Uring($engine) => $call,
            Self::Xdp($engine) => $call,
        }
    };
}

impl Io {
    /// The engine that `config` names, for a lane whose socket is bound to `addr`.
    pub(crate) fn new(
        config: &Config,
        addr: &SocketAddr,
        can: Capabilities,
        lane: &Arc<LaneShared>,
        load: Option<Arc<SharedWords>>,
        xdp: Option<&Arc<XdpControl>>,
    ) -> Result<Self> {
        let load = load.map(|words| LoadWords::new(words, lane));
        let queue = SocketQueue::new(Arc::clone(lane), can.batch, config.drop_policy, load);
        let socket = MmsgIo::new(config, addr, can, queue)?;
        Ok(match (config.engine, xdp) {
            (Engine::Uring, _) => Self::Uring(UringIo::new(config, can, socket)?),
            (_, Some(control)) => {
                Self::Xdp(XdpIo::new(control, socket, Arc::clone(lane), can, config.drop_policy)?)
            }
            _ => Self::Mmsg(socket),
        })
    }

    /// Receives a batch of queued datagrams; it may be empty.
    #[inline]
    pub(crate) fn recv(&mut self) -> Result<RecvSummary> {
        each!(self, engine => engine.recv())
    }

    /// Receives what may have arrived behind a full batch.
    #[inline]
    pub(crate) fn recv_more(&mut self) -> Result<RecvSummary> {
        match self {
            Self::Xdp(xdp) => xdp.recv_more(),
            _ => self.recv(),
        }
    }

    /// Poll `number` since the lane began to spin: as [`recv`](Self::recv), but most polls skip
    /// checks that need a system call.
    #[inline]
    pub(crate) fn poll(&mut self, number: u32) -> Result<RecvSummary> {
        match self {
            Self::Xdp(xdp) => xdp.poll(number),
            _ => self.recv(),
        }
    }

    /// Blocks until a datagram arrives or `timeout` expires, and receives. May return up to a
    /// quarter early with `mmsg`.
    pub(crate) fn sleep(&mut self, timeout: Duration) -> Result<RecvSummary> {
        each!(self, engine => engine.sleep(timeout))
    }

    /// As [`sleep`](Self::sleep), for a short time with microsecond precision.
    pub(crate) fn sleep_precise(&mut self, time: Duration) -> Result<RecvSummary> {
        match self {
            Self::Mmsg(mmsg) => mmsg.sleep_precise(time),
            Self::Uring(uring) => uring.sleep_precise(time),
            Self::Xdp(xdp) => xdp.sleep(time),
        }
    }

    /// True if a queue that was not served since the last delay has frames. Each queue is served
    /// once per round, because a lane that served them as long as any has frames might never
    /// delay.
    #[inline]
    pub(crate) fn is_within_round(&mut self) -> bool {
        match self {
            Self::Xdp(xdp) => xdp.is_within_round(),
            _ => false,
        }
    }

    /// Ends the last batch: what is sent next is no reply.
    pub(crate) fn end_batch(&mut self) {
        match self {
            Self::Mmsg(_) => {}
            Self::Uring(uring) => uring.end_batch(),
            Self::Xdp(xdp) => xdp.end_batch(),
        }
    }

    /// The last batch, with the counts `taken`, and the send paths for replies. The socket is
    /// bound to `bound`.
    #[inline]
    pub(crate) fn split<'a>(&'a mut self, taken: RecvSummary, bound: &'a SocketAddr) -> Parts<'a> {
        each!(self, engine => engine.split(taken, bound))
    }

    /// A descriptor that is readable while [`recv`](Self::recv) has work; the same one for the
    /// lane's life.
    pub(crate) fn readiness(&self) -> BorrowedFd<'_> {
        match self {
            Self::Mmsg(mmsg) => mmsg.fd(),
            Self::Uring(uring) => uring.readiness(),
            Self::Xdp(xdp) => xdp.readiness(),
        }
    }

    /// Datagrams that the receive buffers can take during a delay.
    pub(crate) fn recv_capacity(&self) -> usize {
        each!(self, engine => engine.recv_capacity())
    }

    /// Upper bound of the messages in the kernel socket's queue.
    pub(crate) fn queued_max(&self) -> usize {
        each!(self, engine => engine.queued_max())
    }

    /// Hands the queues of devices over to other lanes, if there are any.
    pub(crate) fn release_queues(&mut self) {
        if let Self::Xdp(xdp) = self {
            xdp.release_queues();
        }
    }

    /// Discards and counts what is still queued, before the lane closes.
    pub(crate) fn discard(&mut self) {
        each!(self, engine => engine.discard());
    }

    /// Closes the remaining queues of devices.
    pub(crate) fn close_queues(&mut self) {
        if let Self::Xdp(xdp) = self {
            xdp.close_queues();
        }
    }

    /// True if a ring of the kernel may hold the socket for a moment after all is closed.
    pub(crate) fn has_left_ring(&self) -> bool {
        match self {
            Self::Uring(uring) => uring.has_left_ring(),
            _ => false,
        }
    }
}
