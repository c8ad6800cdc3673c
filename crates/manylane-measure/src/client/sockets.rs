//! The client's own sockets: one per flow, connected.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result};
use manylane_sys::busy_poll::{self, BUDGET_PACKETS};
use manylane_sys::epoll::Epoll;
use manylane_sys::errno::ENOBUFS;
use manylane_sys::sock::{self, Buffer};

use super::payload::PAYLOAD_LEN_MAX;
use super::plan::Plan;
use super::transport::{OnReply, Transport};

/// Number of sockets that one epoll wait reports.
const EPOLL_EVENTS_MAX: usize = 64;
/// Number of flows whose device queue is polled before ready sockets are looked for, with
/// [`Plan::busy_poll`].
const BUSY_POLL_FLOWS: usize = 4;
/// Receive buffer of each flow.
const RECV_BUFFER_BYTES: usize = 1 << 20;

/// A connected socket per flow.
pub(super) struct Sockets {
    to: SocketAddr,
    flows: Vec<UdpSocket>,
    epoll: Epoll,
    buffer: Vec<u8>,
    busy_poll: bool,
    /// The next flow whose device queue is polled.
    next_polled: usize,
    refused: u64,
}

impl Sockets {
    /// Opens the sockets of a plan.
    pub(super) fn open(plan: &Plan) -> Result<Self> {
        let epoll = Epoll::new(EPOLL_EVENTS_MAX).context("cannot watch sockets")?;
        let any: IpAddr = if plan.to.is_ipv4() { [0; 4].into() } else { [0_u16; 8].into() };
        let mut flows = Vec::with_capacity(plan.flows);
        for flow in 0..plan.flows {
            let socket = UdpSocket::bind((plan.from.unwrap_or(any), 0)).with_context(|| {
                format!("cannot open flow {flow} of {}: raise ulimit -n, or lower --flows", plan.flows)
            })?;
            socket.connect(plan.to).with_context(|| format!("cannot reach {}", plan.to))?;
            socket.set_nonblocking(true)?;
            // Replies that overflow this buffer are not losses of the server. The system's limit
            // may be less.
            let _ = sock::set_buffer(socket.as_fd(), Buffer::Receive, RECV_BUFFER_BYTES);
            if plan.busy_poll {
                // No call waits, so that the time does not matter.
                busy_poll::set(socket.as_fd(), 1, BUDGET_PACKETS)
                    .context("cannot poll devices: it needs CAP_NET_ADMIN")?;
            }
            epoll.add(&socket, flow as u64)?;
            flows.push(socket);
        }
        let buffer = vec![0; PAYLOAD_LEN_MAX + 1];
        Ok(Self { to: plan.to, flows, epoll, buffer, busy_poll: plan.busy_poll, next_polled: 0, refused: 0 })
    }

    /// Receives one reply of a flow. If more are queued, the next wait reports the flow again: that
    /// is cheaper than a receive that finds none.
    fn recv_from(&mut self, flow: usize, on_reply: OnReply<'_>) {
        match self.flows[flow].recv(&mut self.buffer) {
            Ok(len) => on_reply(flow, &self.buffer[..len]),
            Err(err) if err.kind() == io::ErrorKind::ConnectionRefused => self.refused += 1,
            // Any other error is transient, or means that no datagram is queued.
            Err(_) => {}
        }
    }
}

impl Transport for Sockets {
    fn send(&mut self, flow: usize, request: &[u8]) -> Result<bool> {
        // ECONNREFUSED here is about an earlier request, and is reported once.
        let mut sent = self.flows[flow].send(request);
        if matches!(&sent, Err(err) if err.kind() == io::ErrorKind::ConnectionRefused) {
            self.refused += 1;
            sent = self.flows[flow].send(request);
        }
        let Err(err) = sent else { return Ok(true) };
        let passing =
            [io::ErrorKind::WouldBlock, io::ErrorKind::ConnectionRefused, io::ErrorKind::Interrupted];
        if passing.contains(&err.kind()) || err.raw_os_error() == Some(ENOBUFS) {
            return Ok(false);
        }
        Err(err).with_context(|| format!("cannot send {} bytes to {}", request.len(), self.to))
    }

    fn recv(&mut self, wait: Duration, on_reply: OnReply<'_>) -> Result<usize> {
        for _ in 0..if self.busy_poll { BUSY_POLL_FLOWS } else { 0 } {
            // A receive polls the device queue by which the flow's last reply came.
            self.recv_from(self.next_polled, on_reply);
            self.next_polled = (self.next_polled + 1) % self.flows.len();
        }
        let ready: Vec<u64> = self.epoll.wait(wait).context("cannot wait for replies")?.collect();
        ready.iter().for_each(|flow| self.recv_from(*flow as usize, on_reply));
        Ok(ready.len())
    }

    fn refused(&self) -> u64 {
        self.refused
    }
}
