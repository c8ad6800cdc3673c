//! Forbidding system calls to the calling thread, as a container would: for tests of what happens then.

use std::io;

/// What can be forbidden.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Making a ring: what container engines forbid.
    UringSetup,
    /// Using one.
    UringEnter,
}

impl Call {
    fn number(self) -> libc::c_long {
        match self {
            Self::UringSetup => libc::SYS_io_uring_setup,
            Self::UringEnter => libc::SYS_io_uring_enter,
        }
    }
}

/// Lets `call` fail with `EPERM` from now on, in the calling thread and in those that it starts, for good.
///
/// # Errors
/// What `prctl(2)` reports: `EINVAL` without `CONFIG_SECCOMP_FILTER`.
pub fn forbid(call: Call) -> io::Result<()> {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_IF: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    // The number of the call is the first word of `struct seccomp_data`.
    let mut program = [
        libc::sock_filter { code: LOAD, jt: 0, jf: 0, k: 0 },
        libc::sock_filter { code: JUMP_IF, jt: 0, jf: 1, k: call.number() as u32 },
        libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_ERRNO | libc::EPERM as u32 },
        libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW },
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: takes no pointer.
    crate::check(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) })?;
    let mode = libc::SECCOMP_MODE_FILTER as libc::c_ulong;
    // SAFETY: the kernel copies the filter and its program, which live across the call.
    crate::check(unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter) })?;
    Ok(())
}
