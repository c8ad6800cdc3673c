//! The system calls: an AF_XDP socket, its memory, its rings, its device queue.

use std::cell::Cell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use libc::{c_int, off_t, xdp_desc, xdp_mmap_offsets, xdp_ring_offset};

use super::options::{Mode, QueueOptions};
use super::ring::{Consumer, Producer, RingMemory, Slot};
use super::tx_metadata::METADATA_LEN;
use super::wakeup::{KickOutcome, RingWakeup};
use crate::map::{Mapping, READ_WRITE};
use crate::{busy_poll, check, sock};

/// The rings of a device queue.
pub(super) struct UmemRings {
    pub(super) fill: Producer<u64>,
    pub(super) completion: Consumer<u64>,
}

/// The rings of a member.
pub(super) struct MemberRings {
    pub(super) rx: Consumer<xdp_desc>,
    pub(super) tx: Producer<xdp_desc>,
    /// Mappings of the rings; none in tests.
    pub(super) maps: Option<Maps>,
}

/// Missing in the libc crate. Defined in linux/if_xdp.h (Linux 6.17): maximum number of packets
/// that one call sends in copy mode.
pub(super) const XDP_MAX_TX_SKB_BUDGET: c_int = 9;
/// Its default is 32; Linux 5.10 has 16.
const TX_BUDGET_DEFAULT: u32 = 16;

/// All rings of a bound socket.
pub(super) struct AllRings {
    pub(super) fill: RingMemory<u64>,
    pub(super) completion: RingMemory<u64>,
    pub(super) rx: RingMemory<xdp_desc>,
    pub(super) tx: RingMemory<xdp_desc>,
}

/// An AF_XDP socket.
pub struct Socket {
    fd: OwnedFd,
    zero_copy: bool,
    busy_polling: Cell<bool>,
    tx_budget: Cell<u32>,
}

