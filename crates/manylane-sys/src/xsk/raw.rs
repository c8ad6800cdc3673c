//! A minimal hand-written receiver on raw AF_XDP rings, as a baseline for measurements.
//!
//! One socket on one queue, in copy mode or in the driver's mode, with frames of 2 KiB. Each batch
//! is read and returned at once, or sent back in its own frames. It keeps no frames and checks
//! nothing. It shares only the system calls with the other files.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use libc::{xdp_desc, xdp_ring_offset};

use super::socket::{DESC_SIZE, Socket, XDP_MAX_TX_SKB_BUDGET, bind_with_flags};
use super::wakeup::{KickOutcome, RingWakeup as _};
use crate::map::Mapping;

const FRAME_SIZE: u64 = 2048;
/// Calls without progress after which sending is deferred.
const IDLE_KICKS_MAX: u32 = 2;

/// The receiver.
pub struct RawXsk {
    rx: Ring,
    fill: Ring,
    /// The send side, for a receiver that replies.
    tx_rings: Option<TxRings>,
    /// Before the frames, which have to be mapped until it is closed.
    socket: Socket,
    umem: Mapping,
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
    fn map(socket: &Socket, page: u64, at: &xdp_ring_offset, entries: u32, each: usize) -> io::Result<Self> {
        let map = socket.map_ring(page, at, entries, each)?;
        let part = |offset: u64| map.as_ptr().wrapping_add(offset as usize);
        Ok(Self {
            producer: part(at.producer).cast(),
            consumer: part(at.consumer).cast(),
            flags: part(at.flags).cast(),
            descs: part(at.desc),
            index: 0,
            _map: map,
        })
    }

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
    /// send side if it `replies`.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn open(ifindex: u32, queue: u32, entries: u32, replies: bool) -> io::Result<Self> {
        let umem = Mapping::new(entries as usize * FRAME_SIZE as usize)?;
        let socket = Socket::open()?;
        // SAFETY: page aligned and zeroed; here and in the value, the socket is closed first.
        unsafe { socket.register(umem.as_ptr(), umem.len() as u64, FRAME_SIZE as u32)? };
        socket.set(libc::XDP_UMEM_FILL_RING, entries)?;
        socket.set(libc::XDP_UMEM_COMPLETION_RING, if replies { entries } else { 64 })?;
        socket.set(libc::XDP_RX_RING, entries)?;
        if replies {
            socket.set(libc::XDP_TX_RING, entries)?;
            // An older kernel sends in smaller portions, and is called more often.
            let _ = socket.set(XDP_MAX_TX_SKB_BUDGET, entries);
        }
        let (at, _) = socket.offsets()?;
        let descs = |page, at| Ring::map(&socket, page as u64, at, entries, DESC_SIZE);
        let addrs = |page, at| Ring::map(&socket, page, at, entries, size_of::<u64>());
        let rx = descs(libc::XDP_PGOFF_RX_RING, &at.rx)?;
        let mut fill = addrs(libc::XDP_UMEM_PGOFF_FILL_RING, &at.fr)?;
        for index in 0..entries {
            // SAFETY: `index` is below the entries that the mapping was made for, and only this
            // thread writes them.
            unsafe { fill.descs.cast::<u64>().add(index as usize).write(u64::from(index) * FRAME_SIZE) };
        }
        fill.index = entries;
        fill.produce();
        let tx_rings = if replies {
            let completion = addrs(libc::XDP_UMEM_PGOFF_COMPLETION_RING, &at.cr)?;
            Some(TxRings { tx: descs(libc::XDP_PGOFF_TX_RING, &at.tx)?, completion })
        } else {
            None
        };
        bind_with_flags(socket.as_fd(), (ifindex, queue), libc::XDP_USE_NEED_WAKEUP, 0)?;
        Ok(Self { rx, fill, tx_rings, socket, umem, entries })
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
                let desc = &*self.rx.descs.cast::<xdp_desc>().add(from);
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
                let desc = *self.rx.descs.cast::<xdp_desc>().add((self.rx.index & mask) as usize);
                let packet = self.umem.as_ptr().add(desc.addr as usize);
                if each(std::slice::from_raw_parts_mut(packet, desc.len as usize)) {
                    let to = (out.tx.index & mask) as usize;
                    out.tx.descs.cast::<xdp_desc>().add(to).write(xdp_desc { options: 0, ..desc });
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
        let (mut idle, mut hidden) = (0, 0);
        while idle < IDLE_KICKS_MAX {
            let Some(out) = &self.tx_rings else { return Ok(()) };
            let before = out.tx.consumed();
            // SAFETY: the word is in the mapping, which lives as long as the value.
            let flags = unsafe { (*out.tx.flags).load(Ordering::Relaxed) };
            if before == out.tx.index || flags & libc::XDP_RING_NEED_WAKEUP == 0 {
                return Ok(());
            }
            let outcome = self.socket.send()?;
            if outcome == KickOutcome::Down {
                return Ok(());
            }
            if outcome == KickOutcome::Partial && hidden < out.tx.index.wrapping_sub(before) {
                // Progress that the ring does not show yet: see `kick` of a queue.
                hidden += self.socket.tx_budget();
                continue;
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

impl AsFd for RawXsk {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
