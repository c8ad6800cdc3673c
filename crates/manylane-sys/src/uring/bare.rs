//! Hand-written io_uring receives, after the examples of liburing: baselines for measurements of
//! lanes. They check only what a program that trusts its kernel would check, and stay on one
//! thread.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::abi::{self, Sqe};
use super::buffers::{BufferLayout, Buffers};
use super::setup::Ring;
use crate::addr::SockAddr;
use crate::control;
use crate::map::{Mapping, PinnedSlice};
use crate::mmsg::Message;

/// Index of the socket among the registered files.
const SOCKET_INDEX: i32 = 0;
/// `user_data` of the poll for a shutdown.
const SHUTDOWN_USER_DATA: u64 = 1;
/// Minimum number of receives per call.
const SUBMISSIONS_MIN: usize = 4;

/// Sizes of a bare receiver.
#[derive(Clone, Copy, Debug)]
pub struct BareOptions {
    /// Maximum number of messages per call, 1 to 1024.
    pub batch: usize,
    /// Maximum payload in bytes.
    pub buffer: usize,
    /// True to receive control messages.
    pub control: bool,
}

/// A multishot receive into a buffer ring, for the thread that makes it.
pub struct BareMultishot {
    ring: Ring,
    buffers: Buffers,
    header: PinnedSlice<libc::msghdr>,
    is_armed: bool,
    batch: usize,
    /// Buffers of the batch, and the length of the payload in each.
    completed: Vec<(u16, u32)>,
}

// SAFETY: the pointers in the header are null; the kernel refuses another thread with an error.
unsafe impl Send for BareMultishot {}

impl Drop for BareMultishot {
    fn drop(&mut self) {
        release_socket(&mut self.ring);
    }
}

/// Releases the socket at once, so that its port is free when it is closed.
pub(super) fn release_socket(ring: &mut Ring) {
    if ring.cancel(&[]).is_ok() {
        _ = ring.unregister_file();
    }
}

fn open_ring(submissions: u32, completions: u32, socket: BorrowedFd<'_>) -> io::Result<Ring> {
    let ring = Ring::with_entries(submissions, completions, false)?;
    ring.enable()?;
    ring.register_file(socket)?;
    Ok(ring)
}

impl BareMultishot {
    /// Registers `socket`, and 64 buffers more than a batch has messages, rounded up to a power of
    /// two.
    ///
    /// # Errors
    /// As for [`UringRecv::new`](super::UringRecv::new).
    pub fn new(socket: BorrowedFd<'_>, options: BareOptions) -> io::Result<Self> {
        let count = (options.batch + 64).next_power_of_two();
        let ring = open_ring(4, 2 * count as u32, socket)?;
        let control = if options.control { control::RECV_CAPACITY } else { 0 };
        // SAFETY: msghdr is a C struct of integers and pointers, for which all zeros are valid.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_namelen = size_of::<SockAddr>() as u32;
        header.msg_controllen = control as _;
        let mut bare = Self {
            buffers: Buffers::new(&ring, count, BufferLayout { control, payload: options.buffer })?,
            ring,
            header: PinnedSlice::new(header, 1),
            is_armed: false,
            batch: options.batch,
            completed: Vec::with_capacity(options.batch),
        };
        // A receive that does not sleep itself does not notice a shutdown, by which other threads
        // signal the end.
        bare.ring.push(Sqe {
            opcode: abi::OP_POLL_ADD,
            flags: abi::SQE_FIXED_FILE,
            fd: SOCKET_INDEX,
            user_data: SHUTDOWN_USER_DATA,
            ..Sqe::default()
        });
        Ok(bare)
    }

    /// Receives up to a batch; 0 if no datagram arrived within `wait` ([`Duration::MAX`]: no
    /// limit), or after a shutdown of the socket. The messages are valid until the next call.
    ///
    /// # Errors
    /// Those of the socket or io_uring.
    #[inline]
    pub fn recv(&mut self, mut wait: Option<Duration>) -> io::Result<usize> {
        let mut taken = std::mem::take(&mut self.completed);
        if !taken.is_empty() {
            taken.clear();
            self.buffers.release();
        }
        let done = self.reap_completions(&mut taken, &mut wait);
        self.completed = taken;
        done.map(|()| self.completed.len())
    }

    #[inline]
    fn reap_completions(
        &mut self,
        taken: &mut Vec<(u16, u32)>,
        wait: &mut Option<Duration>,
    ) -> io::Result<()> {
        loop {
            let there = self.ring.load_cq_tail();
            while taken.len() < self.batch {
                let Some(completion) = self.ring.peek(there) else { break };
                self.ring.pop();
                if completion.user_data == SHUTDOWN_USER_DATA {
                    *wait = None;
                    continue;
                }
                self.is_armed &= completion.flags & abi::CQE_MORE != 0;
                if completion.flags & abi::CQE_BUFFER != 0 {
                    let id = (completion.flags >> abi::CQE_BUFFER_SHIFT) as u16;
                    if !self.buffers.consume(id) {
                        return Err(io::Error::from_raw_os_error(libc::EPROTO));
                    }
                    let len = (completion.res as usize).wrapping_sub(self.buffers.layout().payload_offset());
                    taken.push((id, len as u32));
                } else if completion.res < 0 && completion.res != -libc::ENOBUFS {
                    return Err(io::Error::from_raw_os_error(-completion.res));
                }
            }
            self.ring.release();
            if taken.len() == self.batch {
                return Ok(());
            }
            let time = if taken.is_empty() { wait.take() } else { None };
            if !self.is_armed {
                self.arm();
            } else if time.is_none() && !self.ring.has_work() {
                return Ok(());
            }
            self.ring.enter(time)?;
        }
    }

