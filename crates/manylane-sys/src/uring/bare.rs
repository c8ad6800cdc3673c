//! Receiving by io_uring as one writes it by hand, after the examples of liburing: what lanes are measured against. Nothing
//! is checked that a program would not check which trusts its kernel, and nothing moves between threads.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::abi::{self, BufReg, Sqe};
use super::setup::Ring;
use crate::addr::SockAddr;
use crate::control;
use crate::map::{Fixed, Mapping};
use crate::mmsg::Message;

/// Room of the address before the payload.
const NAME: usize = size_of::<SockAddr>();
const OUT: usize = size_of::<abi::RecvmsgOut>();
/// The number of the socket among the registered files.
const SOCKET: i32 = 0;
/// What the poll for a shutdown carries.
const SHUTDOWN: u64 = 1;
/// Where a buffer starts within its first cache line: its payload then starts a line of its own.
const LEAD: usize = 16;
/// Fewest receives that one call submits.
const FEWEST: usize = 4;

/// Sizes of a bare receiver.
#[derive(Clone, Copy, Debug)]
pub struct BareOptions {
    /// Messages that one call takes at most, 1 to 1024.
    pub batch: usize,
    /// Bytes of payload that fit into a buffer.
    pub buffer: usize,
    /// Whether to receive control messages.
    pub control: bool,
}

/// A multishot receive into a ring of buffers, for the thread that makes it.
pub struct BareMultishot {
    ring: Ring,
    buffers: Mapping,
    entries: Mapping,
    header: Fixed<libc::msghdr>,
    stride: usize,
    room: usize,
    control: usize,
    mask: u16,
    tail: u16,
    is_armed: bool,
    batch: usize,
    /// Buffers of the batch, and the bytes that the kernel wrote into each.
    taken: Vec<(u16, u32)>,
}

// SAFETY: the pointers in the header are null; the kernel refuses another thread by an error.
unsafe impl Send for BareMultishot {}

impl Drop for BareMultishot {
    fn drop(&mut self) {
        let_go(&mut self.ring);
    }
}

/// Lets go of the socket at once, so that its port is free when it is closed.
pub(super) fn let_go(ring: &mut Ring) {
    if ring.cancel(&[]).is_ok() {
        _ = ring.unregister_file();
    }
}

fn ring(submissions: u32, completions: u32, socket: BorrowedFd<'_>) -> io::Result<Ring> {
    let ring = Ring::sized(submissions, completions, false)?;
    ring.enable()?;
    ring.register_file(socket)?;
    Ok(ring)
}

impl BareMultishot {
    /// Registers `socket` and twice as many buffers as a batch has messages, and 64 more.
    ///
    /// # Errors
    /// As of [`UringRecv::new`](super::UringRecv::new).
    pub fn new(socket: BorrowedFd<'_>, options: BareOptions) -> io::Result<Self> {
        let count = (options.batch + 64).next_power_of_two();
        let ring = ring(4, 2 * count as u32, socket)?;
        let control = if options.control { control::RECV_CAPACITY } else { 0 };
        let room = OUT + NAME + control + options.buffer;
        let stride = (room + LEAD).next_multiple_of(64) + if options.buffer >= 4096 { 192 } else { 0 };
        let entries = Mapping::new(count * size_of::<abi::Buf>())?;
        ring.register_buffers(&BufReg {
            ring_addr: entries.as_ptr().expose_provenance() as u64,
            ring_entries: count as u32,
            ..BufReg::default()
        })?;
        // SAFETY: msghdr is a C struct of integers and pointers, for which all zeroes is a value.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_namelen = NAME as u32;
        header.msg_controllen = control as _;
        let mut bare = Self {
            ring,
            buffers: Mapping::new(stride * count)?,
            entries,
            header: Fixed::new(header, 1),
            stride,
            room,
            control,
            mask: (count - 1) as u16,
            tail: 0,
            is_armed: false,
            batch: options.batch,
            taken: Vec::with_capacity(options.batch),
        };
        (0..count).for_each(|id| bare.give(id as u16));
        bare.publish();
        // A receive that does not sleep itself is not told of a shutdown, by which others say that it is time to end.
        bare.ring.put(Sqe {
            opcode: abi::OP_POLL_ADD,
            flags: abi::SQE_FIXED_FILE,
            fd: SOCKET,
            user_data: SHUTDOWN,
            ..Sqe::default()
        });
        Ok(bare)
    }

    fn give(&mut self, id: u16) {
        let addr =
            self.buffers.as_ptr().wrapping_add(usize::from(id) * self.stride + LEAD).expose_provenance();
        // SAFETY: the masked index is below the number of entries of the mapping; the kernel reads an entry only once the
        // tail has passed it, and there is one for each buffer. The tail, which shares the first, is not touched.
        unsafe {
            let entry = self.entries.as_ptr().cast::<abi::Buf>().add(usize::from(self.tail & self.mask));
            (&raw mut (*entry).addr).write(addr as u64);
            (&raw mut (*entry).len).write(self.room as u32);
            (&raw mut (*entry).bid).write(id);
        }
        self.tail = self.tail.wrapping_add(1);
    }

    fn publish(&self) {
        super::buffers::store_tail(&self.entries, self.tail);
    }

    /// Receives up to a batch; 0 if nothing came within `wait` ([`Duration::MAX`]: for ever), or when the socket was shut down.
    /// Once a receive is over, its messages stay until the next one.
    ///
    /// # Errors
    /// What the socket or io_uring reports.
    #[inline]
    pub fn recv(&mut self, mut wait: Option<Duration>) -> io::Result<usize> {
        let mut taken = std::mem::take(&mut self.taken);
        if !taken.is_empty() {
            taken.drain(..).for_each(|(id, _)| self.give(id));
            self.publish();
        }
        let done = self.fill(&mut taken, &mut wait);
        self.taken = taken;
        done.map(|()| self.taken.len())
    }

