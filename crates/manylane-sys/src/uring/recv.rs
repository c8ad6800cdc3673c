//! Receiving: a multishot recvmsg that is armed once, and the batches that it fills.
//!
//! ```text
//!   recv: 1. buffers of the last batch back to the kernel, all at once
//!         2. completions that are there already
//!         3. room in the batch, and work for the kernel, or nothing yet and leave to wait:
//!            one call, then 2.
//!            The receive has ended, for any reason: the same call arms it again
//! ```
//!
//! The receive ends when no buffer is left, after an empty datagram, or when it is cancelled. A
//! shutdown of the socket, by which a lane is told to stop, does not end it: a poll for that is
//! armed beside it. An error on the socket ends both, and both are armed again.
//!
//! The thread that receives first becomes the ring's owner; the kernel refuses any other. Another
//! thread gets a new ring, after the messages that the old one holds were handed out
//! (`UringRecv::replace_ring`). Larger buffers, or more of them, come with a new ring, too.
//!
//! Of a completion the batch keeps the buffer and two lengths, 8 bytes. The sender and the control
//! messages are read in place, when the caller asks for them.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use super::abi::{self, Cqe, Sqe};
use super::buffers::{BUFFERS_MAX, BufferLayout, Buffers};
use super::setup::Ring;
use crate::addr::SockAddr;
use crate::control;
use crate::map::PinnedSlice;
use crate::mmsg::{Message, Totals};
use crate::sock;

/// What the entries carry, to tell their completions apart.
const RECEIVE_USER_DATA: u64 = 1;
const SHUTDOWN_USER_DATA: u64 = 3;
/// How often one call arms a receive that ended at once.
const ARM_RETRIES: u32 = 10;
/// Completions that are no message: ends of receives, and their cancellation.
const EXTRA_COMPLETIONS: usize = 16;

/// Sizes of a [`UringRecv`].
#[derive(Clone, Copy, Debug)]
pub struct UringOptions {
    /// Messages that one call takes at most, 1 to 1024.
    pub batch: usize,
    /// Bytes of payload that fit into a buffer.
    pub buffer: usize,
    /// Buffers, 1 to 32,768, of which the next power of two is taken. Those of a batch are not the
    /// kernel's while it lasts.
    pub buffers: usize,
    /// Whether to receive control messages at all.
    pub control: bool,
    /// Have an array of indices in the ring, as before Linux 6.6. For tests.
    pub sqarray: bool,
}

impl UringOptions {
    fn layout(&self) -> BufferLayout {
        BufferLayout { control: if self.control { control::RECV_CAPACITY } else { 0 }, payload: self.buffer }
    }

    fn validate(&self) -> io::Result<()> {
        if (1..=1024).contains(&self.batch) && (1..=BUFFERS_MAX).contains(&self.buffers) {
            return Ok(());
        }
        Err(io::Error::from_raw_os_error(libc::EINVAL))
    }
}

/// One message of the batch.
#[derive(Clone, Copy, Default)]
struct Completion {
    buffer: u16,
    /// Bytes of control messages, and of payload that fitted.
    control: u16,
    len: u32,
}

/// A ring with its buffers.
struct RegisteredRing {
    buffers: Buffers,
    ring: Ring,
    /// A thread owns the ring.
    is_owned: bool,
    /// The receive is under way.
    is_armed: bool,
    /// It will be told when the socket is shut down for reading.
    is_shutdown_armed: bool,
    /// That has happened: nobody sleeps any more.
    is_shutdown: bool,
}

/// A multishot receive on one socket, for one thread at a time; see the [module](super).
pub struct UringRecv {
    options: UringOptions,
    current: RegisteredRing,
    /// The batch: as many of these as are `filled`.
    batch: Box<[Completion]>,
    filled: usize,
    /// What the messages of the batch are together.
    totals: Totals,
    /// The sizes of room before the payload, which the kernel reads when the receive is armed.
    header: PinnedSlice<libc::msghdr>,
    /// Another ring, with the options of now, is to take over.
    is_outdated: bool,
    /// Nothing more is to be taken out of the socket.
    is_stopping: bool,
    /// In this call, the receive ended since all buffers are the batch's: it would again.
    is_out_of_buffers: bool,
    /// The ring cannot be used any more.
    is_broken: bool,
    /// A ring may have the socket although nobody uses it any more.
    is_socket_pinned: bool,
    buffer_shortages: u64,
    ring_replacements: u64,
    /// Microseconds that waits look at the device; 0 for not.
    busy_poll_usecs: u32,
}

