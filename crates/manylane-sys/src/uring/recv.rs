//! Receiving: a multishot recvmsg that is armed once, and batches of what it brings.
//!
//! ```text
//!   recv: 1. buffers of the last batch back to the kernel, all at once
//!         2. completions that are there already
//!         3. room in the batch, and work for the kernel, or nothing yet and leave to wait: one call, then 2.
//!            The receive has ended, for whatever reason: the same call arms it anew
//! ```
//!
//! The thread that receives first becomes the ring's owner; the kernel refuses any other. A thread that comes later gets
//! another ring, after what the first one has taken was handed out ([`UringRecv::take_over`]). Larger buffers, or more of
//! them, come the same way.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::abi::{self, Cqe, RecvmsgOut, Sqe};
use super::buffers::{Buffers, Held, LEAD, MOST};
use super::setup::Ring;
use crate::addr::SockAddr;
use crate::control;
use crate::map::Fixed;
use crate::mmsg::{Message, Sums};
use crate::sock;

/// What the entries carry, to tell their completions apart.
const RECEIVE: u64 = 1;
const SHUTDOWN: u64 = 3;
/// How often one call arms a receive that ended at once.
const TRIES: u32 = 10;
/// Room of the address before the payload.
const NAME: usize = size_of::<SockAddr>();
const OUT: usize = size_of::<RecvmsgOut>();
/// Large buffers start at odd multiples of a cache line apart, as those of the message ring.
const STAGGER: usize = 192;
/// Completions that are no message: ends of receives, and their cancellation.
const OTHERS: usize = 16;

/// Sizes of a [`UringRecv`].
#[derive(Clone, Copy, Debug)]
pub struct UringOptions {
    /// Messages that one call takes at most, 1 to 1024.
    pub batch: usize,
    /// Bytes of payload that fit into a buffer.
    pub buffer: usize,
    /// Buffers, 1 to 32,768. Those of a batch are not the kernel's while it lasts.
    pub buffers: usize,
    /// Whether to receive control messages at all.
    pub control: bool,
    /// Have an array of indices in the ring, as before Linux 6.6. For tests.
    pub sqarray: bool,
}

impl UringOptions {
    /// Bytes of control messages before the payload.
    fn controls(&self) -> usize {
        if self.control { control::RECV_CAPACITY } else { 0 }
    }

    /// Where the payload starts.
    fn payload_at(&self) -> usize {
        OUT + NAME + self.controls()
    }
}

/// One message of the batch: a checked view of a buffer, as numbers.
struct Taken {
    held: Held,
    truncated: bool,
    control: u16,
    len: u32,
    full_len: u32,
}

/// A ring with its buffers.
struct Registered {
    buffers: Buffers,
    ring: Ring,
    /// A thread owns the ring.
    is_owned: bool,
    /// The receive is under way.
    is_armed: bool,
    /// The socket was shut down for reading: nobody sleeps any more.
    is_shut: bool,
}

/// A multishot receive on one socket, for one thread at a time; see the [module](super).
pub struct UringRecv {
    options: UringOptions,
    now: Registered,
    batch: Vec<Taken>,
    /// What the messages of the batch are together.
    sums: Sums,
    /// Where the payload starts: the same for all rings of this value.
    payload_at: usize,
    /// The sizes of room before the payload, which the kernel reads when the receive is armed.
    header: Fixed<libc::msghdr>,
    /// Another ring, with the options of now, is to take over.
    is_outdated: bool,
    /// Nothing more is to be taken out of the socket.
    is_ending: bool,
    /// In this call, the receive ended since all buffers are the batch's: it would again.
    is_short: bool,
    /// The ring cannot be used any more.
    is_broken: bool,
    short: u64,
    taken_over: u64,
    /// Microseconds that waits look at the device; 0 for not.
    busy_poll: u32,
}

// SAFETY: the pointers in the header are null.
unsafe impl Send for UringRecv {}

impl AsFd for UringRecv {
    /// Readable while there is something that was taken out of the socket and not handed out yet. Of what waits in the socket
    /// the socket tells: the kernel does not wake whoever waits for the ring for work that it has put off
    /// (`io_req_local_work_add`). Another descriptor once another ring [took over](UringRecv::taken_over).
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.now.ring.as_fd()
    }
}

