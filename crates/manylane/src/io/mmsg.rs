//! Engine `mmsg`: a kernel socket, with `recvmmsg` and `sendmmsg` on headers that are built once.
//!
//! | stage | who owns the buffer | when it is full or missing |
//! |---|---|---|
//! | the kernel queues | the socket's receive queue (`SO_RCVBUF`) | the kernel drops and counts: `kernel_dropped` |
//! | [`MmsgIo::recv`] | the lane's receive ring | takes at most a batch; the rest stays in the queue |
//! | the application | borrows the ring through the batch | - |
//! | the outbox | the lane's send ring, or borrows of the batch | full: it is flushed |
//! | the kernel sends | the socket's send buffer (`SO_SNDBUF`) | waits for room, at most 100 ms at a time and 1 s in all, then counts `lost_sndbuf_full` |

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use std::{io, thread};

use manylane_sys::busy_poll;
use manylane_sys::control::Ancillary;
use manylane_sys::mmsg::{RecvOptions, RecvRing, SendOptions, SendRing, Wait};
use manylane_sys::sock::{self, Buffer, Flag};

use super::batch::{Batch, Origin};
use super::messages::Messages;
use super::socket_queue::{SocketQueue, TakeMessages};
use super::{Capabilities, Parts, RecvSummary};
use crate::config::{Config, DATAGRAM_SIZE_MAX, Engine};
use crate::counters::Count;
use crate::error::{EACCES, EADDRINUSE, Error, ErrorKind, Result};
use crate::lane_shared::LaneShared;
use crate::port_owner;

/// How a lane's socket shares the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortSharing {
    /// Exclusive use of the port, guaranteed by the kernel.
    Exclusive,
    /// Member of the reuseport group.
    ReusePort,
}

/// Opens and binds the socket of one lane, with every option set before the first datagram can
/// reach it.
pub(crate) fn open(config: &Config, addr: &SocketAddr, join: PortSharing) -> Result<(OwnedFd, Capabilities)> {
    let fd = sock::open(addr).map_err(|err| Error::system("opening a lane's socket", err))?;
    let socket = fd.as_fd();
    let set = |flag: Flag, on: bool| {
        sock::set_flag(socket, flag, on).map_err(|err| Error::system(format!("socket option {flag:?}"), err))
    };
    let v6 = addr.is_ipv6();
    let dual = v6 && !config.only_v6;
    if v6 {
        set(Flag::OnlyV6, config.only_v6)?;
    }
    if addr.ip().is_unspecified() {
        set(if v6 { Flag::PktInfoV6 } else { Flag::PktInfoV4 }, true)?;
    }
    // The kernel delivers multicast to every socket on the port, not to one of the group: each
    // lane would get a copy for every group that any program on the host has joined. With this
    // off, only a lane that joined a group gets its datagrams.
    let multicast_all = if v6 { Flag::MulticastAllV6 } else { Flag::MulticastAllV4 };
    if sock::set_flag(socket, multicast_all, false).is_err() {
        log::debug!("{multicast_all:?} cannot be turned off: multicast would come to every lane");
    }
    if config.ecn {
        if v6 {
            set(Flag::TosV6, true)?;
        }
        if !v6 || dual {
            set(Flag::TosV4, true)?;
        }
    }
    if config.timestamps {
        set(Flag::Timestamp, true)?;
    }
    set_buffer(socket, Buffer::Receive, config.recv_buffer)?;
    set_buffer(socket, Buffer::Send, config.send_buffer)?;
    if let (Engine::Mmsg, Some(time)) = (config.engine, config.wait.busy_poll_time()) {
        let micros = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
        busy_poll::set(socket, micros, busy_poll::BUDGET)
            .map_err(|err| Error::system("SO_BUSY_POLL", err))?;
    }
    let gro = config.gro && sock::set_flag(socket, Flag::Gro, true).is_ok();
    let gso = config.gso && sock::supports_gso(socket);
    if join == PortSharing::ReusePort {
        set(Flag::ReusePort, true)?;
    }
    bind(socket, addr, config.only_v6)?;
    let datagram_size = if gro { DATAGRAM_SIZE_MAX } else { config.datagram_size };
    let timestamps = config.timestamps;
    Ok((fd, Capabilities { batch: config.batch, datagram_size, gro, gso, timestamps }))
}

/// Sets a buffer to the requested size, or returns an error that names the limit.
fn set_buffer(socket: BorrowedFd<'_>, which: Buffer, bytes: Option<usize>) -> Result<()> {
    let Some(bytes) = bytes else { return Ok(()) };
    let (option, sysctl) = match which {
        Buffer::Receive => ("recv_buffer", "net.core.rmem_max"),
        Buffer::Send => ("send_buffer", "net.core.wmem_max"),
    };
    let got = sock::set_buffer(socket, which, bytes).map_err(|err| Error::system(option, err))?;
    if got < bytes {
        let message = format!(
            "{option} {bytes}: this process gets {got} bytes: raise the sysctl {sysctl}, or give it CAP_NET_ADMIN"
        );
        return Err(Error::new(ErrorKind::Limit, message));
    }
    Ok(())
}