impl Socket {
    pub(super) fn open() -> io::Result<Self> {
        // SAFETY: socket(2) takes plain integers.
        let fd = check(unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) })?;
        // SAFETY: the descriptor is new, and this value is its only owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self::from_fd(fd))
    }

    /// Registers `len` bytes at `start` as the frames of this socket; the kernel pins their pages.
    /// Returns the bytes needed before a packet to be sent for its TX metadata: zero if the kernel
    /// supports none.
    ///
    /// # Safety
    /// The memory is page aligned, initialised, and stays mapped until the socket is closed. Its
    /// content is read and written only as the rings allow.
    pub(super) unsafe fn register(&self, start: *mut u8, len: u64, frame_size: u32) -> io::Result<usize> {
        let region = libc::xdp_umem_reg {
            addr: start as u64,
            len,
            chunk_size: frame_size,
            headroom: 0,
            flags: 0,
            tx_metadata_len: 0,
        };
        // Since Linux 6.11; before, the flag is invalid. Linux 6.8 to 6.10 accepted the length
        // without a flag; earlier kernels did too, but ignored it, so they cannot be told apart.
        let telling = libc::xdp_umem_reg {
            flags: libc::XDP_UMEM_TX_METADATA_LEN,
            tx_metadata_len: METADATA_LEN as u32,
            ..region
        };
        match self.set(libc::XDP_UMEM_REG, telling) {
            Err(err) if err.raw_os_error() == Some(libc::EINVAL) => {
                self.set(libc::XDP_UMEM_REG, region).map(|()| 0)
            }
            result => result.map(|()| METADATA_LEN),
        }
    }

    /// Makes and maps the two rings of a device queue. To be bound, a socket with these needs an
    /// RX or a TX ring, too; this one gets the smallest, to which nothing is redirected.
    pub(super) fn umem_rings(&self, options: &QueueOptions) -> io::Result<(UmemRings, Maps)> {
        let QueueOptions { ring, tx_ring, .. } = *options;
        self.set(libc::XDP_UMEM_FILL_RING, ring)?;
        self.set(libc::XDP_UMEM_COMPLETION_RING, tx_ring)?;
        self.set(libc::XDP_RX_RING, 2_u32)?;
        let (offsets, flags) = self.offsets()?;
        let fill = self.map_ring(libc::XDP_UMEM_PGOFF_FILL_RING, &offsets.fr, ring, size_of::<u64>())?;
        let completion =
            self.map_ring(libc::XDP_UMEM_PGOFF_COMPLETION_RING, &offsets.cr, tx_ring, size_of::<u64>())?;
        // SAFETY: each map is made with the offsets and the number of entries of its ring, and
        // entries of the size of the type: both rings carry addresses. `FrameAllocator` keeps the
        // maps as long as the rings, and each ring gets the one producer or consumer on our side.
        let rings = unsafe {
            UmemRings {
                fill: Producer::new(ring_memory(&fill, &offsets.fr, flags, ring)?),
                completion: Consumer::new(ring_memory(&completion, &offsets.cr, flags, tx_ring)?),
            }
        };
        Ok((rings, Maps([fill, completion])))
    }

    /// A socket that is new, or of a leased queue, opened and bound by another process.
    pub(super) fn from_fd(fd: OwnedFd) -> Self {
        let tx_budget = Cell::new(TX_BUDGET_DEFAULT);
        Self { fd, zero_copy: false, busy_polling: Cell::new(false), tx_budget }
    }

    /// Maps all rings of a bound socket, including those of its queue (any socket of the queue has
    /// them, Linux 5.10). The memory is valid as long as the maps. The caller has to ensure that,
    /// over all processes, there is only one producer or consumer of each.
    pub(super) fn all_rings(
        &self,
        shared: u32,
        ring: u32,
        tx_ring: u32,
    ) -> io::Result<(AllRings, [Maps; 2])> {
        let (offsets, flags) = self.offsets()?;
        let word = size_of::<u64>();
        let fill = self.map_ring(libc::XDP_UMEM_PGOFF_FILL_RING, &offsets.fr, shared, word)?;
        let completion = self.map_ring(libc::XDP_UMEM_PGOFF_COMPLETION_RING, &offsets.cr, shared, word)?;
        let rx = self.map_ring(libc::XDP_PGOFF_RX_RING as u64, &offsets.rx, ring, DESC_SIZE)?;
        let tx = self.map_ring(libc::XDP_PGOFF_TX_RING as u64, &offsets.tx, tx_ring, DESC_SIZE)?;
        // SAFETY: each map is made with the offsets and the number of entries of its ring, and
        // entries of the size of the type. The caller keeps the maps as long as the memory is
        // used, and ensures the rest of the contract.
        let rings = unsafe {
            AllRings {
                fill: ring_memory(&fill, &offsets.fr, flags, shared)?,
                completion: ring_memory(&completion, &offsets.cr, flags, shared)?,
                rx: ring_memory(&rx, &offsets.rx, flags, ring)?,
                tx: ring_memory(&tx, &offsets.tx, flags, tx_ring)?,
            }
        };
        Ok((rings, [Maps([fill, completion]), Maps([rx, tx])]))
    }

    /// Makes and maps the two rings of a member.
    pub(super) fn member_rings(&self, options: &QueueOptions) -> io::Result<MemberRings> {
        let QueueOptions { ring, tx_ring, .. } = *options;
        self.set(libc::XDP_RX_RING, ring)?;
        self.set(libc::XDP_TX_RING, tx_ring)?;
        let (offsets, flags) = self.offsets()?;
        let rx = self.map_ring(libc::XDP_PGOFF_RX_RING as u64, &offsets.rx, ring, DESC_SIZE)?;
        let tx = self.map_ring(libc::XDP_PGOFF_TX_RING as u64, &offsets.tx, tx_ring, DESC_SIZE)?;
        // SAFETY: as above; both rings carry descriptors, and `Queue` keeps the maps as long as
        // the rings.
        let (consumer, producer) = unsafe {
            (
                Consumer::new(ring_memory(&rx, &offsets.rx, flags, ring)?),
                Producer::new(ring_memory(&tx, &offsets.tx, flags, tx_ring)?),
            )
        };
        Ok(MemberRings { rx: consumer, tx: producer, maps: Some(Maps([rx, tx])) })
    }

    /// Offsets of the parts of the rings in their mappings, and whether there are flags (Linux
    /// 5.4).
    pub(super) fn offsets(&self) -> io::Result<(xdp_mmap_offsets, bool)> {
        let (words, len) =
            sock::get_prefix::<[u64; 16]>(self.fd.as_fd(), libc::SOL_XDP, libc::XDP_MMAP_OFFSETS)?;
        let flags = len >= size_of::<xdp_mmap_offsets>();
        // Four rings of four words, or three words without flags.
        let each = if flags { 4 } else { 3 };
        let at = |ring: usize| xdp_ring_offset {
            producer: words[ring * each],
            consumer: words[ring * each + 1],
            desc: words[ring * each + 2],
            flags: if flags { words[ring * each + 3] } else { 0 },
        };
        Ok((xdp_mmap_offsets { rx: at(0), tx: at(1), fr: at(2), cr: at(3) }, flags))
    }

    /// Binds to the queue that another socket is bound to, whose mode and flags apply to this one,
    /// too. The kernel refuses any other flag, and a fill and completion ring of its own
    /// (`xsk_bind` in net/xdp/xsk.c).
    pub(super) fn bind_to(&mut self, options: &QueueOptions, other: BorrowedFd<'_>) -> io::Result<()> {
        let queue = (options.ifindex, options.queue);
        bind_with_flags(self.as_fd(), queue, libc::XDP_SHARED_UMEM, other.as_raw_fd() as u32)?;
        // Before Linux 5.3 the query is not supported; a wrong "no" only means more calls than
        // needed.
        self.zero_copy = self.query_zero_copy();
        Ok(())
    }

    /// True if the kernel reports zero copy.
    pub(super) fn query_zero_copy(&self) -> bool {
        sock::get::<u32>(self.fd.as_fd(), libc::SOL_XDP, libc::XDP_OPTIONS)
            .is_ok_and(|flags| flags & libc::XDP_OPTIONS_ZEROCOPY != 0)
    }

    /// Lets one call send all that the ring has room for, if the kernel supports it. Neither
    /// setting is required.
    pub(super) fn raise_tx_limits(&self, options: &QueueOptions) {
        if self.set(XDP_MAX_TX_SKB_BUDGET, options.tx_ring).is_ok() {
            self.tx_budget.set(options.tx_ring);
        }
        // Copies being sent are charged to the socket, at twice their size.
        let bytes = (options.tx_ring as usize).saturating_mul(2 * options.frame_size as usize);
        let _ = sock::set_buffer(self.fd.as_fd(), sock::Buffer::Send, bytes);
    }

    /// See [`Queue::busy_poll`](super::Queue::busy_poll).
    pub(super) fn busy_poll(&self, micros: u32, budget: u32) -> io::Result<()> {
        busy_poll::set(self.fd.as_fd(), micros, u16::try_from(budget).unwrap_or(u16::MAX))?;
        self.busy_polling.set(micros > 0);
        Ok(())
    }

    pub(super) fn set<T: Copy>(&self, name: c_int, value: T) -> io::Result<()> {
        sock::set(self.fd.as_fd(), libc::SOL_XDP, name, value)
    }
}

