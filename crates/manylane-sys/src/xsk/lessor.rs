//! The lessor's side of a queue: opened, filled, and leased to a few sockets of other processes.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};

use super::leased::{FRAME_SIZE, FRAMES_MAX, Holder, LeasedQueue, memory_size};
use super::queue::{OpenError, Step};
use super::socket::{Maps, Socket, bind};
use super::{Mode, QueueOptions};
use crate::lease::QueueParams;
use crate::shared::{self, SharedMapping};

/// Sockets that can share a queue: as many have room for all that their receive rings can hold.
pub const QUEUE_MEMBERS_MAX: u32 = 2;
/// Entries of the receive and of the send ring of each.
const RING_ENTRIES: u32 = 1024;
/// Entries of the fill and of the completion ring, and frames to receive into.
const SHARED_RING_ENTRIES: u32 = RING_ENTRIES * QUEUE_MEMBERS_MAX;
/// As many to send from.
const FRAME_COUNT: u32 = 2 * SHARED_RING_ENTRIES;

const _: () = assert!(FRAME_COUNT as usize <= FRAMES_MAX);

/// How a queue is bound that is leased. Always by copying: a driver that does not copy writes
/// *every* frame of the queue into the memory, before the XDP program has looked at it, and takes
/// what is the kernel's out of it again. Who has the memory would read and change what all others
/// receive, and who leaves the fill ring empty would stop it.
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

/// A queue that is there to be leased.
pub struct LessorQueue {
    // From the top: the socket, then its rings' maps, then the memory.
    umem_socket: Socket,
    _maps: Maps,
    _memory: SharedMapping,
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
        let memory = SharedMapping::map(file.as_fd(), bytes).map_err(failed(Step::Memory))?;
        let anchor = Socket::open().map_err(failed(Step::Socket))?;
        let size = u64::from(FRAME_COUNT) * u64::from(FRAME_SIZE);
        // SAFETY: the memory is zeroed, page aligned, longer than that, and dropped after the
        // socket. What is in the frames is read and written by who has a queue's lock, as its rings
        // allow (`LeasedQueue`).
        unsafe { anchor.register(memory.as_ptr(), size, FRAME_SIZE) }.map_err(failed(Step::Register))?;
        let shared_rings =
            QueueOptions { ring: SHARED_RING_ENTRIES, tx_ring: SHARED_RING_ENTRIES, ..options };
        let (_, maps) = anchor.umem_rings(&shared_rings).map_err(failed(Step::Rings))?;
        bind(anchor.as_fd(), &options).map_err(failed(Step::Bind))?;
        if anchor.query_zero_copy() {
            let why = "the kernel was told to copy, and does not";
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

    /// One more socket for it, for the lease of that number: what it is like, and the socket, which
    /// an XDP program may redirect to.
    ///
    /// # Errors
    /// See [`Step`].
    pub fn lease(&mut self, lease: u16) -> Result<(QueueParams, OwnedFd), OpenError> {
        let failed = |step| move |source| OpenError { step, source };
        let mut socket = Socket::open().map_err(failed(Step::Socket))?;
        let (_, maps) = socket.member_rings(&self.options).map_err(failed(Step::Rings))?;
        socket.raise_tx_limits(&self.options);
        socket.bind_to(&self.options, self.umem_socket.as_fd()).map_err(failed(Step::Bind))?;
        drop(maps);
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

    /// Its memory, to be mapped by who it is leased to.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Takes back what a socket has left in its rings, which nothing is led to any more, for the
    /// others in its queue. `has_ended` says of a lease that all processes have closed it: a lock
    /// that is held by it is broken. False if another lease has the lock just now: it is not waited
    /// for.
    #[must_use]
    pub fn reclaim(left: &LeasedQueue, has_ended: impl Fn(u16) -> bool) -> bool {
        left.kick();
        let Some(mut guard) = left.try_lock(Holder::LESSOR, |holder| has_ended(holder.lease())) else {
            return false;
        };
        for _ in 0..RING_ENTRIES {
            if guard.peek().is_none() {
                break;
            }
            guard.pop();
        }
        true
    }
}

impl Drop for LessorQueue {
    fn drop(&mut self) {
        // Who had it may keep the memory, but not at our expense, and not what is in it.
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
    fn a_borrower_is_given_copies_and_never_the_memory_of_the_device() {
        assert_eq!(options(1, 0).mode, Mode::Copy);
    }
}
