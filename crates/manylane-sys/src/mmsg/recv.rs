//! Receiving: `recvmmsg(2)` into buffers of the ring.

#[cfg(any(test, feature = "bench"))]
pub(super) mod echo;
#[cfg(any(test, feature = "bench"))]
pub(super) mod remembered;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::{ptr, slice};

use crate::addr::SockAddr;
use crate::control::{self, Ancillary};
use crate::map::{Mapping, PinnedSlice};
use crate::sock;

/// Distance of buffers, in bytes: odd multiples of a cache line, so that the first lines of large
/// buffers do not all map to one cache set.
const STAGGER_BYTES: usize = 192;
/// Retries of a receive that reported an error of an earlier datagram.
const RECV_RETRIES: u32 = 10;

/// Sizes of a [`RecvRing`].
#[derive(Clone, Copy, Debug)]
pub struct RecvOptions {
    /// Maximum number of messages per call, 1 to 1024 (`UIO_MAXIOV`).
    pub batch: usize,
    /// Size of the buffer for each message, in bytes.
    pub buffer: usize,
    /// True to receive control messages.
    pub control: bool,
}

/// Wait of a receive for datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Receive only what is queued.
    Never,
    /// Sleep until a datagram is queued or the socket's receive timeout expires.
    First,
}

/// Space of the control messages of one message.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct ControlSlot([u8; control::RECV_CAPACITY]);

/// Headers, addresses and buffers for receiving; see the [module](super).
pub struct RecvRing {
    headers: PinnedSlice<libc::mmsghdr>,
    names: PinnedSlice<SockAddr>,
    controls: PinnedSlice<ControlSlot>,
    buffers: Mapping,
    stride: usize,
    buffer: usize,
    control: bool,
    /// Headers that the last call wrote to; reset before the next one.
    written: usize,
    /// The first of them, which are no datagrams.
    skipped: usize,
    /// The headers point at these; only the kernel reads them.
    _vectors: PinnedSlice<libc::iovec>,
}

// SAFETY: the raw pointers in the headers point into memory that the ring owns and that moves with
// it.
unsafe impl Send for RecvRing {}