/// Binds a socket that has its rings to a queue of a device without an owner. Returns whether long
/// packets arrive in several frames. That applies to sockets that join later, too: the kernel
/// stores it with the frames.
pub(super) fn bind(fd: BorrowedFd<'_>, options: &QueueOptions) -> io::Result<bool> {
    let mode = match options.mode {
        Mode::Auto => 0,
        Mode::Copy => libc::XDP_COPY,
        Mode::ZeroCopy => libc::XDP_ZEROCOPY,
    };
    let queue = (options.ifindex, options.queue);
    let refused = |result: &io::Result<()>, with: &[c_int]| {
        result.as_ref().is_err_and(|err| err.raw_os_error().is_some_and(|code| with.contains(&code)))
    };
    if options.multi_buffer {
        let bound = bind_with_flags(fd, queue, mode | libc::XDP_USE_NEED_WAKEUP | libc::XDP_USE_SG, 0);
        // `EINVAL`: the flag is unknown before Linux 6.6. `EOPNOTSUPP`: the driver supports zero
        // copy only for packets of one frame.
        if !refused(&bound, &[libc::EINVAL, libc::EOPNOTSUPP]) {
            return bound.map(|()| true);
        }
    }
    let bound = bind_with_flags(fd, queue, mode | libc::XDP_USE_NEED_WAKEUP, 0);
    // Before Linux 5.4 the flag is invalid. (So is a queue that the device does not have, each
    // time.)
    if refused(&bound, &[libc::EINVAL]) {
        return bind_with_flags(fd, queue, mode, 0).map(|()| false);
    }
    bound.map(|()| false)
}