// SAFETY: the pointers in the header are null.
unsafe impl Send for UringRecv {}

impl AsFd for UringRecv {
    /// Readable while there is something that was taken out of the socket and not handed out yet.
    /// Of what waits in the socket the socket tells: the kernel does not wake whoever waits for the
    /// ring for work that it has put off (`io_req_local_work_add`). Another descriptor once another
    /// ring [took over](UringRecv::ring_replacements).
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.current.ring.as_fd()
    }
}

impl RegisteredRing {
    fn new(options: &UringOptions) -> io::Result<Self> {
        let count = options.buffers.next_power_of_two();
        let ring = Ring::new((count + EXTRA_COMPLETIONS) as u32, options.sqarray)?;
        let buffers = Buffers::new(&ring, count, options.layout())?;
        Ok(Self {
            buffers,
            ring,
            is_owned: false,
            is_armed: false,
            is_shutdown_armed: false,
            is_shutdown: false,
        })
    }

    /// Makes the calling thread the owner.
    ///
    /// The socket is not registered as a file of the ring. What is under way has it, looked up each
    /// time it is armed, and lets go of it when that ends, at the latest with its thread; the ring
    /// would have it until the kernel has torn the ring down.
    fn take_ownership(&mut self) -> io::Result<()> {
        self.ring.enable()?;
        self.is_owned = true;
        Ok(())
    }

    /// A receive that does not sleep itself is not told of a shutdown; what waits for its
    /// completion is to be woken all the same (`wake` in `sock.rs`). A poll for nothing is told of
    /// hang-ups and errors (`IO_POLL_UNMASK` in io_uring/poll.c).
    fn arm_shutdown_poll(&mut self, socket: BorrowedFd<'_>) {
        self.ring.push(Sqe {
            opcode: abi::OP_POLL_ADD,
            fd: socket.as_raw_fd(),
            user_data: SHUTDOWN_USER_DATA,
            ..Sqe::default()
        });
        self.is_shutdown_armed = true;
    }

    /// Ends what is under way; what it has taken is among the completions then. Whether nothing is
    /// any more, and the socket let go of.
    ///
    /// Of another thread's ring nothing can be ended: the kernel does that some time after it was
    /// closed. Nothing is taken out of the socket there, either.
    fn cancel(&mut self) -> bool {
        let under_way: &[u64] = match (self.is_armed, self.is_shutdown_armed) {
            (true, true) => &[RECEIVE_USER_DATA, SHUTDOWN_USER_DATA],
            (true, false) => &[RECEIVE_USER_DATA],
            (false, true) => &[SHUTDOWN_USER_DATA],
            (false, false) => return true,
        };
        let done = if self.is_owned { self.ring.cancel(under_way) } else { Ok(false) };
        self.is_owned &= done.is_ok();
        done.unwrap_or(false)
    }
}

impl Drop for RegisteredRing {
    fn drop(&mut self) {
        self.cancel();
    }
}

impl UringRecv {
    /// Registers everything that calls will use. Nothing is received yet.
    ///
    /// # Errors
    /// `ENOSYS` without io_uring; `EPERM` where the sysctl `kernel.io_uring_disabled` or a seccomp
    /// filter forbids it; `EINVAL` before Linux 6.1, and for sizes that cannot be; `ENOMEM` at a
    /// limit of memory, `EMFILE` of descriptors.
    pub fn new(options: UringOptions) -> io::Result<Self> {
        options.validate()?;
        // SAFETY: msghdr is a C struct of integers and pointers, for which all zeroes is a value.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_namelen = size_of::<SockAddr>() as u32;
        header.msg_controllen = options.layout().control as _;
        Ok(Self {
            options,
            current: RegisteredRing::new(&options)?,
            batch: vec![Completion::default(); options.batch].into_boxed_slice(),
            filled: 0,
            totals: Totals::default(),
            header: PinnedSlice::new(header, 1),
            is_outdated: false,
            is_stopping: false,
            is_out_of_buffers: false,
            is_broken: false,
            is_socket_pinned: false,
            buffer_shortages: 0,
            ring_replacements: 0,
            busy_poll_usecs: 0,
        })
    }

