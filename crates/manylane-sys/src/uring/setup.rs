//! The ring itself: setup, ownership by one thread, calls.
//!
//! # Memory ordering
//!
//! Both rings are arrays with two counters that only grow (and wrap at 2^32); each side writes one
//! and reads the other.
//! 1. *Submissions*: the entry is written, then our counter with `Release`; the kernel loads it
//!    with `Acquire` (`io_sqring_entries`). It reads entries only in our own call, which orders
//!    them anyway. An entry is free again when the call reports that it was submitted.
//! 2. *Completions*: the kernel writes the entry, and before it the buffer that the entry names,
//!    then its counter with `smp_store_release` (`io_commit_cqring`); we load that counter with
//!    `Acquire`, and so see entry and buffer. We read the entry, then store our counter with
//!    `Release`; the kernel loads it with `Acquire` before it writes the entry again
//!    (`__io_cqring_events`, control dependency in `io_cqe_cache_refill`).
//! 3. *The flag "there is work"* is set, with an atomic or, by the context that queues a datagram,
//!    after it was queued. We load it with `Acquire`. A flag that we see late is seen by the next
//!    call, like a datagram that arrives a moment later.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::abi::{self, Cqe, GetEventsArg, Params, Sqe, Timespec};
use crate::map::{Mapping, READ_WRITE};

/// Submission entries: a receive, or its cancellation.
const SUBMISSION_ENTRIES: u32 = 4;

/// Calls after which requests in flight are left to the kernel, and the maximum wait of each.
const CANCEL_RETRIES: u32 = 10;
const CANCEL_TIMEOUT: Duration = Duration::from_millis(10);

/// A ring. One thread submits to it and reads its completions; it is its owner from
/// [`enable`](Self::enable) on.
pub(super) struct Ring {
    sq_tail: NonNull<AtomicU32>,
    sq_flags: NonNull<AtomicU32>,
    sqes: NonNull<Sqe>,
    cq_head: NonNull<AtomicU32>,
    cq_tail: NonNull<AtomicU32>,
    cqes: NonNull<Cqe>,
    sq_mask: u32,
    cq_mask: u32,
    /// Our counters: entries pushed, and completions popped.
    local_sq_tail: u32,
    local_cq_head: u32,
    /// Pushed and not submitted yet.
    queued: u32,
    _mappings: [Mapping; 2],
    fd: OwnedFd,
}

// SAFETY: on our side, this value alone owns the memory. A violation of the kernel's rule that one
// thread submits is reported by an error, and does not affect memory.
unsafe impl Send for Ring {}

impl AsFd for Ring {
    /// Readable while there are completions, or work that would produce them.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Ring {
    /// Makes a disabled ring with room for `completions`; with an index array, as before Linux
    /// 6.6, if `sqarray`.
    pub(super) fn new(completions: u32, sqarray: bool) -> io::Result<Self> {
        Self::with_entries(SUBMISSION_ENTRIES, completions, sqarray)
    }

    /// The same with room for `submissions`.
    pub(super) fn with_entries(submissions: u32, completions: u32, sqarray: bool) -> io::Result<Self> {
        let flags = abi::SETUP_CQSIZE
            | abi::SETUP_R_DISABLED
            | abi::SETUP_SINGLE_ISSUER
            | abi::SETUP_DEFER_TASKRUN
            | abi::SETUP_TASKRUN_FLAG;
        if !sqarray {
            match Self::with_flags(submissions, completions, flags | abi::SETUP_NO_SQARRAY) {
                Err(err) if err.raw_os_error() == Some(libc::EINVAL) => {}
                done => return done,
            }
        }
        Self::with_flags(submissions, completions, flags)
    }

