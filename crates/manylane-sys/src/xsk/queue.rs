//! A queue of a device: the socket and what is between its rings.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Weak};
use std::{error, fmt, io};

use super::allocator::{FrameAllocator, UmemSocket};
use super::frames::Frames;
use super::linearize::Linearizer;
use super::member::QueueMember;
use super::send::{Payloads, Sender};
use super::socket::{Maps, MemberRings, Socket, bind, statistics};
use super::wakeup::RingWakeup as _;
use super::{FrameCounts, QueueOptions, Statistics};
use crate::map::Mapping;

/// What opening a queue failed at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// The options: a size that is no power of two, is zero, or is too small for another one; a
    /// device or queue that is not the one to join.
    Options,
    /// Memory for the frames: `ENOMEM`, the limit of the address space.
    Memory,
    /// Opening the socket: `EPERM` without `CAP_NET_RAW`, `EAFNOSUPPORT` from a kernel without
    /// AF_XDP, `EMFILE`.
    Socket,
    /// Registering the frames: `ENOBUFS` beyond `RLIMIT_MEMLOCK` without `CAP_IPC_LOCK`, `ENOMEM`,
    /// `EINVAL` for frames larger than a page.
    Register,
    /// Making or mapping the rings: `ENOMEM`.
    Rings,
    /// Binding to the queue: `EBUSY` if somebody has it (or had it: the kernel lets go of it some
    /// time after a socket was closed), `EINVAL` if the device has no such queue, `EOPNOTSUPP` if
    /// its driver cannot do without copying, `ENODEV` without the device.
    Bind,
    /// Joining a queue: no socket has it any more, or too many do.
    Join,
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
            Step::Join => "joining a device queue",
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
///
/// Several can be members of one device queue ([`join`](Self::join)), each in a thread of its own.
/// One that is dropped sends what it has queued, and gives everything else back to the others. The
/// kernel knows nothing of that, so take it out of every XSKMAP first, and wait until no packet is
/// on its way to it: what comes after the drop has begun is lost together with its frame, which
/// stays in [`FrameCounts::filling`] until the last member is gone. A duplicate of the descriptor
/// keeps the socket open. And of a device that sends by itself (zero-copy), frames that it had not
/// taken stay in [`FrameCounts::sending`] until it has sent them.
pub struct Queue {
    // Dropped from the top: first the descriptor, then the rings and their maps, with which the
    // socket closes; then the pool, if it has no other member. (The kernel has all the memory
    // pinned, so that the order is for tidiness.)
    socket: Socket,
    member: QueueMember,
    _maps: Maps,
    allocator: Arc<FrameAllocator>,
}

/// By what other sockets of the process join a [`Queue`]; see [`Queue::join`]. It keeps nothing
/// open.
#[derive(Clone)]
pub struct WeakQueue {
    allocator: Weak<FrameAllocator>,
}

impl WeakQueue {
    /// Whether a socket still has the queue.
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
    /// Opens a queue, with its fill ring filled. Nothing is received before an XDP program
    /// redirects to it.
    ///
    /// # Errors
    /// See [`Step`].
    pub fn open(options: &QueueOptions) -> Result<Self, OpenError> {
        let bytes = check_options(options).map_err(Step::Options.failed())?;
        let memory = Mapping::new(bytes).map_err(Step::Memory.failed())?;
        // A child process would share the pinned pages copy-on-write, and whoever writes to one
        // first gets a copy: before Linux 5.12 that may be us, and the kernel goes on with the
        // other one.
        // SAFETY: advice on a mapping of ours, to its last page; it changes nothing in this
        // process. Where it fails, no child is worse off than without.
        unsafe { libc::madvise(memory.as_ptr().cast(), bytes, libc::MADV_DONTFORK) };
        let anchor = Socket::open().map_err(Step::Socket.failed())?;
        let size = u64::from(options.frames) * u64::from(options.frame_size);
        // SAFETY: the mapping is zeroed, page aligned and of that size. On an error here it is
        // dropped after the socket (locals go in reverse); otherwise both go into the pool, which
        // drops them in that order, and which touches the memory only as the rings allow.
        let room = unsafe { anchor.register(memory.as_ptr(), size, options.frame_size) }
            .map_err(Step::Register.failed())?;
        let (rings, maps) = anchor.umem_rings(options).map_err(Step::Rings.failed())?;
        let (socket, member) = Self::open_socket(options)?;
        let frames = Frames::new(memory, options.frames, options.frame_size, room);
        // Filled before it is bound: a device that copies nothing takes frames at once.
        let anchor = UmemSocket { socket: anchor.into(), ifindex: options.ifindex, queue: options.queue };
        let mut pool = FrameAllocator::new(rings, Some((maps, anchor)), frames, options.ring);
        if let Some(anchor) = &pool.umem_socket {
            pool.multi_buffer = bind(anchor.socket.as_fd(), options).map_err(Step::Bind.failed())?;
        }
        Self::add_member(Arc::new(pool), options, socket, member)
    }

