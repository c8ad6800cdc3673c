//! The memory of a prefetch and its state.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use libc::{iovec, mmsghdr};

use crate::base::recv_bufs::DatagramRef;
use crate::shared::memory::{ProcessOwned, Zeroed};
use crate::shared::{liveness, thread};

/// Max datagrams in a prefetch.
pub(crate) const PREFETCH_MAX: usize = 32;

/// First bytes of each datagram, which lie close together, and the rest of the longest datagram.
pub(super) const HEAD_LEN: usize = 2048;
pub(super) const TAIL_LEN: usize = 65536 - HEAD_LEN;
/// Bytes of an address of either family.
pub(super) const SOCKADDR_LEN_MAX: usize = 32;

/// The state word: FILLING; generation (31 bits), claims (16), end and next (8 each).
pub(super) const FILLING: u64 = 1 << 63;
pub(super) const GENERATION: u64 = 1 << 32;
const GENERATIONS: u64 = 0x7fff_ffff << 32;
pub(super) const CLAIMS: u64 = 0xffff_0000;
pub(super) const CLAIM: u64 = 1 << 16;
pub(super) const END_SHIFT: u32 = 8;
/// Bits of a shared length that are the payload's; those above are the address's.
const NAME_SHIFT: u32 = 24;
const LEN_MASK: u32 = (1 << NAME_SHIFT) - 1;
/// Length of a message that the kernel has not written.
pub(super) const NOT_RECEIVED: u32 = u32::MAX;

/// Datagrams prefetched from one lane.
#[repr(C)]
pub(crate) struct Prefetch {
    pub(super) headers: ProcessOwned<Headers>,
    pub(super) state: AtomicU64,
    /// Liveness token of the filler; 0 if there is none.
    pub(super) filler: AtomicU64,
    /// Written only by the owner of the lane.
    pub(super) credits: AtomicU32,
    pub(super) skipped: AtomicU32,
    /// Lengths of payload and address. Written only by the thread in `filler`.
    lens: [AtomicU32; PREFETCH_MAX],
    names: UnsafeCell<[[u8; SOCKADDR_LEN_MAX]; PREFETCH_MAX]>,
    heads: UnsafeCell<[[u8; HEAD_LEN]; PREFETCH_MAX]>,
    tails: UnsafeCell<[[u8; TAIL_LEN]; PREFETCH_MAX]>,
}

/// Message headers that the kernel is given for a fill.
pub(super) struct Headers {
    /// The state during this process's latest fill: the headers belong to that fill.
    pub(super) filling: AtomicU64,
    pub(super) messages: [mmsghdr; PREFETCH_MAX],
    iovecs: [[iovec; 2]; PREFETCH_MAX],
}

// SAFETY: fields that are not atomic are written only by the thread that set FILLING, and read
// only by threads with a claim, or headers by the thread in `filler`: `state` and `filler` keep
// them apart.
unsafe impl Sync for Prefetch {}
// SAFETY: zeroes are an empty prefetch with null headers; `map` sets the headers before it
// publishes the mapping.
unsafe impl Zeroed for Prefetch {}

impl Prefetch {
    pub(super) fn init(&self) -> bool {
        if !self.headers.detach() {
            return false;
        }
        let own = self.headers.get();
        for slot in 0..PREFETCH_MAX {
            let (name, head, tail) = self.slot(slot);
            // SAFETY: `slot` is within all of the arrays, and the mapping is not published yet.
            // Its address is the same in all processes that have it, because they are forked.
            unsafe {
                (*own).iovecs[slot] = [
                    iovec { iov_base: head.cast(), iov_len: HEAD_LEN },
                    iovec { iov_base: tail.cast(), iov_len: TAIL_LEN },
                ];
                let message = &mut (*own).messages[slot];
                message.msg_hdr.msg_name = name.cast();
                message.msg_hdr.msg_iov = (&raw mut (*own).iovecs[slot]).cast();
                message.msg_hdr.msg_iovlen = 2;
                message.msg_len = NOT_RECEIVED;
            }
        }
        true
    }

    /// The places of the address, the head and the tail of a slot.
    pub(super) fn slot(&self, slot: usize) -> (*mut u8, *mut u8, *mut u8) {
        (
            self.names.get().cast::<u8>().wrapping_add(slot * SOCKADDR_LEN_MAX),
            self.heads.get().cast::<u8>().wrapping_add(slot * HEAD_LEN),
            self.tails.get().cast::<u8>().wrapping_add(slot * TAIL_LEN),
        )
    }

    /// Empties it for another socket's lane, and prevents fills until [`reopen`](Self::reopen).
    /// False if a thread is still filling it or copying from it: then it must not be given to
    /// another socket.
    pub(crate) fn reset(&self, mine: liveness::Token) -> bool {
        if !self.lock(mine) {
            return false;
        }
        let word = self.state.load(Ordering::Acquire);
        let has_claims = word & FILLING == 0 && word & CLAIMS != 0;
        // A new generation, so that no earlier fill is finished here.
        let empty = next_generation(word);
        if has_claims
            || self.state.compare_exchange(word, empty, Ordering::AcqRel, Ordering::Relaxed).is_err()
        {
            return false;
        }
        self.credits.store(0, Ordering::Relaxed);
        true
    }

    /// Called after [`reset`](Self::reset), once the socket's mode is that of a closed one.
    pub(crate) fn reopen(&self) {
        self.filler.store(0, Ordering::Release);
    }