impl Registered {
    fn new(options: &UringOptions) -> io::Result<Self> {
        let completions = options.buffers + OTHERS;
        let ring = Ring::new(completions as u32, options.sqarray)?;
        let len = options.payload_at() + options.buffer;
        let stride = (len + LEAD).next_multiple_of(64) + if options.buffer >= 4096 { STAGGER } else { 0 };
        let buffers = Buffers::new(&ring, options.buffers, len, stride)?;
        Ok(Self { buffers, ring, is_owned: false, is_armed: false, is_shut: false })
    }

    /// Makes the calling thread the owner.
    fn own(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.ring.enable()?;
        self.ring.register_file(socket)?;
        self.is_owned = true;
        // A receive that does not sleep itself is not told of a shutdown; what waits for its completion is to be woken all
        // the same (`wake` in `sock.rs`).
        self.ring.put(Sqe {
            opcode: abi::OP_POLL_ADD,
            flags: abi::SQE_FIXED_FILE,
            msg_flags: libc::POLLRDHUP as u32,
            user_data: SHUTDOWN,
            ..Sqe::default()
        });
        Ok(())
    }

    /// Ends what is under way, if the ring is the calling thread's; what it has taken is among the completions then. Whether
    /// it was.
    fn cancel(&mut self) -> bool {
        // Of another thread's ring nothing can be ended. Nothing is taken out of the socket there, either.
        self.is_owned = self.is_owned && self.ring.cancel().is_ok();
        self.is_owned
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // The kernel lets go of the socket at once, and not only when it gets to it, so that the port is free when the socket
        // is closed. Another thread than the owner cannot see to that.
        if self.cancel() {
            _ = self.ring.unregister_file();
        }
    }
}

impl UringRecv {
    /// Registers everything that calls will use. Nothing is received yet.
    ///
    /// # Errors
    /// `ENOSYS` without io_uring; `EPERM` where the sysctl `kernel.io_uring_disabled` or a seccomp filter forbids it;
    /// `EINVAL` before Linux 6.1, and for sizes that cannot be; `ENOMEM` at a limit of memory, `EMFILE` of descriptors.
    pub fn new(options: UringOptions) -> io::Result<Self> {
        if !(1..=1024).contains(&options.batch) || !(1..=MOST).contains(&options.buffers) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // SAFETY: msghdr is a C struct of integers and pointers, for which all zeroes is a value.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_namelen = NAME as u32;
        header.msg_controllen = options.controls() as _;
        Ok(Self {
            options,
            now: Registered::new(&options)?,
            batch: Vec::with_capacity(options.batch),
            sums: Sums::default(),
            payload_at: options.payload_at(),
            header: Fixed::new(header, 1),
            is_outdated: false,
            is_ending: false,
            is_short: false,
            is_broken: false,
            short: 0,
            taken_over: 0,
            busy_poll: 0,
        })
    }

    /// Has other buffers from now on: so many, of so many bytes, for batches of so many messages. What the present ones hold
    /// is handed out first, in batches of that size.
    ///
    /// # Errors
    /// `EINVAL` for a number that cannot be.
    pub fn resize(&mut self, batch: usize, buffers: usize, buffer: usize) -> io::Result<()> {
        if !(1..=1024).contains(&batch) || !(1..=MOST).contains(&buffers) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        self.batch.reserve(batch.saturating_sub(self.batch.len()));
        self.options = UringOptions { batch, buffers, buffer, ..self.options };
        self.is_outdated = true;
        Ok(())
    }

    /// Lets waits look at the device of the socket for so many microseconds before they sleep (`IORING_REGISTER_NAPI`).
    ///
    /// # Errors
    /// `EINVAL` before Linux 6.9.
    pub fn busy_poll(&mut self, micros: u32) -> io::Result<()> {
        self.now.ring.register_napi(micros)?;
        self.busy_poll = micros;
        Ok(())
    }

    /// Whether [`busy_poll`](Self::busy_poll) would do.
    ///
    /// # Errors
    /// As there, and as for [`new`](Self::new).
    pub fn try_busy_poll() -> io::Result<()> {
        Ring::new(OTHERS as u32, false)?.register_napi(1)
    }

    /// How often the receive ended because there was no buffer. Nothing is lost by it.
    #[must_use]
    pub fn short(&self) -> u64 {
        self.short
    }

    /// How often another ring took over: for another thread, or for other sizes.
    #[must_use]
    pub fn taken_over(&self) -> u64 {
        self.taken_over
    }

    /// Whether the last error was the ring's, not the socket's: there is nothing to be had any more by this way.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// Takes nothing more out of the socket: what was taken already is what [`recv`](Self::recv) brings from now on.
    pub fn end(&mut self) {
        self.is_ending = true;
        self.now.cancel();
    }

