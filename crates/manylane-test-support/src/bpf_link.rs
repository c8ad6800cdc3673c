//! Links between eBPF programs and their attach points, for processes other than the owner.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::errno::check;

const LINK_GET_FD_BY_ID: libc::c_long = 30;
const LINK_DETACH: libc::c_long = 34;

/// Detaches the link with this id, whichever process owns it, like `bpftool link detach id` (Linux
/// 5.9).
///
/// # Errors
/// `ENOENT` if there is no such link; `EPERM` without CAP_SYS_ADMIN; `EOPNOTSUPP` for a link that
/// cannot be detached.
pub fn detach(id: u32) -> io::Result<()> {
    let raw = bpf(LINK_GET_FD_BY_ID, id)?;
    // SAFETY: bpf(2) has just returned this new descriptor; this value is its only owner.
    let link = unsafe { OwnedFd::from_raw_fd(raw) };
    bpf(LINK_DETACH, link.as_raw_fd() as u32).map(drop)
}

/// A bpf(2) command with one word of attributes.
fn bpf(command: libc::c_long, word: u32) -> io::Result<libc::c_int> {
    // The kernel fills the remaining attributes with zeros.
    // SAFETY: the kernel reads `size_of_val(&word)` bytes of a word that lives across the call.
    check(unsafe { libc::syscall(libc::SYS_bpf, command, &raw const word, size_of_val(&word)) } as libc::c_int)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detaching_an_absent_link_fails() {
        let err = detach(u32::MAX).unwrap_err().raw_os_error();
        assert!(matches!(err, Some(libc::ENOENT | libc::EPERM)), "{err:?}");
    }
}
