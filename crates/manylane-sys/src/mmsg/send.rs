//! Sending: `sendmmsg(2)` of datagrams that are queued in the ring, consecutive ones as GSO trains.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use crate::addr::{SockAddr, Source};
use crate::control::SendControl;
use crate::map::{Fixed, Mapping};

/// Largest payload of a UDP datagram over IPv4: 65,535 bytes less the headers of IP and UDP, 20 and 8 bytes.
const MAX_PAYLOAD: usize = 65_507;
/// Largest payload over IPv6, whose own header its length does not count (RFC 8200, section 3).
const MAX_PAYLOAD_V6: usize = 65_527;

/// Whether a datagram to `peer` can have so many bytes of payload.
#[inline]
#[must_use]
pub fn fits(peer: &SockAddr, len: usize) -> bool {
    len <= MAX_PAYLOAD || (len <= MAX_PAYLOAD_V6 && peer.is_v6() && !peer.is_v4_mapped())
}
/// `UDP_MAX_SEGMENTS` of kernels before 6.9; later ones take twice as many.
const MAX_SEGMENTS: u16 = 64;
/// Largest datagram that joins a train: larger ones do not fit an Ethernet frame, and the kernel refuses trains
/// whose segments exceed the MTU of the path (less for IPv6, tunnels and such: see `limit_gso`).
const MAX_SEGMENT: usize = 1472;
/// Pieces of payload that can be queued; contiguous ones share one.
const VECTORS: usize = 1024;
/// Space for payloads that are copied into the ring.
const ARENA: usize = 256 << 10;

/// Sizes of a [`SendRing`].
#[derive(Clone, Copy, Debug)]
pub struct SendOptions {
    /// Messages that one call sends at most, 1 to 1024.
    pub batch: usize,
    /// Whether consecutive datagrams of one size to one peer become one message (UDP GSO, since Linux 4.18).
    pub gso: bool,
}

/// A queued message: one datagram, or several of one size to one peer.
#[derive(Clone, Copy, Default)]
struct Train {
    first_vector: u32,
    vectors: u32,
    bytes: u32,
    segment: u16,
    count: u16,
    /// Another datagram may still join.
    open: bool,
    source: Option<Source>,
}

/// Headers, addresses, control messages and copy space for sending; see the [module](super).
pub struct SendRing {
    headers: Fixed<libc::mmsghdr>,
    names: Fixed<SockAddr>,
    controls: Fixed<SendControl>,
    vectors: Fixed<libc::iovec>,
    trains: Vec<Train>,
    arena: Mapping,
    /// Messages queued.
    queued: usize,
    vectors_used: usize,
    arena_used: usize,
    /// The headers say what is queued.
    sealed: bool,
    /// Largest datagram that may join a train; 0 for no trains.
    max_segment: usize,
    /// The last wait for room in the send buffer was in vain.
    stuck: bool,
}

// SAFETY: the raw pointers in the headers point into memory that the ring owns, or, in vectors that count as
// used, into payloads that a `SendBatch` borrows; a batch clears the queue before anything is sent.
unsafe impl Send for SendRing {}

