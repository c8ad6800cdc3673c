//! Other buffers while a socket runs: how many messages a receive takes, and how long each may be.
//!
//! A lane that is driven by hand is told by its owner ([`Lane::resize`]). One that serves looks for
//! itself: whoever asks ([`Handle::resize`](crate::Handle::resize)) writes both numbers into one
//! word that all lanes share and nobody else writes, and each lane compares it, once a batch, with
//! what it has.
//!
//! | engine | what happens | what is lost |
//! |---|---|---|
//! | `mmsg` | headers and buffers are built anew; the socket keeps what is queued | nothing |
//! | `uring` | another ring with other buffers takes over, once all that the old one has taken was handed out | nothing |
//! | `xdp` | refused: frames have the size of the rings' | - |
//!
//! If there is no memory, a lane goes on with what it has.

use std::sync::atomic::{AtomicU64, Ordering};

use manylane_sys::rx_coalesce::RxCoalesce;

use crate::config::{BATCH_MAX, DATAGRAM_SIZE_MAX, Engine, check_range};
use crate::error::{Error, ErrorKind, Result};
use crate::io::Capabilities;
use crate::lane::Lane;

/// Messages in a batch, and bytes of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    batch: usize,
    datagram_size: usize,
}

impl Sizes {
    pub(crate) fn checked(engine: Engine, batch: usize, datagram_size: usize) -> Result<Self> {
        if engine == Engine::Xdp {
            let message = "engine xdp has frames of one size: open the socket with another batch or xdp_ring";
            return Err(Error::new(ErrorKind::Config, message));
        }
        Ok(Self {
            batch: check_range("batch", batch, BATCH_MAX)?,
            datagram_size: check_range("datagram_size", datagram_size, DATAGRAM_SIZE_MAX)?,
        })
    }

    /// What a lane with these sizes can do. Trains need room for the largest.
    fn apply_to(self, can: Capabilities) -> Capabilities {
        let datagram_size = if can.gro { DATAGRAM_SIZE_MAX } else { self.datagram_size };
        Capabilities { batch: self.batch, datagram_size, ..can }
    }
}

/// The sizes that lanes shall have; at first those that they were opened with.
#[derive(Debug, Default)]
pub(crate) struct RequestedSizes(AtomicU64);

impl RequestedSizes {
    pub(crate) fn set(&self, sizes: Sizes) {
        self.0.store((sizes.batch as u64) << 32 | sizes.datagram_size as u64, Ordering::Relaxed);
    }

    pub(crate) fn sizes(&self) -> Option<Sizes> {
        let word = self.0.load(Ordering::Relaxed);
        (word != 0).then_some(Sizes { batch: (word >> 32) as usize, datagram_size: word as u32 as usize })
    }
}

impl Lane {
    /// Has other buffers from the next receive on: for batches of `batch` messages, 1 to 1024, of
    /// up to `datagram_size` bytes each. With GRO every buffer has room for a train, whatever the
    /// size. What has arrived stays, and comes.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] for sizes that cannot be, and with engine `xdp`, whose frames have one
    /// size; an error of the system where a limit of memory is in the way: the lane is then as it
    /// was.
    pub fn resize(&mut self, batch: usize, datagram_size: usize) -> Result<()> {
        let sizes = Sizes::checked(self.engine(), batch, datagram_size)?;
        self.rebuild_buffers(sizes.apply_to(self.capabilities()))
    }

    /// Sees to it that the lane has the sizes that are wanted; `coalesce` goes by the size of
    /// batches.
    #[inline]
    pub(crate) fn update_sizes(&mut self, known: &mut Option<Sizes>, coalesce: &mut RxCoalesce) {
        let wanted = self.requested_sizes();
        if wanted != *known {
            *known = wanted;
            self.apply_sizes(coalesce);
        }
    }

    #[cold]
    fn apply_sizes(&mut self, coalesce: &mut RxCoalesce) {
        let Some(sizes) = self.requested_sizes() else { return };
        if let Err(err) = self.rebuild_buffers(sizes.apply_to(self.capabilities())) {
            log::warn!("lane {} keeps its buffers: {err}", self.id());
        }
        *coalesce = self.new_rx_coalesce();
    }
}
