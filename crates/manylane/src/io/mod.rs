//! Engines: how a lane talks to the kernel. Each engine is one file or folder with the same few
//! operations. Only this file, [`probe`](crate::probe()) and the option [`Engine`] know which
//! engines there are.
//!
//! | file | what it holds |
//! |---|---|
//! | [`mmsg`], [`uring`], [`xdp`] | the engines; `uring` and `xdp` contain an [`MmsgIo`] for what they leave to the kernel socket |
//! | [`kernel_socket`] | the kernel socket of a lane: its options, and binding it |
//! | [`socket_queue`] | what `mmsg` and `uring` share: the load words that steering reads, head drops |
//! | [`messages`], [`frames`] | the bytes of a batch, in the buffers that the engine received them into |
//! | [`batch`] | the datagrams of a batch, as the application sees them |
//!
//! An engine is two types: one that the lanes of a socket share ([`SocketEngine`]), and one for
//! each lane ([`Io`]). Waiting takes three operations:
//!
//! | operation | `mmsg` | `uring` | `xdp` |
//! |---|---|---|---|
//! | [`Io::poll`] | `recvmmsg` without waiting | a load: the flag in the ring | loads: the rings of its queues; the companion at every 64th poll |
//! | [`Io::sleep_precise`] | `ppoll` | a wait of the ring | the lane's epoll |
//! | [`Io::sleep`] | `recvmmsg` | a wait of the ring | the lane's epoll |
//! | `sleep` with `busy-poll` | `SO_BUSY_POLL` | `IORING_REGISTER_NAPI` | `SO_BUSY_POLL` on the queues, `EPIOCSPARAMS` |

pub(crate) mod batch;
mod frames;
pub(crate) mod kernel_socket;
mod messages;
mod mmsg;
mod socket_queue;
pub(crate) mod uring;
mod xdp;

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use manylane_sys::map::SharedWords;
use manylane_sys::mmsg::SendBatch;

use self::batch::Batch;
use self::mmsg::MmsgIo;
use self::uring::UringIo;
use self::xdp::{XdpControl, XdpIo};
use crate::config::{Config, DATAGRAM_SIZE_MAX, Engine, FILTER_REFUSED};
use crate::counters::LaneId;
use crate::error::{Error, ErrorKind, Result};
use crate::lane_shared::LaneShared;

pub use self::xdp::leasing::{LeasedRing, LeasedRings, Lessor};
pub use self::xdp::{FilterDrops, FilterHandle, XdpQueue};
// One engine has a send path of its own. A second one makes this an enum.
pub(crate) use self::xdp::send::XdpSender as Bypass;

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

impl Capabilities {
    /// Those that the options ask for. The kernel may refuse GRO and GSO.
    pub(crate) fn of(config: &Config) -> Self {
        let Config { batch, gro, gso, timestamps, .. } = *config;
        let datagram_size = if gro { DATAGRAM_SIZE_MAX } else { config.datagram_size };
        Self { batch, datagram_size, gro, gso, timestamps }
    }
}

/// The engine for the one that the user named, and the one that replaces it where it cannot be
/// used.
pub(crate) fn select(config: &Config) -> (Engine, Option<Engine>) {
    match config.engine {
        // The user decides whether a program is attached to a network card.
        Engine::Auto if config.xdp.devices.is_some() => (Engine::Xdp, Some(Engine::Mmsg)),
        Engine::Auto => (Engine::Mmsg, None),
        Engine::Uring => (Engine::Uring, Some(Engine::Mmsg)),
        engine => (engine, None),
    }
}

/// Checks that the engine supports the options, and that this process can use it.
pub(crate) fn check(config: &Config) -> Result<()> {
    if config.engine != Engine::Xdp && !config.xdp.filter.is_empty() {
        return Err(Error::new(ErrorKind::Config, FILTER_REFUSED));
    }
    match config.engine {
        Engine::Auto | Engine::Mmsg => Ok(()),
        Engine::Uring => uring::check(config),
        Engine::Xdp => xdp::check(config),
    }
}

/// Opens the engine of a socket that is bound to `addr`.
pub(crate) fn open(config: &Config, addr: SocketAddr) -> Result<Arc<dyn SocketEngine>> {
    Ok(match config.engine {
        Engine::Auto | Engine::Mmsg => Arc::new(mmsg::MmsgEngine),
        Engine::Uring => Arc::new(uring::UringEngine),
        Engine::Xdp => XdpControl::open(config, addr)?,
    })
}

