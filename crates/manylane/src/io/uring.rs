//! Engine `uring`: a kernel socket, and a multishot receive by io_uring.
//!
//! A lane of this engine has everything that a lane of engine `mmsg` has, and a ring in place of
//! `recvmmsg`. It sends and parks its socket as a lane of `mmsg` does. The receive is armed once.
//! The kernel then posts a completion for each message, in a buffer that the kernel picks.
//!
//! ```text
//!  socket's queue ─► the lane's call: the kernel fills buffers ─► completions ─► batch (views)
//!        ▲                    │ no buffer: recv_no_buffers                             │
//!        └── the rest stays ──┘                               next call: buffers back ─┘
//! ```
//!
//! | stage | owner of the buffer | when it is full or missing |
//! |---|---|---|
//! | the kernel queues | the socket's receive queue (`SO_RCVBUF`) | the kernel drops and counts: `kernel_dropped` |
//! | a call of the lane's thread | the kernel, which picks a buffer for each message | no buffer: the rest stays in the queue; `recv_no_buffers` |
//! | [`UringIo::recv`] | the lane's batch | takes at most a batch; the next receive takes the rest |
//! | the application | borrows the buffers through the batch | - |
//! | the next receive | the kernel again, all at once | - |
//! | io_uring fails | - | `engine_fallbacks`, and engine `mmsg` for this lane, after the messages that the ring holds were handed out |
//!
//! - **The socket's queue stays the place where datagrams wait.** The kernel takes messages out of
//!   it only within calls of the lane's thread (`IORING_SETUP_DEFER_TASKRUN`), a few dozen at a
//!   time. So drops at the queue, retiring the lane and `recv` by others on the socket work as
//!   with `mmsg`. Messages beyond a batch are handed out by the next receive, and before a ring is
//!   replaced or closed.
//! - **An empty receive is a load from memory.** The kernel sets a flag in the ring when a
//!   datagram arrives (`IORING_SETUP_TASKRUN_FLAG`). The lane makes a system call only if that
//!   flag is set, or to sleep.
//! - **Readiness** ([`AsFd`] of the lane) is an epoll with two members, the socket and the ring,
//!   because a ring does not report work that it has deferred. Both are added when the descriptor
//!   is first asked for.
//! - **Replies leave by `sendmmsg`**, with GSO, one call for a batch. A ring would need an entry
//!   for each message, and would save no call.
//! - **No bundles** (`IORING_RECVSEND_BUNDLE`, Linux 6.10): the kernel refuses them for `recvmsg`
//!   and `sendmsg`, and `recv` would not report the sender.
//!
//! # When the port is free
//!
//! A receive that is armed holds the socket. The thread that armed it can cancel it; another
//! thread that drops the lane cannot. Then the kernel ends the receive when that thread ends, or
//! when it tears down the ring, some time after the ring was closed. So when the last lane of such
//! a socket is dropped, the drop waits until `/proc/net/udp` no longer lists the socket
//! ([`orphaned_sockets`](super::orphaned_sockets)). The port is free when the last lane is gone,
//! whichever thread dropped it.
//!
//! # Memory
//!
//! [`MULTISHOT_BATCH_MAX`] buffers more than a batch, rounded up to a power of two. Each holds one
//! datagram, or with GRO one message of up to 64 KiB. Only pages that the kernel writes to take
//! memory.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use std::{fs, io, thread};

use manylane_sys::control::Ancillary;
use manylane_sys::epoll::Epoll;
use manylane_sys::errno::EPERM;
use manylane_sys::padded::PaddedSlice;
use manylane_sys::uring::{UringOptions, UringRecv};

use super::batch::{Batch, Origin};
use super::kernel_socket::needs_ancillary;
use super::lane_io::LaneIo;
use super::messages::Messages;
use super::mmsg::MmsgIo;
use super::orphaned_sockets::OrphanedSockets;
use super::socket_queue::RecvMessages;
use super::{Capabilities, EngineShared, NewLane, RecvSummary, Replies};
use crate::config::Config;
use crate::counters::{Cells, Count};
use crate::error::{Error, Result};
use crate::lane_shared::LaneShared;

/// Maximum number of messages of a batch. Their buffers are in the cache when they are read: with
/// 1000, a message takes 1.3 times as long (docs/results/2026-11-27-sustained-linux-6.18-2cpu).
pub(super) const BATCH_MAX: usize = 128;

