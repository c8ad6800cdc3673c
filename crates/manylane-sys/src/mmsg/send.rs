//! Sending: `sendmmsg(2)` of datagrams queued in the ring, with consecutive ones merged into GSO
//! messages.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use crate::addr::{SockAddr, Source};
use crate::control::SendControl;
use crate::map::{Mapping, PinnedSlice};
use crate::padded::PaddedSlice;

/// Maximum payload of a UDP datagram over IPv4: 65,535 bytes less the headers of IP and UDP, 20
/// and 8 bytes.
const PAYLOAD_LEN_MAX: usize = 65_507;
/// Maximum payload over IPv6, whose length field does not count its own header (RFC 8200, section
/// 3).
const PAYLOAD_V6_LEN_MAX: usize = 65_527;

/// True if a datagram to `peer` can have `len` bytes of payload.
#[inline]
#[must_use]
pub fn fits(peer: &SockAddr, len: usize) -> bool {
    len <= PAYLOAD_LEN_MAX || (len <= PAYLOAD_V6_LEN_MAX && peer.is_v6() && !peer.is_v4_mapped())
}
/// Maximum number of datagrams in a GSO message: `UDP_MAX_SEGMENTS` of kernels before 6.9; later
/// ones accept twice as many.
pub const SEGMENTS_MAX: usize = 64;
/// Maximum size of a segment of a GSO message. Larger datagrams do not fit an Ethernet frame, and
/// the kernel refuses GSO messages whose segments exceed the path's MTU (less for IPv6, tunnels
/// and such: see `limit_gso`).
const SEGMENT_SIZE_MAX: usize = 1472;
/// Maximum number of payload slices; contiguous ones share one.
const VECTORS_MAX: usize = 1024;
/// Space for payloads copied into the ring.
const ARENA_BYTES: usize = 256 << 10;

/// Sizes of a [`SendRing`].
#[derive(Clone, Copy, Debug)]
pub struct SendOptions {
    /// Maximum number of messages per call, 1 to 1024.
    pub batch: usize,
    /// True to merge consecutive datagrams of one size to one peer into one message (UDP GSO,
    /// Linux 4.18).
    pub gso: bool,
}

/// A queued message: one datagram, or several of one size to one peer.
#[derive(Clone, Copy, Default)]
struct GsoMessage {
    first_vector: u32,
    vectors: u32,
    bytes: u32,
    segment_size: u16,
    count: u16,
    /// Another datagram may still be merged.
    open: bool,
    source: Option<Source>,
}

/// Headers, addresses, control messages and copy space for sending; see the [module](super).
pub struct SendRing {
    headers: PinnedSlice<libc::mmsghdr>,
    names: PinnedSlice<SockAddr>,
    controls: PinnedSlice<SendControl>,
    vectors: PinnedSlice<libc::iovec>,
    gso_messages: PaddedSlice<GsoMessage>,
    arena: Mapping,
    /// Queued messages.
    queued: usize,
    vectors_used: usize,
    arena_used: usize,
    /// The headers describe the queued messages.
    headers_valid: bool,
    /// Maximum size of a segment; 0 for no GSO.
    max_segment_size: usize,
    /// The last wait for room in the send buffer timed out.
    stuck: bool,
}

// SAFETY: the raw pointers in the headers point into memory that the ring owns, or, in vectors in
// use, into payloads that a `SendBatch` borrows; a batch clears the queue before anything is sent.
unsafe impl Send for SendRing {}