/// What the lanes of a socket share of their engine. Lanes call it when they open and close, and
/// other threads at any time. The defaults are for an engine that shares nothing.
pub(crate) trait SocketEngine: Send + Sync {
    /// Makes the engine of one lane.
    fn new_lane(self: Arc<Self>, new: NewLane<'_>) -> Result<Io>;

    /// Called when all first lanes are steered to. From here on, datagrams may arrive by other
    /// ways than the kernel sockets.
    fn start(&self) -> Result<()> {
        Ok(())
    }

    /// A lane was added after the start.
    fn lane_added(&self) {}

    /// A lane is taken out of steering: queues of devices go to other lanes.
    fn retire(&self, _lane: LaneId) {}

    /// A lane whose socket ends refuses new datagrams. After a grace period, none arrive.
    fn shut_down(&self, _lane: LaneId) {}

    /// A lane has discarded what was queued, and is about to close.
    fn lane_drained(&self, _lane: LaneId) {}

    /// The socket ends: lanes and queues are not added any more.
    fn stop(&self) {}

    /// The last lane is closed: nothing of the socket may be left on a device, even if a handle
    /// for its counters is still in use.
    fn close(&self) {}

    /// The shortest delay for larger batches that pays on lanes that sleep.
    fn delay_min(&self) -> Duration {
        Duration::ZERO
    }

    /// Datagrams dropped at the queues of a lane, other than its kernel socket.
    fn dropped(&self, _lane: LaneId) -> u64 {
        0
    }

    /// Limits and prefixes, if the engine enforces them.
    fn filter(&self) -> Option<&FilterHandle> {
        None
    }

    /// Frames by device and outcome, including those of other sockets on the devices.
    fn frame_counts(&self) -> Vec<(String, &'static str, u64)> {
        Vec::new()
    }

    /// Queues of devices, and the lanes that they feed.
    fn queues(&self) -> Vec<XdpQueue> {
        Vec::new()
    }
}

/// What the engine of a new lane is made of.
pub(crate) struct NewLane<'a> {
    pub(crate) config: &'a Config,
    /// The bound address.
    pub(crate) addr: &'a SocketAddr,
    pub(crate) can: Capabilities,
    pub(crate) lane: &'a Arc<LaneShared>,
    /// Where it publishes its load, if steering reads it.
    pub(crate) load: Option<Arc<SharedWords>>,
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
    pub(crate) bypass: Option<Bypass<'a>>,
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

    /// The lane is out of steering: hands the queues of devices over to other lanes, if any.
    pub(crate) fn leave(&mut self) {
        if let Self::Xdp(xdp) = self {
            xdp.leave();
        }
    }

    /// Discards and counts what is still queued, before the lane closes.
    pub(crate) fn discard(&mut self) {
        each!(self, engine => engine.discard());
    }

    /// Closes the remaining queues of devices.
    pub(crate) fn close(&mut self) {
        if let Self::Xdp(xdp) = self {
            xdp.close();
        }
    }

    /// True if the kernel may hold the socket for a moment after all is closed.
    pub(crate) fn is_socket_held(&self) -> bool {
        match self {
            Self::Uring(uring) => uring.is_socket_held(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Builder;

    #[test]
    fn options_that_an_engine_lacks_are_refused_by_name() {
        let refused = |change: &dyn Fn(&mut Builder)| {
            let mut builder = Builder::new("127.0.0.1:0").unwrap();
            change(&mut builder);
            let err = builder.open().map(drop).unwrap_err();
            assert_eq!(err.kind(), ErrorKind::Config);
            err.to_string()
        };
        assert!(refused(&|b| _ = b.limit("5".parse().unwrap())).contains("need the engine xdp"));
        assert!(refused(&|b| _ = b.deny("10.0.0.0/8".parse().unwrap())).contains("need the engine xdp"));
        let by_uring = |b: &mut Builder| _ = b.engine(Engine::Uring).limit("5".parse().unwrap());
        assert!(refused(&by_uring).contains("need the engine xdp"));
        assert!(refused(&|b| _ = b.engine(Engine::Xdp).limit_sources(5)).contains("limit_sources 5"));
        assert!(refused(&|b| _ = b.engine(Engine::Xdp).timestamps(true)).contains("timestamps"));
    }
}
