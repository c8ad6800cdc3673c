//! Sending whole frames from a device (`AF_PACKET`), for tests: what no UDP socket would send.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// A socket that sends frames, with all their headers, from one device.
#[derive(Debug)]
pub struct PacketSocket {
    fd: OwnedFd,
}

impl PacketSocket {
    /// A socket on the device with this index, in the namespace of the calling thread. It receives nothing.
    ///
    /// # Errors
    /// `EPERM` without CAP_NET_RAW, `ENODEV` when there is no such device.
    pub fn open(ifindex: u32) -> io::Result<Self> {
        // Protocol 0: nothing is received.
        // SAFETY: takes no pointer.
        let raw =
            crate::check(unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) })?;
        // SAFETY: the descriptor was made just above and nobody else has it.
        let fd = unsafe { OwnedFd::from_raw_fd(raw) };
        // SAFETY: sockaddr_ll is a C struct of integers, for which all zeroes is a value.
        let mut addr: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        addr.sll_family = libc::AF_PACKET as u16;
        addr.sll_ifindex = i32::try_from(ifindex).map_err(io::Error::other)?;
        let len = size_of_val(&addr) as libc::socklen_t;
        // SAFETY: the kernel reads `len` bytes of `addr`, which lives across the call.
        crate::check(unsafe { libc::bind(fd.as_raw_fd(), (&raw const addr).cast(), len) })?;
        Ok(Self { fd })
    }

    /// Sends one frame.
    ///
    /// # Errors
    /// What `send(2)` reports: `ENETDOWN`, `ENOBUFS`, `EMSGSIZE`.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        // SAFETY: the kernel reads the bytes of `frame`, which is borrowed for the call.
        let sent = unsafe { libc::send(self.fd.as_raw_fd(), frame.as_ptr().cast(), frame.len(), 0) };
        if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}
