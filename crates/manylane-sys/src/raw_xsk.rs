//! A minimal hand-written receiver on raw AF_XDP rings, as a baseline for measurements.
//!
//! One socket on one queue, in copy mode or in the driver's mode, with frames of 2 KiB. Each batch
//! is read and returned at once, or sent back in its own frames. It keeps no frames and checks
//! nothing. It shares no code with [`xsk`](crate::xsk).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::map::{Mapping, READ_WRITE};

const FRAME_SIZE: u64 = 2048;
/// `XDP_MAX_TX_SKB_BUDGET` (Linux 6.17): frames that one call sends in copy mode, 32 before.
/// Missing in the libc crate.
const MAX_TX_SKB_BUDGET: libc::c_int = 9;
/// Calls without progress after which sending is deferred.
const IDLE_KICKS_MAX: u32 = 2;

/// The receiver.
pub struct RawXsk {
    rx: Ring,
    fill: Ring,
    /// The send side, for a receiver that replies.
    tx_rings: Option<TxRings>,
    umem: Mapping,
    fd: OwnedFd,
    entries: u32,
}

// SAFETY: the rings point into mappings that the value owns and that move with it.
unsafe impl Send for RawXsk {}

/// The rings for sending.
struct TxRings {
    tx: Ring,
    completion: Ring,
}

/// One ring: addresses of its mapped parts.
struct Ring {
    producer: *const AtomicU32,
    consumer: *const AtomicU32,
    flags: *const AtomicU32,
    descs: *mut u8,
    _map: Mapping,
    /// Our own index: consumer of the RX and completion rings, producer of the fill and TX rings.
    index: u32,
}

impl Ring {
    /// The kernel's index, in a ring that it produces into.
    fn produced(&self) -> u32 {
        // SAFETY: the word lies in the mapping, which lives as long as the value.
        unsafe { (*self.producer).load(Ordering::Acquire) }
    }

    /// The kernel's index, in a ring that it consumes from.
    fn consumed(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.consumer).load(Ordering::Acquire) }
    }

    /// Publishes the entries before our index to the kernel. Release: our writes of the entries
    /// come before.
    fn produce(&self) {
        // SAFETY: as above.
        unsafe { (*self.producer).store(self.index, Ordering::Release) };
    }

    /// Returns the entries before our index. Release: our reads of them come before.
    fn consume(&self) {
        // SAFETY: as above.
        unsafe { (*self.consumer).store(self.index, Ordering::Release) };
    }
}

