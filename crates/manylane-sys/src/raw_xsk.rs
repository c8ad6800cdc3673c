//! A minimal receiver on raw AF_XDP rings: what a good engineer writes by hand, to measure ours against.
//!
//! One socket on one queue, in copy mode or as the driver likes; frames of 2 KiB; each batch is looked at and given
//! back at once. No sending, no frame that is held, no check of anything. It shares no code with [`xsk`](crate::xsk).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::map::Mapping;

const FRAME: u64 = 2048;

/// The receiver.
pub struct RawXsk {
    rx: Ring,
    fill: Ring,
    umem: Mapping,
    fd: OwnedFd,
    entries: u32,
}

// SAFETY: the rings point into mappings that the value owns and that move with it.
unsafe impl Send for RawXsk {}

/// One ring: where the kernel has mapped its parts.
struct Ring {
    producer: *const AtomicU32,
    consumer: *const AtomicU32,
    descs: *mut u8,
    base: *mut libc::c_void,
    len: usize,
    /// Our own index: consumer of the RX ring, producer of the fill ring.
    at: u32,
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mmap in `ring`, and the pointers go with this value.
        unsafe { libc::munmap(self.base, self.len) };
    }
}

impl RawXsk {
    /// Binds to `queue` of the device `ifindex`, with rings of `entries`, a power of two.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn open(ifindex: u32, queue: u32, entries: u32) -> io::Result<Self> {
        // SAFETY: takes no pointer.
        let raw =
            crate::check(unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) })?;
        // SAFETY: the descriptor was made just above and nobody else has it.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        let umem = Mapping::new(entries as usize * FRAME as usize)?;
        let register = libc::xdp_umem_reg {
            addr: umem.as_ptr() as u64,
            len: umem.len() as u64,
            chunk_size: FRAME as u32,
            headroom: 0,
            flags: 0,
            tx_metadata_len: 0,
        };
        set(&fd, libc::XDP_UMEM_REG, register)?;
        set(&fd, libc::XDP_UMEM_FILL_RING, entries)?;
        set(&fd, libc::XDP_UMEM_COMPLETION_RING, 64_u32)?;
        set(&fd, libc::XDP_RX_RING, entries)?;
        // SAFETY: a C struct of integers, for which all zeroes is a value.
        let mut offsets: libc::xdp_mmap_offsets = unsafe { std::mem::zeroed() };
        let mut len = size_of_val(&offsets) as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes into `offsets`, which lives across the call.
        crate::check(unsafe {
            let to = (&raw mut offsets).cast();
            libc::getsockopt(fd.as_raw_fd(), libc::SOL_XDP, libc::XDP_MMAP_OFFSETS, to, &raw mut len)
        })?;
        let rx =
            ring(&fd, libc::XDP_PGOFF_RX_RING, &offsets.rx, entries as usize * size_of::<libc::xdp_desc>())?;
        let fill_page = libc::XDP_UMEM_PGOFF_FILL_RING as libc::off_t;
        let mut fill = ring(&fd, fill_page, &offsets.fr, entries as usize * 8)?;
        for index in 0..entries {
            // SAFETY: `index` is below the entries that the mapping was made for, and nobody else writes them.
            unsafe { fill.descs.cast::<u64>().add(index as usize).write(u64::from(index) * FRAME) };
        }
        fill.at = entries;
        // SAFETY: the word lies in the mapping, which lives.
        unsafe { (*fill.producer).store(entries, Ordering::Release) };
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
        Ok(Self { rx, fill, umem, fd, entries })
    }

    /// Shows each of up to `most` received frames to `each`, gives them back, and returns how many there were.
    #[inline]
    pub fn receive(&mut self, most: u32, mut each: impl FnMut(&[u8])) -> u32 {
        // SAFETY: the word lies in the mapping, which lives.
        let there = unsafe { (*self.rx.producer).load(Ordering::Acquire) }.wrapping_sub(self.rx.at);
        let taken = there.min(most);
        if taken == 0 {
            return 0;
        }
        let mask = self.entries - 1;
        for _ in 0..taken {
            let (from, to) = ((self.rx.at & mask) as usize, (self.fill.at & mask) as usize);
            // SAFETY: masked indices lie in the rings. The kernel has published this descriptor (acquire above), and
            // its frame is ours until it is in the fill ring; there is always room there, since there are no more
            // frames than entries. The kernel's addresses and lengths lie in the UMEM.
            unsafe {
                let desc = &*self.rx.descs.cast::<libc::xdp_desc>().add(from);
                let packet = self.umem.as_ptr().add(desc.addr as usize);
                each(std::slice::from_raw_parts(packet, desc.len as usize));
                self.fill.descs.cast::<u64>().add(to).write(desc.addr & !(FRAME - 1));
            }
            self.rx.at = self.rx.at.wrapping_add(1);
            self.fill.at = self.fill.at.wrapping_add(1);
        }
        // SAFETY: the words lie in mappings that live. Release: our reads and writes of the entries come before.
        unsafe {
            (*self.rx.consumer).store(self.rx.at, Ordering::Release);
            (*self.fill.producer).store(self.fill.at, Ordering::Release);
        }
        taken
    }

    /// Sleeps until something is there, for at most `millis`. In zero-copy mode it also tells the driver of frames to
    /// fill.
    pub fn wait(&self, millis: i32) {
        let mut poll = libc::pollfd { fd: self.fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: the kernel reads and writes one pollfd, which lives across the call.
        unsafe { libc::poll(&raw mut poll, 1, millis) };
    }
}

impl AsFd for RawXsk {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn set<T>(fd: &OwnedFd, name: libc::c_int, value: T) -> io::Result<()> {
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes of `value`, which lives across the call.
    crate::check(unsafe {
        libc::setsockopt(fd.as_raw_fd(), libc::SOL_XDP, name, (&raw const value).cast(), len)
    })?;
    Ok(())
}

fn ring(fd: &OwnedFd, page: libc::off_t, at: &libc::xdp_ring_offset, bytes: usize) -> io::Result<Ring> {
    let len = at.desc as usize + bytes;
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_POPULATE);
    // SAFETY: a new shared mapping at an address of the kernel's choice touches no memory of ours.
    let base = unsafe { libc::mmap(ptr::null_mut(), len, protection, flags, fd.as_raw_fd(), page) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let part = |offset: u64| base.cast::<u8>().wrapping_add(offset as usize);
    Ok(Ring {
        producer: part(at.producer).cast(),
        consumer: part(at.consumer).cast(),
        descs: part(at.desc),
        base,
        len,
        at: 0,
    })
}