    #[inline]
    fn fill(&mut self, taken: &mut Vec<(u16, u32)>, wait: &mut Option<Duration>) -> io::Result<()> {
        loop {
            let there = self.ring.there();
            while taken.len() < self.batch {
                let Some(completion) = self.ring.peek(there) else { break };
                self.ring.pop();
                if completion.user_data == SHUTDOWN {
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
        self.ring.put(Sqe {
            opcode: abi::OP_RECVMSG,
            flags: abi::SQE_FIXED_FILE | abi::SQE_BUFFER_SELECT,
            ioprio: abi::RECV_MULTISHOT,
            fd: SOCKET,
            addr: self.header.at(0).expose_provenance() as u64,
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
        let (id, written) = self.taken[index];
        let len = (written as usize).min(self.room);
        // SAFETY: the buffer lies inside the mapping, whose memory started zeroed; a completion has given it to the batch, and
        // the kernel gets it back only by `recv`, which needs `&mut self`.
        let bytes = unsafe {
            std::slice::from_raw_parts(self.buffers.as_ptr().add(usize::from(id) * self.stride + LEAD), len)
        };
        let word = |at: usize| bytes[at..at + 4].try_into().map_or(0, u32::from_ne_bytes) as usize;
        let peer = SockAddr::within(&bytes[OUT..]).unwrap_or(&SockAddr::EMPTY);
        let control = &bytes[OUT + NAME..][..word(4).min(self.control)];
        Message::new(&bytes[OUT + NAME + self.control..], word(8), false, peer, control)
    }
}

/// Receives that are submitted one by one, all by one call, each with a header of its own.
pub struct BareShots {
    ring: Ring,
    buffers: Mapping,
    buffer: usize,
    names: Fixed<SockAddr>,
    headers: Fixed<libc::msghdr>,
    /// The headers point at these; nothing else reads them.
    _vectors: Fixed<libc::iovec>,
    lens: Vec<u32>,
    /// How many to submit: those that found something lately, and as many again.
    next: usize,
}

// SAFETY: the raw pointers in the headers point into memory that this value owns and that moves with it.
unsafe impl Send for BareShots {}

impl Drop for BareShots {
    fn drop(&mut self) {
        let_go(&mut self.ring);
    }
}

impl BareShots {
    /// Registers `socket` and builds a header for each message of a batch. There are no control messages.
    ///
    /// # Errors
    /// As of [`UringRecv::new`](super::UringRecv::new).
    pub fn new(socket: BorrowedFd<'_>, options: BareOptions) -> io::Result<Self> {
        let BareOptions { batch, buffer, .. } = options;
        let ring = ring(batch.next_power_of_two() as u32, 2 * batch as u32, socket)?;
        let names = Fixed::new(SockAddr::EMPTY, batch);
        let vectors = Fixed::new(libc::iovec { iov_base: std::ptr::null_mut(), iov_len: buffer }, batch);
        // SAFETY: msghdr is a C struct of integers and pointers, for which all zeroes is a value.
        let headers: Fixed<libc::msghdr> = Fixed::new(unsafe { std::mem::zeroed() }, batch);
        let buffers = Mapping::new(buffer * batch)?;
        for index in 0..batch {
            // SAFETY: elements of allocations that nobody else reads or writes now; the buffer is inside the mapping.
            unsafe {
                (*vectors.at(index)).iov_base = buffers.as_ptr().add(index * buffer).cast();
                let header = &mut *headers.at(index);
                header.msg_name = names.at(index).cast();
                header.msg_namelen = SockAddr::CAPACITY as u32;
                header.msg_iov = vectors.at(index);
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
            next: batch,
        })
    }

    /// Receives up to a batch, without waiting.
    ///
    /// # Errors
    /// What the socket or io_uring reports.
    pub fn recv(&mut self) -> io::Result<usize> {
        self.lens.clear();
        for index in 0..self.next {
            self.ring.put(Sqe {
                opcode: abi::OP_RECVMSG,
                flags: abi::SQE_FIXED_FILE,
                fd: SOCKET,
                addr: self.headers.at(index).expose_provenance() as u64,
                len: 1,
                msg_flags: (libc::MSG_DONTWAIT | libc::MSG_TRUNC) as u32,
                user_data: index as u64,
                ..Sqe::default()
            });
        }
        self.ring.enter(None)?;
        // They end in the order in which they were submitted: none waits.
        let there = self.ring.there();
        while let Some(completion) = self.ring.peek(there) {
            self.ring.pop();
            match completion.res {
                res if res >= 0 => self.lens.push(res as u32),
                res if res == -libc::EAGAIN => {}
                res => return Err(io::Error::from_raw_os_error(-res)),
            }
        }
        self.ring.release();
        self.next = (2 * self.lens.len()).clamp(FEWEST.min(self.headers.len()), self.headers.len());
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
        // SAFETY: inside the mapping, which started zeroed; the kernel writes only during `recv`, which needs `&mut self`.
        let data = unsafe {
            std::slice::from_raw_parts(self.buffers.as_ptr().add(index * self.buffer), full.min(self.buffer))
        };
        // SAFETY: as for the data.
        let peer = unsafe { &*self.names.at(index) };
        Message::new(data, full, full > self.buffer, peer, &[])
    }
}
