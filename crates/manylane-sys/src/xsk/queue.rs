//! A queue of a device: the socket and what is between its rings.

use std::os::fd::{AsFd, BorrowedFd};
use std::{error, fmt, io};

use super::core::{Bell as _, Core};
use super::send::{Payloads, Sender};
use super::socket::{Maps, Socket, statistics};
use super::{Census, QueueOptions, Statistics};
use crate::map::Mapping;

/// What opening a queue failed at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// The options: a size that is no power of two, is zero, or is too small for another one.
    Options,
    /// Memory for the frames: `ENOMEM`, the limit of the address space.
    Memory,
    /// Opening the socket: `EPERM` without `CAP_NET_RAW`, `EAFNOSUPPORT` from a kernel without AF_XDP, `EMFILE`.
    Socket,
    /// Registering the frames: `ENOBUFS` beyond `RLIMIT_MEMLOCK` without `CAP_IPC_LOCK`, `ENOMEM`, `EINVAL` for
    /// frames larger than a page.
    Register,
    /// Making or mapping the rings: `ENOMEM`.
    Rings,
    /// Binding to the queue: `EBUSY` if somebody has it (or had it: the kernel lets go of it some time after a
    /// socket was closed), `EINVAL` if the device has no such queue, `EOPNOTSUPP` if its driver cannot do without
    /// copying, `ENODEV` without the device.
    Bind,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Step::Options => "checking the sizes of the queue",
            Step::Memory => "mapping memory for the frames",
            Step::Socket => "opening the AF_XDP socket",
            Step::Register => "registering the frames",
            Step::Rings => "making the rings",
            Step::Bind => "binding to the device queue",
        })
    }
}

/// Why a queue could not be opened.
#[derive(Debug)]
pub struct OpenError {
    /// What failed.
    pub step: Step,
    /// How.
    pub source: io::Error,
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.step, self.source)
    }
}

impl error::Error for OpenError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        Some(&self.source)
    }
}

impl From<OpenError> for io::Error {
    fn from(err: OpenError) -> Self {
        err.source
    }
}

impl Step {
    fn failed(self) -> impl FnOnce(io::Error) -> OpenError {
        move |source| OpenError { step: self, source }
    }
}

/// One queue of a device, with its frames; see the [module](super).
///
/// Owned by one thread at a time. The descriptor ([`AsFd`]) is readable when packets wait.
pub struct Queue {
    // Dropped from the top: the socket first, so that the kernel is done with the rings and frames below. (It has
    // the pages of both pinned, so that the order is for tidiness.)
    socket: Socket,
    core: Core,
    _maps: Maps,
}

impl Queue {
    /// Opens a queue, with its fill ring filled. Nothing is received before an XDP program redirects to it.
    ///
    /// # Errors
    /// See [`Step`].
    pub fn open(options: &QueueOptions) -> Result<Self, OpenError> {
        let bytes = checked(options).map_err(Step::Options.failed())?;
        let memory = Mapping::new(bytes).map_err(Step::Memory.failed())?;
        // A child process would share the pinned pages copy-on-write, and whoever writes to one first gets a copy:
        // before Linux 5.12 that may be us, and the kernel goes on with the other one.
        // SAFETY: advice on a mapping of ours, to its last page; it changes nothing in this process. Where it
        // fails, no child is worse off than without.
        unsafe { libc::madvise(memory.as_ptr().cast(), bytes, libc::MADV_DONTFORK) };
        let socket = Socket::open().map_err(Step::Socket.failed())?;
        let size = u64::from(options.frames) * u64::from(options.frame_size);
        // SAFETY: the mapping is zeroed, page aligned and of that size. On an error here it is dropped after the
        // socket (locals go in reverse); otherwise it goes into the core, which outlives the socket in a `Queue`
        // (fields go in order), and which touches it only as the rings allow.
        unsafe { socket.register(memory.as_ptr(), size, options.frame_size) }
            .map_err(Step::Register.failed())?;
        let (rings, maps) = socket.rings(options).map_err(Step::Rings.failed())?;
        socket.widen(options);
        // Filled before it is bound: a device that copies nothing takes frames at once.
        let mut queue = Self { socket, core: Core::new(rings, memory, options), _maps: maps };
        queue.socket.bind(options).map_err(Step::Bind.failed())?;
        Ok(queue)
    }