/// Upper bound of the messages that the kernel takes from a socket at a time
/// (`MULTISHOT_MAX_RETRY`). With this many buffers more than a batch there is always a free one.
pub(crate) const MULTISHOT_BATCH_MAX: usize = 64;

/// Time limit of the loopback trial.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// The sysctl that restricts io_uring (Linux 6.6).
const SYSCTL: &str = "/proc/sys/kernel/io_uring_disabled";

/// Epoll tokens of the ring and of the socket.
const RING: u64 = 1;
const SOCKET: u64 = 2;

/// Engine `uring` of a socket.
#[derive(Default)]
pub(super) struct UringEngine(Mutex<Weak<OrphanedSockets>>);

impl EngineShared for UringEngine {}

/// One lane of engine `uring`.
pub(crate) struct UringIo {
    /// The ring; none once io_uring has failed.
    ring: Option<UringRing>,
    /// Sends; also receives after io_uring has failed.
    socket: MmsgIo,
    /// The epoll of a ring that failed after its descriptor was asked for: the lane's descriptor
    /// must stay the same.
    readiness: Option<Epoll>,
    /// Sockets that dropped rings may hold for a moment: has to be the last field.
    orphaned: Arc<OrphanedSockets>,
}

/// The ring of one lane.
struct UringRing {
    recv: UringRecv,
    /// Ancillary data of each message of the last batch; stale for messages without control
    /// messages.
    ancillary: PaddedSlice<Ancillary>,
    /// The last batch is in this ring.
    is_current: bool,
    /// Readable while the socket or the ring has messages. Its members are added when it is first
    /// asked for.
    epoll: Epoll,
    is_registered: AtomicBool,
    /// Buffer shortages and replaced rings that were handled already.
    buffer_shortages: u64,
    ring_replacements: u64,
}

/// Checks that a lane with these options could have a ring.
pub(crate) fn check(config: &Config) -> Result<()> {
    let options = options(config, true);
    run_in_thread(move || UringRecv::new(options).map(drop).map_err(failed))
}

/// Receives a datagram through a ring, as a trial.
pub(crate) fn probe() -> Result<()> {
    run_in_thread(|| {
        let options = UringOptions { batch: 1, buffer: 1, buffers: 1, control: false, sqarray: false };
        let mut recv = UringRecv::new(options).map_err(failed)?;
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
        let sent = socket.local_addr().and_then(|addr| socket.send_to(b"x", addr));
        // It has arrived already.
        match sent.and_then(|_| recv.recv(socket.as_fd(), Some(PROBE_TIMEOUT))).map_err(failed)? {
            0 => Err(failed(io::ErrorKind::TimedOut.into())),
            _ => Ok(()),
        }
    })
}

/// Runs `work` with rings on a thread of its own, where they are closed too. A ring that is closed
/// may interrupt a later call of the thread that made it (EINTR, in calls with a time limit), and
/// that must not happen to a call of the program.
pub(crate) fn run_in_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let thread = thread::Builder::new().name("manylane-uring".into()).spawn(work);
    let thread = thread.map_err(|err| Error::system("starting a thread to try io_uring", err))?;
    thread.join().unwrap_or_else(|_| Err(failed(io::Error::other("the thread that tried it panicked"))))
}

fn options(config: &Config, control: bool) -> UringOptions {
    UringOptions {
        batch: config.batch,
        buffer: config.datagram_size,
        buffers: config.batch + MULTISHOT_BATCH_MAX,
        control,
        sqarray: false,
    }
}

/// Adds the likely reason to an error of io_uring.
fn failed(err: io::Error) -> Error {
    let what = match err.raw_os_error() {
        Some(EPERM) => format!("io_uring: {}", forbidden_by(&fs::read_to_string(SYSCTL).unwrap_or_default())),
        _ => "io_uring (Linux 6.1)".to_owned(),
    };
    Error::system(what, err)
}

/// Returns the reason why io_uring is forbidden, given the value `set` of the sysctl.
fn forbidden_by(set: &str) -> String {
    match set.trim() {
        "" | "0" => "forbidden by a seccomp filter (usual in containers)".to_owned(),
        // 1: for processes without CAP_SYS_ADMIN that are not in the group kernel.io_uring_group;
        // 2: for all (Linux 6.6).
        set => format!("forbidden by the sysctl kernel.io_uring_disabled ({set})"),
    }
}

impl UringIo {
    pub(super) fn new(engine: &UringEngine, new: NewLane<'_>) -> Result<Self> {
        let orphaned = OrphanedSockets::of_lanes(&engine.0);
        let ring = Some(UringRing::new(new.config, new.caps)?);
        Ok(Self { ring, socket: MmsgIo::new(new)?, readiness: None, orphaned })
    }

