//! Engines: how a lane talks to the kernel. Each engine is one file or folder with the same few
//! operations. Only this file, the enums of their bytes ([`messages`], [`batch`]) and send paths
//! ([`bypass`]), [`probe`](crate::probe()) and the option [`Engine`] know which engines there are.
//!
//! | file | what it holds |
//! |---|---|
//! | [`mmsg`], [`uring`], [`xdp`] | the engines; `uring` and `xdp` contain an [`MmsgIo`] for what they leave to the kernel socket |
//! | `sim` | an engine for tests: a simulated network for each lane, with a clock that only waits and polls advance |
//! | `faults` | for tests, around any engine: seeded loss, reordering, shortening, corruption; receives and sends that fail |
//! | [`kernel_socket`] | the kernel socket of a lane: its options, and binding it |
//! | [`orphaned_sockets`] | sockets that the kernel holds after their lanes were closed |
//! | [`socket_engine`] | what the lanes of a socket share of their engine |
//! | [`bypass`], [`transport`] | where replies go: past the kernel's stack, or through the kernel socket |
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
mod bypass;
#[cfg(test)]
pub(crate) mod faults;
mod filter;
mod frames;
pub(crate) mod kernel_socket;
mod messages;
mod mmsg;
mod orphaned_sockets;
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
use crate::lane_shared::Offloads;

pub(crate) use self::bypass::Bypass;
pub use self::filter::FilterHandle;
pub use self::socket_engine::XdpQueue;
pub(crate) use self::socket_engine::{NewLane, SocketEngine};
pub(crate) use self::transport::{Replies, Transport};
pub use self::xdp::leasing::{LeasedRing, LeasedRings, Lessor};

/// What an engine was granted on a lane, which may be less than the options ask for. Lanes, waits
/// and `serve` do not ask which engine it is; only the selection of the engine, the probe and the
/// command line do. An engine sizes its buffers by the capabilities of its kernel socket, the waits
/// of a lane read `batch`, and `manylane echo` shows `gro` and `gso`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Messages that one call receives or sends.
    pub batch: usize,
    /// Size of the largest datagram that is received whole, in bytes: 65535 if the kernel socket
    /// has GRO, whose messages need such buffers, else as configured. With engine `xdp` that socket
    /// is its companion, so it may be 65535 although `gro` is false.
    pub datagram_size: usize,
    /// GRO: several datagrams may be received as one message. False with engine `xdp`, whose queues
    /// never do so, although its companion still may.
    pub gro: bool,
    /// GSO: consecutive replies may be sent as one message. False with engine `xdp`, whose queues
    /// never do so, although its companion still may. A device can refuse such a message, which
    /// `gso_fallbacks` counts.
    pub gso: bool,
    /// Each datagram has a time stamp of the kernel.
    pub timestamps: bool,
}

impl Capabilities {
    /// Those of a kernel socket that was granted `offloads`. The kernel cannot refuse the others:
    /// without them, the socket does not open.
    pub(crate) fn of(config: &Config, offloads: Offloads) -> Self {
        let Offloads { gro, gso } = offloads;
        let Config { batch, timestamps, .. } = *config;
        let datagram_size = if gro { DATAGRAM_SIZE_MAX } else { config.datagram_size };
        Self { batch, datagram_size, gro, gso, timestamps }
    }

    /// Of each value, the weaker one.
    pub(crate) fn weakest(self, other: Self) -> Self {
        Self {
            batch: self.batch.min(other.batch),
            datagram_size: self.datagram_size.min(other.datagram_size),
            gro: self.gro && other.gro,
            gso: self.gso && other.gso,
            timestamps: self.timestamps && other.timestamps,
        }
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
        Engine::Uring => Arc::new(uring::UringEngine::default()),
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

/// The engine of one lane. Each operation ([`LaneIo`]) is one call per batch, or rarer.
pub(crate) enum Io {
    Mmsg(MmsgIo),
    Uring(UringIo),
    Xdp(XdpIo),
    #[cfg(test)]
    Sim(sim::SimIo),
    #[cfg(test)]
    Faulty(Box<faults::FaultIo>),
}

/// Operations of a lane's engine. The defaults are for engines without special needs.
trait LaneIo {
    /// What the lane was granted; the same for its life.
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
    /// quarter early with `mmsg`.
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

    /// The last batch, with the counts of `summary`, and the send paths for replies. The socket is
    /// bound to `bound`.
    fn split<'a>(&'a mut self, summary: RecvSummary, bound: &'a SocketAddr) -> Parts<'a>;

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

/// Makes each of these operations of [`Io`] the one of its engine.
macro_rules! dispatch {
    ($(fn $name:ident$(<$life:lifetime>)?($this:ident: $of:ty $(, $arg:ident: $type:ty)*) $(-> $out:ty)?;)*) => {
        impl Io {
            $(#[inline]
            pub(crate) fn $name$(<$life>)?($this: $of $(, $arg: $type)*) $(-> $out)? {
                match $this {
                    Self::Mmsg(engine) => engine.$name($($arg),*),
                    Self::Uring(engine) => engine.$name($($arg),*),
                    Self::Xdp(engine) => engine.$name($($arg),*),
                    #[cfg(test)]
                    Self::Sim(engine) => engine.$name($($arg),*),
                    #[cfg(test)]
                    Self::Faulty(engine) => engine.$name($($arg),*),
                }
            })*
        }
    };
}

dispatch! {
    fn capabilities(self: &Self) -> Capabilities;
    fn recv(self: &mut Self) -> Result<RecvSummary>;
    fn recv_more(self: &mut Self) -> Result<RecvSummary>;
    fn poll(self: &mut Self, number: u32) -> Result<RecvSummary>;
    fn sleep(self: &mut Self, timeout: Duration) -> Result<RecvSummary>;
    fn sleep_precise(self: &mut Self, time: Duration) -> Result<RecvSummary>;
    fn delay(self: &mut Self, period: Duration);
    fn now(self: &Self) -> Instant;
    fn is_within_round(self: &mut Self) -> bool;
    fn end_batch(self: &mut Self);
    fn split<'a>(self: &'a mut Self, summary: RecvSummary, bound: &'a SocketAddr) -> Parts<'a>;
    fn readiness(self: &Self) -> BorrowedFd<'_>;
    fn recv_capacity(self: &Self) -> usize;
    fn queued_max(self: &Self) -> usize;
    fn leave(self: &mut Self);
    fn discard(self: &mut Self);
    fn close(self: &mut Self);
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
        assert!(refused(&|b| _ = b.limit("5".parse().unwrap())).contains("need engine xdp"));
        assert!(refused(&|b| _ = b.deny("10.0.0.0/8".parse().unwrap())).contains("need engine xdp"));
        let by_uring = |b: &mut Builder| _ = b.engine(Engine::Uring).limit("5".parse().unwrap());
        assert!(refused(&by_uring).contains("need engine xdp"));
        assert!(refused(&|b| _ = b.engine(Engine::Xdp).limit_sources(5)).contains("limit_sources 5"));
        assert!(refused(&|b| _ = b.engine(Engine::Xdp).timestamps(true)).contains("timestamps"));
    }
}
