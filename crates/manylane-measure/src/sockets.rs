//! The portable sender: one connected socket for each flow, `sendmmsg(2)`, and UDP GSO on request.
//! It runs in the network namespace of the calling thread.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use manylane_sys::errno::ENOBUFS;
use manylane_sys::send_burst::{self, SendBurst};
use manylane_sys::{sock, tick};

use crate::pacer::{Due, Pacer};
use crate::{Sent, Traffic, Until};

/// Messages of one system call.
const MESSAGES_PER_CALL: usize = 64;
/// The same with GSO, where each message has many datagrams: about a thousand datagrams.
const GSO_MESSAGES_PER_CALL: usize = 16;
/// The longest sleep, and so the latency of a stop.
const SLEEP_MAX: Duration = Duration::from_millis(50);

/// Sends `traffic` on the calling thread.
///
/// Datagrams that the socket rejects for now (no buffers, link down, no route) are counted in
/// [`Sent::rejected`], and the sender continues. It is not an error either if no socket listens at
/// the target.
///
/// # Errors
/// Fails if sockets cannot be created, or the datagram is too large.
#[allow(clippy::needless_pass_by_value, reason = "an order is used once")]
pub fn send(traffic: &Traffic, until: Until) -> Result<Sent> {
    Flows::open(traffic)?.send(traffic.pps, &until)
}

/// Sockets to send from, one for each flow, all to one target.
#[derive(Debug)]
pub struct Flows {
    sockets: Vec<UdpSocket>,
    send_burst: SendBurst,
    /// Without a rate, GSO messages have full length.
    gso: bool,
}

impl Flows {
    /// Opens the flows of `traffic`; its rate is ignored.
    ///
    /// # Errors
    /// As [`send`].
    pub fn open(traffic: &Traffic) -> Result<Flows> {
        let datagram = traffic.datagram();
        ensure!(traffic.flows > 0, "traffic needs at least one flow");
        let sockets = (0..traffic.flows)
            .map(|_| connect(traffic.target))
            .collect::<Result<Vec<UdpSocket>>>()
            .with_context(|| format!("{} flows need a socket each: raise ulimit -n", traffic.flows))?;
        // An empty datagram gives a message of one datagram only.
        if traffic.gso && !datagram.is_empty() {
            let size = u16::try_from(datagram.len()).context("a datagram has at most 65507 bytes")?;
            for socket in &sockets {
                send_burst::set_segment_size(socket.as_fd(), size).context("UDP GSO needs Linux 4.18")?;
            }
        }
        let messages = if traffic.gso { GSO_MESSAGES_PER_CALL } else { MESSAGES_PER_CALL };
        let send_burst = SendBurst::new(&datagram, messages, traffic.gso);
        Ok(Flows { sockets, send_burst, gso: traffic.gso })
    }

    /// From here on, datagrams to the flows are dropped and counted, at the lowest possible cost.
    ///
    /// # Errors
    /// Fails with the kernel's error.
    pub fn drop_replies(&self) -> Result<()> {
        let refuse = |socket: &UdpSocket| sock::drop_all_incoming(socket.as_fd());
        self.sockets.iter().try_for_each(refuse).context("attaching a filter to a sender's socket")
    }

    /// Number of dropped datagrams; up to four billion of each flow.
    ///
    /// # Errors
    /// Fails with the kernel's error.
    pub fn reply_count(&self) -> Result<u64> {
        let mut sum = 0;
        for socket in &self.sockets {
            let state = sock::queue_state(socket.as_fd())
                .context("reading the queue of a sender's socket (SO_MEMINFO)")?;
            sum += u64::from(state.drops);
        }
        Ok(sum)
    }

    /// Sends at `pps` on the calling thread.
    ///
    /// # Errors
    /// As [`send`].
    pub fn send(&self, pps: Option<f64>, until: &Until) -> Result<Sent> {
        let Self { sockets, send_burst, gso: segment } = self;
        let pace = Pacer::new(pps, send_burst.capacity() as u64);
        // A burst is divided among the flows, so that they alternate as finely as the rate allows.
        let mut share = (pace.burst() / sockets.len() as u64).max(1);
        if *segment && pps.is_none() {
            share = share.max(send_burst.datagrams_per_message() as u64);
        }
        tick::reduce_timer_slack();
        let start = Instant::now();
        let mut sent = Sent::default();
        let mut socket_index = 0;
        loop {
            let tried = sent.datagrams + sent.rejected;
            let left = until.remaining(tried, start.elapsed());
            if left == 0 {
                break;
            }
            match pace.due(tried, start.elapsed()) {
                Due::In(wait) => thread::sleep(wait.min(SLEEP_MAX)),
                Due::Now { count, late } => {
                    sent.late = sent.late.max(late);
                    let mut burst = count.min(left);
                    while burst > 0 {
                        let part = share.min(burst);
                        send_flow(&sockets[socket_index], send_burst, part, &mut sent)?;
                        socket_index = (socket_index + 1) % sockets.len();
                        burst -= part;
                    }
                }
            }
        }
        sent.elapsed = start.elapsed();
        Ok(sent)
    }
}

/// Sends `count` datagrams of one flow. Each is counted in one of the two counters.
fn send_flow(flow: &UdpSocket, send_burst: &SendBurst, count: u64, sent: &mut Sent) -> Result<()> {
    let mut left = count as usize;
    while left > 0 {
        match send_burst.send(flow.as_fd(), left) {
            Ok(done) => {
                sent.datagrams += done as u64;
                left -= done;
            }
            // The kernel reports here that an earlier datagram found no socket, and has not tried
            // this one. There is at most one report for each sent datagram, so that this ends.
            Err(err) if matches!(err.kind(), ErrorKind::ConnectionRefused | ErrorKind::Interrupted) => {}
            Err(err) if is_transient(&err) => {
                let lost = left.min(send_burst.datagrams_per_message());
                sent.rejected += lost as u64;
                left -= lost;
            }
            Err(err) => return Err(err).context("sending"),
        }
    }
    Ok(())
}

/// True if the socket may accept later what it rejects now.
fn is_transient(err: &std::io::Error) -> bool {
    matches!(
        err.kind(),
        ErrorKind::WouldBlock
            | ErrorKind::NetworkDown
            | ErrorKind::NetworkUnreachable
            | ErrorKind::HostUnreachable
            | ErrorKind::PermissionDenied
    ) || err.raw_os_error() == Some(ENOBUFS)
}

fn connect(target: SocketAddr) -> Result<UdpSocket> {
    let any: SocketAddr = match target {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let socket = UdpSocket::bind(any).context("opening a socket")?;
    socket.connect(target).with_context(|| format!("connecting to {target}"))?;
    Ok(socket)
}