impl SendRing {
    /// Allocates and builds everything that calls will use.
    ///
    /// # Errors
    /// `EINVAL` for a batch outside 1 to 1024; `ENOMEM` at a memory limit.
    pub fn new(options: SendOptions) -> io::Result<Self> {
        let SendOptions { batch, gso } = options;
        if !(1..=1024).contains(&batch) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let names = PinnedSlice::new(SockAddr::EMPTY, batch);
        // SAFETY: mmsghdr is a C struct of integers and pointers, for which all zeros are valid.
        let headers: PinnedSlice<libc::mmsghdr> = PinnedSlice::new(unsafe { std::mem::zeroed() }, batch);
        for index in 0..batch {
            // SAFETY: an element of the ring's own allocation, which no other code accesses now.
            unsafe { (*headers.ptr_at(index)).msg_hdr.msg_name = names.ptr_at(index).cast() };
        }
        Ok(Self {
            headers,
            names,
            controls: PinnedSlice::new(SendControl::new(), batch),
            vectors: PinnedSlice::new(libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }, VECTORS_MAX),
            gso_messages: PaddedSlice::new(GsoMessage::default(), batch),
            arena: Mapping::new(ARENA_BYTES)?,
            queued: 0,
            vectors_used: 0,
            arena_used: 0,
            headers_valid: false,
            max_segment_size: if gso { SEGMENT_SIZE_MAX } else { 0 },
            stuck: false,
        })
    }

    /// Starts an empty batch, which may borrow payloads for as long as it borrows the ring.
    pub fn batch(&mut self) -> SendBatch<'_> {
        self.clear();
        SendBatch { ring: self }
    }

    fn clear(&mut self) {
        self.queued = 0;
        self.vectors_used = 0;
        self.arena_used = 0;
        self.headers_valid = false;
    }

    /// Merges the datagram into the last message if possible; true if it was.
    fn join(&mut self, peer: &SockAddr, source: Option<Source>, data: *const u8, len: usize) -> bool {
        let Some(last) = self.queued.checked_sub(1) else { return false };
        let message = &mut self.gso_messages[last];
        let fits = message.open
            && len > 0
            && len <= usize::from(message.segment_size)
            && usize::from(message.count) < SEGMENTS_MAX
            && message.bytes as usize + len <= PAYLOAD_LEN_MAX
            && message.source == source;
        // SAFETY: an element of the ring's own allocation.
        if !fits || unsafe { &*self.names.ptr_at(last) } != peer {
            return false;
        }
        // SAFETY: a queued message has at least one vector; the element belongs to the ring.
        let end = unsafe { &mut *self.vectors.ptr_at(self.vectors_used - 1) };
        if end.iov_base.cast_const().cast::<u8>().wrapping_add(end.iov_len) == data {
            end.iov_len += len;
        } else {
            self.push_vector(data, len);
            self.gso_messages[last].vectors += 1;
        }
        let message = &mut self.gso_messages[last];
        message.count += 1;
        message.bytes += len as u32;
        message.open = len == usize::from(message.segment_size);
        true
    }

    fn push_vector(&mut self, data: *const u8, len: usize) {
        let vector = libc::iovec { iov_base: data.cast_mut().cast(), iov_len: len };
        // SAFETY: `ptr_at` checks the index; callers have checked that a vector is free.
        unsafe { *self.vectors.ptr_at(self.vectors_used) = vector };
        self.vectors_used += 1;
    }

    /// Queues one datagram; false, with nothing queued, if there is no room. The caller keeps
    /// `data` alive until the queue is cleared or dropped.
    fn push(&mut self, peer: &SockAddr, source: Option<Source>, data: *const u8, len: usize) -> bool {
        if self.vectors_used == VECTORS_MAX {
            return false;
        }
        if self.join(peer, source, data, len) {
            self.headers_valid = false;
            return true;
        }
        if self.queued == self.headers.len() {
            return false;
        }
        self.headers_valid = false;
        let index = self.queued;
        self.gso_messages[index] = GsoMessage {
            first_vector: self.vectors_used as u32,
            vectors: 1,
            bytes: len as u32,
            segment_size: len.min(usize::from(u16::MAX)) as u16,
            count: 1,
            open: (1..=self.max_segment_size).contains(&len),
            source,
        };
        // SAFETY: an element of the ring's own allocation, with no other references now.
        unsafe { *self.names.ptr_at(index) = *peer };
        self.push_vector(data, len);
        self.queued += 1;
        true
    }

    /// Writes the headers of the queued messages, once for all that were pushed.
    fn write_headers(&mut self) {
        if std::mem::replace(&mut self.headers_valid, true) {
            return;
        }
        for index in 0..self.queued {
            let message = self.gso_messages[index];
            let segment = (message.count > 1).then_some(message.segment_size);
            // SAFETY: elements of allocations of the ring, which is borrowed mutably.
            let (header, control) =
                unsafe { (&mut (*self.headers.ptr_at(index)).msg_hdr, &mut *self.controls.ptr_at(index)) };
            let (at, len) = control.fill(message.source.as_ref(), segment);
            header.msg_control = ptr::from_mut(control).cast::<u8>().wrapping_add(at).cast();
            header.msg_controllen = len as _;
            // SAFETY: an element of the ring's own allocation.
            header.msg_namelen = unsafe { (*self.names.ptr_at(index)).as_bytes().len() } as u32;
            header.msg_iov = self.vectors.ptr_at(message.first_vector as usize);
            header.msg_iovlen = message.vectors as _;
        }
    }
}

