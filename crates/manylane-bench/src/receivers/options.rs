//! Options of a receiver.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use manylane::{Steering, WaitPolicy};
use manylane_sys::sock::{self, Buffer};

use crate::work::SyntheticWork;

/// Handling of each datagram, in addition to counting it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Reads its first byte.
    Count,
    /// Sends it back to its sender.
    Echo,
}

/// Options of all receivers.
#[derive(Debug, Clone)]
pub struct ReceiverOptions {
    /// Address to bind; port 0 for any.
    pub addr: SocketAddr,
    /// Work per datagram.
    pub work: Work,
    /// Simulated work of the application for each datagram, between receive and reply.
    pub synthetic_work: SyntheticWork,
    /// Threads that receive.
    pub threads: usize,
    /// Maximum number of datagrams of one call.
    pub batch: usize,
    /// Receive buffer of each socket in bytes; 0 leaves the system's default.
    pub recv_buffer: usize,
    /// Largest payload that will arrive.
    pub size: usize,
    /// CPUs that threads are pinned to, in turn; empty for no pinning.
    pub cpus: Vec<usize>,
    /// Delay of lanes and `reuseport/*` after a batch that was not full, for all the same. None:
    /// that of lanes follows the load, and others do not delay.
    pub rx_coalesce: Option<Duration>,
    /// The devices that the traffic arrives on, if there are any to receive frames from.
    pub devices: Vec<String>,
    /// Entries of the rings of each queue, for receivers of frames.
    pub ring: u32,
    /// Wait policy of lanes and `socket/recvfrom`; all others sleep.
    pub wait: WaitPolicy,
    /// Steering of the lanes. Baselines have the kernel's hash.
    pub steering: Steering,
}

impl ReceiverOptions {
    /// Counting receivers at `addr` with the usual batch and buffers, which are not pinned, sleep,
    /// and do not delay.
    #[must_use]
    pub fn new(addr: SocketAddr, threads: usize, size: usize) -> Self {
        Self {
            addr,
            work: Work::Count,
            synthetic_work: SyntheticWork::default(),
            threads,
            batch: 64,
            recv_buffer: default_recv_buffer(),
            size,
            cpus: Vec::new(),
            rx_coalesce: None,
            devices: Vec::new(),
            ring: RING_SIZE,
            wait: WaitPolicy::Sleep,
            steering: Steering::Flow,
        }
    }

    /// The delay of receivers that do not follow the load.
    pub(crate) fn fixed_delay(&self) -> Duration {
        self.rx_coalesce.unwrap_or_default()
    }
}

/// Buffer size in bytes for single datagrams: half a page, more for larger datagrams.
pub(crate) const BUF_SIZE_MIN: usize = 2048;

/// Entries of the rings of each queue, of all receivers with rings: the maximum of lanes. A
/// hypervisor may take a CPU away for longer than a quarter of them lasts, and kernel sockets
/// have large queues, too.
pub const RING_SIZE: u32 = 16_384;

/// Default receive buffer of each socket: 64 MiB, or the maximum of this process.
///
/// On a shared machine the receivers stop for tens of milliseconds now and then, while the
/// hypervisor runs other guests. Only with a queue that outlasts this does a loss mean that the
/// receiver is too slow.
#[must_use]
pub fn default_recv_buffer() -> usize {
    const RECV_BUFFER_BYTES_MAX: usize = 64 << 20;
    let socket = std::net::UdpSocket::bind(("127.0.0.1", 0));
    let got =
        socket.and_then(|socket| sock::set_buffer(socket.as_fd(), Buffer::Receive, RECV_BUFFER_BYTES_MAX));
    got.map_or(0, |bytes| bytes.min(RECV_BUFFER_BYTES_MAX))
}
