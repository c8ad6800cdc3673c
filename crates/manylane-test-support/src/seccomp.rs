//! Forbids system calls to the calling thread, as a container would.

use std::io;
use std::os::fd::RawFd;

use crate::errno::check;

/// A system call to forbid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syscall {
    /// Making a ring, which container engines forbid.
    UringSetup,
    /// Using a ring.
    UringEnter,
    /// Registering with a ring: the operation, such as 22 for a ring of buffers.
    UringRegister(u32),
    /// `ioctl(2)` with this request.
    Ioctl(u32),
    /// `setsockopt(2)` with this option, of any level.
    SetSocketOption(u32),
    /// `recvmmsg(2)` from this descriptor.
    ReceiveFrom(RawFd),
}

impl Syscall {
    fn number(self) -> libc::c_long {
        match self {
            Self::UringSetup => libc::SYS_io_uring_setup,
            Self::UringEnter => libc::SYS_io_uring_enter,
            Self::UringRegister(_) => libc::SYS_io_uring_register,
            Self::Ioctl(_) => libc::SYS_ioctl,
            Self::SetSocketOption(_) => libc::SYS_setsockopt,
            Self::ReceiveFrom(_) => libc::SYS_recvmmsg,
        }
    }

    /// The argument to check besides the number: its offset in `struct seccomp_data`, and its
    /// value.
    fn argument(self) -> (u32, u32) {
        let low = if cfg!(target_endian = "big") { 4 } else { 0 };
        match self {
            // The first argument, as an `int`, the second and the third.
            Self::ReceiveFrom(fd) => (16 + low, fd as u32),
            Self::UringRegister(what) | Self::Ioctl(what) => (24 + low, what),
            Self::SetSocketOption(what) => (32 + low, what),
            Self::UringSetup | Self::UringEnter => (0, self.number() as u32),
        }
    }
}

/// Makes `call` fail with `EPERM`, for good, in the calling thread and in those that it starts.
///
/// # Errors
/// Those of `prctl(2)`: `EINVAL` without `CONFIG_SECCOMP_FILTER`.
pub fn forbid(call: Syscall) -> io::Result<()> {
    forbid_with_errno(call, libc::EPERM)
}

/// The same with the error `code`: a kernel without the call returns `ENOSYS` or `EINVAL`.
///
/// # Errors
/// As for [`forbid`].
pub fn forbid_with_errno(call: Syscall, code: i32) -> io::Result<()> {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_IF: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    // The number of the call is the first word of `struct seccomp_data`.
    let (at, value) = call.argument();
    let mut program = [
        libc::sock_filter { code: LOAD, jt: 0, jf: 0, k: 0 },
        libc::sock_filter { code: JUMP_IF, jt: 0, jf: 3, k: call.number() as u32 },
        libc::sock_filter { code: LOAD, jt: 0, jf: 0, k: at },
        libc::sock_filter { code: JUMP_IF, jt: 0, jf: 1, k: value },
        libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_ERRNO | code as u32 },
        libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW },
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: takes no pointer.
    check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
    let mode = libc::SECCOMP_MODE_FILTER as libc::c_ulong;
    // SAFETY: the kernel copies the filter and its program, which live across the call.
    check(unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter) })?;
    Ok(())
}
