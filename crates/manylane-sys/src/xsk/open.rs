//! Opening a queue of a device, and joining one.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Weak};
use std::{error, fmt, io};

use super::allocator::{FrameAllocator, UmemSocket};
use super::frames::Frames;
use super::linearize::Linearizer;
use super::options::QueueOptions;
use super::queue::Queue;
use super::socket::{MemberRings, Socket, bind};
use super::wakeup::RingWakeup as _;
use crate::map::Mapping;

/// The step at which opening a queue failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// The options: a size that is no power of two, is zero, or is too small for another one; a
    /// device or queue other than the one to join.
    Options,
    /// Allocating the frames: `ENOMEM`, the limit of the address space.
    Memory,
    /// Opening the socket: `EPERM` without `CAP_NET_RAW`, `EAFNOSUPPORT` from a kernel without
    /// AF_XDP, `EMFILE`.
    Socket,
    /// Registering the frames: `ENOBUFS` beyond `RLIMIT_MEMLOCK` without `CAP_IPC_LOCK`, `ENOMEM`,
    /// `EINVAL` for frames larger than a page.
    Register,
    /// Making or mapping the rings: `ENOMEM`.
    Rings,
    /// Binding to the queue: `EBUSY` if another process has it (or had it: the kernel releases it
    /// some time after a socket was closed), `EINVAL` if the device has no such queue,
    /// `EOPNOTSUPP` if its driver does not support zero copy, `ENODEV` without the device.
    Bind,
    /// Joining a queue: it is closed, or has too many sockets.
    Join,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Step::Options => "checking the sizes of the queue",
            Step::Memory => "mapping memory for the frames",
            Step::Socket => "opening the AF_XDP socket",
            Step::Register => "registering the frames",
            Step::Rings => "creating the rings",
            Step::Bind => "binding to the device queue",
            Step::Join => "joining a device queue",
        })
    }
}

/// The reason why a queue could not be opened.
#[derive(Debug)]
pub struct OpenError {
    /// The step that failed.
    pub step: Step,
    /// The error.
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

/// Lets other sockets of the process join a [`Queue`]; see [`Queue::join`]. It does not keep the
/// queue open.
#[derive(Clone)]
pub struct WeakQueue {
    allocator: Weak<FrameAllocator>,
}

impl WeakQueue {
    /// True if a socket still has the queue.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.allocator.strong_count() > 0
    }
}

impl fmt::Debug for WeakQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Share").field("is_open", &self.is_open()).finish()
    }
}

impl Queue {
    /// Opens a queue, with its fill ring filled. Receives nothing before an XDP program redirects
    /// to it.
    ///
    /// # Errors
    /// See [`Step`].
    pub fn open(options: &QueueOptions) -> Result<Self, OpenError> {
        let bytes = check_options(options).map_err(Step::Options.failed())?;
        let memory = Mapping::new(bytes).map_err(Step::Memory.failed())?;
        // A child process would share the pinned pages copy-on-write, and the first writer of a
        // page gets a copy: before Linux 5.12 that may be this process, while the kernel keeps
        // using the original.
        // SAFETY: advice on a mapping of ours, to its last page; it changes nothing in this
        // process. If it fails, a child is no worse off than without. By libc, as in `map.rs`.
        unsafe { libc::madvise(memory.as_ptr().cast(), bytes, libc::MADV_DONTFORK) };
        let anchor = Socket::open().map_err(Step::Socket.failed())?;
        let size = u64::from(options.frames) * u64::from(options.frame_size);
        // SAFETY: the mapping is zeroed, page aligned and of that size. On an error here it is
        // dropped after the socket (locals drop in reverse order). Otherwise both move into the
        // allocator, which drops them in that order, and which touches the memory only as the
        // rings allow.
        let room = unsafe { anchor.register(memory.as_ptr(), size, options.frame_size) }
            .map_err(Step::Register.failed())?;
        let (rings, maps) = anchor.umem_rings(options).map_err(Step::Rings.failed())?;
        let (socket, member) = Self::open_socket(options)?;
        let frames = Frames::new(memory, options.frames, options.frame_size, room);
        // Filled before it is bound: with zero copy the device takes frames at once.
        let anchor = UmemSocket { socket: anchor.into(), ifindex: options.ifindex, queue: options.queue };
        let mut allocator = FrameAllocator::new(rings, Some((maps, anchor)), frames, options.ring);
        if let Some(anchor) = &allocator.umem_socket {
            allocator.multi_buffer = bind(anchor.socket.as_fd(), options).map_err(Step::Bind.failed())?;
        }
        Self::add_member(Arc::new(allocator), options, socket, member)
    }

