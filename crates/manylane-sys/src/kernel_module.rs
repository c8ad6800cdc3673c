//! The kernel module `manylane.ko` (`kernel/manylane_ioctl.h`): a UDP socket with a receive queue
//! for each processor behind one descriptor. For experiments; the library does not use it.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;

const DEVICE: &str = "/dev/manylane";
pub(crate) const VERSION: u32 = 1;

/// The queue of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Policy {
    /// The next one, exactly.
    RoundRobin = 0,
    /// By addresses and ports.
    Flow = 1,
}

/// True if the module is loaded.
#[must_use]
pub fn is_loaded() -> bool {
    Path::new(DEVICE).exists()
}

/// `struct manylane_attach`.
#[repr(C)]
struct Attach {
    version: u32,
    fd: i32,
    policy: u32,
    queues: u32,
    reserved: [u64; 2],
}

/// Gives `socket` the queues, one for each processor that is online, and returns their number. It
/// keeps them until it is closed.
///
/// # Errors
/// `ENOENT` if the module is not loaded; `EACCES` without the right to open its device; `EBUSY` for
/// a socket that has queues already, or another hook.
pub fn attach(socket: BorrowedFd<'_>, policy: Policy) -> io::Result<u32> {
    let device = File::options().read(true).write(true).open(DEVICE)?;
    let args = Attach {
        version: VERSION,
        fd: socket.as_raw_fd(),
        policy: policy as u32,
        queues: 0,
        reserved: [0; 2],
    };
    let number = request::<Attach>(1);
    // SAFETY: the kernel reads `args`, which lives across the call.
    let queues = crate::check(unsafe { libc::ioctl(device.as_raw_fd(), number as _, &raw const args) })?;
    Ok(queues.unsigned_abs())
}

/// `_IOW(0xBD, number, T)`, on all architectures except MIPS, PowerPC and SPARC.
pub(crate) const fn request<T>(number: u32) -> u32 {
    1 << 30 | (size_of::<T>() as u32) << 16 | 0xbd << 8 | number
}

const _: () = assert!(request::<Attach>(1) == 0x4020_bd01);

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::UdpSocket;
    use std::os::fd::AsFd as _;

    #[test]
    fn loopback_a_socket_is_attached_once_if_the_module_is_loaded() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let codes = [0, 1].map(|_| attach(socket.as_fd(), Policy::Flow).map_err(|err| err.raw_os_error()));
        match codes {
            [Ok(queues), again] => {
                assert!(queues > 0);
                assert_eq!(again, Err(Some(libc::EBUSY)));
            }
            [Err(code), _] => assert!(matches!(code, Some(libc::ENOENT | libc::EACCES)), "{code:?}"),
        }
    }
}