impl RawXsk {
    /// Binds to `queue` of the device `ifindex`, with rings of `entries`, a power of two; with a
    /// send side if it `answers`.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn open(ifindex: u32, queue: u32, entries: u32, answers: bool) -> io::Result<Self> {
        // SAFETY: takes no pointer.
        let raw =
            crate::check(unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) })?;
        // SAFETY: the descriptor is new, and this value is its only owner.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        let umem = Mapping::new(entries as usize * FRAME_SIZE as usize)?;
        let register = libc::xdp_umem_reg {
            addr: umem.as_ptr() as u64,
            len: umem.len() as u64,
            chunk_size: FRAME_SIZE as u32,
            headroom: 0,
            flags: 0,
            tx_metadata_len: 0,
        };
        set(&fd, libc::XDP_UMEM_REG, register)?;
        set(&fd, libc::XDP_UMEM_FILL_RING, entries)?;
        set(&fd, libc::XDP_UMEM_COMPLETION_RING, if answers { entries } else { 64 })?;
        set(&fd, libc::XDP_RX_RING, entries)?;
        if answers {
            set(&fd, libc::XDP_TX_RING, entries)?;
            // An older kernel sends in smaller portions, and is called more often.
            let _ = set(&fd, MAX_TX_SKB_BUDGET, entries);
        }
        // SAFETY: a C struct of integers, for which all zeros are valid.
        let mut offsets: libc::xdp_mmap_offsets = unsafe { std::mem::zeroed() };
        let mut len = size_of_val(&offsets) as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes into `offsets`, which lives across the
        // call.
        crate::check(unsafe {
            let to = (&raw mut offsets).cast();
            libc::getsockopt(fd.as_raw_fd(), libc::SOL_XDP, libc::XDP_MMAP_OFFSETS, to, &raw mut len)
        })?;
        let rx = map_ring(
            &fd,
            libc::XDP_PGOFF_RX_RING,
            &offsets.rx,
            entries as usize * size_of::<libc::xdp_desc>(),
        )?;
        let fill_page = libc::XDP_UMEM_PGOFF_FILL_RING as libc::off_t;
        let mut fill = map_ring(&fd, fill_page, &offsets.fr, entries as usize * 8)?;
        for index in 0..entries {
            // SAFETY: `index` is below the entries that the mapping was made for, and only this
            // thread writes them.
            unsafe { fill.descs.cast::<u64>().add(index as usize).write(u64::from(index) * FRAME_SIZE) };
        }
        fill.index = entries;
        fill.produce();
        let out = if answers { Some(TxRings::map(&fd, &offsets, entries)?) } else { None };
        let addr = libc::sockaddr_xdp {
            sxdp_family: libc::AF_XDP as u16,
            sxdp_flags: libc::XDP_USE_NEED_WAKEUP,
            sxdp_ifindex: ifindex,
            sxdp_queue_id: queue,
            sxdp_shared_umem_fd: 0,
        };
        let len = size_of_val(&addr) as libc::socklen_t;
        // SAFETY: the kernel reads `len` bytes of `addr`, which lives across the call.
        crate::check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const addr).cast(), len) })?;
        Ok(Self { rx, fill, tx_rings: out, umem, fd, entries })
    }

    /// Calls `each` with up to `count_max` received frames, returns the frames to the kernel, and
    /// returns their number.
    #[inline]
    pub fn receive(&mut self, count_max: u32, mut each: impl FnMut(&[u8])) -> u32 {
        let there = self.rx.produced().wrapping_sub(self.rx.index);
        let count = there.min(count_max);
        if count == 0 {
            return 0;
        }
        let mask = self.entries - 1;
        for _ in 0..count {
            let (from, to) = ((self.rx.index & mask) as usize, (self.fill.index & mask) as usize);
            // SAFETY: masked indices are within the rings. The kernel has published this
            // descriptor (acquire above), and its frame is ours until it is in the fill ring.
            // There is always room there, because there are no more frames than entries. The
            // kernel's addresses and lengths are within the UMEM.
            unsafe {
                let desc = &*self.rx.descs.cast::<libc::xdp_desc>().add(from);
                let packet = self.umem.as_ptr().add(desc.addr as usize);
                each(std::slice::from_raw_parts(packet, desc.len as usize));
                self.fill.descs.cast::<u64>().add(to).write(desc.addr & !(FRAME_SIZE - 1));
            }
            self.rx.index = self.rx.index.wrapping_add(1);
            self.fill.index = self.fill.index.wrapping_add(1);
        }
        self.rx.consume();
        self.fill.produce();
        count
    }

    /// As [`receive`](Self::receive), but sends each frame for which `each` returns true back out
    /// of the queue, as `each` left it, without a copy. The kernel is notified once for all of
    /// them.
    ///
    /// # Errors
    /// Those of `sendto(2)` if the device is gone, or if the receiver was opened without a send
    /// side.
    #[inline]
    pub fn reply(&mut self, count_max: u32, mut each: impl FnMut(&mut [u8]) -> bool) -> io::Result<u32> {
        self.reap();
        let Some(out) = &mut self.tx_rings else { return Err(io::Error::from_raw_os_error(libc::EINVAL)) };
        let count = self.rx.produced().wrapping_sub(self.rx.index).min(count_max);
        let mask = self.entries - 1;
        let before = self.fill.index;
        for _ in 0..count {
            // SAFETY: as in `receive`. A frame is in one ring at a time, and there are no more
            // frames than a ring has entries, so the TX ring has room, too. The frame is in no
            // ring now, so the slice may be mutable.
            unsafe {
                let desc = *self.rx.descs.cast::<libc::xdp_desc>().add((self.rx.index & mask) as usize);
                let packet = self.umem.as_ptr().add(desc.addr as usize);
                if each(std::slice::from_raw_parts_mut(packet, desc.len as usize)) {
                    let to = (out.tx.index & mask) as usize;
                    out.tx
                        .descs
                        .cast::<libc::xdp_desc>()
                        .add(to)
                        .write(libc::xdp_desc { options: 0, ..desc });
                    out.tx.index = out.tx.index.wrapping_add(1);
                } else {
                    let to = (self.fill.index & mask) as usize;
                    self.fill.descs.cast::<u64>().add(to).write(desc.addr & !(FRAME_SIZE - 1));
                    self.fill.index = self.fill.index.wrapping_add(1);
                }
            }
            self.rx.index = self.rx.index.wrapping_add(1);
        }
        if count > 0 {
            self.rx.consume();
            out.tx.produce();
        }
        if self.fill.index != before {
            self.fill.produce();
        }
        self.kick()?;
        Ok(count)
    }

    /// True if frames wait for the kernel to send them, because the device was busy.
    #[must_use]
    pub fn is_sending(&self) -> bool {
        self.tx_rings.as_ref().is_some_and(|out| out.tx.consumed() != out.tx.index)
    }

    /// Returns sent frames to the fill ring.
    fn reap(&mut self) {
        let Some(out) = &mut self.tx_rings else { return };
        let sent = out.completion.produced().wrapping_sub(out.completion.index);
        if sent == 0 {
            return;
        }
        let mask = self.entries - 1;
        for _ in 0..sent {
            let (from, to) = ((out.completion.index & mask) as usize, (self.fill.index & mask) as usize);
            // SAFETY: masked indices are within the rings; the kernel has published the entry
            // (acquire in `produced`), and the fill ring has room, because there are no more
            // frames than entries.
            unsafe {
                let addr = *out.completion.descs.cast::<u64>().add(from);
                self.fill.descs.cast::<u64>().add(to).write(addr & !(FRAME_SIZE - 1));
            }
            out.completion.index = out.completion.index.wrapping_add(1);
            self.fill.index = self.fill.index.wrapping_add(1);
        }
        out.completion.consume();
        self.fill.produce();
    }

    /// Notifies the kernel of frames to send, if it needs that. In copy mode it sends in this
    /// call, and may need several. Frames that it does not send stay in the ring for the next
    /// call.
    fn kick(&mut self) -> io::Result<()> {
        let mut idle = 0;
        while idle < IDLE_KICKS_MAX {
            let Some(out) = &self.tx_rings else { return Ok(()) };
            let before = out.tx.consumed();
            // SAFETY: the word is in the mapping, which lives as long as the value.
            let flags = unsafe { (*out.tx.flags).load(Ordering::Relaxed) };
            if before == out.tx.index || flags & libc::XDP_RING_NEED_WAKEUP == 0 {
                return Ok(());
            }
            // SAFETY: no data and no address: sendto(2) reads no memory of ours.
            let done = unsafe {
                libc::sendto(self.fd.as_raw_fd(), ptr::null(), 0, libc::MSG_DONTWAIT, ptr::null(), 0)
            };
            if done < 0 {
                let err = io::Error::last_os_error();
                match err.raw_os_error() {
                    Some(libc::EAGAIN | libc::EBUSY | libc::ENOBUFS | libc::EINTR) => {}
                    Some(libc::ENETDOWN) => return Ok(()),
                    _ => return Err(err),
                }
            }
            if out.tx.consumed() == before {
                // A full completion ring stops the kernel from sending.
                self.reap();
                idle += 1;
            }
        }
        Ok(())
    }
}