    /// Begins a batch of up to `most` packets (and up to [`QueueOptions::batch`]), and returns how many it has.
    ///
    /// The batch before ends: what it had is free, or on its way out. What was sent comes back, and the kernel
    /// gets new frames to receive into.
    #[inline]
    pub fn receive(&mut self, most: usize) -> usize {
        self.core.receive(&self.socket, most)
    }

    /// Whether packets wait to be received.
    #[inline]
    #[must_use]
    pub fn has_received(&self) -> bool {
        self.core.has_received()
    }

    /// Packet `i` of the batch, whole.
    ///
    /// # Panics
    /// If the batch has no such packet.
    #[inline]
    #[must_use]
    pub fn packet(&self, i: usize) -> &[u8] {
        self.core.packet(i)
    }

    /// Says that the payload of packet `i` is the `len` bytes from `at` on. What is before them is its header;
    /// what is behind them nobody looks at. Until then, all of a packet is its payload.
    ///
    /// # Panics
    /// If the batch has no such packet, or the packet not so many bytes.
    #[inline]
    pub fn set_payload(&mut self, i: usize, at: usize, len: usize) {
        self.core.set_payload(i, at, len);
    }

    /// The payloads of the batch, and the way out. The payloads may be read while replies to them are written and
    /// sent.
    #[inline]
    pub fn split(&mut self) -> (Payloads<'_>, Sender<'_>) {
        self.core.split(&self.socket)
    }

    /// The way out.
    #[inline]
    pub fn sender(&mut self) -> Sender<'_> {
        self.split().1
    }

    /// What the kernel counts.
    ///
    /// # Errors
    /// What `getsockopt(2)` reports.
    pub fn statistics(&self) -> io::Result<Statistics> {
        statistics(self.as_fd())
    }

    /// Whether packets are not copied.
    #[must_use]
    pub fn is_zero_copy(&self) -> bool {
        self.socket.is_zero_copy()
    }

    /// How many frames are where.
    #[must_use]
    pub fn census(&self) -> Census {
        self.core.census()
    }

    /// Makes the device queue work in our calls instead of in interrupts (`SO_PREFER_BUSY_POLL` and
    /// `SO_BUSY_POLL_BUDGET`, Linux 5.11, where the kernel has them, and `SO_BUSY_POLL`): a [`receive`](Self::receive)
    /// that finds nothing, and a flush, let the device work for up to `micros`, on `budget` packets (0: the
    /// kernel's default). Zero `micros` ends it.
    ///
    /// # Errors
    /// `EPERM` without `CAP_NET_ADMIN`.
    pub fn busy_poll(&self, micros: u32, budget: u32) -> io::Result<()> {
        self.socket.busy_poll(micros, budget)
    }
}

impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let census = self.core.census();
        f.debug_struct("Queue").field("fd", &self.as_fd()).field("census", &census).finish_non_exhaustive()
    }
}

/// Checks sizes before any call; the bytes of all frames.
fn checked(options: &QueueOptions) -> io::Result<usize> {
    let QueueOptions { frames, frame_size, ring, tx_ring, batch, .. } = *options;
    let powers = [frame_size, ring, tx_ring].iter().all(|size| size.is_power_of_two());
    let bytes = (frames as usize).checked_mul(frame_size as usize);
    match bytes {
        Some(bytes) if powers && (2048..=4096).contains(&frame_size) && frames >= 2 && batch >= 1 => {
            Ok(bytes)
        }
        _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
    }
}