    fn with_flags(submissions: u32, completions: u32, flags: u32) -> io::Result<Self> {
        let mut params = Params { flags, cq_entries: completions, ..Params::default() };
        // SAFETY: the kernel reads and writes `params`, which lives across the call.
        let raw = unsafe { libc::syscall(libc::SYS_io_uring_setup, submissions, &raw mut params) };
        let raw = crate::check(raw as libc::c_int)?;
        // SAFETY: the descriptor is new, and this value is its only owner.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        let needed = abi::FEAT_SINGLE_MMAP | abi::FEAT_NODROP | abi::FEAT_EXT_ARG;
        if params.features & needed != needed {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let (sq, cq) = (params.sq_off, params.cq_off);
        let has_array = flags & abi::SETUP_NO_SQARRAY == 0;
        let array_end = if has_array { sq.array as usize + params.sq_entries as usize * 4 } else { 0 };
        let len = (cq.cqes as usize + params.cq_entries as usize * size_of::<Cqe>()).max(array_end);
        let rings = Mapping::populated(fd.as_fd(), abi::OFF_RINGS, len, READ_WRITE)?;
        let entries = Mapping::populated(
            fd.as_fd(),
            abi::OFF_SQES,
            params.sq_entries as usize * size_of::<Sqe>(),
            READ_WRITE,
        )?;
        if has_array {
            let array = rings.ptr_at::<u32>(sq.array as usize, params.sq_entries as usize)?;
            for index in 0..params.sq_entries {
                // SAFETY: an element of the array that `ptr_at` has checked; the ring is disabled,
                // so the kernel does not read it.
                unsafe { array.add(index as usize).write(index) };
            }
        }
        Ok(Self {
            sq_tail: rings.ptr_at(sq.tail as usize, 1)?,
            sq_flags: rings.ptr_at(sq.flags as usize, 1)?,
            sqes: entries.ptr_at(0, params.sq_entries as usize)?,
            cq_head: rings.ptr_at(cq.head as usize, 1)?,
            cq_tail: rings.ptr_at(cq.tail as usize, 1)?,
            cqes: rings.ptr_at(cq.cqes as usize, params.cq_entries as usize)?,
            // Both are powers of two.
            sq_mask: params.sq_entries - 1,
            cq_mask: params.cq_entries - 1,
            local_sq_tail: 0,
            local_cq_head: 0,
            queued: 0,
            _mappings: [rings, entries],
            fd,
        })
    }

    /// Makes the calling thread the submitter.
    pub(super) fn enable(&self) -> io::Result<()> {
        // SAFETY: takes no argument.
        unsafe { self.register(abi::REGISTER_ENABLE_RINGS, ptr::null(), 0) }
    }

    /// Registers `socket` as the only file, index 0.
    #[cfg(any(test, feature = "bench"))]
    pub(super) fn register_file(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        let files = [socket.as_raw_fd()];
        // SAFETY: one descriptor, which the kernel only reads.
        unsafe { self.register(abi::REGISTER_FILES, files.as_ptr().cast(), 1) }
    }

    /// Cancels all requests in flight; their results are among the completions afterwards. True if
    /// each of `under_way` (values of `user_data`) has its final completion.
    ///
    /// A call may find nothing to cancel although a request has not ended. While another thread
    /// wakes it, by a datagram or a shutdown, its end is work that this thread has yet to receive
    /// (`io_poll_get_ownership` in io_uring/poll.c).
    pub(super) fn cancel(&mut self, under_way: &[u64]) -> io::Result<bool> {
        self.push(Sqe {
            opcode: abi::OP_ASYNC_CANCEL,
            fd: -1,
            msg_flags: abi::CANCEL_ALL | abi::CANCEL_ANY,
            user_data: abi::CANCEL_USER_DATA,
            ..Sqe::default()
        });
        let mut wait = None;
        for _ in 0..CANCEL_RETRIES {
            self.enter_until(wait, if wait.is_some() { self.pending() + 1 } else { 0 })?;
            let is_idle = !self.has_queued() && !self.has_work();
            if is_idle && under_way.iter().all(|what| self.has_final_completion(*what)) {
                return Ok(true);
            }
            wait = Some(CANCEL_TIMEOUT);
        }
        Ok(false)
    }

    /// True if a pending completion is the last one of a request.
    fn has_final_completion(&self, what: u64) -> bool {
        (0..self.pending()).any(|next| {
            let at = self.local_cq_head.wrapping_add(next) & self.cq_mask;
            // SAFETY: as in `peek`: an entry between those popped and the kernel's counter.
            let completion = unsafe { self.cqes.add(at as usize).read() };
            completion.user_data == what && completion.flags & abi::CQE_MORE == 0
        })
    }

    /// Releases the file. Closing the ring does so, too, but some time later.
    #[cfg(any(test, feature = "bench"))]
    pub(super) fn unregister_file(&self) -> io::Result<()> {
        // SAFETY: takes no argument.
        unsafe { self.register(abi::UNREGISTER_FILES, ptr::null(), 0) }
    }

    /// Registers the buffer ring described by `what`.
    ///
    /// # Safety
    /// It must be mapped for as long as requests select from it, with entries of memory that only
    /// the kernel uses while they are its own.
    pub(super) unsafe fn register_buffers(&self, what: &abi::BufReg) -> io::Result<()> {
        // SAFETY: one description, which the kernel only reads; the ring is as the caller promises.
        unsafe { self.register(abi::REGISTER_PBUF_RING, ptr::from_ref(what).cast(), 1) }
    }

    /// Makes waits poll the devices of the sockets for `micros` microseconds before they sleep
    /// (Linux 6.9).
    pub(super) fn register_napi(&self, micros: u32) -> io::Result<()> {
        // The kernel writes the previous values into it, which are not used.
        let mut what = abi::Napi { busy_poll_to: micros, prefer_busy_poll: 1, ..abi::Napi::default() };
        // SAFETY: one structure, which the kernel may write.
        unsafe { self.register(abi::REGISTER_NAPI, (&raw mut what).cast_const().cast(), 1) }
    }

    /// # Safety
    /// `arg` must be `count` of what the operation reads or writes, alive across the call, and what
    /// it registers must live as long as the kernel uses it.
    unsafe fn register(&self, what: u32, arg: *const u8, count: u32) -> io::Result<()> {
        let fd = self.fd.as_raw_fd();
        // SAFETY: as the caller promises.
        let ret = unsafe { libc::syscall(libc::SYS_io_uring_register, fd, what, arg, count) };
        crate::check(ret as libc::c_int).map(drop)
    }

    /// Queues an entry for the next call. There is room for all requests that are ever in flight.
    pub(super) fn push(&mut self, entry: Sqe) {
        debug_assert!(self.queued <= self.sq_mask);
        // SAFETY: the masked index is below the number of entries; the slot is free, see 1 in the
        // module's head.
        unsafe { self.sqes.add((self.local_sq_tail & self.sq_mask) as usize).write(entry) };
        self.local_sq_tail = self.local_sq_tail.wrapping_add(1);
        self.queued += 1;
        // SAFETY: the word is in the mapping, which lives as long as `self`, and both sides access
        // it atomically.
        unsafe { self.sq_tail.as_ref() }.store(self.local_sq_tail, Ordering::Release);
    }

    /// True if entries wait to be submitted.
    pub(super) fn has_queued(&self) -> bool {
        self.queued > 0
    }

    /// True if a call would find work.
    #[inline]
    pub(super) fn has_work(&self) -> bool {
        // SAFETY: as in `push`.
        let flags = unsafe { self.sq_flags.as_ref() }.load(Ordering::Acquire);
        flags & (abi::SQ_TASKRUN | abi::SQ_CQ_OVERFLOW) != 0
    }

    /// Submits the queued entries and lets the kernel do its work; with `wait`, until there is a
    /// completion, or for that time.
    ///
    /// A timeout or a signal is no error. [`Duration::MAX`] waits without a limit, and without a
    /// timer.
    ///
    /// # Errors
    /// `EEXIST` in another thread than the ring's owner; otherwise the ring is unusable.
    pub(super) fn enter(&mut self, wait: Option<Duration>) -> io::Result<()> {
        self.enter_until(wait, u32::from(wait.is_some()))
    }

    /// As [`enter`](Self::enter), until `least` completions are pending.
    fn enter_until(&mut self, wait: Option<Duration>, least: u32) -> io::Result<()> {
        let time = wait.filter(|time| *time != Duration::MAX).map(|time| Timespec {
            sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
            nsec: time.subsec_nanos().into(),
        });
        let arg = GetEventsArg {
            sigmask: 0,
            sigmask_sz: 0,
            min_wait_usec: 0,
            ts: time.as_ref().map_or(0, |time| ptr::from_ref(time).expose_provenance() as u64),
        };
        let flags = abi::ENTER_GETEVENTS | abi::ENTER_EXT_ARG;
        let fd = self.fd.as_raw_fd();
        // SAFETY: the kernel reads `arg` and the time that it points at, which live across the
        // call. The creator of each entry keeps what it points at alive until the request ends.
        let done = unsafe {
            libc::syscall(
                libc::SYS_io_uring_enter,
                fd,
                self.queued,
                least,
                flags,
                &raw const arg,
                size_of::<GetEventsArg>(),
            )
        };
        match crate::check(done as libc::c_int) {
            // An error would be returned only if nothing was submitted.
            Ok(submitted) => self.queued -= submitted.unsigned_abs().min(self.queued),
            Err(err) => match err.raw_os_error() {
                // EBUSY: completions have to be read first.
                Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY) => {}
                _ => return Err(err),
            },
        }
        Ok(())
    }