    /// Makes the thread of token `mine` the filler, unless another one is filling and alive.
    pub(super) fn lock(&self, mine: liveness::Token) -> bool {
        let filler = self.filler.load(Ordering::Relaxed);
        // Acquire: the last filler's writes happen before those of this one.
        (filler == 0 || liveness::has_exited(filler))
            && self.filler.compare_exchange(filler, mine, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// True if there is a datagram to take.
    #[inline]
    pub(crate) fn has_datagrams(&self) -> bool {
        let word = self.recovered_state();
        word & FILLING == 0 && next(word) < end(word)
    }

    /// True if it is empty and no thread is filling it.
    pub(super) fn is_idle(&self) -> bool {
        let word = self.recovered_state();
        word & FILLING == 0 && next(word) >= end(word)
    }

    /// The state, after an abandoned fill was finished.
    #[inline]
    pub(super) fn recovered_state(&self) -> u64 {
        // SeqCst, as where the mode changes: see `fill_locked`.
        let word = self.state.load(Ordering::SeqCst);
        if word & FILLING == 0 { word } else { self.recover(word) }
    }

    #[cold]
    fn recover(&self, word: u64) -> u64 {
        let filler = self.filler.load(Ordering::Acquire);
        let own = thread::acquired_liveness();
        if filler != 0 && filler == own {
            // A signal may have interrupted the fill before its system call, which must then still
            // be made.
            if self.count(word) > 0 {
                self.publish_received(word);
            }
        } else if filler != 0 && liveness::has_exited(filler) && self.lock(thread::holder_token()) {
            // The thread may have begun another fill before it died.
            let word = self.state.load(Ordering::SeqCst);
            if word & FILLING != 0 {
                self.publish_received(word);
            }
            self.filler.store(0, Ordering::Release);
        }
        self.state.load(Ordering::SeqCst)
    }

    /// Messages of the fill `filling` that the kernel has written; 0 if another process made it.
    fn count(&self, filling: u64) -> usize {
        let own = self.headers.get();
        // SAFETY: memory of this process's own; an atomic.
        if unsafe { (*own).filling.load(Ordering::Relaxed) } != filling {
            return 0;
        }
        (0..PREFETCH_MAX).take_while(|slot| self.received_len(*slot) != NOT_RECEIVED).count()
    }

    fn received_len(&self, slot: usize) -> u32 {
        let own = self.headers.get();
        // SAFETY: within the array; the kernel may be writing the header, and only the number is
        // read.
        unsafe { (&raw const (*own).messages[slot].msg_len).read_volatile() }
    }

    /// Ends the fill `filling`, unless a signal handler has done so. Only for the thread in
    /// `filler`. Returns the number of datagrams.
    pub(super) fn publish_received(&self, filling: u64) -> usize {
        let count = self.count(filling);
        if self.state.load(Ordering::Relaxed) != filling {
            return count;
        }
        for slot in 0..count {
            let own = self.headers.get();
            // SAFETY: within the array; the kernel has written it.
            let name_len = unsafe { (*own).messages[slot].msg_hdr.msg_namelen }.min(SOCKADDR_LEN_MAX as u32);
            self.lens[slot].store(self.received_len(slot) | name_len << NAME_SHIFT, Ordering::Relaxed);
        }
        #[cfg(manylane_tsan)]
        self.report_writes(count);
        self.publish(filling, count);
        count
    }

    /// Ends the fill `filling` with `count` datagrams.
    pub(super) fn publish(&self, filling: u64, count: usize) {
        let word = filling & GENERATIONS | (count as u64) << END_SHIFT;
        _ = self.state.compare_exchange(filling, word, Ordering::SeqCst, Ordering::Relaxed);
    }

    /// Lengths of the payload and of the address in a slot, not longer than there is room for.
    pub(super) fn lens(&self, slot: usize) -> (usize, usize) {
        let lens = self.lens[slot].load(Ordering::Relaxed);
        let (len, name_len) = (lens & LEN_MASK, lens >> NAME_SHIFT);
        ((len as usize).min(HEAD_LEN + TAIL_LEN), (name_len as usize).min(SOCKADDR_LEN_MAX))
    }

    /// The datagram in a claimed slot.
    pub(super) fn datagram(&self, slot: usize) -> DatagramRef<'_> {
        let (len, name_len) = self.lens(slot);
        let (name, head, tail) = self.slot(slot);
        // SAFETY: the slot and these lengths are within the arrays; the caller has a claim, so that
        // no thread writes to it.
        unsafe {
            DatagramRef {
                name: std::slice::from_raw_parts(name, name_len),
                payload: [
                    std::slice::from_raw_parts(head, len.min(HEAD_LEN)),
                    std::slice::from_raw_parts(tail, len.saturating_sub(HEAD_LEN)),
                ],
                control: &[],
            }
        }
    }

    /// Reports the kernel's writes to ThreadSanitizer, which does not see those of system calls,
    /// and so would miss a race between a fill and the threads that take.
    #[cfg(manylane_tsan)]
    fn report_writes(&self, count: usize) {
        unsafe extern "C" {
            fn __tsan_write_range(address: *const u8, size: libc::c_ulong);
        }
        for slot in 0..count {
            let datagram = self.datagram(slot);
            for part in [datagram.name, datagram.payload[0], datagram.payload[1]] {
                // SAFETY: the runtime records the addresses, and does not access the memory.
                unsafe { __tsan_write_range(part.as_ptr(), part.len() as libc::c_ulong) };
            }
        }
    }
}

/// The state of an empty prefetch, of the generation after that of `word`.
pub(super) fn next_generation(word: u64) -> u64 {
    (word & GENERATIONS).wrapping_add(GENERATION) & GENERATIONS
}

#[inline]
pub(super) fn next(word: u64) -> usize {
    (word & 0xff) as usize
}

#[inline]
pub(super) fn end(word: u64) -> usize {
    ((word >> END_SHIFT & 0xff) as usize).min(PREFETCH_MAX)
}
