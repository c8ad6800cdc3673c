//! Hand-written io_uring sends, as a baseline for the calls of engine `mmsg`, which all engines
//! use to send on kernel sockets.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::abi::{self, Sqe};
use super::setup::Ring;
use crate::addr::SockAddr;
use crate::map::PinnedSlice;

/// Index of the socket among the registered files.
const SOCKET_INDEX: i32 = 0;
/// Maximum time that the kernel keeps a payload that it does not copy.
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(1);

/// One entry per datagram, with a header built once, all submitted by one call.
pub struct BareSender {
    ring: Ring,
    headers: PinnedSlice<libc::msghdr>,
    /// The headers point at these.
    vectors: PinnedSlice<libc::iovec>,
    names: PinnedSlice<SockAddr>,
    zero_copy: bool,
}

impl BareSender {
    /// Registers `socket` and builds `batch` headers; with `zero_copy`, payloads are not copied
    /// (Linux 6.1).
    ///
    /// # Errors
    /// As for [`UringRecv::new`](super::UringRecv::new).
    pub fn new(socket: BorrowedFd<'_>, batch: usize, zero_copy: bool) -> io::Result<Self> {
        let ring = Ring::with_entries(batch.next_power_of_two() as u32, 4 * batch as u32, false)?;
        ring.enable()?;
        ring.register_file(socket)?;
        let names = PinnedSlice::new(SockAddr::EMPTY, batch);
        let vectors = PinnedSlice::new(libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }, batch);
        // SAFETY: msghdr is a C struct of integers and pointers, for which all zeros are valid.
        let headers: PinnedSlice<libc::msghdr> = PinnedSlice::new(unsafe { std::mem::zeroed() }, batch);
        for index in 0..batch {
            // SAFETY: elements of allocations that no other code accesses now.
            unsafe {
                let header = &mut *headers.ptr_at(index);
                header.msg_name = names.ptr_at(index).cast();
                header.msg_iov = vectors.ptr_at(index);
                header.msg_iovlen = 1;
            }
        }
        Ok(Self { ring, headers, vectors, names, zero_copy })
    }

    /// Sends each of `payloads`, at most a batch, to `peer`, and returns how many were sent. The
    /// kernel has finished with all of them when this returns.
    ///
    /// # Errors
    /// Those of io_uring.
    pub fn send<'a>(
        &mut self,
        peer: &SockAddr,
        payloads: impl Iterator<Item = &'a [u8]>,
    ) -> io::Result<usize> {
        let mut count = 0;
        for (index, payload) in payloads.enumerate().take(self.headers.len()) {
            // SAFETY: elements of the value's own allocations, with no request in flight.
            unsafe {
                *self.names.ptr_at(index) = *peer;
                let vector =
                    libc::iovec { iov_base: payload.as_ptr().cast_mut().cast(), iov_len: payload.len() };
                *self.vectors.ptr_at(index) = vector;
                (*self.headers.ptr_at(index)).msg_namelen = peer.as_bytes().len() as u32;
            }
            let quiet = if self.zero_copy { 0 } else { abi::SQE_SKIP_SUCCESS };
            self.ring.push(Sqe {
                opcode: if self.zero_copy { abi::OP_SENDMSG_ZC } else { abi::OP_SENDMSG },
                flags: abi::SQE_FIXED_FILE | quiet,
                fd: SOCKET_INDEX,
                addr: self.headers.ptr_at(index).expose_provenance() as u64,
                len: 1,
                msg_flags: (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as u32,
                ..Sqe::default()
            });
            count += 1;
        }
        self.ring.enter(None)?;
        let (mut failed, mut notifications) = (0, if self.zero_copy { count } else { 0 });
        loop {
            let there = self.ring.load_cq_tail();
            while let Some(completion) = self.ring.peek(there) {
                self.ring.pop();
                if completion.flags & abi::CQE_NOTIFY != 0 {
                    notifications -= 1;
                } else if completion.res < 0 {
                    failed += 1;
                    notifications -= usize::from(self.zero_copy && completion.flags & abi::CQE_MORE == 0);
                }
            }
            self.ring.release();
            if notifications == 0 {
                return Ok(count - failed);
            }
            self.ring.enter(Some(NOTIFY_TIMEOUT))?;
        }
    }
}

impl Drop for BareSender {
    fn drop(&mut self) {
        super::bare::release_socket(&mut self.ring);
    }
}

// SAFETY: the raw pointers in the headers point into memory that this value owns and that moves
// with it, and into payloads only during a call.
unsafe impl Send for BareSender {}
