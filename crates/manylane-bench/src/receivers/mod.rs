//! The receivers that benchmarks compare: the baselines, and the lanes behind the same interface.
//!
//! Each is a good hand-written receiver for the same job: no needless system call, no shared
//! counter, the same batch, the same receive buffer, the same pinning. All read the first byte of
//! each payload, so that all pay for accessing the datagram's memory.

mod delay;
mod lane;
mod options;
mod recvfrom;
mod recvmmsg;
mod running;
mod uring;
mod workers;
pub(crate) mod xsk;

#[cfg(test)]
mod tests;

use anyhow::Result;
use manylane::Engine;
use manylane_measure::named_enum;

pub use self::delay::fixed_delay;
pub(crate) use self::options::BUF_SIZE_MIN;
pub use self::options::{RING_SIZE, ReceiverOptions, Work, default_recv_buffer};
pub use self::running::{RunningReceiver, Snapshot};
use self::xsk::{Checked, Unchecked};

named_enum! {
    /// The receivers by name.
    pub enum Kind {
        /// One socket, shared by all threads, one `recvfrom` a datagram: what most programs do.
        SocketRecvfrom = "socket/recvfrom",
        /// The same with a queue for each processor by the kernel module.
        ModuleRecvfrom = "module/recvfrom",
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

    /// True if it needs the kernel module (`kernel/`).
    pub const fn needs_module(self) -> bool {
        matches!(self, Self::ModuleRecvfrom)
    }

    /// Starts the receiver in the network namespace of the calling thread.
    pub fn start(self, options: &ReceiverOptions) -> Result<Box<dyn RunningReceiver>> {
        match self {
            Self::SocketRecvfrom => recvfrom::start(options),
            Self::ModuleRecvfrom => recvfrom::start_on_module(options),
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
