//! Busy polling by the kernel: a call that would sleep polls the device first, instead of waiting
//! for its interrupt.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use crate::sock;

const SO_PREFER_BUSY_POLL: libc::c_int = 69;
const SO_BUSY_POLL_BUDGET: libc::c_int = 70;

/// Packets that the kernel processes per poll; more needs a privilege with epoll
/// (`NAPI_POLL_WEIGHT`).
pub const BUDGET_PACKETS: u16 = 64;

/// Makes calls on `socket` poll its device for `micros` microseconds before they sleep
/// (`SO_BUSY_POLL`, Linux 3.11). The device then works in such calls rather than in interrupts,
/// with `budget` packets per poll (`SO_PREFER_BUSY_POLL`, `SO_BUSY_POLL_BUDGET`, Linux 5.11, if
/// the kernel has them; 0 leaves the budget unchanged). 0 microseconds ends it.
///
/// # Errors
/// `EPERM` without CAP_NET_ADMIN (not needed for `SO_BUSY_POLL` alone, up to the sysctl
/// `net.core.busy_read`); `ENOPROTOOPT` in a kernel without busy polling.
pub fn set(socket: BorrowedFd<'_>, micros: u32, budget: u16) -> io::Result<()> {
    let set = |name, value: u32| sock::set(socket, libc::SOL_SOCKET, name, value);
    let optional = |name, value| match set(name, value) {
        Err(err) if err.raw_os_error() == Some(libc::ENOPROTOOPT) => Ok(()),
        result => result,
    };
    set(libc::SO_BUSY_POLL, micros)?;
    optional(SO_PREFER_BUSY_POLL, u32::from(micros > 0))?;
    if micros > 0 && budget > 0 {
        optional(SO_BUSY_POLL_BUDGET, budget.into())?;
    }
    Ok(())
}

/// Checks whether [`set`] works on a socket of this process.
///
/// # Errors
/// As there.
pub fn probe() -> io::Result<()> {
    let fd = sock::open(&([127, 0, 0, 1], 0).into())?;
    set(fd.as_fd(), 50, BUDGET_PACKETS)
}

/// `struct epoll_params` of linux/eventpoll.h.
#[repr(C)]
struct EpollParams {
    usecs: u32,
    budget: u16,
    prefer: u8,
    pad: u8,
}

/// The same for waits on an epoll (`EPIOCSPARAMS`, Linux 6.9), which poll the device of the last
/// event. If that device has an `irq-suspend-timeout` (Linux 6.13), it raises no interrupts while
/// such waits find packets.
pub(crate) fn set_epoll(epoll: BorrowedFd<'_>, usecs: u32, budget: u16) -> io::Result<()> {
    /// `_IOW(0x8A, 1, struct epoll_params)`, on all architectures except MIPS, PowerPC and SPARC.
    const EPIOCSPARAMS: u32 = 1 << 30 | 8 << 16 | 0x8a << 8 | 1;
    const { assert!(size_of::<EpollParams>() == 8) };
    let params = EpollParams { usecs, budget, prefer: 1, pad: 0 };
    // SAFETY: the kernel reads `params`, which lives across the call.
    crate::check(unsafe { libc::ioctl(epoll.as_raw_fd(), EPIOCSPARAMS as _, &raw const params) })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_requested_or_refused_by_name() {
        match probe() {
            Ok(()) => {}
            Err(err) => assert!(matches!(err.raw_os_error(), Some(libc::EPERM | libc::ENOPROTOOPT)), "{err}"),
        }
        let fd = sock::open(&([127, 0, 0, 1], 0).into()).unwrap();
        // A lower value than the current one needs no privilege.
        if set(fd.as_fd(), 0, 0).is_err() {
            assert!(probe().is_err());
        }
    }
}
