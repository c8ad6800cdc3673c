//! Random bytes from the kernel: getrandom(2), Linux 3.17.

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};

/// Bytes that nobody can predict. Waits only during boot, until the kernel has enough of them.
///
/// # Errors
/// `ENOSYS` if a seccomp filter forbids the call.
pub fn bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut left = &mut bytes[..];
    while !left.is_empty() {
        let done = getrandom(&mut *left, GetRandomFlags::empty())?;
        left = &mut left[done..];
    }
    Ok(bytes)
}
