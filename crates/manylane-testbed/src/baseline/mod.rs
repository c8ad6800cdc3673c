//! The receivers that lanes are measured against, and the lanes behind the same interface.
//!
//! Each is a good hand-written receiver for the same job: no needless system call, no shared
//! counter, the same batch, the same receive buffer, the same pinning. All read the first byte of
//! each payload, so that all pay for accessing the datagram's memory.

mod lane;
mod recvfrom;
pub(crate) mod recvmmsg;
mod uring;
mod workers;
pub(crate) mod xsk_checked;
pub(crate) mod xsk_raw;

#[cfg(test)]
mod tests;

use anyhow::Result;
use manylane::Engine;

use self::xsk_checked::Checked;
use self::xsk_raw::Unchecked;
use crate::receiver::{Kind, ReceiverOptions, RunningReceiver};

impl Kind {
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
