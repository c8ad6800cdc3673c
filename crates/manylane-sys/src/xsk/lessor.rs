//! The lessor's side of a queue: opened, filled, and leased to a few sockets of other processes.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};

use super::leased::{FRAME_SIZE, FRAMES_MAX, Holder, LeasedQueue, QueueParams, memory_size};
use super::open::{OpenError, Step};
use super::options::{Mode, QueueOptions};
use super::socket::{Maps, Socket, bind};
use crate::map::Mapping;
use crate::shared;

/// Maximum number of sockets that share a queue: as many as the frames allow for full RX rings.
pub const QUEUE_MEMBERS_MAX: u32 = 2;
/// Entries of the RX and of the TX ring of each.
const RING_ENTRIES: u32 = 1024;
/// Entries of the fill and of the completion ring, and number of frames to receive into.
const SHARED_RING_ENTRIES: u32 = RING_ENTRIES * QUEUE_MEMBERS_MAX;
/// As many again to send from.
const FRAME_COUNT: u32 = 2 * SHARED_RING_ENTRIES;

const _: () = assert!(FRAME_COUNT as usize <= FRAMES_MAX);

/// Options of a leased queue. Always in copy mode: with zero copy, a driver writes *every* frame
/// of the queue into the memory, before the XDP program has run, and takes the frames for the
/// kernel out of it again. A process with the memory could read and change what all others
/// receive, and one that leaves the fill ring empty would stop the queue.
fn options(ifindex: u32, queue: u32) -> QueueOptions {
    QueueOptions {
        ifindex,
        queue,
        frames: FRAME_COUNT,
        frame_size: FRAME_SIZE,
        ring: RING_ENTRIES,
        tx_ring: RING_ENTRIES,
        batch: 1,
        mode: Mode::Copy,
        multi_buffer: false,
    }
}

/// A queue that can be leased.
pub struct LessorQueue {
    // Dropped in this order: the socket, then its rings' maps, then the memory.
    umem_socket: Socket,
    _maps: Maps,
    _memory: Mapping,
    file: OwnedFd,
    options: QueueOptions,
    is_virtual_pair: bool,
    is_filled: bool,
}

impl LessorQueue {
    /// Opens a queue of a device.
    ///
    /// # Errors
    /// See [`Step`].
    pub fn open(ifindex: u32, queue: u32, is_virtual_pair: bool) -> Result<Self, OpenError> {
        let failed = |step| move |source| OpenError { step, source };
        let options = options(ifindex, queue);
        let bytes = memory_size(FRAME_COUNT);
        let file = shared::sealed_memfd(c"manylane-frames", bytes).map_err(failed(Step::Memory))?;
        let memory = shared::map_sealed(file.as_fd(), bytes).map_err(failed(Step::Memory))?;
        let anchor = Socket::open().map_err(failed(Step::Socket))?;
        let size = u64::from(FRAME_COUNT) * u64::from(FRAME_SIZE);
        // SAFETY: the memory is zeroed, page aligned, longer than that, and dropped after the
        // socket. Only the holder of a queue's lock reads and writes the frames, as its rings
        // allow (`LeasedQueue`).
        unsafe { anchor.register(memory.as_ptr(), size, FRAME_SIZE) }.map_err(failed(Step::Register))?;
        let shared_rings =
            QueueOptions { ring: SHARED_RING_ENTRIES, tx_ring: SHARED_RING_ENTRIES, ..options };
        let (_, maps) = anchor.umem_rings(&shared_rings).map_err(failed(Step::Rings))?;
        bind(anchor.as_fd(), &options).map_err(failed(Step::Bind))?;
        if anchor.query_zero_copy() {
            let why = "the kernel does not copy packets, although the socket requested it";
            return Err(failed(Step::Bind)(io::Error::new(io::ErrorKind::Unsupported, why)));
        }
        Ok(Self {
            umem_socket: anchor,
            _maps: maps,
            _memory: memory,
            file,
            options,
            is_virtual_pair,
            is_filled: false,
        })
    }

    /// Opens one more socket for the lease with this number. Returns the queue's parameters, and
    /// the socket, to which an XDP program may redirect.
    ///
    /// # Errors
    /// See [`Step`].
    pub fn lease(&mut self, lease: u16) -> Result<(QueueParams, OwnedFd), OpenError> {
        let failed = |step| move |source| OpenError { step, source };
        let mut socket = Socket::open().map_err(failed(Step::Socket))?;
        let rings = socket.member_rings(&self.options).map_err(failed(Step::Rings))?;
        socket.raise_tx_limits(&self.options);
        socket.bind_to(&self.options, self.umem_socket.as_fd()).map_err(failed(Step::Bind))?;
        drop(rings);
        let terms = QueueParams {
            ifindex: self.options.ifindex,
            queue: self.options.queue,
            frames: FRAME_COUNT,
            umem_ring_size: SHARED_RING_ENTRIES,
            ring_size: RING_ENTRIES,
            is_veth: self.is_virtual_pair,
            lease_id: lease,
        };
        let socket = OwnedFd::from(socket);
        if !self.is_filled {
            let copy = socket.try_clone().map_err(failed(Step::Socket))?;
            let first = LeasedQueue::open(terms, copy, self.file.as_fd()).map_err(failed(Step::Rings))?;
            first.init_frames(SHARED_RING_ENTRIES);
            self.is_filled = true;
        }
        Ok((terms, socket))
    }

    /// Its memory, for the lessee to map.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Reclaims what a socket has left in its rings, once nothing is redirected to it, for the
    /// other sockets of its queue. `has_ended` tells whether all processes have closed a lease:
    /// then a lock that it holds is broken. False if another lease has the lock just now; does not
    /// wait for it.
    #[must_use]
    pub fn reclaim(left: &LeasedQueue, has_ended: impl Fn(u16) -> bool) -> bool {
        left.kick();
        let Some(mut guard) = left.try_lock(Holder::LESSOR, |holder| has_ended(holder.lease())) else {
            return false;
        };
        guard.clear();
        true
    }
}

impl Drop for LessorQueue {
    fn drop(&mut self) {
        // The lessee may keep the memory mapped, so free its pages and their content.
        shared::discard(self.file.as_fd(), memory_size(FRAME_COUNT));
    }
}

impl std::fmt::Debug for LessorQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LentQueue").field("fd", &self.umem_socket.as_fd().as_raw_fd()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lessee_gets_copies_and_not_the_umem() {
        assert_eq!(options(1, 0).mode, Mode::Copy);
    }
}