impl RecvRing {
    /// Allocates and builds everything that calls will use.
    ///
    /// # Errors
    /// `EINVAL` for a batch outside 1 to 1024; `ENOMEM` at a memory limit.
    pub fn new(options: RecvOptions) -> io::Result<Self> {
        let RecvOptions { batch, buffer, control } = options;
        if !(1..=1024).contains(&batch) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let buffer = buffer.max(1);
        let stride = buffer.next_multiple_of(64) + if buffer >= 4096 { STAGGER_BYTES } else { 0 };
        let buffers = Mapping::new(stride * batch)?;
        let names = PinnedSlice::new(SockAddr::EMPTY, batch);
        let controls =
            PinnedSlice::new(ControlSlot([0; control::RECV_CAPACITY]), if control { batch } else { 0 });
        let vectors = PinnedSlice::new(libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }, batch);
        // SAFETY: mmsghdr is a C struct of integers and pointers, for which all zeros are valid.
        let headers: PinnedSlice<libc::mmsghdr> = PinnedSlice::new(unsafe { std::mem::zeroed() }, batch);
        for index in 0..batch {
            // SAFETY: `ptr_at` gives the address of an element of an allocation that this ring
            // owns and that no other code accesses now; the buffer pointer stays inside the
            // mapping of stride * batch bytes.
            unsafe {
                let vector = vectors.ptr_at(index);
                (*vector).iov_base = buffers.as_ptr().add(index * stride).cast();
                (*vector).iov_len = buffer;
                let header = &mut (*headers.ptr_at(index)).msg_hdr;
                header.msg_name = names.ptr_at(index).cast();
                header.msg_namelen = SockAddr::CAPACITY as u32;
                header.msg_iov = vector;
                header.msg_iovlen = 1;
                if control {
                    header.msg_control = controls.ptr_at(index).cast();
                    header.msg_controllen = control::RECV_CAPACITY as _;
                }
            }
        }
        Ok(Self {
            headers,
            names,
            controls,
            buffers,
            stride,
            buffer,
            control,
            written: 0,
            skipped: 0,
            _vectors: vectors,
        })
    }

    /// Maximum number of messages per call.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.headers.len()
    }

    /// Receives up to a batch and returns the number of messages; 0 if there are none.
    ///
    /// Overwrites the messages of the previous call. A wait ends early, with 0, after a signal, or
    /// when the socket was shut down for reading (which also wakes a receive on an unconnected
    /// socket).
    ///
    /// # Errors
    /// Those of `recvmmsg(2)`, except "nothing queued" and "interrupted".
    #[inline]
    pub fn recv(&mut self, fd: BorrowedFd<'_>, wait: Wait) -> io::Result<usize> {
        self.reset_headers();
        // MSG_TRUNC makes the kernel report the full length of a truncated datagram.
        let flags = libc::MSG_TRUNC
            | match wait {
                Wait::Never => libc::MSG_DONTWAIT,
                Wait::First => libc::MSG_WAITFORONE,
            };
        let vlen = self.headers.len() as libc::c_uint;
        let mut tries = RECV_RETRIES;
        let ret = loop {
            // SAFETY: the headers and all that they point at belong to this ring, which is
            // borrowed for the call.
            let ret = unsafe {
                libc::recvmmsg(fd.as_raw_fd(), self.headers.ptr_at(0), vlen, flags as _, ptr::null_mut())
            };
            if ret >= 0 {
                break ret as usize;
            }
            let err = io::Error::last_os_error();
            match err.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => return Ok(0),
                // Does not concern the queue, which may be full.
                Some(code) if tries > 0 && sock::is_icmp_error(code) => tries -= 1,
                _ => return Err(err),
            }
        };
        self.written = ret;
        // If the socket is shut down while the call sleeps, the first message is an empty one
        // without a sender; every datagram has one. Datagrams that arrive at that moment may
        // follow it.
        self.skipped = usize::from(ret > 0 && self.header(0).msg_hdr.msg_namelen == 0);
        Ok(self.written - self.skipped)
    }

    /// Resets what the kernel wrote into the headers: lengths of the address and of the control
    /// messages.
    fn reset_headers(&mut self) {
        for index in 0..self.written {
            // SAFETY: an element of the ring's own allocation, which is borrowed mutably.
            let header = unsafe { &mut (*self.headers.ptr_at(index)).msg_hdr };
            header.msg_namelen = SockAddr::CAPACITY as u32;
            if self.control {
                header.msg_controllen = control::RECV_CAPACITY as _;
            }
        }
        (self.written, self.skipped) = (0, 0);
    }

    /// Totals over the messages of the last receive.
    #[inline]
    #[must_use]
    pub fn totals(&self) -> Totals {
        let mut sums = Totals::default();
        for index in self.skipped..self.written {
            let header = self.header(index);
            let truncated = header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
            let has_control = self.control && header.msg_hdr.msg_controllen > 0;
            sums.add((header.msg_len as usize).min(self.buffer), truncated, has_control);
        }
        sums
    }

    fn header(&self, index: usize) -> &libc::mmsghdr {
        assert!(index < self.written);
        // SAFETY: the kernel has finished writing this header; writes need `&mut self`.
        unsafe { &*self.headers.ptr_at(index) }
    }

    /// Message `index` of the last receive.
    ///
    /// # Panics
    /// If the last receive did not return that many.
    #[inline]
    #[must_use]
    pub fn message(&self, index: usize) -> Message<'_> {
        let index = index + self.skipped;
        let header = self.header(index);
        let full_len = header.msg_len as usize;
        let len = full_len.min(self.buffer);
        // SAFETY: the buffer is inside the mapping, which started zeroed, so all of it is
        // initialised; the kernel writes to it only during `recv`, which needs `&mut self`.
        let data = unsafe { slice::from_raw_parts(self.buffers.as_ptr().add(index * self.stride), len) };
        // SAFETY: the element belongs to the ring; the kernel writes to it only during `recv`.
        let peer = unsafe { &*self.names.ptr_at(index) };
        let control = if self.control {
            #[allow(clippy::unnecessary_cast, reason = "the field's type differs between C libraries")]
            let len = (header.msg_hdr.msg_controllen as usize).min(control::RECV_CAPACITY);
            // SAFETY: as for `peer`; the length is limited to the size of the slot.
            unsafe { &(&(*self.controls.ptr_at(index)).0)[..len] }
        } else {
            &[]
        };
        Message { data, full_len, peer, control }
    }
}

/// Totals over the messages of a receive: sufficient for counting if no message has control
/// messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Bytes in the buffers.
    pub bytes: usize,
    /// Truncated messages.
    pub truncated: usize,
    /// Messages with control messages.
    pub with_control: usize,
}

impl Totals {
    #[inline]
    pub(crate) fn add(&mut self, bytes: usize, truncated: bool, has_control: bool) {
        self.bytes += bytes;
        self.truncated += usize::from(truncated);
        self.with_control += usize::from(has_control);
    }
}

/// One received message: a datagram, or with GRO several datagrams of one sender.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a> {
    /// The bytes in the buffer.
    pub data: &'a [u8],
    /// Length as sent; more than `data` if the message was truncated.
    pub full_len: usize,
    /// Source address.
    pub peer: &'a SockAddr,
    control: &'a [u8],
}

impl<'a> Message<'a> {
    /// A message that was not received by this ring. `control` has its control messages.
    #[inline]
    #[must_use]
    pub fn new(data: &'a [u8], full_len: usize, peer: &'a SockAddr, control: &'a [u8]) -> Self {
        Self { data, full_len, peer, control }
    }

    /// True if the message has control messages.
    #[inline]
    #[must_use]
    pub fn has_ancillary(&self) -> bool {
        !self.control.is_empty()
    }

    /// The parsed control messages.
    #[inline]
    #[must_use]
    pub fn ancillary(&self) -> Ancillary {
        if self.control.is_empty() { Ancillary::default() } else { control::parse(self.control) }
    }
}
