//! State of a lane that other threads read: its socket, its counters, its state.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};

use manylane_sys::sock;

use crate::counters::{Cells, LaneCounters, LaneId};
use crate::steer::Slot;

/// Steered to, and open for receiving.
pub(crate) const OPEN: u8 = 0;
/// Being taken out of steering: datagrams may still arrive until the grace period is over.
pub(crate) const RETIRING: u8 = 1;
/// No more datagrams arrive, or the whole socket stops. The lane handles what is queued, then
/// ends.
pub(crate) const DRAINING: u8 = 2;
/// The kernel refuses new datagrams: the lane of a socket that ends.
pub(crate) const SHUT_DOWN: u8 = 3;

/// The options that the kernel granted to a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offloads {
    pub(crate) gro: bool,
    pub(crate) gso: bool,
}

/// The part of a lane that other threads read.
#[derive(Debug)]
pub(crate) struct LaneShared {
    pub(crate) id: LaneId,
    pub(crate) slot: Slot,
    pub(crate) fd: Arc<OwnedFd>,
    pub(crate) offloads: Offloads,
    pub(crate) cpu: Option<usize>,
    pub(crate) cells: Cells,
    pub(crate) state: AtomicU8,
    /// The thread that serves it in `serve`; 0 if there is none.
    pub(crate) tid: AtomicI32,
    /// The kernel's counts when the lane opened, because its socket or slot may have served
    /// another lane before.
    pub(crate) drops_before: u32,
    pub(crate) steered_before: u64,
}

impl LaneShared {
    /// That of a lane in no group, which receives from `socket`.
    #[cfg(test)]
    pub(crate) fn of_socket(socket: &std::net::UdpSocket) -> Self {
        Self {
            id: LaneId(0),
            slot: 0,
            fd: Arc::new(socket.try_clone().unwrap().into()),
            offloads: Offloads { gro: false, gso: false },
            cpu: None,
            cells: Cells::new(),
            state: AtomicU8::new(OPEN),
            tid: AtomicI32::new(0),
            drops_before: 0,
            steered_before: 0,
        }
    }

    /// The lane's counters, including the kernel's drops at its queue.
    pub(crate) fn counters(&self) -> LaneCounters {
        let mut counters = self.cells.read();
        let drops = sock::queue_state(self.fd.as_fd()).map_or(self.drops_before, |state| state.drops);
        counters.kernel_dropped = u64::from(drops.wrapping_sub(self.drops_before));
        counters
    }

    /// The thread that serves it; 0 if there is none.
    pub(crate) fn thread(&self) -> i32 {
        self.tid.load(Ordering::Relaxed)
    }

    /// Steered to.
    pub(crate) fn is_open(&self) -> bool {
        self.state.load(Ordering::Relaxed) == OPEN
    }

    /// True if the lane is to drain its queue and end.
    pub(crate) fn is_draining(&self) -> bool {
        // Acquire: with this state, the flag that the whole socket stops is visible.
        self.state.load(Ordering::Acquire) >= DRAINING
    }
}
