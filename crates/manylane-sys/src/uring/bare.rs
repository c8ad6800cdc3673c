//! Hand-written io_uring receives, after the examples of liburing: baselines for measurements of
//! lanes. They check only what a program that trusts its kernel would check, and stay on one
//! thread.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::abi::{self, BufReg, Sqe};
use super::setup::Ring;
use crate::addr::SockAddr;
use crate::control;
use crate::map::{Mapping, PinnedSlice};
use crate::mmsg::Message;

/// Room for the address before the payload.
const NAME_LEN: usize = size_of::<SockAddr>();
const OUT_LEN: usize = size_of::<abi::RecvmsgOut>();
/// Index of the socket among the registered files.
const SOCKET_INDEX: i32 = 0;
/// `user_data` of the poll for a shutdown.
const SHUTDOWN_USER_DATA: u64 = 1;
/// Offset of a buffer in its first cache line, so that its payload starts at a line.
const LEADING_PAD: usize = 16;
/// Minimum number of receives per call.
const SUBMISSIONS_MIN: usize = 4;

/// Sizes of a bare receiver.
#[derive(Clone, Copy, Debug)]
pub struct BareOptions {
    /// Maximum number of messages per call, 1 to 1024.
    pub batch: usize,
    /// Maximum payload in bytes.
    pub buffer: usize,
    /// Whether to receive control messages.
    pub control: bool,
}

/// A multishot receive into a buffer ring, for the thread that makes it.
pub struct BareMultishot {
    ring: Ring,
    buffers: Mapping,
    entries: Mapping,
    header: PinnedSlice<libc::msghdr>,
    stride: usize,
    buffer_len: usize,
    control_len: usize,
    mask: u16,
    tail: u16,
    is_armed: bool,
    batch: usize,
    /// Buffers of the batch, and the bytes that the kernel wrote into each.
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
        let room = OUT_LEN + NAME_LEN + control + options.buffer;
        let stride = (room + LEADING_PAD).next_multiple_of(64) + if options.buffer >= 4096 { 192 } else { 0 };
        let entries = Mapping::new(count * size_of::<abi::Buf>())?;
        ring.register_buffers(&BufReg {
            ring_addr: entries.as_ptr().expose_provenance() as u64,
            ring_entries: count as u32,
            ..BufReg::default()
        })?;
        // SAFETY: msghdr is a C struct of integers and pointers, for which all zeros are valid.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_namelen = NAME_LEN as u32;
        header.msg_controllen = control as _;
        let mut bare = Self {
            ring,
            buffers: Mapping::new(stride * count)?,
            entries,
            header: PinnedSlice::new(header, 1),
            stride,
            buffer_len: room,
            control_len: control,
            mask: (count - 1) as u16,
            tail: 0,
            is_armed: false,
            batch: options.batch,
            completed: Vec::with_capacity(options.batch),
        };
        (0..count).for_each(|id| bare.add_buffer(id as u16));
        bare.publish();
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

    fn add_buffer(&mut self, id: u16) {
        let addr = self
            .buffers
            .as_ptr()
            .wrapping_add(usize::from(id) * self.stride + LEADING_PAD)
            .expose_provenance();
        // SAFETY: the masked index is below the number of entries of the mapping. The kernel reads
        // an entry only once the tail has passed it, and there is one for each buffer. The tail,
        // which is part of the first entry, is not written.
        unsafe {
            let entry = self.entries.as_ptr().cast::<abi::Buf>().add(usize::from(self.tail & self.mask));
            (&raw mut (*entry).addr).write(addr as u64);
            (&raw mut (*entry).len).write(self.buffer_len as u32);
            (&raw mut (*entry).bid).write(id);
        }
        self.tail = self.tail.wrapping_add(1);
    }

    fn publish(&self) {
        super::buffers::store_tail(&self.entries, self.tail);
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
            taken.drain(..).for_each(|(id, _)| self.add_buffer(id));
            self.publish();
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
                    taken.push(((completion.flags >> abi::CQE_BUFFER_SHIFT) as u16, completion.res as u32));
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
        let (id, written) = self.completed[index];
        let len = (written as usize).min(self.buffer_len);
        // SAFETY: the buffer is inside the mapping, whose memory started zeroed. A completion has
        // given it to the batch, and the kernel gets it back only by `recv`, which needs
        // `&mut self`.
        let bytes = unsafe {
            std::slice::from_raw_parts(
                self.buffers.as_ptr().add(usize::from(id) * self.stride + LEADING_PAD),
                len,
            )
        };
        let word = |at: usize| bytes[at..at + 4].try_into().map_or(0, u32::from_ne_bytes) as usize;
        let peer = SockAddr::from_prefix(&bytes[OUT_LEN..]).unwrap_or(&SockAddr::EMPTY);
        let control = &bytes[OUT_LEN + NAME_LEN..][..word(4).min(self.control_len)];
        Message::new(&bytes[OUT_LEN + NAME_LEN + self.control_len..], word(8), peer, control)
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
