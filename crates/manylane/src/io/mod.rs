//! Engines: how a lane talks to the kernel. Each engine is one file or folder with the same few
//! operations. Only this file, the enums of their bytes ([`messages`], [`batch`]) and send paths
//! ([`bypass`]), [`probe`](crate::probe()) and the option [`Engine`] know which engines there are.
//!
//! | file | what it holds |
//! |---|---|
//! | [`mmsg`], [`uring`], [`xdp`] | the engines; `uring` and `xdp` contain an [`MmsgIo`] for what they leave to the kernel socket |
//! | `sim` | an engine for tests: a simulated network for each lane, with a clock that only waits and polls advance |
//! | `faults` | for tests, around any engine: seeded loss, reordering, shortening, corruption; receives and sends that fail |
//! | [`lane_io`], [`engine_shared`] | the operations of an engine, for a lane and for what the lanes of a socket share; totals of one receive |
//! | [`capabilities`] | what an engine was granted |
//! | [`kernel_socket`] | the kernel socket of a lane: its options, and binding it |
//! | [`orphaned_sockets`] | sockets that the kernel holds after their lanes were closed |
//! | [`bypass`], [`transport`] | where replies go: past the kernel's stack, or through the kernel socket |
//! | [`filter`] | limits and prefixes, in the maps of XDP programs |
//! | [`socket_queue`] | what `mmsg` and `uring` share: the load words that steering reads, head drops |
//! | [`messages`], [`frames`] | the bytes of a batch, in the buffers that the engine received them into |
//! | [`batch`] | the datagrams of a batch, as the application sees them |
//!
//! An engine is two types: one that the lanes of a socket share ([`SocketEngine`]), and one for
//! each lane ([`Io`]). Their operations are [`EngineShared`] and [`LaneIo`]. Two more are in this
//! file, because their results name engines: [`SocketEngine::new_lane`] and [`Io::split`].
//!
//! Waiting takes three operations:
//!
//! | operation | `mmsg` | `uring` | `xdp` |
//! |---|---|---|---|
//! | [`Io::poll`] | `recvmmsg` without waiting | a load: the flag in the ring | loads: the rings of its queues; the companion at every 64th poll |
//! | [`Io::sleep_precise`] | `ppoll` | a wait of the ring | the lane's epoll |
//! | [`Io::sleep`] | `recvmmsg` | a wait of the ring | the lane's epoll |
//! | `sleep` with `busy-poll` | `SO_BUSY_POLL` | `IORING_REGISTER_NAPI` | `SO_BUSY_POLL` on the queues, `EPIOCSPARAMS` |

pub(crate) mod batch;
mod bypass;
mod capabilities;
mod engine_shared;
#[cfg(test)]
pub(crate) mod faults;
mod filter;
mod frames;
mod gro_switch;
pub(crate) mod kernel_socket;
mod lane_io;
mod messages;
mod mmsg;
mod orphaned_sockets;
#[cfg(test)]
pub(crate) mod sim;
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

use self::batch::Batch;
use self::lane_io::LaneIo;
use self::mmsg::{MmsgEngine, MmsgIo};
use self::uring::{UringEngine, UringIo};
use self::xdp::XdpIo;
use crate::config::{Config, Engine, FILTER_REFUSED};
use crate::error::{Error, ErrorKind, Result};

pub(crate) use self::bypass::Bypass;
pub use self::capabilities::Capabilities;
pub use self::engine_shared::DeviceQueue;
pub(crate) use self::engine_shared::{EngineShared, NewLane};
pub use self::filter::FilterHandle;
pub(crate) use self::lane_io::RecvSummary;
pub(crate) use self::transport::{Replies, Transport};
pub use self::xdp::leasing::{LeasedRing, LeasedRings, Lessor};
pub(crate) use self::xdp::{Ports, XdpControl, packets};

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

/// Maximum number of messages of one receive.
pub(crate) fn batch_max(engine: Engine) -> usize {
    if engine == Engine::Uring { uring::BATCH_MAX } else { usize::MAX }
}

/// Opens the engine of a socket that is bound to `addr`.
pub(crate) fn open(config: &Config, addr: SocketAddr) -> Result<Arc<dyn SocketEngine>> {
    Ok(match config.engine {
        Engine::Auto | Engine::Mmsg => Arc::new(MmsgEngine),
        Engine::Uring => Arc::new(UringEngine::default()),
        Engine::Xdp => XdpControl::open(config, Ports::Udp { bound: addr, only_v6: config.only_v6 })?,
    })
}

/// The part of an engine that the lanes of a socket share.
pub(crate) trait SocketEngine: EngineShared {
    /// Makes the engine of one lane.
    fn new_lane(self: Arc<Self>, new: NewLane<'_>) -> Result<Io>;
}

impl SocketEngine for MmsgEngine {
    fn new_lane(self: Arc<Self>, new: NewLane<'_>) -> Result<Io> {
        MmsgIo::new(new).map(Io::Mmsg)
    }
}

impl SocketEngine for UringEngine {
    fn new_lane(self: Arc<Self>, new: NewLane<'_>) -> Result<Io> {
        UringIo::new(&self, new).map(Io::Uring)
    }
}

impl SocketEngine for XdpControl {
    fn new_lane(self: Arc<Self>, new: NewLane<'_>) -> Result<Io> {
        XdpIo::new(self, new).map(Io::Xdp)
    }
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

/// Makes each of these operations of [`Io`] the one of its engine.
macro_rules! dispatch {
    ($(fn $name:ident($this:ident: $of:ty $(, $arg:ident: $type:ty)*) $(-> $out:ty)?;)*) => {
        impl Io {
            $(#[inline]
            pub(crate) fn $name($this: $of $(, $arg: $type)*) $(-> $out)? {
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
    fn readiness(self: &Self) -> BorrowedFd<'_>;
    fn recv_capacity(self: &Self) -> usize;
    fn queued_max(self: &Self) -> usize;
    fn leave(self: &mut Self);
    fn discard(self: &mut Self);
    fn close(self: &mut Self);
}

impl Io {
    /// The last batch, with the counts of `summary`, and the send paths for replies. The socket is
    /// bound to `bound`.
    #[inline]
    pub(crate) fn split<'a>(&'a mut self, summary: RecvSummary, bound: &'a SocketAddr) -> Parts<'a> {
        let (batch, replies) = match self {
            Self::Mmsg(engine) => engine.split(summary, bound),
            Self::Uring(engine) => engine.split(summary, bound),
            Self::Xdp(engine) => {
                let (batch, replies, sender) = engine.split(summary, bound);
                return Parts { batch, replies, bypass: sender.map(Bypass::Xdp) };
            }
            #[cfg(test)]
            Self::Sim(engine) => engine.split(summary, bound),
            #[cfg(test)]
            Self::Faulty(engine) => engine.split(summary, bound),
        };
        Parts { batch, replies, bypass: None }
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
        assert!(refused(&|b| _ = b.limit("5".parse().unwrap())).contains("need engine xdp"));
        assert!(refused(&|b| _ = b.deny("10.0.0.0/8".parse().unwrap())).contains("need engine xdp"));
        let by_uring = |b: &mut Builder| _ = b.engine(Engine::Uring).limit("5".parse().unwrap());
        assert!(refused(&by_uring).contains("need engine xdp"));
        assert!(refused(&|b| _ = b.engine(Engine::Xdp).limit_sources(5)).contains("limit_sources 5"));
        assert!(refused(&|b| _ = b.engine(Engine::Xdp).timestamps(true)).contains("timestamps"));
    }
}
