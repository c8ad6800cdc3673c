//! Engines: how a lane talks to the kernel. Each engine is one file or folder with the same few
//! operations. Only this file, [`probe`](crate::probe()) and the option [`Engine`] know which
//! engines there are.
//!
//! | file | what it holds |
//! |---|---|
//! | [`mmsg`], [`uring`], [`xdp`] | the engines; `uring` and `xdp` contain an [`MmsgIo`] for what they leave to the kernel socket |
//! | `sim` | an engine for tests: a simulated network for each lane, with a clock that only waits and polls advance |
//! | `faults` | for tests, around any engine: seeded loss, reordering, shortening, corruption; receives and sends that fail |
//! | [`kernel_socket`] | the kernel socket of a lane: its options, and binding it |
//! | [`socket_engine`] | what the lanes of a socket share of their engine |
//! | [`transport`] | where replies go: through the kernel socket |
//! | [`filter`] | limits and prefixes, in the maps of XDP programs |
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
mod bpf_error;
#[cfg(test)]
pub(crate) mod faults;
mod filter;
mod frames;
pub(crate) mod kernel_socket;
mod messages;
mod mmsg;
#[cfg(test)]
pub(crate) mod sim;
mod socket_engine;
mod socket_queue;
mod transport;
pub(crate) mod uring;
mod xdp;

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
#[cfg(test)]
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use manylane_sys::tick;

use self::batch::Batch;
use self::mmsg::MmsgIo;
use self::uring::UringIo;
use self::xdp::{XdpControl, XdpIo};
use crate::config::{Config, DATAGRAM_SIZE_MAX, Engine, FILTER_REFUSED};
use crate::error::{Error, ErrorKind, Result};

pub use self::filter::FilterHandle;
pub use self::socket_engine::XdpQueue;
pub(crate) use self::socket_engine::{NewLane, SocketEngine};
pub(crate) use self::transport::{Replies, Transport};
pub use self::xdp::leasing::{LeasedRing, LeasedRings, Lessor};
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

/// The engine to use for the one that the user named, and its substitute where it cannot be used.
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

/// Totals of one receive.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RecvSummary {
    pub(crate) messages: usize,
    pub(crate) datagrams: usize,
    pub(crate) bytes: usize,
    pub(crate) truncated: usize,
    pub(crate) gro_messages: usize,
}

/// The last batch, and where replies go.
pub(crate) struct Parts<'a> {
    pub(crate) batch: Batch<'a>,
    pub(crate) replies: Replies<'a>,
    /// Past the kernel's stack; tried before `replies`.
    pub(crate) bypass: Option<Bypass<'a>>,
}

impl<'a> From<(Batch<'a>, Replies<'a>)> for Parts<'a> {
    fn from((batch, replies): (Batch<'a>, Replies<'a>)) -> Self {
        Self { batch, replies, bypass: None }
    }
}

/// The engine of one lane. Each operation is one call per batch, or rarer.
pub(crate) enum Io {
    Mmsg(MmsgIo),
    Uring(UringIo),
    Xdp(XdpIo),
    #[cfg(test)]
    Sim(sim::SimIo),
    #[cfg(test)]
    Faulty(Box<faults::FaultIo>),
}