/// Binds to a queue: the index of its device, and its number there.
pub(super) fn bind_with_flags(
    fd: BorrowedFd<'_>,
    (ifindex, queue): (u32, u32),
    flags: u16,
    shared: u32,
) -> io::Result<()> {
    let addr = libc::sockaddr_xdp {
        sxdp_family: libc::AF_XDP as u16,
        sxdp_flags: flags,
        sxdp_ifindex: ifindex,
        sxdp_queue_id: queue,
        sxdp_shared_umem_fd: shared,
    };
    let len = size_of::<libc::sockaddr_xdp>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of `addr`, which lives across the call.
    check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const addr).cast(), len) })?;
    Ok(())
}

impl From<Socket> for OwnedFd {
    fn from(socket: Socket) -> Self {
        socket.fd
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl RingWakeup for Socket {
    #[inline]
    fn is_zero_copy(&self) -> bool {
        self.zero_copy
    }

    #[inline]
    fn is_busy_polling(&self) -> bool {
        self.busy_polling.get()
    }

    fn tx_budget(&self) -> u32 {
        self.tx_budget.get()
    }

    fn send(&self) -> io::Result<KickOutcome> {
        // Bypasses the C library: the preload library overrides its function, which reports that
        // the program has no such descriptor.
        // SAFETY: no data and no address: sendto(2) reads no memory of ours.
        let ret = unsafe {
            let nothing = ptr::null::<u8>();
            libc::syscall(libc::SYS_sendto, self.fd.as_raw_fd(), nothing, 0, libc::MSG_DONTWAIT, nothing, 0)
        };
        if ret >= 0 {
            return Ok(KickOutcome::Accepted);
        }
        let err = io::Error::last_os_error();
        match err.raw_os_error() {
            // Out of budget, of socket buffer, of memory, or of room in the completion ring or the
            // device.
            Some(libc::EAGAIN | libc::ENOBUFS | libc::EINTR) => Ok(KickOutcome::Partial),
            Some(libc::EBUSY) => Ok(KickOutcome::Dropped),
            Some(libc::ENETDOWN) => Ok(KickOutcome::Down),
            _ => Err(err),
        }
    }

    fn receive(&self) {
        // Errors are states here: a device that is down or gone has no packets.
        // SAFETY: no buffer and no address: recvfrom(2) writes to no memory of ours.
        let ret = unsafe {
            libc::recvfrom(
                self.fd.as_raw_fd(),
                ptr::null_mut(),
                0,
                libc::MSG_DONTWAIT,
                ptr::null_mut(),
                ptr::null_mut(),
            )
        };
        // Before Linux 5.11 the socket has no receive call; polling it does the same.
        if ret < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EOPNOTSUPP) {
            _ = sock::wait_readable(self.fd.as_fd(), Duration::ZERO);
        }
    }
}

/// The mappings of two rings. Each ring has one producer or consumer on our side, made of it.
pub(super) struct Maps(#[expect(dead_code, reason = "kept for their drop")] pub(super) [Mapping; 2]);

pub(super) const DESC_SIZE: usize = size_of::<xdp_desc>();

impl Socket {
    pub(super) fn map_ring(
        &self,
        page: u64,
        at: &xdp_ring_offset,
        entries: u32,
        each: usize,
    ) -> io::Result<Mapping> {
        let overflow = |_| io::Error::from_raw_os_error(libc::EOVERFLOW);
        let len = usize::try_from(at.desc).map_err(overflow)? + entries as usize * each;
        let page = off_t::try_from(page).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))?;
        Mapping::populated(self.fd.as_fd(), page, len, READ_WRITE)
    }
}

/// The ring in a mapping of [`Socket::map_ring`].
///
/// # Safety
/// `at` and `entries` are those the map was made with, and any bytes are a value of `T`. At most
/// one producer or consumer is made of the result, and it is dropped before the map.
unsafe fn ring_memory<T: Copy>(
    map: &Mapping,
    at: &xdp_ring_offset,
    flags: bool,
    entries: u32,
) -> io::Result<RingMemory<T>> {
    let word = |offset: u64| map.ptr_at::<AtomicU32>(offset as usize, 1);
    let slots = map.ptr_at::<Slot<T>>(at.desc as usize, entries as usize)?;
    let flags = if flags { Some(word(at.flags)?) } else { None };
    // SAFETY: words and slots are inside the mapping and aligned. The memory is the kernel's and
    // zeroed, so initialised; the other side is the kernel. The caller ensures the rest.
    Ok(unsafe { RingMemory::new(word(at.producer)?, word(at.consumer)?, flags, slots, entries) })
}