    /// Joins a queue that others of this process have open: one more socket for the same queue of
    /// the same device, for another thread. All members share the frames, the fill and the
    /// completion ring. Each receives what an XDP program redirects to its socket (by its XSKMAP
    /// entry), and sends for itself.
    ///
    /// Of the options, `ring`, `tx_ring` and `batch` are this member's, and `ifindex` and `queue`
    /// have to be those of the queue. All others are as the queue was opened. The frames for
    /// receiving are as many as the RX rings of all members have entries, but at most half. The
    /// other half is for sending, in equal parts for each member. So a queue for N members is
    /// opened with `frames` of 2 N times `ring`: then no member can take the frames that the
    /// others need to receive, not even if it does not read its ring.
    ///
    /// With generic XDP before Linux 6.15 members race in the kernel for the fill ring: use only
    /// one socket per queue there.
    ///
    /// # Errors
    /// See [`Step`]; [`Step::Join`] if no member is left.
    pub fn join(share: &WeakQueue, options: &QueueOptions) -> Result<Self, OpenError> {
        check_options(options).map_err(Step::Options.failed())?;
        let gone = "the queue was closed: open it again";
        let allocator =
            share.allocator.upgrade().ok_or_else(|| io::Error::other(gone)).map_err(Step::Join.failed())?;
        let (socket, member) = Self::open_socket(options)?;
        Self::add_member(allocator, options, socket, member)
    }

    /// An unbound socket, and its rings.
    fn open_socket(options: &QueueOptions) -> Result<(Socket, MemberRings), OpenError> {
        let socket = Socket::open().map_err(Step::Socket.failed())?;
        let member = socket.member_rings(options).map_err(Step::Rings.failed())?;
        socket.raise_tx_limits(options);
        Ok((socket, member))
    }

    /// Makes a socket a member.
    fn add_member(
        allocator: Arc<FrameAllocator>,
        options: &QueueOptions,
        mut socket: Socket,
        rings: MemberRings,
    ) -> Result<Self, OpenError> {
        let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
        let same = |anchor: &&UmemSocket| (anchor.ifindex, anchor.queue) == (options.ifindex, options.queue);
        let anchor = allocator
            .umem_socket
            .as_ref()
            .filter(same)
            .ok_or_else(invalid)
            .map_err(Step::Options.failed())?;
        socket.bind_to(options, anchor.socket.as_fd()).map_err(Step::Bind.failed())?;
        let full = || io::Error::other("the queue has the maximum number of members");
        let assembly =
            if allocator.multi_buffer { Linearizer::new(options.ring) } else { Ok(Linearizer::disabled()) };
        let assembly = assembly.map_err(Step::Memory.failed())?;
        // With zero copy the driver would have to report whether it supports checksums; in copy
        // mode, the kernel computes those that the device does not.
        let checksums = allocator.frames.tx_metadata_len() > 0 && !socket.is_zero_copy();
        Self::new(Arc::clone(&allocator), rings, socket, options, assembly, checksums)
            .ok_or_else(full)
            .map_err(Step::Join.failed())
    }

    /// Lets other sockets of this process join this queue, as long as it has a member.
    #[must_use]
    pub fn downgrade(&self) -> WeakQueue {
        WeakQueue { allocator: Arc::downgrade(&self.tx_queue.allocator) }
    }

    /// True if packets that are longer than a frame are received. Such a packet is assembled in a
    /// buffer, and its frames are free at once: it cannot be sent in place, and is at most 64 KiB
    /// long. Packets that do not fit the buffer are in the next batch.
    #[must_use]
    pub fn has_multi_buffer(&self) -> bool {
        self.tx_queue.allocator.multi_buffer
    }

    /// Makes the device queue work in our calls instead of in interrupts (`SO_PREFER_BUSY_POLL`
    /// and `SO_BUSY_POLL_BUDGET`, Linux 5.11, if the kernel has them, and `SO_BUSY_POLL`). A
    /// [`receive`](Self::receive) that finds nothing, and a flush, let the device work for up to
    /// `micros` µs, on `budget` packets (0: the kernel's default). Zero `micros` ends it.
    ///
    /// # Errors
    /// `EPERM` without `CAP_NET_ADMIN`.
    pub fn busy_poll(&mut self, micros: u32, budget: u32) -> io::Result<()> {
        self.reset_idle();
        self.wakeup.busy_poll(micros, budget)
    }
}

impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wakeup.as_fd()
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let census = self.frame_counts();
        f.debug_struct("Queue").field("fd", &self.as_fd()).field("census", &census).finish_non_exhaustive()
    }
}

/// Checks sizes before any call; returns the size of all frames.
fn check_options(options: &QueueOptions) -> io::Result<usize> {
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