/// A queue of datagrams to send, with payloads that live at least as long.
pub struct SendBatch<'a> {
    ring: &'a mut SendRing,
}

impl<'a> SendBatch<'a> {
    /// Queued messages; one may have several datagrams.
    #[must_use]
    pub fn messages(&self) -> usize {
        self.ring.queued
    }

    /// Queues a datagram with a borrowed payload, without a copy. Returns false, with nothing
    /// queued, if the ring is full or the payload is too long for a datagram.
    #[inline]
    pub fn push(&mut self, peer: &SockAddr, source: Option<Source>, data: &'a [u8]) -> bool {
        fits(peer, data.len()) && self.ring.push(peer, source, data.as_ptr(), data.len())
    }

    /// Reserves space in the ring for a payload of up to `len` bytes, for
    /// [`push_reserved`](Self::push_reserved); none if there is not enough.
    #[inline]
    pub fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        if len > PAYLOAD_V6_LEN_MAX || len > ARENA_BYTES - self.ring.arena_used {
            return None;
        }
        // SAFETY: the range is inside the arena, which started zeroed; queued payloads are before
        // it.
        Some(unsafe {
            std::slice::from_raw_parts_mut(self.ring.arena.as_ptr().add(self.ring.arena_used), len)
        })
    }

    /// Queues the first `len` bytes of the last [`reserve`](Self::reserve). Returns false, with
    /// nothing queued, if the ring is full; the bytes are unchanged.
    #[inline]
    pub fn push_reserved(&mut self, peer: &SockAddr, source: Option<Source>, len: usize) -> bool {
        if !fits(peer, len) || len > ARENA_BYTES - self.ring.arena_used {
            return false;
        }
        let data = self.ring.arena.as_ptr().wrapping_add(self.ring.arena_used);
        let pushed = self.ring.push(peer, source, data, len);
        self.ring.arena_used += if pushed { len } else { 0 };
        pushed
    }

    /// Clears the queue, but keeps the first `len` bytes of the last [`reserve`](Self::reserve).
    pub fn clear_keep_reserved(&mut self, len: usize) {
        let from = self.ring.arena_used;
        let len = len.min(ARENA_BYTES - from);
        let arena = self.ring.arena.as_ptr();
        // SAFETY: both ranges are inside the arena; they may overlap, which copy() allows.
        unsafe { ptr::copy(arena.add(from), arena, len) };
        self.ring.clear();
    }

    /// Number of datagrams in message `index`, and their bytes.
    #[must_use]
    pub fn message_counts(&self, index: usize) -> (u64, u64) {
        let message = &self.ring.gso_messages[index];
        (u64::from(message.count), u64::from(message.bytes))
    }

    /// Sends the queued messages from `from` on, without waiting; returns how many the kernel
    /// accepted.
    ///
    /// # Errors
    /// Those of `sendmmsg(2)` for message `from`. An error of a later one is returned when a call
    /// starts with it.
    pub fn send(&mut self, fd: BorrowedFd<'_>, from: usize) -> io::Result<usize> {
        let left = self.ring.queued.saturating_sub(from);
        if left == 0 {
            return Ok(0);
        }
        self.ring.write_headers();
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: `write_headers` has set the headers to point at names, control messages and
        // vectors of this ring; the vectors point into the arena or into payloads that outlive
        // `'a`, and so this call.
        let sent = unsafe {
            libc::sendmmsg(fd.as_raw_fd(), self.ring.headers.ptr_at(from), left as libc::c_uint, flags as _)
        };
        let sent = crate::check(sent)? as usize;
        self.ring.stuck = false;
        Ok(sent)
    }

    /// Sends the datagrams of message `index` one by one, from datagram `skip` on, for devices and
    /// paths that refuse a GSO message. Returns the datagrams and bytes that the kernel accepted
    /// before the first error, and that error.
    pub fn send_split(
        &mut self,
        fd: BorrowedFd<'_>,
        index: usize,
        skip: u64,
    ) -> (u64, u64, Option<io::Error>) {
        if index >= self.ring.queued {
            return (0, 0, None);
        }
        self.ring.write_headers();
        let message = self.ring.gso_messages[index];
        let (at, len) = {
            // SAFETY: an element of an allocation of the ring, which is borrowed mutably.
            let control = unsafe { &mut *self.ring.controls.ptr_at(index) };
            control.fill(message.source.as_ref(), None)
        };
        // SAFETY: `write_headers` has filled in the header, which points at memory of this ring;
        // this is a copy of it.
        let mut header = unsafe { (*self.ring.headers.ptr_at(index)).msg_hdr };
        header.msg_control = self.ring.controls.ptr_at(index).cast::<u8>().wrapping_add(at).cast();
        header.msg_controllen = len as _;
        header.msg_iovlen = 1;
        // The control message no longer matches the header: the next send has to write the headers
        // anew.
        self.ring.headers_valid = false;
        let mut seen = 0;
        let (mut sent, mut bytes) = (0, 0);
        for vector in 0..message.vectors {
            // SAFETY: a vector of this message; see `send` for what it points at.
            let whole = unsafe { *self.ring.vectors.ptr_at((message.first_vector + vector) as usize) };
            let mut offset = 0;
            while offset < whole.iov_len {
                let len = usize::from(message.segment_size).min(whole.iov_len - offset);
                let base = whole.iov_base.cast::<u8>().wrapping_add(offset).cast();
                let mut one = libc::iovec { iov_base: base, iov_len: len };
                offset += len;
                seen += 1;
                if seen <= skip {
                    continue;
                }
                header.msg_iov = &raw mut one;
                let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
                // SAFETY: header, vector and what they point at live across the call.
                if unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const header, flags) } < 0 {
                    return (sent, bytes, Some(io::Error::last_os_error()));
                }
                self.ring.stuck = false;
                sent += 1;
                bytes += len as u64;
            }
        }
        (sent, bytes, None)
    }

    /// Clears the queue, so that its space can be reused.
    pub fn clear(&mut self) {
        self.ring.clear();
    }

    /// True if the last wait for room in the send buffer timed out, and nothing was sent since.
    #[must_use]
    pub fn is_stuck(&self) -> bool {
        self.ring.stuck
    }

    /// Records, beyond this batch, whether a wait for room has timed out.
    pub fn set_stuck(&mut self, stuck: bool) {
        self.ring.stuck = stuck;
    }

    /// Peer, source and bytes of message `index`, as a copy: for senders other than a socket.
    #[must_use]
    pub fn copy_message(&self, index: usize) -> (SockAddr, Option<Source>, Vec<u8>) {
        let message = &self.ring.gso_messages[index];
        // SAFETY: an element of the ring's own allocation.
        let peer = unsafe { *self.ring.names.ptr_at(index) };
        let mut bytes = Vec::with_capacity(message.bytes as usize);
        let queued = if index < self.ring.queued { message.vectors } else { 0 };
        for vector in 0..queued {
            // SAFETY: a vector of a queued message; see `send` for what it points at.
            let payload = unsafe {
                let vector = *self.ring.vectors.ptr_at((message.first_vector + vector) as usize);
                std::slice::from_raw_parts(vector.iov_base.cast_const().cast::<u8>(), vector.iov_len)
            };
            bytes.extend_from_slice(payload);
        }
        (peer, message.source, bytes)
    }

    /// Size of each datagram in message `index` (except the last, which may be shorter).
    #[must_use]
    pub fn segment_size(&self, index: usize) -> u16 {
        self.ring.gso_messages[index].segment_size
    }

    /// Limits segments of later GSO messages to `bytes`; 0 disables GSO.
    pub fn limit_gso(&mut self, bytes: u16) {
        self.ring.max_segment_size = self.ring.max_segment_size.min(usize::from(bytes));
    }
}

impl Drop for SendBatch<'_> {
    fn drop(&mut self) {
        // The payloads may be freed after this.
        self.ring.clear();
    }
}