impl TxRings {
    fn map(fd: &OwnedFd, offsets: &libc::xdp_mmap_offsets, entries: u32) -> io::Result<Self> {
        let descs = entries as usize * size_of::<libc::xdp_desc>();
        let page = libc::XDP_UMEM_PGOFF_COMPLETION_RING as libc::off_t;
        Ok(Self {
            tx: map_ring(fd, libc::XDP_PGOFF_TX_RING, &offsets.tx, descs)?,
            completion: map_ring(fd, page, &offsets.cr, entries as usize * 8)?,
        })
    }
}

impl AsFd for RawXsk {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn set<T: Copy>(fd: &OwnedFd, name: libc::c_int, value: T) -> io::Result<()> {
    crate::sock::set(fd.as_fd(), libc::SOL_XDP, name, value)
}

fn map_ring(fd: &OwnedFd, page: libc::off_t, at: &libc::xdp_ring_offset, bytes: usize) -> io::Result<Ring> {
    let map = Mapping::populated(fd.as_fd(), page, at.desc as usize + bytes, READ_WRITE)?;
    let part = |offset: u64| map.as_ptr().wrapping_add(offset as usize);
    Ok(Ring {
        producer: part(at.producer).cast(),
        consumer: part(at.consumer).cast(),
        flags: part(at.flags).cast(),
        descs: part(at.desc),
        index: 0,
        _map: map,
    })
}
