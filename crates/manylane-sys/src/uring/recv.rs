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
//! shutdown of the socket, which tells a lane to stop, does not end it: so a poll for the shutdown
//! is armed beside it. An error on the socket ends both, and both are armed again.
//!
//! The first thread that receives becomes the ring's owner; the kernel refuses any other. Another
//! thread gets a new ring, after the messages in the old one were returned
//! (`UringRecv::replace_ring`).
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
use crate::padded::PaddedSlice;
use crate::sock;

/// `user_data` of the entries, to distinguish their completions.
const RECEIVE_USER_DATA: u64 = 1;
const SHUTDOWN_USER_DATA: u64 = 3;
/// Times that one call re-arms a receive that ended at once.
const ARM_RETRIES: u32 = 10;
/// Completions without a message: ends of receives, and their cancellation.
const EXTRA_COMPLETIONS: usize = 16;

/// Sizes of a [`UringRecv`].
#[derive(Clone, Copy, Debug)]
pub struct UringOptions {
    /// Maximum number of messages per call, 1 to 1024.
    pub batch: usize,
    /// Maximum payload in bytes.
    pub buffer: usize,
    /// Number of buffers, 1 to 32,768, rounded up to a power of two. The kernel does not have
    /// those of the current batch.
    pub buffers: usize,
    /// True to receive control messages.
    pub control: bool,
    /// Use an index array in the ring, as before Linux 6.6. For tests.
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
    /// Length of the control messages; then length of the payload in the buffer.
    control: u16,
    len: u32,
}

/// A ring with its buffers.
struct RegisteredRing {
    buffers: Buffers,
    ring: Ring,
    /// A thread owns the ring.
    is_owned: bool,
    /// The receive is armed.
    is_armed: bool,
    /// The poll for a shutdown is armed.
    is_shutdown_armed: bool,
    /// The socket was shut down for reading: no call sleeps.
    is_shutdown: bool,
}

/// A multishot receive on one socket, for one thread at a time; see the [module](super).
pub struct UringRecv {
    options: UringOptions,
    current: RegisteredRing,
    /// The batch: the first `filled` of these.
    batch: PaddedSlice<Completion>,
    filled: usize,
    /// Totals over the messages of the batch.
    totals: Totals,
    /// The sizes of the parts before the payload, which the kernel reads when the receive is
    /// armed.
    header: PinnedSlice<libc::msghdr>,
    /// A new ring is to replace this one.
    is_outdated: bool,
    /// No more messages are to be taken out of the socket.
    is_stopping: bool,
    /// In this call, the receive ended because the batch has all buffers; it would end again.
    is_out_of_buffers: bool,
    /// The ring is unusable.
    is_broken: bool,
    /// A discarded ring may still hold the socket.
    is_socket_pinned: bool,
    buffer_shortages: u64,
    ring_replacements: u64,
    /// Microseconds that waits poll the device; 0 for none.
    busy_poll_usecs: u32,
}

// SAFETY: the pointers in the header are null.
unsafe impl Send for UringRecv {}

impl AsFd for UringRecv {
    /// Readable while the ring has messages that were not returned yet. The socket reports those
    /// in its own queue: the kernel does not wake waiters on the ring for deferred work
    /// (`io_req_local_work_add`). A ring that [took over](UringRecv::ring_replacements) has
    /// another descriptor.
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
    /// The socket is not registered as a file of the ring. A request looks it up each time it is
    /// armed, and releases it when it ends, at the latest with its thread. A registered file would
    /// be held until the kernel has torn the ring down.
    fn take_ownership(&mut self) -> io::Result<()> {
        self.ring.enable()?;
        self.is_owned = true;
        Ok(())
    }

    /// Arms a poll for a shutdown. A receive that does not sleep itself does not notice one, but a
    /// wait for its completion must be woken (`wake` in `sock.rs`). A poll without events reports
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