    /// Has other buffers from now on: so many, of so many bytes, for batches of so many messages.
    /// What the present ones hold is handed out first, in batches of that size.
    ///
    /// # Errors
    /// `EINVAL` for a number that cannot be.
    pub fn resize(&mut self, batch: usize, buffers: usize, buffer: usize) -> io::Result<()> {
        let options = UringOptions { batch, buffers, buffer, ..self.options };
        options.validate()?;
        if batch > self.batch.len() {
            let mut places = std::mem::take(&mut self.batch).into_vec();
            places.resize(batch, Completion::default());
            self.batch = places.into_boxed_slice();
        }
        self.options = options;
        self.is_outdated = true;
        Ok(())
    }

    /// Lets waits look at the device of the socket for so many microseconds before they sleep
    /// (`IORING_REGISTER_NAPI`).
    ///
    /// # Errors
    /// `EINVAL` before Linux 6.9.
    pub fn set_busy_poll(&mut self, micros: u32) -> io::Result<()> {
        self.current.ring.register_napi(micros)?;
        self.busy_poll_usecs = micros;
        Ok(())
    }

    /// Whether [`set_busy_poll`](Self::set_busy_poll) would do.
    ///
    /// # Errors
    /// As there, and as for [`new`](Self::new).
    pub fn probe_busy_poll() -> io::Result<()> {
        Ring::new(EXTRA_COMPLETIONS as u32, false)?.register_napi(1)
    }

    /// How often the receive ended because there was no buffer. Nothing is lost by it.
    #[must_use]
    pub fn buffer_shortages(&self) -> u64 {
        self.buffer_shortages
    }

    /// How often another ring took over: for another thread, or for other sizes.
    #[must_use]
    pub fn ring_replacements(&self) -> u64 {
        self.ring_replacements
    }

    /// Whether the last error was the ring's, not the socket's: there is nothing to be had any more
    /// by this way.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// Whether the kernel may have the socket for a moment yet after ring and socket are closed:
    /// what another thread than the calling one has under way, it alone could have ended. Known
    /// after [`stop`](Self::stop).
    #[must_use]
    pub fn is_socket_pinned(&self) -> bool {
        self.is_socket_pinned
    }

