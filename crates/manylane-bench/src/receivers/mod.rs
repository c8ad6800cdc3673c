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
pub(crate) mod xsk_checked;
pub(crate) mod xsk_raw;

#[cfg(test)]
mod tests;

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Result;
use manylane::{Engine, Handle, Steering, WaitPolicy};

use self::xsk_checked::Checked;
use self::xsk_raw::Unchecked;
use crate::work::SyntheticWork;

/// The receivers by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// One socket, shared by all threads, one `recvfrom` a datagram: what most programs do.
    SocketRecvfrom,
    /// One socket, shared by all threads, `recvmmsg` of up to a batch.
    SocketRecvmmsg,
    /// A socket for each thread by `SO_REUSEPORT`, `recvmmsg` of up to a batch.
    ReuseportRecvmmsg,
    /// The same with `UDP_GRO`, and buffers for whole GRO messages.
    ReuseportGro,
    /// Ours: lanes of the engine `mmsg`.
    LaneMmsg,
    /// A socket for each thread by `SO_REUSEPORT`, and a multishot receive by io_uring.
    UringPlain,
    /// Ours: lanes of the engine `uring`.
    LaneUring,
    /// A minimal loop over raw AF_XDP rings. Testbed only.
    XskRaw,
    /// The same loop, with the checks that a UDP receiver has to make. Testbed only.
    XskChecked,
    /// Ours: lanes of the engine `xdp`. Testbed only.
    LaneXdp,
}

impl Kind {
    /// All of them, baselines first.
    pub const ALL: [Self; 10] = [
        Self::SocketRecvfrom,
        Self::SocketRecvmmsg,
        Self::ReuseportRecvmmsg,
        Self::ReuseportGro,
        Self::LaneMmsg,
        Self::UringPlain,
        Self::LaneUring,
        Self::XskRaw,
        Self::XskChecked,
        Self::LaneXdp,
    ];

    /// The name in tables, documents and options.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SocketRecvfrom => "socket/recvfrom",
            Self::SocketRecvmmsg => "socket/recvmmsg",
            Self::ReuseportRecvmmsg => "reuseport/recvmmsg",
            Self::ReuseportGro => "reuseport/gro",
            Self::LaneMmsg => "lane/mmsg",
            Self::UringPlain => "uring/plain",
            Self::LaneUring => "lane/uring",
            Self::XskRaw => "xsk/raw",
            Self::XskChecked => "xsk/checked",
            Self::LaneXdp => "lane/xdp",
        }
    }

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
    ///
    /// # Errors
    /// When its sockets or threads cannot be created.
    pub fn start(self, options: &ReceiverOptions) -> Result<Box<dyn RunningReceiver>> {
        match self {
            Self::SocketRecvfrom => recvfrom::start(options),
            Self::SocketRecvmmsg => recvmmsg::start_shared(options),
            Self::ReuseportRecvmmsg => recvmmsg::start_reuseport(options),
            Self::ReuseportGro => recvmmsg::start_gro(options),
            Self::LaneMmsg => lane::start(options, Engine::Mmsg),
            Self::UringPlain => uring::start(options),
            Self::LaneUring => lane::start(options, Engine::Uring),
            Self::XskRaw => xsk_raw::start::<Unchecked>(options),
            Self::XskChecked => xsk_raw::start::<Checked>(options),
            Self::LaneXdp => lane::start(options, Engine::Xdp),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == text)
            .ok_or_else(|| format!("there are {}", Self::ALL.map(Self::name).join(", ")))
    }
}

/// Handling of each datagram, in addition to counting it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Work {
    /// Reads its first byte.
    #[default]
    Count,
    /// Sends it back to its sender.
    Echo,
}

/// Options of all receivers.
#[derive(Debug, Clone)]
pub struct ReceiverOptions {
    /// Address to bind; port 0 for any.
    pub addr: SocketAddr,
    /// What is done with each datagram.
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
    /// Processors that threads are pinned to, in turn; empty for no pinning.
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
    ///
    /// # Errors
    /// When one of its threads failed.
    fn stop(self: Box<Self>) -> Result<Snapshot>;
}

#[cfg(test)]
mod name_tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for kind in Kind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
        }
        assert!("lane/xyz".parse::<Kind>().unwrap_err().contains("reuseport/gro"));
    }
}
