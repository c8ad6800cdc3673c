//! The receivers that benchmarks compare: the baselines, and the lanes behind the same interface.
//!
//! Each is a good hand-written receiver for the same job: no needless system call, no shared
//! counter, the same batch, the same receive buffer, the same pinning. All read the first byte of
//! each payload, so that all pay for accessing the datagram's memory.

mod lane;
mod recvfrom;
mod recvmmsg;
mod uring;
mod workers;
pub(crate) mod xsk;

#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::Result;
use manylane::{Engine, Handle, Steering, WaitPolicy};
use manylane_measure::named_enum;
use manylane_sys::sock::{self, Buffer};

use self::xsk::{Checked, Unchecked};
use crate::work::SyntheticWork;

named_enum! {
    /// The receivers by name.
    pub enum Kind {
        /// One socket, shared by all threads, one `recvfrom` a datagram: what most programs do.
        SocketRecvfrom = "socket/recvfrom",
        /// One socket, shared by all threads, `recvmmsg` of up to a batch.
        SocketRecvmmsg = "socket/recvmmsg",
        /// A socket for each thread by `SO_REUSEPORT`, `recvmmsg` of up to a batch.
        ReuseportRecvmmsg = "reuseport/recvmmsg",
        /// The same with `UDP_GRO`, and buffers for whole GRO messages.
        ReuseportGro = "reuseport/gro",
        /// Ours: lanes of the engine `mmsg`.
        LaneMmsg = "lane/mmsg",
        /// A socket for each thread by `SO_REUSEPORT`, and a multishot receive by io_uring.
        UringPlain = "uring/plain",
        /// Ours: lanes of the engine `uring`.
        LaneUring = "lane/uring",
        /// A minimal loop over raw AF_XDP rings. Testbed only.
        XskRaw = "xsk/raw",
        /// The same loop, with the checks that a UDP receiver has to make. Testbed only.
        XskChecked = "xsk/checked",
        /// Ours: lanes of the engine `xdp`. Testbed only.
        LaneXdp = "lane/xdp",
    }
}

impl Kind {
    /// True for lanes, false for baselines.
    pub const fn is_lane(self) -> bool {
        matches!(self, Self::LaneMmsg | Self::LaneUring | Self::LaneXdp)
    }

    /// Number of receive queues with `threads` threads.
    pub const fn lanes(self, threads: usize) -> usize {
        match self {
            Self::SocketRecvfrom | Self::SocketRecvmmsg => 1,
            _ => threads,
        }
    }

    /// True if it receives frames from a device, which loopback does not have.
    pub const fn needs_device(self) -> bool {
        matches!(self, Self::XskRaw | Self::XskChecked | Self::LaneXdp)
    }

    /// True if it receives by io_uring, which may be missing or forbidden.
    pub const fn needs_uring(self) -> bool {
        matches!(self, Self::UringPlain | Self::LaneUring)
    }

    /// Starts the receiver in the network namespace of the calling thread.
    pub fn start(self, options: &ReceiverOptions) -> Result<Box<dyn RunningReceiver>> {
        match self {
            Self::SocketRecvfrom => recvfrom::start(options),
            Self::SocketRecvmmsg => recvmmsg::start(options, 1),
            Self::ReuseportRecvmmsg => recvmmsg::start(options, options.threads),
            Self::ReuseportGro => recvmmsg::start_gro(options),
            Self::LaneMmsg => lane::start(options, Engine::Mmsg),
            Self::UringPlain => uring::start(options),
            Self::LaneUring => lane::start(options, Engine::Uring),
            Self::XskRaw => xsk::start::<Unchecked>(options),
            Self::XskChecked => xsk::start::<Checked>(options),
            Self::LaneXdp => lane::start(options, Engine::Xdp),
        }
    }
}

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
    /// Delay of lanes and `reuseport/*` after a batch that was not full; zero for none.
    pub rx_coalesce: Duration,
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
            rx_coalesce: Duration::ZERO,
            devices: Vec::new(),
            ring: RING_SIZE,
            wait: WaitPolicy::Sleep,
            steering: Steering::Flow,
        }
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

/// Counters of a receiver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Datagrams that reached the application since the start.
    pub delivered: u64,
    /// Datagrams that the kernel dropped at the receiver's sockets since the start.
    pub kernel_dropped: u64,
    /// CPU time of the receiving threads since their start.
    pub rx_cpu: Duration,
}

/// A running receiver. It stops when it is dropped.
pub trait RunningReceiver: Send {
    /// The address it listens on.
    fn addr(&self) -> SocketAddr;

    /// Its counters, read without disturbing the receiving threads.
    fn snapshot(&self) -> Snapshot;

    /// The handle of the lanes, for receivers with lanes.
    fn lanes(&self) -> Option<Handle> {
        None
    }

    /// Stops it and returns its final counters.
    fn stop(self: Box<Self>) -> Result<Snapshot>;
}
