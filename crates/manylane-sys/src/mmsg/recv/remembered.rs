//! Receiving by count, into headers that the kernel module remembers (`MANYLANE_REGISTER` of
//! `kernel/manylane_ioctl.h`): no header is copied into the kernel.

use std::io;
use std::net::UdpSocket;
use std::os::fd::AsRawFd;

use super::{RecvOptions, RecvRing, Wait};
use crate::kernel_module::{VERSION, request};
use crate::map::PinnedSlice;

/// `struct manylane_register`.
#[repr(C)]
struct Register {
    version: u32,
    count: u32,
    headers: u64,
    results: u64,
    reserved: [u64; 2],
}

/// `struct manylane_result`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Received {
    control_len: u64,
    len: u32,
    name_len: u32,
    flags: u32,
    reserved: u32,
}

/// `struct manylane_receive`.
#[repr(C)]
struct Receive {
    first: u32,
    count: u32,
    flags: u32,
    reserved: u32,
}

const REGISTER: u32 = request::<Register>(2);
const RECEIVE: u32 = request::<Receive>(3);
const _: () = assert!(REGISTER == 0x4028_bd02 && RECEIVE == 0x4010_bd03 && size_of::<Received>() == 24);

/// A socket, and a ring whose headers the kernel remembers for it.
pub struct RememberedRing {
    socket: UdpSocket,
    ring: RecvRing,
    results: PinnedSlice<Received>,
}

impl RememberedRing {
    /// Registers a new ring with `socket`, which has to be attached to the kernel module. No other
    /// ring may have it.
    ///
    /// # Errors
    /// Those of [`RecvRing::new`]; `ENOTTY` for a socket that is not attached.
    pub fn new(socket: UdpSocket, options: RecvOptions) -> io::Result<Self> {
        let ring = RecvRing::new(options)?;
        let results = PinnedSlice::new(Received::default(), ring.capacity());
        // It forgets the headers when it is dropped, also after an error.
        let new = Self { socket, ring, results };
        new.register(new.ring.capacity() as u32)?;
        Ok(new)
    }

    fn register(&self, count: u32) -> io::Result<()> {
        let args = Register {
            version: VERSION,
            count,
            headers: self.ring.headers.ptr_at(0) as u64,
            results: self.results.ptr_at(0) as u64,
            reserved: [0; 2],
        };
        // SAFETY: the kernel reads `args`, and the headers that it names. It writes to buffers and
        // results only during `recv`.
        crate::check(unsafe { libc::ioctl(self.socket.as_raw_fd(), REGISTER as _, &raw const args) })?;
        Ok(())
    }

    /// As [`RecvRing::recv`].
    ///
    /// # Errors
    /// Those of `recvmmsg(2)`, except "nothing queued" and "interrupted".
    #[inline]
    pub fn recv(&mut self, wait: Wait) -> io::Result<usize> {
        let flags = match wait {
            Wait::Never => libc::MSG_DONTWAIT,
            Wait::First => libc::MSG_WAITFORONE,
        };
        let args = Receive { first: 0, count: self.ring.capacity() as u32, flags: flags as u32, reserved: 0 };
        // SAFETY: the kernel reads `args`, and writes to the memory that was registered: that of
        // this ring, which is borrowed for the call.
        let ret = unsafe { libc::ioctl(self.socket.as_raw_fd(), RECEIVE as _, &raw const args) };
        match crate::check(ret) {
            Ok(count) => Ok(count.unsigned_abs() as usize),
            Err(err) if matches!(err.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Ok(0),
            Err(err) => Err(err),
        }
    }

    /// The bytes of message `index` of the last receive.
    #[inline]
    #[must_use]
    pub fn data(&self, index: usize) -> &[u8] {
        assert!(index < self.ring.capacity());
        // SAFETY: an element of the ring's own allocation; the kernel writes to it only during
        // `recv`, which needs `&mut self`.
        let len = unsafe { (*self.results.ptr_at(index)).len as usize };
        let start = self.ring.buffers.as_ptr().wrapping_add(index * self.ring.stride);
        // SAFETY: the buffer is inside the mapping, which started zeroed; as for the length.
        unsafe { std::slice::from_raw_parts(start, len.min(self.ring.buffer)) }
    }
}

impl Drop for RememberedRing {
    fn drop(&mut self) {
        // Before the memory is freed: another descriptor of the socket may stay open.
        let _ = self.register(0);
    }
}