    /// Receives up to a batch from `socket`, always the same one, and returns how many messages there are; 0 if none came
    /// within `wait`.
    ///
    /// What the call before received goes back to the kernel. A wait may end early, with 0: after a signal, when the socket
    /// was shut down for reading, when somebody else took what had come.
    ///
    /// # Errors
    /// What the socket reports, but for "nothing there" and "interrupted"; what io_uring reports, see
    /// [`is_broken`](Self::is_broken).
    #[inline]
    pub fn recv(&mut self, socket: BorrowedFd<'_>, wait: Option<Duration>) -> io::Result<usize> {
        self.give_back();
        self.is_short = false;
        let mut wait = wait.filter(|time| !time.is_zero());
        // Each call brings a message, or is one of the tries.
        for _ in 0..self.options.batch + TRIES as usize {
            self.reap()?;
            if self.is_outdated && self.batch.is_empty() && !self.is_ending {
                let done = self.take_over();
                self.is_broken = done.is_err();
                done?;
            }
            let is_full = self.batch.len() == self.options.batch;
            if is_full || self.is_ending || self.is_outdated || self.is_short {
                break;
            }
            let time = if self.batch.is_empty() && !self.now.is_shut { wait.take() } else { None };
            if !self.now.is_armed {
                let done = self.arm(socket);
                self.is_broken = done.is_err();
                done?;
            } else if time.is_none() && !self.now.ring.has_work() {
                break;
            }
            if !self.enter(time)? {
                break;
            }
        }
        Ok(self.batch.len())
    }

    /// Calls the kernel; false if there is nothing to be had from this ring any more, but what the batch holds.
    fn enter(&mut self, wait: Option<Duration>) -> io::Result<bool> {
        match self.now.ring.enter(wait) {
            Ok(()) => Ok(true),
            // Another thread than the ring's owner.
            Err(err) if err.raw_os_error() == Some(libc::EEXIST) => {
                self.is_outdated = true;
                Ok(self.batch.is_empty())
            }
            // The batch first: the error comes again.
            Err(_) if !self.batch.is_empty() => Ok(false),
            Err(err) => {
                self.is_broken = true;
                Err(err)
            }
        }
    }

    /// Gives the buffers of the batch back to the kernel, all at once.
    #[inline]
    fn give_back(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        for taken in self.batch.drain(..) {
            self.now.buffers.give(taken.held);
        }
        self.now.buffers.publish();
        self.sums = Sums::default();
    }

    /// Another ring takes over from one of which all has been handed out; else what is left of it becomes the batch.
    #[cold]
    fn take_over(&mut self) -> io::Result<()> {
        self.now.cancel();
        self.reap()?;
        if self.batch.is_empty() {
            self.now = Registered::new(&self.options)?;
            if self.busy_poll > 0 {
                // The last ring could.
                self.now.ring.register_napi(self.busy_poll)?;
            }
            self.is_outdated = false;
            self.taken_over += 1;
        }
        Ok(())
    }

    /// Puts in the receive, to be submitted by the next call.
    #[cold]
    fn arm(&mut self, socket: BorrowedFd<'_>) -> io::Result<()> {
        if !self.now.is_owned {
            self.now.own(socket)?;
        }
        self.now.ring.put(Sqe {
            opcode: abi::OP_RECVMSG,
            flags: abi::SQE_FIXED_FILE | abi::SQE_BUFFER_SELECT,
            ioprio: abi::RECV_MULTISHOT,
            fd: 0,
            addr: self.header.at(0).expose_provenance() as u64,
            len: 1,
            // Says how long a datagram was that did not fit.
            msg_flags: libc::MSG_TRUNC as u32,
            user_data: RECEIVE,
            ..Sqe::default()
        });
        self.now.is_armed = true;
        Ok(())
    }

    /// Takes the completions that are there into the batch, as far as there is room.
    #[inline]
    fn reap(&mut self) -> io::Result<()> {
        let mut outcome = Ok(());
        let there = self.now.ring.there();
        while self.batch.len() < self.options.batch {
            let Some(completion) = self.now.ring.peek(there) else { break };
            if let Err(err) = self.look_at(completion) {
                // The batch first: the completion stays.
                if self.batch.is_empty() {
                    self.now.ring.pop();
                    self.now.is_armed = false;
                    outcome = Err(err);
                }
                break;
            }
            self.now.ring.pop();
        }
        self.now.ring.release();
        outcome
    }