impl SendRing {
    /// Allocates and builds everything that calls will use.
    ///
    /// # Errors
    /// `EINVAL` for a batch outside 1 to 1024; `ENOMEM` if a memory limit does not leave room.
    pub fn new(options: SendOptions) -> io::Result<Self> {
        let SendOptions { batch, gso } = options;
        if !(1..=1024).contains(&batch) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let names = Fixed::new(SockAddr::EMPTY, batch);
        // SAFETY: mmsghdr is a C struct of integers and pointers, for which all zeroes is a value.
        let headers: Fixed<libc::mmsghdr> = Fixed::new(unsafe { std::mem::zeroed() }, batch);
        for index in 0..batch {
            // SAFETY: an element of the ring's own allocation, which nobody else reads or writes now.
            unsafe { (*headers.at(index)).msg_hdr.msg_name = names.at(index).cast() };
        }
        Ok(Self {
            headers,
            names,
            controls: Fixed::new(SendControl::new(), batch),
            vectors: Fixed::new(libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }, VECTORS),
            trains: vec![Train::default(); batch],
            arena: Mapping::new(ARENA)?,
            queued: 0,
            vectors_used: 0,
            arena_used: 0,
            sealed: false,
            max_segment: if gso { MAX_SEGMENT } else { 0 },
            stuck: false,
        })
    }

    /// Starts an empty batch, which may borrow payloads as long as it borrows the ring.
    pub fn batch(&mut self) -> SendBatch<'_> {
        self.clear();
        SendBatch { ring: self }
    }

    fn clear(&mut self) {
        self.queued = 0;
        self.vectors_used = 0;
        self.arena_used = 0;
        self.sealed = false;
    }

    /// Joins the datagram to the last train if it may; true if it did.
    fn join(&mut self, peer: &SockAddr, source: Option<Source>, data: *const u8, len: usize) -> bool {
        let Some(last) = self.queued.checked_sub(1) else { return false };
        let train = &mut self.trains[last];
        let fits = train.open
            && len > 0
            && len <= usize::from(train.segment)
            && train.count < MAX_SEGMENTS
            && train.bytes as usize + len <= MAX_PAYLOAD
            && train.source == source;
        // SAFETY: an element of the ring's own allocation.
        if !fits || unsafe { &*self.names.at(last) } != peer {
            return false;
        }
        // SAFETY: a queued message has at least one vector; the element belongs to the ring.
        let end = unsafe { &mut *self.vectors.at(self.vectors_used - 1) };
        if end.iov_base.cast_const().cast::<u8>().wrapping_add(end.iov_len) == data {
            end.iov_len += len;
        } else {
            self.put_vector(data, len);
            self.trains[last].vectors += 1;
        }
        let train = &mut self.trains[last];
        train.count += 1;
        train.bytes += len as u32;
        train.open = len == usize::from(train.segment);
        true
    }

    fn put_vector(&mut self, data: *const u8, len: usize) {
        let vector = libc::iovec { iov_base: data.cast_mut().cast(), iov_len: len };
        // SAFETY: `at` checks the index; callers have checked that a vector is free.
        unsafe { *self.vectors.at(self.vectors_used) = vector };
        self.vectors_used += 1;
    }

    /// Queues one datagram; false, and nothing is queued, if there is no room. The caller keeps `data` alive until
    /// the queue is cleared or dropped.
    fn push(&mut self, peer: &SockAddr, source: Option<Source>, data: *const u8, len: usize) -> bool {
        if self.vectors_used == VECTORS {
            return false;
        }
        if self.join(peer, source, data, len) {
            self.sealed = false;
            return true;
        }
        if self.queued == self.headers.len() {
            return false;
        }
        self.sealed = false;
        let index = self.queued;
        self.trains[index] = Train {
            first_vector: self.vectors_used as u32,
            vectors: 1,
            bytes: len as u32,
            segment: len.min(usize::from(u16::MAX)) as u16,
            count: 1,
            open: (1..=self.max_segment).contains(&len),
            source,
        };
        // SAFETY: an element of the ring's own allocation; nothing else refers to it now.
        unsafe { *self.names.at(index) = *peer };
        self.put_vector(data, len);
        self.queued += 1;
        true
    }

    /// Makes the headers say what is queued, once for all that was pushed.
    fn seal(&mut self) {
        if std::mem::replace(&mut self.sealed, true) {
            return;
        }
        for index in 0..self.queued {
            let train = self.trains[index];
            let segment = (train.count > 1).then_some(train.segment);
            // SAFETY: elements of the ring's own allocations, which is borrowed mutably.
            let (header, control) =
                unsafe { (&mut (*self.headers.at(index)).msg_hdr, &mut *self.controls.at(index)) };
            let (at, len) = control.fill(train.source.as_ref(), segment);
            header.msg_control = ptr::from_mut(control).cast::<u8>().wrapping_add(at).cast();
            header.msg_controllen = len as _;
            // SAFETY: an element of the ring's own allocation.
            header.msg_namelen = unsafe { (*self.names.at(index)).as_bytes().len() } as u32;
            header.msg_iov = self.vectors.at(train.first_vector as usize);
            header.msg_iovlen = train.vectors as _;
        }
    }
}

/// Datagrams queued for sending, with payloads that live at least as long as this.
pub struct SendBatch<'a> {
    ring: &'a mut SendRing,
}

impl<'a> SendBatch<'a> {
    /// Messages queued; several datagrams may be in one.
    #[must_use]
    pub fn messages(&self) -> usize {
        self.ring.queued
    }

    /// Queues a datagram whose payload is borrowed; no copy is made. Returns false, and queues nothing, if the
    /// ring is full or the payload is longer than a datagram can be.
    #[inline]
    pub fn push(&mut self, peer: &SockAddr, source: Option<Source>, data: &'a [u8]) -> bool {
        fits(peer, data.len()) && self.ring.push(peer, source, data.as_ptr(), data.len())
    }

    /// Space in the ring for a payload of up to `len` bytes, for [`push_reserved`](Self::push_reserved); none if
    /// there is not so much left.
    #[inline]
    pub fn reserve(&mut self, len: usize) -> Option<&mut [u8]> {
        if len > MAX_PAYLOAD_V6 || len > ARENA - self.ring.arena_used {
            return None;
        }
        // SAFETY: the range lies inside the arena, which started zeroed; what is queued lies before it.
        Some(unsafe {
            std::slice::from_raw_parts_mut(self.ring.arena.as_ptr().add(self.ring.arena_used), len)
        })
    }