/// Calls a method that all engines have.
macro_rules! each {
    ($io:expr, $engine:ident => $call:expr) => {
        match $io {
            Self::Mmsg($engine) => $call,
            Self::Uring($engine) => $call,
            Self::Xdp($engine) => $call,
            #[cfg(test)]
            Self::Sim($engine) => $call,
            #[cfg(test)]
            Self::Faulty($engine) => $call,
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
            #[cfg(test)]
            Self::Faulty(faulty) => faulty.recv_by(Io::recv_more),
            _ => self.recv(),
        }
    }

    /// Poll `number` since the lane began to spin: as [`recv`](Self::recv), but most polls skip
    /// checks that need a system call.
    #[inline]
    pub(crate) fn poll(&mut self, number: u32) -> Result<RecvSummary> {
        match self {
            Self::Xdp(xdp) => xdp.poll(number),
            #[cfg(test)]
            Self::Sim(sim) => sim.poll(),
            #[cfg(test)]
            Self::Faulty(faulty) => faulty.recv_by(|engine| engine.poll(number)),
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
            #[cfg(test)]
            Self::Sim(sim) => sim.sleep(time),
            #[cfg(test)]
            Self::Faulty(faulty) => faulty.sleep_by(Io::sleep_precise, time),
        }
    }

    /// Sleeps until the clock is next at a multiple of `period`, whatever arrives.
    pub(crate) fn delay(&mut self, period: Duration) {
        match self {
            Self::Mmsg(_) | Self::Uring(_) | Self::Xdp(_) => tick::sleep(period),
            #[cfg(test)]
            Self::Sim(sim) => sim.delay(period),
            #[cfg(test)]
            Self::Faulty(faulty) => faulty.engine.delay(period),
        }
    }

    /// The time, by the clock of the engine.
    #[inline]
    pub(crate) fn now(&self) -> Instant {
        match self {
            Self::Mmsg(_) | Self::Uring(_) | Self::Xdp(_) => Instant::now(),
            #[cfg(test)]
            Self::Sim(sim) => sim.now(),
            #[cfg(test)]
            Self::Faulty(faulty) => faulty.engine.now(),
        }
    }

    /// True if a queue that was not served since the last delay has frames. Each queue is served
    /// once per round, because a lane that served them as long as any has frames might never
    /// delay.
    #[inline]
    pub(crate) fn is_within_round(&mut self) -> bool {
        match self {
            Self::Xdp(xdp) => xdp.is_within_round(),
            #[cfg(test)]
            Self::Sim(sim) => sim.is_within_round(),
            #[cfg(test)]
            Self::Faulty(faulty) => faulty.engine.is_within_round(),
            _ => false,
        }
    }

    /// Ends the last batch: what is sent next is no reply.
    pub(crate) fn end_batch(&mut self) {
        match self {
            Self::Uring(uring) => uring.end_batch(),
            Self::Xdp(xdp) => xdp.end_batch(),
            #[cfg(test)]
            Self::Faulty(faulty) => faulty.engine.end_batch(),
            _ => {}
        }
    }

    /// The last batch, with the counts of `summary`, and the send paths for replies. The socket is
    /// bound to `bound`.
    #[inline]
    pub(crate) fn split<'a>(&'a mut self, summary: RecvSummary, bound: &'a SocketAddr) -> Parts<'a> {
        match self {
            Self::Mmsg(mmsg) => mmsg.split(summary, bound).into(),
            Self::Uring(uring) => uring.split(summary, bound).into(),
            Self::Xdp(xdp) => {
                let (batch, replies, bypass) = xdp.split(summary, bound);
                Parts { batch, replies, bypass }
            }
            #[cfg(test)]
            Self::Sim(sim) => sim.split(summary, bound).into(),
            #[cfg(test)]
            Self::Faulty(faulty) => faulty.split(summary, bound).into(),
        }
    }

    /// A descriptor that is readable while [`recv`](Self::recv) has work; the same one for the
    /// lane's life.
    pub(crate) fn readiness(&self) -> BorrowedFd<'_> {
        each!(self, engine => engine.readiness())
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
        match self {
            Self::Xdp(xdp) => xdp.leave(),
            #[cfg(test)]
            Self::Sim(sim) => sim.leave(),
            #[cfg(test)]
            Self::Faulty(faulty) => faulty.engine.leave(),
            _ => {}
        }
    }

    /// Discards and counts what is still queued, before the lane closes.
    pub(crate) fn discard(&mut self) {
        each!(self, engine => engine.discard());
    }

    /// Closes the remaining queues of devices.
    pub(crate) fn close(&mut self) {
        match self {
            Self::Xdp(xdp) => xdp.close(),
            #[cfg(test)]
            Self::Faulty(faulty) => faulty.engine.close(),
            _ => {}
        }
    }

    /// True if the kernel may hold the socket for a moment after all is closed.
    pub(crate) fn is_socket_held(&self) -> bool {
        match self {
            Self::Uring(uring) => uring.is_socket_held(),
            #[cfg(test)]
            Self::Faulty(faulty) => faulty.engine.is_socket_held(),
            _ => false,
        }
    }
}

/// Locks the state of an engine for tests. Only the lane's own thread locks it: if the lock is
/// held, that thread would wait for itself.
#[cfg(test)]
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.try_lock().unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Builder;

    #[test]
    fn unsupported_engine_options_are_refused_by_name() {
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