/// Binds. Retries while a process that has just ended still has the port.
fn bind(socket: BorrowedFd<'_>, addr: &SocketAddr, only_v6: bool) -> Result<()> {
    let start = Instant::now();
    loop {
        let Err(err) = sock::bind(socket, addr) else { return Ok(()) };
        if err.raw_os_error() != Some(EADDRINUSE) {
            return Err(bind_error(addr, err));
        }
        let holder = port_owner::find_owner(addr, only_v6);
        if !holder.is_exiting || start.elapsed() > port_owner::HANDOVER_TIMEOUT {
            let by = holder.description.map_or_else(String::new, |who| format!(" by {who}"));
            return Err(Error::with(ErrorKind::InUse, format!("{addr} is in use{by}"), err));
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn bind_error(addr: &SocketAddr, err: io::Error) -> Error {
    match err.raw_os_error() {
        Some(EACCES) => {
            let advice = "ports below net.ipv4.ip_unprivileged_port_start need CAP_NET_BIND_SERVICE";
            Error::with(ErrorKind::Permission, format!("binding {addr}: {advice}"), err)
        }
        _ => Error::system(format!("binding {addr}"), err),
    }
}

/// True if the kernel adds control messages to the messages of a socket.
pub(crate) fn needs_ancillary(config: &Config, addr: &SocketAddr, can: Capabilities) -> bool {
    can.gro || config.ecn || config.timestamps || addr.ip().is_unspecified()
}

/// Maximum number of receives with which a closing lane discards its queue.
const DISCARD_BUDGET: usize = 1 << 14;

/// One lane of engine `mmsg`. An `uring` or `xdp` lane contains one for its kernel socket.
pub(crate) struct MmsgIo {
    pub(super) queue: SocketQueue,
    recv: MmsgRecv,
    send: SendRing,
    /// The current receive timeout of the socket.
    timeout: Option<Duration>,
}

/// Headers and buffers for `recvmmsg`.
struct MmsgRecv {
    ring: RecvRing,
    /// Ancillary data of each message of the last batch; stale for messages without control
    /// messages.
    ancillary: Box<[Ancillary]>,
}

impl TakeMessages for MmsgRecv {
    #[inline]
    fn take(&mut self, lane: &LaneShared, wait: Option<Duration>) -> io::Result<RecvSummary> {
        let wait = if wait.is_some() { Wait::First } else { Wait::Never };
        let messages = self.ring.recv(lane.fd.as_fd(), wait)?;
        Ok(Messages::Mmsg(&self.ring).parse_ancillary(messages, &mut self.ancillary))
    }

    fn held(&self) -> usize {
        0
    }
}

impl MmsgIo {
    pub(super) fn new(
        config: &Config,
        addr: &SocketAddr,
        can: Capabilities,
        queue: SocketQueue,
    ) -> Result<Self> {
        let control = needs_ancillary(config, addr, can);
        // One byte more than the largest datagram, so that only a larger one counts as truncated.
        let options = RecvOptions { batch: can.batch, buffer: can.datagram_size, control };
        let memory = |err| Error::system("buffers of a lane", err);
        let ring = RecvRing::new(options).map_err(memory)?;
        let ancillary = vec![Ancillary::default(); if control { can.batch } else { 0 }].into();
        let send = SendRing::new(SendOptions { batch: can.batch, gso: can.gso }).map_err(memory)?;
        Ok(Self { queue, recv: MmsgRecv { ring, ancillary }, send, timeout: None })
    }

    /// Receives a batch of queued datagrams.
    #[inline]
    pub(super) fn recv(&mut self) -> Result<RecvSummary> {
        self.queue.recv(&mut self.recv, None).map_err(|err| self.queue.recv_error(err))
    }

    /// Blocks in the receive for at most `timeout`. May return up to a quarter early:
    /// `SO_RCVTIMEO` is kept while it is within a quarter of the wanted value, to save the system
    /// call.
    pub(super) fn sleep(&mut self, timeout: Duration) -> Result<RecvSummary> {
        self.queue.lane.cells.add(Count::Sleeps, 1);
        if !self.timeout.is_some_and(|set| set <= timeout && set >= timeout - timeout / 4) {
            // Zero, which is what less than 1 µs rounds to, would block for ever.
            let bound = timeout.max(Duration::from_micros(1));
            sock::set_recv_timeout(self.fd(), bound).map_err(|err| Error::system("receive timeout", err))?;
            self.timeout = Some(timeout);
        }
        self.queue.recv(&mut self.recv, Some(timeout)).map_err(|err| self.queue.recv_error(err))
    }

    /// Sleeps for a short time with microsecond precision.
    pub(super) fn sleep_precise(&mut self, time: Duration) -> Result<RecvSummary> {
        self.queue.lane.cells.add(Count::Sleeps, 1);
        sock::wait_readable(self.fd(), time);
        self.recv()
    }

    /// The last batch, and the ring to send replies with.
    #[inline]
    pub(super) fn split<'a>(&'a mut self, taken: RecvSummary, bound: &'a SocketAddr) -> Parts<'a> {
        let origin = Origin::Messages(Messages::Mmsg(&self.recv.ring), &self.recv.ancillary);
        Parts { batch: Batch::new(origin, bound, taken), socket: self.send.batch(), xdp: None }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.queue.lane.fd.as_fd()
    }

    /// Datagrams that the socket's buffer can take during a delay.
    pub(super) fn recv_capacity(&self) -> usize {
        self.queue.capacity()
    }

    /// Upper bound of the messages in the socket's queue.
    pub(super) fn queued_max(&self) -> usize {
        self.queue.queued_max()
    }

    /// Discards and counts what is still queued.
    pub(super) fn discard(&mut self) {
        for _ in 0..DISCARD_BUDGET {
            match self.recv.take(&self.queue.lane, None) {
                Ok(taken) if taken.messages > 0 => {
                    self.queue.lane.cells.add(Count::Discarded, taken.datagrams as u64);
                }
                _ => return,
            }
        }
    }
}