    #[inline]
    fn recv_within(&mut self, wait: Option<Duration>) -> Result<RecvSummary> {
        let Some(ring) = &mut self.ring else { return self.socket.recv() };
        match self.socket.queue.recv(ring, wait) {
            Err(err) if ring.recv.is_broken() => {
                self.give_up(&err);
                self.socket.recv()
            }
            received => received.map_err(|err| self.socket.queue.recv_error(err)),
        }
    }

    /// Falls back to the socket after io_uring has failed. All messages in the ring have been
    /// returned.
    #[cold]
    fn give_up(&mut self, err: &io::Error) {
        let lane = &self.socket.queue.lane;
        log::warn!("lane {}: io_uring failed, using engine mmsg from now on: {err}", lane.id);
        lane.cells.add(Count::EngineFallbacks, 1);
        if let Some(mut ring) = self.ring.take() {
            ring.recv.stop();
            if ring.recv.is_socket_pinned() {
                self.orphaned.add(lane.fd.as_fd());
            }
            self.readiness = ring.into_readiness();
        }
    }

    /// See [`Io::split`](super::Io::split).
    #[inline]
    pub(super) fn split<'a>(
        &'a mut self,
        summary: RecvSummary,
        bound: &'a SocketAddr,
    ) -> (Batch<'a>, Replies<'a>) {
        let (batch, replies) = self.socket.split(summary, bound);
        let origin = self.ring.as_ref().and_then(UringRing::origin);
        (origin.map_or(batch, |origin| Batch::new(origin, bound, summary)), replies)
    }
}

impl LaneIo for UringIo {
    /// Those of the socket: the ring receives whatever the socket delivers.
    fn capabilities(&self) -> Capabilities {
        self.socket.capabilities()
    }

    #[inline]
    fn recv(&mut self) -> Result<RecvSummary> {
        self.recv_within(None)
    }

    fn sleep(&mut self, timeout: Duration) -> Result<RecvSummary> {
        if self.ring.is_none() {
            return self.socket.sleep(timeout);
        }
        self.socket.queue.lane.cells.add(Count::Sleeps, 1);
        self.recv_within(Some(timeout))
    }

    fn sleep_precise(&mut self, time: Duration) -> Result<RecvSummary> {
        if self.ring.is_none() { self.socket.sleep_precise(time) } else { self.sleep(time) }
    }

    fn end_batch(&mut self) {
        if let Some(ring) = &mut self.ring {
            ring.is_current = false;
        }
    }

    fn readiness(&self) -> BorrowedFd<'_> {
        match (&self.ring, &self.readiness) {
            (Some(ring), _) => ring.readiness(self.socket.readiness()),
            (None, Some(readiness)) => readiness.as_fd(),
            (None, None) => self.socket.readiness(),
        }
    }

    fn recv_capacity(&self) -> usize {
        self.socket.recv_capacity()
    }

    fn queued_max(&self) -> usize {
        self.socket.queued_max()
    }

    /// Discards and counts what is still queued, starting with the messages in the ring.
    fn discard(&mut self) {
        if let Some(mut ring) = self.ring.take() {
            let lane = &self.socket.queue.lane;
            ring.recv.stop();
            // Ends when the ring is empty; an error means that it was.
            while let Ok(summary) = ring.recv_batch(lane, None)
                && summary.messages > 0
            {
                lane.cells.add(Count::Discarded, summary.datagrams as u64);
            }
            if ring.recv.is_socket_pinned() {
                self.orphaned.add(lane.fd.as_fd());
            }
        }
        self.socket.discard();
    }
}

impl RecvMessages for UringRing {
    /// Receives a batch, and parses its ancillary data.
    #[inline]
    fn recv_batch(&mut self, lane: &LaneShared, wait: Option<Duration>) -> io::Result<RecvSummary> {
        self.is_current = false;
        let messages = self.recv.recv(lane.fd.as_fd(), wait)?;
        if self.recv.buffer_shortages() != self.buffer_shortages
            || self.recv.ring_replacements() != self.ring_replacements
        {
            self.adapt(&lane.cells);
        }
        self.is_current = messages > 0;
        Ok(Messages::Uring(&self.recv).parse_ancillary(messages, &mut self.ancillary))
    }

    #[inline]
    fn messages(&self) -> Messages<'_> {
        Messages::Uring(&self.recv)
    }

    fn held(&self) -> usize {
        self.recv.pending()
    }
}