    /// Cancels all requests; the messages that they received are among the completions afterwards.
    /// True if none is left and the socket is released.
    ///
    /// Requests of another thread's ring cannot be cancelled: the kernel does that some time after
    /// the ring is closed. That ring takes nothing out of the socket, either.
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
    /// Registers everything that calls will use. Receives nothing yet.
    ///
    /// # Errors
    /// `ENOSYS` without io_uring; `EPERM` where the sysctl `kernel.io_uring_disabled` or a seccomp
    /// filter forbids it; `EINVAL` before Linux 6.1, and for invalid sizes; `ENOMEM` at a memory
    /// limit, `EMFILE` at the descriptor limit.
    pub fn new(options: UringOptions) -> io::Result<Self> {
        options.validate()?;
        // SAFETY: msghdr is a C struct of integers and pointers, for which all zeros are valid.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_namelen = size_of::<SockAddr>() as u32;
        header.msg_controllen = options.layout().control as _;
        Ok(Self {
            options,
            current: RegisteredRing::new(&options)?,
            batch: PaddedSlice::new(Completion::default(), options.batch),
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

    /// Makes waits poll the device of the socket for `micros` microseconds before they sleep
    /// (`IORING_REGISTER_NAPI`).
    ///
    /// # Errors
    /// `EINVAL` before Linux 6.9.
    pub fn set_busy_poll(&mut self, micros: u32) -> io::Result<()> {
        self.current.ring.register_napi(micros)?;
        self.busy_poll_usecs = micros;
        Ok(())
    }

    /// Checks whether [`set_busy_poll`](Self::set_busy_poll) works.
    ///
    /// # Errors
    /// As there, and as for [`new`](Self::new).
    pub fn probe_busy_poll() -> io::Result<()> {
        Ring::new(EXTRA_COMPLETIONS as u32, false)?.register_napi(1)
    }

    /// Times that the receive ended for lack of buffers. No message is lost by it.
    #[must_use]
    pub fn buffer_shortages(&self) -> u64 {
        self.buffer_shortages
    }

    /// Times that another ring took over, for another thread.
    #[must_use]
    pub fn ring_replacements(&self) -> u64 {
        self.ring_replacements
    }

    /// True if the last error was the ring's, not the socket's: the ring is unusable.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// True if the kernel may hold the socket for a moment after ring and socket are closed:
    /// another thread armed the requests, and only that thread could have cancelled them. Valid
    /// after [`stop`](Self::stop).
    #[must_use]
    pub fn is_socket_pinned(&self) -> bool {
        self.is_socket_pinned
    }

    /// Upper bound of the messages that were taken out of the socket and not returned yet.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.current.ring.pending() as usize
    }

    /// Takes no more messages out of the socket: later calls of [`recv`](Self::recv) return only
    /// those taken already.
    pub fn stop(&mut self) {
        self.is_stopping = true;
        self.is_socket_pinned |= !self.current.cancel();
    }

    /// Receives up to a batch from `socket`, always the same one, and returns the number of
    /// messages; 0 if none arrived within `wait`.
    ///
    /// Returns the buffers of the previous batch to the kernel. A wait may end early, with 0:
    /// after a signal, after a shutdown of the socket for reading, or because another reader took
    /// the datagram.
    ///
    /// # Errors
    /// Those of the socket, except "nothing queued" and "interrupted"; those of io_uring, see
    /// [`is_broken`](Self::is_broken).
    #[inline]
    pub fn recv(&mut self, socket: BorrowedFd<'_>, wait: Option<Duration>) -> io::Result<usize> {
        self.release_buffers();
        self.is_out_of_buffers = false;
        let mut wait = wait.filter(|time| !time.is_zero());
        // Each iteration receives a message, or is one of the retries.
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

    /// Calls the kernel; false if this ring can return no more than the batch already has.
    fn enter(&mut self, wait: Option<Duration>) -> io::Result<bool> {
        match self.current.ring.enter(wait) {
            Ok(()) => Ok(true),
            // Another thread than the ring's owner.
            Err(err) if err.raw_os_error() == Some(libc::EEXIST) => {
                self.is_outdated = true;
                Ok(self.filled == 0)
            }
            // Return the batch first: the error will be reported again.
            Err(_) if self.filled > 0 => Ok(false),
            Err(err) => {
                self.is_broken = true;
                Err(err)
            }
        }
    }

    /// Returns the buffers of the batch to the kernel, all at once.
    #[inline]
    fn release_buffers(&mut self) {
        if self.filled > 0 {
            self.current.buffers.release();
            (self.filled, self.totals) = (0, Totals::default());
        }
    }

    /// Replaces the ring if all its messages were returned; otherwise the remaining ones become
    /// the batch.
    #[cold]
    fn replace_ring(&mut self) -> io::Result<()> {
        self.is_socket_pinned |= !self.current.cancel();
        self.reap()?;
        if self.filled == 0 {
            self.current = RegisteredRing::new(&self.options)?;
            if self.busy_poll_usecs > 0 {
                // It worked on the last ring.
                self.current.ring.register_napi(self.busy_poll_usecs)?;
            }
            self.is_outdated = false;
            self.ring_replacements += 1;
        }
        Ok(())
    }

    /// Queues the receive, to be submitted by the next call.
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
            // Makes the kernel report the full length of a truncated datagram.
            msg_flags: libc::MSG_TRUNC as u32,
            user_data: RECEIVE_USER_DATA,
            ..Sqe::default()
        });
        self.current.is_armed = true;
        Ok(())
    }