    /// Queues the first `len` bytes of what [`reserve`](Self::reserve) gave last. Returns false, and queues
    /// nothing, if the ring is full; the bytes stay as they are.
    #[inline]
    pub fn push_reserved(&mut self, peer: &SockAddr, source: Option<Source>, len: usize) -> bool {
        if !fits(peer, len) || len > ARENA - self.ring.arena_used {
            return false;
        }
        let data = self.ring.arena.as_ptr().wrapping_add(self.ring.arena_used);
        let pushed = self.ring.push(peer, source, data, len);
        self.ring.arena_used += if pushed { len } else { 0 };
        pushed
    }

    /// Forgets everything queued, but keeps the first `len` bytes of what [`reserve`](Self::reserve) gave last.
    pub fn clear_all_but_reserved(&mut self, len: usize) {
        let from = self.ring.arena_used;
        let len = len.min(ARENA - from);
        let arena = self.ring.arena.as_ptr();
        // SAFETY: both ranges lie inside the arena; they may overlap, which copy() allows.
        unsafe { ptr::copy(arena.add(from), arena, len) };
        self.ring.clear();
    }

    /// Datagrams in message `index`, and their bytes.
    #[must_use]
    pub fn content(&self, index: usize) -> (u64, u64) {
        let train = &self.ring.trains[index];
        (u64::from(train.count), u64::from(train.bytes))
    }

    /// Sends the queued messages from `from` on, without waiting; returns how many the kernel took.
    ///
    /// # Errors
    /// What `sendmmsg(2)` reports for message `from`. An error of a later one shows when a call starts with it.
    pub fn send(&mut self, fd: BorrowedFd<'_>, from: usize) -> io::Result<usize> {
        let left = self.ring.queued.saturating_sub(from);
        if left == 0 {
            return Ok(0);
        }
        self.ring.seal();
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: `seal` has set the headers to point at names, control messages and vectors of this ring; the
        // vectors point into the arena or into payloads that outlive `'a`, and so this call.
        let sent = unsafe {
            libc::sendmmsg(fd.as_raw_fd(), self.ring.headers.at(from), left as libc::c_uint, flags as _)
        };
        let sent = crate::check(sent)? as usize;
        self.ring.stuck = false;
        Ok(sent)
    }

    /// Sends the datagrams of message `index` one by one, from the `skip`th on: for devices and paths that do
    /// not take a train. Returns the datagrams and bytes that the kernel took before the first
    /// error, and that error.
    pub fn send_split(
        &mut self,
        fd: BorrowedFd<'_>,
        index: usize,
        skip: u64,
    ) -> (u64, u64, Option<io::Error>) {
        if index >= self.ring.queued {
            return (0, 0, None);
        }
        self.ring.seal();
        let train = self.ring.trains[index];
        let (at, len) = {
            // SAFETY: an element of the ring's own allocation, which is borrowed mutably.
            let control = unsafe { &mut *self.ring.controls.at(index) };
            control.fill(train.source.as_ref(), None)
        };
        // SAFETY: the header was sealed and points at memory of this ring; this is a copy of it.
        let mut header = unsafe { (*self.ring.headers.at(index)).msg_hdr };
        header.msg_control = self.ring.controls.at(index).cast::<u8>().wrapping_add(at).cast();
        header.msg_controllen = len as _;
        header.msg_iovlen = 1;
        // The headers no longer say what is queued: the next send has to seal them anew.
        self.ring.sealed = false;
        let mut seen = 0;
        let (mut sent, mut bytes) = (0, 0);
        for vector in 0..train.vectors {
            // SAFETY: a vector of this message; see `send` for what it points at.
            let whole = unsafe { *self.ring.vectors.at((train.first_vector + vector) as usize) };
            let mut offset = 0;
            while offset < whole.iov_len {
                let len = usize::from(train.segment).min(whole.iov_len - offset);
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

    /// Forgets everything queued, so that the space can be used again.
    pub fn clear(&mut self) {
        self.ring.clear();
    }

    /// Whether the last wait for room in the send buffer was in vain, and nothing has left since.
    #[must_use]
    pub fn is_stuck(&self) -> bool {
        self.ring.stuck
    }

    /// Remembers, beyond this batch, that a wait for room was in vain.
    pub fn set_stuck(&mut self) {
        self.ring.stuck = true;
    }

    /// Bytes of each datagram in message `index` (but the last, which may be shorter).
    #[must_use]
    pub fn segment(&self, index: usize) -> u16 {
        self.ring.trains[index].segment
    }

    /// Lets only datagrams of up to `bytes` join trains from now on; 0 ends trains.
    pub fn limit_gso(&mut self, bytes: u16) {
        self.ring.max_segment = self.ring.max_segment.min(usize::from(bytes));
    }
}

impl Drop for SendBatch<'_> {
    fn drop(&mut self) {
        // The payloads may go away now.
        self.ring.clear();
    }
}