    /// The kernel's completion counter: the mark for [`peek`](Self::peek).
    #[inline]
    pub(super) fn load_cq_tail(&self) -> u32 {
        // SAFETY: as in `push`.
        unsafe { self.cq_tail.as_ref() }.load(Ordering::Acquire)
    }

    /// Number of pending completions.
    pub(super) fn pending(&self) -> u32 {
        self.load_cq_tail().wrapping_sub(self.local_cq_head)
    }

    /// The next completion before the mark `there`; stays until [`pop`](Self::pop).
    #[inline]
    pub(super) fn peek(&self, there: u32) -> Option<Cqe> {
        if there == self.local_cq_head {
            return None;
        }
        // SAFETY: the masked index is below the number of entries; the kernel has written this one
        // and does not change it until it is popped, see 2 in the module's head.
        Some(unsafe { self.cqes.add((self.local_cq_head & self.cq_mask) as usize).read() })
    }

    /// Removes the completion that was peeked at. [`release`](Self::release) then returns its
    /// entry to the kernel.
    #[inline]
    pub(super) fn pop(&mut self) {
        self.local_cq_head = self.local_cq_head.wrapping_add(1);
    }

    /// Returns the entries of all popped completions to the kernel.
    #[inline]
    pub(super) fn release(&self) {
        // SAFETY: as in `push`.
        unsafe { self.cq_head.as_ref() }.store(self.local_cq_head, Ordering::Release);
    }
}