    /// Moves completions into the batch, as far as there is room.
    #[inline]
    fn reap(&mut self) -> io::Result<()> {
        let mut outcome = Ok(());
        let there = self.current.ring.load_cq_tail();
        self.reap_messages(there);
        while self.filled < self.options.batch {
            let Some(completion) = self.current.ring.peek(there) else { break };
            if let Err(err) = self.handle_completion(completion) {
                // Return the batch first: the completion stays.
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

    /// Moves completions of multishot messages into the batch, up to the first that is anything
    /// else. Keeps only their lengths; everything else is read on demand.
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
            // An error code becomes an invalid length.
            let len = (completion.res as usize).wrapping_sub(payload_at);
            let is_usual = completion.flags & MULTISHOT_FLAGS == MULTISHOT_FLAGS
                && completion.user_data == RECEIVE_USER_DATA;
            let buffer = (completion.flags >> abi::CQE_BUFFER_SHIFT) as u16;
            if !is_usual || len > shape.payload || !buffers.consume(buffer) {
                break;
            }
            let control = if has_control { buffers.header(buffer).out.controllen as u16 } else { 0 };
            *place = Completion { buffer, control, len: len as u32 };
            // A truncated message has filled its buffer.
            sums.add(len, len == shape.payload && buffers.is_truncated(buffer), control > 0);
            filled += 1;
            ring.pop();
        }
        (self.filled, self.totals) = (filled, sums);
    }

    /// Handles a completion that is not an ordinary multishot message.
    #[cold]
    fn handle_completion(&mut self, completion: Cqe) -> io::Result<()> {
        if completion.user_data == SHUTDOWN_USER_DATA {
            // An error on the socket ends the poll, too. It is re-armed together with the receive,
            // which the error has ended as well.
            self.current.is_shutdown_armed = false;
            self.current.is_shutdown |=
                completion.res > 0 && completion.res & i32::from(libc::POLLRDHUP) != 0;
        }
        if completion.user_data != RECEIVE_USER_DATA {
            return Ok(());
        }
        // Without "more" and without an error it is the last message: an empty datagram ends a
        // receive.
        self.current.is_armed &= completion.flags & abi::CQE_MORE != 0;
        if completion.flags & abi::CQE_BUFFER != 0 && !self.reap_last_message(completion) {
            // No message, or not the next buffer: no known kernel does that.
            self.is_broken = true;
            return Err(io::Error::from_raw_os_error(libc::EPROTO));
        }
        if completion.res < 0 { self.handle_receive_error(-completion.res) } else { Ok(()) }
    }

    /// Takes the message with which a receive has ended; false if there is none.
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

    /// Handles an error that ended the receive.
    #[cold]
    fn handle_receive_error(&mut self, code: i32) -> io::Result<()> {
        match code {
            libc::ENOBUFS => {
                self.buffer_shortages += 1;
                self.is_out_of_buffers = self.filled > 0;
            }
            libc::ECANCELED | libc::EINTR | libc::EAGAIN => {}
            // Does not concern the queue, which may be full.
            _ if sock::is_icmp_error(code) => {}
            _ => return Err(io::Error::from_raw_os_error(code)),
        }
        self.current.is_armed = false;
        Ok(())
    }

    /// Totals over the messages of the last receive.
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
        Message::new(buffers.payload(buffer, len), full_len, &head.peer, control)
    }
}