    /// Joins a queue that others of this process have: one more socket for the same queue of the
    /// same device, for another thread. All members share the frames, the fill and the completion
    /// ring; each receives what an XDP program redirects to its socket (by the XSKMAP entry that
    /// has it), and sends for itself.
    ///
    /// Of the options, `ring`, `tx_ring` and `batch` are this member's, `ifindex` and `queue` have
    /// to be those of the queue, and all others are as the queue was opened. Frames for receiving
    /// are as many as the receive rings of all members have entries, but at most half; the other
    /// half is for sending, the same part for each member. So a queue for N members is opened with
    /// `frames` of 2 N times `ring`: then none can take from the others what they need to receive,
    /// not even by not reading its ring.
    ///
    /// With generic XDP before Linux 6.15 members race in the kernel for the fill ring: let one
    /// socket have the queue there.
    ///
    /// # Errors
    /// See [`Step`]; [`Step::Join`] when no member is left.
    pub fn join(share: &WeakQueue, options: &QueueOptions) -> Result<Self, OpenError> {
        check_options(options).map_err(Step::Options.failed())?;
        let gone = "no socket has the queue any more: open it anew";
        let pool =
            share.allocator.upgrade().ok_or_else(|| io::Error::other(gone)).map_err(Step::Join.failed())?;
        let (socket, member) = Self::open_socket(options)?;
        Self::add_member(pool, options, socket, member)
    }

    /// A socket that is not bound yet, and its rings.
    fn open_socket(options: &QueueOptions) -> Result<(Socket, (MemberRings, Maps)), OpenError> {
        let socket = Socket::open().map_err(Step::Socket.failed())?;
        let member = socket.member_rings(options).map_err(Step::Rings.failed())?;
        socket.raise_tx_limits(options);
        Ok((socket, member))
    }

    /// Makes a socket a member.
    fn add_member(
        pool: Arc<FrameAllocator>,
        options: &QueueOptions,
        mut socket: Socket,
        (rings, maps): (MemberRings, Maps),
    ) -> Result<Self, OpenError> {
        let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
        let same = |anchor: &&UmemSocket| (anchor.ifindex, anchor.queue) == (options.ifindex, options.queue);
        let anchor =
            pool.umem_socket.as_ref().filter(same).ok_or_else(invalid).map_err(Step::Options.failed())?;
        socket.bind_to(options, anchor.socket.as_fd()).map_err(Step::Bind.failed())?;
        let full = || io::Error::other("the queue has as many members as there are numbers for");
        let assembly =
            if pool.multi_buffer { Linearizer::new(options.ring) } else { Ok(Linearizer::disabled()) };
        let assembly = assembly.map_err(Step::Memory.failed())?;
        // A device that copies nothing would have to say whether it does checksums; where packets
        // are copied, the kernel does those that the device does not.
        let checksums = pool.frames.tx_metadata_len() > 0 && !socket.is_zero_copy();
        let core = QueueMember::join(Arc::clone(&pool), rings, options, assembly, checksums)
            .ok_or_else(full)
            .map_err(Step::Join.failed())?;
        Ok(Self { socket, member: core, _maps: maps, allocator: pool })
    }

    /// By what other sockets of this process join this queue, as long as it has a member.
    #[must_use]
    pub fn downgrade(&self) -> WeakQueue {
        WeakQueue { allocator: Arc::downgrade(&self.allocator) }
    }

    /// Begins a batch of up to `most` packets (and up to [`QueueOptions::batch`]), and returns how
    /// many it has.
    ///
    /// The batch before ends: what it had is free, or on its way out. What was sent comes back, and
    /// the kernel gets new frames to receive into.
    #[inline]
    pub fn receive(&mut self, most: usize) -> usize {
        self.member.receive(&self.socket, most)
    }