    /// Messages, at most, that were taken out of the socket and not handed out yet.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.current.ring.pending() as usize
    }

    /// Takes nothing more out of the socket: what was taken already is what [`recv`](Self::recv)
    /// brings from now on.
    pub fn stop(&mut self) {
        self.is_stopping = true;
        self.is_socket_pinned |= !self.current.cancel();
    }

    /// Receives up to a batch from `socket`, always the same one, and returns how many messages
    /// there are; 0 if none came within `wait`.
    ///
    /// What the call before received goes back to the kernel. A wait may end early, with 0: after a
    /// signal, when the socket was shut down for reading, when somebody else took what had come.
    ///
    /// # Errors
    /// What the socket reports, but for "nothing there" and "interrupted"; what io_uring reports,
    /// see [`is_broken`](Self::is_broken).
    #[inline]
    pub fn recv(&mut self, socket: BorrowedFd<'_>, wait: Option<Duration>) -> io::Result<usize> {
        self.release_buffers();
        self.is_out_of_buffers = false;
        let mut wait = wait.filter(|time| !time.is_zero());
        // Each call brings a message, or is one of the tries.
        for _ in 0..self.options.batch + ARM_RETRIES as usize {
            self.reap()?;
            if self.is_outdated && self.filled == 0 && !self.is_stopping {
                let done = self.replace_ring();
                self.is_broken = done.is_err();
                done?;
            }
            let is_full = self.filled >= self.options.batch;
            if is_full || self.is_stopping || self.is_outdated || self.is_out_of_buffers {
                break;
            }
            let time = if self.filled == 0 && !self.current.is_shutdown { wait.take() } else { None };
            if !self.current.is_armed {
                let done = self.arm(socket);
                self.is_broken = done.is_err();
                done?;
            } else if time.is_none() && !self.current.ring.has_work() {
                break;
            }
            if !self.enter(time)? {
                break;
            }
        }
        Ok(self.filled)
    }

    /// Calls the kernel; false if there is nothing to be had from this ring any more, but what the
    /// batch holds.
    fn enter(&mut self, wait: Option<Duration>) -> io::Result<bool> {
        match self.current.ring.enter(wait) {
            Ok(()) => Ok(true),
            // Another thread than the ring's owner.
            Err(err) if err.raw_os_error() == Some(libc::EEXIST) => {
                self.is_outdated = true;
                Ok(self.filled == 0)
            }
            // The batch first: the error comes again.
            Err(_) if self.filled > 0 => Ok(false),
            Err(err) => {
                self.is_broken = true;
                Err(err)
            }
        }
    }

    /// Gives the buffers of the batch back to the kernel, all at once.
    #[inline]
    fn release_buffers(&mut self) {
        if self.filled > 0 {
            self.current.buffers.release();
            (self.filled, self.totals) = (0, Totals::default());
        }
    }

    /// Another ring takes over from one of which all has been handed out; else what is left of it
    /// becomes the batch.
    #[cold]
    fn replace_ring(&mut self) -> io::Result<()> {
        self.is_socket_pinned |= !self.current.cancel();
        self.reap()?;
        if self.filled == 0 {
            self.current = RegisteredRing::new(&self.options)?;
            if self.busy_poll_usecs > 0 {
                // The last ring could.
                self.current.ring.register_napi(self.busy_poll_usecs)?;
            }
            self.is_outdated = false;
            self.ring_replacements += 1;
        }
        Ok(())
    }

    /// Puts in the receive, to be submitted by the next call.
    #[cold]
    fn arm(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        if !self.current.is_owned {
            self.current.take_ownership()?;
        }
        if !self.current.is_shutdown_armed {
            self.current.arm_shutdown_poll(socket);
        }
        self.current.ring.push(Sqe {
            opcode: abi::OP_RECVMSG,
            flags: abi::SQE_BUFFER_SELECT,
            ioprio: abi::RECV_MULTISHOT,
            fd: socket.as_raw_fd(),
            addr: self.header.ptr_at(0).expose_provenance() as u64,
            len: 1,
            // Says how long a datagram was that did not fit.
            msg_flags: libc::MSG_TRUNC as u32,
            user_data: RECEIVE_USER_DATA,
            ..Sqe::default()
        });
        self.current.is_armed = true;
        Ok(())
    }

    /// Takes the completions that are there into the batch, as far as there is room.
    #[inline]
    fn reap(&mut self) -> io::Result<()> {
        let mut outcome = Ok(());
        let there = self.current.ring.load_cq_tail();
        self.reap_messages(there);
        while self.filled < self.options.batch {
            let Some(completion) = self.current.ring.peek(there) else { break };
            if let Err(err) = self.handle_completion(completion) {
                // The batch first: the completion stays.
                if self.filled == 0 {
                    self.current.ring.pop();
                    self.current.is_armed = false;
                    outcome = Err(err);
                }
                break;
            }
            self.current.ring.pop();
            self.reap_messages(there);
        }
        self.current.ring.release();
        outcome
    }

    /// Takes what is a message of many, up to the first completion that is anything else: of each
    /// only its lengths, and all but these is read when somebody asks.
    #[inline]
    fn reap_messages(&mut self, there: u32) {
        const MULTISHOT_FLAGS: u32 = abi::CQE_BUFFER | abi::CQE_MORE;
        let RegisteredRing { buffers, ring, .. } = &mut self.current;
        let shape = buffers.layout();
        let (payload_at, has_control) = (shape.payload_offset(), shape.control > 0);
        let (mut filled, mut sums) = (self.filled, self.totals);
        let places = self.batch.iter_mut().take(self.options.batch).skip(filled);
        for place in places {
            let Some(completion) = ring.peek(there) else { break };
            // Of an error it becomes a length that cannot be.
            let len = (completion.res as usize).wrapping_sub(payload_at);
            let is_usual = completion.flags & MULTISHOT_FLAGS == MULTISHOT_FLAGS
                && completion.user_data == RECEIVE_USER_DATA;
            let buffer = (completion.flags >> abi::CQE_BUFFER_SHIFT) as u16;
            if !is_usual || len > shape.payload || !buffers.consume(buffer) {
                break;
            }
            let control = if has_control { buffers.header(buffer).out.controllen as u16 } else { 0 };
            *place = Completion { buffer, control, len: len as u32 };
            // What did not fit has filled its buffer.
            sums.add(len, len == shape.payload && buffers.is_truncated(buffer), control > 0);
            filled += 1;
            ring.pop();
        }
        (self.filled, self.totals) = (filled, sums);
    }

    /// Looks at anything but one message of many.
    #[cold]
    fn handle_completion(&mut self, completion: Cqe) -> io::Result<()> {
        if completion.user_data == SHUTDOWN_USER_DATA {
            // An error on the socket ends the poll, too: it is armed anew together with the
            // receive, which that has ended.
            self.current.is_shutdown_armed = false;
            self.current.is_shutdown |=
                completion.res > 0 && completion.res & i32::from(libc::POLLRDHUP) != 0;
        }
        if completion.user_data != RECEIVE_USER_DATA {
            return Ok(());
        }
        // What says neither "more" nor anything bad is the last message: an empty datagram ends a
        // receive.
        self.current.is_armed &= completion.flags & abi::CQE_MORE != 0;
        if completion.flags & abi::CQE_BUFFER != 0 && !self.reap_last_message(completion) {
            // No message, or in a buffer whose turn it is not: no kernel that we know does that.
            self.is_broken = true;
            return Err(io::Error::from_raw_os_error(libc::EPROTO));
        }
        if completion.res < 0 { self.handle_receive_error(-completion.res) } else { Ok(()) }
    }

    /// Takes the message with which a receive has ended; false if it is none.
    fn reap_last_message(&mut self, completion: Cqe) -> bool {
        let buffer = (completion.flags >> abi::CQE_BUFFER_SHIFT) as u16;
        let buffers = &mut self.current.buffers;
        let shape = buffers.layout();
        let len = (completion.res as usize).wrapping_sub(shape.payload_offset());
        let (Some(place), true) = (self.batch.get_mut(self.filled), len <= shape.payload) else {
            return false;
        };
        if !buffers.consume(buffer) {
            return false;
        }
        let control = if shape.control > 0 { buffers.header(buffer).out.controllen as u16 } else { 0 };
        *place = Completion { buffer, control, len: len as u32 };
        self.totals.add(len, len == shape.payload && buffers.is_truncated(buffer), control > 0);
        self.filled += 1;
        true
    }

    /// The receive ended with an error.
    #[cold]
    fn handle_receive_error(&mut self, code: i32) -> io::Result<()> {
        match code {
            libc::ENOBUFS => {
                self.buffer_shortages += 1;
                self.is_out_of_buffers = self.filled > 0;
            }
            libc::ECANCELED | libc::EINTR | libc::EAGAIN => {}
            // Not about what is in the queue, which may be full.
            _ if sock::is_icmp_error(code) => {}
            _ => return Err(io::Error::from_raw_os_error(code)),
        }
        self.current.is_armed = false;
        Ok(())
    }

    /// What the messages of the last receive are together.
    #[inline]
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Message `index` of the last receive.
    ///
    /// # Panics
    /// If the last receive did not return that many.
    #[inline]
    #[must_use]
    pub fn message(&self, index: usize) -> Message<'_> {
        let Completion { buffer, control, len } = self.batch[..self.filled][index];
        let (buffers, len) = (&self.current.buffers, len as usize);
        let head = buffers.header(buffer);
        let truncated = len == buffers.layout().payload && buffers.is_truncated(buffer);
        let full_len = if truncated { head.out.payloadlen as usize } else { len };
        let control = if control > 0 { buffers.control(buffer, control.into()) } else { &[] };
        Message::new(buffers.payload(buffer, len), full_len, truncated, &head.peer, control)
    }
}