    #[inline]
    fn look_at(&mut self, completion: Cqe) -> io::Result<()> {
        const USUAL: u32 = abi::CQE_BUFFER | abi::CQE_MORE;
        let is_usual = completion.flags & USUAL == USUAL && completion.res >= 0;
        if !is_usual || completion.user_data != RECEIVE {
            return self.look_closely(completion);
        }
        self.put_into_batch(completion);
        Ok(())
    }

    /// Looks at anything but one message of many.
    #[cold]
    fn look_closely(&mut self, completion: Cqe) -> io::Result<()> {
        if completion.user_data != RECEIVE {
            self.now.is_shut |= completion.user_data == SHUTDOWN && completion.res > 0;
            return Ok(());
        }
        if completion.res < 0 {
            self.ended(-completion.res)?;
        }
        // What says neither "more" nor anything bad is the last message: an empty datagram ends a receive.
        self.now.is_armed &= completion.flags & abi::CQE_MORE != 0;
        if completion.flags & abi::CQE_BUFFER != 0 {
            self.put_into_batch(completion);
        }
        Ok(())
    }

    #[inline]
    fn put_into_batch(&mut self, completion: Cqe) {
        let id = (completion.flags >> abi::CQE_BUFFER_SHIFT) as u16;
        let Some(held) = self.now.buffers.take(id) else { return };
        match view(self.now.buffers.bytes(&held), completion.res, self.payload_at) {
            Some(view) => {
                self.sums.add(view.len as usize, view.truncated, view.control > 0);
                let View { truncated, control, len, full_len } = view;
                self.batch.push(Taken { held, truncated, control, len, full_len });
            }
            None => {
                self.now.buffers.give(held);
                self.now.buffers.publish();
            }
        }
    }

    /// The receive ended with an error.
    #[cold]
    fn ended(&mut self, code: i32) -> io::Result<()> {
        match code {
            libc::ENOBUFS => {
                self.short += 1;
                self.is_short = !self.batch.is_empty();
            }
            libc::ECANCELED | libc::EINTR | libc::EAGAIN => {}
            // Not about what is in the queue, which may be full.
            _ if sock::may_be_of_earlier(code) => {}
            _ => return Err(io::Error::from_raw_os_error(code)),
        }
        self.now.is_armed = false;
        Ok(())
    }

    /// What the messages of the last receive are together.
    #[inline]
    #[must_use]
    pub fn sums(&self) -> Sums {
        self.sums
    }

    /// Message `index` of the last receive.
    ///
    /// # Panics
    /// If the last receive did not return that many.
    #[inline]
    #[must_use]
    pub fn message(&self, index: usize) -> Message<'_> {
        let taken = &self.batch[index];
        let bytes = self.now.buffers.bytes(&taken.held);
        // The lengths were checked when the message was taken, against buffers of this very size.
        let start = self.payload_at;
        let data = bytes.get(start..start + taken.len as usize).unwrap_or_default();
        let peer = bytes.get(OUT..).and_then(SockAddr::within).unwrap_or(&SockAddr::EMPTY);
        let control = match taken.control {
            0 => &[],
            len => bytes.get(OUT + NAME..OUT + NAME + usize::from(len)).unwrap_or_default(),
        };
        Message::new(data, taken.full_len as usize, taken.truncated, peer, control)
    }
}

/// What is said of a message in its buffer.
struct View {
    truncated: bool,
    control: u16,
    len: u32,
    full_len: u32,
}

/// Checks what the kernel wrote into a buffer, `written` bytes, with the payload at `payload_at`; none if it is no message.
#[inline]
fn view(bytes: &[u8], written: i32, payload_at: usize) -> Option<View> {
    let bytes = bytes.get(..usize::try_from(written).ok()?)?;
    let room = bytes.len().checked_sub(payload_at)?;
    let out: &[u8; OUT] = bytes.first_chunk()?;
    let word = |at: usize| u32::from_ne_bytes([out[at], out[at + 1], out[at + 2], out[at + 3]]);
    let out = RecvmsgOut { namelen: word(0), controllen: word(4), payloadlen: word(8), flags: word(12) };
    Some(View {
        truncated: out.flags & libc::MSG_TRUNC as u32 != 0,
        control: out.controllen.min((payload_at - OUT - NAME) as u32) as u16,
        len: out.payloadlen.min(room as u32),
        full_len: out.payloadlen,
    })
}
