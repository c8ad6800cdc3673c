//! The lender's side of a queue: opened, filled, and lent to a few sockets of other processes.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};

use super::borrowed::{Borrowed, Control, Holder, MOST_FRAMES};
use super::queue::{OpenError, Step};
use super::socket::{Maps, Socket, bind};
use super::{Mode, QueueOptions};
use crate::lend::Terms;
use crate::shared::{self, Bytes};

/// Bytes of a frame; the kernel keeps the first 256 of one that it receives into.
pub(super) const FRAME: u32 = 2048;
/// Sockets that can share a queue: as many have room for all that their receive rings can hold.
pub const MEMBERS: u32 = 2;
/// Entries of the receive and of the send ring of each.
const RING: u32 = 1024;
/// Entries of the fill and of the completion ring, and frames to receive into.
const SHARED: u32 = RING * MEMBERS;
/// As many to send from.
const FRAMES: u32 = 2 * SHARED;

const _: () = assert!(FRAMES as usize <= MOST_FRAMES);

/// Bytes of a queue's memory.
pub(super) fn size_of_memory(frames: u32) -> usize {
    frames as usize * FRAME as usize + size_of::<Control>()
}

/// How a queue is bound that is lent. Always by copying: a driver that does not copy writes *every* frame of the queue into
/// the memory, before the XDP program has looked at it, and takes what is the kernel's out of it again. Who has the memory
/// would read and change what all others receive, and who leaves the fill ring empty would stop it.
fn options(ifindex: u32, queue: u32) -> QueueOptions {
    QueueOptions {
        ifindex,
        queue,
        frames: FRAMES,
        frame_size: FRAME,
        ring: RING,
        tx_ring: RING,
        batch: 1,
        mode: Mode::Copy,
        pieces: false,
    }
}

/// A queue that is there to be lent.
pub struct LentQueue {
    // From the top: the socket, then its rings' maps, then the memory.
    anchor: Socket,
    _maps: Maps,
    _memory: Bytes,
    file: OwnedFd,
    options: QueueOptions,
    is_virtual_pair: bool,
    is_filled: bool,
}

impl LentQueue {
    /// Opens a queue of a device.
    ///
    /// # Errors
    /// See [`Step`].
    pub fn open(ifindex: u32, queue: u32, is_virtual_pair: bool) -> Result<Self, OpenError> {
        let failed = |step| move |source| OpenError { step, source };
        let options = options(ifindex, queue);
        let bytes = size_of_memory(FRAMES);
        let file = shared::file(c"manylane-frames", bytes).map_err(failed(Step::Memory))?;
        let memory = Bytes::map(file.as_fd(), bytes).map_err(failed(Step::Memory))?;
        let anchor = Socket::open().map_err(failed(Step::Socket))?;
        let size = u64::from(FRAMES) * u64::from(FRAME);
        // SAFETY: the memory is zeroed, page aligned, longer than that, and dropped after the socket. What is in the frames
        // is read and written by who has a queue's lock, as its rings allow (`Borrowed`).
        unsafe { anchor.register(memory.as_ptr(), size, FRAME) }.map_err(failed(Step::Register))?;
        let shared_rings = QueueOptions { ring: SHARED, tx_ring: SHARED, ..options };
        let (_, maps) = anchor.pool_rings(&shared_rings).map_err(failed(Step::Rings))?;
        bind(anchor.as_fd(), &options).map_err(failed(Step::Bind))?;
        if anchor.knows_zero_copy() {
            let why = "the kernel was told to copy, and does not";
            return Err(failed(Step::Bind)(io::Error::new(io::ErrorKind::Unsupported, why)));
        }
        Ok(Self { anchor, _maps: maps, _memory: memory, file, options, is_virtual_pair, is_filled: false })
    }

    /// One more socket for it, for the loan of that number: what it is like, and the socket, which an XDP program may
    /// redirect to.
    ///
    /// # Errors
    /// See [`Step`].
    pub fn lend(&mut self, loan: u16) -> Result<(Terms, OwnedFd), OpenError> {
        let failed = |step| move |source| OpenError { step, source };
        let mut socket = Socket::open().map_err(failed(Step::Socket))?;
        let (_, maps) = socket.member_rings(&self.options).map_err(failed(Step::Rings))?;
        socket.widen(&self.options);
        socket.bind_to(&self.options, self.anchor.as_fd()).map_err(failed(Step::Bind))?;
        drop(maps);
        let terms = Terms {
            ifindex: self.options.ifindex,
            queue: self.options.queue,
            frames: FRAMES,
            shared_ring: SHARED,
            ring: RING,
            is_virtual_pair: self.is_virtual_pair,
            loan,
        };
        let socket = OwnedFd::from(socket);
        if !self.is_filled {
            let copy = socket.try_clone().map_err(failed(Step::Socket))?;
            let first = Borrowed::open(terms, copy, self.file.as_fd()).map_err(failed(Step::Rings))?;
            first.found(SHARED);
            self.is_filled = true;
        }
        Ok((terms, socket))
    }

    /// Its memory, to be mapped by who it is lent to.
    #[must_use]
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Takes back what a socket has left in its rings, which nothing is led to any more, for the
    /// others in its queue. `has_ended` says of a loan that all processes have closed it: a lock
    /// that is held by it is broken. False if another loan has the lock just now: it is not waited
    /// for.
    #[must_use]
    pub fn take_back(left: &Borrowed, has_ended: impl Fn(u16) -> bool) -> bool {
        left.kick();
        let Some(mut held) = left.lock_now(Holder::LENDER, |holder| has_ended(holder.loan())) else {
            return false;
        };
        for _ in 0..RING {
            if held.first().is_none() {
                break;
            }
            held.pass();
        }
        true
    }
}

impl Drop for LentQueue {
    fn drop(&mut self) {
        // Who had it may keep the memory, but not at our expense, and not what is in it.
        shared::discard(self.file.as_fd(), size_of_memory(FRAMES));
    }
}

impl std::fmt::Debug for LentQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LentQueue").field("fd", &self.anchor.as_fd().as_raw_fd()).finish_non_exhaustive()
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