    /// Whether a [`receive`](Self::receive) would bring nothing and has nothing to do: then it need
    /// not be called. A look at one cache line of ours and at the counter of the ring. Not always
    /// told: now and then a receive shall look at everything.
    #[inline]
    #[must_use]
    pub fn is_idle(&mut self) -> bool {
        self.member.is_idle()
    }

    /// Whether packets wait to be received.
    #[inline]
    #[must_use]
    pub fn has_received(&self) -> bool {
        self.member.has_received()
    }

    /// Entries of the receive ring that wait (packets, or parts of one), and how many there can be.
    #[must_use]
    pub fn backlog(&self) -> (u32, u32) {
        self.member.backlog()
    }

    /// Entries of the receive ring that waited when the last batch began, and are not in it. It
    /// does not look at the ring, whose counter another core writes.
    #[inline]
    #[must_use]
    pub fn cached_backlog(&self) -> u32 {
        self.member.cached_backlog()
    }

    /// Packet `i` of the batch, whole.
    ///
    /// # Panics
    /// If the batch has no such packet.
    #[inline]
    #[must_use]
    pub fn packet(&self, i: usize) -> &[u8] {
        self.member.packet(i)
    }

    /// Lets `edit` write over every packet of the batch, in order.
    pub fn edit_packets(&mut self, edit: impl FnMut(&mut [u8])) {
        self.member.edit_packets(edit);
    }

    /// Shows every packet of the batch, in order and with its number, to `find`, which says where
    /// its payload starts and how long it is. What is before it is its header; what is behind it
    /// nobody looks at. Where it says nothing, and before, all of a packet is its payload.
    ///
    /// # Panics
    /// If a packet does not have the bytes that are said to be its payload.
    #[inline]
    pub fn find_payloads(&mut self, find: impl FnMut(usize, &[u8]) -> Option<(usize, usize)>) {
        self.member.find_payloads(find);
    }

    /// The payloads of the batch, and the way out. The payloads may be read while replies to them
    /// are written and sent.
    #[inline]
    pub fn split(&mut self) -> (Payloads<'_>, Sender<'_>) {
        self.member.split(&self.socket)
    }

    /// The way out.
    #[inline]
    pub fn sender(&mut self) -> Sender<'_> {
        self.split().1
    }

    /// [`Sender::flush`], if something is left that the kernel had not taken when it was told last:
    /// without it, a look at our side of the ring is all that it costs.
    ///
    /// # Errors
    /// As for [`Sender::flush`].
    #[inline]
    pub fn flush_pending(&mut self) -> io::Result<()> {
        self.member.flush_pending(&self.socket)
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

    /// Whether packets that are longer than a frame are taken. Such a packet is put together in a
    /// buffer, and its frames are free at once: it cannot be sent from where it is
    /// ([`Sender::is_multi_buffer`]), and is at most 64 KiB long. What does not fit the buffer
    /// comes with the next batch.
    #[must_use]
    pub fn has_multi_buffer(&self) -> bool {
        self.allocator.multi_buffer
    }

    /// Whether packets may be sent whose checksum is not finished (Linux 6.11, where packets are
    /// copied): see [`Sender::send_in_place_partial`]. Never without copying, where only some
    /// drivers can do it.
    #[must_use]
    pub fn has_csum_offload(&self) -> bool {
        self.member.has_csum_offload()
    }

    /// How many frames are where.
    #[must_use]
    pub fn frame_counts(&self) -> FrameCounts {
        self.member.frame_counts()
    }

    /// Makes the device queue work in our calls instead of in interrupts (`SO_PREFER_BUSY_POLL` and
    /// `SO_BUSY_POLL_BUDGET`, Linux 5.11, where the kernel has them, and `SO_BUSY_POLL`): a
    /// [`receive`](Self::receive) that finds nothing, and a flush, let the device work for up to
    /// `micros`, on `budget` packets (0: the kernel's default). Zero `micros` ends it.
    ///
    /// # Errors
    /// `EPERM` without `CAP_NET_ADMIN`.
    pub fn busy_poll(&mut self, micros: u32, budget: u32) -> io::Result<()> {
        self.member.reset_idle();
        self.socket.busy_poll(micros, budget)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.member.leave(&self.socket);
    }
}

impl AsFd for Queue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let census = self.member.frame_counts();
        f.debug_struct("Queue").field("fd", &self.as_fd()).field("census", &census).finish_non_exhaustive()
    }
}

/// Checks sizes before any call; the bytes of all frames.
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