    #[cold]
    fn arm(&mut self) {
        self.ring.push(Sqe {
            opcode: abi::OP_RECVMSG,
            flags: abi::SQE_FIXED_FILE | abi::SQE_BUFFER_SELECT,
            ioprio: abi::RECV_MULTISHOT,
            fd: SOCKET_INDEX,
            addr: self.header.ptr_at(0).expose_provenance() as u64,
            len: 1,
            ..Sqe::default()
        });
        self.is_armed = true;
    }

    /// Message `index` of the last receive.
    ///
    /// # Panics
    /// If the last receive did not return that many.
    #[inline]
    #[must_use]
    pub fn message(&self, index: usize) -> Message<'_> {
        let (id, len) = self.completed[index];
        let head = self.buffers.header(id);
        let control = self.buffers.control(id, head.out.controllen as usize);
        let data = self.buffers.payload(id, len as usize);
        Message::new(data, head.out.payloadlen as usize, &head.peer, control)
    }
}

/// Receives that are submitted individually, all by one call, each with its own header.
pub struct BareOneshot {
    ring: Ring,
    buffers: Mapping,
    buffer: usize,
    names: PinnedSlice<SockAddr>,
    headers: PinnedSlice<libc::msghdr>,
    /// The headers point at these; only the kernel reads them.
    _vectors: PinnedSlice<libc::iovec>,
    lens: Vec<u32>,
    /// Receives to submit: twice as many as completed with a message lately.
    to_submit: usize,
}

// SAFETY: the raw pointers in the headers point into memory that this value owns and that moves
// with it.
unsafe impl Send for BareOneshot {}

impl Drop for BareOneshot {
    fn drop(&mut self) {
        release_socket(&mut self.ring);
    }
}

impl BareOneshot {
    /// Registers `socket` and builds a header for each message of a batch. No control messages.
    ///
    /// # Errors
    /// As for [`UringRecv::new`](super::UringRecv::new).
    pub fn new(socket: BorrowedFd<'_>, options: BareOptions) -> io::Result<Self> {
        let BareOptions { batch, buffer, .. } = options;
        let ring = open_ring(batch.next_power_of_two() as u32, 2 * batch as u32, socket)?;
        let names = PinnedSlice::new(SockAddr::EMPTY, batch);
        let vectors =
            PinnedSlice::new(libc::iovec { iov_base: std::ptr::null_mut(), iov_len: buffer }, batch);
        // SAFETY: msghdr is a C struct of integers and pointers, for which all zeros are valid.
        let headers: PinnedSlice<libc::msghdr> = PinnedSlice::new(unsafe { std::mem::zeroed() }, batch);
        let buffers = Mapping::new(buffer * batch)?;
        for index in 0..batch {
            // SAFETY: elements of allocations that no other code accesses now; the buffer is
            // inside the mapping.
            unsafe {
                (*vectors.ptr_at(index)).iov_base = buffers.as_ptr().add(index * buffer).cast();
                let header = &mut *headers.ptr_at(index);
                header.msg_name = names.ptr_at(index).cast();
                header.msg_namelen = SockAddr::CAPACITY as u32;
                header.msg_iov = vectors.ptr_at(index);
                header.msg_iovlen = 1;
            }
        }
        Ok(Self {
            ring,
            buffers,
            buffer,
            names,
            headers,
            _vectors: vectors,
            lens: Vec::with_capacity(batch),
            to_submit: batch,
        })
    }

    /// Receives up to a batch, without waiting.
    ///
    /// # Errors
    /// Those of the socket or io_uring.
    pub fn recv(&mut self) -> io::Result<usize> {
        self.lens.clear();
        for index in 0..self.to_submit {
            self.ring.push(Sqe {
                opcode: abi::OP_RECVMSG,
                flags: abi::SQE_FIXED_FILE,
                fd: SOCKET_INDEX,
                addr: self.headers.ptr_at(index).expose_provenance() as u64,
                len: 1,
                msg_flags: (libc::MSG_DONTWAIT | libc::MSG_TRUNC) as u32,
                user_data: index as u64,
                ..Sqe::default()
            });
        }
        self.ring.enter(None)?;
        // They complete in the order of submission, because none waits.
        let there = self.ring.load_cq_tail();
        while let Some(completion) = self.ring.peek(there) {
            self.ring.pop();
            match completion.res {
                res if res >= 0 => self.lens.push(res as u32),
                res if res == -libc::EAGAIN => {}
                res => return Err(io::Error::from_raw_os_error(-res)),
            }
        }
        self.ring.release();
        self.to_submit =
            (2 * self.lens.len()).clamp(SUBMISSIONS_MIN.min(self.headers.len()), self.headers.len());
        Ok(self.lens.len())
    }

    /// Message `index` of the last receive.
    ///
    /// # Panics
    /// If the last receive did not return that many.
    #[inline]
    #[must_use]
    pub fn message(&self, index: usize) -> Message<'_> {
        let full = self.lens[index] as usize;
        // SAFETY: inside the mapping, which started zeroed; the kernel writes only during `recv`,
        // which needs `&mut self`.
        let data = unsafe {
            std::slice::from_raw_parts(self.buffers.as_ptr().add(index * self.buffer), full.min(self.buffer))
        };
        // SAFETY: as for the data.
        let peer = unsafe { &*self.names.ptr_at(index) };
        Message::new(data, full, peer, &[])
    }
}