impl UringRing {
    fn new(config: &Config, caps: Capabilities) -> Result<Self> {
        let control = needs_ancillary(config, caps, &config.addr);
        let options = UringOptions { buffer: caps.datagram_size, ..options(config, control) };
        let mut recv = UringRecv::new(options).map_err(failed)?;
        if let Some(time) = config.wait.busy_poll_time() {
            let micros = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
            recv.set_busy_poll(micros).map_err(|err| Error::system("IORING_REGISTER_NAPI", err))?;
        }
        let watch =
            Epoll::new(2).map_err(|err| Error::system("creating an epoll instance for a lane", err))?;
        let ancillary = PaddedSlice::new(Ancillary::default(), if control { config.batch } else { 0 });
        let is_watched = AtomicBool::new(false);
        Ok(Self {
            recv,
            ancillary,
            is_current: false,
            epoll: watch,
            is_registered: is_watched,
            buffer_shortages: 0,
            ring_replacements: 0,
        })
    }

    /// Counts shortages of buffers, and watches a ring that replaced another.
    #[cold]
    fn adapt(&mut self, cells: &Cells) {
        let short = self.recv.buffer_shortages() - self.buffer_shortages;
        self.buffer_shortages += short;
        cells.add(Count::RecvNoBuffers, short);
        if self.recv.ring_replacements() != self.ring_replacements {
            self.ring_replacements = self.recv.ring_replacements();
            if *self.is_registered.get_mut() {
                self.register(RING, self.recv.as_fd());
            }
        }
    }

    /// The last batch, if it is in this ring.
    fn origin(&self) -> Option<Origin<'_>> {
        self.is_current.then_some(Origin::Messages(Messages::Uring(&self.recv), &self.ancillary))
    }

    /// A descriptor that is readable while [`recv`](Self::recv) has work.
    fn readiness(&self, socket: BorrowedFd<'_>) -> BorrowedFd<'_> {
        if !self.is_registered.swap(true, Ordering::Relaxed) {
            self.register(RING, self.recv.as_fd());
            self.register(SOCKET, socket);
        }
        self.epoll.as_fd()
    }

    /// Drops the ring, but keeps its epoll if that was asked for. An event loop may wait on it;
    /// from here on it reports the socket alone.
    fn into_readiness(self) -> Option<Epoll> {
        if !self.is_registered.into_inner() {
            return None;
        }
        // Closing the ring would remove it too, but the kernel may take a moment.
        _ = self.epoll.remove(&self.recv.as_fd());
        Some(self.epoll)
    }

    fn register(&self, token: u64, fd: BorrowedFd<'_>) {
        if let Err(err) = self.epoll.add(&fd, token) {
            log::warn!("a lane's descriptor does not become readable: {err}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::skip;

    #[test]
    fn the_forbidding_policy_is_named() {
        for set in ["", "0\n"] {
            assert!(forbidden_by(set).contains("seccomp"), "{set:?}");
        }
        for set in ["1\n", "2\n"] {
            let text = forbidden_by(set);
            let value = format!("kernel.io_uring_disabled ({})", set.trim());
            assert!(text.ends_with(&value), "{text}");
        }
    }

    /// The kernel does not promise how many messages it takes at a time, so that a lane may run out
    /// of buffers.
    #[test]
    fn loopback_buffer_shortages_are_counted_without_loss() {
        if !skip::need_uring("loopback_buffer_shortages_are_counted_without_loss") {
            return;
        }
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let lane = LaneShared::of_socket(&socket);
        let options = UringOptions { batch: 16, buffer: 64, buffers: 1, control: false, sqarray: false };
        let mut ring = UringRing {
            recv: UringRecv::new(options).unwrap(),
            ancillary: PaddedSlice::default(),
            is_current: false,
            epoll: Epoll::new(2).unwrap(),
            is_registered: AtomicBool::new(false),
            buffer_shortages: 0,
            ring_replacements: 0,
        };
        (0..60).for_each(|_| _ = socket.send_to(b"x", socket.local_addr().unwrap()).unwrap());
        let mut received = 0;
        while received < 60 {
            let summary = ring.recv_batch(&lane, None).unwrap();
            assert_ne!(summary.messages, 0, "lost after {received}");
            received += summary.messages;
        }
        assert_eq!(received, 60);
        let counted = lane.counters().recv_no_buffers;
        assert!(counted > 0 && counted == ring.recv.buffer_shortages(), "{counted}");
    }
}
