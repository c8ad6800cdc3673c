//! The features that an engine was granted.

use crate::config::{Config, DATAGRAM_SIZE_MAX};
use crate::lane_shared::Offloads;

/// The features that an engine was granted on a lane, which may be less than the options ask for.
/// Lanes, waits and `serve` do not ask which engine it is; only the selection of the engine, the
/// probe and the command line do. An engine sizes its buffers by the capabilities of its kernel
/// socket, the waits of a lane read `batch`, and `manylane echo` shows `gro` and `gso`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Messages that one call receives or sends.
    pub batch: usize,
    /// Size of the largest datagram that is received whole, in bytes: 65535 if the kernel socket
    /// has GRO, whose messages need such buffers, else as configured. With engine `xdp` that socket
    /// is its companion, so it may be 65535 although `gro` is false.
    pub datagram_size: usize,
    /// GRO: several datagrams may be received as one message. False with engine `xdp`, whose queues
    /// never do so, although its companion still may.
    pub gro: bool,
    /// GSO: consecutive replies may be sent as one message. False with engine `xdp`, whose queues
    /// never do so, although its companion still may. A device can refuse such a message, which
    /// `gso_fallbacks` counts.
    pub gso: bool,
    /// Each datagram has a time stamp of the kernel.
    pub timestamps: bool,
}

impl Capabilities {
    /// Those of a kernel socket that was granted `offloads`. The kernel cannot refuse the others:
    /// without them, the socket does not open.
    pub(crate) fn of(config: &Config, offloads: Offloads) -> Self {
        let Offloads { gro, gso } = offloads;
        let Config { batch, timestamps, .. } = *config;
        let datagram_size = if gro { DATAGRAM_SIZE_MAX } else { config.datagram_size };
        Self { batch, datagram_size, gro, gso, timestamps }
    }

    /// Of each value, the weaker one.
    pub(crate) fn weakest(self, other: Self) -> Self {
        Self {
            batch: self.batch.min(other.batch),
            datagram_size: self.datagram_size.min(other.datagram_size),
            gro: self.gro && other.gro,
            gso: self.gso && other.gso,
            timestamps: self.timestamps && other.timestamps,
        }
    }
}
